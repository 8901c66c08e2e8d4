"""What is known of a dtype where autocast may cast."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from onefold.engine.hollow import gives_unsure, tells_dtype
from tests.capabilities import has_lstm
from tests.tables import for_each

SQUARE = torch.randn(2, 4, 4)
ONE, TWO = SQUARE
IMAGE = torch.randn(1, 4, 6, 6)
ROW = torch.randn(4)
HEADS = torch.randn(1, 2, 3, 4)


def do_all() -> None:
    """All that autocast may cast, and some that it leaves alone."""
    for function in (torch.matmul, torch.inner, torch.cdist, torch.linalg.vecdot, torch.bmm):
        function(SQUARE, SQUARE)
    for function in (torch.mm, torch.matmul, torch.inner, F.linear, torch.cdist):
        function(ONE, TWO)
    for function in (torch.dot, torch.outer, torch.inner, torch.vdot):
        function(ROW, ROW)
    for function in (torch.linalg.pinv, torch.matrix_exp, torch.cov, torch.corrcoef, F.gelu):
        function(ONE)
    F.linear(SQUARE, ONE)
    nn.Linear(4, 4)(SQUARE)
    F.bilinear(ONE, TWO, SQUARE)
    torch.mv(ONE, ROW)
    torch.addmm(ONE, ONE, TWO)
    torch.addmv(ROW, ONE, ROW)
    torch.baddbmm(SQUARE, SQUARE, SQUARE)
    torch.addbmm(ONE, SQUARE, SQUARE)
    torch.addr(ONE, ROW, ROW)
    torch.einsum("bij,bjk->bik", SQUARE, SQUARE)
    torch.tensordot(SQUARE, ONE, 1)
    torch.linalg.multi_dot([ONE, TWO, ONE])
    torch.matrix_power(SQUARE, 3)
    F.conv2d(IMAGE, IMAGE[:, :, :3, :3])
    F.conv1d(SQUARE, SQUARE[:, :, :2])
    F.conv_transpose2d(IMAGE, IMAGE.view(4, 1, 6, 6))
    F.prelu(IMAGE, ROW)
    F.scaled_dot_product_attention(HEADS, HEADS, HEADS)
    nn.MultiheadAttention(4, 2)(SQUARE, SQUARE, SQUARE)
    nn.TransformerEncoderLayer(4, 2, 8)(SQUARE)
    if has_lstm(torch.bfloat16):
        nn.LSTM(4, 4)(SQUARE)
    for recurrent in (nn.GRU(4, 4), nn.RNN(4, 4)):
        recurrent(SQUARE)
    for cell in (nn.LSTMCell(4, 4), nn.GRUCell(4, 4)):
        cell(ONE)
    F.layer_norm(SQUARE, (4,))
    F.rms_norm(SQUARE, (4,))
    F.group_norm(IMAGE, 2)
    F.batch_norm(IMAGE, ROW, ROW.square())
    F.softmax(SQUARE, -1)
    F.cosine_similarity(SQUARE, SQUARE)
    F.interpolate(IMAGE, scale_factor=2, mode="bilinear")
    F.avg_pool2d(IMAGE, 2)
    F.mse_loss(SQUARE, SQUARE + 1)
    F.cross_entropy(ONE, torch.arange(4))
    F.embedding(torch.arange(2), ONE)
    SQUARE.norm()
    SQUARE.prod()
    SQUARE.cumsum(0)


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


def test_nothing_that_autocast_casts_counts_as_sure() -> None:
    with torch.autocast("cpu", torch.bfloat16), Noting() as noting:
        do_all()
    assert noting.missed == []
    assert noting.casts >= 20


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


@for_each(
    ("ask", "tells"),
    [
        (lambda t: t.dtype, True),
        (lambda t: t.itemsize, True),
        (lambda t: t.nbytes, True),
        (lambda t: t.element_size(), True),
        (lambda t: t.type(), True),
        (lambda t: torch.result_type(t, 1), True),
        (lambda t: t.shape, False),
        (lambda t: t + 1, False),
        (lambda t: t.type(torch.float64), False),
    ],
)
def test_what_tells_a_dtype(ask: Any, tells: bool) -> None:
    asked = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            asked.append(tells_dtype(func, args, kwargs or {}))
            return super().__torch_function__(func, types, args, kwargs or {})

    ask(torch.ones(3).as_subclass(Asked))
    assert asked
    assert any(asked) is tells
