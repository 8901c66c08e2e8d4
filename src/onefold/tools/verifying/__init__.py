"""What a Trainer does differently in a run of ``onefold verify``; nothing in any other run.

Such a run records its steps, in the folder of the comparison:

- ``RUN-T.jsonl``: the digests of trainer T after each step, see `onefold.tools.verifying.probing`.
- ``RUN-T-state-D.jsonl``: state that changed on device D and must not, see
  `onefold.tools.verifying.probing`.
- ``RUN-T-mathematics.jsonl``: V shards against one, see `onefold.tools.verifying.mathematics`.
- ``RUN-T-scores.jsonl``: the first batch of each evaluation, by V shards and by one.
- ``RUN-T-passes.jsonl``: how long each pass of a stream was that came to its end.
- ``RUN-done``: there while all Trainers so far have made their steps.
- ``RUN-cut``: why the script was ended.

Note: past the steps that are compared
--------------------------------------
A script may make its next Trainer only after the last step of the one before. So it goes on past
the steps that are compared, but nothing is computed any more for that Trainer: a step returns the
last one again, a loader gives its last batch again (a stream only after a while, as the length of
its passes is compared), an evaluation or a save of the same model its
last result. What the script saves by PyTorch lies in the folder of the run, which ends with it.
"""

from __future__ import annotations

import builtins
import copy
import functools
import inspect
import io
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from onefold.core.batch import ShardedBatch, map_parts
from onefold.core.call_digest import Call
from onefold.core.options import LaunchContext
from onefold.core.settings import AS_GIVEN
from onefold.data_order.indexed import FunctionBatches, Items
from onefold.data_order.loader import Loader
from onefold.data_order.reader import is_stream
from onefold.session.run import RunSetup, RunView
from onefold.shard.replica import LossFunction
from onefold.step.hook import Attempt, Hook, Make, ScriptCall, Spans, Surrounds
from onefold.step.result import Step
from onefold.system.safe_files import append_line
from onefold.tools.verifying.causes import causes_of
from onefold.tools.verifying.mathematics import Mathematics, compare_score, tolerance_of
from onefold.tools.verifying.probing import (
    StateWatch,
    VerifyOptions,
    options_of,
    place_of,
    unseeded,
    watch_unseeded,
)
from onefold.tools.verifying.surroundings import (
    KeepingCollate,
    WholeBatch,
    cast_floats,
    whole_of,
    whole_tensors,
)

__all__ = ["Verifying", "adjust", "prepare", "prepare_process"]


_OF_FILES: tuple[tuple[Any, tuple[str, ...], str, str], ...] = (
    (torch, ("save",), "", "f"),
    (torch, ("load",), "f", ""),
    (safetensors.torch, ("save_file",), "", "filename"),
    (safetensors.torch, ("load_file",), "filename", ""),
    (safetensors, ("safe_open",), "filename", ""),
    (os, ("rename", "replace"), "src", "dst"),
    (shutil, ("copy", "copy2", "copyfile", "move"), "src", "dst"),
    # By these, os.path and pathlib ask whether a file is there, and how large it is.
    (os, ("stat", "lstat", "access", "remove", "unlink"), "path", ""),
    (builtins, ("open",), "file", ""),
    (io, ("open",), "file", ""),
)
"""Functions with the names of their arguments that are read, and written: what a script saves by
them, and copies and moves from there, stays aside."""

_PATIENCE = 10
_READ_ON, _READ_ON_S = 1_000, 20.0
"""Batches and time for which each stream is read on past the steps that are compared."""
_LONGEST = 100_000
"""Steps that are not computed, after which a script is taken for one that waits for a result."""
_CUT = (
    f"the script made {_LONGEST} further steps, which compute nothing, with one Trainer. Trainers "
    f"after it were not compared. --trainers 1 ends a script that waits for a small loss sooner"
)

_progress: list[_Progress] = []
"""Of each Trainer of the script, in a comparison."""

_saved: set[Path] = set()
"""Directories that the script has saved to; alike on all devices, which the disk may not be."""


@dataclass
class _Progress:
    """How far a Trainer is with the steps that are compared."""

    made: int = 0
    is_done: bool = False
    """Whether all of its steps that are compared were made, so that no more are computed."""


