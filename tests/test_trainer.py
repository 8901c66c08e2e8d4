"""The public interface, in one process."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import onefold
from onefold.errors import GradientError, LaunchError, LossError
from onefold.run.devices import cores
from tests.small import Batch, bits, line, make_trainer, points, sgd, square
from tests.tables import for_each

both = for_each("devices", [1, 3])


class Noisy(nn.Module):
    """Dropout, batch norm, tied weights and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.twin = nn.Linear(8, 8)
        self.twin.weight = self.frozen.weight
        self.last = line(8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs))
        return self.last(F.dropout(self.twin(self.frozen(hidden)), 0.3, self.training))


def noisy_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Draws from every generator."""
    return square(model, batch) * (torch.rand(()) + random.random() + np.random.rand())


def trained(steps: int = 3, samples: int = 11, **choices: Any) -> onefold.Trainer:
    trainer = make_trainer(Noisy(), noisy_loss, **choices)
    for _ in range(steps):
        trainer.step(points(samples))
    return trainer


# -- steps ----------------------------------------------------------------------------------------


def test_steps_are_counted_from_one() -> None:
    trainer = make_trainer()
    steps = [trainer.step(points(samples)) for samples in (8, 3, 1)]
    assert [(s.number, s.samples, s.epoch, s.skipped) for s in steps] == [
        (1, 8, 0, ""),
        (2, 3, 0, ""),
        (3, 1, 0, ""),
    ]


@both
def test_the_loss_of_a_step_is_that_before_its_update(devices: int) -> None:
    model, batch = line(), points(7)
    expected = square(model, batch).double().mean().item()
    steps = [make_trainer(model, devices=devices).step(batch)]
    steps.append(make_trainer(line(), devices=devices).step(batch))
    for step in steps:
        assert step.loss.shape == ()
        assert step.loss.dtype == torch.float64
        assert not step.loss.requires_grad
        assert step.loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_loss_of_a_step_does_not_change_with_the_steps_that_follow() -> None:
    trainer = make_trainer()
    first = trainer.step(points(8))
    value = first.loss.item()
    for _ in range(3):
        trainer.step(points(8))
    assert first.loss.item() == value


def test_a_step_is_a_record_that_nobody_changes() -> None:
    step = make_trainer().step(points(8))
    with pytest.raises(dataclasses.FrozenInstanceError, match="number"):
        step.number = 5  # type: ignore[misc]
    assert repr(step) == "Step(number=1, samples=8, epoch=0)"


@both
def test_the_model_keeps_its_identity_and_its_names(devices: int) -> None:
    model = Noisy()
    names, parameters = list(model.state_dict()), dict(model.named_parameters())
    trainer = make_trainer(model, noisy_loss, devices=devices)
    trainer.step(points(8))
    assert trainer.model is model
    assert list(model.state_dict()) == names
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.twin.weight is model.frozen.weight
    assert all(parameter.grad is None for parameter in model.parameters())


@both
def test_the_model_learns(devices: int) -> None:
    inputs, _ = points(64)
    batch = inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5]]) + 3
    trainer = make_trainer(devices=devices)
    for _ in range(100):
        trainer.step(batch)
    expected = torch.tensor([[1.0, -2.0, 0.5]])
    torch.testing.assert_close(trainer.model.weight.detach(), expected, rtol=0, atol=0.05)


@both
def test_the_callers_generators_and_modes_are_left_alone(devices: int) -> None:
    model = Noisy()
    model.norm.eval()
    trainer = make_trainer(model, noisy_loss, devices=devices)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(4)
    expected = torch.rand(()).item(), random.random(), np.random.rand()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(4)
    trainer.step(points(8))
    assert (torch.rand(()).item(), random.random(), np.random.rand()) == expected
    assert {name for name, part in model.named_modules() if not part.training} == {"norm"}


@for_each("devices", [1, 2])
def test_a_batch_may_be_of_any_containers(devices: int) -> None:
    inputs, targets = points(7)
    results = set()
    for batch, read in (
        ((inputs, targets), lambda b: b),
        ([inputs, targets], lambda b: b),
        ({"x": inputs, "more": {"y": targets}}, lambda b: (b["x"], b["more"]["y"])),
        (torch.cat([inputs, targets], dim=1), lambda b: (b[:, :3], b[:, 3:])),
    ):

        def loss(model: nn.Module, batch: Any, read: Callable[..., Batch] = read) -> torch.Tensor:
            return square(model, read(batch))

        trainer = make_trainer(line(), loss, devices=devices)
        trainer.step(batch)
        results.add(trainer.fingerprint())
    assert len(results) == 1


# -- the same bits --------------------------------------------------------------------------------


@settings(max_examples=25)
@given(shards=st.integers(1, 6), samples=st.integers(2, 14), data=st.data())
def test_any_plan_gives_the_same_bits(shards: int, samples: int, data: st.DataObject) -> None:
    devices = data.draw(st.integers(1, shards))
    cuts = st.lists(st.integers(0, shards), min_size=devices - 1, max_size=devices - 1)
    bounds = [0, *sorted(data.draw(cuts)), shards]
    plan = [stop - start for start, stop in pairwise(bounds)]
    alone, several = (
        make_trainer(nn.Sequential(line(), nn.Dropout(0.5)), noisy_loss, shards=shards, **choices)
        for choices in ({}, {"devices": devices, "plan": plan})
    )
    for trainer in (alone, several):
        for _ in range(2):
            trainer.step(points(samples))
    assert several.plan == tuple(plan)
    assert several.fingerprint() == alone.fingerprint()


def test_a_plan_may_change_between_steps() -> None:
    trainer = make_trainer(Noisy(), noisy_loss, devices=3)
    assert trainer.plan == (2, 1, 1)
    for plan in [(4, 0, 0), (0, 1, 3), (1, 1, 2)]:
        trainer.plan = plan
        assert trainer.plan == plan
        trainer.step(points(11))
    assert trainer.fingerprint() == trained().fingerprint()


@for_each(
    ("plan", "words"),
    [
        ((4,), r"the plan \(4,\) has 1 devices and 4 shards; this run has 2 devices and 4 shards"),
        ((1, 1), r"the plan \(1, 1\) has 2 devices and 2 shards; this run has 2 devices and 4"),
        ((5, -1), "zero or more shards"),
        ((), "zero or more shards"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_trainer(devices=2, plan=plan)
    trainer = make_trainer(devices=2)
    with pytest.raises(ValueError, match=words):
        trainer.plan = plan
    assert trainer.plan == (2, 2)


def test_the_bits_depend_on_seed_shards_and_data() -> None:
    choices: list[dict[str, Any]] = [{}, {"seed": 1}, {"shards": 3}, {"samples": 10}]
    assert len({trained(**choice).fingerprint() for choice in choices}) == len(choices)
    assert trained().fingerprint() == trained().fingerprint()


@both
def test_randomness_is_another_in_every_step_and_shard(devices: int) -> None:
    drawn: list[tuple[float, ...]] = []

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))
        return square(model, batch)

    for _ in range(2):
        trainer = make_trainer(line(), loss, devices=devices)
        for _ in range(3):
            trainer.step(points(8))
    assert drawn[:12] == drawn[12:]
    assert [len(set(numbers)) for numbers in zip(*drawn, strict=True)] == [12, 12, 12]


def test_two_trainers_in_one_script_do_not_disturb_each_other() -> None:
    one, other = make_trainer(Noisy(), noisy_loss), make_trainer(Noisy(), noisy_loss, devices=2)
    for _ in range(3):
        one.step(points(11))
        other.step(points(11))
    assert one.fingerprint() == other.fingerprint() == trained().fingerprint()
    assert one.step(points(11)).number == other.step(points(11)).number == 4


@both
def test_batches_of_a_loader_and_whole_batches_give_the_same_bits(devices: int) -> None:
    data = TensorDataset(*points(20))
    loaded, whole = (make_trainer(devices=devices) for _ in range(2))
    for batch in loaded.loader(data, batch_size=6):
        loaded.step(batch)
    for start in range(0, 20, 6):
        whole.step(data[start : start + 6])
    assert loaded.fingerprint() == whole.fingerprint()


def test_a_closed_trainer_keeps_its_model() -> None:
    trainer = make_trainer(devices=2)
    trainer.step(points(8))
    before = trainer.fingerprint()
    trainer.close()
    trainer.close()
    assert trainer.fingerprint() == before


# -- epochs and loaders ---------------------------------------------------------------------------


def test_epochs_go_on_where_they_were() -> None:
    trainer = make_trainer()
    seen = []
    for epoch in trainer.epochs(2):
        seen.append((epoch, trainer.step(points(4)).epoch))
    seen.extend((epoch, trainer.step(points(4)).epoch) for epoch in trainer.epochs(4))
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert list(trainer.epochs(3)) == []
    assert list(trainer.epochs(5)) == [4]


def test_an_epoch_that_was_left_is_gone_through_again() -> None:
    trainer = make_trainer()
    for epoch in trainer.epochs(5):
        if epoch == 2:
            break
    assert list(trainer.epochs(5)) == [2, 3, 4]


def test_steps_know_the_pass_of_their_batch() -> None:
    trainer = make_trainer()
    loader = trainer.loader(TensorDataset(*points(9)), batch_size=4, shuffle=True)
    epochs = [trainer.step(batch).epoch for _ in trainer.epochs(2) for batch in loader]
    assert epochs == [0, 0, 0, 1, 1, 1]
    assert len(loader) == 3


# -- what it tells --------------------------------------------------------------------------------


def test_a_trainer_tells_what_it_has() -> None:
    trainer = make_trainer(shards=5, devices=2)
    assert trainer.devices == (torch.device("cpu"),) * 2
    assert trainer.shards == 5
    assert trainer.plan == (3, 2)
    assert trainer.is_lead


def test_without_devices_the_model_tells_the_device() -> None:
    trainer = make_trainer(devices=None)
    assert len(trainer.devices) == 1


def test_a_fingerprint_changes_with_every_step_and_with_nothing_else() -> None:
    trainer = make_trainer(Noisy(), noisy_loss)
    before = trainer.fingerprint()
    assert trainer.fingerprint() == before
    assert len(before) == 16
    trainer.step(points(8))
    assert trainer.fingerprint() != before


@for_each("shards", [1, 2, 64])
def test_threads_are_shared_among_the_shards(shards: int) -> None:
    make_trainer(shards=shards, threads=None)
    assert torch.get_num_threads() == max(1, cores() // shards)


def test_threads_may_be_chosen() -> None:
    make_trainer(threads=3)
    assert torch.get_num_threads() == 3


@for_each(("first", "told"), [(True, True), (False, False)])
def test_idle_cores_are_told_once(
    first: bool, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("onefold.run.team.cores", lambda: 16)
    monkeypatch.setattr("onefold.run.team._trainers", iter([0 if first else 1]))
    monkeypatch.setattr("sys.argv", ["train.py"])
    with caplog.at_level(logging.WARNING, logger="onefold"):
        make_trainer(shards=5, threads=None)
    words = "3 of 16 cores at work: a CPU device has 3 threads with 5 shards."
    command = "onefold run --devices auto train.py"
    assert (words in caplog.text and command in caplog.text) == told


# -- what is refused ------------------------------------------------------------------------------


@for_each(
    ("choice", "kind", "words"),
    [
        ({"shards": 0}, ValueError, "expected shards of at least 1, got 0"),
        ({"shards": -2}, ValueError, "expected shards of at least 1, got -2"),
        ({"shards": 2.0}, TypeError, "expected shards to be a whole number, got 2.0"),
        ({"shards": "4"}, TypeError, "expected shards to be a whole number, got '4'"),
        ({"shards": True}, TypeError, "expected shards to be a whole number, got True"),
        ({"seed": 0.5}, TypeError, "expected seed to be a whole number, got 0.5"),
        ({"seed": None}, TypeError, "expected seed to be a whole number, got None"),
        ({"seed": -(2**63) - 1}, ValueError, "expected seed of at least"),
        ({"threads": 0}, ValueError, "expected threads of at least 1, got 0"),
        ({"clip_norm": 0}, ValueError, "expected clip_norm to be more than 0, got 0"),
        ({"clip_norm": -1.0}, ValueError, "expected clip_norm to be more than 0, got -1"),
        ({"clip_norm": math.nan}, ValueError, "expected clip_norm to be more than 0, got nan"),
        ({"timeout_s": 0}, ValueError, "expected timeout_s to be more than 0, got 0"),
        ({"timeout_s": math.nan}, ValueError, "expected timeout_s to be more than 0, got nan"),
        ({"loss": None}, TypeError, "expected loss to be a function of model and batch, got None"),
        (
            {"model": [line()], "optimizer": sgd(line())},
            TypeError,
            "expected model to be a torch.nn.Module, got list",
        ),
        ({"optimizer": "sgd"}, TypeError, "expected a torch.optim.Optimizer, got str"),
        ({"devices": 5}, ValueError, "5 devices cannot share 4 shards: a shard is never divided"),
    ],
)
def test_an_argument_that_is_not_usable_is_refused(
    choice: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        make_trainer(**choice)


@for_each(
    ("choice", "kind", "words"),
    [
        ({"seed": 2**63}, ValueError, "expected seed of at most 9223372036854775807"),
        ({"threads": "2"}, TypeError, "expected threads to be a whole number, got '2'"),
        ({"threads": 1.5}, TypeError, "expected threads to be a whole number, got 1.5"),
        ({"threads": True}, TypeError, "expected threads to be a whole number, got True"),
        ({"clip_norm": "1"}, TypeError, "expected clip_norm to be a number, got '1'"),
        ({"timeout_s": "5"}, TypeError, "expected timeout_s to be a number, got '5'"),
        ({"timeout_s": math.inf}, ValueError, "expected timeout_s to be finite"),
        ({"plan": 4}, TypeError, "expected plan to be a list of numbers, got 4"),
        ({"plan": (2.5, 2)}, TypeError, r"expected plan to be a list of numbers, got \(2\.5, 2\)"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused(
    choice: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        make_trainer(devices=2, **choice).step(points(4))


@for_each(
    ("devices", "kind", "words"),
    [
        (["cuda:7"], LaunchError, r"^cuda:7 is not there: PyTorch sees \d GPUs on this machine"),
        (["cpu", "cuda:7"], LaunchError, "^cuda:7 is not there"),
        (["mps"], ValueError, "^expected cpu or cuda devices, got mps"),
        (["meta"], ValueError, "^expected cpu or cuda devices, got meta"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    devices: list[str], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        onefold.Trainer(model := line(), sgd(model), square, shards=4, devices=devices)


def test_devices_of_several_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="devices of a run must be of one kind, got cpu, cuda:1"):
        onefold.Trainer(model := line(), sgd(model), square, shards=4, devices=["cpu", "cuda:1"])


@for_each(
    ("devices", "words"), [("cpu", "a list of devices"), (["gpu"], "'gpu'"), (2, "a list of devic")]
)
def test_devices_that_cannot_be_read_are_explained(devices: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"expected .*{words}"):
        onefold.Trainer(model := line(), sgd(model), square, shards=4, devices=devices)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = line()
        self.layer = nn.LazyLinear(4)


def complex_model() -> nn.Module:
    model = line()
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return model


def sharing(kind: str) -> nn.Module:
    """Two tensors in the same memory, or side by side in it."""
    model = line()
    if kind == "parameters":
        model.twin = nn.Parameter(model.weight.data[:, 1:])
    elif kind == "buffer":
        model.register_buffer("shadow", model.weight.data)
    else:
        memory = torch.zeros(4, 2)
        model.even, model.odd = nn.Parameter(memory[:, 0]), nn.Parameter(memory[:, 1])
        model.again = model.even
        model.register_buffer("one", torch.zeros(4))
        model.register_buffer("two", model.one[:2])
    return model


def test_a_parameter_that_is_replaced_is_refused() -> None:
    """Its optimizer would go on with the one of before, as in a plain loop, without a word."""
    trainer = make_trainer()
    trainer.step(points(8))
    trainer.model.weight = nn.Parameter(torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"^parameter weight has been replaced by another tensor"):
        trainer.step(points(8))


@for_each(("kind", "words"), [("parameters", "twin and weight"), ("buffer", "shadow and weight")])
def test_tensors_that_share_memory_are_refused(kind: str, words: str) -> None:
    """Each gets a place of its own, so that one would no longer follow the other."""
    with pytest.raises(ValueError, match=f"^{words} share memory .* clone one of them"):
        make_trainer(sharing(kind))


def test_tied_and_neighbouring_tensors_are_not_refused() -> None:
    make_trainer(sharing("side by side")).step(points(8))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@for_each(
    ("build", "kind", "words"),
    [
        (Lazy, ValueError, r"^layer\.weight has no shape yet: run one forward pass"),
        (complex_model, ValueError, r"^parameter phase is complex \(torch\.complex64\): expected"),
        (lambda: line().to("meta"), ValueError, "^weight is on the meta device"),
        (
            lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)),
            ValueError,
            r"^layer 0 \(Embedding\) gives sparse gradients: .* sparse=False",
        ),
        (
            lambda: nn.EmbeddingBag(4, 2, sparse=True),
            ValueError,
            r"\(EmbeddingBag\) gives sparse gradients",
        ),
        (
            lambda: nn.DataParallel(line()),
            TypeError,
            r"^the model is wrapped in DataParallel; .* Pass model\.module",
        ),
    ],
    ids=["lazy", "complex", "meta", "sparse", "sparse bag", "wrapped"],
)
def test_a_model_that_cannot_be_folded_is_refused(
    build: Callable[[], nn.Module], kind: type[Exception], words: str
) -> None:
    model = build()
    optimizer = sgd(line())
    with pytest.raises(kind, match=words):
        make_trainer(model, optimizer=optimizer)


@for_each(
    ("batch", "kind", "words"),
    [
        ((torch.ones(4, 3), torch.ones(3, 1)), ValueError, r"batch\[0\] has 4, batch\[1\] has 3"),
        ((torch.ones(0, 3), torch.ones(0, 1)), ValueError, "^the batch is empty: expected at leas"),
        ((), ValueError, "^the batch holds no tensor"),
        (5, TypeError, "^batch: expected a tensor or NumPy array, or a tuple, .* of them, got int"),
        ([[1.0, 2.0]], TypeError, r"^batch\[0\]\[0\]: .* got float"),
    ],
    ids=["unequal", "no samples", "no tensor", "number", "numbers"],
)
def test_a_batch_that_cannot_be_cut_is_refused(
    batch: object, kind: type[Exception], words: str
) -> None:
    trainer = make_trainer()
    before = bits(trainer.model)
    with pytest.raises(kind, match=words):
        trainer.step(batch)
    assert bits(trainer.model) == before
    assert trainer.step(points(4)).number == 1


@both
@for_each("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_names_step_and_shard(devices: int, value: float) -> None:
    trainer = make_trainer(devices=devices)
    trainer.step(points(8))
    before = bits(trainer.model)
    bad = points(8)
    bad[1][5] = value  # in the third of four shards
    words = "inf" if math.isinf(value) else "nan"
    with pytest.raises(LossError, match=f"^the loss of step 2, shard 2 is {words}: expected a fin"):
        trainer.step(bad)
    assert bits(trainer.model) == before
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def no_gradient(model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        return square(model, batch)


@both
@for_each(
    "loss",
    [no_gradient, lambda m, b: square(m, b).detach()],
    ids=["no grad", "detached"],
)
def test_a_loss_without_any_gradient_is_refused(devices: int, loss: Callable[..., object]) -> None:
    trainer = make_trainer(line(), loss, devices=devices)
    before = bits(trainer.model)
    words = "^the loss of step 1 does not depend on any parameter .* under no_grad, or detached"
    with pytest.raises(LossError, match=words):
        trainer.step(points(8))
    assert bits(trainer.model) == before


@both
def test_a_shard_in_which_nothing_counts_gives_no_gradient(devices: int) -> None:
    """Such as one without positive samples."""

    def loss(model: nn.Module, batch: Batch) -> onefold.Mean:
        chosen = batch[1][:, 0] > 0
        if not bool(chosen.any()):
            return onefold.Mean(torch.zeros(()), 0)
        return onefold.Mean(square(model, batch)[chosen].sum(), chosen.sum())

    inputs, targets = points(8)
    targets[:4], targets[4:] = -1.0, 1.0
    trainer = make_trainer(line(), loss, devices=devices)
    step = trainer.step((inputs, targets))
    alone = make_trainer(line(), loss, shards=1).step((inputs, targets))
    assert float(step.loss) == pytest.approx(float(alone.loss), rel=1e-6)


@both
@for_each(
    ("loss", "words"),
    [
        (lambda m, b: m(b[0]).expand(-1, 3), r"expected shape \(2,\), .* got shape \(2, 3\)"),
        (lambda m, b: square(m, b).mean().item(), r"got float\. Return the tensor itself"),
        (lambda m, b: None, "got NoneType"),
        (lambda m, b: onefold.Mean(square(m, b), 2), r"total .* a scalar tensor, got \(2,\)"),
        (lambda m, b: onefold.Mean(square(m, b).sum(), -1), "finite and >= 0, got -1"),
    ],
    ids=["shape", "item", "none", "total", "weight"],
)
def test_a_loss_of_another_kind_names_step_and_shard(
    devices: int, loss: Callable[..., object], words: str
) -> None:
    trainer = make_trainer(line(), loss, devices=devices)
    before = bits(trainer.model)
    with pytest.raises(LossError, match=f"^the loss of step 1, shard 0.*{words}"):
        trainer.step(points(8))
    assert bits(trainer.model) == before


@both
def test_a_sparse_gradient_is_refused_by_name(devices: int) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(9, 3))

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, model.table, sparse=True).sum(dim=1)

    trainer = make_trainer(Sparse(), loss, devices=devices)
    with pytest.raises(GradientError, match=r"^step 1, shard 0: parameter table got a sparse"):
        trainer.step(torch.arange(8))


def test_an_exception_of_the_users_says_where_it_was_raised() -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        raise KeyError("a label")

    with pytest.raises(KeyError, match="a label") as caught:
        make_trainer(line(), loss).step(points(8))
    assert caught.value.__notes__ == ["raised in step 1, shard 0, on device 0 (cpu)"]


# -- after a failure ------------------------------------------------------------------------------


class FailsOnce:
    """A loss that fails for one shard of one step, after others have had their gradients."""

    def __init__(self, step: int, shard: int) -> None:
        self._calls_left = 4 * (step - 1) + shard
        self._failed = False

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        self._calls_left -= 1
        if self._calls_left < 0 and not self._failed:
            self._failed = True
            raise MemoryError("for a moment")
        return square(model, batch)


@both
@for_each("shard", [1, 3])
def test_a_step_that_failed_may_be_repeated(devices: int, shard: int) -> None:
    trainer = make_trainer(line(), FailsOnce(2, shard), devices=devices)
    expected = make_trainer(devices=devices)
    trainer.step(points(8))
    with pytest.raises(MemoryError, match="for a moment"):
        trainer.step(points(7))
    assert trainer.step(points(7)).number == 2
    for samples in (8, 7):
        expected.step(points(samples))
    assert trainer.fingerprint() == expected.fingerprint()


@for_each(
    "devices",
    [1, 3],
)
def test_a_bad_batch_may_be_passed_over(devices: int) -> None:
    trainer, expected = make_trainer(devices=devices), make_trainer(devices=devices)
    for batch in (points(8), points(7)):
        trainer.step(batch)
        expected.step(batch)
        with pytest.raises(LossError, match="is nan"):
            trainer.step((batch[0] * math.nan, batch[1]))
    assert trainer.fingerprint() == expected.fingerprint()


@both
def test_gradients_that_the_user_left_do_not_count(devices: int) -> None:
    trainer, expected = make_trainer(devices=devices), make_trainer(devices=devices)
    square(trainer.model, points(5)).mean().backward()
    for each in (trainer, expected):
        each.step(points(8))
    assert trainer.fingerprint() == expected.fingerprint()


@for_each(
    "devices",
    [1, 3],
)
def test_what_the_user_writes_into_parameters_between_steps_counts(devices: int) -> None:
    """Weights that are loaded, or clipped, after Trainer was made."""
    model, expected = Noisy(), Noisy()
    trainers = make_trainer(model, devices=devices), make_trainer(expected)
    for trainer in trainers:
        trainer.step(points(8))
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.clamp_(-0.1, 0.1)
        trainer.step(points(9))
        trainer.model.load_state_dict({name: v / 2 for name, v in Noisy().state_dict().items()})
        trainer.step(points(8))
    assert trainers[0].fingerprint() == trainers[1].fingerprint()


# -- batches of another trainer -------------------------------------------------------------------


@for_each(
    ("theirs", "ours"),
    [
        ({"shards": 4}, {"shards": 2}),
        ({"shards": 2}, {"shards": 4}),
        ({"devices": 2}, {"devices": 1}),
        ({"devices": 1}, {"devices": 2}),
    ],
)
def test_a_batch_that_was_cut_for_another_run_is_refused(
    theirs: dict[str, int], ours: dict[str, int]
) -> None:
    loader = make_trainer(**theirs).loader(TensorDataset(*points(8)), batch_size=8)
    with pytest.raises(ValueError, match=r"was cut for .* this run has"):
        make_trainer(**ours).step(next(iter(loader)))


def test_a_batch_of_another_trainer_of_the_same_form_is_taken() -> None:
    data = TensorDataset(*points(8))
    loader = make_trainer(devices=2).loader(data, batch_size=8)
    other, expected = make_trainer(devices=2), make_trainer()
    for batch in loader:
        other.step(batch)
    expected.step(data[:])
    assert other.fingerprint() == expected.fingerprint()


class Checkpointed(nn.Module):
    """One layer that runs several times, and again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self._reentrant = reentrant
        self.first = nn.Linear(5, 16)
        self.shared = nn.Linear(16, 16)
        self.last = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(4):
            x = checkpoint(lambda t: self.shared(t).tanh(), x, use_reentrant=self._reentrant)
        return self.last(x)


