"""Records what a run computes, on the lead, during training.

Note: no waiting
----------------
A GPU's results of a step are copied to the host after the step's own kernels. They are written when
the next step is done, or before another entry. So if a process on a GPU is killed, its record lacks
the last step.
"""

from __future__ import annotations

import hashlib
import logging
import math
import operator
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onefold.core import encoding
from onefold.core.assignment import Devices
from onefold.core.batch import ShardedBatch
from onefold.core.fold import fold_shards
from onefold.record.entries import (
    BlockEntry,
    Entry,
    FailureEntry,
    Found,
    FrameWriter,
    Result,
    SavedEntry,
    StartEntry,
    StepEntry,
    encode,
)
from onefold.step.result import Step
from onefold.system.accelerator import HostCopy
from onefold.system.words import program

__all__ = ["LARGEST_BYTES", "Recorder", "begun", "places_of"]

_log = logging.getLogger("onefold")

LARGEST_BYTES = 4 << 20
"""Maximum size of a stored result, in bytes. Larger ones are stored as a digest."""
LARGEST_ROWS_BYTES = 1 << 16
"""Maximum size of a step's stored per-sample outputs, in bytes."""


_Read = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Unwritten:
    """A step whose numbers may still be on their way from the device."""

    step: Step
    time: float
    gradient: bool
    place: list[tuple[int, int, int, int]]
    rates: list[float]
    numbers: _Read
    norm: _Read | None
    values: Mapping[str, _Read]


class Recorder:
    """Appends to the record of a run.

    Args:
        path: the file, which is created or continued.
        optimizer: optimizer that has the learning rates.

    Raises:
        OSError: the file cannot be written.
        LaunchError: another run writes to it.
        RecordError: the file is not a record, or is damaged.
    """

    def __init__(self, path: Path, optimizer: torch.optim.Optimizer) -> None:
        self._writer, self._groups = FrameWriter(path), optimizer.param_groups
        self._is_lost = False
        self._held: _Unwritten | None = None
        self._rates: list[float] = []

    def note(self, entry: Found | StartEntry | BlockEntry | FailureEntry | SavedEntry) -> None:
        """Record an entry that needs no data from the device."""
        self._write_held()
        self._append(entry)

    def note_checkpoint(self, step: int, folder: Path, line: str) -> dict[str, Any]:
        """Record the start of a checkpoint; return the number of recorded entries and their digest.

        The record is flushed to disk first: after a power failure, a checkpoint without its record
        would be worth less than an older one with it.
        """
        self.note(SavedEntry(step=step, folder=folder.name, line=line))
        self._written(self._writer.sync)
        if self._is_lost:
            return {"entries": 0, "head": ""}
        return {"entries": self._writer.entries, "head": self._writer.head.hex()}

    def begin_step(self) -> None:
        """Store the learning rates at the start of a step, before its scheduler changes them."""
        rates = [group.get("lr") for group in self._groups]
        # "lr" is None if the optimizer computes its rate, as Adafactor does with relative steps.
        self._rates = [float(rate) for rate in rates if rate is not None]

    def note_step(self, step: Step, batch: ShardedBatch, *, gradient: bool) -> None:
        """Record a finished step, or one whose gradient the script receives."""
        self._write_held()
        numbers, norm = step.outcome.numbers, step.outcome.norm
        self._held = _Unwritten(
            step=step,
            time=time.time(),
            gradient=gradient,
            place=places_of(batch),
            rates=self._rates,
            numbers=_brought(numbers),
            norm=None if norm is None else _brought(norm),
            values={name: _brought(value) for name, value in step.values.items()},
        )
        if numbers.device.type == "cpu":
            self._write_held()

    def note_result(self, step: int, call: str, line: str, value: object) -> None:
        """Record the result of a call: its digest, and the value if it is small enough."""
        self._write_held()
        written = encoding.encode(value, f"what {call} returns")
        kept = written if len(written) <= LARGEST_BYTES else None
        digest = hashlib.blake2b(written, digest_size=16).hexdigest()
        self._append(Result(step=step, call=call, line=line, value=kept, digest=digest))

    def close(self) -> None:
        """Write the pending step and close the file."""
        self._write_held()
        self._writer.close()

    def _append(self, entry: Entry) -> None:
        self._written(lambda: self._writer.append(encode(entry)))

    def _written(self, write: Callable[[], None]) -> None:
        if self._is_lost:
            return
        try:
            write()
        except OSError as error:
            # A full disk does not end the run: recording stops, and a resume has no replay.
            self._is_lost = True
            _log.warning("%s: recording stopped: %s", self._writer.path, error.strerror)

    def _write_held(self) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        step, numbers = held.step, held.numbers().numpy()
        weight, totals = step.outcome.weight, numbers[:, 0]
        total = fold_shards(totals.tolist(), operator.add)
        outputs = {} if step.outcome.values is None else dict(step.outcome.values.outputs)
        rows = encoding.encode(outputs, "the outputs of a step") if outputs else b""
        entry = StepEntry(
            step=step.number,
            epoch=step.epoch,
            samples=step.samples,
            name=step.name,
            gradient=held.gradient,
            loss=total / weight if weight else math.nan,
            weight=weight,
            norm=math.nan if held.norm is None else float(held.norm()),
            skipped=step.skipped,
            rates=held.rates,
            values={name: float(value()) for name, value in held.values.items()},
            outputs=list(outputs),
            rows=rows if len(rows) <= LARGEST_ROWS_BYTES else b"",
            place=held.place,
            totals=totals.tobytes(),
            weights=np.array(step.outcome.weights).tobytes(),
            digests=numbers[:, 1].tobytes(),
            time=held.time,
        )
        self._append(entry)