def adjust(start: RunSetup) -> None:
    """Compare the loss as the script computes it in full precision, not how it is computed.

    Compiled code would also not see the random draws that the comparison replaces.
    """
    if options_of(start.context).mathematics:
        start.settings = replace(start.settings, precision=AS_GIVEN, microbatch=None, compile=False)


def prepare(start: RunSetup) -> Callable[[RunView], Hook]:
    """Replace the losses of a Trainer whose mathematics is compared."""
    options = options_of(start.context)
    if not options.folder:
        return lambda run: FilesAside(start.context)
    made = Verifying(start.context, options, start.user.module, start.losses)
    start.losses = made.losses

    def begin(run: RunView) -> Hook:
        made.start_comparison(run)
        return made

    return begin


def prepare_process(context: LaunchContext) -> None:
    """Set up the process before the script of a run begins that is only looked at."""
    options = options_of(context)
    if options.folder:
        watch_unseeded()
    # Before the script imports any of them by name.
    for module, names, read, written in _OF_FILES:
        for name in names:
            setattr(module, name, _aside(getattr(module, name), context, read, written))
    for name in ("listdir", "scandir"):
        setattr(os, name, _with_aside(getattr(os, name), context))
    # Compiled code would not see the functions that a comparison replaces, and the script is to
    # make its tensors in the comparison's precision from the first line.
    if options.mathematics:
        torch.compiler.set_stance("force_eager")
        torch.set_default_dtype(getattr(torch, options.mathematics))


def _aside(
    call: Callable[..., Any], context: LaunchContext, read: str, written: str
) -> Callable[..., Any]:
    """Have a function write to the run's folder, unless it reads a file that is not there."""
    signature = inspect.signature(call)

    @functools.wraps(call)
    def aside(*args: Any, **names: Any) -> Any:
        bound = signature.bind(*args, **names)
        given = bound.arguments
        for name in filter(None, (read, written)):
            if not isinstance(given[name], str | os.PathLike):
                break
            place = _place_of(given[name], context)
            if name == read and (not _is_there(place) or not _READING.issuperset(_mode(given))):
                break
            if name == written:
                place.parent.mkdir(parents=True, exist_ok=True)
            given[name] = place
        return call(*bound.args, **bound.kwargs)

    return aside


def _mode(given: Mapping[str, Any]) -> str:
    """How a file is opened; other functions have no mode, or a number."""
    mode = given.get("mode", "")
    return mode if isinstance(mode, str) else ""


def _with_aside(call: Callable[..., Any], context: LaunchContext) -> Callable[..., Any]:
    """Have a function list what was written aside as well as what a folder has itself."""

    @functools.wraps(call)
    def listing(path: Any = ".") -> Any:
        if not isinstance(path, str | os.PathLike):
            return call(path)
        place = _place_of(path, context)
        if place == Path(os.path.abspath(path)) or not _is_there(place):
            return call(path)
        own = [*call(path)] if _is_there(path) else []
        known = {getattr(each, "name", each) for each in own}
        beside = [each for each in call(place) if getattr(each, "name", each) not in known]
        return _Listed([*own, *beside])

    return listing


class _Listed(list[Any]):
    """Entries of a folder, as `os.listdir` and `os.scandir` give them."""

    def __enter__(self) -> _Listed:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def close(self) -> None:
        """Nothing is open."""


_stat = os.stat
_READING = frozenset("rbtU")


