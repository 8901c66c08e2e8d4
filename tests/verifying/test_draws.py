"""A sample gets the random numbers that it had in the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from onefold.verifying.draws import Draws
from tests.tables import for_each

N = 6
ROWS = [1, 4, 5]
Draw = Callable[[int], torch.Tensor]


def replayed(draw: Draw) -> tuple[torch.Tensor, torch.Tensor, set[str]]:
    draws = Draws()
    with draws.recording(N):
        whole = draw(N)
    with draws.replaying(ROWS):
        part = draw(len(ROWS))
    return whole, part, draws.unmatched


@for_each(
    "draw",
    [
        lambda n: torch.randn(n, 2),
        lambda n: torch.rand_like(torch.empty(n)),
        lambda n: torch.randint(0, 9, (n,)),
        lambda n: torch.empty(n, 3).bernoulli_(0.5),
        lambda n: torch.normal(torch.zeros(n), 1.0),
        lambda n: torch.multinomial(torch.ones(n, 5), 1),
        lambda n: torch.distributions.Beta(2.0, torch.ones(n)).sample(),
        lambda n: torch.randn(n * 2, 3).view(n, 2, 3),  # several draws of each sample
    ],
)
def test_a_draw_of_each_sample_is_cut_like_the_samples(draw: Draw) -> None:
    whole, part, unmatched = replayed(draw)
    assert torch.equal(part, whole[ROWS])
    assert not unmatched


@for_each("draw", [lambda n: torch.rand(()), lambda n: torch.randperm(5)])
def test_a_draw_of_all_samples_is_the_same(draw: Draw) -> None:
    whole, part, unmatched = replayed(draw)
    assert torch.equal(part, whole)
    assert not unmatched


@for_each(
    ("draw", "name"),
    [
        (lambda n: torch.randperm(n), "randperm"),
        (lambda n: torch.randint(0, n, (n,)), "randint"),
        (lambda n: torch.rand(2, n), "rand"),
        (lambda n: torch.rand(n) if n == N else torch.randn(n), "randn"),
        (lambda n: torch.ones(1) if n == N else torch.randn(n), "randn"),
    ],
)
def test_a_draw_without_counterpart_is_named(draw: Draw, name: str) -> None:
    assert replayed(draw)[2] == {name}