def _brought(values: torch.Tensor) -> _Read:
    """Start copying a tensor to the host, and return a function that reads the copy."""
    return (lambda: values) if values.device.type == "cpu" else HostCopy(values).read


def begun(
    run: str,
    step: int,
    devices: Devices,
    description: Mapping[str, str],
    flags: Mapping[str, str],
    folder: str,
    *,
    kept: int,
    anew: bool,
) -> StartEntry:
    """Return the entry of a run that starts or resumes in this process.

    Args:
        run: name of the run.
        step: number of finished steps.
        devices: devices of the run.
        description: everything that the numbers depend on.
        flags: environment variables that select the kernels of libraries.
        folder: working directory at the start of the program.
        kept: number of recorded entries that the checkpoint includes.
        anew: whether earlier entries cannot be replayed.
    """
    # A launched function is recorded with the command of the program that launched it.
    options = devices.context.options
    command = list(options.program or program())
    main, spec = Path(folder, *command[:1]), getattr(sys.modules["__main__"], "__spec__", None)
    text = main.read_bytes() if main.is_file() else b""
    return StartEntry(
        run=run,
        step=step,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        trainer=devices.trainer,
        allow_changed=list(options.allow_changed),
        command=command,
        folder=folder,
        python=sys.executable,
        module="" if spec is None or options.program else spec.name,
        script=str(main.absolute()) if text else "",
        script_digest=hashlib.sha256(text).hexdigest(),
        flags=dict(flags),
        libraries=dict(sorted(_libraries())),
        devices=[str(device) for device in devices.all],
        description={what: str(value) for what, value in description.items()},
        kept=kept,
        anew=anew,
    )


def _libraries() -> Iterator[tuple[str, str]]:
    for name, module in list(sys.modules.items()):
        if "." not in name and name not in sys.stdlib_module_names and module is not None:
            version = vars(module).get("__version__")
            if isinstance(version, str):
                yield name, str(version)


def places_of(batch: ShardedBatch) -> list[tuple[int, int, int, int]]:
    """Return the positions of a batch's loader-made parts; see `StepEntry.place`."""
    return [
        (part.loader, part.data_pass.number, part.stop, part.samples)
        for part in batch.read
        if part.data_pass is not None
    ]
