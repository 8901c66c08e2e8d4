"""Inspects one step of a replayed run; nothing in the run changes.

``onefold replay`` passes an `Inspection` to the run. The recorded Trainer computes up to that step,
compares each step with the run's record, and ends the script during the step, before its update.
The results are `Findings`.
"""

from __future__ import annotations

import code
import contextlib
import io
import math
import runpy
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch

from onefold.core.batch import ShardedBatch
from onefold.core.flat import all_finite, named_tensors, own_name, tensor_digests
from onefold.core.settings import LossScale
from onefold.data_order.position import Position
from onefold.launcher.membership import RunStopped
from onefold.record import Record, shards_of
from onefold.record.entries import FailureEntry, StepEntry, encode
from onefold.record.findings import BundleFacts, Findings, Inspection, LayerFinding, ShardFinding
from onefold.session.run import RunSetup, RunView
from onefold.shard.gradients import keeping_gradients
from onefold.shard.operations import OperationWatch, first_larger, first_not_finite
from onefold.shard.replica import Replica
from onefold.shard.task import ShardTask
from onefold.step.engine import Engine
from onefold.step.hook import Hook, ScriptCall, Spans, Surrounds
from onefold.step.result import Step, StepResult
from onefold.system.process import STOPPED_CODE
from onefold.tools.samples import ShardSamples, finite_or_none

__all__ = ["Inspector", "prepare"]


def prepare(start: RunSetup) -> Callable[[RunView], Hook | None]:
    """Inspect a step of one Trainer."""
    asked = msgspec.convert(start.context.options.tools["inspection"], Inspection)

    def begin(run: RunView) -> Hook | None:
        if asked.trainer != run.devices.trainer:
            return None
        return Inspector(asked, run.engine, run.position, run.batches.datasets)

    return begin


