"""One device of `scaling.py`: trains a plain network, and counts what it sends to others.

        _scaled.py serve --parameters N SOCKET             trains on requests of the driver
        _scaled.py run --parameters N --steps N FOLDER     trains, and writes its times to FOLDER

It counts the traffic at the boundary of the exchange: tensors passed to torch.distributed, bytes
written to shared memory, bytes read by the ordered addition, and frames between processes. The
program itself is unchanged; the functions at the boundary are replaced by counting ones.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.core import flat
from onefold.core.fold import published_by
from onefold.core.settings import PRECISIONS, PrecisionName
from onefold.exchange import memory
from onefold.exchange.collective import CollectiveTransport
from onefold.exchange.collective_memory import CollectiveMemory
from onefold.exchange.exchange import Exchange
from onefold.exchange.mailbox import Mailbox
from onefold.exchange.reduction import BlockReduction
from onefold.exchange.shared import SharedMemory
from onefold.launcher.environment import current_context

__all__ = ["OPTIMIZERS", "Traffic", "Training", "main", "memory_bytes_per_s", "new_model"]

CLASSES = 10
LAYERS = 5
BATCH_SIZE = 64
WARM_UP_STEPS = 2
SMALL_PARAMETERS = 2000
TRIAL_BYTES = 16 << 20


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with one state tensor per parameter."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two state tensors per parameter."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


OPTIMIZERS = {"momentum": momentum, "adamw": adamw}


def new_model(parameters: int) -> nn.Sequential:
    """Make a plain network of about this many parameters, with one layer that has buffers."""
    width = width_of(parameters)
    hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.BatchNorm1d(width), *hidden, nn.Linear(width, CLASSES))


def width_of(parameters: int) -> int:
    """Return the number of features of its hidden layers."""
    return max(1, round(math.sqrt(parameters / LAYERS)))


class Traffic:
    """Counts what this process sends to others while it watches."""

    def __init__(self) -> None:
        self.amounts: Counter[str] = Counter()
        """Bytes by purpose, and messages."""
        self._phase = "collect"

    def watch(self) -> None:
        """Count from here on, permanently."""
        for name in ("start_step", "collect"):
            _before(CollectiveMemory, name, functools.partial(self._enter, "collect"))
        # State on the host travels with the rows, so only buffers remain of the shards' tables.
        _before(CollectiveMemory, "_rows_to_move", functools.partial(self._enter, "buffers"))
        _before(CollectiveMemory, "publish_parameters", functools.partial(self._enter, "publish"))
        _before(Exchange, "agree", functools.partial(self._enter, "table"))
        _before(CollectiveTransport, "move", self._count_sends)
        _before(dist, "all_gather", self._count_gather)
        _before(SharedMemory, "publish", functools.partial(self._enter, "written"))
        _before(SharedMemory, "collect", functools.partial(self._enter, "collect"))
        for module in (flat, memory):
            _before(module, "copy_each", self._count_copied)
        _before(BlockReduction, "collect", self._count_added)
        _before(Mailbox, "_send", self._count_frame)

    def _enter(self, phase: str, *_: object) -> None:
        self._phase = phase

    def _count_sends(self, _exchange: object, operations: Sequence[Any]) -> None:
        for operation in operations:
            if operation.sends and operation.part.numel():
                # Trained parameters are sent in chunks; rows and totals are not.
                in_table = operation.chunk is None and self._phase != "buffers"
                self.amounts["table" if in_table else self._phase] += operation.part.nbytes
                self.amounts["messages"] += 1

    def _count_gather(self, parts: Sequence[torch.Tensor], own: torch.Tensor, **_: object) -> None:
        head = self._phase == "table"  # otherwise norms, few bytes next to buffers
        self.amounts["table" if head else "buffers"] += own.nbytes * (len(parts) - 1)
        self.amounts["messages"] += len(parts) - 1

    def _count_copied(self, targets: Sequence[torch.Tensor], *_: object) -> None:
        if self._phase == "written":
            self.amounts["written"] += sum(target.nbytes for target in targets)

    def _count_added(self, reduction: BlockReduction, shares: Any) -> None:
        published = published_by(shares).values()
        # A single partial sum is already the total.
        for place in published if len(published) > 1 else ():
            partial = reduction.memory.partial(place)
            summed = (reduction.memory.summed[number] for number in reduction.memory.trained)
            chunks = chain.from_iterable(summed)
            self.amounts["added"] += sum(partial.chunk(chunk).nbytes for chunk in chunks)

    def _count_frame(self, _mailbox: object, _peer: object, frame: bytes) -> None:
        self.amounts["frames"] += len(frame)
        self.amounts["messages"] += 1


def _before(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Call `note` with the same arguments before every call of `owner`'s function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, noted)


class Training:
    """The network in training, created at its first step."""

    def __init__(
        self, parameters: int, shards: int, optimizer: str, precision: PrecisionName | None
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._precision = precision
        self.shards = shards

    def of_size(self, parameters: int) -> Training:
        """Return the same training for another network."""
        return Training(parameters, self.shards, self._optimizer, self._precision)

    def step(self) -> onefold.Step:
        """One update."""
        return self._trainer.step(self._batch)

    @functools.cached_property
    def _trainer(self) -> onefold.Trainer:
        torch.manual_seed(0)
        model = new_model(self._parameters)
        optimizer = OPTIMIZERS[self._optimizer](model)
        return onefold.Trainer(
            model, optimizer, losses, shards=self.shards, threads=1, precision=self._precision
        )

    @functools.cached_property
    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same samples in every step and on every device."""
        torch.manual_seed(0)
        inputs = torch.randn(BATCH_SIZE, width_of(self._parameters))
        return inputs, torch.randint(CLASSES, (BATCH_SIZE,))


def losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the loss of every sample of a shard."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def serve(training: Training, path: Path) -> None:
    """Serve requests of the driver at `path` until it disconnects.

    A small network is trained first, so that libraries, threads and connections are already
    included when the memory of the large network is measured. After every answer, the counts and
    this process's ID are in a file next to the socket.
    """
    training.of_size(SMALL_PARAMETERS).step()
    traffic = Traffic()
    traffic.watch()
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))
        with link.makefile("rw", encoding="utf-8") as lines:
            for line in lines:
                traffic.amounts.clear()
                done = train(training, int(line))
                _write(path.parent, {"pid": os.getpid(), "amounts": dict(traffic.amounts)})
                lines.write(json.dumps(done) + "\n")
                lines.flush()


def train(training: Training, steps: int) -> dict[str, float]:
    """Run `steps` steps; return their seconds, CPU seconds, and the loss of the last."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    loss = 0.0
    for _ in range(steps):
        loss = training.step().loss.item()
    seconds, cpu_seconds = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": loss}


def run(training: Training, steps: int, folder: Path) -> None:
    """Train, and write the exchange time of each step."""
    for _ in range(WARM_UP_STEPS):
        training.step()
    seconds = [training.step().seconds.exchange for _ in range(steps)]
    _write(folder, {"exchange_s": seconds, "memory_bytes_per_s": memory_bytes_per_s()})


def memory_bytes_per_s() -> float:
    """Measure how fast a process adds one tensor to another, in bytes of either; best of ten."""
    total, part = torch.zeros(2, TRIAL_BYTES // torch.float32.itemsize)
    times_s = []
    for _ in range(10):
        start_s = time.perf_counter()
        total.add_(part)
        times_s.append(time.perf_counter() - start_s)
    return TRIAL_BYTES / min(times_s)


def _write(folder: Path, found: dict[str, Any]) -> None:
    rank = current_context().rank
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["serve", "run"])
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="momentum")
    parser.add_argument("--precision", choices=PRECISIONS)
    parser.add_argument("path", type=Path, help="socket of the driver, or folder for the result")
    args = parser.parse_args()
    torch.set_num_threads(1)
    training = Training(args.parameters, args.shards, args.optimizer, args.precision)
    if args.mode == "serve":
        serve(training, args.path)
    else:
        run(training, args.steps, args.path)


if __name__ == "__main__":
    main()
