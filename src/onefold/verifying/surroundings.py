"""Controls what surrounds a loss while it is compared: modes, buffers, and time dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from onefold.system.compat import BatchNorm, DropoutNd
from onefold.system.tables import buffers_of

__all__ = ["KeptBuffers", "TimeFirst", "near", "norms_of_the_batch", "quiet_modes"]


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
    handle = register_module_forward_pre_hook(lambda part, _: settle(part))
    try:
        yield
    finally:
        handle.remove()
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

        handle = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

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
        # Full name, module, name in it, the tensor that it has now, and a copy of its values.
        self._places = [
            (f"{prefix}.{name}".removeprefix("."), part, name, buffer, buffer.detach().clone())
            for prefix, part in model.named_modules()
            for name, buffer in buffers_of(part).items()
            if buffer is not None
        ]

        self.values = {name: value for name, _, _, _, value in self._places}
        """The values by name."""

    def put_back(self) -> None:
        """Give the model these values again, in the tensors that it had."""
        with torch.no_grad():
            for _, part, name, buffer, value in self._places:
                # The tensor first: the model may have put another in its place, and the engine's
                # memory is behind this one.
                buffers_of(part)[name] = buffer
                if buffer.shape == value.shape:
                    buffer.copy_(value)

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
        return bool((one == other).all())
    mine, theirs = _wide(one), _wide(other)
    finite = theirs[theirs.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    return bool((same | ((mine - theirs).abs() <= tolerance * scale)).all())


def _wide(value: torch.Tensor) -> torch.Tensor:
    """In float64, or in complex numbers of as many digits."""
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _shown(value: torch.Tensor) -> str:
    if value.numel() == 1:
        return f"{value.item():g}"
    return f"values of norm {float(torch.linalg.vector_norm(_wide(value))):.9g}"
