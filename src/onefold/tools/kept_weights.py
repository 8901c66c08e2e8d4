"""Saves and restores copies of weights that a script keeps in memory.

`KeptWeights` saves copies of the model's weights in the checkpoints of a run, and restores them in
the script that resumes the run. If that script uses other weights that it made during replay, an
error names the line that made them.

Note: which copies are saved
----------------------------
Scripts copy weights with `copy.deepcopy`, ``clone`` and ``cpu``: the best weights so far, or a
model that follows another one. Each copy of a tensor of the model, or of such a copy, is registered
under its place in the program: the number of steps, the lines of the calls that lead there, and a
count of the copies made at this place. A checkpoint contains the values of all registered copies
that the script still refers to. The script that resumes the run makes the same copies at the same
places. A copy that had not changed before the checkpoint gets its values immediately; all others
get them at the resume position.

Note: weights that raise
------------------------
During replay, the model has the values of the checkpoint (`onefold.tools.answers`). They are later
values, so the script cannot compute its earlier results from them. The model's tensors are
therefore hidden: they stay the same objects, with another class, and every result of a hidden
tensor is hidden too, as is every tensor written to in such a computation. Only an operation that
leaves tensors (for a number, an array, a file) raises. At the resume position, the tensors of the
model and the saved copies are shown again. All others raise from then on, whatever the script does
with them. onefold itself sees plain tensors throughout.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from types import CodeType, FrameType
from typing import Any, SupportsIndex

import torch

from onefold.core.flat import named_tensors, tensor_digests
from onefold.core.structure import tensors_of
from onefold.deferred.access import HARMLESS
from onefold.errors import StateError
from onefold.system.accelerator import DTYPES
from onefold.system.compat import address_of, hidden_from_classes, is_transformed, version_of
from onefold.system.words import script_line

__all__ = ["KeptWeights", "watch_copies"]

_COPYING = (
    *((torch.Tensor, name) for name in ("__deepcopy__", "clone", "cpu")),
    (torch.nn.Parameter, "__deepcopy__"),
)
"""Methods that scripts use to copy weights."""
_ABOUT = frozenset(
    (
        *("stride", "storage_offset", "is_contiguous", "is_inference", "is_pinned", "is_shared"),
        *("untyped_storage", "is_set_to", "is_same_size", "is_neg", "is_conj", "result_type"),
        *("type", "__hash__", "_has_compatible_shallow_copy_type"),
    )
)
"""Names of other functions that do not read the values of a tensor."""
_OVERWRITING = frozenset((torch.Tensor.copy_, torch.Tensor.fill_, torch.Tensor.zero_))
_DEPTH = 6
"""Maximum number of calls that identify a place in the program."""
_NOW = ".now"
"""Suffix of the names of copies that have changed since they were made."""

_BETWEEN = ("torch", "copy")
"""Packages whose frames are between a line of the script and a method of a tensor."""
_ON_STEP = "onefold.tools.step_calls"


@dataclass(slots=True)
class _Copy:
    """A registered copy. It is removed from the registry when its memory is freed."""

    memory: weakref.ref[torch.UntypedStorage]
    like: torch.Tensor
    """Meta tensor with the shape, strides and dtype of the copy."""
    offset: int
    source: weakref.ref[torch.Tensor]
    digest: str = ""
    """Digest of its values when it was made; empty if these values were unknown."""

    def tensor(self) -> torch.Tensor | None:
        """Return the copy with its current values; None if its memory is freed."""
        memory, like = self.memory(), self.like
        if memory is None:
            return None
        with hidden_from_classes():
            empty = torch.empty(0, dtype=like.dtype, device=memory.device)
            return empty.set_(memory, self.offset, like.shape, like.stride())


_Calls = list[tuple[str, CodeType]]
"""The calls that lead to a line of the script, innermost first: line and code of each."""


class _Copies:
    """Registers the copies that a script makes of weights."""

    def __init__(self) -> None:
        self.noted: dict[str, _Copy] = {}
        self.memories: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Memory of the copies, by address."""
        self._early: dict[int, tuple[_Calls, _Copy]] = {}
        """Copies of any tensors that were made before the Trainer, by a running number."""
        self._numbers = itertools.count()
        self._run: KeptWeights | None = None
        self._ends: Collection[CodeType] = ()
        """Code of the callers that created the Trainer: outer calls do not distinguish places."""
        self._counts: tuple[int, Counter[str]] = -1, Counter()
        self._is_copying = False
        self._before = [(kind, name, vars(kind).get(name)) for kind, name in _COPYING]
        for kind, name in _COPYING:
            setattr(kind, name, self._noting(getattr(kind, name)))

    @property
    def is_taken(self) -> bool:
        """Whether a run uses these copies."""
        return self._run is not None

    def begin(self, run: KeptWeights, model: Collection[torch.Tensor]) -> None:
        """Register copies for a run from now on, including earlier copies of its model."""
        self._run, self._ends = run, {frame.f_code for frame in _callers()}
        own, early = {*map(id, model)}, [*self._early.values()]
        self._early.clear()
        for calls, each in early:
            source, tensor = each.source(), each.tensor()
            if id(source) in own and source is not None and tensor is not None:
                self._add(calls, source, tensor)

    def close(self) -> None:
        """Restore PyTorch's own methods."""
        for kind, name, before in self._before:
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)

    def _noting(self, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(call)
        def noting(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
            if self._is_copying:  # one of these methods calls another
                return call(tensor, *given, **named)
            self._is_copying = True
            try:
                made = call(tensor, *given, **named)
                if made is not tensor and not is_transformed(tensor):
                    self._note(tensor, made, deep=call.__name__ == "__deepcopy__")
            finally:
                self._is_copying = False
            return made

        return noting

    def _note(self, source: torch.Tensor, made: torch.Tensor, *, deep: bool) -> None:
        if made.layout != torch.strided:
            return
        if self._run is None:
            if deep or isinstance(source, torch.nn.Parameter):
                number, early = next(self._numbers), self._early
                copy = _copy_of(made, source, lambda: early.pop(number, None))
                early[number] = _calls(()) or [], copy
        elif self._run.is_followed(source) and (calls := _calls(self._ends)):
            self._run.note_copy(self._add(calls, source, made), source, made)

    def _add(self, calls: _Calls, source: torch.Tensor, made: torch.Tensor) -> str:
        """Register a copy, and return its name."""
        assert self._run is not None
        words = []
        for word, code in calls[:_DEPTH]:
            words.append(word)
            if code in self._ends:
                break
        step, place = self._run.step(), hashlib.blake2b("/".join(words).encode(), digest_size=8)
        if step != self._counts[0]:
            self._counts = step, Counter()
        counts, at = self._counts[1], f"{step}/{place.hexdigest()}"
        counts[at] += 1
        name = f"{at}/{counts[at]}"
        copy = _copy_of(made, source, lambda: self.noted.pop(name, None))
        self.memories[_address(made)] = copy.memory
        with hidden_from_classes():
            copy.digest = tensor_digests({"": made.detach()})[""]
        self.noted[name] = copy
        return name


def _copy_of(made: torch.Tensor, source: torch.Tensor, gone: Callable[[], object]) -> _Copy:
    with hidden_from_classes():
        memory = weakref.ref(made.untyped_storage(), lambda _: gone())
        like = torch.empty_like(made.detach(), device="meta")
        return _Copy(memory, like, int(made.storage_offset()), weakref.ref(source))


_copies: list[_Copies] = []
"""The registry of this process, if any."""


def watch_copies() -> None:
    """Register copies from now on, even before the script creates a Trainer."""
    if not _copies:
        _copies.append(_Copies())


def _calls(ends: Collection[CodeType]) -> _Calls | None:
    """Return the calls that lead to this one, up to ``ends``; None inside onefold."""
    calls: _Calls = []
    for frame in _callers():
        if _is_ours(frame):
            # Before there is a Trainer, the search ends at the launcher, which runs the script.
            # Later, a copy made by onefold is not the script's, but `Trainer.on_step` calls
            # functions of the script.
            return calls if not ends or frame.f_globals["__name__"] == _ON_STEP else None
        calls.append((f"{frame.f_code.co_qualname}:{frame.f_lineno}", frame.f_code))
        if frame.f_code in ends:
            break
    return calls


def _callers() -> Iterator[FrameType]:
    """Yield the frames of callers outside PyTorch and this module, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name.partition(".")[0] not in _BETWEEN:
            yield frame
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name.startswith("onefold.") and not name.startswith("onefold.integrations.")


class KeptWeights:
    """Saves and restores the weights that the script of a run keeps.

    Args:
        module: the model of the run.
        step: returns the number of completed steps.
    """

    def __init__(self, module: torch.nn.Module, step: Callable[[], int]) -> None:
        if _copies and _copies[0].is_taken:
            _copies.pop().close()  # left by a Trainer whose creation failed
        watch_copies()
        self._module, self._copies = module, _copies[0]
        self.step = step
        self._known: tuple[int, set[int]] = -1, set()
        self._given: Mapping[str, torch.Tensor] = {}
        """Copies in the checkpoint, by name."""
        self._where = ""
        self._is_done = True
        """Whether the replay is over, or there is none."""
        self.writes = False
        """Whether a computation with hidden tensors wrote to a tensor, such as the model's."""
        self._hidden: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        """Hidden tensors and the lines that made them, by identity."""
        self._classes: dict[type, type] = {}
        self._plain: dict[type, type] = {}
        self._living: tuple[int, dict[int, list[weakref.ref[torch.Tensor]]]] = -1, {}
        self._copies.begin(self, named_tensors(module).values())

    def kept(self) -> dict[str, torch.Tensor]:
        """Copy to the host what the script still refers to; the keys are names to save."""
        noted, found = self._copies.noted, {}
        for name, each in list(noted.items()):
            tensor = each.tensor()
            if tensor is not None and tensor.dtype in DTYPES:
                changed = tensor_digests({"": tensor})[""] != each.digest
                found[name + _NOW * changed] = tensor.to("cpu", copy=True).contiguous()
        return found

    def give(self, given: Mapping[str, torch.Tensor], where: str) -> None:
        """Begin the replay with the copies in the checkpoint.

        Args:
            given: copies in the checkpoint, by name.
            where: description of the checkpoint, for messages.
        """
        self._given, self._where, self._is_done = given, where, False
        for name, each in self._copies.noted.items():
            self._keep_for_later(name, each)

    def _keep_for_later(self, name: str, copy: _Copy) -> None:
        if name + _NOW in self._given:
            copy.digest = ""
            for tensor in self._aliases(copy.memory()):
                self._hide(tensor)

    def hide_model(self) -> None:
        """Hide the model's tensors, because they have the values of a later step."""
        for tensor in named_tensors(self._module).values():
            self._hide(tensor)

    def show_model(self) -> None:
        """Make the model's tensors plain again, once they have the values the script expects."""
        self._show(self._addresses())

    def end(self) -> None:
        """Show the model and restore saved copies; other hidden tensors raise from now on."""
        if self._is_done:
            return
        self.show_model()
        for name, each in list(self._copies.noted.items()):
            tensor, given = each.tensor(), self._given.get(name, self._given.get(name + _NOW))
            if tensor is None or not self._is_hidden_memory(tensor):
                continue
            if given is None or given.shape != tensor.shape:
                del self._copies.noted[name]  # its values are wrong: do not save them
                continue
            tensor.copy_(given)
            self._show({_address(tensor)})
        self._is_done, self._given, self._living = True, {}, (-1, {})

    def close(self) -> None:
        """Show all hidden tensors, and restore PyTorch's methods."""
        for found, _ in list(self._hidden.values()):
            self._show_one(found())
        if _copies:
            _copies.pop().close()

    def is_followed(self, source: torch.Tensor) -> bool:
        """Whether a tensor shares memory with the model or with a registered copy."""
        if self._known[0] != self.step():
            self._known = self.step(), self._addresses()
        if (address := _address(source)) in self._known[1]:
            return True
        memory = self._copies.memories.get(address)
        return memory is not None and memory() is not None

    def _addresses(self) -> set[int]:
        return {_address(each) for each in named_tensors(self._module).values()}

    def note_copy(self, name: str, source: torch.Tensor, made: torch.Tensor) -> None:
        """During replay, give a copy its saved values, or hide it."""
        if self._is_done:
            return
        given = self._given.get(name)
        if given is not None and given.shape == made.shape and given.dtype == made.dtype:
            self._show_one(made)
            with torch.no_grad(), hidden_from_classes():
                made.data.copy_(given)
                self._copies.noted[name].digest = tensor_digests({"": made.detach()})[""]
        elif name + _NOW in self._given or id(source) in self._hidden:
            self._copies.noted[name].digest = ""
            self._hide(made)

    def _hide(self, tensor: torch.Tensor) -> None:
        kind = type(tensor)
        if kind in self._plain:
            return
        if kind not in self._classes:
            self._classes[kind] = self._class_like(kind)
            self._plain[self._classes[kind]] = kind
        number, hidden = id(tensor), self._hidden
        tensor.__class__ = self._classes[kind]
        gone = weakref.ref(tensor, lambda _: hidden.pop(number, None))
        hidden[number] = gone, script_line()

    def _show(self, addresses: Collection[int]) -> None:
        for found, _ in list(self._hidden.values()):
            tensor = found()
            if tensor is not None and _address(tensor) in addresses:
                self._show_one(tensor)

    def _show_one(self, tensor: torch.Tensor | None) -> None:
        if tensor is not None and type(tensor) in self._plain:
            tensor.__class__ = self._plain[type(tensor)]
            self._hidden.pop(id(tensor), None)

    def _is_hidden_memory(self, tensor: torch.Tensor) -> bool:
        address, all_hidden = _address(tensor), list(self._hidden.values())
        each = [found() for found, _ in all_hidden]
        return any(t is not None and _address(t) == address for t in each)

    def _aliases(self, memory: torch.UntypedStorage | None) -> list[torch.Tensor]:
        """Return all Python tensors that share some memory."""
        if memory is None:
            return []
        at, living = self._living
        if at != self.step():
            # Search at most once per step: most scripts write to the same tensors each time.
            living = defaultdict(list)
            kinds = torch.Tensor, torch.nn.Parameter, *self._plain
            for each in (found for found in gc.get_objects() if type(found) in kinds):
                if each.layout == torch.strided and not is_transformed(each):
                    living[_address(each)].append(weakref.ref(each))
            self._living = self.step(), living
        return [t for found in living.get(address_of(memory), ()) if (t := found()) is not None]

    def _compute(
        self, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]
    ) -> Any:
        """Compute with hidden tensors, and hide the results."""
        plain: Callable[..., Any] = torch.Tensor.__torch_function__
        about = func in HARMLESS or getattr(func, "__name__", "") in _ABOUT
        # Metadata does not depend on the values, and onefold itself sees plain tensors.
        if about or _is_ours(next(_callers())):
            return plain(func, (), args, given)
        tensors = [*tensors_of((args, given))]
        hidden = [each for each in tensors if type(each) in self._plain]
        if func in _OVERWRITING and self._is_overwritten(args[0], hidden):
            result = plain(func, (), args, given)
            self._show({_address(args[0])})
            return result
        self._refuse_lost(hidden[0])
        before = [*map(version_of, tensors)]
        result = plain(func, (), args, given)
        made = [*tensors_of(result)]
        # A number or an array leaves tensors: it cannot be hidden.
        if result is not None and not made:
            raise self._refusal(hidden[0])
        for tensor, version in zip(tensors, before, strict=True):
            if version_of(tensor) != version:
                self.writes = True
                if type(tensor) not in self._plain:
                    # Other tensors that share this memory now have the written values too.
                    made += [tensor, *self._aliases(tensor.untyped_storage())]
        for each in made:
            self._hide(each)
        return result

    def _is_overwritten(self, target: torch.Tensor, hidden: Sequence[torch.Tensor]) -> bool:
        """Whether a call replaces all values of a tensor, not the model's, with valid ones."""
        whole = target.untyped_storage().nbytes() == target.nbytes
        others = [each for each in hidden if each is not target]
        return whole and not others and _address(target) not in self._addresses()

    def _refuse_lost(self, tensor: torch.Tensor) -> None:
        if self._is_done:
            raise self._refusal(tensor)

    def _refusal(self, tensor: torch.Tensor) -> StateError:
        _, line = self._hidden[id(tensor)]
        if not self._is_done:
            return StateError(
                f"{script_line()}: the script reads weights during replay, {self._where}, but the "
                f"record does not contain their values at that step. Read them under `if not "
                f"trainer.replaying:`, and keep the results in trainer.state"
            )
        return StateError(
            f"{script_line()}: these weights were made at {line} during replay, {self._where}, but "
            f"the checkpoint does not contain them. It contains copies of the model's tensors made "
            f"by copy.deepcopy, clone() or cpu(), as long as the script refers to them. Keep other "
            f"weights in a file, which a resumed run does not change, in one of several models of "
            f"the trainer, or in trainer.state; use trainer.average for averages"
        )

    def _class_like(self, kind: type) -> type:
        own = self

        def torch_function(
            cls: type,
            func: Callable[..., Any],
            types: Sequence[type],
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            return own._compute(func, args, kwargs or {})

        def deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> Any:
            own._refuse_lost(self)
            self.__class__ = kind  # PyTorch's own method checks the class
            try:
                made = kind.__deepcopy__(self, memo)  # type: ignore[attr-defined]
            finally:
                self.__class__ = own._classes[kind]
            return made

        def reduce(self: torch.Tensor, protocol: SupportsIndex) -> Any:
            raise own._refusal(self)

        def shown(self: torch.Tensor, spec: str = "") -> str:
            return "<weights of another step>"

        members = {
            "__torch_function__": classmethod(torch_function),
            "__module__": kind.__module__,
            "__deepcopy__": deepcopy,
            "__reduce_ex__": reduce,
            "__repr__": shown,
            "__format__": shown,
        }
        return type(kind.__name__, (kind,), members)


def _address(tensor: torch.Tensor) -> int:
    with hidden_from_classes():
        return address_of(tensor.untyped_storage())
