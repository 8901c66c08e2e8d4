"""A trained run on new files: what is read, in which order, what is said of it and where."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import onefold
from onefold.errors import CheckpointError, DataError, LaunchError
from onefold.jobs.finetune import best_checkpoint
from onefold.jobs.predict import Prediction, PredictOptions, predict_run, write_prediction
from tests import simulated
from tests.checkpoint.folders import reseal
from tests.masked import grey, on_cpu, run_here, save, save_pairs
from tests.tables import for_each

pillow = pytest.importorskip("PIL.Image", reason='needs pip install "onefold[images]"')
NEEDS_TEXT = 'needs pip install "onefold[text]"'
pytest.importorskip("tokenizers", reason=NEEDS_TEXT)
# Some of what it imports sets variables of the environment: here, before any test looks.
pytest.importorskip("transformers.models.roberta.modeling_roberta", reason=NEEDS_TEXT)

CLASSES = ("dark, all", "light", 'mid "way"')
FILMS = ["a fine film ", " dull", "so  dull", "fine, fine", "a film", '"fine"', "très fine", "du"]
SMALL: dict[str, dict[str, Any]] = {
    "classify": {"model": "lenet", "epochs": 3, "lr": 0.01},
    "segment": {"encoder": "resnet18", "width": 4, "crop": 32, "epochs": 1},
    "text": {"vocabulary": 300, "width": 16, "layers": 1, "heads": 2, "max_length": 16},
}
FACTS = {"classify": "picture_model", "segment": "mask_model", "text": "text_model"}
KINDS = tuple(SMALL)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each kind: pictures of three brightnesses, masks of several sizes, texts with spaces."""
    folder = tmp_path_factory.mktemp("data")
    for number, name in enumerate(CLASSES):
        for part, seeds in (("train", range(4)), ("test", range(4, 9))):
            for seed in seeds:
                pixels = grey(16, 16, seed=seed) // 3 + 85 * number
                save(folder / "classify" / part / name / f"{seed}.png", pixels.astype(np.uint8))
    save_pairs(folder / "segment" / "train", [(40, 40)] * 4)
    save_pairs(folder / "segment" / "test", [(40, 30), (33, 70), (20, 20)], first=4)
    (folder / "text").mkdir()
    lines = [f"{text}\t{'good' if 'fine' in text else 'bad'}\n" for text in FILMS]
    trained = [f"{number} {line}" for number in range(2) for line in lines]
    (folder / "text" / "train.tsv").write_text("".join(trained), encoding="utf-8")
    (folder / "text" / "dev.tsv").write_text("".join(lines), encoding="utf-8")
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Path]) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    usual = {"epochs": 2, "batch_size": 4, "shards": 4}
    return {
        kind: run_here(kind, folder / kind, data=str(data[kind]), **{**usual, **SMALL[kind]})
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def tested(data: dict[str, Path]) -> dict[str, Path]:
    """What each kind is tested with."""
    masks = data["segment"] / "test" / "images"
    return {
        "classify": data["classify"] / "test",
        "segment": masks,
        "text": data["text"] / "dev.tsv",
    }


@pytest.fixture
def classifier(runs: dict[str, Path]) -> Path:
    return runs["classify"]


def direct(main: Callable[..., Any], *, devices: str, args: Sequence[Any]) -> Any:
    """Instead of new processes, this one computes."""
    return main(*args)


@pytest.fixture
def _here() -> Iterator[None]:
    with on_cpu() as patch:
        patch.setattr(onefold, "launch", direct)
        yield


@pytest.fixture
def _nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be started."""
    monkeypatch.setattr(onefold, "launch", lambda *_, **__: pytest.fail("a device was started"))


here = pytest.mark.usefixtures("_here")
nowhere = pytest.mark.usefixtures("_nowhere")


def predicted(run: Path, *paths: Path, **chosen: Any) -> Prediction:
    return predict_run(run, paths, PredictOptions(**chosen))


def names(prediction: Prediction) -> list[str]:
    return [row["file"] for row in prediction.rows]


def written(prediction: Prediction, **chosen: Any) -> str:
    screen = io.StringIO()
    assert write_prediction(prediction, PredictOptions(**chosen), screen) is None
    return screen.getvalue()


def facts_of(run: Path) -> Any:
    return json.loads((run / "run.json").read_text())


def changed(run: Path, folder: Path, change: Callable[[Any], object]) -> Path:
    """A copy of a run that says something else."""
    copy = shutil.copytree(run, folder)
    facts = facts_of(run)
    change(facts)
    (copy / "run.json").write_text(json.dumps(facts))
    return copy


def drawn(folder: Path) -> dict[Path, bytes]:
    """All files of a folder."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.read_bytes() for path in found}


# The same as in training, and for everyone.


@here
def test_every_kind_gets_the_scores_of_the_run(
    runs: dict[str, Path], tested: dict[str, Path], tmp_path: Path
) -> None:
    def scores(kind: str) -> dict[str, float]:
        best = facts_of(runs[kind])["best"]["epoch"]
        lines = map(json.loads, (runs[kind] / "metrics.jsonl").read_text().splitlines())
        (found,) = (line for line in lines if line["kind"] == "epoch" and line["epoch"] == best)
        return dict(found["scores"])

    rows = predicted(runs["classify"], tested["classify"]).rows
    right = [row["classes"][0]["class"] == Path(row["file"]).parent.name for row in rows]
    assert sum(right) / 15 == pytest.approx(scores("classify")["accuracy"])

    rows = predicted(runs["text"], tested["text"]).rows
    labels = [line.split("\t")[1] for line in tested["text"].read_text().splitlines()]
    right = [row["classes"][0]["class"] == label for row, label in zip(rows, labels, strict=True)]
    assert [row["text"] for row in rows] == FILMS
    assert sum(right) / 8 == pytest.approx(scores("text")["accuracy"])
    shown = json.loads((runs["text"] / "examples.json").read_text())["samples"]
    assert [row["classes"][0] for row in rows] == [
        {"class": each["predicted"], "confidence": each["confidence"]} for each in shown
    ]

    overlap = both = 0
    for row in predicted(runs["segment"], tested["segment"], output=tmp_path / "masks").rows:
        said = np.asarray(pillow.open(tmp_path / "masks" / row["mask"])) > 127
        meant = np.asarray(pillow.open(tested["segment"].parent / "masks" / row["file"])) > 127
        overlap, both = overlap + (said & meant).sum(), both + said.sum() + meant.sum()
        assert row["share"] == said.mean()
    assert overlap / (both - overlap) == pytest.approx(scores("segment")["iou"])


@here
@pytest.mark.parametrize("job", ["classify", "segment"])
def test_pictures_of_twelve_bits_are_read_as_in_training(job: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for number in range(10):
        values = np.random.default_rng(number).integers(0, 200 + 400 * number, (40, 40))
        pixels = values.astype(np.uint16)
        if job == "segment":
            save(data / "images" / f"{number}.png", pixels)
            save(data / "masks" / f"{number}.png", (values > 150).astype(np.uint8) * 255)
        else:
            save(data / f"class {number % 2}" / f"{number}.png", pixels)
    options = {**SMALL[job], "epochs": 1, "batch_size": 4, "shards": 2}
    run = run_here(job, tmp_path / "run", data=str(data), **options)
    assert facts_of(run)[FACTS[job]]["white"] == 4095
    shown = json.loads((run / "examples.json").read_text())["samples"][0]
    (picture,) = data.rglob(f"images/{shown['name']}" if job == "segment" else shown["name"])
    row = predicted(run, picture, output=tmp_path / "masks" if job == "segment" else None).rows[0]
    if job == "segment":
        expected = pillow.open(run / shown["prediction"])
        assert np.array_equal(pillow.open(tmp_path / "masks" / row["mask"]), expected)
    else:
        assert row["classes"][0]["confidence"] == pytest.approx(shown["confidence"], abs=1e-6)


@here
def test_a_run_of_before_that_knows_no_white_still_predicts(
    classifier: Path, tested: dict[str, Path], tmp_path: Path
) -> None:
    old = changed(classifier, tmp_path / "old", lambda facts: facts["picture_model"].pop("white"))
    assert predicted(old, tested["classify"]) == predicted(classifier, tested["classify"])


@here
@pytest.mark.parametrize(("kind", "batch_size"), [("classify", 1), ("classify", 4), ("segment", 5)])
def test_the_batch_size_changes_nothing_but_roundings(
    runs: dict[str, Path], tested: dict[str, Path], tmp_path: Path, kind: str, batch_size: int
) -> None:
    usual, other = (
        predicted(
            runs[kind],
            tested[kind],
            batch_size=size,
            top=3,
            output=tmp_path / str(size) if kind == "segment" else None,
        ).rows
        for size in (None, batch_size)
    )
    for one, two in zip(usual, other, strict=True):
        assert one["file"] == two["file"]
        if kind == "segment":
            assert 0 < one["share"] < 1
            assert one["share"] == pytest.approx(two["share"], abs=0.002)
            continue
        sure = [each["confidence"] for each in one["classes"]]
        assert sure == sorted(sure, reverse=True)
        assert sum(sure) == pytest.approx(1, abs=1e-6)
        of_each = [{c["class"]: c["confidence"] for c in row["classes"]} for row in (one, two)]
        assert of_each[0] == pytest.approx(of_each[1], abs=1e-6)
        assert set(of_each[0]) == set(CLASSES)


@pytest.mark.parametrize("kind", [*KINDS, pytest.param("processes", marks=pytest.mark.processes)])
def test_several_devices_give_the_bytes_of_one(
    runs: dict[str, Path], tested: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    started = onefold.launch if kind == "processes" else simulated.launch
    kind = "segment" if kind == "processes" else kind
    for devices, launch in ((1, direct), (3, started)):
        output = tmp_path / str(devices)
        if kind != "segment":
            output.mkdir()
            output /= "rows.csv"
        options = PredictOptions(devices=f"cpu:{devices}", output=output, batch_size=5, top=3)
        with on_cpu() as patch:
            patch.setattr(onefold, "launch", launch)
            prediction = predict_run(runs[kind], [tested[kind]], options)
        write_prediction(prediction, options, io.StringIO())
    one = drawn(tmp_path / "1")
    assert one == drawn(tmp_path / "3")
    assert len(one) == (4 if kind == "segment" else 1)


# What is read.


@here
def test_each_picture_is_told_once_in_the_order_of_the_input(
    classifier: Path, tested: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("b/2.png", "b/10.png", "b/a/1.png", "z.png", "a.png"):
        save(tmp_path / name, grey(16, 16))
    again = tmp_path / "b" / "." / "2.png"
    paths = [tmp_path / "z.png", tmp_path / "b", again, tmp_path / "a.png"]
    told = ["z.png", "10.png", "2.png", "a/1.png", "a.png"]
    assert names(predicted(classifier, *paths)) == told
    # Of one name in two folders.
    one, two = (save(tmp_path / folder / "x.png", grey(16, 16)) for folder in ("c", "d"))
    assert names(predicted(classifier, one.parent, two)) == [str(one), str(two)]
    (tmp_path / "linked").symlink_to(tested["classify"])
    linked, straight = (predicted(classifier, p) for p in (tmp_path / "linked", tested["classify"]))
    assert linked == straight


@here
def test_any_size_kind_and_name_of_picture_is_read(classifier: Path, tmp_path: Path) -> None:
    folder = tmp_path / "all"
    save(folder / "large.jpg", grey(50, 90, 3))
    save(folder / "small.bmp", grey(3, 4))
    save(folder / "sheer.PNG", grey(16, 16, 4))
    for name in ODD[:4]:
        save(folder / name, grey(16, 16))
    save(folder / "no picture.txt", grey(16, 16), format="PNG")
    expected = sorted([*ODD[:4], "large.jpg", "sheer.PNG", "small.bmp"])
    assert sorted(names(predicted(classifier, folder))) == expected
    assert names(predicted(classifier, folder / "no picture.txt")) == ["no picture.txt"]


@here
def test_what_cannot_be_read_is_left_out_when_asked(runs: dict[str, Path], tmp_path: Path) -> None:
    pictures, texts = tmp_path / "pictures", tmp_path / "x.txt"
    for name in ("a.png", "b.png", "c.png"):
        save(pictures / name, grey(16, 16))
    (pictures / "b.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=f"1 of .* cannot be used:\n  {pictures}/b.png: "):
        predicted(runs["classify"], pictures)
    prediction = predicted(runs["classify"], pictures, skip_bad=True)
    assert names(prediction) == ["a.png", "c.png"]
    assert [bad.path for bad in prediction.left_out] == [pictures / "b.png"]
    texts.write_bytes(b"fine\n\n\tgood\nd\xfcll\ndull\n")
    with pytest.raises(DataError, match=r"^3 of the files and lines cannot be used") as caught:
        predicted(runs["text"], texts)
    for told in ("line 2: expected a text", "line 3: expected a text", "line 4: expected UTF-8"):
        assert f"{texts}, {told}" in str(caught.value)
    prediction = predicted(runs["text"], texts, skip_bad=True)
    assert [(row["line"], row["text"]) for row in prediction.rows] == [(1, "fine"), (5, "dull")]
    assert [bad.line for bad in prediction.left_out] == [2, 3, 4]


@here
@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n \n"])
def test_texts_are_read_as_in_training(runs: dict[str, Path], tmp_path: Path, end: str) -> None:
    lines = '\ufeff a fine film \r\ndull\tgood\n"so, so"\rdull' + end
    (tmp_path / "x.txt").write_bytes(lines.encode())
    (tmp_path / "a.txt").write_text("fine\n")
    rows = predicted(runs["text"], tmp_path / "x.txt", tmp_path / "a.txt").rows
    assert [(row["file"], row["line"], row["text"]) for row in rows] == [
        (str(tmp_path / "x.txt"), 1, " a fine film "),
        (str(tmp_path / "x.txt"), 2, "dull"),
        (str(tmp_path / "x.txt"), 3, '"so, so"\rdull'),
        (str(tmp_path / "a.txt"), 1, "fine"),
    ]


# What is refused before any device is started.


@nowhere
def test_nothing_to_look_at_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_bytes(b"\n")
    save(tmp_path / "bad" / "x.png", grey(2, 2)).write_bytes(b"")
    for kind, name, chosen, words in (
        ("classify", "empty", {}, "empty: expected something to look at, found none"),
        ("text", "empty.txt", {}, r"empty\.txt: expected something to look at"),
        ("classify", "bad", {"skip_bad": True}, "expected something to look at"),
        ("classify", "x", {}, "x: expected a file or folder, there is none"),
        ("text", "", {}, f"{tmp_path}: expected a file with one text a line"),
    ):
        with pytest.raises(DataError, match=words):
            predicted(runs[kind], tmp_path / name, **chosen)


@nowhere
@for_each(
    ("content", "message"),
    [
        (None, "expected the folder of a run, with run.json in it"),
        ("{", "run.json: expected JSON"),
        ('{"job": "digits"}', "expected a run of classify, segment, text, got digits"),
        ("{}", "expected a run of classify, segment, text, got None"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(DataError, match=f"^{tmp_path}.*{message}"):
        predicted(tmp_path, tmp_path)


@nowhere
def test_a_run_without_weights_is_refused(classifier: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"job": "classify", "best": null}')
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no best weights"):
        predicted(tmp_path, tmp_path)
    with pytest.raises(CheckpointError, match="expected the run's checkpoints, found"):
        predicted(tmp_path, tmp_path, weights="last")
    run = shutil.copytree(classifier, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    message = f"{run}/checkpoints/step-.*: expected the run's best weights there, found nothing"
    with pytest.raises(CheckpointError, match=message):
        predicted(run, tmp_path)


@nowhere
def test_an_output_that_does_not_suit_the_kind_is_refused(
    runs: dict[str, Path], tested: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for kind, output, words in (
        ("segment", None, "expected --output with a folder for the masks"),
        ("segment", tmp_path / "file", "expected a folder for the masks, this is a file"),
        ("classify", tmp_path, f"--output {tmp_path}: expected a file"),
        ("classify", Path("/proc/self/x.csv"), "expected a folder that can be written to, got .*:"),
        ("segment", Path("/proc/x"), "to, got .*: --output names another one"),
    ):
        error = LaunchError if "/proc" in str(output) else ValueError
        with pytest.raises(error, match=words):
            predicted(runs[kind], tested[kind], output=output)


@nowhere
@for_each("other", ["a/x.jpg", "b/x.png"])
def test_two_masks_of_one_name_are_refused(
    runs: dict[str, Path], tmp_path: Path, other: str
) -> None:
    one, two = (save(tmp_path / name, grey(8, 8)) for name in ("a/x.png", other))
    with pytest.raises(DataError, match=r"x\..* and .*x\..* would have a mask .* x\.png"):
        predicted(runs["segment"], one, two, output=tmp_path / "masks")


@nowhere
def test_inputs_are_not_written_over(runs: dict[str, Path], tmp_path: Path) -> None:
    picture = save(tmp_path / "a" / "x.png", grey(8, 8))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for output in ("a", "a/../a", "link"):
        with pytest.raises(ValueError, match=f"expected another place, {picture} would be lost"):
            predicted(runs["segment"], tmp_path / "a", output=tmp_path / output)
    (tmp_path / "x.txt").write_text("fine\n")
    with pytest.raises(ValueError, match=r"expected another place, .*x\.txt would be lost"):
        predicted(runs["text"], tmp_path / "x.txt", output=tmp_path / "x.txt")


@for_each(
    ("name", "value", "expected"),
    [
        ("top", 0, "1 or more"),
        ("batch_size", 0, "1 or more"),
        ("workers", -1, "0 or more"),
        ("workers", 10**6, "1,024 or less"),
        ("top", 10**12, "1,000,000,000 or less"),
    ],
)
def test_options_out_of_range_are_refused(name: str, value: int, expected: str) -> None:
    with pytest.raises(
        ValueError, match=f"^--{name.replace('_', '-')} {value}: expected {expected}"
    ):
        PredictOptions(**{name: value})


# Which weights.


@here
def test_the_best_and_the_last_weights_are_those_of_the_run(
    classifier: Path, tested: dict[str, Path], tmp_path: Path
) -> None:
    where = "checkpoints/step-00000002"
    run = changed(classifier, tmp_path / "run", lambda said: said["best"].update(checkpoint=where))
    for step in (2, 10_000_000_000):
        copy = run / "checkpoints" / f"step-{step:08d}"
        reseal(shutil.copytree(best_checkpoint(classifier), copy), step=step)
    file = run / where / "model.safetensors"
    save_file({name: torch.zeros_like(value) for name, value in load_file(file).items()}, file)
    reseal(file.parent)
    best, last, unchanged = (
        predicted(which, tested["classify"], weights=weights, top=3).rows
        for which, weights in ((run, "best"), (run, "last"), (classifier, "best"))
    )
    # Of equal classes the first is told first.
    third = torch.tensor(1.0).div(3).item()
    alike = [{"class": name, "confidence": third} for name in CLASSES]
    assert [row["classes"] for row in best] == [alike] * 15
    assert last == unchanged != best


def flip(file: Path) -> str:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    return r"step-\d+ is damaged: model.safetensors has other bytes than were written"


def remove_record(file: Path) -> str:
    (file.parent / "run.json").unlink()
    return r"step-\d+ is damaged: run.json is missing"


def poison(file: Path) -> str:
    tensors = load_file(file)
    for value in tensors.values():
        value.view(-1)[0] = float("inf")
    save_file(tensors, file)
    reseal(file.parent)
    return "step-[0-9]+: .* has values that are NaN or infinite"


@here
@for_each("damage", [flip, remove_record, poison])
@for_each("weights", ["best", "last"])
def test_damaged_weights_are_refused_by_name(
    classifier: Path,
    tested: dict[str, Path],
    tmp_path: Path,
    weights: str,
    damage: Callable[[Path], str],
) -> None:
    run = shutil.copytree(classifier, tmp_path / "run")
    for file in run.glob("checkpoints/step-*/model.safetensors"):
        message = damage(file)
    with pytest.raises(CheckpointError, match=message):
        predicted(run, tested["classify"], weights=weights)


@for_each(
    "named", ["../other", "checkpoints/../../other", "/etc", "checkpoints/step-1", 7, ["a"], ""]
)
def test_a_best_checkpoint_outside_the_run_is_refused(
    classifier: Path, tmp_path: Path, named: object
) -> None:
    run = changed(classifier, tmp_path / "run", lambda said: said["best"].update(checkpoint=named))
    shutil.copytree(best_checkpoint(classifier), tmp_path / "other")
    with pytest.raises(DataError, match="expected the best checkpoint to be one of the run"):
        predicted(run, tmp_path)


@here
@for_each(
    ("kind", "changes"),
    [
        ("classify", {"picture_model": 3}),
        ("classify", {"picture_model": {}}),
        *(("classify", {"shards": each}) for each in ("two", -1, 1e300)),
        ("classify", {"name": ["lenet"]}),
        ("classify", {"name": "resnet7"}),
        ("classify", {"classes": ""}),
        ("classify", {"mean": ["a"]}),
        ("classify", {"later": 3}),
        ("segment", {"encoder": {}}),
        ("segment", {"encoder": "resnet7"}),
        ("segment", {"width": [4]}),
        ("segment", {"width": 10**9}),
        ("segment", {"threshold": [0.5]}),
        ("segment", {"white": "x"}),
        ("text", {"max_length": -1}),
        ("text", {"max_length": "long"}),
        ("text", {"pad_id": [1]}),
    ],
)
def test_a_run_that_says_what_none_says_is_refused(
    kind: str,
    changes: dict[str, object],
    runs: dict[str, Path],
    tested: dict[str, Path],
    tmp_path: Path,
) -> None:
    outer = {FACTS[kind], "shards"} & set(changes)
    run = changed(
        runs[kind],
        tmp_path / "run",
        lambda said: (said if outer else said[FACTS[kind]]).update(changes),
    )
    with pytest.raises(DataError, match=r"run\.json: expected what the run has kept of its model"):
        predicted(run, tested[kind], output=tmp_path / "out")


@here
def test_a_text_model_of_another_run_is_refused(
    runs: dict[str, Path], tested: dict[str, Path], tmp_path: Path
) -> None:
    def change(said: Any, **values: object) -> None:
        said.update({name: values.pop(name) for name in ("classes",) if name in values})
        said["text_model"].update(values)

    for number, values in enumerate(({"classes": ["good"]}, {"pad_id": 10**6}, {"pad_id": -1})):
        run = changed(runs["text"], tmp_path / str(number), lambda said: change(said, **values))  # noqa: B023
        with pytest.raises(DataError, match=r"expected model_config\.json and run\.json to be of"):
            predicted(run, tested["text"])
    run = shutil.copytree(runs["text"], tmp_path / "run")
    (run / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"kept of its model, .*expected a tokenizer as JSON"):
        predicted(run, tested["text"])


# What is written.


ODD = ["a,b.png", 'say "x".png', "two\nlines.png", " .png", "é.png", os.fsdecode(b"\xff.png")]
FOUND = [{"class": CLASSES[2], "confidence": 0.75}, {"class": CLASSES[0], "confidence": 0.25}]


def odd() -> Prediction:
    return Prediction([{"file": name, "classes": FOUND} for name in ODD], [])


def test_names_of_all_kinds_come_back(tmp_path: Path) -> None:
    output = tmp_path / "new" / "sub" / "x.csv"
    assert write_prediction(odd(), PredictOptions(output=output), io.StringIO()) == output
    with output.open(newline="", errors="surrogateescape", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == ODD
    told = {"class": CLASSES[2], "confidence": "0.750000"}
    assert rows[0] == {"file": "a,b.png", **told, "class_2": CLASSES[0], "confidence_2": "0.250000"}
    for name, chosen in (("x.json", {}), ("y.csv", {"format": "json"})):
        options = PredictOptions(output=tmp_path / name, **chosen)
        path = write_prediction(odd(), options, io.StringIO())
        assert path is not None
        assert json.loads(path.read_text(encoding="utf-8")) == odd().rows
    for format in ("csv", "json"):
        text = written(odd(), format=format)
        assert "é.png" in text
        assert "\\udcff.png" in text
        assert text.encode().endswith(b"\n")


@here
def test_texts_come_back_from_csv(runs: dict[str, Path], tested: dict[str, Path]) -> None:
    prediction = predicted(runs["text"], tested["text"])
    rows = list(csv.DictReader(io.StringIO(written(prediction), newline="")))
    assert [row["text"] for row in rows] == FILMS
    assert [int(row["line"]) for row in rows] == list(range(1, 9))
    assert list(rows[0]) == ["file", "line", "text", "class", "confidence"]


def test_the_file_is_put_in_place_when_it_is_whole(tmp_path: Path) -> None:
    output = tmp_path / "new" / "x.csv"
    output.parent.mkdir(parents=True)
    output.write_text("file,class,confidence\n")
    (tmp_path / "kept").hardlink_to(output)
    write_prediction(odd(), PredictOptions(output=output), io.StringIO())
    assert (tmp_path / "kept").read_text() == "file,class,confidence\n"
    assert output.read_bytes().startswith(b"file,class,confidence")
    assert [path.name for path in output.parent.iterdir()] == ["x.csv"]


@for_each("kind", ["a file", "a link", "a link to nothing"])
@for_each("name", ["notes.csv", "notes.json"])
def test_files_of_others_are_not_written_over_and_ones_own_are(
    tmp_path: Path, name: str, kind: str
) -> None:
    output, theirs = tmp_path / name, tmp_path / "theirs"
    if kind != "a link to nothing":
        theirs.write_text("a,b\n1,2\n")
    if kind == "a file":
        theirs.rename(output)
        theirs = output
    else:
        output.symlink_to(theirs)
    with pytest.raises(ValueError, match=f"--output {output}: expected a new file, or predictions"):
        write_prediction(odd(), PredictOptions(output=output), io.StringIO())
    assert not theirs.exists() or theirs.read_text() == "a,b\n1,2\n"
    output.unlink()
    for format, start in (("csv", b"file,class"), ("json", b"["), ("json", b"["), ("csv", b"f")):
        write_prediction(odd(), PredictOptions(output=output, format=format), io.StringIO())
        assert output.read_bytes().startswith(start)


@here
def test_masks_are_not_written_over_pictures_of_others(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    save(tmp_path / "in" / "x.png", grey(16, 16, 3))
    save(tmp_path / "in" / "sub" / "y.png", grey(16, 16, 3))
    masks, elsewhere = tmp_path / "masks", tmp_path / "elsewhere"
    save(masks / "x.png", grey(4, 4))
    before = (masks / "x.png").read_bytes()
    with pytest.raises(ValueError, match=r"expected new masks, or masks of before, .*x\.png is a"):
        predicted(runs["segment"], tmp_path / "in", output=masks)
    assert (masks / "x.png").read_bytes() == before
    (masks / "x.png").unlink()
    elsewhere.mkdir()
    (masks / "sub").symlink_to(elsewhere)
    with pytest.raises(ValueError, match=r"expected folders of its own, .*sub is a link"):
        predicted(runs["segment"], tmp_path / "in", output=masks)
    assert list(elsewhere.iterdir()) == []
    (masks / "sub").unlink()
    first, again = (predicted(runs["segment"], tmp_path / "in", output=masks) for _ in range(2))
    assert first == again


FORMULAS = {
    "=1+1": "'=1+1",
    "+cmd|'/c calc'!A0": "'+cmd|'/c calc'!A0",
    "-2+3": "'-2+3",
    "@SUM(1)": "'@SUM(1)",
    "\t=1": "'\t=1",
    "\r=1": "'\r=1",
    "\uff1d1": "'\uff1d1",
    **{text: text for text in ("a;=1", "-5", "+1.5e3", "a=1")},
}


@for_each("text", FORMULAS)
def test_no_cell_is_a_formula(text: str) -> None:
    row = {"file": text, "line": 1, "text": text, "classes": [{"class": text, "confidence": 0.5}]}
    prediction = Prediction([row], [])
    (read,) = csv.DictReader(io.StringIO(written(prediction), newline=""))
    assert (read["file"], read["text"], read["class"]) == (FORMULAS[text],) * 3
    assert (read["line"], read["confidence"]) == ("1", "0.500000")
    assert json.loads(written(prediction, format="json")) == [row]


@here
@for_each("format", ["csv", "json"])
def test_masks_have_the_size_and_the_place_of_their_pictures(
    runs: dict[str, Path], tmp_path: Path, format: Any
) -> None:
    sizes = {"a/x.jpg": (40, 30), "a/b/x.1.png": (33, 70), "y.bmp": (1, 65)}
    for name, size in sizes.items():
        save(tmp_path / "in" / name, grey(*size, 3))
    folder = tmp_path / "new" / "out"
    options = PredictOptions(output=folder, format=format)
    prediction = predict_run(runs["segment"], [tmp_path / "in"], options)
    assert write_prediction(prediction, options, io.StringIO()) == folder / f"masks.{format}"
    assert {row["file"]: row["mask"] for row in prediction.rows} == {
        "a/x.jpg": "a/x.png",
        "a/b/x.1.png": "a/b/x.1.png",
        "y.bmp": "y.png",
    }
    for row in prediction.rows:
        mask = np.asarray(pillow.open(folder / row["mask"]))
        assert mask.shape == sizes[row["file"]]
        assert set(np.unique(mask)) <= {0, 255}
        assert row["share"] == (mask == 255).mean()
    assert len(drawn(folder)) == 4
