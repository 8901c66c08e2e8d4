"""Controls what surrounds a loss while it is compared: random numbers, modes, buffers, time.

Note: what is replayed
----------------------
A loss that draws noise gives other numbers for a shard than for the whole batch, whatever it
computes. So the draws of the whole batch are recorded first. Where the same draw is made again for
some of its samples, it gets those samples' rows; a draw of the same shape gets the same values. A
draw that has no counterpart, such as a permutation of the shard, keeps its own values and is
listed: what depends on it cannot be compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import default_collate

from onefold.core.batch import map_parts
from onefold.core.randomness import GeneratorStates, in_common, kept_generators, seed_generators
from onefold.core.structure import Broadcast, Scatter, parts_of, tensors_of, with_parts
from onefold.data_order.reader import Collate
from onefold.system.compat import BatchNorm, DropoutNd, TorchDispatchMode
from onefold.system.internals import buffers_of

__all__ = [
    "Draws",
    "KeepingCollate",
    "KeptBuffers",
    "TimeFirst",
    "WholeBatch",
    "cast_floats",
    "near",
    "norms_of_the_batch",
    "quiet_modes",
    "second_dimension",
    "whole_of",
    "without_dropout",
]

_DROPOUTS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout"),
)
_COMPUTED = re.compile("attention|dropout|gru|lstm|rnn|rrelu|sdp|softmax")
"""Operators that draw, whose result is no random numbers, but something computed with some."""


@dataclass(frozen=True, slots=True)
class _Draw:
    name: str
    numbers: tuple[object, ...]
    """Those of its arguments that are numbers, such as the bounds."""
    values: torch.Tensor
    """A copy of its result, of any shape and dtype."""


class Draws:
    """The random draws of one evaluation, to be replayed in others of the same samples."""

    def __init__(self) -> None:
        self.recorded: list[_Draw] = []
        """Those of the whole batch, in their order."""
        self._samples = 0
        self.unmatched: set[str] = set()
        """Names of draws that had no counterpart."""
        self.rounded: set[torch.dtype] = set()
        """What numbers in float64 were rounded to on the way, by the script or what it calls."""

    def recording(self, samples: int) -> _Watch:
        """Have a context record what is drawn in it, for the whole batch."""
        self.recorded.clear()
        self._samples = samples
        return _Watch(self, None)

    def replaying(self, rows: Sequence[int]) -> _Watch:
        """Have a context replay what was recorded.

        Args:
            rows: which samples of the whole batch are computed inside the context, in order.
        """
        return _Watch(self, rows)

    def find(self, place: int, draw: _Draw, rows: Sequence[int]) -> torch.Tensor | None:
        """Return the values for the draw in this place; None if it has no counterpart.

        Args:
            place: how many draws came before it in this evaluation.
            draw: the draw, with values of its own.
            rows: which samples of the whole batch are computed.
        """
        known = self.recorded[place] if place < len(self.recorded) else None
        if known is None or (known.name, known.numbers) != (draw.name, draw.numbers):
            return None
        wanted, values = draw.values.shape, known.values
        # The whole batch in its own order gets everything as it was, also what is not by sample.
        if list(rows) == list(range(self._samples)) and wanted == values.shape:
            return values
        # By sample if the first dimension is a multiple of the samples: some losses draw several
        # rows for each. A permutation's values are places in the batch, and mean nothing in a part.
        share, rest = divmod(values.shape[0], self._samples) if values.dim() else (0, 1)
        by_sample = share > 0 and not rest and draw.name != "randperm"
        if by_sample and tuple(wanted) == (share * len(rows), *values.shape[1:]):
            return values.reshape(self._samples, share, *values.shape[1:])[list(rows)].flatten(0, 1)
        return values if wanted == values.shape else None


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records draws, or replays them for these rows.

    One for each evaluation: where shards gather, several are under way at once, in threads.
    """

    def __init__(self, draws: Draws, rows: Sequence[int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self._rows = rows
        self._place = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Drawn in any case: the generator must move as it did when the draw was recorded, and the
        # result has the shape and strides that the caller expects.
        result = func(*args, **(kwargs or {}))
        draw = _read(func, args, result)
        if self._rows is None:
            converts = func._schema.name == "aten::_to_copy" and args[0].dtype == torch.float64
            if converts and result.is_floating_point():
                self._draws.rounded.add(result.dtype)
            if draw is not None:
                self._draws.recorded.append(draw)
        elif draw is not None:
            known = self._draws.find(self._place, draw, self._rows)
            self._place += 1
            if known is None:
                self._draws.unmatched.add(draw.name.strip("_"))
            else:
                result.copy_(known)
        return result


def _read(func: Any, args: Sequence[Any], result: Any) -> _Draw | None:
    name = func._schema.name.removeprefix("aten::")
    draws = torch.Tag.nondeterministic_seeded in func.tags and not _COMPUTED.search(name)
    if not draws or not isinstance(result, torch.Tensor):
        return None
    numbers = tuple(a for a in args if isinstance(a, int | float | bool))
    return _Draw(name, numbers, result.detach().clone())


@contextmanager
def without_dropout() -> Iterator[None]:
    """Have PyTorch's dropout functions return their input unchanged.

    Modules are put into evaluation mode; this is for losses that call the functions themselves.
    """

    def keep(input: torch.Tensor, *args: object, **settings: object) -> torch.Tensor:
        return input

    attention = torch.nn.functional.scaled_dot_product_attention

    def attend(*args: Any, **settings: Any) -> torch.Tensor:
        # dropout_p is the fifth argument, where it is not given by name.
        settings.pop("dropout_p", None)
        return attention(*args[:4], *([0.0] if len(args) > 4 else []), *args[5:], **settings)

    replaced: dict[str, Any] = dict.fromkeys(_DROPOUTS, keep)
    replaced["scaled_dot_product_attention"] = attend
    with patch.multiple(torch.nn.functional, **replaced):
        yield


@contextmanager
def quiet_modes(model: torch.nn.Module, *, narrow: bool) -> Iterator[None]:
    """Have batch norm use its running statistics and dropout drop nothing; put all back afterwards.

    Args:
        model: the trainer's; parts of other modules are found when they are called.
        narrow: leave every other part in the mode that it has.
    """
    before: dict[torch.nn.Module, tuple[bool, Any]] = {}

    def settle(part: torch.nn.Module) -> None:
        # The hook comes here before every call: only the first time finds the script's own mode.
        if part in before:
            return
        recurrent = isinstance(part, torch.nn.RNNBase)
        before[part] = (part.training, part.dropout if recurrent else None)
        if not narrow or isinstance(part, BatchNorm | DropoutNd):
            part.training = False
        # Recurrent layers drop out inside their kernel, by a number of their own.
        if isinstance(part, torch.nn.RNNBase):
            part.dropout = 0.0

    for each in model.modules():
        settle(each)
    try:
        with register_module_forward_pre_hook(lambda part, _: settle(part)):
            yield
    finally:
        for part, (training, dropout) in before.items():
            part.training = training
            if dropout is not None:
                part.dropout = dropout


def norms_of_the_batch(model: torch.nn.Module) -> list[str]:
    """List the batch norms that keep no running statistics, and so use those of their input."""
    return [
        f"{name or 'model'} ({type(part).__name__})"
        for name, part in model.named_modules()
        if isinstance(part, BatchNorm) and part.running_mean is None
    ]


class TimeFirst:
    """Notes the inputs of modules that take time in the first dimension and samples in the second.

    Args:
        model: the trainer's, whose parts are named.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._names = {part: name for name, part in model.named_modules()}
        self._sizes: dict[str, dict[torch.nn.Module, tuple[int, int]]] = {"whole": {}, "shard": {}}

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Note the calls inside this context, of the ``whole`` batch or of a ``shard``."""
        sizes = self._sizes[what]

        def note(part: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            if getattr(part, "batch_first", None) is not False or not inputs:
                return
            first = inputs[0]
            if isinstance(first, torch.Tensor) and first.dim() == 3:
                sizes.setdefault(part, (first.shape[0], first.shape[1]))

        with register_module_forward_pre_hook(note):
            yield

    def cut_along_time(self) -> list[str]:
        """List the modules for which a shard had fewer time steps than the whole batch."""
        found = []
        for part, (time, samples) in self._sizes["whole"].items():
            cut = self._sizes["shard"].get(part)
            if cut is not None and cut[0] < time and cut[1] == samples:
                found.append(f"{self._names.get(part, 'a module')} ({type(part).__name__})")
        return found


class KeptBuffers:
    """The buffers of a model as they are now, by value and by identity."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._buffers = dict(model.named_buffers(remove_duplicate=False))
        self.values = {name: each.detach().clone() for name, each in self._buffers.items()}
        """The values by name."""

    def put_back(self) -> None:
        """Give the model these values again, in the tensors that it had."""
        with torch.no_grad():
            for name, buffer in self._buffers.items():
                # The tensor first: the model may have put another in its place, and the engine's
                # memory is behind this one.
                module, _, own = name.rpartition(".")
                buffers_of(self._model.get_submodule(module))[own] = buffer
                if buffer.shape == self.values[name].shape:
                    buffer.copy_(self.values[name])

    def compare(
        self,
        folded: KeptBuffers,
        start: KeptBuffers,
        shards: Mapping[int, KeptBuffers],
        sizes: Sequence[int],
        tolerance: float,
    ) -> dict[str, str]:
        """Find where these buffers, of the whole batch, differ from those after the step.

        Args:
            folded: the buffers after the step, as the shards' were combined.
            start: the buffers before it.
            shards: for each shard the buffers after it.
            sizes: how many samples each shard has.
            tolerance: how far, relatively, values may differ.

        Returns:
            For each buffer that differs, how, and what to do about it.
        """
        found = {}
        for name, alone in self.values.items():
            now = folded.values.get(name)
            if now is None or near(now, alone, tolerance):
                continue
            parts = {shard: kept.values[name] for shard, kept in shards.items()}
            rule = _rule(alone, start.values[name], parts, sizes, tolerance)
            advice = (
                f'Trainer(buffers={{"{name}": "{rule}"}}) gives what one shard does'
                if rule
                else "none of the rules of Trainer(buffers=...) gives what one shard does: what "
                "the shards put there does not add up to what the whole batch would"
            )
            found[name] = f"{_shown(now)} with the shards, {_shown(alone)} with one; {advice}"
        return found


def _rule(
    alone: torch.Tensor,
    start: torch.Tensor,
    parts: Mapping[int, torch.Tensor],
    sizes: Sequence[int],
    tolerance: float,
) -> str | None:
    """Find the rule of buffers that gives what one shard gives; None if there is none.

    The formulas are those of `onefold.shard.buffers`, in float64.
    """
    if not parts:
        return None
    ordered = [_wide(parts[shard]) for shard in sorted(parts)]
    counts = [float(sizes[shard]) for shard in sorted(parts)]
    stacked, begun = torch.stack(ordered), _wide(start)
    weights = torch.tensor(counts, dtype=torch.float64, device=stacked.device)
    weights = weights.reshape(-1, *[1] * (stacked.dim() - 1))
    candidates = {
        "sum": begun + (stacked - begun).sum(0),
        "mean": (stacked * weights).sum(0) / weights.sum(),
    }
    if not stacked.is_complex():
        candidates["max"] = stacked.amax(0)
    candidates["first"] = ordered[0]
    return next((n for n, v in candidates.items() if near(v, _wide(alone), tolerance)), None)


def near(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Whether they are alike but for rounding; what is not finite must be the same."""
    if one.shape != other.shape:
        return False
    if not (other.is_floating_point() or other.is_complex()):
        return torch.equal(one, other)
    mine, theirs = _wide(one), _wide(other)
    finite = theirs[theirs.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(mine, theirs, rtol=0, atol=tolerance * scale, equal_nan=True)


def _wide(value: torch.Tensor) -> torch.Tensor:
    """In float64, or in complex numbers of as many digits."""
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _shown(value: torch.Tensor) -> str:
    if value.numel() == 1:
        return f"{value.item():g}"
    return f"values of norm {float(torch.linalg.vector_norm(_wide(value))):.9g}"


WholeBatch = Callable[[Sequence[int]], object]
"""Makes what the loss is given for any samples of a batch."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """A part of a whole batch that every shard gets, to be told from those that are cut."""

    value: object


class _Kept(NamedTuple):
    """A shard's payload, and what it was made of."""

    payload: object
    """What the loss is given."""
    samples: list[Any]
    """The samples as the data set returned them."""
    draws: bool
    """Whether random numbers were drawn in making the payload."""
    common: tuple[str, tuple[int, ...]] | None
    """What it had in common with the other shards, for numbers that all of them draw alike."""


class KeepingCollate:
    """A collate function that makes the user's payloads, in the precision of the comparison.

    Args:
        collate: that of the script; PyTorch's if None.
        dtype: the dtype for floating-point numbers; None to leave them alone.
        keeps: whether to keep the samples as well; else it is given whole batches.
    """

    def __init__(self, collate: Collate | None, dtype: torch.dtype | None, *, keeps: bool) -> None:
        self._collate = collate
        self._dtype = dtype
        self._keeps = keeps

    def __call__(self, samples: list[Any]) -> object:
        # Runs where the loader reads, which may be another process: what was drawn is found out
        # here, and travels with the payload.
        before = GeneratorStates()
        payload = self.make(samples)
        if not self._keeps:
            return _map(payload, lambda leaf: leaf, shared=_marked)
        return _Kept(payload, samples, bool(before.drawn_from()), in_common())

    def make(self, samples: list[Any]) -> object:
        """Make a payload of some samples."""
        return cast_floats((self._collate or default_collate)(samples), self._dtype)


def whole_of(
    shards: Mapping[int, object], collates: Mapping[int, KeepingCollate], loader: int, dim: int = 0
) -> tuple[WholeBatch, dict[int, object]]:
    """Return the whole batch of a loader's shards, and the shards' plain payloads.

    Where making a payload draws random numbers, the shards' payloads are joined, so that all see
    the same draws; where they cannot be joined, the whole batch has draws of its own.

    Args:
        shards: for each shard what `KeepingCollate` made.
        collates: the collate function of each loader, by the loader's number.
        loader: number of the loader that made the batch.
        dim: the dimension of tensors in which the samples lie.
    """
    kept = {shard: each for shard, each in shards.items() if isinstance(each, _Kept)}
    if not kept:
        # Shards of a batch that was whole before, and so can be joined.
        plain = {shard: _without_marks(payload) for shard, payload in shards.items()}
        return whole_tensors(_join(list(shards.values()), 0)), plain
    payloads = {shard: each.payload for shard, each in kept.items()}
    if any(each.draws for each in kept.values()):
        joined = _join(list(payloads.values()), dim)
        if joined is not None:
            return whole_tensors(joined, dim), payloads
    samples = [sample for shard in sorted(kept) for sample in kept[shard].samples]
    common = next(iter(kept.values())).common

    def whole(rows: Sequence[int]) -> object:
        with kept_generators():
            if common is not None:
                seed_generators(0, common=common)
            return collates[loader].make([samples[row] for row in rows])

    return whole, payloads


def whole_tensors(batch: object, dim: int = 0) -> WholeBatch:
    """Return the whole batch of tensors that a script made itself, with samples in ``dim``."""

    def whole(rows: Sequence[int]) -> object:
        index = torch.tensor(list(rows), dtype=torch.int64)
        return _map(
            batch,
            lambda leaf: leaf.index_select(dim, index.to(leaf.device)),
            shared=lambda part: part.value,
        )

    return whole


def cast_floats(payload: object, dtype: torch.dtype | None) -> Any:
    """Return the same structure with every floating-point tensor in a dtype."""
    if dtype is None:
        return payload
    return _map(payload, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf)


def second_dimension(payload: object) -> int | None:
    """Return the size of all tensors' second dimension; None where they do not agree in it."""
    sizes = {leaf.shape[1] if leaf.dim() > 1 else None for leaf in tensors_of(payload)}
    return sizes.pop() if len(sizes) == 1 else None


def _join(payloads: Sequence[Any], dim: int) -> object | None:
    """Join payloads along the samples; None where they do not fit together."""
    first = payloads[0]
    if isinstance(first, _Shared):
        return Broadcast(first.value)
    if isinstance(first, torch.Tensor):
        if first.dim() <= dim:
            return None
        shapes = {(*p.shape[:dim], *p.shape[dim + 1 :]) for p in payloads}
        return torch.cat(list(payloads), dim) if len(shapes) == 1 else None
    every = [parts_of(payload) or [] for payload in payloads]
    # Lists of one part a sample are of various lengths.
    if not every[0] or len({tuple(path for path, _ in parts) for parts in every}) > 1:
        return None
    joined = [_join([part for _, part in parts], dim) for parts in zip(*every, strict=True)]
    return None if any(part is None for part in joined) else with_parts(first, joined)


def _marked(part: Broadcast | Scatter) -> object:
    return Broadcast(_Shared(part.value)) if isinstance(part, Broadcast) else part


def _without_marks(payload: Any) -> Any:
    """Return what a loss is given of a shard of a whole batch."""
    if isinstance(payload, _Shared):
        return payload.value
    parts = None if isinstance(payload, torch.Tensor) else parts_of(payload)
    return with_parts(payload, [_without_marks(part) for _, part in parts]) if parts else payload


def _map(
    payload: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    shared: Callable[[Any], object] | None = None,
) -> Any:
    """Change every tensor, and every array of numbers, which becomes one.

    Args:
        payload: what holds them.
        change: is given each tensor.
        shared: is given each `Broadcast` and `Scatter`; None to change the tensors in them as well.
    """

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Broadcast | Scatter):
            return shared(leaf) if shared else replace(leaf, value=_map(leaf.value, change))
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            # A copy: PyTorch takes neither a foreign byte order nor negative strides.
            native = np.array(leaf, leaf.dtype.newbyteorder("="), order="C")
            return change(torch.from_numpy(native))
        return change(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return map_parts(payload, changed)
