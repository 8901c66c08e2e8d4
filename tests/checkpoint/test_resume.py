"""What a trainer does with checkpoints; the bits of long runs are in tests/bits."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import onefold
from onefold.errors import CheckpointError
from tests import simulated
from tests.checkpoint.folders import full_disk, names_in, steps_in
from tests.inside import session_in
from tests.small import bits, line, make_trainer, points, sgd, square
from tests.tables import for_each

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-4),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-4, t0=2),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01),
}


class Odd(nn.Module):
    """Several pieces, other strides, one number, a layer that is seldom used, several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(3, 12_000)
        self.image = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.rare = nn.Linear(3, 4)
        self.out = nn.Linear(12_000, 1)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.norm(self.frozen(inputs)) + inputs
        if self.training:
            self.seen += 1
        image = self.image(inputs[:, :, None, None].expand(-1, -1, 3, 3)).mean(dim=(1, 2, 3))
        return self.out(self.wide(inputs).tanh()) * self.scale + image[:, None]


def odd_trainer(make: Optimizer, devices: int, **settings: Any) -> onefold.Trainer:
    torch.manual_seed(2)
    model = Odd()
    optimizer = make(list(model.parameters()))
    return make_trainer(model, optimizer=optimizer, devices=devices, **settings)


@for_each("name", OPTIMIZERS)
def test_every_optimizer_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    def run(devices: int, steps: int, load: Path | None, save: Path | None) -> str:
        trainer = odd_trainer(OPTIMIZERS[name], devices)
        if load is not None:
            trainer.load(load)
        while trainer.steps < steps:
            trainer.step(points(9))
        if save is not None:
            trainer.save(save)
        return trainer.fingerprint()

    whole = run(1, 6, None, None)
    run(3, 2, None, tmp_path / "a")
    run(1, 4, tmp_path / "a", tmp_path / "b")
    assert run(2, 6, tmp_path / "b", None) == whole


def test_a_checkpoint_of_a_checkpoint_is_the_same(tmp_path: Path) -> None:
    first = odd_trainer(OPTIMIZERS["adam"], 3)
    first.step(points(9))
    folder = first.save(tmp_path / "a")
    second = odd_trainer(OPTIMIZERS["adam"], 2)
    second.load(folder)
    again = second.save(tmp_path / "b")
    for path in folder.glob("*.safetensors"):
        assert path.read_bytes() == (again / path.name).read_bytes()


def test_what_was_given_comes_back(tmp_path: Path) -> None:
    trainer = make_trainer()
    for _ in trainer.epochs(3):
        trainer.step(points(4))
        trainer.save(tmp_path, scores={"loss": trainer.steps / 4}, extra={"words": ["a", None]})
    found = make_trainer().load(tmp_path)
    assert (found.step, found.epoch, found.scores) == (3, 3, {"loss": 0.75})
    assert found.extra == {"words": ["a", None]}
    assert found.folder == tmp_path / "step-00000003"
    assert make_trainer().load(tmp_path / "step-00000002").step == 2


def test_extra_is_copied_and_comes_back_as_it_was(tmp_path: Path) -> None:
    extra = {"best": (0.9, 3), 7: [1.0, float("inf")], "seen": {1, 2}, "words": ["a"]}
    trainer = make_trainer()
    folder = trainer.save(tmp_path, extra=extra, scores={"worst": float("nan")}, wait=False)
    extra["words"].append("later")  # type: ignore[attr-defined]
    trainer.close()
    found = make_trainer().load(tmp_path)
    assert found.extra == {**extra, "words": ["a"]}
    assert math.isnan(found.scores["worst"])
    strict = json.loads((folder / "run.json").read_text(), parse_constant=lambda name: 1 / 0)
    assert strict["step"] == 0


def test_a_run_that_may_be_the_first_begins_without_a_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer()
    assert trainer.load(tmp_path / "run", if_any=True) is None
    trainer.step(points(4))
    trainer.save(tmp_path / "run")
    again = make_trainer()
    found = again.load(tmp_path / "run", if_any=True)
    assert found is not None
    assert found.step == again.steps == 1
    one = make_trainer().load(tmp_path / "run" / "step-00000001", if_any=True)
    assert one is not None
    assert one.step == 1
    for path in (tmp_path / "run").rglob("model.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors is missing"):
        again.load(tmp_path / "run", if_any=True)


