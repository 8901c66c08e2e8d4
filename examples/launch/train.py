"""Trains a small network on random data. Every launch file in this folder starts this script.

It contains nothing about devices, hosts, checkpoints or signals: the launch files set these.
"""

import torch

import onefold


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return onefold.losses.cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(2000, 20)
    data = torch.utils.data.TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    trainer = onefold.Trainer(model, optimizer, loss, shards=8, seed=0)
    loader = trainer.loader(data, batch_size=100, shuffle=True)
    for epoch in trainer.epochs(10):
        for batch in loader:
            step = trainer.step(batch)
        print(epoch, f"{float(step.loss):.4f}", trainer.fingerprint())
    trainer.close()  # saves the end; required only where the process outlives main, as on Ray


if __name__ == "__main__":
    main()
