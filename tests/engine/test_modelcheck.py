"""Models that cannot be folded are refused by the name of what is wrong; all others are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from onefold.engine.modelcheck import check_model
from tests.engine.assembled import Restless
from tests.small import line
from tests.tables import for_each


def holding(**parameters: torch.Tensor) -> nn.Module:
    """With parameters and, of names that begin with b_, buffers."""
    model = nn.Module()
    for name, value in parameters.items():
        if name.startswith("b_"):
            model.register_buffer(name, value)
        else:
            model.register_parameter(name, nn.Parameter(value))
    return model


MEMORY = torch.zeros(12)
SQUARE = torch.zeros(4, 4)

REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no module": (lambda: len, TypeError, r"^expected model to be a torch\.nn\.Module, got builti"),
    "wrapped": (lambda: nn.DataParallel(line()), TypeError, "wrapped in DataParallel; expected"),
    "meta": (lambda: line().to("meta"), ValueError, "^weight is on the meta device"),
    "meta buffer": (
        lambda: holding(b_mean=torch.zeros(2, device="meta")),
        ValueError,
        "^b_mean is on the meta device",
    ),
    "complex": (
        lambda: holding(wave=torch.zeros(2, dtype=torch.complex64)),
        ValueError,
        r"^parameter wave is complex \(torch\.complex64\): expected real",
    ),
    "overlapping": (
        lambda: holding(one=MEMORY[:8], two=MEMORY[4:]),
        ValueError,
        "^one and two share memory without being the same tensor",
    ),
    "inside": (lambda: holding(outer=MEMORY, inner=MEMORY[5:6]), ValueError, "^inner and outer sh"),
    "row and column": (
        lambda: holding(row=SQUARE[1], column=SQUARE[:, 1]),
        ValueError,
        "^column and row share memory",
    ),
    "buffer of a parameter": (
        lambda: holding(b_copy=MEMORY[:3], value=MEMORY),
        ValueError,
        "^b_copy and value share memory",
    ),
    "synchronised": (
        lambda: nn.Sequential(nn.SyncBatchNorm(3)),
        ValueError,
        "^layer 0 is a SyncBatchNorm, .* expected BatchNorm",
    ),
    "sparse": (
        lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)),
        ValueError,
        r"^layer 0 \(Embedding\) gives sparse gradients",
    ),
    "sparse bag": (
        lambda: nn.EmbeddingBag(4, 2, sparse=True),
        ValueError,
        r"\(EmbeddingBag\) gives sparse gradients",
    ),
}


@for_each("name", REFUSED)
def test_what_cannot_be_folded_is_named(name: str) -> None:
    make, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        check_model(make())


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_layer_without_shapes_is_named() -> None:
    with pytest.raises(ValueError, match=r"^1\.weight has no shape yet: run one forward pass"):
        check_model(nn.Sequential(line(), nn.LazyLinear(4)))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


FINE: dict[str, Callable[[], nn.Module]] = {
    "plain": Restless,
    "nothing": nn.Identity,
    "tied": tied,
    "rows in turn": lambda: holding(even=SQUARE[:, 0], odd=SQUARE[:, 1]),
    "neighbours": lambda: holding(left=MEMORY[:6], right=MEMORY[6:]),
    "buffers of one memory": lambda: holding(b_one=MEMORY[:8], b_two=MEMORY[4:]),
    "frozen of one memory": lambda: holding(one=MEMORY[:8], two=MEMORY[4:]).requires_grad_(False),
    "without elements": lambda: holding(none=MEMORY[:0], all=MEMORY),
    "complex buffer": lambda: holding(b_wave=torch.zeros(2, dtype=torch.complex64)),
    "dense embedding": lambda: nn.Embedding(4, 2),
    "half": lambda: line().bfloat16(),
}


@for_each("name", FINE)
def test_what_can_be_folded_is_not_refused(name: str) -> None:
    check_model(FINE[name]())
