"""Runs that are compiled: one result for any number of devices, which is that of the loss.

To make kernels takes seconds each, so most tests stop before that: their code is traced, with its
gradient, and run by PyTorch's own kernels. What depends on kernels is tested with one tiny model,
whose code all these tests share.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.engine import compiling, kernels
from onefold.errors import CheckpointError, DisagreementError, LossError, StateError
from onefold.run import world
from onefold.run.membership import _remove_folders
from onefold.system.caches import default_of_torch
from tests.compiler import cache, fresh_compiler
from tests.verifying.compared import Compared, compared

__all__ = ["cache", "compared", "fresh_compiler"]

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[Any, Batch], object]
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
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace what is compiled, and make no kernels of it."""
    compiled = torch.compile

    def trace(function: Any, *, dynamic: bool, options: dict[str, object]) -> Any:
        assert "deterministic" in options
        return compiled(function, dynamic=dynamic, backend="aot_eager")

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


class Again(nn.Module):
    """A layer that is computed twice, with its dropout, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5))
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


def of_each(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def two_terms(model: nn.Module, batch: Batch) -> object:
    losses, valid = of_each(model, batch), batch[1] > 0
    return onefold.Mean((losses * valid).sum(), valid.sum()) + 0.1 * onefold.Sum(losses.sum())


def broken_up(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What cannot be compiled stays as it is written."""
    logits = model(batch[0])
    factor = 2.0 if float(logits.detach().sum()) > 0 else 1.0
    return factor * F.cross_entropy(logits, batch[1], reduction="none")


def batch_of(samples: int, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 8, generator=generator)
    return x, torch.randint(0, 3, (samples,), generator=generator)


def trainer_of(
    loss: Loss = of_each, devices: int | None = 1, *, model: nn.Module | None = None, **options: Any
) -> onefold.Trainer:
    torch.manual_seed(0)
    model = Net() if model is None else model
    settings = {"shards": 4, "threads": 1, "compile": True, "devices": None}
    if devices:
        settings["devices"] = ["cpu"] * devices
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return onefold.Trainer(model, optimizer, loss, **{**settings, **options})


def run(trainer: onefold.Trainer, sizes: tuple[int, ...] = SIZES) -> tuple[str, float]:
    for number, samples in enumerate(sizes):
        step = trainer.step(batch_of(samples, number))
    return trainer.fingerprint(), float(step.loss)


@pytest.mark.parametrize("by_user", [False, True])
def test_code_is_kept_where_no_other_user_can_put_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, by_user: bool
) -> None:
    from torch._inductor import codecache

    def place() -> Path:
        model = torch.compile(Net(), backend="eager") if by_user else Net()
        trainer_of(model=model, compile=not by_user)
        assert str(codecache._HEADER_DIR).startswith(codecache.cache_dir())
        return Path(codecache.cache_dir())

    tmp_path.chmod(0o1777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setattr(world, "_chosen", {})
    for name in ("QUACK_CACHE_DIR", "PYTORCH_KERNEL_CACHE_PATH", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.setenv(name, "")
    # PyTorch has chosen it, not the user.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_of_torch())
    assert place().parent == tmp_path / "own" / "onefold" / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "of all"))
    assert place() == tmp_path / "of all"
    (tmp_path / "of all").chmod(0o777)
    with pytest.raises(ValueError, match=r"TORCHINDUCTOR_CACHE_DIR names .*others may write to"):
        place()
    # Where there is no home that is safe it is a folder of this process alone.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_of_torch())
    (tmp_path / "own").chmod(0o777)
    made = place()
    assert made.stat().st_mode & 0o777 == 0o700
    assert made == place()
    _remove_folders()
    assert not made.exists()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("loss", "build"), [(of_each, Net), (two_terms, Net), (broken_up, Net), (of_each, Again)]
)
def test_the_bits_do_not_depend_on_the_devices(loss: Loss, build: Callable[[], nn.Module]) -> None:
    def go(devices: int, **options: Any) -> tuple[str, float]:
        torch.manual_seed(0)
        return run(trainer_of(loss, devices, model=build(), **options))

    found = go(1)
    assert go(2) == found
    assert go(3, plan=(0, 3, 1)) == found
    # With the same dropout: only rounding is left to differ.
    assert go(1, compile=False)[1] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.usefixtures("traced")
def test_a_loss_that_sees_the_whole_batch_is_refused_by_name() -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        found = F.normalize(model(batch[0]), dim=1)
        whole, own = onefold.gather(found, rows=True)
        targets = torch.arange(own.start, own.stop)
        return F.cross_entropy(found @ whole.T / 0.1, targets, reduction="none")

    trainer = trainer_of(loss)
    before = trainer.fingerprint()
    with pytest.raises(LossError, match=r"compile=True: the loss calls onefold\.gather"):
        trainer.step(batch_of(8))
    assert trainer.fingerprint() == before


