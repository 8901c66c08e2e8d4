"""Files that somebody made up, with digests that are right: each ends in one error."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LRScheduler

import onefold
from onefold.core.settings import ALLOWED_AS
from onefold.errors import CheckpointError
from onefold.system.safe_files import RECORD_BYTES
from tests.checkpoint.folders import names_in, reseal, seal
from tests.small import line, make_trainer, points
from tests.tables import for_each

DIGITS = "7" * 5000
DEEP, FAR = ("[" * depth + "]" * depth for depth in (100_000, 900))
Path_ = tuple[str | int, ...]


def trainer_of(model: torch.nn.Module | None = None) -> onefold.Trainer:
    model = model or line()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return make_trainer(model, optimizer=optimizer, scheduler=scheduler)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    trainer = trainer_of()
    trainer.average(decay=0.9)
    data = torch.utils.data.TensorDataset(*points(8))
    trainer.step(next(iter(trainer.loader(data, batch_size=4))))
    return trainer.save(tmp_path_factory.mktemp("original"))


def copied(original: Path, place: Path) -> Path:
    return shutil.copytree(original, place / "kept" / original.name)


def refusal(folder: Path, trainer: onefold.Trainer | None = None) -> str:
    """The one error, alike for the folder and its directory; nothing is changed."""
    trainer = trainer or trainer_of()
    before = trainer.fingerprint()
    said = []
    for place in (folder, folder.parent):
        with pytest.raises(CheckpointError) as caught:
            trainer.load(place)
        said.append(str(caught.value))
    assert trainer.fingerprint() == before
    assert str(folder) in said[1]
    return said[0]


def record_of(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())


def text_of(record: dict[str, Any]) -> str:
    """The zeros in the digest's place come first, whatever other zeros there are."""
    return json.dumps({**record, "sha256": "0" * 64}, indent=2) + "\n"


OUT = object()


def put(record: Any, value: object, *names: str | int) -> None:
    """Have a record say something else in a place, or nothing where the value is `OUT`."""
    for name in names[:-1]:
        record = record[name]
    if value is OUT:
        del record[names[-1]]
    else:
        record[names[-1]] = value


KIND = "kind of value"
ODD = [OUT, None, True, -1, 0, 1 << 62, 10**30, 1.5, "x", [], [["x"]], {}, {"1": 2}, {KIND: "code"}]


def places_in(value: Any) -> list[Path_]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    inner = {key: each for key, each in pairs if isinstance(each, dict | list)}
    below = [(key, *rest) for key, each in inner.items() for rest in places_in(each)]
    return [*((key,) for key in (value if isinstance(value, dict) else range(len(value)))), *below]


COUNTED = ("step", "serial", "epoch", "good_steps", "average", "position", "microbatch_trials")


