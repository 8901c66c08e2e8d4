"""Trains with two workers of Ray Train: ``with_ray.py FOLDER``, where it leaves the fingerprint."""

from __future__ import annotations

import sys
from pathlib import Path

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn


def train(config: dict[str, str]) -> None:
    import onefold

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean(dim=1)

    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1)
    loader = trainer.loader(torch.randn(20, 8), batch_size=8, shuffle=True)
    for _ in trainer.epochs(2):
        for batch in loader:
            trainer.step(batch)
    bits = trainer.fingerprint()
    if trainer.is_lead and len(trainer.devices) == 2:
        Path(config["folder"], "bits").write_text(bits)
    trainer.close()


if __name__ == "__main__":
    folder = sys.argv[1]
    ray.init(num_cpus=4, include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=f"{folder}/ray"),
    ).fit()
