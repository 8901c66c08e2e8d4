"""Controls the environment of a compared loss: random numbers, modes, buffers, time.

Note: replayed random numbers
-----------------------------
A loss that draws noise gives different numbers for a shard than for the whole batch, whatever it
computes. So the draws of the whole batch are recorded first. If the same draw is repeated for some
of the samples, it gets the rows of those samples; a draw of the same shape gets the same values. A
draw without a counterpart, such as a permutation of the shard, keeps its own values and is listed:
results that depend on it cannot be compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate

from onefold.core.batch import map_parts
from onefold.core.randomness import GeneratorStates, in_common, kept_generators, seed_generators
from onefold.core.structure import Broadcast, Scatter, parts_of, tensors_of, with_parts
from onefold.data_order.reader import Collate
from onefold.system.compat import BatchNorm, TorchDispatchMode
from onefold.system.internals import buffers_of

__all__ = [
    "Draws",
    "KeepingCollate",
    "KeptBuffers",
    "TimeFirst",
    "WholeBatch",
    "WithoutDropout",
    "cast_floats",
    "near",
    "norms_of_the_batch",
    "quiet_modes",
    "second_dimension",
    "whole_of",
]

_DROPOUT_LAYERS = (
    *(torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d),
    *(torch.nn.AlphaDropout, torch.nn.FeatureAlphaDropout),
)
_DROPOUTS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("feature_dropout", "alpha_dropout", "feature_alpha_dropout"),
)
_COMPUTED = re.compile("attention|dropout|gru|lstm|rnn|rrelu|sdp|softmax")
"""Random operators whose results are not random numbers, but computed from them."""


@dataclass(frozen=True, slots=True)
class _Draw:
    name: str
    numbers: tuple[object, ...]
    """Numeric arguments, such as the bounds."""
    values: torch.Tensor
    """Copy of the result, of any shape and dtype."""


class Draws:
    """The random draws of one evaluation, for replay in evaluations of the same samples."""

    def __init__(self) -> None:
        self.recorded: list[_Draw] = []
        """Draws of the whole batch, in order."""
        self._samples = 0
        self.unmatched: set[str] = set()
        """Names of draws without a counterpart."""
        self.rounded: set[torch.dtype] = set()
        """Lower-precision dtypes to which the script, or a library, converts float64 numbers."""

    def recording(self, samples: int) -> _Watch:
        """Return a context that records the draws of the whole batch."""
        self.recorded.clear()
        self._samples = samples
        return _Watch(self, None)

    def replaying(self, rows: Sequence[int]) -> _Watch:
        """Return a context that replays the recorded draws.

        Args:
            rows: samples of the whole batch that are computed in the context, in order.
        """
        return _Watch(self, rows)

    def find(self, place: int, draw: _Draw, rows: Sequence[int]) -> torch.Tensor | None:
        """Return the recorded values for a draw; None if it has no counterpart.

        Args:
            place: number of earlier draws in this evaluation.
            draw: the draw, with its own values.
            rows: samples of the whole batch that are computed.
        """
        known = self.recorded[place] if place < len(self.recorded) else None
        if known is None or (known.name, known.numbers) != (draw.name, draw.numbers):
            return None
        wanted, values = draw.values.shape, known.values
        # The whole batch in its original order gets all values, including those not drawn per
        # sample.
        if list(rows) == list(range(self._samples)) and wanted == values.shape:
            return values
        # Per sample if the first dimension is a multiple of the samples: some losses draw several
        # rows each. The values of a permutation are positions in the batch, meaningless in a part
        # of it.
        share, rest = divmod(values.shape[0], self._samples) if values.dim() else (0, 1)
        by_sample = share > 0 and not rest and draw.name != "randperm"
        if by_sample and tuple(wanted) == (share * len(rows), *values.shape[1:]):
            return values.reshape(self._samples, share, *values.shape[1:])[list(rows)].flatten(0, 1)
        return values if wanted == values.shape else None


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records draws, or replays them for these rows.

    Each evaluation needs its own: if shards gather, several run at once, in threads.
    """

    def __init__(self, draws: Draws, rows: Sequence[int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self._rows = rows
        self._place = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Draw in any case: the generator must advance as it did during recording, and the caller
        # expects the shape and strides of the result.
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


class WithoutDropout(TorchFunctionMode):
    """Makes PyTorch's dropout functions return their input unchanged, wherever they are called."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        settings, name = dict(kwargs or {}), str(getattr(func, "__name__", "")).rstrip("_")
        if name in _DROPOUTS:
            return args[0] if args else settings["input"]
        if name == "scaled_dot_product_attention":
            # dropout_p is the fifth positional argument if it is not passed by name.
            settings.pop("dropout_p", None)
            args = (*args[:4], *([0.0] if len(args) > 4 else []), *args[5:])
        return func(*args, **settings)


@contextmanager
def quiet_modes(model: torch.nn.Module) -> Iterator[None]:
    """Make batch norm use its running statistics and disable dropout; restore both afterwards.

    Args:
        model: the trainer's model. Parts of other modules are found when they are called.
    """
    before: dict[torch.nn.Module, tuple[bool, Any]] = {}

    def settle(part: torch.nn.Module) -> None:
        # The hook runs before every call, but only the first call sees the script's own mode.
        if part in before:
            return
        recurrent = isinstance(part, torch.nn.RNNBase)
        before[part] = (part.training, part.dropout if recurrent else None)
        if isinstance(part, (BatchNorm, *_DROPOUT_LAYERS)):
            part.training = False
        # Recurrent layers apply dropout inside their kernel, with a separate rate.
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
    """List the batch norms without running statistics, which use those of their input."""
    return [
        f"{name or 'model'} ({type(part).__name__})"
        for name, part in model.named_modules()
        if isinstance(part, BatchNorm) and part.running_mean is None
    ]


class TimeFirst:
    """Finds modules that take time in the first dimension and samples in the second.

    Args:
        model: the trainer's model, for the names of modules.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._names = {part: name for name, part in model.named_modules()}
        self._sizes: dict[str, dict[torch.nn.Module, tuple[int, int]]] = {"whole": {}, "shard": {}}

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Note the calls in this context, with the ``whole`` batch or a ``shard``."""
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
    """A snapshot of a model's buffers, by value and by identity."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._buffers = dict(model.named_buffers(remove_duplicate=False))
        self.values = {name: each.detach().clone() for name, each in self._buffers.items()}
        """Values by name."""

    def put_back(self) -> None:
        """Restore the values, in the model's original tensors."""
        with torch.no_grad():
            for name, buffer in self._buffers.items():
                # Restore the tensor first: the model may have replaced it, but the engine's memory
                # is behind the original one.
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
        """Compare these buffers, of the whole batch, with the buffers after the step.

        Args:
            folded: combined buffers after the step.
            start: buffers before the step.
            shards: buffers after each shard.
            sizes: number of samples in each shard.
            tolerance: largest relative difference of values that count as equal.

        Returns:
            For each buffer that differs, the difference and its remedy.
        """
        found = {}
        for name, alone in self.values.items():
            now = folded.values.get(name)
            if now is None or near(now, alone, tolerance):
                continue
            parts = {shard: kept.values[name] for shard, kept in shards.items()}
            rule = _rule(alone, start.values[name], parts, sizes, tolerance)
            advice = (
                f'Trainer(buffers={{"{name}": "{rule}"}}) gives the result of one shard'
                if rule
                else "no rule of Trainer(buffers=...) gives the result of one shard: the values of "
                "the shards do not combine to that of the whole batch. Compute it from values that "
                "onefold.gather returns, or leave it if the values of shards are good enough"
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
    """Find the buffer rule that gives the result of one shard; None if there is none.

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
    """Whether two tensors are equal except for rounding; values that are not finite, exactly."""
    if one.shape != other.shape:
        return False
    if not (other.is_floating_point() or other.is_complex()):
        return torch.equal(one, other)
    mine, theirs = _wide(one), _wide(other)
    finite = theirs[theirs.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(mine, theirs, rtol=0, atol=tolerance * scale, equal_nan=True)


def _wide(value: torch.Tensor) -> torch.Tensor:
    """Convert to float64, or to complex128."""
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _shown(value: torch.Tensor) -> str:
    if value.numel() == 1:
        return f"{value.item():g}"
    return f"values of norm {float(torch.linalg.vector_norm(_wide(value))):.9g}"


WholeBatch = Callable[[Sequence[int]], object]
"""Makes the loss's payload from any samples of a batch."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """A part of a whole batch that every shard receives uncut."""

    value: object


class _Kept(NamedTuple):
    """A shard's payload, and its origin."""

    payload: object
    """Argument of the loss."""
    samples: list[Any]
    """The samples that the data set returned."""
    draws: bool
    """Whether making the payload drew random numbers."""
    common: tuple[str, tuple[int, ...]] | None
    """State shared with the other shards, for random numbers that all of them draw equally."""


class KeepingCollate:
    """A collate function that makes the user's payloads in the precision of the comparison.

    Args:
        collate: the script's collate function; PyTorch's if None.
        dtype: dtype for floating-point numbers; None to keep theirs.
        keeps: whether to keep the samples too. Otherwise it is given whole batches.
    """

    def __init__(self, collate: Collate | None, dtype: torch.dtype | None, *, keeps: bool) -> None:
        self._collate = collate
        self._dtype = dtype
        self._keeps = keeps

    def __call__(self, samples: list[Any]) -> object:
        # This runs in the process that reads, possibly a worker: whether it drew random numbers is
        # detected here and sent with the payload.
        before = GeneratorStates()
        payload = self.make(samples)
        if not self._keeps:
            return _map(payload, lambda leaf: leaf, shared=_marked)
        return _Kept(payload, samples, bool(before.drawn_from()), in_common())

    def make(self, samples: list[Any]) -> object:
        """Make a payload from samples."""
        return cast_floats((self._collate or default_collate)(samples), self._dtype)


def whole_of(
    shards: Mapping[int, object], collates: Mapping[int, KeepingCollate], loader: int, dim: int = 0
) -> tuple[WholeBatch, dict[int, object]]:
    """Return the whole batch of a loader's shards, and the shards' plain payloads.

    If making a payload draws random numbers, the shards' payloads are joined, so that all use the
    same draws. If they cannot be joined, the whole batch has its own draws.

    Args:
        shards: outputs of `KeepingCollate`, by shard.
        collates: collate function of each loader, by loader number.
        loader: number of the loader that made the batch.
        dim: sample dimension of the tensors.
    """
    kept = {shard: each for shard, each in shards.items() if isinstance(each, _Kept)}
    if not kept:
        # Shards of a batch that was whole before, so they can be joined.
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
    """Return the same structure with all floating-point tensors converted to a dtype."""
    if dtype is None:
        return payload
    return _map(payload, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf)


def second_dimension(payload: object) -> int | None:
    """Return the size of all tensors' second dimension; None if the sizes differ."""
    sizes = {leaf.shape[1] if leaf.dim() > 1 else None for leaf in tensors_of(payload)}
    return sizes.pop() if len(sizes) == 1 else None


def _join(payloads: Sequence[Any], dim: int) -> object | None:
    """Join payloads along the samples; None if they do not fit together."""
    first = payloads[0]
    if isinstance(first, _Shared):
        return Broadcast(first.value)
    if isinstance(first, torch.Tensor):
        if first.dim() <= dim:
            return None
        shapes = {(*p.shape[:dim], *p.shape[dim + 1 :]) for p in payloads}
        return torch.cat(list(payloads), dim) if len(shapes) == 1 else None
    every = [parts_of(payload) or [] for payload in payloads]
    # Lists with one part per sample have different lengths.
    if not every[0] or len({tuple(path for path, _ in parts) for parts in every}) > 1:
        return None
    joined = [_join([part for _, part in parts], dim) for parts in zip(*every, strict=True)]
    return None if any(part is None for part in joined) else with_parts(first, joined)


def _marked(part: Broadcast[Any] | Scatter[Any]) -> object:
    return Broadcast(_Shared(part.value)) if isinstance(part, Broadcast) else part


def _without_marks(payload: Any) -> Any:
    """Return the loss's argument for a shard of a whole batch."""
    if isinstance(payload, _Shared):
        return payload.value
    parts = None if isinstance(payload, torch.Tensor) else parts_of(payload)
    return with_parts(payload, [_without_marks(part) for _, part in parts]) if parts else payload


def _map(
    payload: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    shared: Callable[[Any], object] | None = None,
) -> Any:
    """Apply a function to every tensor, and to numeric arrays, converted to tensors.

    Args:
        payload: structure with tensors.
        change: function for each tensor.
        shared: function for each `Broadcast` and `Scatter`; None to change the tensors inside them.
    """

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Broadcast | Scatter):
            return shared(leaf) if shared else replace(leaf, value=_map(leaf.value, change))
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            # Make a copy, because PyTorch supports neither foreign byte order nor negative strides.
            native = np.array(leaf, leaf.dtype.newbyteorder("="), order="C")
            return change(torch.from_numpy(native))
        return change(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return map_parts(payload, changed)
