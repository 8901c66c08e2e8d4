"""Files that somebody made up, with digests that are right: each ends in one error."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import onefold
from onefold.errors import CheckpointError
from onefold.system.ownfiles import RECORD_BYTES
from tests.checkpoint.folders import names_in, reseal, seal, sealed
from tests.small import line, make_trainer, points
from tests.tables import for_each

DIGITS = "7" * 5000
DEEP = "[" * 100_000 + "]" * 100_000


def trainer_of() -> onefold.Trainer:
    model = line()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return make_trainer(model, optimizer=optimizer, schedule=schedule)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    trainer = trainer_of()
    trainer.average(decay=0.9)
    data = torch.utils.data.TensorDataset(*points(8))
    trainer.step(next(iter(trainer.loader(data, batch_size=4))))
    return trainer.save(tmp_path_factory.mktemp("original"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "kept" / original.name)


def refusal(folder: Path) -> str:
    """The one error, alike for the folder and its directory; nothing is changed."""
    trainer = trainer_of()
    before = trainer.fingerprint()
    said = []
    for place in (folder, folder.parent):
        with pytest.raises(CheckpointError) as caught:
            trainer.load(place)
        said.append(str(caught.value))
    assert trainer.fingerprint() == before
    assert str(folder) in said[1]
    return said[0]


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return record


def without(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        for name in names[:-1]:
            record = record[name]
        del record[names[-1]]

    return change


def put(value: object, *names: str | int) -> Callable[[dict[str, Any]], None]:
    def change(record: Any) -> None:
        for name in names[:-1]:
            record = record[name]
        record[names[-1]] = value

    return change


KIND = "kind of value"
CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    **{
        f"no {name}": without(name)
        for name in (
            *("format", "step", "run", "keep", "best", "scores", "files", "epoch", "seed"),
            *("shards", "clip_norm", "loss_scale", "fingerprint", "threads", "device"),
            *("libraries", "schedule", "optimizer", "position", "extra"),
        )
    },
    **{
        f"no optimizer.{name}": without("optimizer", name)
        for name in (
            *("class", "parameters", "settings", "settings_at_start", "tensors", "other_state"),
        )
    },
    "no torch among libraries": without("libraries", "torch"),
    "no state of the schedule": without("schedule", "state"),
    "a schedule that replaces a method": put(3, "schedule", "state", "step"),
    "a loader without samples": without("position", 0, "samples"),  # type: ignore[arg-type]
    "a loader of no batch size": put(0, "position", 0, "batch_size"),
    "passes that are none": put([[1]], "position", 0, "passes"),
    "a format that is text": put("1", "format"),
    "a format below": put(0, "format"),
    "a step that is a truth": put(True, "step"),
    "a step below 0": put(-1, "step"),
    "a step beyond": put(10**30, "step"),
    "a serial that is text": put("9", "serial"),
    "a serial beyond": put(10**30, "serial"),
    "keep of 0": put(0, "keep"),
    "a rule that is none": put("fastest loss", "best"),
    "scores of text": put({"loss": "low"}, "scores"),
    "scores in a list": put([1], "scores"),
    "no names of files": put({}, "files"),
    "files in a list": put(["model.safetensors"], "files"),
    "settings of parameters": put([], "optimizer", "settings", 0, "params"),
    "tensors that are not there": put(["exp_avg", "none"], "optimizer", "tensors", "weight"),
    "an average without a decay": without("average", "decay"),
    "an average that is a list": put([0.9, 1, 1], "average"),
    "a decay of 1": put(1.0, "average", "decay"),
    "a decay that is a truth": put(True, "average", "decay"),
    "a decay that is no number": put("nan", "average", "decay"),
    "updates each 0 steps": put(0, "average", "every"),
    "an average of less than no steps": put(-1, "average", "steps"),
    "an average beyond": put(10**30, "average", "steps"),
    "a parameter without an average": put(["exp_avg"], "optimizer", "tensors", "weight"),
    "an average that is no tensor": put(
        {"onefold.average": 3}, "optimizer", "other_state", "weight"
    ),
    "an unknown kind of value": put({KIND: "code", "items": []}, "extra"),
    "a float that is none": put({KIND: "float", "items": "x"}, "extra"),
    "a tensor of no type": put({KIND: "tensor", "dtype": "load", "items": [1]}, "extra"),
    "a tensor of an unknown type": put({KIND: "tensor", "dtype": "int7", "items": [1]}, "extra"),
    "a ragged tensor": put({KIND: "tensor", "dtype": "int64", "items": [[1], []]}, "extra"),
    "a set of lists": put({KIND: "set", "items": [[1]]}, "extra"),
    "a kind that is a list": put({KIND: []}, "extra"),
    "a kind without items": put({KIND: "tuple"}, "extra"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_record_of_the_wrong_form(folder: Path, kind: str) -> None:
    record = record_of(folder)
    CHANGES[kind](record)
    seal(folder, json.dumps({**record, "sha256": "0" * 64}, indent=2) + "\n")
    refusal(folder)


TEXTS: dict[str, Callable[[str], str]] = {
    "a number of 5,000 digits": lambda text: text.replace('"seed": 0', f'"seed": {DIGITS}'),
    "nested without end": lambda text: text.replace('"extra": null', f'"extra": {DEEP}'),
    "nested beside": lambda text: text.replace('"seed": 0', f'"seed": 0, "else": {DEEP}'),
    "nested as far as JSON is read": lambda text: text.replace(
        '"extra": null', f'"extra": {"[" * 900 + "]" * 900}'
    ),
    "no JSON": lambda text: text[:-10],
    "no UTF-8": lambda text: text.replace('"cpu"', '"\udcff"'),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_words_that_cannot_be_read(folder: Path, kind: str) -> None:
    text = json.dumps({**record_of(folder), "sha256": "0" * 64}, indent=2) + "\n"
    changed = TEXTS[kind](text)
    assert changed != text
    if kind == "no UTF-8":
        changed = text.replace("onefold", "\u00ff")
    seal(folder, changed)
    if kind == "no UTF-8":
        content = (folder / "run.json").read_bytes().replace("\u00ff".encode(), b"\xff\xfe")
        (folder / "run.json").write_bytes(content)
    refusal(folder)


NAMES = ["/dev/zero", "/etc/passwd", "../../etc/passwd", "..", "", "a/b", "run.json", "notes.txt"]


@pytest.mark.parametrize("name", NAMES)
def test_only_a_checkpoints_own_files_are_looked_at(folder: Path, name: str) -> None:
    record = record_of(folder)
    record["files"][name] = {"size": 1 << 40, "sha256": "0" * 64}
    reseal_record(folder, record)
    assert "as one of its files: expected model.safetensors" in refusal(folder)


def reseal_record(folder: Path, record: dict[str, Any]) -> None:
    """The zeros in the digest's place come first, whatever other zeros there are."""
    seal(folder, json.dumps({**record, "sha256": "0" * 64}, indent=2) + "\n")


