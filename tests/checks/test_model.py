"""Models that cannot be folded, or not in a precision, are refused by the name of what is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.checks.model import check_device, check_model
from onefold.core.settings import Precision
from tests.small import line, make_trainer
from tests.tables import for_each


def holding(**parameters: torch.Tensor) -> nn.Module:
    """With parameters and, of names that begin with b_, buffers; with f_, frozen parameters."""
    model = nn.Module()
    for name, value in parameters.items():
        if name.startswith("b_"):
            model.register_buffer(name, value)
        else:
            trains = not name.startswith("f_")
            model.register_parameter(name, nn.Parameter(value, requires_grad=trains))
    return model


MEMORY = torch.zeros(12)
SQUARE = torch.zeros(4, 4)


@for_each(
    ("make", "words"),
    [
        (lambda: len, r"^model must be a torch\.nn\.Module, but got builti"),
        (lambda: nn.DataParallel(line()), "wrapped in DataParallel. Pass the plain"),
        (lambda: line().to("meta"), "^weight is on the meta device"),
        (lambda: holding(b_mean=torch.zeros(2, device="meta")), "^b_mean is on the meta device"),
        (
            lambda: holding(wave=torch.zeros(2, dtype=torch.complex64)),
            r"^parameter wave is complex \(torch\.complex64\), but parameters must be real",
        ),
        (lambda: nn.Sequential(line(), nn.LazyLinear(4)), r"^1\.weight has no shape yet. Run one"),
        (
            lambda: holding(one=MEMORY[:8], two=MEMORY[4:]),
            "^one and two share memory but are different tensors",
        ),
        (lambda: holding(row=SQUARE[1], column=SQUARE[:, 1]), "^column and row share memory"),
        (lambda: holding(b_copy=MEMORY[:3], value=MEMORY), "^b_copy and value share memory"),
        (lambda: holding(f_copy=MEMORY[:3], value=MEMORY), "^f_copy and value share memory"),
        (
            lambda: nn.Sequential(nn.SyncBatchNorm(3)),
            "^layer 0 is a torch.nn.SyncBatchNorm, .* or BatchNorm",
        ),
        (
            lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)),
            r"^layer 0 \(Embedding\) gives sparse gradients",
        ),
        (
            lambda: holding(b_sum=torch.eye(2).to_sparse()),
            r"^b_sum must have a dense layout, but has torch\.sparse_c",
        ),
        (lambda: nn.EmbeddingBag(4, 2, sparse=True), r"\(EmbeddingBag\) gives sparse gradients"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_what_cannot_be_folded_is_named(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        check_model(make())


@for_each(
    "make",
    [
        lambda: holding(even=SQUARE[:, 0], odd=SQUARE[:, 1]),
        lambda: holding(b_one=MEMORY[:8], b_two=MEMORY[4:]),
        lambda: holding(f_one=MEMORY[:8], f_two=MEMORY[4:]),
        lambda: holding(none=MEMORY[:0], all=MEMORY),
        lambda: holding(b_wave=torch.zeros(2, dtype=torch.complex64)),
    ],
)
def test_what_can_be_folded_is_not_refused(make: Callable[[], nn.Module]) -> None:
    check_model(make())


def test_a_gpu_without_bfloat16_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    gpu = torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r'"bf16": Tesla T4 \(cuda:1\) does not support bfloat16'):
        check_device(Precision("bf16"), gpu)
    check_device(Precision("fp16"), gpu)


class Joined(nn.Module):
    """A layer that gets inputs of two dtypes, which its kernel refuses on any processor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.joins = nn.Bilinear(4, 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.joins(self.first(x), x)


@for_each(
    "call",
    [
        lambda trainer, x: trainer.step(x),
        lambda trainer, x: trainer.evaluate(lambda m, x: {"y": m(x).mean(1)}, x, batch_size=6),
    ],
)
@for_each("name", ["bf16", "fp16-params"])
def test_a_layer_without_a_kernel_is_named(name: Any, call: Callable[..., Any]) -> None:
    low = Precision(name).compute
    trainer = make_trainer(Joined(), lambda m, x: m(x).square().mean(1), shards=2, precision=name)
    words = rf'joins .Bilinear. cannot be computed in {str(low)[6:]} on this .*precision="fp32"'
    with pytest.raises(onefold.errors.PrecisionError, match=words):
        call(trainer, torch.randn(6, 4))
