"""Computes the norm of the whole gradient, whose segments are distributed among devices.

`refuse_clipping` makes ``clip_grad_norm_`` raise if it would have no effect.

Note: two norms
---------------
With several shards, the squares of each segment are summed in float64, and then the sums of the
segments. With a single shard the norm has PyTorch's own bits: it is the norm of the norms of all
parameters' gradients.

Note: the one function of PyTorch that is replaced
--------------------------------------------------
``torch.nn.utils.clip_grad_norm_`` reads only ``.grad``: without gradients it returns 0 and clips
nothing. It ends with a call of a function of its own module that gets the parameters. onefold wraps
that function once, when the first Trainer is created; for parameters of no Trainer it does what it
did before. If a release of PyTorch has no such function, nothing is wrapped.

A hook, or an overridden ``step``, may call ``clip_grad_norm_`` inside an optimizer's step. There a
device has only the parameters that it updates, so a norm of several would depend on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, islice

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from onefold.core.flat import FlatTensors, storage_order
from onefold.core.results import Gradients
from onefold.core.shard import runs_of
from onefold.core.storage import Storage
from onefold.system.compat import copy_each
from onefold.system.internals import watch_clipping
from onefold.update.staging import OwnedSegment

__all__ = [
    "SegmentNorms",
    "Share",
    "allow_clipping",
    "clipping_each",
    "exact_norms",
    "exact_total",
    "plain_norm",
    "refuse_clipping",
]


def exact_norms(gradients: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Compute the norms of some gradients, (gradients,) float64, on a device; 0 for None.

    Each is finite if its gradient is.
    """
    found: dict[int, torch.Tensor] = {}
    here: dict[int, torch.Tensor] = {}
    for place, gradient in enumerate(gradients):
        if gradient is None:
            found[place] = torch.zeros((), dtype=torch.float64, device=device)
            continue
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        moved = real.to(device)
        if moved is real:
            here[place] = real
        else:
            # Move gradients from other memory one at a time, because there may be no room for all.
            # The kernels are the same, and sum each tensor as if it were alone.
            (found[place],) = _norms([moved])
    # Compute all in one call: on a GPU, a launch per segment would take longer than its kernel.
    norms = _norms([*here.values()])
    if not found:
        return torch.stack(norms)
    found |= zip(here, norms, strict=True)
    return torch.stack([found[place] for place in range(len(gradients))])


