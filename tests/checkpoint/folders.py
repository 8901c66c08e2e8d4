"""What tests of checkpoints save and look at, and a disk that is full."""

import hashlib
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.record import FILE


class Tied(nn.Module):
    """Two names for one parameter, empty, turned and scalar tensors, buffers of several kinds."""

    passing: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5, bias=False)
        self.decoder.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.frozen.requires_grad_(False)
        for name, value in {"none": torch.zeros(0, 3), "turned": torch.randn(4, 2).t()}.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        self.register_buffer("short", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("wave", torch.tensor([1 + 2j]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("passing", torch.randn(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.norm(self.embedding(tokens)))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def steps_in(directory: Path) -> list[int]:
    """The steps of the checkpoints in a directory, which holds a record at most beside them."""
    names = names_in(directory) - {FILE}
    return sorted(int(name.removeprefix("step-")) for name in names)


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """No file may grow beyond the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def seal(folder: Path, text: str) -> None:
    """Write a ``run.json`` whose digest is right; its text has zeros in the digest's place."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "run.json").write_text(text.replace("0" * 64, digest, 1))


def reseal(folder: Path, **changes: Any) -> None:
    """Have a checkpoint say something else, with digests that are right for its files as they are.

    Args:
        folder: of the checkpoint.
        changes: of what ``run.json`` says, by name.
    """
    record = json.loads((folder / "run.json").read_text())
    for name, said in record["files"].items():
        content = (folder / name).read_bytes()
        said |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    seal(folder, json.dumps({**record, **changes, "sha256": "0" * 64}, indent=2) + "\n")
