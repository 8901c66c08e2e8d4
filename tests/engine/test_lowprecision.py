"""What low precision needs of models, and which of their parameters it leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onefold
from onefold.core.precision import AS_GIVEN, Precision
from onefold.engine.modelcheck import check_device, check_precision, held_in
from onefold.engine.modelparts import ModelParts
from tests.capabilities import has_lstm
from tests.tables import for_each


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3), nn.LayerNorm(3)
    )


def parts_of(module: nn.Module) -> ModelParts:
    return ModelParts(module, [name for name, _ in module.named_parameters()])


def test_normalising_layers_keep_their_precision() -> None:
    held = held_in(Precision("bf16-params"), parts_of(model()))
    low = {name for name, stand_in in held.items() if stand_in.dtype == torch.bfloat16}
    assert low == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert {each.dtype for name, each in held.items() if name not in low} == {torch.float32}


@for_each("precision", [AS_GIVEN, Precision("bf16"), Precision("fp16")])
def test_autocast_leaves_parameters_as_they_are(precision: Precision) -> None:
    module = model().to(memory_format=torch.channels_last)
    for name, stand_in in held_in(precision, parts_of(module)).items():
        parameter = module.get_parameter(name)
        assert stand_in.dtype == parameter.dtype
        assert (stand_in.shape, stand_in.stride()) == (parameter.shape, parameter.stride())


def test_frozen_parameters_may_have_any_precision() -> None:
    module = model()
    module[3].requires_grad_(False).half()
    check_precision(Precision("bf16"), module.named_parameters())
    module[0].double()
    with pytest.raises(ValueError, match=r"got 0.weight in torch.float64"):
        check_precision(Precision("bf16"), module.named_parameters())
    check_precision(AS_GIVEN, module.named_parameters())


def test_processors_can_do_all_of_them() -> None:
    for name in ("bf16", "fp16", "bf16-params", "fp16-params"):
        check_device(Precision(name), torch.device("cpu"))


def test_a_gpu_without_bfloat16_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    gpu = torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r'"bf16": Tesla T4 \(cuda:1\) has no bfloat16'):
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


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x[:, None])[0][:, -1]


@for_each("call", ["step", "evaluate"])
@for_each("name", ["bf16", "fp16-params"])
@for_each("kind", [Joined, Recurrent])
def test_a_layer_without_a_kernel_is_named(kind: type[nn.Module], name: str, call: str) -> None:
    low = Precision(name).compute  # type: ignore[arg-type]
    assert low is not None
    if kind is Recurrent and has_lstm(low):
        pytest.skip("this processor has a kernel for it")
    module = kind()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    trainer = onefold.Trainer(
        module,
        optimizer,
        lambda m, x: m(x).square().mean(1),
        shards=2,
        precision=name,  # type: ignore[arg-type]
    )
    x = torch.randn(6, 4)
    layer = "layer joins .Bilinear." if kind is Joined else "layer rnn .LSTM."
    words = f'{layer} cannot be computed in {str(low)[6:]} on this processor .*precision="fp32"'
    calls = {
        "step": lambda: trainer.step(x),
        "evaluate": lambda: trainer.evaluate(lambda m, x: {"y": m(x).mean(1)}, x, batch_size=6),
    }
    with pytest.raises(onefold.errors.PrecisionError, match=words):
        calls[call]()


def test_other_errors_of_a_loss_pass_as_they_are() -> None:
    module = nn.Linear(4, 2)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the script's own")

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    trainer = onefold.Trainer(module, optimizer, loss, shards=2, precision="bf16")
    with pytest.raises(RuntimeError, match="the script's own") as caught:
        trainer.step(torch.randn(6, 4))
    assert not isinstance(caught.value, onefold.errors.PrecisionError)