def link(path: Path) -> None:
    target = path.rename(path.with_name("elsewhere"))
    target.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def turn_into(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


PLACES: dict[str, Callable[[Path], None]] = {
    "a link to itself as it was": link,
    "a link to a device": turn_into(lambda path: path.symlink_to("/dev/zero")),
    "a FIFO": turn_into(lambda path: os.mkfifo(path)),
    "a folder": turn_into(lambda path: path.mkdir()),
    "of 1 GB": lambda path: os.truncate(path, 1 << 30),
}


@pytest.mark.parametrize("name", ["run.json", "model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("kind", PLACES)
def test_what_is_no_plain_file_is_not_read(folder: Path, name: str, kind: str) -> None:
    PLACES[kind](folder / name)
    assert name in refusal(folder)


def headed(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


HEADERS = {
    "nothing": b"",
    "a header beyond the file": (1 << 60).to_bytes(8, "little") + b"{}",
    "no JSON": headed(b"{"),
    "nested without end": headed(b'{"a":' + b"[" * 100_000),
    "no offsets": headed(b'{"weight":{"dtype":"F32","shape":[1]}}', bytes(4)),
    "offsets beyond": headed(
        b'{"weight":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}', bytes(4)
    ),
    "a shape beyond": headed(
        b'{"weight":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}}', bytes(4)
    ),
    "a number of 5,000 digits": headed(
        b'{"weight":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}' % DIGITS.encode(), bytes(4)
    ),
    "an unknown type": headed(
        b'{"weight":{"dtype":"X9","shape":[1],"data_offsets":[0,4]}}', bytes(4)
    ),
}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("kind", HEADERS)
def test_tensors_of_the_wrong_form(folder: Path, name: str, kind: str) -> None:
    (folder / name).write_bytes(HEADERS[kind])
    reseal(folder)
    assert name in refusal(folder)
    if name == "model.safetensors":
        with pytest.raises(CheckpointError, match=r"is (a broken safetensors file|empty|no)"):
            onefold.load_weights(line(), folder)


def test_an_optimizer_of_other_shapes_is_refused_before_anything_is_changed(
    folder: Path,
) -> None:
    path = folder / "optimizer.safetensors"
    tensors = load_file(path)
    del tensors["weight.exp_avg"]
    save_file(tensors, path)
    reseal(folder)
    assert "weight.exp_avg is not among its tensors" in refusal(folder)


TENSORS: dict[str, Callable[[dict[str, torch.Tensor]], None]] = {
    "0.running_mean.onefold.average is not among": lambda t: t.pop(
        "0.running_mean.onefold.average"
    ),
    "0.running_mean.onefold.average is F32 (4,), expected F32 (3,)": lambda t: t.update(
        {"0.running_mean.onefold.average": torch.zeros(4)}
    ),
    "1.weight.onefold.average is F32 (), expected F32 (1, 3)": lambda t: t.update(
        {"1.weight.onefold.average": torch.zeros(())}
    ),
    "1.weight.onefold.average is F64 (1, 3), expected F32 (1, 3)": lambda t: t.update(
        {"1.weight.onefold.average": torch.zeros(1, 3, dtype=torch.float64)}
    ),
    "1.bias.onefold.average is not among": lambda t: t.pop("1.bias.onefold.average"),
}


@for_each("words", TENSORS)
def test_averages_of_the_wrong_form(words: str, tmp_path: Path) -> None:
    def normed() -> onefold.Trainer:
        return make_trainer(torch.nn.Sequential(torch.nn.BatchNorm1d(3), line()))

    trainer = normed()
    trainer.average(mean=True)
    trainer.step(points(8))
    folder = trainer.save(tmp_path)
    path = folder / "optimizer.safetensors"
    tensors = load_file(path)
    TENSORS[words](tensors)
    save_file(tensors, path)
    reseal(folder)
    trainer = normed()
    before = trainer.fingerprint()
    with pytest.raises(CheckpointError, match=re.escape(words)):
        trainer.load(folder)
    assert trainer.fingerprint() == before
    # They are not looked at where they are not wanted.
    trainer.load(folder, changed=["average"])


def test_a_model_beside_the_averages_of_another_form_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of()
    trainer.average(mean=True)
    with trainer.averaged():
        folder = trainer.save(tmp_path)
    path = folder / "training.safetensors"
    save_file({**load_file(path), "weight": torch.zeros(1, 9)}, path)
    reseal(folder)
    assert "weight is F32 (1, 9) in the checkpoint and F32 (1, 3)" in refusal(folder)


def test_what_is_loaded_is_what_can_be_saved(tmp_path: Path) -> None:
    extra: Any = None
    for _ in range(20):
        extra = {"in": [extra], (1, 2): ({3},)}
    trainer = trainer_of()
    trainer.save(tmp_path, extra=extra)
    assert trainer.load(tmp_path).extra == extra
    with pytest.raises(TypeError, match="is nested more than 50 levels deep"):
        trainer.save(tmp_path, extra=deep(60))
    with pytest.raises(ValueError, match="Keep large things out of extra"):
        trainer.save(tmp_path, extra="x" * RECORD_BYTES)
    assert trainer.load(tmp_path).extra == extra


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def test_weights_of_a_damaged_checkpoint_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for place in (folder, path):
        with pytest.raises(CheckpointError, match=r"is damaged: model\.safetensors has other"):
            onefold.load_weights(line(), place)
    copy = shutil.copytree(folder, folder.parent.parent / "best-model")
    with pytest.raises(CheckpointError, match=r"best-model is damaged: model\.safetensors"):
        onefold.load_weights(line(), copy)
    assert sealed(path)["size"] == len(content)


COUNTS: dict[str, tuple[str | int, ...]] = {
    "step": ("step",),
    "serial": ("serial",),
    "epoch": ("epoch",),
    "good steps": ("good_steps",),
    "steps of an average": ("average", "steps"),
    "batches": ("position", 0, "number"),
    "epoch of a loader": ("position", 0, "made_in_epoch"),
    "first pass": ("position", 0, "first_pass"),
    "empty passes": ("position", 0, "empty_passes"),
    "pass": ("position", 0, "passes", 0, 0),
    "samples of a pass": ("position", 0, "passes", 0, 1),
    "trials": ("microbatch_trials",),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_what_is_counted_on_from_a_checkpoint_can_be_read_again(folder: Path, kind: str) -> None:
    """Or is refused, when it is loaded or when it is saved; what was there stays."""
    record, most = record_of(folder), 2**62 - 1
    put(most, *COUNTS[kind])(record)
    reseal_record(folder, record)
    if kind == "step":
        folder = folder.rename(folder.with_name(f"step-{most}"))

    def loaded() -> tuple[onefold.Trainer, Any]:
        trainer = trainer_of()
        return trainer, trainer.loader(torch.utils.data.TensorDataset(*points(8)), batch_size=4)

    trainer, batches = loaded()
    refused = ""
    try:
        found = trainer.load(folder.parent)
        for _ in trainer.epochs(found.epoch + 2):
            for batch in batches:
                trainer.step(batch)
        trainer.save(folder.parent)
    except CheckpointError as error:
        refused = str(error)
    finally:
        trainer.close()
    if refused:
        assert re.search("damaged|does not fit|not written, as it could not be read again", refused)
        assert names_in(folder.parent) == {folder.name}
    else:
        assert loaded()[0].load(folder.parent).step == trainer.steps


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    """By the reader's own checks, whatever made it so."""
    trainer = trainer_of()
    trainer.step(points(8))
    kept = trainer.save(tmp_path)
    trainer.step(points(8))
    words = "step-00000002 is not written, as it could not be read again: expected threads to be"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.get_num_threads", lambda: 0)
        with pytest.raises(CheckpointError, match=words):
            trainer.save(tmp_path)
    assert names_in(tmp_path) == {kept.name}
    assert trainer_of().load(tmp_path).step == 1
    assert trainer.save(tmp_path).name == "step-00000002"
