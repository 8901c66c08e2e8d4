"""What must be refused on any number of devices, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.core.shard import cut_bounds
from onefold.errors import GradientError, LossError, StateError
from tests.fuzz.case import Case
from tests.fuzz.data import CLASSES, FEATURES, Fields, read_fields

if TYPE_CHECKING:
    from tests.fuzz.script import Script

__all__ = ["FAULTS", "Fault"]

Loss = Callable[[nn.Module, object], object]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that no run may get away with."""

    error: type[Exception]
    words: str
    """A pattern that the message holds."""
    model: Callable[[nn.Module], None] | None = None
    """Spoils the model before Trainer is made."""
    loss: Callable[[Loss], Loss] | None = None
    """Takes the place of the loss."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    before_step: Callable[[Script], object] | None = None
    """Done before the last step; may return the batch to take."""
    possible: Callable[[Case], bool] = lambda case: True
    """Whether a case can have it."""


def _several(case: Case) -> bool:
    """Whether there are two shards in every batch."""
    own = min(case.sizes) if case.source == "own" else 0
    return case.shards > 1 and own > 1


def _first_shards(case: Case) -> bool:
    """Whether the first two shards of every batch have two samples or more."""
    if case.source != "own" or case.shards < 2:
        return False
    return all(cut_bounds(size, case.shards)[1] >= (2, 4) for size in case.sizes) and all(
        stop - start >= 2 for size in case.sizes for start, stop in cut_bounds(size, 2)[:2]
    )


def _own(case: Case) -> bool:
    return case.source == "own"


def _logits(model: nn.Module, batch: object) -> tuple[torch.Tensor, Fields]:
    fields = read_fields(batch)
    return model(fields), fields


def _summed(_: Loss) -> Loss:
    def loss(model: nn.Module, batch: object) -> torch.Tensor:
        logits, fields = _logits(model, batch)
        return F.cross_entropy(logits, fields.y, reduction="sum")

    return loss


def _by_class(_: Loss) -> Loss:
    def loss(model: nn.Module, batch: object) -> torch.Tensor:
        logits, fields = _logits(model, batch)
        weight = torch.linspace(0.5, 1.5, CLASSES).to(logits)
        return F.cross_entropy(logits, fields.y, weight)

    return loss


def _left_over(loss: Loss) -> Loss:
    def leaving(model: nn.Module, batch: object) -> object:
        logits, fields = _logits(model, batch)
        F.cross_entropy(logits, fields.y).backward()
        return F.cross_entropy(model(fields), fields.y, reduction="none")

    return leaving


def _detached(_: Loss) -> Loss:
    def loss(model: nn.Module, batch: object) -> torch.Tensor:
        with torch.no_grad():
            logits, fields = _logits(model, batch)
            return F.cross_entropy(logits, fields.y, reduction="none")

    return loss


def _infinite(_: Loss) -> Loss:
    def loss(model: nn.Module, batch: object) -> torch.Tensor:
        logits, fields = _logits(model, batch)
        return F.cross_entropy(logits, fields.y, reduction="none") / fields.x.new_zeros(())

    return loss


def _kinds(_: Loss) -> Loss:
    """A sum in the shard that has the first sample, a mean in the others."""

    def loss(model: nn.Module, batch: object) -> object:
        logits, fields = _logits(model, batch)
        losses = F.cross_entropy(logits, fields.y, reduction="none")
        if bool((fields.index == 0).any()):
            return onefold.Sum(losses.sum())
        return onefold.Mean(losses.sum(), len(losses))

    return loss


def _shape(_: Loss) -> Loss:
    return lambda model, batch: _logits(model, batch)[0]


def _number(_: Loss) -> Loss:
    return lambda model, batch: float(_logits(model, batch)[0].detach().sum())


def _learned_weight(_: Loss) -> Loss:
    def loss(model: nn.Module, batch: object) -> onefold.Mean:
        logits, fields = _logits(model, batch)
        weights = logits.softmax(dim=1)[:, 0]
        losses = F.cross_entropy(logits, fields.y, reduction="none")
        return onefold.Mean((losses * weights).sum(), weights.sum())

    return loss


def _outside_norm(loss: Loss) -> Loss:
    norm = nn.BatchNorm1d(FEATURES, dtype=torch.float64)

    def with_norm(model: nn.Module, batch: object) -> torch.Tensor:
        fields = read_fields(batch)
        shift = norm(fields.x.double().repeat(2, 1))[: len(fields.y)].mean()
        return F.cross_entropy(model(fields) + shift.to(fields.x), fields.y, reduction="none")

    return with_norm


class _Masked(nn.Module):
    """Writes to its weight when called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.mask = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, *args: object) -> object:
        with torch.no_grad():
            self.mask.mul_(0.5)
        return self.inner(*args)


class _Queue(nn.Module):
    """Puts what it has seen into the rows of a buffer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("queue", torch.zeros(6, 2))

    def forward(self, fields: Fields) -> object:
        self.queue[:2] = fields.x[:1, :2].float().abs() + 1
        return self.inner(fields)


class _Late(nn.Module):
    """Makes a buffer when it is first called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("late", None)

    def forward(self, *args: object) -> object:
        self.late = torch.ones(2)
        return self.inner(*args)


