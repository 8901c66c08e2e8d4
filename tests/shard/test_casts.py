"""What is known of a dtype where autocast may cast."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from onefold.placement.pipeline.shapetensor import gives_unsure, tells_dtype
from tests.capabilities import has_lstm

SQUARE = torch.randn(2, 4, 4)
ONE, TWO = SQUARE
IMAGE = torch.randn(1, 4, 6, 6)
ROW = torch.randn(4)
HEADS = torch.randn(1, 2, 3, 4)


def do_all() -> None:
    for function in (torch.matmul, torch.inner, torch.cdist, torch.linalg.vecdot, torch.bmm):
        function(SQUARE, SQUARE)
    for function in (torch.mm, torch.matmul, torch.inner, F.linear, torch.cdist):
        function(ONE, TWO)
    for function in (torch.linalg.pinv, torch.matrix_exp, torch.cov, torch.corrcoef, F.gelu):
        function(ONE)
    for function in (torch.norm, torch.prod, F.normalize, F.tanhshrink):
        function(SQUARE)
    torch.dot(ROW, ROW)
    torch.outer(ROW, ROW)
    F.linear(SQUARE, ONE)
    F.bilinear(ONE, TWO, SQUARE)
    torch.mv(ONE, ROW)
    torch.addmm(ONE, ONE, TWO)
    torch.baddbmm(SQUARE, SQUARE, SQUARE)
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
    for recurrent in (nn.GRU, nn.RNN, *([nn.LSTM] if has_lstm(torch.bfloat16) else [])):
        recurrent(4, 4)(SQUARE)
    nn.LSTMCell(4, 4)(ONE)
    nn.GRUCell(4, 4)(ONE)
    F.layer_norm(SQUARE, (4,))
    F.group_norm(IMAGE, 2)
    F.batch_norm(IMAGE, ROW, ROW.square())
    F.interpolate(IMAGE, scale_factor=2, mode="bilinear")
    F.mse_loss(SQUARE, SQUARE + 1)
    F.cross_entropy(ONE, torch.arange(4))
    F.embedding(torch.arange(2), ONE)


class Noting(TorchFunctionMode):
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


def test_what_tells_a_dtype() -> None:
    asked = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            asked.append(tells_dtype(func, args, kwargs or {}))
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.ones(3).as_subclass(Asked)
    for name in ("dtype", "itemsize", "nbytes"):
        getattr(tensor, name)
    for tells in (tensor.element_size, tensor.type, lambda: torch.result_type(tensor, 1)):
        tells()
    assert asked.count(True) == 6
    for tells_not in (lambda: tensor.shape, lambda: tensor + 1, lambda: tensor.type(torch.float64)):
        tells_not()
    assert asked.count(True) == 6 < len(asked)
