"""A step of a model that is compiled."""

import torch

import onefold


def squares(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean(1)


torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = onefold.Trainer(model, optimizer, squares, shards=2, compile=True)
trainer.step(torch.ones(4, 4))
if trainer.is_lead:
    print(trainer.fingerprint())