def load_in_vain(folder: Path) -> tuple[str, str]:
    """On each device: what a refused load says, and the bits of a run that goes on."""
    trainer = make_trainer(devices=None)
    said = ""
    try:
        trainer.load(folder)
    except CheckpointError as error:
        said = str(error)
    trainer.step(points(8))
    result = said, trainer.fingerprint()
    trainer.close()
    return result


@for_each("exchange", ["shared", "collective"])
def test_a_refused_load_is_survived_by_all_devices(tmp_path: Path, exchange: Any) -> None:
    said, fingerprint = simulated.launch(
        load_in_vain, devices="cpu:2", args=(tmp_path,), exchange=exchange
    )
    assert said.startswith(f"there is no checkpoint in {tmp_path}")
    alone = make_trainer()
    alone.step(points(8))
    assert fingerprint == alone.fingerprint()


def save_in_vain(folder: Path) -> list[str]:
    """On each device: what is said after a save that failed and was caught."""
    trainer = make_trainer(devices=None)
    said = []
    for call in (lambda: trainer.save(folder / "file"), lambda: trainer.step(points(8))):
        try:
            call()
        except (OSError, onefold.errors.OnefoldError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_after_a_save_that_failed_several_devices_do_not_go_on_unnoticed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    first, second = simulated.launch(
        save_in_vain, devices="cpu:2", args=(tmp_path,), exchange="shared"
    )
    assert "file" in first
    assert second.startswith("OnefoldError: this trainer has left its run")


def test_a_compiled_model_is_saved_under_the_users_own_names(tmp_path: Path) -> None:
    plain = line()
    compiled = torch.compile(line(), backend="eager")
    trainer = make_trainer(compiled)  # type: ignore[arg-type]
    trainer.step(points(8))
    folder = trainer.save(tmp_path)
    plain.load_state_dict(load_file(folder / "model.safetensors"))
    assert list(bits(plain).values()) == list(bits(trainer.model).values())
    again = make_trainer(line())
    again.load(tmp_path)
    again.step(points(8))
    trainer.step(points(8))
    assert again.fingerprint() == trainer.fingerprint()


def test_a_new_optimizer_begins_anew_with_the_schedules_rate(tmp_path: Path) -> None:
    def make(kind: type[torch.optim.Optimizer]) -> tuple[onefold.Trainer, torch.optim.Optimizer]:
        optimizer = kind((model := line()).parameters(), lr=0.1)  # type: ignore[call-arg]
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return make_trainer(model, optimizer=optimizer, schedule=schedule), optimizer

    trainer, _ = make(torch.optim.SGD)
    for _ in range(3):
        trainer.step(points(8))
    trainer.save(tmp_path)
    other, optimizer = make(torch.optim.Adam)
    other.step(points(4))
    other.load(tmp_path, changed=["optimizer"])
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3
    other.step(points(8))
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4


def test_a_new_schedule_begins_with_its_own_rate(tmp_path: Path) -> None:
    optimizer = sgd(model := line())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trainer = make_trainer(model, optimizer=optimizer, schedule=schedule)
    trainer.step(points(8))
    trainer.save(tmp_path)
    optimizer = sgd(model := line())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)  # type: ignore[assignment]
    other = make_trainer(model, optimizer=optimizer, schedule=schedule)
    other.load(tmp_path, changed=["schedule"])
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_how_a_device_computes_is_the_scripts_choice(tmp_path: Path) -> None:
    def make(fused: bool) -> tuple[onefold.Trainer, torch.optim.Optimizer]:
        optimizer = torch.optim.AdamW((model := line()).parameters(), lr=0.01, fused=fused)
        return make_trainer(model, optimizer=optimizer), optimizer

    trainer, _ = make(True)
    trainer.step(points(8))
    trainer.save(tmp_path)
    other, optimizer = make(False)
    other.load(tmp_path)
    assert optimizer.param_groups[0]["fused"] is False
    other.step(points(8))


def test_a_relative_directory_is_that_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    trainer = make_trainer()
    trainer.save("run", wait=False)
    monkeypatch.chdir(tmp_path / "two")
    trainer.close()
    assert steps_in(tmp_path / "one" / "run") == [0]


