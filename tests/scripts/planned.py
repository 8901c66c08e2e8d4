"""Makes a Trainer of a model with stages of two sizes, or does what its argument says instead."""

import sys

import torch
from torch import nn

import onefold

what = sys.argv[1]
if what == "none":
    sys.exit(0)
if what == "broken":
    raise ArithmeticError("the fault that was asked for")


class Own(torch.optim.SGD):
    """Not PyTorch's."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 256)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
        self.norm = nn.BatchNorm1d(256)
        self.frozen = nn.Linear(256, 256).requires_grad_(False)


model = onefold.build(Model)
kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "own": Own, "lbfgs": torch.optim.LBFGS}
optimizer = kinds.get(what, torch.optim.AdamW)(model.parameters(), lr=0.1)
precision = "bf16-params" if what == "bf16" else None
onefold.Trainer(
    model,
    optimizer,
    lambda m, b: m(b),
    shards=int(what) if what.isdecimal() else 4,
    precision=precision,
)
print("nothing after it runs")
sys.exit(3)