@for_each("reentrant", [False, True])
def test_gradients_that_come_in_portions_fold_to_the_same_bits(reentrant: bool) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean(dim=1)

    fingerprints = set()
    batches = torch.randn(5, 12, 5, generator=torch.Generator().manual_seed(3))
    for devices in (1, 2, 4):
        torch.manual_seed(1)
        model = Checkpointed(reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = onefold.Trainer(model, optimizer, loss, shards=4, devices=["cpu"] * devices)
        for batch in batches:
            trainer.step(batch)
        fingerprints.add(trainer.fingerprint())
    assert len(fingerprints) == 1


class TwoInOne(nn.Module):
    """Two parameters that are added up through views: backward gives both the same memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(width))
        self.second = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.first.view(1, -1) + self.second.view(1, -1))


@for_each("width", [5, 70_000])
@for_each(("shards", "devices"), [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)])
def test_gradients_in_the_same_memory_are_added_once(width: int, shards: int, devices: int) -> None:
    model = TwoInOne(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = make_trainer(
        model,
        lambda model, x: model(x).sum(dim=1),
        optimizer=optimizer,
        shards=shards,
        devices=devices,
    )
    x = torch.arange(1.0, 5.0).view(4, 1).expand(4, width)
    trainer.step(x)
    for parameter in model.parameters():  # the mean of 1 to 4
        assert parameter.eq(-2.5).all()