def test_steps_go_on_counting(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.step(points(4))
    trainer.save(tmp_path)
    again = make_trainer()
    again.load(tmp_path)
    assert again.steps == 1
    assert again.step(points(4)).number == 2


def test_a_run_may_go_back(tmp_path: Path) -> None:
    trainer = make_trainer(devices=2)
    seen = []
    for number in range(6):
        if number == 4:
            trainer.load(tmp_path)
        trainer.step(points(4 + trainer.steps))
        seen.append(trainer.fingerprint())
        if number == 1:
            trainer.save(tmp_path)
    assert seen[4:] == seen[2:4]


def test_the_settings_of_the_optimizer_are_those_of_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = sgd(model := line())
    trainer = make_trainer(model, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.025
    trainer.save(tmp_path)
    make_trainer().load(tmp_path)
    assert not caplog.records
    other = torch.optim.SGD((model := line()).parameters(), lr=0.3, momentum=0.9)
    make_trainer(model, optimizer=other).load(tmp_path)
    assert other.param_groups[0]["lr"] == 0.025
    assert "lr of the optimizer's group 0 was 0.1 when the run began and is 0.3 in" in caplog.text


def test_another_model_is_refused_by_the_parameter_that_differs(tmp_path: Path) -> None:
    make_trainer().save(tmp_path)
    wide, deep = line(4), nn.Sequential(line())
    half = line().to(torch.bfloat16)
    more = line()
    more.register_buffer("count", torch.zeros(2))
    messages = {
        wide: r"weight is F32 \(1, 3\) in the checkpoint and F32 \(1, 4\) in this model",
        half: r"weight is F32 \(1, 3\) in the checkpoint and BF16 \(1, 3\) in this model",
        deep: r"0.weight, of shape \(1, 3\), is in this model and not in the checkpoint",
        more: r"count, of shape \(2,\), is in this model and not in the checkpoint",
    }
    for model, message in messages.items():
        trainer = make_trainer(model)
        before = bits(model)
        with pytest.raises(CheckpointError, match=rf"step-00000000 does not fit: .*{message}"):
            trainer.load(tmp_path)
        assert bits(model) == before
    make_trainer(more).save(tmp_path / "more")
    with pytest.raises(CheckpointError, match=r"count, of shape \(2,\), is in the checkpoint and"):
        make_trainer().load(tmp_path / "more")


CHANGES: dict[str, tuple[dict[str, Any], str, str]] = {
    "seed": ({"seed": 1}, "seed 0, this run has 1", "another order"),
    "shards": ({"shards": 2}, "shards 4, this run has 2", "bit for bit"),
    "clip_norm": ({"clip_norm": 1.0}, "clip_norm None, this run has 1.0", "other steps"),
    "optimizer": (
        {"optimizer": lambda m: torch.optim.Adam(m.parameters())},
        "optimizer SGD, this run has Adam",
        "begins anew",
    ),
    "schedule": (
        {"schedule": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)},
        "schedule None, this run has ExponentialLR",
        "begins anew",
    ),
}


def changed_trainer(choices: dict[str, Any]) -> onefold.Trainer:
    model = line()
    choices = dict(choices)
    optimizer = choices.pop("optimizer", sgd)(model)
    if "schedule" in choices:
        choices["schedule"] = choices["schedule"](optimizer)
    return make_trainer(model, optimizer=optimizer, **choices)


@for_each("what", CHANGES)
def test_another_run_is_refused_by_name_and_taken_on_request(tmp_path: Path, what: str) -> None:
    choices, said, promise = CHANGES[what]
    trainer = make_trainer()
    trainer.step(points(8))
    trainer.save(tmp_path)
    other = changed_trainer(choices)
    before = bits(other.model)
    with pytest.raises(CheckpointError) as caught:
        other.load(tmp_path)
    assert f"was saved with {said}: expected the same" in str(caught.value)
    assert f'changed=["{what}"]' in str(caught.value)
    assert promise in str(caught.value)
    assert (bits(other.model), other.steps) == (before, 0)
    wrong = sorted(CHANGES.keys() - {what})
    with pytest.raises(CheckpointError):
        other.load(tmp_path, changed=wrong)
    other.load(tmp_path, changed=[what])
    assert (bits(other.model), other.steps) == (bits(trainer.model), 1)
    other.step(points(8))


def test_a_seed_once_changed_is_the_runs_own(tmp_path: Path) -> None:
    make_trainer().save(tmp_path)
    other = make_trainer(seed=7)
    other.load(tmp_path, changed="seed")
    other.save(tmp_path)
    make_trainer(seed=7).load(tmp_path)


def test_what_may_change_is_a_short_list() -> None:
    with pytest.raises(ValueError, match=r"expected changed to name some of .*got \['colour'\]"):
        make_trainer().load("nowhere", changed=["colour"])


def test_the_loaders_of_a_run_are_compared(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(*points(12))
    trainer = make_trainer()
    for batch in trainer.loader(data, batch_size=5, shuffle=True):
        trainer.step(batch)
        trainer.save(tmp_path)
        break
    other = make_trainer()
    other.load(tmp_path)
    with pytest.raises(CheckpointError, match="batch_size 5, this run has 4"):
        other.loader(data, batch_size=4, shuffle=True)
    early = make_trainer()
    early.loader(data, batch_size=4, shuffle=True)
    with pytest.raises(CheckpointError, match="batch_size 5, this run has 4"):
        early.load(tmp_path)
    assert early.steps == 0
    early.load(tmp_path, changed=["batch_size"])


def test_with_lengths_another_batch_size_is_another_order(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(*points(12))
    trainer = make_trainer()
    for batch in trainer.loader(data, batch_size=5, shuffle=True, lengths=range(12)):
        trainer.step(batch)
        trainer.save(tmp_path)
        break
    again = make_trainer()
    again.loader(data, batch_size=4, shuffle=True, lengths=range(12))
    with pytest.raises(CheckpointError, match="saved with batches by length, of batch_size 5"):
        again.load(tmp_path, changed=["batch_size"])
    assert again.load(tmp_path, changed=["batch_size", "dataset"]).step == 1


def test_other_lengths_of_as_many_samples_are_another_data_set(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(*points(12))
    trainer = make_trainer()
    for batch in trainer.loader(data, batch_size=5, shuffle=True, lengths=range(12)):
        trainer.step(batch)
        trainer.save(tmp_path)
        break
    early = make_trainer()
    early.loader(data, batch_size=5, shuffle=True, lengths=range(1, 13))
    with pytest.raises(CheckpointError, match="saved with lengths of samples, as a digest"):
        early.load(tmp_path)
    assert early.steps == 0
    early.load(tmp_path, changed=["dataset"])


class Remembered(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Notes which samples are read."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.read: list[int] = []

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(index)
        return torch.full((3,), index / 40), torch.zeros(1)


@for_each("lengths", [None, [n % 7 for n in range(40)]], ids=["", "by length"])
def test_nothing_is_read_that_came_before(tmp_path: Path, lengths: list[int] | None) -> None:
    first, second = Remembered(40), Remembered(40)
    trainer = make_trainer()
    for number, batch in enumerate(
        trainer.loader(first, batch_size=4, shuffle=True, lengths=lengths)
    ):
        trainer.step(batch)
        if number == 6:
            trainer.save(tmp_path)
    again = make_trainer()
    again.load(tmp_path)
    for batch in again.loader(second, batch_size=4, shuffle=True, lengths=lengths):
        again.step(batch)
    assert second.read == first.read[28:]
    assert again.fingerprint() == trainer.fingerprint()


@for_each("workers", [0, 2])
def test_an_epoch_of_which_nothing_is_left_is_empty(tmp_path: Path, workers: int) -> None:
    data = torch.utils.data.TensorDataset(*points(12))
    trainer = make_trainer()
    for batch in trainer.loader(data, batch_size=4):
        step = trainer.step(batch)
        if step.number == 3:
            trainer.save(tmp_path)
    again = make_trainer()
    again.load(tmp_path)
    loader = again.loader(data, batch_size=4, workers=workers)
    counted = [(epoch, sum(1 for _ in loader)) for epoch in again.epochs(2)]
    assert counted == [(0, 0), (1, 3)]
    again.close()


# Which checkpoints stay


def test_the_newest_three_stay_unless_told_otherwise(tmp_path: Path) -> None:
    trainer = make_trainer()
    scores = [0.5, 0.9, 0.1, 0.2, 0.3]
    for score in scores:
        trainer.step(points(4))
        trainer.save(tmp_path / "three")
        trainer.save(tmp_path / "all", keep=None)
        trainer.save(tmp_path / "best", keep=1, best="highest score", scores={"score": score})
    trainer.step(points(4))
    trainer.save(tmp_path / "best", keep=1)
    assert steps_in(tmp_path / "three") == [3, 4, 5]
    assert steps_in(tmp_path / "all") == [1, 2, 3, 4, 5]
    assert steps_in(tmp_path / "best") == [2, 6]


def test_another_run_in_the_same_directory_deletes_nothing(tmp_path: Path) -> None:
    for steps in (3, 2):
        trainer = make_trainer()
        for _ in range(steps):
            trainer.step(points(4 + steps))
            trainer.save(tmp_path, keep=1)
    assert steps_in(tmp_path) == [2, 3]
    found = make_trainer()
    assert found.load(tmp_path).step == 2, "the newest is the one that was written last"


def test_a_run_that_goes_on_tidies_up_what_it_wrote_before(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.step(points(4))
    trainer.save(tmp_path)
    again = make_trainer()
    again.load(tmp_path)
    again.step(points(4))
    again.save(tmp_path, keep=1)
    assert steps_in(tmp_path) == [2]


@for_each(
    ("choices", "kind", "text"),
    [
        ({"keep": 0}, ValueError, "expected keep of at least 1, got 0"),
        ({"keep": 2.5}, TypeError, "expected keep to be a whole number or None, got 2.5"),
        ({"best": "accuracy"}, ValueError, 'expected best to be "highest NAME"'),
        ({"best": "lowest loss"}, ValueError, "expected a score of that name among scores"),
        ({"scores": {"loss": "low"}}, TypeError, "expected scores to be numbers by name"),
        ({"extra": {"f": print}}, TypeError, r"extra\['f'\] is of type builtin_function"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, choices: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        make_trainer().save(tmp_path / "run", **choices)
    assert not (tmp_path / "run").exists()


def test_a_model_that_keeps_more_than_tensors_is_refused(tmp_path: Path) -> None:
    class Keeping(nn.Linear):
        def get_extra_state(self) -> object:
            return {"calls": 3}

        def set_extra_state(self, state: object) -> None:
            raise AssertionError("nothing was saved")

    trainer = make_trainer(Keeping(3, 1))
    with pytest.raises(TypeError, match=r"holds _extra_state, which is no parameter and no buffer"):
        trainer.save(tmp_path / "run")
    assert not (tmp_path / "run").exists()


# In the background


def test_what_is_saved_is_the_run_as_it_was(tmp_path: Path, monkeypatch: Any) -> None:
    gate = threading.Event()
    trainer = odd_trainer(OPTIMIZERS["adam"], 2)
    trainer.step(points(9))
    whole = trainer.save(tmp_path / "whole")
    write = session_in(trainer).checkpoints._saving._write
    monkeypatch.setattr(
        session_in(trainer).checkpoints._saving,
        "_write",
        lambda *args: (gate.wait(60), write(*args)),
    )
    folder = trainer.save(tmp_path / "beside", wait=False)
    for _ in range(3):
        trainer.step(points(9))
    assert not folder.exists()
    gate.set()
    trainer.close()
    for path in whole.glob("*.safetensors"):
        assert path.read_bytes() == (folder / path.name).read_bytes()
    records = [json.loads((f / "run.json").read_text()) for f in (whole, folder)]
    then, now = (record | {"sha256": "", "time": ""} for record in records)
    assert then == now


@for_each("call", ["step", "save", "load", "evaluate", "close"])
def test_a_failed_write_is_raised_at_the_next_call(tmp_path: Path, call: str) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "good")
    with full_disk(64):
        trainer.save(tmp_path / "bad", wait=False)
        thread = session_in(trainer).checkpoints._writing._thread
        assert thread is not None
        thread.join()
    data = torch.utils.data.TensorDataset(*points(4))
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: trainer.step(points(4)),
        "save": lambda: trainer.save(tmp_path / "good"),
        "load": lambda: trainer.load(tmp_path / "good"),
        "evaluate": lambda: trainer.evaluate(
            lambda m, b: {"loss": square(m, b)}, data, batch_size=4
        ),
        "close": trainer.close,
    }
    with pytest.raises(OSError, match=r"bad.*could not be written: File too large"):
        calls[call]()
    calls[call]()
    assert names_in(tmp_path / "bad") == set()


def test_saves_in_the_background_follow_one_another(tmp_path: Path) -> None:
    trainer = make_trainer(devices=2)
    prints = {}
    for _ in range(8):
        trainer.step(points(5))
        trainer.save(tmp_path, wait=False, keep=None)
        prints[trainer.steps] = trainer.fingerprint()
    trainer.close()
    for step, fingerprint in prints.items():
        again = make_trainer()
        again.load(tmp_path / f"step-{step:08d}")
        assert again.fingerprint() == fingerprint


# Differences that are told


def test_another_number_of_threads_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(threads=1).save(tmp_path)
    with caplog.at_level(logging.WARNING, "onefold"):
        make_trainer(threads=2).load(tmp_path)
    torch.set_num_threads(1)
    assert "was saved with threads 1, here it is 2: the mathematics is the same" in caplog.text
