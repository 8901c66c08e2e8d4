from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from onefold.checkpoint.folder import (
    Best,
    find_checkpoint,
    has_checkpoints,
    prune,
    write_checkpoint,
)
from onefold.core.jsonvalue import to_json
from onefold.system.tensorfile import TensorParts
from tests.checkpoint.folders import full_disk, names_in, steps_in
from tests.small import bits, make_trainer, points
from tests.somebody import NOBODY, needs_root, somebody_else
from tests.tables import for_each

FILES = {"model.safetensors", "optimizer.safetensors", "run.json"}


class Tied(nn.Module):
    """Two names for one parameter, and buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5, bias=False)
        self.decoder.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.frozen.requires_grad_(False)
        self.register_buffer("short", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("passing", torch.ones(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.norm(self.embedding(tokens)))


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens), tokens, reduction="none")


@for_each("devices", [1, 2])
def test_what_was_saved_loads_into_a_fresh_model(tmp_path: Path, devices: int) -> None:
    torch.manual_seed(0)
    trainer = make_trainer(Tied(), loss, devices=devices)
    for _ in range(3):
        trainer.step(torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]))
    folder = trainer.save(tmp_path / "run")
    assert folder == tmp_path / "run" / "step-00000003"
    assert names_in(folder) == FILES | {"buffers.safetensors"}
    assert names_in(tmp_path / "run") == {"step-00000003"}
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == Tied().state_dict().keys()
    fresh = Tied()
    fresh.load_state_dict(tensors)
    assert bits(fresh) == bits(trainer.model)
    (rest,) = load_file(folder / "buffers.safetensors").items()
    assert rest[0] == "passing"
    assert torch.equal(rest[1], trainer.model.passing)
    assert fresh.decoder.weight is fresh.embedding.weight


def test_where_the_run_is_can_be_read(tmp_path: Path) -> None:
    trainer = make_trainer(shards=3, seed=11, clip_norm=2.0)
    for _ in trainer.epochs(2):
        trainer.step(points(6))
    folder = trainer.save(str(tmp_path), extra={"note": [1, None]}, scores={"loss": 0.5})
    record = json.loads((folder / "run.json").read_text())
    expected = {
        "format": 1,
        "step": 2,
        "epoch": 2,
        "position": [],
        "seed": 11,
        "shards": 3,
        "clip_norm": 2.0,
        "loss_scale": 1.0,
        "schedule": None,
        "fingerprint": trainer.fingerprint(),
        "extra": {"note": [1, None]},
        "scores": {"loss": 0.5},
        "serial": 1,
        "threads": 1,
        "devices": 1,
        "device": "cpu",
    }
    assert {name: record[name] for name in expected} == expected
    assert record["libraries"]["torch"] == torch.__version__
    assert record["optimizer"]["class"] == "SGD"
    assert record["optimizer"]["parameters"] == [["weight", "bias"]]
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    del sizes["run.json"]
    assert {name: seal["size"] for name, seal in record["files"].items()} == sizes


@for_each("devices", [1, 3])
def test_the_optimizer_lies_there_whole_under_the_names_of_the_parameters(
    tmp_path: Path, devices: int
) -> None:
    """As plain PyTorch would have it after the same steps."""
    model = nn.Sequential(nn.Linear(40, 900), nn.Linear(900, 1)).to(torch.float64)
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    plain = nn.Sequential(nn.Linear(40, 900), nn.Linear(900, 1)).to(torch.float64)
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    trainer = make_trainer(model, optimizer=optimizers[0], devices=devices)
    inputs, targets = (t.double() for t in points(8, 40))
    for _ in range(3):
        trainer.step((inputs, targets))
        optimizers[1].zero_grad()
        (plain(inputs) - targets).square().mean().backward()
        optimizers[1].step()
    saved = load_file(trainer.save(tmp_path) / "optimizer.safetensors")
    names = dict(plain.named_parameters())
    assert saved.keys() == {
        f"{n}.{key}" for n in names for key in ("step", "exp_avg", "exp_avg_sq")
    }
    for name, parameter in names.items():
        for key, value in optimizers[1].state[parameter].items():
            assert saved[f"{name}.{key}"].shape == value.shape
            assert torch.allclose(saved[f"{name}.{key}"], value, rtol=1e-9, atol=1e-12)


def test_a_run_may_be_saved_before_its_first_step(tmp_path: Path) -> None:
    trainer = make_trainer()
    assert trainer.save(tmp_path).name == "step-00000000"


def test_every_step_has_a_folder_of_its_own(tmp_path: Path) -> None:
    trainer = make_trainer()
    for _ in range(2):
        trainer.step(points(6))
        trainer.save(tmp_path)
    assert names_in(tmp_path) == {"step-00000001", "step-00000002"}


def test_saving_does_not_change_the_run(tmp_path: Path) -> None:
    one, other = make_trainer(devices=2), make_trainer(devices=2)
    for _ in range(3):
        one.step(points(6))
        one.save(tmp_path)
        other.step(points(6))
    assert one.fingerprint() == other.fingerprint()


def write(folder: Path, value: float = 1.0, *, bytes_of: int = 8, **record: Any) -> None:
    """A checkpoint of one small tensor."""
    tensor = torch.full((bytes_of,), int(value), dtype=torch.uint8)
    parts = [TensorParts("weight", torch.uint8, (bytes_of,), (1,), [tensor.numpy()])]
    step = int(folder.name.removeprefix("step-"))
    usual = {"format": 1, "step": step, "run": "this", "scores": {}, "keep": 3, "best": None}
    run: Mapping[str, object] = {**usual, **record}
    write_checkpoint(folder, {"model.safetensors": parts}, lambda: run, dict)


def value_in(folder: Path) -> int:
    return int(load_file(folder / "model.safetensors")["weight"][0])


SMALL = {"model.safetensors", "run.json"}


def test_saving_again_replaces(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    write(folder, 2, bytes_of=3)
    write(folder, 7)
    assert value_in(folder) == 7
    assert find_checkpoint(tmp_path).run["serial"] == 2
    assert names_in(folder) == SMALL
    assert names_in(tmp_path) == {"step-00000001"}


def test_a_file_holds_its_own_tensors_alone(tmp_path: Path) -> None:
    """Parameters are views of one flat tensor; each must be written once, and nothing else."""
    trainer = make_trainer(nn.Sequential(nn.Linear(3, 100), nn.Linear(100, 1)))
    folder = trainer.save(tmp_path)
    numbers = 3 * 100 + 100 + 100 + 1
    assert 4 * numbers < (folder / "model.safetensors").stat().st_size < 4 * numbers + 1000


@for_each("strange", ["notes.txt", "model.safetensors.bak", "src"])
def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, strange: str) -> None:
    folder = tmp_path / "step-00000001"
    write(folder, 2)
    (folder / strange).mkdir()
    with pytest.raises(FileExistsError, match=f"step-00000001 holds {strange}, which is no part"):
        write(folder, 7)
    assert value_in(folder) == 2
    assert names_in(tmp_path) == {"step-00000001"}


@for_each("below", ["", "/deeper"])
def test_a_file_where_a_folder_should_be_is_told(tmp_path: Path, below: str) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(OSError, match="run"):
        make_trainer().save(f"{tmp_path}/run{below}")
    assert (tmp_path / "run").read_text() == "mine"
    assert names_in(tmp_path) == {"run"}


def test_a_folder_that_may_not_be_written_to_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("this user may write anywhere")
    with pytest.raises(PermissionError, match="Permission denied"):
        make_trainer().save(tmp_path / "run")


def test_a_full_disk_is_told_and_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    write(folder, 2)
    message = r"model.safetensors could not be written: File too large"
    with pytest.raises(OSError, match=message), full_disk(64):
        write(folder, 7)
    assert value_in(folder) == 2
    assert names_in(tmp_path) == {"step-00000001"}


def test_a_record_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    write(folder, 2)
    with pytest.raises(TypeError, match="not JSON serializable"):
        write(folder, 7, extra=torch.ones(1))
    assert value_in(folder) == 2
    assert names_in(tmp_path) == {"step-00000001"}


@for_each("left", ["part", "old", "gone"])
def test_what_a_killed_process_left_is_swept_up(tmp_path: Path, left: str) -> None:
    write(tmp_path / "step-00000001", 2)
    rest = tmp_path / f".step-00000001.0123abcd.{left}"
    rest.mkdir()
    (rest / "model.safetensors").write_text("half")
    write(tmp_path / "step-00000002", 3)
    assert names_in(tmp_path) == {"step-00000001", "step-00000002"}
    assert value_in(tmp_path / "step-00000001") == 2


@for_each("name", [".step-1.part", ".other.0123abcd.part", "step-1.part", ".git"])
def test_what_others_left_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    write(tmp_path / "step-00000002", 3)
    assert names_in(tmp_path) == {name, "step-00000002"}


def test_what_another_process_works_on_is_not_swept_up(tmp_path: Path) -> None:
    busy = tmp_path / ".step-00000001.0123abcd.part"
    busy.mkdir()
    lock = os.open(busy.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write(tmp_path / "step-00000002", 3)
        assert names_in(tmp_path) == {busy.name, ".step-00000001.0123abcd.lock", "step-00000002"}
    finally:
        os.close(lock)
    write(tmp_path / "step-00000003", 3)
    assert names_in(tmp_path) == {"step-00000002", "step-00000003"}


def locking(folder: Path) -> None:
    """Have the lock of every folder that is there, as anybody may who can read it."""
    for path in (folder, *folder.iterdir()):
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_SH)


def test_nobody_elses_lock_is_waited_for(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path / f"step-0000000{step}")
    tmp_path.chmod(0o755)
    with somebody_else(locking, tmp_path):
        write(tmp_path / "step-00000003", 7)
        prune(tmp_path, run="this", keep=1)
    assert steps_in(tmp_path) == [3]
    assert value_in(tmp_path / "step-00000003") == 7


def test_a_lock_is_its_owners_alone(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def looking() -> Mapping[str, object]:
        seen.extend((p.suffix, p.stat().st_mode & 0o777) for p in tmp_path.glob(".step-*.lock"))
        return {"format": 1, "step": 1, "run": "this", "scores": {}, "keep": 3, "best": None}

    write_checkpoint(tmp_path / "step-00000001", {}, looking, dict)
    assert seen == [(".lock", 0o600)]
    assert names_in(tmp_path) == {"step-00000001"}


@for_each("left", ["part", "old", "gone"])
def test_what_is_no_part_of_a_checkpoint_is_not_swept_up(tmp_path: Path, left: str) -> None:
    rest = tmp_path / f".step-00000001.0123abcd.{left}"
    rest.mkdir()
    (rest / "thesis.tex").write_text("mine")
    write(tmp_path / "step-00000002", 3)
    assert (rest / "thesis.tex").read_text() == "mine"


@needs_root
def test_what_somebody_else_left_is_not_swept_up(tmp_path: Path) -> None:
    rest = tmp_path / ".step-00000001.0123abcd.part"
    rest.mkdir()
    os.chown(rest, NOBODY, NOBODY)
    write(tmp_path / "step-00000002", 3)
    assert rest.is_dir()


def test_a_checkpoint_that_was_just_being_replaced_is_found_and_put_back(tmp_path: Path) -> None:
    write(tmp_path / "step-00000001", 2)
    between = tmp_path / ".step-00000001.0123abcd.old"
    (tmp_path / "step-00000001").rename(between)
    assert has_checkpoints(tmp_path)
    assert find_checkpoint(tmp_path).folder == between
    write(tmp_path / "step-00000002", 3)
    assert names_in(tmp_path) == {"step-00000001", "step-00000002"}
    assert value_in(tmp_path / "step-00000001") == 2


def test_the_newest_is_the_one_written_last(tmp_path: Path) -> None:
    """A run that went back and on from there is not taken for the one that was further."""
    for step in (100, 200, 150):
        write(tmp_path / f"step-00000{step}", step // 10)
    assert find_checkpoint(tmp_path).folder.name == "step-00000150"


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    scores = {1: 0.5, 2: 0.9, 3: 0.1, 4: float("nan"), 5: 0.3, 6: 0.2}
    for step, score in scores.items():
        scores = to_json({"accuracy": score}, "scores")
        rule = "highest accuracy" if step != 3 else None
        write(tmp_path / f"step-0000000{step}", scores=scores, best=rule)
        prune(tmp_path, run="this", keep=2)
    assert steps_in(tmp_path) == [2, 5, 6]
    write(tmp_path / "step-00000007", best="lowest accuracy")
    prune(tmp_path, run="this", keep=1)
    assert steps_in(tmp_path) == [2, 6, 7]


def test_one_that_is_to_stay_for_good_stays(tmp_path: Path) -> None:
    for step, keep in ((1, 1), (2, None), (3, 1), (4, 1)):
        write(tmp_path / f"step-0000000{step}", keep=keep)
        prune(tmp_path, run="this", keep=1)
    assert steps_in(tmp_path) == [2, 4]


def test_another_runs_checkpoint_of_the_same_step_is_put_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "step-00000001"
    write(folder, 2, run="another")
    write(folder, 7)
    (aside,) = names_in(tmp_path) - {folder.name}
    assert (value_in(folder), value_in(tmp_path / aside)) == (7, 2)
    assert f"{folder} was there from another run: it is now {aside}" in caplog.text
    assert find_checkpoint(tmp_path).folder == folder


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    write(tmp_path / "else" / "step-00000001", 2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000001").symlink_to(tmp_path / "else" / "step-00000001")
    with pytest.raises(FileExistsError, match="is a link"):
        write(tmp_path / "run" / "step-00000001", 7)
    assert value_in(tmp_path / "else" / "step-00000001") == 2


def test_a_child_that_was_forked_while_writing_does_not_keep_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    pids: list[int] = []

    def forking() -> Mapping[str, object]:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        pids.append(pid)
        return {"format": 1, "step": 1, "run": "this", "scores": {}, "keep": 3, "best": None}

    try:
        write_checkpoint(folder, {}, forking, dict)
        write(folder, 7)
        assert value_in(folder) == 7
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_what_cannot_be_swept_up_is_no_hindrance(tmp_path: Path) -> None:
    strange = tmp_path / ".step-00000001.0123abcd.part"
    strange.write_text("a file, where a folder is expected")
    write(tmp_path / "step-00000002")
    assert names_in(tmp_path) == {strange.name, "step-00000002"}


def test_only_a_runs_own_checkpoints_are_deleted(tmp_path: Path) -> None:
    write(tmp_path / "step-00000001", run="another")
    write(tmp_path / "step-00000002")
    (tmp_path / "step-00000002" / "notes.txt").write_text("mine")
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000004").symlink_to(tmp_path / "step-00000002")
    (tmp_path / "notes").mkdir()
    for step in (5, 6, 7):
        write(tmp_path / f"step-0000000{step}")
    prune(tmp_path, run="this", keep=1)
    names = names_in(tmp_path)
    assert names == {"notes", *(f"step-0000000{step}" for step in (1, 2, 3, 4, 7))}


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path / f"step-0000000{step}")
    (tmp_path / "step-00000003" / "model.safetensors").write_text("")
    prune(tmp_path, run="this", keep=1)
    assert steps_in(tmp_path) == [2, 3]


@for_each("text", ["accuracy", "best accuracy", "highest", "highest ", ""])
def test_what_is_best_must_be_said(text: str) -> None:
    with pytest.raises(ValueError, match='expected best to be "highest NAME"'):
        Best.read(text)


def test_a_name_of_a_score_may_have_blanks() -> None:
    assert Best.read("lowest loss of all") == Best("loss of all", highest=False)


def test_a_run_goes_on_after_a_save_that_failed(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with_failure, without = make_trainer(devices=2), make_trainer(devices=2)
    for trainer in (with_failure, without):
        trainer.step(points(8))
    with pytest.raises(OSError, match="run"):
        with_failure.save(tmp_path / "run")
    for trainer in (with_failure, without):
        trainer.step(points(7))
    assert with_failure.fingerprint() == without.fingerprint()
