"""The record of a run: what was computed in each step, by which shards, and on what.

`Record` reads it. `onefold.record.entries` is the file and what is in it, and
`onefold.record.recorder` writes it beside training.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from onefold.core.options import RECORD_FILE as FILE
from onefold.errors import RecordError
from onefold.record.entries import (
    BlockEntry,
    Entry,
    HangEntry,
    Result,
    SavedEntry,
    StartEntry,
    StepEntry,
    decode,
    read_frames,
    restore,
)

__all__ = ["FILE", "Record", "alike", "shards_of", "standing", "whole_run"]

_log = logging.getLogger("onefold")

Table = dict[str, np.ndarray[Any, Any]]
"""Columns of one length, by name."""


class Record:
    """The record of a run, as tables.

    Args:
        path: the file, or the folder of a run with a file ``run.record`` in it.

    Raises:
        FileNotFoundError: there is no record.
        RecordError: the file is no record, or damaged.

    A table is a dict of NumPy arrays of one length, which ``pandas.DataFrame`` and
    ``polars.DataFrame`` take as it is. Of steps that were made again after a kill, the last ones
    count. A record that is being written may be read.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> loss = lambda model, x: model(x).square().mean(1)
    >>> trainer = onefold.Trainer(model, optimizer, loss, shards=2)
    >>> trainer.record(folder)
    >>> steps = [trainer.step(torch.ones(6, 2)) for _ in range(3)]
    >>> record = onefold.Record(folder)
    >>> record.steps["loss"].shape, record.steps["step"].tolist()
    ((3,), [1, 2, 3])
    >>> record.shards["digest"].shape
    (6,)
    """

    def __init__(self, path: str | Path) -> None:
        given = Path(path)
        self.path = given / FILE if given.is_dir() else given
        try:
            frames, torn = read_frames(self.path)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{self.path} is missing: expected the folder of a run that was begun with onefold "
                f"run --record or --checkpoint, or with trainer.record"
            ) from error
        if torn:
            _log.warning(
                "%s: the last %d bytes are no whole frame, and are left out: what wrote it was "
                "killed, or the file was cut",
                *(self.path, torn),
            )
        entries = [decode(each.body, f"{self.path}, frame {n}") for n, each in enumerate(frames)]
        self.hangs: list[HangEntry] = [each for each in entries if isinstance(each, HangEntry)]
        """What the launcher has told of devices that waited for very long."""
        self.entries: list[Entry] = standing(entries)
        """All entries that count, in the order in which they were written."""

    @property
    def is_foreign(self) -> bool:
        """Whether another user may have written it; root may write everything anyway."""
        owners = {self.path.stat().st_uid, self.path.parent.stat().st_uid}
        return not owners <= {0, os.geteuid()}

    @property
    def begins(self) -> list[dict[str, Any]]:
        """For each time that the run began or was resumed: who took part, and how."""
        return [structs.asdict(each) for each in self._all(StartEntry)]

    @property
    def steps(self) -> Table:
        """One row for each step.

        ``step``, ``epoch``, ``samples``, ``loss``, ``weight``, ``norm``, ``skipped``, ``name``,
        ``time`` (in seconds since 1970), ``rate.0`` for each group of the optimizer, ``value.NAME``
        for what the loss returned beside itself. What a step lacks is NaN.
        """
        rows = []
        for each in self._all(StepEntry):
            row = {name: getattr(each, name) for name in _PLAIN}
            row |= {f"rate.{number}": rate for number, rate in enumerate(each.rates)}
            rows.append(row | {f"value.{name}": value for name, value in each.values.items()})
        return _table(rows, _PLAIN)

    @property
    def shards(self) -> Table:
        """One row for each shard of each step: ``step``, ``shard``, ``total``, ``weight``.

        ``digest`` (uint64) is of a sample of the shard's gradient; 0 where none was made.
        """
        found: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in _OF_SHARDS}
        for each in self._all(StepEntry):
            total, weight, digest = shards_of(each)
            found["step"].append(np.full(len(total), each.step))
            found["shard"].append(np.arange(len(total)))
            for name, column in (("total", total), ("weight", weight), ("digest", digest)):
                found[name].append(column)
        return {
            name: np.concatenate(parts) if parts else np.empty(0, dtype)
            for (name, dtype), parts in zip(_OF_SHARDS.items(), found.values(), strict=True)
        }

    @property
    def results(self) -> list[dict[str, Any]]:
        """What `evaluate`, `predict`, `gather` and `broadcast` returned, in order.

        ``value`` is None where it was too large to keep; ``kept`` tells that from a result of None.
        """
        return [
            structs.asdict(each)
            | {
                "kept": each.value is not None,
                "value": None if each.value is None else restore(each.value, each.step),
            }
            for each in self._all(Result)
        ]

    @property
    def blocks(self) -> Table:
        """One row for each block of `Trainer.modifying`: ``step``, ``line``, ``digest``."""
        return self._table(BlockEntry)

    @property
    def checkpoints(self) -> Table:
        """One row for each checkpoint: ``step`` and ``folder``."""
        return self._table(SavedEntry)

    @property
    def by_step(self) -> dict[int, StepEntry]:
        """What was written of each step, by its number."""
        return {each.step: each for each in self._all(StepEntry)}

    def step(self, number: int) -> StepEntry:
        """What was written of one step; see `Record`.

        Raises:
            RecordError: the record has no such step.
        """
        steps = self.by_step
        if number not in steps:
            has = f"steps {min(steps)} to {max(steps)}" if steps else "no steps"
            raise RecordError(f"{self.path} has {has}: expected one of these, got step {number}")
        return steps[number]

    def _all(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.entries if isinstance(each, kind)]

    def _table(self, kind: type[Any]) -> Table:
        return _table(map(structs.asdict, self._all(kind)), kind.__struct_fields__)


_PLAIN = ("step", "epoch", "samples", "loss", "weight", "norm", "skipped", "name", "time")
_OF_SHARDS = {
    "step": np.int64, "shard": np.int64, "total": np.float64, "weight": np.float64,
    "digest": np.uint64,
}  # fmt: skip


def standing(entries: Iterable[Entry]) -> list[Entry]:
    """Those entries that led to where the run is: it may have gone back, and forward again."""
    return [entry for _, entry in _standing(entries)]


def _standing(entries: Iterable[Entry]) -> list[tuple[int, Entry]]:
    counted = [each for each in entries if not isinstance(each, HangEntry)]
    found: list[tuple[int, Entry]] = []
    end = len(counted)
    while end:
        end, entry = end - 1, counted[end - 1]
        found.append((end, entry))
        if isinstance(entry, StartEntry):
            end = min(entry.kept, end)
    return found[::-1]


def whole_run(path: Path, kept: int, head: str) -> list[tuple[int, Entry]]:
    """The entries by which a run can be gone through again, up to a checkpoint that saw ``kept``.

    Each with the number of entries before it in the record. Nothing where the record does not have
    all of it: it was begun later than the run, or the script has gone back by `Trainer.load`, or
    has used gradients that no record keeps.

    Raises:
        RecordError: it is damaged, or another record than the one that the checkpoint has seen.
    """
    chain = [frame for frame in read_frames(path)[0] if frame.head]
    entries = [decode(each.body, f"{path}, frame {n}") for n, each in enumerate(chain[:kept])]
    if entries and isinstance(entries[0], StartEntry) and entries[0].step > 0:
        return []
    if len(chain) < kept or chain[kept - 1].head.hex() != head:
        has = f"a record of {len(chain)} entries" if len(chain) < kept else "another record"
        raise RecordError(
            f"{path} is not what the checkpoint has seen: expected the {kept} entries of its run, "
            f"with the digest {head}, got {has}. It was exchanged, edited or cut: put the run's "
            f"own record there, or remove it to resume without answers to the script"
        )
    counted = _standing(entries)
    begins = [entry for _, entry in counted if isinstance(entry, StartEntry)]
    if any(each.anew for each in begins):
        return []
    if any(isinstance(entry, StepEntry) and entry.gradient for _, entry in counted):
        return []
    return counted


def alike(record: Record, *kinds: type[Any]) -> list[Any]:
    """Entries of these kinds that do not depend on the devices, as what `gather` returns does."""
    return [
        each
        for each in record.entries
        if isinstance(each, kinds) and getattr(each, "call", "") != "trainer.gather"
    ]


def shards_of(entry: StepEntry) -> tuple[np.ndarray[Any, Any], ...]:
    """Totals and weights (V,) float64 and digests (V,) uint64 of a step's shards."""
    totals, weights = (np.frombuffer(each, "<f8") for each in (entry.totals, entry.weights))
    digests = np.frombuffer(entry.digests, "<u8")
    return totals, weights, digests if len(digests) else np.zeros(len(totals), np.uint64)


def _table(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> Table:
    listed = list(rows)
    names = dict.fromkeys([*columns, *(name for row in listed for name in row)])
    return {name: np.array([row.get(name, np.nan) for row in listed]) for name in names}
