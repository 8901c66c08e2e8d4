"""Looks into one step of a run that is computed once more; nothing of the run is changed.

``onefold replay`` writes an `Inspection` into a file, and names the file in the environment. The
first Trainer of the script then computes up to that step, compares each step with the record of the
run, and ends the script in the step itself, before its update. What it has found is `Findings`.

Note: how samples are told apart
--------------------------------
A loss that returns a value for each sample says what each of them adds. Of any other loss, each
sample is computed alone. Where that does not tell which one is not finite, the shard is halved
again and again: the half that is not finite either goes on.
"""

from __future__ import annotations

import code
import io
import math
import runpy
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from onefold.core.batch import ShardedBatch
from onefold.core.flat import all_finite, named_tensors, own_name, tensor_digests
from onefold.core.settings import LossScale
from onefold.core.shard import rows_of
from onefold.core.structure import parts_of, tensors_of
from onefold.core.values import split
from onefold.data_order.position import Position
from onefold.errors import OnefoldError
from onefold.record import Record, shards_of
from onefold.record.entries import StepEntry, encode
from onefold.record.findings import (
    Findings,
    Inspection,
    LayerFinding,
    SampleFinding,
    ShardFinding,
)
from onefold.run.membership import RunStopped
from onefold.shard.gradients import keeping_gradients
from onefold.shard.operations import (
    OperationWatch,
    bits_digest,
    first_larger,
    first_not_finite,
)
from onefold.shard.replica import Replica
from onefold.shard.task import ShardPiece, ShardTask
from onefold.step.engine import Engine
from onefold.step.result import Step, StepResult
from onefold.system.process import STOPPED_CODE

__all__ = ["Inspector"]

_MOST_ALONE = 512
"""The most samples of a shard that are computed alone."""