class Inspector(Hook):
    """Compares the steps of a run with its record, and inspects one of them.

    Args:
        asked: what to inspect.
        engine: engine of this process's devices.
        position: current position of the run.
        datasets: data sets of the loaders, by loader number.
    """

    def __init__(
        self,
        asked: Inspection,
        engine: Engine,
        position: Position,
        datasets: Mapping[int, Any],
    ) -> None:
        self._asked, self._engine, self._datasets = asked, engine, datasets
        if asked.after:
            position.step = asked.after
        if engine.rules.scale is not None and asked.scale:
            engine.rules.scale = LossScale(asked.scale)
        self._entries: dict[int, StepEntry] = {}
        words = {what: str(value) for what, value in engine.description.items()}
        self._found = Findings(step=asked.step, description=words)
        self._failures = 0
        """Number of times that the step fails before it succeeds."""
        if asked.record:
            record = Record(asked.record)
            self._entries = record.by_step
            self._found.made = asked.step in self._entries
            failed = [each for each in record.entries if isinstance(each, FailureEntry)]
            if self._found.made:
                self._failures = sum(each.step + 1 == asked.step for each in failed)

    def around(self, asked: ScriptCall) -> Surrounds:
        """Inspect a step before it begins, if it is the requested one.

        Raises:
            RunStopped: the requested step has been inspected.
        """
        if asked.cut is None or not asked.begins:
            return None
        number = asked.number
        if self._found.begun is None:
            self._found.begun = number - 1
        if self._asked.digests:
            self._digest_model(number)
        if number == self._asked.step and not self._failures:
            self._inspect_step(asked.cut, number, asked.name)
        if number == self._asked.step:
            self._failures -= 1  # the script catches this failure, as it did in the recorded run
        return None

    def after_step(self, asked: ScriptCall, step: Step, spans: Spans) -> None:
        """Compare a finished step with the record."""
        if asked.computed and self._engine.context.leads:
            self._compare(step.number, step.outcome)

    def _digest_model(self, number: int) -> None:
        with self._engine.placement.gathered():
            tensors = named_tensors(self._engine.context.module)
            detached = {name: tensor.detach() for name, tensor in tensors.items()}
            if self._engine.context.leads:
                self._found.parameters[number] = tensor_digests(detached)

    def _inspect_step(self, batch: ShardedBatch, number: int, name: str) -> NoReturn:
        found, engine = self._found, self._engine
        task, outcome = engine.inspect_step(batch, number, name=name)
        found.name, found.samples = name, batch.samples
        with engine.placement.gathered():
            if engine.context.leads:
                self._compare(number, outcome)
                self._note_step(outcome)
            with keeping_gradients(engine.context.parts.trained.values()):
                rows = self._look_at_shards(task, outcome)
            if engine.context.leads:
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
        if len(known[0]) != len(numbers):
            self._found.differs.append(
                f"step {number}: its batch had {len(known[0])} shards, now {len(numbers)}"
            )
            return
        now = numbers[:, 0], outcome.weights, numbers[:, 1].view("u8")
        for what, one, two in zip(("loss", "weight", "gradient"), known, now, strict=True):
            for shard, (then, here) in enumerate(zip(one.tolist(), list(two), strict=True)):
                if then != here and not (math.isnan(then) and math.isnan(here)):
                    words = f"{then!r}, now {float(here)!r}"
                    if what == "gradient":
                        words = f"{then:016x}, now {int(here):016x}"
                    where = f"step {number}, shard {shard}"
                    self._found.differs.append(f"{where}: its {what} was {words}")
        self._found.compared += len(outcome.weights)

    def _note_step(self, outcome: StepResult) -> None:
        found, module = self._found, self._engine.context.module
        numbers = outcome.numbers.cpu()
        found.totals = [finite_or_none(each) for each in numbers[:, 0].tolist()]
        found.digests = numbers[:, 1].view(torch.int64).tolist()
        found.weights = list(outcome.weights)
        found.loss = finite_or_none(float(numbers[:, 0].sum()) / (outcome.weight or math.nan))
        found.norm = None if outcome.norm is None else finite_or_none(float(outcome.norm))
        found.layers = [
            LayerFinding(
                name=own_name(name),
                norm=None if parameter.grad is None else _norm(parameter.grad),
                given=parameter.grad is not None,
                of_parameter=_norm(parameter.detach()),
            )
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]

    def _look_at_shards(self, task: ShardTask, outcome: StepResult) -> list[ShardFinding]:
        """Compute the requested shards separately, and gather the findings to the lead."""
        engine, asked, batch = self._engine, self._asked.shards, task.batch
        if engine.objective.gathers and not task.is_plain:
            return []  # a shard of such a loss cannot be computed separately
        found: dict[int, str] = {}
        with engine.context.computing():
            for replica in engine.context.replicas:
                with engine.context.attached(replica):
                    replica.start_step(task)
                    own = [
                        self._look_at(replica, shard, task, outcome)
                        for shard in batch.shares.shards_of(replica.number)
                        if shard in batch.shards and (asked is None or shard in asked)
                    ]
                    replica.end()
                found[replica.number] = msgspec.json.encode(own).decode()
        rows = engine.context.exchange.transport.all_gather_values(found)
        return [each for row in rows for each in msgspec.json.decode(row, type=list[ShardFinding])]

    def _look_at(
        self, replica: Replica, shard: int, task: ShardTask, outcome: StepResult
    ) -> ShardFinding:
        seen: list[object] = []

        def loss(model: torch.nn.Module, payload: Any) -> object:
            seen.append(task.loss(model, payload))
            return seen[-1]

        watch = OperationWatch(replica.module, digests=self._asked.digests)
        with watch.watching():
            result = replica.compute(shard, replace(task, loss=loss))
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
            own = ShardSamples(replica, shard, task, self._datasets, digests=self._asked.digests)
            samples = own.findings(seen, spoilt=spoilt)
        return ShardFinding(
            shard=shard,
            total=finite_or_none(total),
            norm=finite_or_none(math.sqrt(sum(float(g.double().square().sum()) for g in given))),
            equal=_same(total, float(outcome.totals[shard])),
            bad_gradients=bad,
            samples=samples,
            operations=watch.operations,
        )

    def _hand_out(self, batch: ShardedBatch, number: int, name: str) -> None:
        """Write the step to a file, or pass it to a function or a prompt, as requested."""
        asked, module = self._asked, self._engine.context.module
        given = {"model": module, "shards": dict(batch.shards), "step": number}
        if asked.bundle:
            self._write_bundle(batch, number, name)
        if asked.function:
            file, _, function = asked.function.rpartition(":")
            look = runpy.run_path(file).get(function)
            if not callable(look):
                raise ValueError(f"--call {asked.function}: the file has no function {function}")
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                look(*given.values())
            self._found.printed = printed.getvalue()
        if asked.terminal:
            with open(asked.terminal) as source, open(asked.terminal, "w") as sink:
                _prompt({**given, "found": self._found, "torch": torch}, source, sink)

    def _write_bundle(self, batch: ShardedBatch, number: int, name: str) -> None:
        """Write all inputs of the step to one file; see `onefold replay --bundle`."""
        import cloudpickle

        engine, settings = self._engine, self._engine.context.settings
        sizes = batch.sizes
        if any(size and shard not in batch.shards for shard, size in enumerate(sizes)):
            raise ValueError("a bundle needs all shards of a step in one process: use one device")
        if "per_shard" in settings.buffers.values():
            raise ValueError(
                'a bundle cannot store buffers with the rule "per_shard", '
                "because each shard has its own value"
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
        for module in list(sys.modules.values()):
            # Modules next to the script are not installed elsewhere.
            file = getattr(module, "__file__", None) or ""
            if sys.path[0] and Path(file).parent == Path(sys.path[0]):
                cloudpickle.register_pickle_by_value(module)
        written = io.BytesIO()
        try:
            torch.save(content, written, pickle_module=cloudpickle)
        except Exception as error:
            raise ValueError(
                f"the step cannot be stored in a bundle, because the model, a loss or the batch "
                f"refers to an object that cannot be pickled, such as the Trainer or an open file: "
                f"{error}"
            ) from error
        entry = self._entries.get(number)
        scale = 0.0 if engine.rules.scale is None else engine.rules.loss_scale
        about = BundleFacts(step=number, scale=scale, description=self._found.description)
        whole = io.BytesIO()
        with zipfile.ZipFile(whole, "w") as bundle:
            bundle.writestr("about.json", msgspec.json.encode(about))
            bundle.writestr("step.pt", written.getvalue())
            if entry is not None:
                bundle.writestr("entry", encode(entry))
        with open(self._asked.bundle, "xb") as file:
            file.write(whole.getvalue())


def _prompt(names: dict[str, Any], source: Any, sink: Any) -> None:
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
            f"found. Press Ctrl-D to leave",
            readfunc=ask,
            local=names,
            exitmsg="",
        )


def _with_first(own: ShardFinding, every: Sequence[ShardFinding]) -> ShardFinding:
    others = [each for each in every if each is not own]
    sound = [e.operations for e in others if e.total is not None and not e.bad_gradients]
    first, times = first_not_finite(own.operations, sound), None
    if first is None:
        alike = [each.operations for each in others]
        first, times = first_larger(own.operations, alike) or (None, None)
    times = times if times is None or math.isfinite(times) else None
    return msgspec.structs.replace(own, first=first, times=times)


def _norm(values: torch.Tensor) -> float | None:
    return finite_or_none(float(values.norm()))


def _same(one: float, two: float) -> bool:
    return one == two or (math.isnan(one) and math.isnan(two))
