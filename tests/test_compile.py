"""Runs that are compiled: one result for any number of devices, which is that of the loss.

To make kernels takes seconds each, so most tests stop before that: their code is traced, with its
gradient, and run by PyTorch's own kernels. What depends on kernels is tested with one tiny model.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import onefold
from onefold.errors import CheckpointError, LossError, StateError
from onefold.shard import compiling, kernels
from tests.small import make_trainer
from tests.tables import for_each
from tests.tools.verifying.compared import compared

__all__ = ["compared"]

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[Any, Batch], object]
COMPILE = torch.compile
SIZES = (9, 8, 9, 3)
"""Of batches: shards of three sizes, and one that is empty."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.xdist_group("compile"),
    pytest.mark.usefixtures("fresh_compiler"),
    # The compiler's own: where it copies what a tensor knows of its gradient, and where it loads.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The compiler shows its progress by tqdm, which starts a thread that outlasts a test.
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    # Where its kernels find a function of PyTorch in this process; put back with the patch.
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace what is compiled, and make no kernels of it."""

    def trace(function: Any, *, dynamic: bool, options: dict[str, object]) -> Any:
        assert "deterministic" in options
        return COMPILE(function, dynamic=dynamic, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", trace)


class Net(nn.Module):
    """Batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        # It needs two samples, and small shards have one.
        hidden = self.norm(hidden) if len(x) > 1 else hidden
        return self.second(F.dropout(hidden.tanh(), 0.1, self.training))


