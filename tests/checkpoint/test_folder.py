import fcntl
import math
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from onefold.checkpoint.folder import find_checkpoint, has_checkpoints, prune, write_checkpoint
from onefold.core.encoding import to_json
from onefold.system.tensor_file import TensorParts
from onefold.weights import best_scored
from tests.checkpoint.folders import Tied, full_disk, names_in, steps_in
from tests.small import bits, make_trainer
from tests.somebody import NOBODY
from tests.tables import for_each


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens), tokens, reduction="none")


@for_each("devices", [1, 2])
def test_what_was_saved_loads_into_a_fresh_model(tmp_path: Path, devices: int) -> None:
    """With plain PyTorch; and into a Trainer's, where its tensors lie."""
    trainer = make_trainer(Tied(), loss, devices=devices)
    for _ in range(3):
        trainer.step(torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]))
    folder = trainer.save(tmp_path / "run")
    assert folder == tmp_path / "run" / "step-00000003"
    names = ("model", "optimizer", "buffers")
    assert names_in(folder) == {*(f"{name}.safetensors" for name in names), "run.json"}
    fresh = Tied()
    fresh.load_state_dict(load_file(folder / "model.safetensors"))
    assert bits(fresh) == bits(trainer.model)
    assert load_file(folder / "buffers.safetensors").keys() == {"passing"}
    other = make_trainer(Tied(), loss, devices=devices)
    places = [value.data_ptr() for value in other.model.state_dict().values()]
    other.load(folder)
    assert other.fingerprint() == trainer.fingerprint()
    assert [value.data_ptr() for value in other.model.state_dict().values()] == places
    loaded, saved = (cast(Tied, each.model) for each in (other, trainer))
    assert loaded.decoder.weight is loaded.embedding.weight
    assert torch.equal(loaded.passing, saved.passing)


def write(folder: Path, value: float = 1.0, *, bytes_of: int = 8, **record: Any) -> None:
    tensor = torch.full((bytes_of,), int(value), dtype=torch.uint8)
    parts = [TensorParts("weight", torch.uint8, (bytes_of,), (1,), [tensor.numpy()])]
    write_checkpoint(folder, {"model.safetensors": parts}, run_of(folder, **record), lambda _: None)


def run_of(folder: Path, **record: Any) -> Mapping[str, object]:
    step = int(folder.name.removeprefix("step-"))
    usual = {"format": 1, "step": step, "run": "this", "scores": {}, "keep": 3, "best": None}
    return {**usual, **record}


def value_in(folder: Path) -> int:
    return int(load_file(folder / "model.safetensors")["weight"][0])


ONE, TWO = "step-00000001", "step-00000002"


@for_each(
    ("before", "record", "limit_bytes", "kind", "words"),
    [
        *(
            (
                lambda f, n=n: (f / n).mkdir(),
                {},
                9999,
                FileExistsError,
                f"not part of a checkpoint: {n}. Save",
            )
            for n in ("notes.txt", "model.safetensors.bak")
        ),
        (
            lambda f: f.symlink_to(f.rename(f.parents[1] / "b")),
            {},
            9999,
            FileExistsError,
            "is a symbolic l",
        ),
        (lambda folder: None, {}, 64, OSError, "model.safetensors could not be written: File too"),
        (lambda folder: None, {"extra": print}, 9999, TypeError, "not JSON serializable"),
    ],
)
def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path,
    before: Callable[[Path], object],
    record: Any,
    limit_bytes: int,
    kind: type[Exception],
    words: str,
) -> None:
    folder = tmp_path / "run" / ONE
    write(folder, 2)
    before(folder)
    with pytest.raises(kind, match=words), full_disk(limit_bytes):
        write(folder, 7, **record)
    assert value_in(folder) == 2
    assert names_in(tmp_path / "run") == {ONE}


