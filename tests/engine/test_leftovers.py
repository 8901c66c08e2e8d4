"""A line of a plain loop that would do nothing any more is refused; everybody else's works."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_

from onefold.engine.leftovers import refuse_clipping
from tests.small import line, points, square
from tests.tables import for_each


def with_gradients() -> nn.Module:
    model = line()
    square(model, points(8)).mean().backward()
    return model


@for_each("one", [False, True])
@for_each("foreach", [None, False, True])
def test_clipping_what_has_no_gradients_is_refused(one: bool, foreach: bool | None) -> None:
    model = line()
    refuse_clipping(model.parameters())
    given = model.weight if one else model.parameters()
    with pytest.raises(
        RuntimeError, match=r"it would do nothing\. Remove the line and give clip_no"
    ):
        clip_grad_norm_(given, 1.0, foreach=foreach)


def test_one_of_ours_among_others_is_refused_too() -> None:
    ours, theirs = line(), line()
    refuse_clipping(ours.parameters())
    with pytest.raises(RuntimeError, match="for parameters of a Trainer"):
        clip_grad_norm_([theirs.weight, ours.bias], 1.0)


@for_each("ours", [False, True])
def test_what_has_gradients_is_clipped_as_ever(ours: bool) -> None:
    """Inside a loss, between a backward of its own and the end, there may be some."""
    model = with_gradients()
    plain = with_gradients()
    norms = [p.grad.norm() for p in plain.parameters() if p.grad is not None]
    before = torch.stack(norms).norm()
    if ours:
        refuse_clipping(model.parameters())
    found = clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(found, before)
    for mine, grown in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert grown.grad is not None
        torch.testing.assert_close(mine.grad, grown.grad * (0.1 / (before + 1e-6)))


def test_others_without_gradients_are_left_alone() -> None:
    refuse_clipping(line().parameters())
    assert float(clip_grad_norm_(line().parameters(), 1.0)) == 0.0


def test_a_generator_is_read_once_and_whole() -> None:
    model = with_gradients()
    refuse_clipping([nn.Parameter(torch.zeros(1))])
    norm = clip_grad_norm_((p for p in model.parameters()), 1e-3)
    assert float(norm) > 1e-3
    left = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert float(left) == pytest.approx(1e-3, rel=1e-2)


def test_the_function_is_wrapped_once() -> None:
    refuse_clipping(line().parameters())
    first = clip_grad._clip_grads_with_norm_
    refuse_clipping(line().parameters())
    assert clip_grad._clip_grads_with_norm_ is first
    assert first.__name__ == "_clip_grads_with_norm_"


def test_a_release_without_that_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(clip_grad, "_clip_grads_with_norm_")
    refuse_clipping(line().parameters())
    assert not hasattr(clip_grad, "_clip_grads_with_norm_")


def test_parameters_are_not_kept_alive() -> None:
    model = line()
    refuse_clipping(model.parameters())
    held = weakref.ref(model.weight)
    del model
    assert held() is None