def of_each(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def two_terms(model: nn.Module, batch: Batch) -> object:
    losses, valid = of_each(model, batch), batch[1] > 0
    return onefold.Mean((losses * valid).sum(), valid.sum()) + 0.1 * onefold.Sum(losses.sum())


def with_values(model: nn.Module, batch: Batch) -> object:
    """No part of the gradient, not even as one of 0, which would make an infinite one NaN."""
    logits = model(batch[0])
    losses = F.cross_entropy(logits, batch[1], reduction="none")
    steep, few = (losses - losses.detach()).abs().sqrt(), batch[1] == 0
    return losses, {
        "accuracy": logits.argmax(1) == batch[1],
        "steep": steep,
        "few": onefold.Mean((losses * few).sum(), few.sum()),
        "both": onefold.Mean(steep.sum(), 2) + onefold.Sum(losses.sum()),
    }


def broken_up(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What cannot be compiled stays as it is written."""
    logits = model(batch[0])
    factor = 2.0 if float(logits.detach().sum()) > 0 else 1.0
    return factor * F.cross_entropy(logits, batch[1], reduction="none")


def again(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A layer that is computed twice, with its dropout, and whose weight is used twice."""
    hidden = checkpoint(lambda x: F.dropout(model(x).tanh(), 0.5), batch[0], use_reentrant=False)
    return of_each(model, (hidden, batch[1]))


def batch_of(samples: int, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 8, generator=generator)
    return x, torch.randint(0, 3, (samples,), generator=generator)


def trainer_of(
    loss: Loss = of_each, devices: int | None = 1, *, build: Any = Net, **options: Any
) -> onefold.Trainer:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW((model := build()).parameters(), lr=1e-2)
    settings: Any = {"optimizer": optimizer, "devices": devices, "compile": True, **options}
    return make_trainer(model, loss, **settings)


def run(
    trainer: onefold.Trainer, sizes: tuple[int, ...] = SIZES, first: int = 0
) -> tuple[Any, ...]:
    for number, samples in enumerate(sizes, first):
        step = trainer.step(batch_of(samples, number))
    return trainer.fingerprint(), *map(float, [step.loss, *step.values.values()])


@pytest.mark.usefixtures("traced")
@for_each(
    ("loss", "build", "options", "near"),
    [
        (of_each, Net, {}, 1e-3),
        (two_terms, Net, {}, 1e-3),
        (broken_up, Net, {}, 1e-3),
        (with_values, Net, {}, 1e-2),
        (again, partial(nn.Linear, 8, 8), {}, 1e-3),
        (of_each, Net, {"precision": "bf16"}, 0.02),
        (of_each, Net, {"precision": "fp16-params"}, 0.02),
    ],
)
def test_the_bits_do_not_depend_on_the_devices(
    loss: Loss, build: Any, options: dict[str, Any], near: float
) -> None:
    found = run(trainer_of(loss, build=build, **options))
    # What was compiled before does not show.
    torch._dynamo.reset()
    run(trainer_of(loss, build=build, **options), (18, 5))
    assert run(trainer_of(loss, 2, build=build, **options)) == found
    assert run(trainer_of(loss, 3, build=build, shares=(0, 3, 1), **options)) == found
    # With the same dropout: only rounding is left to differ.
    written = run(trainer_of(loss, build=build, compile=False, **options))
    assert written[1:] == pytest.approx(found[1:], rel=near)
    if loss is with_values:
        assert found[0] == run(trainer_of())[0]


@pytest.mark.usefixtures("traced")
def test_hooks_and_frozen_layers_may_come_and_go_between_steps() -> None:
    """The compiler does not look for hooks by itself."""

    def doubled(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad *= 2

    def go(*, compiled: bool, devices: int) -> tuple[Any, ...]:
        trainer = trainer_of(devices=devices, compile=compiled)
        model: Any = trainer.model
        trainer.step(batch_of(8))
        handle = model.first.register_forward_hook(lambda m, given, made: made * 0.5)
        model.second.weight.register_hook(lambda gradient: gradient * 3)
        model.second.bias.register_post_accumulate_grad_hook(doubled)
        trainer.step(batch_of(8))
        model.first.bias.requires_grad_(False)
        trainer.step(batch_of(8))
        handle.remove()
        model.first.bias.requires_grad_(True)
        return run(trainer, (8,))

    one = go(compiled=True, devices=1)
    assert go(compiled=True, devices=3) == one
    assert go(compiled=False, devices=1)[1] == pytest.approx(one[1], rel=1e-3)


@pytest.mark.usefixtures("traced")
def test_models_that_are_compiled_already() -> None:
    with pytest.raises(ValueError, match="is compiled with dynamic=True"):
        trainer_of(build=lambda: COMPILE(Net(), dynamic=True))
    builds = (Net, lambda: COMPILE(Net(), backend="eager"))
    assert len({run(trainer_of(partial(of_each), build=build), (8,)) for build in builds}) == 1


@pytest.mark.usefixtures("traced")
def test_what_compiled_code_hides_is_seen_by_running_the_loss_as_it_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    by_hand = trainer_of(lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"))
    with pytest.raises(LossError, match="a sum over the shard"):
        by_hand.step(batch_of(18))
    outside = nn.BatchNorm1d(8)
    trainer = trainer_of(lambda m, b: of_each(m, (outside(b[0]), b[1])))
    with pytest.raises(StateError, match="a module of BatchNorm1d is not part of the model"):
        trainer.step(batch_of(8))
    drawn = np.random.default_rng(0)
    with caplog.at_level(logging.WARNING, "onefold"):
        run(trainer_of(lambda m, b: of_each(m, b) * drawn.uniform(1, 2)), (8, 8))
    (said,) = [r.getMessage() for r in caplog.records if "without compiling" in r.getMessage()]
    assert said.startswith("compile=True: the loss of step 1, shard 0 adds up to ")


@pytest.mark.usefixtures("traced")
def test_losses_and_layers_of_the_whole_batch_are_refused_by_name() -> None:
    trainer = trainer_of(lambda m, b: of_each(m, b) + onefold.gather(m(b[0])).sum())
    before = trainer.fingerprint()
    with pytest.raises(LossError, match=r"compile=True: the loss calls onefold\.gather"):
        trainer.step(batch_of(8))
    assert trainer.fingerprint() == before
    with pytest.raises(ValueError, match=r"compile=True: norm is an onefold\.SyncBatchNorm"):
        trainer_of(build=lambda: onefold.SyncBatchNorm.convert(Net()))


def test_what_is_missing_or_open_to_others_is_named_before_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo import config as tracer
    from torch._inductor import config as generator

    missing = pytest.raises(ValueError, match=r"no-such-.* apt install g\+\+ .*omit compile")
    with generator.patch({"cpp.cxx": (None, "no-such-compiler")}), missing:
        trainer_of()
    with tracer.patch(disable=True), pytest.raises(ValueError, match="TORCH_COMPILE_DISABLE"):
        trainer_of()
    with pytest.raises(TypeError, match="compile must be True or False, but got 'max-auto"):
        trainer_of(compile="max-autotune")
    trainer_of(compile=False).save(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"saved with compile False, but this run has True"):
        trainer_of().load(tmp_path / "run")
    tmp_path.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"TORCHINDUCTOR_CACHE_DIR=.* is not safe .*others may write to"
    ):
        trainer_of()


@pytest.mark.usefixtures("traced")
def test_many_shapes_are_mentioned_and_too_many_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_MANY_SHAPES", 2)
    monkeypatch.setattr(kernels, "_SHAPES", 4)
    trainer = trainer_of(shards=1)
    with caplog.at_level(logging.WARNING, "onefold"):
        run(trainer, (2, 3, 4, 5))
        with pytest.raises(LossError, match=r"limit of shapes is reached.* multiples"):
            trainer.step(batch_of(6))
    (said,) = [r.getMessage() for r in caplog.records if "have had" in r.getMessage()]
    assert "shards have had 3 shapes so far" in said


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))


def squares(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch[0]) - batch[0][:, :3]).square().sum(dim=1)


def with_kernels(devices: int | None = None, **options: Any) -> tuple[Any, ...]:
    return run(trainer_of(squares, devices, build=tiny, **options), (8, 8, 8))


@pytest.mark.processes
def test_kernels_give_the_same_bits_on_any_number_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with config.patch(compile_threads=1):  # no threads that would outlast a test
        # Both processes make their kernels at the same time, in one folder.
        launched = onefold.launch(with_kernels, devices=2)
        assert with_kernels(3, shares=(1, 3, 0)) == launched
        # As in another process, what was made is found again.
        torch._dynamo.reset()
        counters.clear()
        assert with_kernels(1) == launched
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1
        written = with_kernels(1, compile=False)
    assert written[1] == pytest.approx(launched[1], rel=1e-4)
    assert written[0] != launched[0]
