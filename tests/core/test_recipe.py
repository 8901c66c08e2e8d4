"""Calls that are written down, and made once more on other memory."""

from __future__ import annotations

import torch

from onefold.core.recipe import Around, Generation, Made, Recipe, Reference, View
from tests.tables import for_each

NUMEL = 24
WHOLE = View(torch.float32, (4, 6), (6, 1), 0)
COLUMN = View(torch.float32, (4,), (6,), 2)


def called(function: object, *args: object, target: View | None = None, **kwargs: object) -> Made:
    return Made(function=function, args=args, kwargs=kwargs, around=Around.now(), target=target)


def drawn(seed: int, *calls: Made) -> Recipe:
    """Values that are drawn, and what follows."""
    torch.manual_seed(seed)
    return Recipe(4 * NUMEL, (called(torch.Tensor.normal_, Reference(WHOLE)), *calls))


def plain(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.empty(4, 6).normal_()


def test_values_are_those_of_the_calls() -> None:
    recipe = drawn(3, called(torch.Tensor.zero_, Reference(COLUMN)))
    expected = plain(3)
    expected[:, 2] = 0
    torch.manual_seed(8)
    assert torch.equal(WHOLE.within(recipe.made()), expected)
    # The generator stays what it was, whatever is drawn.
    found = torch.rand(3)
    torch.manual_seed(8)
    assert torch.equal(found, torch.rand(3))


def test_what_a_call_depends_on_is_set_and_put_back() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        around = Around.now()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
    with around.again():
        assert torch.get_default_dtype() is torch.float64
        assert torch.get_num_threads() == 1
        assert torch.equal(torch.get_rng_state(), around.state)  # type: ignore[arg-type]
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_num_threads() == threads


def test_a_generator_of_the_script_draws_the_same_again() -> None:
    generator = torch.Generator().manual_seed(5)
    kept = Generation(generator.get_state())
    expected = torch.empty(4, 6).normal_(generator=generator)
    call = called(torch.Tensor.normal_, Reference(WHOLE), generator=kept)
    recipe = Recipe(4 * NUMEL, (call,))
    for _ in range(2):
        assert torch.equal(WHOLE.within(recipe.made()), expected)


@for_each(
    ("dtype", "stride"),
    [(torch.float32, (6, 1)), (torch.float32, (1, 4)), (torch.bfloat16, (6, 1))],
)
def test_a_view_may_have_other_strides_and_another_dtype(
    dtype: torch.dtype, stride: tuple[int, int]
) -> None:
    view = torch.empty_strided((4, 6), stride, dtype=dtype)
    drawn(3).fill_view(view, WHOLE)
    assert torch.equal(view, plain(3).to(dtype))
    assert view.stride() == stride