def _is_there(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a file, at this very place."""
    try:
        _stat(path)
    except (OSError, ValueError):
        return False
    return True


def _place_of(path: str | os.PathLike[str], context: LaunchContext) -> Path:
    """Where a run of a comparison has what the script saves under a path."""
    absolute = Path(os.path.abspath(path))
    inspected = os.path.dirname(context.options.tools.get("inspection", {}).get("findings", ""))
    # What lies there already is onefold's own, or a path that was returned before.
    own = filter(None, (options_of(context).folder, context.directory, inspected))
    if any(map(absolute.is_relative_to, own)):
        return absolute
    return Path(context.directory) / "checkpoints" / absolute.relative_to(absolute.anchor)


def _redirect(asked: ScriptCall, context: LaunchContext) -> None:
    """Have checkpoints written to the run's own folder, so that no file of the script changes.

    They are read where the run wrote them. A checkpoint that it did not write is absent for a
    script that asks whether there is any (``if_any``), so that every run begins in the same way; a
    script that needs one reads it from its own place.
    """
    place = _place_of(asked.given, context)
    if asked.kind == "save":
        _saved.add(place)
    elif not asked.choices["if_any"] and _saved.isdisjoint((place, place.parent)):
        place = Path(asked.given).absolute()
    asked.given = place


class FilesAside(Hook):
    """Keeps the script's checkpoints aside, in a run that is looked at and not compared.

    Args:
        context: names the folder of the run.
    """

    def __init__(self, context: LaunchContext) -> None:
        self._context = context

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Write aside, and read from there."""
        if asked.kind in ("save", "load"):
            _redirect(asked, self._context)
        return make()


class PlainPass:
    """The batches of an evaluation, with the payloads of the script; keeps the first.

    Args:
        loader: makes the batches.
        collate: what it makes their payloads by.
    """

    def __init__(self, loader: Loader, collate: KeepingCollate) -> None:
        self.dataset, self.track = loader.dataset, loader.track
        self._loader, self._collate = loader, collate
        self.first_batch: tuple[ShardedBatch, WholeBatch] | None = None
        """The first batch, and what makes all of its samples one payload."""

    def __iter__(self) -> Iterator[ShardedBatch]:
        for batch in self._loader:
            whole, payloads = whole_of(batch.shards, {batch.loader: self._collate}, batch.loader)
            plain = replace(batch, shards=payloads)
            self.first_batch = self.first_batch or (plain, whole)
            yield plain


class Verifying(Hook):
    """One trainer's part in a comparison.

    Args:
        context: names the folder of the run.
        options: those of the comparison.
        model: the model of the trainer.
        losses: those of the script, by name.
    """

    def __init__(
        self,
        context: LaunchContext,
        options: VerifyOptions,
        model: torch.nn.Module,
        losses: Mapping[str, LossFunction],
    ) -> None:
        self._context, self._options = context, options
        self._state = StateWatch(model, losses.values())
        self._collates: dict[int, KeepingCollate] = {}
        self._reading: dict[Loader, tuple[int, float]] = {}
        """Of streams that are read on, how many batches are left, and until when."""
        self._pass: PlainPass | None = None
        self._seen: list[object] = []
        """The evaluations that were compared."""
        self._own: object = None
        self._steps = 0
        self._number = 0
        """Number of the last step."""
        self._users = losses
        self.losses = losses
        """The losses that the engine is to use, by name."""
        self._mathematics: Mathematics | None = None
        self._dtype: torch.dtype | None = None
        self._progress = _Progress()
        self._same: dict[str, Step] = {}
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []
        self._results: deque[tuple[object, object, Any]] = deque(maxlen=8)
        if options.mathematics:
            if options.mathematics == "float64":
                self._dtype = torch.float64
                model.double()
            self._mathematics = Mathematics(model, next(iter(losses.values())))
            self.losses = dict.fromkeys(losses, self._mathematics.loss)

    def start_comparison(self, run: RunView) -> None:
        """Begin the comparison, now that the trainer has its engine."""
        self._engine, self._devices, self._count = run.engine, run.devices, run.count
        _progress.append(self._progress)
        if self._devices.has_lead:
            self._mark("done").unlink(missing_ok=True)
        # A refusal would end the run at the first finding; the comparison reports what it does.
        for replica in self._engine.context.replicas:
            replica.loss_watch.refuses = False
        if self._mathematics is not None and self._devices.has_lead:
            shards = self._engine.context.exchange.table.storage.shards
            function = ", ".join(map(place_of, self._users.values()))
            limit = tolerance_of(self._engine.context.replicas[0].module)
            header = {"step": 0, "function": function, "shards": shards, "tolerance": limit}
            append_line(self._path("mathematics"), header)

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Have a call compute in the comparison's precision, write aside, or compute nothing."""
        match asked.kind:
            case "step" | "gradient":
                return self._step(asked, make)
            case "result" if asked.data is not None:
                return self._result(asked.key, asked.data, partial(self._scored, asked, make))
            case "save":
                _redirect(asked, self._context)
                what = asked.given, asked.choices["keeping"], asked.choices["extra"]
                return self._result(what, None, make)
            case "load":
                self._results.clear()
                _redirect(asked, self._context)
            case "payloads":
                asked.given = self._plain(asked.given)
            case "loader" | "pass":
                return self._loader(asked, make)
        return make()

    def _step(self, asked: ScriptCall, make: Make) -> Step:
        if self._progress.is_done and asked.name in self._same:
            return self._step_again(asked)
        if self._mathematics is not None:
            if not isinstance(asked.given, ShardedBatch):
                asked.given = map_parts(asked.given, self._plain)
            self._own = asked.given
        step: Step = make()
        if asked.kind == "gradient":
            model = self._engine.context.replicas[0].module
            self._gradients = [(each, each.grad) for each in model.parameters()]
        return step

    def _step_again(self, asked: ScriptCall) -> Step:
        """Return the last step of a loss, which stands for all that follow, with its gradients.

        Raises:
            SystemExit: that was so for very many steps.
        """
        self._progress.made += 1
        if self._progress.made > _LONGEST:
            if self._devices.has_lead:
                self._mark("cut").write_text(_CUT)
            raise SystemExit(0)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        asked.computed = False
        same, batch = self._same[asked.name], asked.given
        if not asked.begins:
            return same
        return self._count(asked, same, batch if isinstance(batch, ShardedBatch) else None)

    def _loader(self, asked: ScriptCall, make: Make) -> Loader | PlainPass:
        choices, for_steps = asked.given, asked.kind == "loader"
        if self._mathematics is not None:
            # Whole batches are not made of samples that could be kept.
            keeps = not isinstance(choices["dataset"], FunctionBatches | Items)
            choices["collate"] = KeepingCollate(choices["collate"], self._dtype, keeps=keeps)
        if for_steps:
            # Its last batch stands for all that follow.
            choices["repeats"] = lambda: self._repeats(made)
        made: Loader = make()
        if self._mathematics is not None and not for_steps:
            self._pass = PlainPass(made, choices["collate"])
            return self._pass
        if for_steps:
            # A stream moves whenever it is read: what it keeps of that is no finding.
            if not is_stream(made.dataset):
                self._state.add(made.dataset)
            elif self._devices.has_lead:
                made.track.pass_read = partial(self._note_pass, made)
            if isinstance(choices["collate"], KeepingCollate):
                self._collates[made.track.number] = choices["collate"]
        return made

    def _scored(self, asked: ScriptCall, make: Make) -> Any:
        """Compare the first batch of the first evaluation by each score, once it is done."""
        given, self._pass = self._pass, None
        found, key = make(), asked.key
        assert isinstance(key, tuple)
        if (
            given is None
            or given.first_batch is None
            or key[0] is not Call.EVALUATE
            or key in self._seen
        ):
            return found
        self._seen.append(key)
        batch, whole = given.first_batch
        if batch.shares.shards > 1:
            differ = compare_score(self._engine, asked.given, batch, whole)
            line = {"function": place_of(key[1]), "shards": batch.shares.shards, "differ": differ}
            append_line(self._path("scores"), line)
        return found

    def _repeats(self, loader: Loader) -> bool:
        """Whether a loader is to give its last batch again and again."""
        if not self._progress.is_done or self._mathematics or not is_stream(loader.dataset):
            return self._progress.is_done
        left, until_s = self._reading.get(loader, (_READ_ON, time.monotonic() + _READ_ON_S))
        self._reading[loader] = left - 1, until_s
        return left < 1 or time.monotonic() > until_s

    def _note_pass(self, loader: Loader, samples: int) -> None:
        line = {"stream": loader.track.number, "kind": loader.track.size.kind, "samples": samples}
        append_line(self._path("passes"), line)

    def around(self, asked: ScriptCall) -> Surrounds:
        """Look at a step, which is of other payloads; or forget results, as the model changes."""
        return self._around_block() if asked.batch is None else self._around_step(asked)

    @contextmanager
    def _around_block(self) -> Iterator[None]:
        self._results.clear()
        try:
            yield
        finally:
            self._results.clear()

    @contextmanager
    def _around_step(self, asked: ScriptCall) -> Iterator[None]:
        state, mathematics, batch = self._state, self._mathematics, asked.batch
        assert batch is not None
        # Past the steps that are compared, and past the first of several gradients of a step, the
        # script goes on; its payloads are still wrapped.
        again, self._number = asked.number == self._number, asked.number
        self._steps += not again
        compared = not again and self._steps <= self._options.steps
        if mathematics is not None:
            mathematics.user = self._users[asked.name]
            # Of what all shards have, one shard has the same.
            if any(other >= 0 or batch.parts for other in batch.others):
                if compared:
                    append_line(self._path("mathematics"), {"step": self._steps, "causes": []})
                yield
                return
        if not compared:
            asked.batch = self._plain(batch)
            yield
            return
        with state.step() as states:
            if mathematics is None:
                yield
            else:
                asked.batch, whole = self._unpacked(batch)
                with mathematics.step(self._engine, asked.batch, whole, asked.number) as found:
                    yield
        if mathematics is not None:
            causes = causes_of(found, state.attributes, state.generators)
            line = {**asdict(found), "step": self._steps, "causes": [*map(asdict, causes)]}
            append_line(self._path("mathematics"), line)
        line = {"step": self._steps, "states": states, "unseeded": unseeded}
        line |= {"attributes": state.attributes, "generators": state.generators}
        append_line(self._path(f"state-{self._devices.own[0]}"), line)

    def around_compute(self, attempt: Attempt) -> None:
        """Compare the gradient of a step whose mathematics is compared."""
        if self._mathematics is not None and self._mathematics.inside:
            attempt.gradient_taken = self._mathematics.compare

    def after_step(self, asked: ScriptCall, step: Step, spans: Spans) -> None:
        """Note a computed step; end the comparison of all Trainers that have made theirs.

        Raises:
            SystemExit: no more Trainers are to be compared.
        """
        if not asked.computed:
            return
        self._same[step.name] = step
        options, own = self._options, self._progress
        own.made += 1
        # Those that alternate go on until the last has made its steps; one may never make any.
        own.is_done |= own.made >= _PATIENCE * options.steps
        under_way = [each for each in _progress if not each.is_done]
        if all(each.made >= options.steps for each in under_way):
            for each in under_way:
                each.is_done = True
            if self._devices.has_lead:
                self._mark("done").touch()
            if 0 < options.trainers <= len(_progress):
                raise SystemExit(0)

    def close(self) -> None:
        """Note that the Trainer makes no more steps."""
        self._progress.is_done = True

    def _result(self, call: object, data: object, compute: Callable[[], Any]) -> Any:
        """Return what a call gives; where the model is the same, what it gave before.

        Args:
            call: equal for calls that give the same, from the same data.
            data: the object that the call goes through.
            compute: makes the call.
        """
        if not self._progress.is_done:
            return compute()
        for known, of, result in self._results:
            if known == call and of is data:
                return copy.deepcopy(result)
        self._results.append((call, data, compute()))
        return copy.deepcopy(self._results[-1][-1])

    def _plain(self, part: Any) -> Any:
        """Convert a batch, or a part of one, to the payloads that the loss is to see."""
        if self._mathematics is None:
            return part
        if isinstance(part, ShardedBatch):
            return self._unpacked(part)[0]
        return cast_floats(part, self._dtype)

    def _unpacked(self, batch: ShardedBatch) -> tuple[ShardedBatch, WholeBatch]:
        """Return the batch with plain payloads, and the whole batch that they are shards of."""
        if batch.data_pass is None:
            return batch, whole_tensors(self._own, batch.dim)
        whole, payloads = whole_of(batch.shards, self._collates, batch.loader, batch.dim)
        return replace(batch, shards=payloads), whole

    def _mark(self, what: str) -> Path:
        """A file by which the lead tells the comparison how far the script has come."""
        return Path(self._options.folder, f"{self._options.run}-{what}")

    def _path(self, what: str) -> Path:
        return self._mark(f"{self._devices.trainer}-{what}.jsonl")
