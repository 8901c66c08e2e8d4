"""Counts calls in a loss, a hook, an optimizer or a score, which only ``onefold verify`` finds.

Each of the four Trainers counts in another place, in this order.
"""

from typing import Any

import torch

import onefold

DATA = torch.utils.data.TensorDataset(
    torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
)


class Count:
    """Returns one number more in each call; always 1 where it is not used."""

    def __init__(self, used: bool) -> None:
        self.used, self.calls = used, 0

    def __call__(self) -> float:
        self.calls += self.used
        return 1 + self.calls / 64


class Counting(torch.optim.SGD):
    count: Count

    def step(self, closure: Any = None) -> None:
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.grad is not None:
                parameter.grad.mul_(self.count())
        super().step()


def train(place: str) -> None:
    in_loss, in_hook, in_score = (Count(place == name) for name in ("loss", "hook", "score"))

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).square().mean(dim=1) * in_loss()

    def score(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": model(batch[0]).square().mean(dim=1) * in_score()}

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    model[0].register_forward_hook(lambda module, given, output: output * in_hook())
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.count = Count(place == "optimizer")
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1)
    for batch in trainer.loader(DATA, batch_size=16):
        trainer.step(batch)
        trainer.evaluate(score, DATA, batch_size=8)
    trainer.close()


for each in ("loss", "hook", "optimizer", "score"):
    train(each)