class Inspector:
    """Compares the steps of a run with its record, and looks into one of them.

    Args:
        path: the file of an `Inspection`.
        engine: the devices of this process.
        position: where the run is.
        datasets: those of the loaders, by the loaders' numbers.
    """

    def __init__(
        self,
        path: Path,
        engine: Engine,
        position: Position,
        datasets: Mapping[int, Any],
    ) -> None:
        leads = engine.context.leads
        self._asked = msgspec.json.decode(path.read_bytes(), type=Inspection)
        self._engine, self._datasets, self._leads = engine, datasets, leads
        if self._asked.after:
            position.step = self._asked.after
        if engine.rules.scale is not None and self._asked.scale:
            engine.rules.scale = LossScale(self._asked.scale)
        self._entries: dict[int, StepEntry] = {}
        if self._asked.record and leads:
            self._entries = Record(self._asked.record).by_step
        words = {what: str(value) for what, value in engine.description.items()}
        self._found = Findings(step=self._asked.step, description=words)

    def begin_step(self, number: int) -> None:
        """Digest the model before a step, if that was asked for."""
        if self._found.begun is None:
            self._found.begun = number - 1
        if self._asked.digests and self._leads:
            tensors = named_tensors(self._engine.context.module)
            detached = {name: tensor.detach() for name, tensor in tensors.items()}
            self._found.parameters[number] = tensor_digests(detached)

    def note(self, step: Step) -> None:
        """Compare a step that is done with the record."""
        if self._leads:
            self._compare(step.number, step.outcome)

    def look(self, batch: ShardedBatch, number: int, name: str) -> None:
        """Look into the step with this batch, if it is the one; called on all devices.

        Raises:
            RunStopped: it was the one.
        """
        self.begin_step(number)
        if number != self._asked.step:
            return
        found, engine = self._found, self._engine
        task, outcome = engine.look(batch, number, name=name)
        found.name, found.samples = name, batch.samples
        if self._leads:
            self._compare(number, outcome)
            self._note_step(outcome)
        with keeping_gradients(engine.context.parts.trained.values()):
            rows = self._look_at_shards(batch, task, outcome)
        if self._leads:
            found.shards = sorted(rows, key=lambda each: each.shard)
            found.shards = [_with_first(each, found.shards) for each in found.shards]
            self._hand_out(batch, number, name)
            Path(self._asked.findings).write_bytes(msgspec.json.encode(found))
        raise RunStopped(STOPPED_CODE)

    def _compare(self, number: int, outcome: StepResult) -> None:
        entry = self._entries.get(number)
        if entry is None or self._found.differs:
            return
        known, numbers = shards_of(entry), outcome.numbers.cpu().numpy()
        now = numbers[:, 0], outcome.weights, numbers[:, 1].view("u8")
        for what, one, two in zip(("loss", "weight", "gradient"), known, now, strict=True):
            for shard, (then, here) in enumerate(zip(one.tolist(), list(two), strict=True)):
                if then != here and not (math.isnan(then) and math.isnan(here)):
                    words = f"{then:016x}, now {int(here):016x}" if what == "gradient" else (
                        f"{then!r}, now {float(here)!r}"
                    )  # fmt: skip
                    self._found.differs.append(
                        f"step {number}, shard {shard}: its {what} was {words}"
                    )
        self._found.compared += len(outcome.weights)

    def _note_step(self, outcome: StepResult) -> None:
        found, module = self._found, self._engine.context.module
        numbers = outcome.numbers.cpu()
        found.totals = [_number(each) for each in numbers[:, 0].tolist()]
        found.digests = numbers[:, 1].view(torch.int64).tolist()
        found.weights = list(outcome.weights)
        found.loss = _number(float(numbers[:, 0].sum()) / (outcome.weight or math.nan))
        found.norm = None if outcome.norm is None else _number(float(outcome.norm))
        found.layers = [
            LayerFinding(
                name=own_name(name),
                norm=None if parameter.grad is None else _number(float(parameter.grad.norm())),
                of_parameter=_number(float(parameter.detach().norm())),
            )
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]

    def _look_at_shards(
        self, batch: ShardedBatch, task: ShardTask, outcome: StepResult
    ) -> list[ShardFinding]:
        """Compute the shards that were asked for by themselves; bring what is found to the lead."""
        engine, asked = self._engine, self._asked.shards
        if engine.objective.gathers and not task.is_plain(batch):
            return []  # a shard of such a loss cannot be computed by itself
        found: dict[int, str] = {}
        with engine.context.computing(), engine.placement.unsharded():
            for replica in engine.context.replicas:
                with engine.context.attached(replica):
                    replica.begin(task)
                    own = [
                        self._look_at(replica, shard, batch, task, outcome)
                        for shard in batch.plan.shards_of(replica.number)
                        if shard in batch.shards and (asked is None or shard in asked)
                    ]
                    replica.end()
                found[replica.number] = msgspec.json.encode(own).decode()
        rows = engine.context.exchange.transport.all_gather_values(found)
        return [each for row in rows for each in msgspec.json.decode(row, type=list[ShardFinding])]

    def _look_at(
        self,
        replica: Replica,
        shard: int,
        batch: ShardedBatch,
        task: ShardTask,
        outcome: StepResult,
    ) -> ShardFinding:
        seen: list[object] = []

        def loss(model: torch.nn.Module, payload: Any) -> object:
            seen.append(task.loss(model, payload))
            return seen[-1]

        watch = OperationWatch(replica.module, digests=self._asked.digests)
        with watch.watching():
            result = replica.compute(shard, batch, replace(task, loss=loss))
        total = math.nan if result.total is None else float(result.total)
        given = [each for each in result.gradients if each is not None]
        bad = [
            name
            for name, gradient in zip(replica.parts.trained, result.gradients, strict=True)
            if gradient is not None and not all_finite(gradient)
        ]
        spoilt = bool(bad) or not math.isfinite(total)
        samples = []
        if self._asked.samples:
            own = _Samples(replica, shard, batch, task, self._datasets, digests=self._asked.digests)
            samples = own.findings(seen, spoilt=spoilt)
        return ShardFinding(
            shard=shard,
            total=_number(total),
            norm=_number(math.sqrt(sum(float(g.double().square().sum()) for g in given))),
            equal=_same(total, float(outcome.totals[shard])),
            bad_gradients=bad,
            samples=samples,
            operations=watch.operations,
        )

    def _hand_out(self, batch: ShardedBatch, number: int, name: str) -> None:
        """Put the step into a file, and hand it to a function or a prompt, as it was asked for."""
        asked, module = self._asked, self._engine.context.module
        given = {"model": module, "shards": dict(batch.shards), "step": number}
        if asked.bundle:
            self._write_bundle(batch, number, name)
        if asked.function:
            file, _, function = asked.function.rpartition(":")
            runpy.run_path(file)[function](*given.values())
        if asked.terminal:
            with open(asked.terminal) as source, open(asked.terminal, "w") as sink:
                _prompt({**given, "found": self._found, "torch": torch}, source, sink)

    def _write_bundle(self, batch: ShardedBatch, number: int, name: str) -> None:
        """Write all that the step is computed from into one file; see `onefold replay --bundle`."""
        import cloudpickle

        engine, settings = self._engine, self._engine.context.settings
        sizes = batch.sizes
        if any(size and shard not in batch.shards for shard, size in enumerate(sizes)):
            raise ValueError("a bundle has all shards of a step: expected one device, not several")
        if "shard" in settings.buffers.values():
            raise ValueError(
                'a buffer with the rule "shard" has another value in each shard, which a bundle '
                "does not have: expected none"
            )
        content = {
            "model": engine.context.module,
            "losses": dict(engine.losses),
            "name": name,
            "settings": {
                "shards": settings.shards,
                "seed": settings.seed,
                "precision": settings.precision.name,
                "microbatch": settings.microbatch,
                "deterministic": settings.deterministic,
                "threads": torch.get_num_threads(),
                "buffers": dict(settings.buffers),
            },
            "batch": replace(
                batch, data_pass=None, data_digest=0, unread=None, gather=None, parts=(),
                waited=None,
            ),
        }  # fmt: skip
        written = io.BytesIO()
        torch.save(content, written, pickle_module=cloudpickle)
        entry = self._entries.get(number)
        scale = 0.0 if engine.rules.scale is None else engine.rules.loss_scale
        about = {"step": number, "scale": scale, "description": self._found.description}
        whole = io.BytesIO()
        with zipfile.ZipFile(whole, "w") as bundle:
            bundle.writestr("about.json", msgspec.json.encode(about))
            bundle.writestr("step.pt", written.getvalue())
            if entry is not None:
                bundle.writestr("entry", encode(entry))
        with open(self._asked.bundle, "xb") as file:
            file.write(whole.getvalue())


