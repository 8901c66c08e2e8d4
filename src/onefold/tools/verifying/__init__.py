"""Changes the behavior of a Trainer in a run of ``onefold verify``, and in no other run.

Such a run records its steps in the folder of the comparison:

- ``RUN-T.jsonl``: digests of trainer T after each step, see `onefold.tools.verifying.probing`.
- ``RUN-T-state-D.jsonl``: state that changed on device D but must not, see
  `onefold.tools.verifying.probing`.
- ``RUN-T-mathematics.jsonl``: V shards against one, see `onefold.tools.verifying.mathematics`.
- ``RUN-T-scores.jsonl``: the first batch of each evaluation, with V shards and with one.
- ``RUN-T-passes.jsonl``: length of each complete pass of a stream.
- ``RUN-done``: exists while all Trainers so far have made their steps.
- ``RUN-cut``: reason why the script was ended.

Note: past the compared steps
-----------------------------
A script may create its next Trainer only after the last step of the previous one. So it continues
past the compared steps, but nothing is computed for that Trainer any more: a step returns the last
step's result, a loader repeats its last batch (a stream only after a while, because the length of
its passes is compared), and an evaluation or a save of the same model returns its last result.
Files that the script saves with PyTorch are stored in the run's folder, which is deleted with the
run.
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
    # os.path and pathlib use these to check whether a file exists, and its size.
    (os, ("stat", "lstat", "access", "remove", "unlink"), "path", ""),
    (builtins, ("open",), "file", ""),
    (io, ("open",), "file", ""),
)
"""Functions, with the names of their input and output arguments. Files that a script saves with
them, or copies and moves from there, are redirected."""

_PATIENCE = 10
_READ_ON, _READ_ON_S = 1_000, 20.0
"""Number of batches and seconds for which each stream is read past the compared steps."""
_LONGEST = 100_000
"""Number of steps without computation after which a script seems to wait for a result."""
_CUT = (
    f"the script made {_LONGEST} more steps, which compute nothing, with one Trainer. Later "
    f"Trainers were not compared. --trainers 1 ends a script that waits for a small loss sooner"
)

_progress: list[_Progress] = []
"""Progress of each Trainer of the script, in a comparison."""

_saved: set[Path] = set()
"""Directories that the script saved to: the same on all devices, unlike their disks."""


@dataclass
class _Progress:
    """Progress of a Trainer through the compared steps."""

    made: int = 0
    is_done: bool = False
    """Whether all of its compared steps are made, so that no more are computed."""


def adjust(start: RunSetup) -> None:
    """Set up the comparison of the loss as written by the script, in full precision.

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
    """Set up the process of a verified or inspected run, before its script begins."""
    options = options_of(context)
    if options.folder:
        watch_unseeded()
    # Before the script imports any of these functions by name.
    for module, names, read, written in _OF_FILES:
        for name in names:
            setattr(module, name, _aside(getattr(module, name), context, read, written))
    for name in ("listdir", "scandir"):
        setattr(os, name, _with_aside(getattr(os, name), context))
    # Compiled code would not see the functions that a comparison replaces. The default dtype makes
    # the script create its tensors in the comparison's precision from the first line.
    if options.mathematics:
        torch.compiler.set_stance("force_eager")
        torch.set_default_dtype(getattr(torch, options.mathematics))


def _aside(
    call: Callable[..., Any], context: LaunchContext, read: str, written: str
) -> Callable[..., Any]:
    """Redirect a function to the run's folder, unless it reads a file that is not there."""
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
    """Return the mode in which a file is opened; other functions have none, or a number."""
    mode = given.get("mode", "")
    return mode if isinstance(mode, str) else ""


def _with_aside(call: Callable[..., Any], context: LaunchContext) -> Callable[..., Any]:
    """Make a function list redirected files in addition to the folder's own."""

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
    """Entries of a folder, in the form of `os.listdir` and `os.scandir`."""

    def __enter__(self) -> _Listed:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def close(self) -> None:
        """Do nothing: there is no open handle."""


