"""The script with onefold, inside the function that hydra calls."""

import hydra
import torch.nn.functional as F
from ecosystem.common import BATCH, SHARDS, network, points, report
from torch.utils.data import TensorDataset

import onefold


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config):
    model = network()
    optimizer = hydra.utils.instantiate(config.optimizer, model.parameters())
    trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
    loader = trainer.loader(TensorDataset(*points()), batch_size=BATCH)
    for _ in trainer.epochs(config.epochs):
        for batch in loader:
            trainer.step(batch)
    report(model)


if __name__ == "__main__":
    main()
