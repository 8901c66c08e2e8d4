"""A script configured by hydra, with a plain loop."""

import hydra
import torch.nn.functional as F
from ecosystem.common import BATCH, network, points, report
from torch.utils.data import DataLoader, TensorDataset


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config):
    model = network()
    optimizer = hydra.utils.instantiate(config.optimizer, model.parameters())
    loader = DataLoader(TensorDataset(*points()), batch_size=BATCH)
    for _ in range(config.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    report(model)


if __name__ == "__main__":
    main()