_stat = os.stat
_READING = frozenset("rbtU")


def _is_there(path: str | os.PathLike[str]) -> bool:
    """Whether a file exists at exactly this path."""
    try:
        _stat(path)
    except (OSError, ValueError):
        return False
    return True


def _place_of(path: str | os.PathLike[str], context: LaunchContext) -> Path:
    """Return the path to which a run of a comparison redirects a path of the script."""
    absolute = Path(os.path.abspath(path))
    inspected = os.path.dirname(context.options.tools.get("inspection", {}).get("findings", ""))
    # Paths in these folders belong to onefold, or are already redirected.
    own = filter(None, (options_of(context).folder, context.directory, inspected))
    if any(map(absolute.is_relative_to, own)):
        return absolute
    return Path(context.directory) / "checkpoints" / absolute.relative_to(absolute.anchor)


def _redirect(asked: ScriptCall, context: LaunchContext) -> None:
    """Redirect checkpoints to the run's own folder, so that no file of the script changes.

    They are read from where the run wrote them. A checkpoint that the run did not write does not
    exist for a script that passes ``if_any``, so that every run begins in the same way; a script
    that requires one reads it from its original path.
    """
    place = _place_of(asked.given, context)
    if asked.kind == "save":
        _saved.add(place)
    elif not asked.choices["if_any"] and _saved.isdisjoint((place, place.parent)):
        place = Path(asked.given).absolute()
    asked.given = place


