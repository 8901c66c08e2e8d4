"""What devices report to each other between steps; called on each device of a run."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch

import onefold
from tests.small import make_trainer, points

NAN = float(np.uint64(0x7FF8DEADBEEF0001).view(np.float64))


def mine(rank: int) -> dict[str, Any]:
    """A value of every kind, other ones on every device."""
    return {
        "none": None,
        "truth": rank % 2 == 1,
        "whole": 2 ** (70 + rank),
        "float": [NAN, -0.0, math.inf, 0.1 * rank],
        "text": "é\n" * rank + "\0\ud800",
        "bytes": bytes(range(256)) * rank,
        "tuple": ((), [rank, (rank,)], {}),
        "tensor": torch.arange(50_000 * rank, dtype=torch.bfloat16).view(-1, 5).t(),
        "scalar": torch.tensor(1.5 + rank, requires_grad=True),
        "array": np.arange(6, dtype=">i2").reshape(2, 3)[:, ::-1],
        "number": np.float32(0.1),
    }


def shown(value: Any) -> str:
    """With every bit and every type."""
    if isinstance(value, dict):
        return str({key: shown(each) for key, each in value.items()})
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[shown(each) for each in value]}"
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {plain.hex()} {value.device}"
    if isinstance(value, np.ndarray | np.generic):
        return f"{type(value).__name__} {value.dtype.str} {value.shape} {value.tobytes().hex()}"
    if isinstance(value, float):
        return np.float64(value).tobytes().hex()
    return f"{type(value).__name__} {value!r}"


def exchanged() -> tuple[list[str], str, str, list[dict[str, float]]]:
    trainer = make_trainer(devices=None)
    rank = int(os.environ.get("RANK", "0"))
    trainer.step(points(8))
    trainer.barrier()
    gathered = trainer.gather(mine(rank))
    sent = trainer.broadcast(mine(rank + 2)) if rank == 0 else trainer.broadcast()
    trainer.step(points(8))
    numbers = trainer.gather({"rank": rank})
    fingerprint = trainer.fingerprint()
    trainer.close()
    return [shown(value) for value in gathered], shown(sent), fingerprint, numbers


def late() -> None:
    trainer = make_trainer(devices=None)
    if os.environ["RANK"] == "1":
        return
    trainer.barrier()


def not_sendable_on_one() -> None:
    trainer = make_trainer(devices=None)
    trainer.gather({"value": object() if os.environ["RANK"] == "1" else 1})


def not_sendable_by_the_lead() -> None:
    make_trainer(devices=None).broadcast({"model": torch.nn.Linear(1, 1)})


def drawing(forks: bool) -> str:
    """The lead draws random numbers between steps, and batches are drawn by the script."""
    trainer = make_trainer(devices=None)
    torch.manual_seed(5)
    inputs, targets = points(40)
    for _ in range(3):
        rows = torch.randint(40, (8,))
        trainer.step((inputs[rows], targets[rows]))
        if trainer.is_lead and forks:
            with trainer.fork_rng():
                _draw()
        elif trainer.is_lead:
            _draw()
    result = trainer.fingerprint()
    trainer.close()
    return result


def _draw() -> None:
    torch.rand(3)
    np.random.normal()
    __import__("random").random()


def exchange_of(script: Any, exchange: Any, *args: Any) -> Any:
    return onefold.launch(script, devices="cpu:3", exchange=exchange, args=args, timeout_s=300)