def _stem(part: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], None]:
    def spoil(model: nn.Module) -> None:
        model.stem = part(model.stem)

    return spoil


def _sparse(model: nn.Module) -> None:
    model.table = nn.Embedding(3, 2, sparse=True)


def _complex(model: nn.Module) -> None:
    model.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))


def _common_memory(model: nn.Module) -> None:
    model.twin = nn.Parameter(model.head.weight.data[:2])


def _buffer_of_weight(model: nn.Module) -> None:
    model.register_buffer("shadow", model.head.weight.data)


def _bad_plan(script: Script) -> None:
    script.trainer.plan = (script.case.shards + 1,) + (0,) * (len(script.trainer.devices) - 1)


def _moved(script: Script) -> None:
    weight = script.model.head.weight
    weight.data = weight.data.clone()


def _ragged(script: Script) -> object:
    return torch.ones(6, 2), torch.ones(5)


def _regrouped(script: Script) -> None:
    script.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def _own_step(script: Script) -> None:
    script.optimizer.step()


def _clipping(script: Script) -> None:
    nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)


FAULTS: dict[str, Fault] = {
    "sum as mean": Fault(
        error=LossError,
        words=r"step 1, shard \d+ is a sum over",
        loss=_summed,
        possible=_first_shards,
    ),
    "class weights": Fault(
        error=LossError, words=r"shard \d+ is a mean by class", loss=_by_class, possible=_several
    ),
    "left over": Fault(
        error=GradientError,
        words=r"step 1, shard \d+: the loss function has left a gradient in",
        loss=_left_over,
        possible=lambda case: case.hook != "dropped",
    ),
    "detached": Fault(error=LossError, words="does not depend on any parameter", loss=_detached),
    "infinite": Fault(error=LossError, words=r"step 1, shard 0 is (inf|nan)", loss=_infinite),
    "kinds": Fault(
        error=LossError,
        words="of several kinds: a mean, onefold.Sum",
        loss=_kinds,
        possible=_several,
    ),
    "shape": Fault(error=LossError, words=r"expected shape \(\d+,\), one value", loss=_shape),
    "number": Fault(error=LossError, words="got float. Return the tensor itself", loss=_number),
    "learned weight": Fault(
        error=LossError, words="weight of onefold.Mean depends on parameters", loss=_learned_weight
    ),
    "outside norm": Fault(
        error=StateError,
        words="BatchNorm1d is called that is no part of the model",
        loss=_outside_norm,
        possible=lambda case: case.shards > 1,  # or it is the plain loop, which does the same
    ),
    "written": Fault(
        error=StateError,
        words=r"step \d+: parameters? (stem.mask|\(through .data\)) was written to while",
        model=_stem(_Masked),
        possible=lambda case: case.shards > 1,
    ),
    "queue": Fault(
        error=StateError,
        words="buffer stem.queue: each shard has put other values into some of its rows",
        model=_stem(_Queue),
        possible=lambda case: _several(case) and case.buffers is None,
    ),
    "late buffer": Fault(
        error=StateError, words="buffer stem.late was not there", model=_stem(_Late)
    ),
    "sparse": Fault(error=ValueError, words="layer table .* sparse gradients", model=_sparse),
    "complex": Fault(error=ValueError, words="parameter turn is complex", model=_complex),
    "common memory": Fault(
        error=ValueError,
        words="head.weight and twin share memory",
        model=_common_memory,
    ),
    "buffer of weight": Fault(
        error=ValueError, words="head.weight and shadow share memory", model=_buffer_of_weight
    ),
    "closure": Fault(
        error=TypeError,
        words="LBFGS needs a closure",
        optimizer=lambda model: torch.optim.LBFGS(model.parameters()),
        possible=lambda case: case.schedule is None and not case.warm,
    ),
    "foreign": Fault(
        error=ValueError,
        words="parameter 0 of group 0, of shape .* is not a parameter of the model",
        optimizer=lambda model: torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1),
        possible=lambda case: case.schedule is None and not case.warm,
    ),
    "bad plan": Fault(error=ValueError, words="the plan .* this run has", before_step=_bad_plan),
    "moved": Fault(
        error=ValueError, words="head.weight has been given other memory", before_step=_moved
    ),
    "ragged": Fault(
        error=ValueError, words="must agree in their first dim", before_step=_ragged, possible=_own
    ),
    "empty": Fault(
        error=ValueError,
        words="the batch is empty",
        before_step=lambda script: torch.ones(0, 3),
        possible=_own,
    ),
    "regrouped": Fault(
        error=ValueError,
        words="parameter groups were changed after",
        before_step=_regrouped,
        possible=lambda case: case.exchange == "local",
    ),
    "own step": Fault(
        error=RuntimeError, words=r"step\(\) was called by the script", before_step=_own_step
    ),
    "clipping": Fault(error=RuntimeError, words="give clip_norm to Trainer", before_step=_clipping),
}