@given(data=st.data())
def test_whatever_a_record_says_it_is_loaded_or_refused_by_one_error(
    original: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """And what counts on from it can be read again, or is not written; what was there stays."""
    folder, trainer = copied(original, tmp_path_factory.mktemp("made-up")), trainer_of()
    record, before = record_of(folder), trainer.fingerprint()
    place = data.draw(st.sampled_from(places_in(record)))
    put(record, data.draw(st.sampled_from([*ODD, 2**62 - 1])), *place)
    seal(folder, text_of({**record, "later": "of a later version"}))
    batches = trainer.loader(torch.utils.data.TensorDataset(*points(8)), batch_size=4)
    said, last = one_error(lambda: trainer.load(folder).epoch + 1)
    if said:
        assert trainer.fingerprint() == before
    elif place[0] in COUNTED:
        for _ in trainer.epochs(last):
            for batch in batches:
                trainer.step(batch)
        said, _ = one_error(lambda: trainer.save(folder.parent))
        if said:
            assert "was not written because it cannot be read back" in said
            assert names_in(folder.parent) == {folder.name}
        else:
            assert trainer_of().load(folder.parent).step == trainer.steps


def one_error(call: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "", call()
    except CheckpointError as error:
        return str(error), None


TOP = (
    *("step", "run", "keep", "best", "scores", "files", "epoch", "seed", "shards", "clip_norm"),
    *("loss_scale", "fingerprint", "threads", "device", "libraries", "scheduler", "optimizer"),
    *("average", "place", "position"),
)
"""What every record has, apart from ``extra``, which may be anything."""


def damaged_value(kind: object, more: Any) -> dict[str, object]:
    return {KIND: kind, **more}


BAD: list[tuple[Path_, object, str]] = [
    *(((name,), OUT, f"{name} is missing") for name in {*TOP, *ALLOWED_AS, "extra"}),
    *(((name,), True, name) for name in TOP),
    *(
        (("optimizer", name), OUT, f"optimizer.{name} is missing")
        for name in ("class", "parameters", "settings", "settings_at_start", "tensors")
    ),
    *(
        (("position", 0, name), OUT, f"position[0].{name} is missing")
        for name in ("made_in_epoch", "number", "loader", "size", "passes")
    ),
    (("compile",), 1, "expected compile to be `bool`, but got 1"),
    (("format",), "1", "format"),
    (("step",), -1, "expected step to be `int` >= 0, but got -1"),
    (("step",), 1 << 62, f"step to be `int` <= {(1 << 62) - 1}, but got {1 << 62}"),
    (("step",), "\ud800", r"the text '\ud800' has the wrong type"),
    (("serial",), 10**99, "got 1000000000000"),
    (("keep",), 0, "expected keep to be `int` >= 1, but got 0"),
    (
        ("scores",),
        {"loss": True},
        "expected scores[...] to be `int | float`, but got {'loss': True}",
    ),
    (("files",), {}, "its files do not include model.safetensors and optimizer.safetensors"),
    (
        ("files", "model.safetensors", "sha256"),
        "00",
        "expected files[...].sha256 to be `str` of length",
    ),
    (
        ("files", "model.safetensors", "size"),
        -1,
        "expected files[...].size to be `int` >= 0, but got {",
    ),
    (("files", "x" * 500), {}, "files[...].size is missing"),
    *(
        (
            ("files", name),
            {"size": 1 << 40, "sha256": "0" * 64},
            "among its files, but allowed are only m",
        )
        for name in ("/dev/zero", "../../etc/passwd", "..", "", "a/b", "run.json", "notes.txt")
    ),
    (("seed",), 1 << 64, "seed must be below"),
    (("libraries",), {}, "libraries.torch is missing"),
    (("scheduler", "state", "step"), 3, "StepLR contains step, which is not state"),
    (
        ("scheduler", "settings_at_start"),
        {"a": {KIND: "code"}},
        "scheduler: a value in the checkpoint is damaged",
    ),
    (("optimizer", "settings_at_start", 0, "lr"), {KIND: "code"}, "unknown kind of value 'code'"),
    (("scheduler", "every"), "week", "scheduler.every to be `str` matching regex"),
    (
        ("optimizer", "parameters"),
        ["weight"],
        "optimizer.parameters[0] to be `array`, but got 'weight'",
    ),
    (
        ("optimizer", "settings", 0, "params"),
        [],
        "optimizer: the settings of the optimizer must not",
    ),
    (("optimizer", "settings", 0, "lr"), {KIND: "code"}, "unknown kind of value 'code'"),
    (("optimizer", "tensors", "weight"), ["exp_avg"], "weight"),  # without its average
    (("optimizer", "other_state", "weight"), {"onefold.average": 3}, "weight"),
    (
        ("position", 0, "passes", "begun"),
        [[0, -1]],
        "position[0].passes.begun[0][1] to be `int` >= 0, but got -1",
    ),
    (("position", 0, "size", "samples"), OUT, "position[0].size.samples is missing"),
    (("average", "decay"), 1.0, "average.decay"),
    (("average", "every"), 0, "average.every"),
    *(
        (("extra",), damaged_value(kind, more), "a value in the checkpoint is damaged")
        for kind, more in [
            *(("code", {"items": []}), ("float", {"items": "x"}), ("set", {"items": [[1]]})),
            *(("tensor", {"dtype": kind, "items": [1]}) for kind in ("load", "int7")),
            *(("tensor", {"dtype": "int64", "items": [[1], []]}), ([], {}), ("tuple", {})),
        ]
    ),
]


@for_each(("names", "value", "words"), BAD)
def test_a_record_of_the_wrong_form_is_refused_in_words(
    original: Path, tmp_path: Path, names: Path_, value: object, words: str
) -> None:
    folder = copied(original, tmp_path)
    record = record_of(folder)
    put(record, value, *names)
    seal(folder, text_of(record))
    assert words in refusal(folder)


TEXTS: dict[str, Callable[[str], str]] = {
    "a number of 5,000 digits": lambda text: text.replace('"seed": 0', f'"seed": {DIGITS}'),
    "a list": lambda text: f"[{text}]",
    "nested without end": lambda text: text.replace('"extra": null', f'"extra": {DEEP}'),
    "nested beside": lambda text: text.replace('"seed": 0', f'"seed": 0, "else": {DEEP}'),
    "nested as far as JSON is read": lambda text: text.replace('"extra": null', f'"extra": {FAR}'),
    "no JSON": lambda text: text[:-10],
}


@for_each("kind", TEXTS)
def test_words_that_cannot_be_read(original: Path, tmp_path: Path, kind: str) -> None:
    folder = copied(original, tmp_path)
    text = text_of(record_of(folder))
    changed = TEXTS[kind](text)
    assert changed != text
    seal(folder, changed)
    refusal(folder)


def headed(header: str, data: bytes = bytes(4)) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + data


def of_weight(dtype: str, shape: str, stop: int) -> bytes:
    return headed(f'{{"weight":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[0,{stop}]}}}}')


HEADERS = {
    "nothing": b"",
    "a header beyond the file": (1 << 60).to_bytes(8, "little") + b"{}",
    "no JSON": headed("{"),
    "nested without end": headed('{"a":' + "[" * 100_000),
    "no offsets": headed('{"weight":{"dtype":"F32","shape":[1]}}'),
    "offsets beyond": of_weight("F32", "9", 36),
    "a shape beyond": of_weight("F32", "4611686018427387904,4", 4),
    "a number of 5,000 digits": of_weight("F32", DIGITS, 4),
    "an unknown type": of_weight("X9", "1", 4),
}


@for_each("name", ["model.safetensors", "optimizer.safetensors"])
@for_each("kind", HEADERS)
def test_tensors_of_the_wrong_form(original: Path, tmp_path: Path, name: str, kind: str) -> None:
    folder = copied(original, tmp_path)
    (folder / name).write_bytes(HEADERS[kind])
    reseal(folder)
    assert name in refusal(folder)
    if name == "model.safetensors":
        with pytest.raises(CheckpointError, match=r"is (a broken safetensors file|empty|no)"):
            onefold.load_weights(line(), folder)


def normed() -> onefold.Trainer:
    return make_trainer(torch.nn.Sequential(torch.nn.BatchNorm1d(3), line()))


@for_each(
    ("file", "name", "value", "words"),
    [
        ("optimizer", "1.weight.momentum_buffer", None, "is missing from its tensors"),
        ("optimizer", "0.running_mean.onefold.average", None, "is not among"),
        (
            "optimizer",
            "0.running_mean.onefold.average",
            torch.zeros(4),
            "is F32 (4,), but must be F3",
        ),
        (
            "optimizer",
            "1.weight.onefold.average",
            torch.zeros(1, 3).double(),
            "is F64 (1, 3), but must be F32",
        ),
        ("training", "1.weight", torch.zeros(1, 9), "is F32 (1, 9) in the checkpoint but F32 (1"),
    ],
)
def test_tensors_of_another_kind_are_refused(
    tmp_path: Path, file: str, name: str, value: torch.Tensor | None, words: str
) -> None:
    trainer = normed()
    trainer.average(mean=True)
    trainer.step(points(8))
    with trainer.averaged():
        folder = trainer.save(tmp_path / "kept")
    path = folder / f"{file}.safetensors"
    tensors = {**load_file(path), name: value}
    save_file({each: value for each, value in tensors.items() if value is not None}, path)
    reseal(folder)
    assert f"{name} {words}" in refusal(folder, normed())


def test_what_is_loaded_is_what_can_be_saved(tmp_path: Path) -> None:
    extra: Any = None
    for _ in range(20):
        extra = {"in": [extra], (1, 2): ({3},)}
    deep = json.loads("[" * 60 + "]" * 60)
    trainer = trainer_of()
    trainer.save(tmp_path, extra=extra)
    assert trainer.load(tmp_path).extra == extra
    with pytest.raises(TypeError, match="is nested more than 50 levels deep"):
        trainer.save(tmp_path, extra=deep)
    with pytest.raises(ValueError, match="Keep large objects out of extra"):
        trainer.save(tmp_path, extra="x" * RECORD_BYTES)
    assert trainer.load(tmp_path).extra == extra


def test_weights_of_a_damaged_checkpoint_are_refused(original: Path, tmp_path: Path) -> None:
    folder = copied(original, tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    copy = shutil.copytree(folder, tmp_path / "best-model")
    for place in (folder, path, copy):
        with pytest.raises(CheckpointError, match=r"is damaged: model\.safetensors changed after"):
            onefold.load_weights(line(), place)


def whole(trainer: onefold.Trainer, place: Path) -> dict[str, Any]:
    """All that a trainer goes on with: bits of tensors, settings, scheduler, place in the data."""
    folder = trainer.save(place)
    record = record_of(folder)
    kept = {name: record[name] for name in record.keys() - {"serial", "sha256", "files", "time"}}
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} | kept


def flipped(folder: Path, file: str, name: str) -> None:
    tensors = load_file(folder / file)
    tensors[name].view(torch.uint8).flatten()[0] ^= 1
    save_file(tensors, folder / file)
    reseal(folder)


def without(folder: Path, file: str, name: str) -> None:
    save_file({n: v for n, v in load_file(folder / file).items() if n != name}, folder / file)
    reseal(folder)


def says(folder: Path, value: object, *names: str | int) -> None:
    record = record_of(folder)
    put(record, value, *names)
    seal(folder, text_of(record))


STATE = "scheduler", "state"
LATE: dict[str, Callable[[Path], None]] = {
    "fingerprint": lambda folder: says(folder, "0" * 16, "fingerprint"),
    "weight": lambda folder: flipped(folder, "model.safetensors", "1.weight"),
    "buffer": lambda folder: flipped(folder, "model.safetensors", "0.running_var"),
    "no state": lambda folder: without(folder, "optimizer.safetensors", "1.weight.exp_avg"),
    "no weight": lambda folder: without(folder, "model.safetensors", "1.weight"),
    "no scheduler": lambda folder: says(folder, [["x"]], *STATE),
    "odd scheduler": lambda folder: says(
        folder, {"last_epoch": 7, "more": 1, "_schedulers": 3}, *STATE
    ),
    "half a scheduler": lambda folder: says(folder, {"last_epoch": 7}, *STATE),
}


@for_each("kind", LATE)
def test_what_fails_while_it_is_loaded_leaves_everything_as_it_was(
    tmp_path: Path, kind: str
) -> None:
    def made() -> onefold.Trainer:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), line())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        parts: list[LRScheduler] = [torch.optim.lr_scheduler.StepLR(optimizer, n) for n in (2, 3)]
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])
        trainer = make_trainer(model, optimizer=optimizer, scheduler=scheduler)
        trainer.average(decay=0.9)
        return trainer

    torch.set_num_threads(1)
    saved, trainer = made(), made()
    for batch in (points(8), points(12)):
        saved.step(batch)
    trainer.step(points(12))
    folder = saved.save(tmp_path / "kept")
    LATE[kind](folder)
    before = whole(trainer, tmp_path / "before")
    with pytest.raises(CheckpointError):
        trainer.load(folder)
    assert whole(trainer, tmp_path / "after") == before
    trainer.step(points(8))
