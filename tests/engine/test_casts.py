"""What is known of a dtype where autocast may cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from onefold.engine.hollow import gives_unsure, tells_dtype
from tests.capabilities import has_lstm, needs_lstm
from tests.tables import for_each

SQUARE = torch.randn(2, 4, 4)
IMAGE = torch.randn(1, 4, 6, 6)
ROW = torch.randn(4)
HEADS = torch.randn(1, 2, 3, 4)

DONE: dict[str, Callable[[], Any]] = {
    "linear": lambda: F.linear(SQUARE, SQUARE[0]),
    "layer": lambda: nn.Linear(4, 4)(SQUARE),
    "bilinear": lambda: F.bilinear(SQUARE[0], SQUARE[1], SQUARE),
    "matmul": lambda: SQUARE @ SQUARE,
    "times row": lambda: SQUARE[0] @ ROW,
    "mv": lambda: SQUARE[0].mv(ROW),
    "mm": lambda: torch.mm(SQUARE[0], SQUARE[1]),
    "bmm": lambda: torch.bmm(SQUARE, SQUARE),
    "addmm": lambda: torch.addmm(SQUARE[0], SQUARE[0], SQUARE[1]),
    "baddbmm": lambda: torch.baddbmm(SQUARE, SQUARE, SQUARE),
    "addr": lambda: torch.addr(SQUARE[0], ROW, ROW),
    "dot": lambda: torch.dot(ROW, ROW),
    "inner": lambda: torch.inner(SQUARE, SQUARE),
    "outer": lambda: torch.outer(ROW, ROW),
    "einsum": lambda: torch.einsum("bij,bjk->bik", SQUARE, SQUARE),
    "tensordot": lambda: torch.tensordot(SQUARE, SQUARE[0], 1),
    "multi_dot": lambda: torch.linalg.multi_dot([SQUARE[0], SQUARE[1], SQUARE[0]]),
    "power": lambda: torch.matrix_power(SQUARE, 3),
    "exponential": lambda: torch.matrix_exp(SQUARE),
    "inverse": lambda: torch.linalg.pinv(SQUARE),
    "vecdot": lambda: torch.linalg.vecdot(SQUARE, SQUARE),
    "cov": lambda: torch.cov(SQUARE[0]),
    "corrcoef": lambda: torch.corrcoef(SQUARE[0]),
    "cdist": lambda: torch.cdist(SQUARE, SQUARE),
    "convolution": lambda: F.conv2d(IMAGE, IMAGE[:, :, :3, :3]),
    "in one dimension": lambda: F.conv1d(SQUARE, SQUARE[:, :, :2]),
    "transposed": lambda: F.conv_transpose2d(IMAGE, IMAGE.view(4, 1, 6, 6)),
    "prelu": lambda: F.prelu(IMAGE, ROW),
    "sdpa": lambda: F.scaled_dot_product_attention(HEADS, HEADS, HEADS),
    "attention": lambda: nn.MultiheadAttention(4, 2)(SQUARE, SQUARE, SQUARE),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8)(SQUARE),
    "lstm": lambda: nn.LSTM(4, 4)(SQUARE),
    "gru": lambda: nn.GRU(4, 4)(SQUARE),
    "rnn": lambda: nn.RNN(4, 4)(SQUARE),
    "lstm cell": lambda: nn.LSTMCell(4, 4)(SQUARE[0]),
    "gru cell": lambda: nn.GRUCell(4, 4)(SQUARE[0]),
    "layer norm": lambda: F.layer_norm(SQUARE, (4,)),
    "rms norm": lambda: F.rms_norm(SQUARE, (4,)),
    "group norm": lambda: F.group_norm(IMAGE, 2),
    "batch norm": lambda: F.batch_norm(IMAGE, ROW, ROW.square()),
    "softmax": lambda: F.softmax(SQUARE, -1),
    "gelu": lambda: F.gelu(SQUARE),
    "cosine": lambda: F.cosine_similarity(SQUARE, SQUARE),
    "interpolate": lambda: F.interpolate(IMAGE, scale_factor=2, mode="bilinear"),
    "pool": lambda: F.avg_pool2d(IMAGE, 2),
    "norm": lambda: SQUARE.norm(),
    "product": lambda: SQUARE.prod(),
    "loss": lambda: F.mse_loss(SQUARE, SQUARE + 1),
    "entropy": lambda: F.cross_entropy(SQUARE[0], torch.arange(4)),
    "embedding": lambda: F.embedding(torch.arange(2), SQUARE[0]),
    "cumulative": lambda: SQUARE.cumsum(0),
}


class Noting(TorchFunctionMode):
    """Notes which calls give another dtype than they would without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.missed: list[str] = []
        self.casts = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        results = made if isinstance(made, tuple | list) else [made]
        is_other = any(isinstance(t, torch.Tensor) and t.dtype == torch.bfloat16 for t in results)
        name = getattr(func, "__name__", repr(func))
        given = [t for t in args if isinstance(t, torch.Tensor) and t.dtype == torch.bfloat16]
        self.casts += is_other
        if is_other and not given and not gives_unsure(name, args, kwargs, [], "cpu"):
            self.missed.append(name)
        return made


@for_each("name", DONE)
def test_nothing_that_autocast_casts_counts_as_sure(name: str) -> None:
    if name == "lstm":
        needs_lstm(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), Noting() as noting:
        DONE[name]()
    assert noting.missed == []


def test_the_cases_above_are_cast_at_all() -> None:
    with torch.autocast("cpu", torch.bfloat16), Noting() as noting:
        for name, do in DONE.items():
            if name != "lstm" or has_lstm(torch.bfloat16):
                do()
    assert noting.casts >= 20


@for_each(
    ("name", "args", "unsure"),
    [
        ("linear", (), True),
        ("softmax", (), False),
        ("to", (torch.bfloat16,), False),
        ("float", (), False),
    ],
)
def test_what_is_made_of_what_is_sure(name: str, args: Any, unsure: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert gives_unsure(name, args, {}, [(ROW, False)], "cpu") == unsure
    assert not gives_unsure(name, args, {}, [(ROW, False)], "cpu")


@for_each(
    ("name", "other", "unsure"),
    [
        ("add", ROW, False),
        ("__rsub__", ROW, False),
        ("cat", ROW, False),
        ("mul_", ROW.double(), False),
        ("add", ROW.sum(), True),  # a number does not widen
        ("add", torch.arange(4), True),
        ("add", ROW.bfloat16(), True),
        ("layer_norm", ROW, True),
        ("float", ROW, False),
    ],
)
def test_what_is_made_of_what_is_unsure(name: str, other: torch.Tensor, unsure: bool) -> None:
    forms = [(ROW, True), (other, False)]
    assert gives_unsure(name, (), {}, forms, "cpu") == unsure


def test_what_tells_a_dtype() -> None:
    asked = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            asked.append(tells_dtype(func, args, kwargs or {}))
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.ones(3).as_subclass(Asked)
    for ask in (
        lambda: tensor.dtype,
        lambda: tensor.itemsize,
        lambda: tensor.nbytes,
        tensor.element_size,
        tensor.type,
        lambda: torch.result_type(tensor, 1),
    ):
        asked.clear()
        ask()
        assert True in asked
    for do in (lambda: tensor.shape, lambda: tensor + 1, lambda: tensor.type(torch.float64)):
        asked.clear()
        do()
        assert asked
        assert True not in asked
