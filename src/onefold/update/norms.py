"""Computes the norm of the whole gradient, of which each device has the segments that it owns.

`refuse_clipping` refuses ``clip_grad_norm_`` where it has no effect beside ``trainer.step``.

Note: two norms
---------------
Of several shards, the squares of each segment are added up in float64, and then those of the
segments: segments do not depend on the number of devices, so neither does the order of addition. Of
a single shard it is PyTorch's own, to the last bit: the norm of each parameter's gradient, and the
norm of these norms.

Note: the one function of PyTorch that is replaced
--------------------------------------------------
``torch.nn.utils.clip_grad_norm_`` looks at ``.grad`` alone: where there is none it returns 0 and
clips nothing. It ends in a call of a function of its own module that is given the parameters; that
one is wrapped, once, when the first Trainer is made. For everybody else's parameters it does what
it did before. Where a release of PyTorch has no such function, nothing is wrapped.

Inside an optimizer's step, which a hook or a ``step`` of a script's own may call it in, there are
those parameters that the device updates: a norm of several would be another on each device.
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
    """The norms of some gradients, (gradients,) float64, on a device; 0 for None.

    Each is finite wherever its gradient is.
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
            # Those of other memory one after the other, as there may be no room for all of them; by
            # the same kernels, which add up each tensor as if it were alone.
            (found[place],) = _norms([moved])
    # All at once: on a GPU, launches of one kernel for each segment would take longer than kernels.
    found |= zip(here, _norms([*here.values()]), strict=True)
    return torch.stack([found[place] for place in range(len(gradients))])


def _norms(gradients: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    return torch._foreach_norm(gradients, 2, dtype=torch.float64) if gradients else ()


Share = Callable[[Mapping[int, torch.Tensor]], torch.Tensor]
"""Brings a row of float64 from each device to all: see `Transport.all_gather_rows`."""


def plain_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm, (), of some gradients as torch.nn.utils.clip_grad_norm_ computes it.

    Not finite if the gradients are so large that their squares are not; see `exact_total`.
    """
    return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())


def exact_total(norms: torch.Tensor) -> torch.Tensor:
    """The norm, () float64, of gradients of which the norms are given, (gradients,) float64."""
    return norms.square().sum().sqrt()


class SegmentNorms:
    """Computes the norms of the segments of this process, and hears of those of the others.

    Args:
        storage: the sizes of the run.
        memory: of each device of this process, by number.
        partitions: for each device of the run, the numbers of the segments that it owns.
        owned: the segments of this process; all of a parameter's are one process's.
    """

    def __init__(
        self,
        storage: Storage,
        memory: Mapping[int, FlatTensors],
        partitions: Sequence[Sequence[int]],
        owned: Sequence[OwnedSegment],
    ) -> None:
        self._storage, self._owned = storage, owned
        # A device whose partition is empty has a row as well: all devices must share alike.
        self._rows = {
            device: torch.zeros(len(storage.segments), dtype=torch.float64, device=flat.device)
            for device, flat in memory.items()
        }
        # In slices: a list of their numbers would have to be copied to a GPU, and where scripts ask
        # for deterministic kernels, waited for.
        self._slots = {
            device: [(row[run], run.stop - run.start) for run in runs_of(partitions[device])]
            for device, row in self._rows.items()
        }

    def squared(self, gradients: Gradients, share: Share) -> torch.Tensor:
        """The squared norm, (), of the whole gradient.

        Args:
            gradients: of the segments of this process, in the order of their devices.
            share: brings rows to all devices.
        """
        # A norm for each segment and never for a partition: see the head of this file.
        given = iter(gradients)
        for slots in filter(None, self._slots.values()):
            rows, counts = map(list, zip(*slots, strict=True))
            norms = exact_norms([*islice(given, sum(counts))], rows[0].device)
            copy_each(rows, [*torch.split(norms.square(), counts)])
        return self._shared(share).sum()

    def of_one_shard(
        self, gradients: Gradients, gave: Sequence[int], share: Share, *, widened: bool
    ) -> torch.Tensor:
        """The norm, (), of the whole gradient of a single shard.

        Args:
            gradients: of the segments of this process.
            gave: for each trained parameter, whether it was given a gradient.
            share: brings rows to all devices.
            widened: whether gradients are in the dtype in which sums are.
        """
        layout = self._storage.gradients if widened else self._storage.parameters
        norms = self._by_parameter(gradients, gave, share, lambda each: plain_norm([each]))
        # Norms of one number each are that number: what remains is the norm of the norms, in the
        # order in which PyTorch goes through gradients of several dtypes.
        norm = plain_norm([norms[n].to(layout.dtype_of(n)).reshape(1) for n in norms])
        if norm.device.type != "cpu" or math.isfinite(norm.item()):
            return norm
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
        """The norm of each parameter's gradient, () float64, by the number, in order."""
        for row in self._rows.values():
            row.zero_()
        for number, device, gradient in self._whole(gradients):
            row = self._rows[device]
            row[number] = norm_of(gradient.to(row.device))
        norms = self._shared(share)
        firsts: dict[int, int] = {}
        for number, segment in enumerate(self._storage.segments):
            firsts.setdefault(segment.entry, number)
        # Segments lie in the order of memory, where parameters of one dtype are together.
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
            if not items[0].segment.whole:
                shaped = self._storage.gradients.entries[entry]
                whole = torch.cat([storage_order(part) for part in given])
                whole = whole.as_strided(shaped.shape, shaped.stride)
            yield items[0].number, items[0].device, whole

    def _shared(self, share: Share) -> torch.Tensor:
        """The numbers of all devices, (segments,): one owner each; adding zeros is exact."""
        rows = share(self._rows)
        return rows.sum(dim=0) if len(rows) > 1 else rows[0]


# Parameters of any Trainer: by identity, as tensors compare by element, and weakly, so that this
# table keeps no model alive.
_ours = WeakTensorKeyDictionary()
_steps: list[str] = []
"""The optimizers in whose step this process is."""


def refuse_clipping(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Have ``clip_grad_norm_`` of these parameters raise where it would do nothing."""
    for parameter in parameters:
        _ours[parameter] = True
    watch_clipping(_check_clipping)


def allow_clipping(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Have ``clip_grad_norm_`` do what it ever did: the script asks for gradients by itself."""
    for parameter in parameters:
        if parameter in _ours:
            del _ours[parameter]


@contextmanager
def clipping_each(name: str) -> Iterator[None]:
    """Have ``clip_grad_norm_`` take one parameter at a time inside this context.

    Args:
        name: of the optimizer that steps in it.
    """
    _steps.append(name)
    try:
        yield
    finally:
        _steps.pop()


def _check_clipping(parameters: list[torch.Tensor], several: bool) -> None:
    if _steps and several:
        raise RuntimeError(
            f"clip_grad_norm_ was given several parameters in the step of {_steps[-1]} (in a "
            f"hook, or a step of its own), where a device has those alone that it updates: the "
            f"norm would depend on the number of devices. For the norm of all give clip_norm "
            f"to Trainer; for that of each, call clip_grad_norm_(parameter, ...) one by one"
        )
    if any(p in _ours for p in parameters) and not any(p.grad is not None for p in parameters):
        raise RuntimeError(
            "clip_grad_norm_ was called for parameters of a Trainer, which have no gradients "
            "between steps: it would do nothing. Remove the line and give clip_norm to Trainer"
        )