def test_what_a_killed_process_left_is_swept_up_and_nothing_else(tmp_path: Path) -> None:
    def left(suffix: str, name: str = "model.safetensors", number: int = 1) -> Path:
        rest = tmp_path / f".step-0000000{number}.0123abcd.{suffix}"
        rest.mkdir()
        (rest / name).write_text("half")
        return rest

    write(tmp_path / ONE, 2)
    for suffix in ("part", "old", "gone"):
        left(suffix)
        left(suffix, "thesis.tex", 5)
    if os.geteuid() == 0:
        os.chown(left("part", number=6), NOBODY, NOBODY)
    (tmp_path / ".step-00000007.0123abcd.part").write_text("a file, where a folder is expected")
    for name in (".step-1.part", ".other.0123abcd.part", "step-1.part", ".git"):
        (tmp_path / name).mkdir()
    busy = left("part", number=8)
    kept = names_in(tmp_path) - {f".{ONE}.0123abcd.{s}" for s in ("part", "old", "gone")}
    lock = os.open(busy.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # another process is at work on it
    write(tmp_path / TWO, 3)
    assert names_in(tmp_path) == kept | {TWO, busy.with_suffix(".lock").name}
    os.close(lock)
    write(tmp_path / TWO, 3)
    assert names_in(tmp_path) == (kept | {TWO}) - {busy.name}
    assert value_in(tmp_path / ONE) == 2
    assert (tmp_path / ".step-00000005.0123abcd.old" / "thesis.tex").exists()


def test_a_lock_is_its_owners_alone_and_no_forked_child_keeps_it(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    pids: list[int] = []

    def looking(_: object) -> None:
        seen.extend((p.suffix, p.stat().st_mode & 0o777) for p in tmp_path.glob(".step-*.lock"))
        if (pid := os.fork()) == 0:
            signal.pause()
        pids.append(pid)

    try:
        write_checkpoint(tmp_path / ONE, {}, run_of(tmp_path / ONE), looking)
        assert seen == [(".lock", 0o600)]
        write(tmp_path / ONE, 7)
        assert value_in(tmp_path / ONE) == 7
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_checkpoint_that_was_just_being_replaced_is_found_and_put_back(tmp_path: Path) -> None:
    write(tmp_path / ONE, 2)
    between = (tmp_path / ONE).rename(tmp_path / f".{ONE}.0123abcd.old")
    assert has_checkpoints(tmp_path)
    assert find_checkpoint(tmp_path).folder == between
    write(tmp_path / TWO, 3)
    assert names_in(tmp_path) == {ONE, TWO}
    assert value_in(tmp_path / ONE) == 2


def test_the_newest_is_the_one_written_last(tmp_path: Path) -> None:
    """A run that went back and on from there is not taken for the one that was further."""
    for step in (100, 200, 150):
        write(tmp_path / f"step-00000{step}", step // 10)
    for name in ("step-00000150", "step-00000200"):
        assert find_checkpoint(tmp_path).folder.name == name
        (tmp_path / name / "model.safetensors").write_text("damaged")


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, score in {1: 0.5, 2: 0.9, 3: 0.1, 4: math.nan, 5: 0.3, 6: 0.2}.items():
        rule = "highest share of all" if step != 3 else None
        scores = to_json({"share of all": score}, "scores")
        write(tmp_path / f"step-0000000{step}", scores=scores, best=rule)
        prune(tmp_path, run="this", keep=2)
    assert steps_in(tmp_path) == [2, 5, 6]
    write(tmp_path / "step-00000007", best="lowest share of all")
    prune(tmp_path, run="this", keep=1)
    assert steps_in(tmp_path) == [2, 6, 7]


@for_each(
    ("scores", "best"),
    [
        (((0.5, 1.0), (0.5, 0.9), (0.5, 0.9), (0.4, 0.1)), 3),
        (((0.5, 1.0), (0.5, math.nan), (0.5, 2.0), (math.nan, 0.1)), 1),
    ],
)
def test_a_tie_is_broken_by_the_next_score_and_then_by_age(
    scores: tuple[tuple[float, float], ...], best: int, tmp_path: Path
) -> None:
    for step, (value, loss) in enumerate(scores, start=1):
        kept = to_json({"a, b": value, "loss": loss}, "scores")
        write(tmp_path / f"step-0000000{step}", scores=kept, best="highest a, b, lowest loss")
    assert best_scored(tmp_path, "highest a, b, lowest loss") == tmp_path / f"step-0000000{best}"
    prune(tmp_path, run="this", keep=1)
    assert steps_in(tmp_path) == [best, 4]


def test_anothers_checkpoint_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / ONE
    write(folder, 2, run="another")
    write(folder, 7)
    (aside,) = names_in(tmp_path) - {folder.name}
    assert (value_in(folder), value_in(tmp_path / aside)) == (7, 2)
    assert f"{folder} existed from another run and was renamed to {aside}" in caplog.text
    assert find_checkpoint(tmp_path).folder == folder


def test_only_a_runs_own_whole_checkpoints_are_deleted_and_counted(tmp_path: Path) -> None:
    write(tmp_path / ONE, run="another")
    write(tmp_path / TWO)
    (tmp_path / TWO / "notes.txt").write_text("mine")
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000004").symlink_to(tmp_path / TWO)
    (tmp_path / "notes").mkdir()
    for step, keep in ((5, 3), (6, None), (7, 3), (8, 3)):  # 6 is to stay for good
        write(tmp_path / f"step-0000000{step}", keep=keep)
    (tmp_path / "step-00000008" / "model.safetensors").write_text("")
    prune(tmp_path, run="this", keep=1)
    names = names_in(tmp_path)
    assert names == {"notes", *(f"step-0000000{step}" for step in (1, 2, 3, 4, 6, 7, 8))}