def _prompt(names: dict[str, Any], source: Any, sink: Any) -> None:
    import contextlib

    def ask(text: str = "") -> str:
        sink.write(text)
        sink.flush()
        line = source.readline()
        if not line:
            raise EOFError
        return str(line).rstrip("\n")

    with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        code.interact(
            f"step {names['step']}: model (with the gradient of the batch in .grad), shards, "
            f"found; Ctrl-D ends it",
            readfunc=ask,
            local=names,
            exitmsg="",
        )


class _Samples:
    """The samples of a shard.

    Args:
        replica: computes them.
        shard: the number of the shard.
        batch: the batch of the step.
        task: what all shards of the step have in common.
        datasets: those of the loaders, by the loaders' numbers.
        digests: whether what samples hold is digested.
    """

    def __init__(
        self,
        replica: Replica,
        shard: int,
        batch: ShardedBatch,
        task: ShardTask,
        datasets: Mapping[int, Any],
        *,
        digests: bool,
    ) -> None:
        self._digests = digests
        self._replica, self._shard, self._batch, self._task = replica, shard, batch, task
        self._count = batch.count_of(shard).samples
        self._first = sum(batch.size_of(each) for each in range(shard))
        self._dataset = datasets.get(batch.loader)

    def findings(self, seen: Sequence[object], *, spoilt: bool) -> list[SampleFinding]:
        """What is known of each sample.

        Args:
            seen: what the loss of the shard's pieces returned.
            spoilt: whether loss or gradient of the shard is not finite.
        """
        losses, rows = self._returned(seen) or self._alone(), self._rows()
        finite = [loss is None or math.isfinite(loss) for loss in losses]
        if spoilt and finite.count(False) != 1:
            # Batch norm spreads what is not finite over the shard, and no loss shows a gradient.
            whole = [all(map(all_finite, filter(_has_floats, tensors_of(row)))) for row in rows]
            halved = self._halved() if all(whole) else whole
            finite = halved if all(finite) or halved.count(False) < finite.count(False) else finite
        numbers: list[int | None] = [*self._batch.numbers.get(self._shard, ())]
        if len(numbers) != self._count:
            numbers = [None] * self._count
        return [
            SampleFinding(
                place=self._first + place,
                number=number,
                loss=None if loss is None else _number(loss),
                finite=good,
                words=", ".join([*self._said(number), *([words_of(rows[place])] if rows else [])]),
                digest=bits_digest(tensors_of(rows[place])) if self._digests and rows else "",
            )
            for place, (number, loss, good) in enumerate(zip(numbers, losses, finite, strict=True))
        ]

    def _returned(self, seen: Sequence[object]) -> list[float | None]:
        """The loss of each sample, where the loss has returned it; else nothing."""
        found: list[float | None] = []
        for result in seen:
            loss = split(result, "the loss")[0]
            if not isinstance(loss, torch.Tensor) or not loss.dim():
                return []
            found += loss.detach().double().flatten(1).mean(1).tolist() if loss.dim() > 1 else (
                loss.detach().double().tolist()
            )  # fmt: skip
        return found if len(found) == self._count else []

    def _alone(self) -> list[float | None]:
        """The loss of each sample, computed alone; None where that cannot be done."""
        found: list[float | None] = []
        for place in range(self._count if self._count <= _MOST_ALONE else 0):
            try:
                part = self._piece(place, place + 1, self._replica.piece_alone)
                found.append(float(part.total()) / (part.weight if part.weight > 0 else 1.0))
            except (OnefoldError, ValueError, RuntimeError, TypeError, IndexError):
                # Batch norm has no statistics of one sample; not all payloads can be cut.
                return [None] * self._count
        return found or [None] * self._count

    def _halved(self) -> list[bool]:
        """Which samples belong to the smallest part of the shard that is not finite by itself."""
        start, stop = 0, self._count
        while stop - start > 1:
            middle = (start + stop) // 2
            if self._is_bad(start, middle):
                stop = middle
            elif self._is_bad(middle, stop):
                start = middle
            else:
                break
        return [not start <= place < stop for place in range(self._count)]

    def _is_bad(self, start: int, stop: int) -> bool:
        try:
            result = self._piece(start, stop, self._replica.compute_piece)
        except (OnefoldError, ValueError, RuntimeError, TypeError, IndexError):
            return False
        gradients = [each for each in result.gradients if each is not None]
        total = 0.0 if result.total is None else float(result.total)
        return not math.isfinite(total) or not all(map(all_finite, gradients))

    def _piece(self, start: int, stop: int, run: Callable[..., Any]) -> Any:
        where = self._replica.begin_shard(self._shard, self._task)
        piece = ShardPiece(self._shard, start, stop, self._count)
        try:
            return run(piece, self._batch, self._task, where)
        finally:
            self._replica.put_back(self._task)
            self._replica.begin(self._task)

    def _rows(self) -> list[Any]:
        """What each sample holds; nothing where the payload cannot be cut."""
        payload, dim = self._batch.shards[self._shard], self._batch.dim
        try:
            return [
                rows_of(payload, (place, place + 1), self._count, dim=dim)
                for place in range(self._count)
            ]
        except (TypeError, ValueError, OnefoldError):
            return []

    def _said(self, number: int | None) -> list[str]:
        """What the data set says of a sample, where it has a method for that."""
        describe = getattr(self._dataset, "describe", None)
        return [str(describe(number))] if callable(describe) and number is not None else []


