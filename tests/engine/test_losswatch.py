"""What a loss returns is looked at: what is surely read wrongly is refused, the rest mentioned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import onefold
from onefold.engine.losscheck import LossWatch
from onefold.errors import LossError
from tests.tables import for_each

SAMPLES, CLASSES = 6, 3
Loss = Callable[[torch.Tensor, torch.Tensor], object]


def logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(SAMPLES, CLASSES, generator=generator).requires_grad_()


def targets(ignored: int = 0) -> torch.Tensor:
    return torch.tensor([-100] * ignored + [0, 1, 2, 0, 1, 2][ignored:])


def with_weights(reduction: str) -> torch.Tensor:
    weights = torch.tensor([1.0, 2.0, 3.0])
    return F.cross_entropy(logits(), targets(), weight=weights, reduction=reduction)


CERTAIN: dict[str, Callable[[], object]] = {
    "sum": lambda: F.cross_entropy(logits(), targets(), reduction="sum"),
    "weights": lambda: with_weights("mean"),
    "ignored": lambda: F.cross_entropy(logits(), targets(ignored=2)),
}
MAYBE: dict[str, Callable[[], object]] = {
    "maybe-sum": lambda: F.cross_entropy(logits(), targets(), reduction="none").sum(),
    "weights-none": lambda: with_weights("none"),
    "ignored-none": lambda: F.cross_entropy(logits(), targets(ignored=2), reduction="none"),
}
FINE: dict[str, Callable[[], object]] = {
    "mean": lambda: F.cross_entropy(logits(), targets()),
    "values": lambda: F.cross_entropy(logits(), targets(), reduction="none"),
    "Mean": lambda: onefold.Mean(CERTAIN["sum"](), SAMPLES),  # type: ignore[arg-type]
    "Sum": lambda: onefold.Sum(CERTAIN["sum"]()),  # type: ignore[arg-type]
    "number": lambda: 3.0,
}


def look(
    watch: LossWatch, result: object, *, due: bool = True, where: str = "step 2, shard 1"
) -> None:
    watch.look(result, samples=SAMPLES, due=due, where=where)


@for_each("due", [True, False])
@for_each("kind", CERTAIN)
def test_what_is_read_wrongly_for_sure_is_an_error_in_every_step(kind: str, due: bool) -> None:
    watch = LossWatch()
    with pytest.raises(LossError, match=r"^the loss of step 2, shard 1 is ") as caught:
        look(watch, CERTAIN[kind](), due=due)
    assert "onefold." in str(caught.value)
    assert not watch.findings


@for_each("kind", [*CERTAIN, *MAYBE])
def test_what_is_not_refused_is_kept_and_mentioned_once(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`onefold verify` does not refuse: it compares."""
    watch = LossWatch(refuses=kind in MAYBE)
    for where in ("step 1, shard 0", "step 1, shard 1", "step 2, shard 0"):
        look(watch, {**CERTAIN, **MAYBE}[kind](), where=where)
    assert list(watch.findings) == [kind]
    (message,) = caplog.messages
    assert message.startswith("the loss of step 1, shard 0 is ")
    assert message.endswith("To see whether it is what you mean: onefold verify")


def test_the_first_of_each_kind_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    watch = LossWatch()
    for kind in ("maybe-sum", "weights-none", "maybe-sum"):
        look(watch, MAYBE[kind]())
    assert list(watch.findings) == ["maybe-sum", "weights-none"]
    assert len(caplog.messages) == 2


@for_each("kind", ["weights-none", "ignored-none"])
def test_values_of_samples_are_looked_at_when_it_is_due(kind: str) -> None:
    watch = LossWatch()
    look(watch, MAYBE[kind](), due=False)
    assert not watch.findings
    look(watch, MAYBE[kind](), due=True)
    assert list(watch.findings) == [kind]


@for_each("kind", FINE)
def test_what_is_as_it_is_read_is_left_alone(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    watch = LossWatch()
    look(watch, FINE[kind]())
    assert not watch.findings
    assert not caplog.messages