class FilesAside(Hook):
    """Redirects the script's checkpoints in a run that is inspected but not compared.

    Args:
        context: launch context, which names the folder of the run.
    """

    def __init__(self, context: LaunchContext) -> None:
        self._context = context

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Redirect saves, and loads of redirected files."""
        if asked.kind in ("save", "load"):
            _redirect(asked, self._context)
        return make()


class PlainPass:
    """The batches of an evaluation, with the script's payloads; keeps the first batch.

    Args:
        loader: loader of the batches.
        collate: collate function that made their payloads.
    """

    def __init__(self, loader: Loader, collate: KeepingCollate) -> None:
        self.dataset, self.track = loader.dataset, loader.track
        self._loader, self._collate = loader, collate
        self.first_batch: tuple[ShardedBatch, WholeBatch] | None = None
        """The first batch, and the function that joins its samples to one payload."""

    def __iter__(self) -> Iterator[ShardedBatch]:
        for batch in self._loader:
            whole, payloads = whole_of(batch.shards, {batch.loader: self._collate}, batch.loader)
            plain = replace(batch, shards=payloads)
            self.first_batch = self.first_batch or (plain, whole)
            yield plain


class Verifying(Hook):
    """The part of one trainer in a comparison.

    Args:
        context: launch context, which names the folder of the run.
        options: options of the comparison.
        model: the model of the trainer.
        losses: the script's losses, by name.
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
        """Number of batches left, and the time limit, for each stream that is read on."""
        self._pass: PlainPass | None = None
        self._seen: list[object] = []
        """Evaluations that were already compared."""
        self._own: object = None
        self._steps = 0
        self._number = 0
        """Number of the last step."""
        self._users = losses
        self.losses = losses
        """Losses for the engine, by name."""
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
        """Start the comparison. Call it when the trainer has its engine."""
        self._engine, self._devices, self._count = run.engine, run.devices, run.count
        _progress.append(self._progress)
        if self._devices.has_lead:
            self._mark("done").unlink(missing_ok=True)
        # An error would end the run at the first finding; the comparison reports all of them
        # instead.
        for replica in self._engine.context.replicas:
            replica.loss_watch.refuses = False
        if self._mathematics is not None and self._devices.has_lead:
            shards = self._engine.context.exchange.table.storage.shards
            function = ", ".join(map(place_of, self._users.values()))
            limit = tolerance_of(self._engine.context.replicas[0].module)
            header = {"step": 0, "function": function, "shards": shards, "tolerance": limit}
            append_line(self._path("mathematics"), header)

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Compute a call in the comparison's precision, redirect it, or repeat its last result."""
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
        """Return the last step of a loss, with its gradients, in place of all later steps.

        Raises:
            SystemExit: there were too many such steps.
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
            # Whole batches are not made from samples that could be kept.
            keeps = not isinstance(choices["dataset"], FunctionBatches | Items)
            choices["collate"] = KeepingCollate(choices["collate"], self._dtype, keeps=keeps)
        if for_steps:
            # Its last batch is repeated for all later steps.
            choices["repeats"] = lambda: self._repeats(made)
        made: Loader = make()
        if self._mathematics is not None and not for_steps:
            self._pass = PlainPass(made, choices["collate"])
            return self._pass
        if for_steps:
            # Reading a stream always changes its state, so such a change is not a finding.
            if not is_stream(made.dataset):
                self._state.add(made.dataset)
            elif self._devices.has_lead:
                made.track.pass_read = partial(self._note_pass, made)
            if isinstance(choices["collate"], KeepingCollate):
                self._collates[made.track.number] = choices["collate"]
        return made

    def _scored(self, asked: ScriptCall, make: Make) -> Any:
        """Compare the first batch of each score's first evaluation, after the evaluation."""
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
        """Whether a loader is to repeat its last batch."""
        if not self._progress.is_done or self._mathematics or not is_stream(loader.dataset):
            return self._progress.is_done
        left, until_s = self._reading.get(loader, (_READ_ON, time.monotonic() + _READ_ON_S))
        self._reading[loader] = left - 1, until_s
        return left < 1 or time.monotonic() > until_s

    def _note_pass(self, loader: Loader, samples: int) -> None:
        line = {"stream": loader.track.number, "kind": loader.track.size.kind, "samples": samples}
        append_line(self._path("passes"), line)

    def around(self, asked: ScriptCall) -> Surrounds:
        """Observe a step with replaced payloads; or drop results, because the model changes."""
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
        # The script continues after the compared steps, and after the first of several gradients of
        # a step, but its payloads are still wrapped.
        again, self._number = asked.number == self._number, asked.number
        self._steps += not again
        compared = not again and self._steps <= self._options.steps
        if mathematics is not None:
            mathematics.user = self._users[asked.name]
            # Parts shared by all shards (-1) are comparable: the one shard gets the same value.
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
        """Note a computed step; end the comparison when all Trainers have made their steps.

        Raises:
            SystemExit: no more Trainers are to be compared.
        """
        if not asked.computed:
            return
        self._same[step.name] = step
        options, own = self._options, self._progress
        own.made += 1
        # Alternating Trainers continue until the last has made its steps; one may never make any.
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
        """Return the result of a call, or its previous result if the model is the same.

        Args:
            call: key that is equal for calls with the same result on the same data.
            data: data set of the call.
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
        """Convert a batch, or a part of one, to the payloads for the loss."""
        if self._mathematics is None:
            return part
        if isinstance(part, ShardedBatch):
            return self._unpacked(part)[0]
        return cast_floats(part, self._dtype)

    def _unpacked(self, batch: ShardedBatch) -> tuple[ShardedBatch, WholeBatch]:
        """Return the batch with plain payloads, and the whole batch to which its shards belong."""
        if batch.data_pass is None:
            return batch, whole_tensors(self._own, batch.dim)
        whole, payloads = whole_of(batch.shards, self._collates, batch.loader, batch.dim)
        return replace(batch, shards=payloads), whole

    def _mark(self, what: str) -> Path:
        """Return a file by which the lead reports the script's progress to the comparison."""
        return Path(self._options.folder, f"{self._options.run}-{what}")

    def _path(self, what: str) -> Path:
        return self._mark(f"{self._devices.trainer}-{what}.jsonl")
