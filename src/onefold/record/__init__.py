"""The record of a run: its steps, shards and results, and the devices and versions that made them.

`Record` reads a record. `onefold.record.entries` defines the file format, and
`onefold.record.recorder` writes the file during training.
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

Table = dict[str, np.ndarray[tuple[int], np.dtype[Any]]]
"""Columns of equal length, by name."""


class Record:
    """The record of a run as tables.

    Args:
        path: the record file, or a run directory that contains ``run.record``.

    Raises:
        FileNotFoundError: there is no record.
        RecordError: the file is not a record, or is damaged.

    A table is a dict of NumPy arrays of equal length, which ``pandas.DataFrame`` and
    ``polars.DataFrame`` accept. If a run repeated steps after it was killed, the tables contain the
    last repetition. You can read a record while it is being written.

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
                f"{self.path} does not exist. Pass the directory of a run that was started with "
                f"onefold run --record or --checkpoint, or with trainer.record"
            ) from error
        if torn:
            _log.warning(
                "%s: skipped the last %d bytes, which are not a complete frame: the writer was "
                "killed, or the file was truncated",
                *(self.path, torn),
            )
        entries = [decode(each.body, f"{self.path}, frame {n}") for n, each in enumerate(frames)]
        self.hangs: list[HangEntry] = [each for each in entries if isinstance(each, HangEntry)]
        """Hang reports from the launcher."""
        self.entries: list[Entry] = standing(entries)
        """All entries that count, in the order of writing."""

    def __repr__(self) -> str:
        return f"Record({str(self.path)!r})"

    @property
    def is_foreign(self) -> bool:
        """Whether a user other than this one or root may have written the record."""
        owners = {self.path.stat().st_uid, self.path.parent.stat().st_uid}
        return not owners <= {0, os.geteuid()}

    @property
    def begins(self) -> list[dict[str, object]]:
        """Devices, command and settings of each start and resume of the run, as dicts."""
        return [structs.asdict(each) for each in self._all(StartEntry)]

    @property
    def steps(self) -> Table:
        """Table with one row per step.

        ``step``, ``epoch`` (from 0, as `Trainer.epochs` counts), ``samples``, ``loss``, ``weight``,
        ``norm``, ``skipped``, ``name``, ``time`` (in seconds since 1970), ``rate.0`` for each
        optimizer group, ``value.NAME`` for each metric that the loss returned. Values that a step
        lacks are NaN.
        """
        rows = []
        for each in self._all(StepEntry):
            row = {name: getattr(each, name) for name in _PLAIN}
            row |= {f"rate.{number}": rate for number, rate in enumerate(each.rates)}
            rows.append(row | {f"value.{name}": value for name, value in each.values.items()})
        return _table(rows, _PLAIN)

    @property
    def shards(self) -> Table:
        """Table with one row per shard of each step: ``step``, ``shard``, ``total``, ``weight``.

        ``digest`` (uint64) is a digest of a sample of the shard's gradient; 0 if none was computed.
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
    def results(self) -> list[dict[str, object]]:
        """Results of `evaluate`, `predict`, `gather` and `broadcast`, in order.

        ``value`` is None if the result was too large to store; ``kept`` tells this from a result of
        None.
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
        """Table with one row per `Trainer.modifying` block: ``step``, ``line``, ``digest``."""
        return self._table(BlockEntry)

    @property
    def checkpoints(self) -> Table:
        """Table with one row per checkpoint: ``step`` and ``folder``."""
        return self._table(SavedEntry)

    @property
    def by_step(self) -> dict[int, StepEntry]:
        """The entry of each step, by step number."""
        return {each.step: each for each in self._all(StepEntry)}

    def step(self, number: int) -> StepEntry:
        """Return the entry of one step; see `Record`.

        Raises:
            RecordError: the record does not contain the step.
        """
        steps = self.by_step
        if number not in steps:
            has = f"steps {min(steps)} to {max(steps)}" if steps else "no steps"
            raise RecordError(f"{self.path} has {has}, but not the requested step {number}")
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
    """Return the entries that led to the run's current state; a resume drops the ones it undid."""
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
    """Return the entries needed to replay a run up to a checkpoint that saw ``kept`` entries.

    Each entry comes with the number of entries before it in the record. The list is empty if the
    record cannot replay the whole run: recording began after the run did, the script went back by
    `Trainer.load`, or it used gradients, which records do not store.

    Raises:
        RecordError: the record is damaged, or is not the one that the checkpoint saw.
    """
    chain = [frame for frame in read_frames(path)[0] if frame.head]
    entries = [decode(each.body, f"{path}, frame {n}") for n, each in enumerate(chain[:kept])]
    if entries and isinstance(entries[0], StartEntry) and entries[0].step > 0:
        return []
    if len(chain) < kept or chain[kept - 1].head.hex() != head:
        has = f"a record of {len(chain)} entries" if len(chain) < kept else "another record"
        raise RecordError(
            f"{path} does not match the checkpoint, which saw {kept} entries with the digest "
            f"{head}, but got {has}. The record was replaced, edited or truncated. Restore the "
            f"run's own record, or remove it to resume without replay"
        )
    counted = _standing(entries)
    begins = [entry for _, entry in counted if isinstance(entry, StartEntry)]
    if any(each.anew for each in begins):
        return []
    if any(isinstance(entry, StepEntry) and entry.gradient for _, entry in counted):
        return []
    return counted


def alike(record: Record, *kinds: type[Any]) -> list[Any]:
    """Return the entries of these kinds that do not depend on the devices, unlike ``gather``."""
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