def test_batch_norm_over_the_whole_batch_is_refused_by_name() -> None:
    model = onefold.SyncBatchNorm.convert(Net())
    with pytest.raises(ValueError, match=r"compile=True: norm is an onefold\.SyncBatchNorm"):
        trainer_of(model=model)


@pytest.mark.usefixtures("traced")
def test_values_beside_the_loss_are_no_part_of_its_gradient() -> None:
    """Not even with a gradient of 0, which would make an infinite one not a number."""

    def loss(model: nn.Module, batch: Batch) -> object:
        logits = model(batch[0])
        losses = F.cross_entropy(logits, batch[1], reduction="none")
        steep = (losses - losses.detach()).abs().sqrt()
        few = batch[1] == 0
        return losses, {
            "accuracy": logits.argmax(1) == batch[1],
            "steep": steep,
            "few": onefold.Mean((losses * few).sum(), few.sum()),
            "both": onefold.Mean(steep.sum(), 2) + onefold.Sum(losses.sum()),
        }

    def go(devices: int, **options: Any) -> tuple[Any, list[dict[str, float]]]:
        trainer = trainer_of(loss, devices, **options)
        values = [trainer.step(batch_of(samples, samples)).values for samples in SIZES]
        return trainer.fingerprint(), [{n: float(v) for n, v in each.items()} for each in values]

    found = go(1)
    assert found == go(2) == go(3, plan=(0, 3, 1))
    trainer = trainer_of()
    for samples in SIZES:
        trainer.step(batch_of(samples, samples))
    assert trainer.fingerprint() == found[0]
    for written, compiled in zip(go(1, compile=False)[1], found[1], strict=True):
        assert compiled == pytest.approx(written, rel=1e-2)


@pytest.mark.usefixtures("traced")
def test_what_was_compiled_before_does_not_show() -> None:
    first = run(trainer_of(), (9,))
    torch._dynamo.reset()
    run(trainer_of(), (18, 5))
    assert run(trainer_of(), (9,)) == first


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("precision", ["bf16", "fp16-params"])
def test_low_precision(precision: str) -> None:
    found = {run(trainer_of(devices=devices, precision=precision), (8, 8)) for devices in (1, 3)}
    assert len(found) == 1
    written = run(trainer_of(precision=precision, compile=False), (8, 8))[1]
    assert found.pop()[1] == pytest.approx(written, rel=0.02)


@pytest.mark.usefixtures("traced")
def test_hooks_and_frozen_layers_may_come_and_go_between_steps() -> None:
    """The compiler does not look for hooks by itself."""

    def doubled(parameter: torch.Tensor) -> None:
        parameter.grad *= 2

    def go(*, compiled: bool, devices: int) -> tuple[str, float]:
        model = Net()
        trainer = trainer_of(devices=devices, model=model, compile=compiled)
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

    torch.manual_seed(0)
    one = go(compiled=True, devices=1)
    torch.manual_seed(0)
    assert go(compiled=True, devices=3) == one
    torch.manual_seed(0)
    assert go(compiled=False, devices=1)[1] == pytest.approx(one[1], rel=1e-3)


@pytest.mark.usefixtures("traced")
def test_a_loss_of_any_kind() -> None:
    class Criterion(nn.Module):
        def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
            return of_each(model, batch)

    losses = (of_each, Criterion(), Criterion().forward, functools.partial(of_each))
    found = {run(trainer_of(loss), (8,)) for loss in losses}
    assert len(found) == 1


def test_a_model_that_is_compiled_already() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Net()

    wrapped, in_place = torch.compile(model(), backend="eager"), model()
    in_place.compile(backend="eager")
    with pytest.MonkeyPatch.context() as patch:
        compiled = torch.compile
        patch.setattr(
            torch, "compile", lambda f, options, dynamic: compiled(f, backend="aot_eager")
        )
        found = {run(trainer_of(model=each), (8,)) for each in (model(), wrapped, in_place)}
    assert len(found) == 1


def test_a_model_that_is_compiled_for_shapes_that_vary_is_refused() -> None:
    with pytest.raises(ValueError, match="is compiled with dynamic=True"):
        trainer_of(model=torch.compile(Net(), dynamic=True))


