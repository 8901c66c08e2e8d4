"""A record is bound to the checkpoints of its run: no other, and no edited one, passes for it."""

import json
import random
import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from torch.utils.data import TensorDataset

from onefold.checkpoint.folder import find_checkpoint
from onefold.errors import RecordError
from onefold.record import FILE, whole_run
from onefold.record.entries import HEAD, FrameWriter, Result, decode, encode, read_frames
from tests.checkpoint.folders import reseal
from tests.checkpoint.inprocess import Life, Runs
from tests.small import points

EDITS = 1000


class Stopped(NamedTuple):
    """A run that was stopped, and another that is like it but for its data."""

    folder: Path
    result: str
    """What the whole run returns."""
    kept: int
    head: str
    other: list[bytes]
    """The entries of the other run."""

    @property
    def record(self) -> Path:
        return self.folder / FILE


def script(life: Life, scale: float = 1.0) -> str:
    """What is trained on depends on what was predicted."""
    trainer, loss = life.trainer(shards=2), 0.0
    inputs, targets = points(16)
    for _ in trainer.epochs(4):
        for batch in trainer.loader(TensorDataset(inputs * scale, targets), batch_size=8):
            life.tick()
            trainer.step(batch)
        scores = trainer.evaluate(
            lambda model, b: {"loss": model(b[0])[:, 0].square()}, TensorDataset(inputs, targets),
            batch_size=8,
        )  # fmt: skip
        loss += scores["loss"]
        with trainer.modifying(), torch.no_grad():
            next(trainer.model.parameters()).mul_(1 + scores["loss"] / 100)
    return f"{trainer.fingerprint()} {loss}"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        runs, other = Runs(folder / "run", patch), Runs(folder / "other", patch)
        result = runs.whole(script)
        assert runs.start(script, dies=6, every=2) is None
        assert other.start(lambda life: script(life, 1.5), every=2) is not None
    saved = find_checkpoint(folder / "run").run["recorded"]
    frames = read_frames(folder / "other" / FILE)[0]
    kept = saved["entries"], saved["head"]
    return Stopped(folder / "run", result, *kept, [frame.body for frame in frames])


def forged(path: Path, bodies: list[bytes]) -> None:
    """Write a record whose frames check."""
    path.unlink()
    writer = FrameWriter(path)
    for body in bodies:
        writer.append(body)
    writer.close()


def test_the_true_record_answers(stopped: Stopped) -> None:
    assert len(whole_run(stopped.record, stopped.kept, stopped.head)) == stopped.kept > 5


def test_a_thousand_edits_are_refused_by_name(stopped: Stopped, tmp_path: Path) -> None:
    """Bytes that are changed, and entries removed, repeated, moved, or of the other run.

    Behind what the checkpoint has seen an edit is refused as well, or changes nothing.
    """
    draw, data = random.Random(0), stopped.record.read_bytes()
    frames = read_frames(stopped.record)[0]
    seen = frames[stopped.kept - 1].end
    true = whole_run(stopped.record, stopped.kept, stopped.head)
    bodies = [frame.body for frame in frames]
    path = tmp_path / FILE
    path.touch()

    def refused() -> bool:
        said = ""
        try:
            assert whole_run(path, stopped.kept, stopped.head) == true
        except RecordError as error:
            said = str(error)
        return str(path) in said

    for number in range(EDITS):
        at, edit = draw.randrange(stopped.kept), number % 5
        if edit == 0:
            place = draw.randrange(len(HEAD), len(data))
            changed = bytearray(data)
            changed[place] ^= 1 << draw.randrange(8)
            path.write_bytes(changed)
            assert refused() or place >= seen
            continue
        new = bodies.copy()
        if edit == 1:
            del new[at]
        elif edit == 2:
            new.insert(draw.randrange(stopped.kept), new[at])
        elif edit == 3:
            new[at] = stopped.other[at]
        else:
            to = draw.randrange(stopped.kept)
            new[at], new[to] = new[to], new[at]
        forged(path, new)
        assert refused() or new[: stopped.kept] == bodies[: stopped.kept]


def an_edited_result(bodies: list[bytes]) -> list[bytes]:
    entries = [decode(body, "here") for body in bodies]
    at = next(n for n, each in enumerate(entries) if isinstance(each, Result))
    entries[at] = msgspec.structs.replace(entries[at], value=b"\x00", digest="")
    return [encode(each) for each in entries]


@pytest.mark.parametrize("case", ["of another run", "edited", "cut"])
def test_a_run_does_not_resume_with_another_record(
    stopped: Stopped, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does so with its own, once that is back."""
    runs = Runs(tmp_path / "run", monkeypatch)
    shutil.copytree(stopped.folder, runs.folder, dirs_exist_ok=True)
    own, path = stopped.record.read_bytes(), runs.folder / FILE
    bodies = [frame.body for frame in read_frames(path)[0]]
    new = {
        "of another run": stopped.other,
        "edited": an_edited_result(bodies),
        "cut": bodies[: stopped.kept - 1],
    }
    forged(path, new[case])
    before = path.read_bytes()
    with pytest.raises(RecordError, match=f"{FILE} does not match the checkpoint, which saw"):
        runs.start(script, every=2)
    assert path.read_bytes() == before
    path.write_bytes(own)
    assert runs.start(script, every=2) == stopped.result


def test_a_record_that_was_begun_later_answers_nothing(
    stopped: Stopped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has removed the record, and the run was killed before its next checkpoint."""
    runs = Runs(tmp_path / "run", monkeypatch)
    shutil.copytree(stopped.folder, runs.folder, dirs_exist_ok=True)
    (runs.folder / FILE).unlink()
    assert runs.start(script, dies=1, every=100) is None
    assert runs.start(script, every=100) is not None


ODD_VALUES = (
    b"",
    b"\xff" * 64,
    b"\xc0",
    b"\x91" * 5000 + b"\xc0",
    b"\xdd\xff\xff\xff\xff",
    b"\x00",
)


@pytest.mark.parametrize("value", ODD_VALUES)
def test_a_forged_record_with_a_forged_checkpoint_is_an_error_or_an_answer(
    stopped: Stopped, value: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes the whole folder decides what the script is answered, and nothing else."""
    runs = Runs(tmp_path / "run", monkeypatch)
    shutil.copytree(stopped.folder, runs.folder, dirs_exist_ok=True)
    path = runs.folder / FILE
    entries = [decode(frame.body, "here") for frame in read_frames(path)[0]]
    forged(
        path,
        [
            encode(msgspec.structs.replace(each, value=value) if isinstance(each, Result) else each)
            for each in entries
        ],
    )
    head = [frame.head for frame in read_frames(path)[0]][stopped.kept - 1].hex()
    for folder in runs.folder.glob("step-*"):
        recorded = json.loads((folder / "run.json").read_text())["recorded"]
        if recorded["entries"] == stopped.kept:
            reseal(folder, recorded={**recorded, "head": head})
    with pytest.raises(RecordError, match=FILE):
        runs.start(script, every=2)