def _norms(gradients: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch._foreach_norm(gradients, 2, dtype=torch.float64) if gradients else ()


Share = Callable[[Mapping[int, torch.Tensor]], torch.Tensor]
"""Gathers a row of float64 from each device: see `Transport.all_gather_rows`."""


def plain_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the norm, (), of some gradients as torch.nn.utils.clip_grad_norm_ does.

    It is not finite if the squares of the gradients overflow; see `exact_total`.
    """
    if len({gradient.dtype for gradient in gradients}) != 1:
        return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    # The same without that function's search for devices, which takes as long as small norms.
    with torch.no_grad():
        norms = torch._foreach_norm(list(gradients), 2.0)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), 2.0)
    return total


def exact_total(norms: torch.Tensor) -> torch.Tensor:
    """Compute the norm, () float64, of gradients from their norms, (gradients,) float64."""
    return norms.square().sum().sqrt()


class SegmentNorms:
    """Computes the norms of this process's segments, and gathers the norms of all others.

    Args:
        storage: the sizes of the run.
        memory: memory of each device of this process, by number.
        partitions: for each device of the run, the numbers of the segments that it owns.
        owned: segments of this process; one process owns all segments of a parameter.
    """

    def __init__(
        self,
        storage: Storage,
        memory: Mapping[int, FlatTensors],
        partitions: Sequence[Sequence[int]],
        owned: Sequence[OwnedSegment],
    ) -> None:
        self._storage, self._owned = storage, owned
        # A device with an empty partition needs a row too, because all devices must share.
        self._rows = {
            device: torch.zeros(len(storage.segments), dtype=torch.float64, device=flat.device)
            for device, flat in memory.items()
        }
        # Slices: a list of indices would be copied to a GPU, and block on it if the script asked
        # for deterministic kernels.
        self._slots = {
            device: [(row[run], run.stop - run.start) for run in runs_of(partitions[device])]
            for device, row in self._rows.items()
        }

    def squared(self, gradients: Gradients, share: Share) -> torch.Tensor:
        """Compute the norm, (), of the whole gradient from the squares of its segments.

        Args:
            gradients: gradients of this process's segments, in the order of their devices.
            share: gathers rows from all devices.
        """
        # Compute a norm per segment, never per partition: segments do not depend on the number of
        # devices, so the order of addition does not either.
        if len(self._slots) == 1 == self._storage.devices and gradients:
            # The only device owns all segments, so its norms are the whole row.
            return exact_norms(gradients, next(iter(self._rows.values())).device).square().sum()
        given = iter(gradients)
        for slots in filter(None, self._slots.values()):
            rows, counts = map(list, zip(*slots, strict=True))
            norms = exact_norms([*islice(given, sum(counts))], rows[0].device)
            copy_each(rows, [*torch.split(norms.square(), counts)])
        return self._shared(share).sum()

    def of_one_shard(
        self, gradients: Gradients, gave: Sequence[int], share: Share, *, widened: bool
    ) -> torch.Tensor:
        """Compute the norm, (), of the whole gradient of a single shard.

        Args:
            gradients: gradients of this process's segments.
            gave: for each trained parameter, whether it got a gradient.
            share: gathers rows from all devices.
            widened: whether gradients have the dtype of sums.
        """
        layout = self._storage.gradients if widened else self._storage.parameters
        norms = self._by_parameter(gradients, gave, share, lambda each: plain_norm([each]))
        # The norm of a single number is that number, so this is the norm of the norms, in the order
        # in which PyTorch visits gradients of several dtypes.
        norm = plain_norm([norms[n].to(layout.dtype_of(n)).reshape(1) for n in norms])
        if norm.device.type != "cpu" or math.isfinite(norm.item()):
            return norm
        # The norm of large gradients in low precision may overflow although they are finite.
        exact = self._by_parameter(
            gradients, gave, share, lambda each: exact_norms([each], each.device)[0]
        )
        return exact_total(torch.stack([*exact.values()]))

    def _by_parameter(
        self,
        gradients: Gradients,
        gave: Sequence[int],
        share: Share,
        norm_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """Compute the norm of each parameter's gradient, () float64, by number, in order."""
        for row in self._rows.values():
            row.zero_()
        for number, device, gradient in self._whole(gradients):
            row = self._rows[device]
            row[number] = norm_of(gradient.to(row.device))
        norms = self._shared(share)
        firsts: dict[int, int] = {}
        for number, segment in enumerate(self._storage.segments):
            firsts.setdefault(segment.entry, number)
        # Segments are ordered as in memory, by dtype; return parameters in the order of their
        # numbers.
        return {entry: norms[firsts[entry]] for entry in sorted(firsts) if gave[entry]}

    def _whole(self, gradients: Gradients) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield each parameter's gradient with the number of its first segment, and its device."""
        pairs = zip(self._owned, gradients, strict=True)
        for entry, group in groupby(pairs, key=lambda pair: pair[0].segment.entry):
            items, parts = zip(*group, strict=True)
            given = [part for part in parts if part is not None]
            if not given:
                continue
            whole = given[0]
            # PyTorch's bits need one norm of the whole parameter: join its segments in its own
            # strides.
            if not items[0].segment.whole:
                shaped = self._storage.gradients.entries[entry]
                whole = torch.cat([storage_order(part) for part in given])
                whole = whole.as_strided(shaped.shape, shaped.stride)
            yield items[0].number, items[0].device, whole

    def _shared(self, share: Share) -> torch.Tensor:
        """Gather the numbers of all devices, (segments,). Only the owner's is not 0."""
        rows = share(self._rows)
        return rows.sum(dim=0) if len(rows) > 1 else rows[0]


# Parameters of all Trainers. Keyed by identity, because tensors compare elementwise, and weak, so
# that this table keeps no model alive.
_ours = WeakTensorKeyDictionary()
_steps: list[str] = []
"""Names of the optimizers whose step is running in this process, innermost last."""


def refuse_clipping(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Make ``clip_grad_norm_`` raise for these parameters if it would do nothing."""
    for parameter in parameters:
        _ours[parameter] = True
    watch_clipping(_check_clipping)


def allow_clipping(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Restore ``clip_grad_norm_`` for these parameters, because the script uses their gradients."""
    for parameter in parameters:
        if parameter in _ours:
            del _ours[parameter]


@contextmanager
def clipping_each(name: str) -> Iterator[None]:
    """Allow ``clip_grad_norm_`` only for one parameter at a time inside this context.

    Args:
        name: name of the optimizer that steps in it.
    """
    _steps.append(name)
    try:
        yield
    finally:
        _steps.pop()


def _check_clipping(parameters: list[torch.Tensor], several: bool) -> None:
    if _steps and several:
        raise RuntimeError(
            f"clip_grad_norm_ was called with several parameters in the step of {_steps[-1]} (in a "
            f"hook, or in its own step), where a device has only the parameters that it updates: "
            f"the norm would depend on the number of devices. For the norm of the whole gradient, "
            f"pass clip_norm to Trainer; to clip each parameter, call clip_grad_norm_(parameter, "
            f"...) one by one"
        )
    if any(p in _ours for p in parameters) and not any(p.grad is not None for p in parameters):
        raise RuntimeError(
            "clip_grad_norm_ was called for parameters of a Trainer, which have no gradients "
            "between steps, so it would do nothing. Remove the line and pass clip_norm to Trainer"
        )