@pytest.mark.usefixtures("traced")
def test_a_rehearsal_sees_what_code_does_not_show() -> None:
    """What a loss was divided by, and modules that are no part of the model."""
    by_hand = trainer_of(lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"))
    with pytest.raises(LossError, match="a sum over the shard"):
        by_hand.step(batch_of(18))
    outside = nn.BatchNorm1d(8)
    trainer = trainer_of(lambda m, b: of_each(m, (outside(b[0]), b[1])))
    with pytest.raises(StateError, match="a module of BatchNorm1d is called that is no part"):
        trainer.step(batch_of(8))


@pytest.mark.usefixtures("traced")
def test_a_loss_that_compiled_code_computes_differently_is_mentioned_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drawn = np.random.default_rng(0)
    with caplog.at_level(logging.WARNING, "onefold"):
        run(trainer_of(lambda m, b: of_each(m, b) * drawn.uniform(1, 2)), (8, 8))
    said = [r.getMessage() for r in caplog.records if "without compiling" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("compile=True: the loss of step 1, shard 0 adds up to ")


@pytest.mark.usefixtures("traced")
def test_many_shapes_are_mentioned_and_too_many_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_MANY_SHAPES", 2)
    monkeypatch.setattr(kernels, "_SHAPES", 4)
    trainer = trainer_of(shards=1)
    with caplog.at_level(logging.WARNING, "onefold"):
        for samples in (2, 3, 4, 5):
            trainer.step(batch_of(samples))
        with pytest.raises(LossError, match=r"made for as many shapes as it may be.* multiples"):
            trainer.step(batch_of(6))
    said = [r.getMessage() for r in caplog.records if "have had" in r.getMessage()]
    assert len(said) == 1
    assert "shards have had 3 shapes so far" in said[0]


def test_what_is_missing_is_named_before_work_begins() -> None:
    from torch._dynamo import config as tracer
    from torch._inductor import config as generator

    missing = pytest.raises(ValueError, match=r"no-such-.* apt install g\+\+ .*leave out compile")
    with generator.patch({"cpp.cxx": (None, "no-such-compiler")}), missing:
        trainer_of()
    with tracer.patch(disable=True), pytest.raises(ValueError, match="TORCH_COMPILE_DISABLE"):
        trainer_of()
    with pytest.raises(TypeError, match="expected compile to be True or False, got 'max-auto"):
        trainer_of(compile="max-autotune")


@pytest.mark.usefixtures("traced")
def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = run(trainer_of(), (8, 8, 8))
    first = trainer_of(devices=3)
    first.step(batch_of(8, 0))
    first.save(tmp_path)
    second = trainer_of(devices=2)
    second.load(tmp_path)
    for number in (1, 2):
        last = second.step(batch_of(8, number))
    assert (second.fingerprint(), float(last.loss)) == whole
    third = trainer_of(compile=False)
    with pytest.raises(CheckpointError, match=r"saved with compile True, this run has False"):
        third.load(tmp_path)
    assert third.load(tmp_path, changed={"compile"}).step == 1


def test_devices_compare_whether_they_compile() -> None:
    from onefold.engine.description import compare

    with pytest.raises(DisagreementError, match="compile is True on device 0 and False on device"):
        compare([b'{"compile": "True"}', b'{"compile": "False"}'])


class Tiny(nn.Module):
    """Few kernels, which the tests share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.dropout(self.first(x).tanh(), 0.1, self.training))


def squares(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch[0]) - batch[0][:, :3]).square().sum(dim=1)


@pytest.mark.usefixtures("cache")
def test_kernels_give_the_same_bits_on_any_number_of_devices() -> None:
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    start = Tiny()

    def go(devices: int, **options: Any) -> tuple[str, float]:
        model = copy.deepcopy(start)
        return run(trainer_of(squares, devices, model=model, **options), (8, 8, 8))

    first = go(1)
    assert go(1, compile=False)[1] == pytest.approx(first[1], rel=1e-4)
    assert go(1, compile=False)[0] != first[0]
    assert go(3, plan=(1, 3, 0)) == first
    # As in another process, what was made is found again.
    torch._dynamo.reset()
    counters.clear()
    assert go(2) == first
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


def in_processes() -> tuple[str, float]:
    """Called in each launched process."""
    torch.manual_seed(0)
    return run(trainer_of(squares, None, model=Tiny()), (8, 8, 8))


@pytest.mark.processes
@pytest.mark.usefixtures("cache")
def test_kernels_give_the_same_bits_in_several_processes() -> None:
    """Both make their kernels at the same time, in one folder, unless a test before has."""
    torch.manual_seed(0)
    alone = run(trainer_of(squares, model=Tiny()), (8, 8, 8))
    assert onefold.launch(in_processes, devices=2) == alone


def test_verify_compares_the_mathematics_of_what_is_written(compared: Compared) -> None:
    line = compared.step(Net(), of_each, batch_of(9), compile=True)
    assert line["loss_difference"] < 1e-9
    assert line["gradient_difference"] < 1e-9