def _has_floats(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


def words_of(value: Any) -> str:
    """Describe a payload in a few words: dtypes, shapes and the range of its numbers."""
    parts = parts_of(value)
    if parts is not None:
        return ", ".join(filter(None, (words_of(part) for _, part in parts)))
    if not isinstance(value, torch.Tensor):
        return str(value)[:60]
    if value.numel() == 1:
        return f"{value.item():.6g}" if value.is_floating_point() else str(value.item())
    words = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if not value.numel() or value.is_complex():
        return words
    if value.is_floating_point():
        bad = int(value.numel() - value.isfinite().sum())
        kept = value[value.isfinite()]
        words += f", {bad} not finite" if bad else ""
        if not kept.numel():
            return words
        return f"{words}, from {float(kept.min()):.4g} to {float(kept.max()):.4g}"
    return f"{words}, from {value.min().item()} to {value.max().item()}"


def _with_first(own: ShardFinding, every: Sequence[ShardFinding]) -> ShardFinding:
    first, times = first_not_finite(own.operations), None
    if first is None:
        others = [each.operations for each in every if each is not own]
        first, times = first_larger(own.operations, others) or (None, None)
    times = times if times is None or math.isfinite(times) else None
    return msgspec.structs.replace(own, first=first, times=times)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _same(one: float, two: float) -> bool:
    return one == two or (math.isnan(one) and math.isnan(two))
