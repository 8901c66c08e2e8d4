from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from onefold.checkpoint import write_checkpoint
from tests.small import bits, line, make_trainer, points

FILES = {"model.safetensors", "run.json"}


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


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("devices", [1, 2])
def test_what_was_saved_loads_into_a_fresh_model(tmp_path: Path, devices: int) -> None:
    torch.manual_seed(0)
    trainer = make_trainer(Tied(), loss, devices=devices)
    for _ in range(3):
        trainer.step(torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]))
    folder = trainer.save(tmp_path / "run")
    assert folder == tmp_path / "run" / "step-00000003"
    assert names_in(folder) == FILES
    assert names_in(tmp_path / "run") == {"step-00000003"}
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == Tied().state_dict().keys()
    fresh = Tied()
    fresh.load_state_dict(tensors)
    assert bits(fresh) == bits(trainer.model)
    assert fresh.decoder.weight is fresh.embedding.weight


def test_where_the_run_is_can_be_read(tmp_path: Path) -> None:
    trainer = make_trainer(shards=3, seed=11)
    for _ in trainer.epochs(2):
        trainer.step(points(6))
    record = json.loads((trainer.save(str(tmp_path)) / "run.json").read_text())
    assert record == {
        "format": 1,
        "step": 2,
        "epoch": 2,
        "seed": 11,
        "shards": 3,
        "fingerprint": trainer.fingerprint(),
        "torch": torch.__version__,
    }


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


def test_saving_again_replaces(tmp_path: Path) -> None:
    folder = tmp_path / "last"
    write_checkpoint(folder, line(2), {"step": 1})
    write_checkpoint(folder, line(7), {"step": 2})
    assert load_file(folder / "model.safetensors")["weight"].shape == (1, 7)
    assert json.loads((folder / "run.json").read_text()) == {"step": 2}
    assert names_in(folder) == FILES
    assert names_in(tmp_path) == {"last"}


def test_a_file_holds_its_own_tensors_alone(tmp_path: Path) -> None:
    """Parameters are views of one flat tensor; each must be written once, and nothing else."""
    trainer = make_trainer(nn.Sequential(nn.Linear(3, 100), nn.Linear(100, 1)))
    folder = trainer.save(tmp_path)
    numbers = 3 * 100 + 100 + 100 + 1
    assert 4 * numbers < (folder / "model.safetensors").stat().st_size < 4 * numbers + 1000


@pytest.mark.parametrize("strange", ["notes.txt", "model.safetensors.bak", "src"])
def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, strange: str) -> None:
    folder = tmp_path / "last"
    write_checkpoint(folder, line(2), {"step": 1})
    (folder / strange).mkdir()
    with pytest.raises(FileExistsError, match=f"last holds {strange}, which is no part of a"):
        write_checkpoint(folder, line(2), {"step": 2})
    assert json.loads((folder / "run.json").read_text()) == {"step": 1}
    assert names_in(tmp_path) == {"last"}


@pytest.mark.parametrize("below", ["", "/deeper"])
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


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """No file may grow beyond the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_and_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "last"
    write_checkpoint(folder, line(2), {"step": 1})
    with pytest.raises(OSError, match=r"last.*File too large"), full_disk(64):
        write_checkpoint(folder, line(2), {"step": 2})
    assert json.loads((folder / "run.json").read_text()) == {"step": 1}
    assert names_in(tmp_path) == {"last"}


def test_a_record_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "last"
    write_checkpoint(folder, line(2), {"step": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_checkpoint(folder, line(2), {"step": torch.ones(1)})
    assert json.loads((folder / "run.json").read_text()) == {"step": 1}
    assert names_in(tmp_path) == {"last"}


@pytest.mark.parametrize("left", ["part", "old"])
def test_what_a_killed_process_of_the_same_number_left_is_no_hindrance(
    tmp_path: Path, left: str
) -> None:
    folder = tmp_path / "last"
    write_checkpoint(folder, line(2), {"step": 1})
    rest = tmp_path / f".last.{os.getpid()}.{left}"
    rest.mkdir()
    (rest / "model.safetensors").write_text("half")
    write_checkpoint(folder, line(2), {"step": 2})
    assert json.loads((folder / "run.json").read_text()) == {"step": 2}
    assert names_in(tmp_path) == {"last"}


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


def test_a_checkpoint_that_was_just_being_replaced_is_put_back(tmp_path: Path) -> None:
    folder = tmp_path / "last"
    write_checkpoint(folder, line(2), {"step": 1})
    folder.rename(tmp_path / f".last.{os.getpid()}.old")
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_checkpoint(folder, line(2), {"step": {2}})
    assert json.loads((folder / "run.json").read_text()) == {"step": 1}
    assert names_in(tmp_path) == {"last"}
