"""Trains a model whose activations are small, and prints how much memory of its device it took."""

import sys

import torch

import onefold

LAYERS, WIDTH, STEPS = 8, 500, 5


def main(shards: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = onefold.Trainer(model, optimizer, loss, shards=shards, threads=1)
    for _ in range(STEPS):
        trainer.step(torch.randn(shards, WIDTH))
    index = torch.accelerator.current_device_index()
    peaks = trainer.gather({"peak": torch.accelerator.max_memory_allocated(index)})
    if trainer.is_lead:
        print(max(device["peak"] for device in peaks), flush=True)


def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
