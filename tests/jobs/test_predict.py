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
from onefold.jobs import predict
from onefold.jobs.finetune import best_checkpoint
from onefold.jobs.predict import Prediction, PredictOptions, predict_run, write_prediction
from tests.checkpoint.folders import reseal
from tests.masked import grey, on_cpu, run_here, save, save_pairs
from tests.tables import for_each

pillow = pytest.importorskip("PIL.Image", reason='needs pip install "onefold[images]"')
NEEDS_TEXT = 'needs pip install "onefold[text]"'
pytest.importorskip("tokenizers", reason=NEEDS_TEXT)
# Some of what it imports sets variables of the environment: here, before any test looks.
pytest.importorskip("transformers.models.roberta.modeling_roberta", reason=NEEDS_TEXT)

CLASSES = ("dark, all", 'mid "way"', "light")
SIZES = [(40, 30), (33, 70), (20, 20)]
FILMS = ["a fine film ", " dull", "so  dull", "fine, fine", "a film", '"fine"', "très fine", "du"]


# Runs to use.


def save_class(folder: Path, number: int, seeds: Sequence[int], side: int = 16) -> None:
    for seed in seeds:
        pixels = grey(side, side, seed=seed) // 3 + 85 * number
        save(folder / CLASSES[number] / f"{seed}.png", pixels.astype(np.uint8))


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of three classes of brightness."""
    folder = tmp_path_factory.mktemp("classes")
    for number in range(3):
        save_class(folder / "train", number, range(4))
        save_class(folder / "test", number, range(4, 9))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def classifier(runs: Path, classes: Path) -> Path:
    return run_here(
        "classify",
        runs / "classifier",
        data=str(classes),
        model="lenet",
        epochs=3,
        batch_size=4,
        shards=4,
        lr=0.01,
    )


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with masks, in sizes of their own."""
    folder = tmp_path_factory.mktemp("pairs")
    save_pairs(folder / "train", [(40, 40)] * 4)
    save_pairs(folder / "test", SIZES, first=4)
    return folder


@pytest.fixture(scope="module")
def segmenter(runs: Path, pairs: Path) -> Path:
    return run_here(
        "segment",
        runs / "segmenter",
        data=str(pairs),
        encoder="resnet18",
        width=4,
        crop=32,
        epochs=1,
        batch_size=4,
        shards=4,
    )


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts with spaces on either side, and their labels."""
    folder = tmp_path_factory.mktemp("films")
    lines = [f"{text}\t{'good' if 'fine' in text else 'bad'}\n" for text in FILMS]
    trained = [f"{number} {line}" for number in range(2) for line in lines]
    (folder / "train.tsv").write_text("".join(trained), encoding="utf-8")
    (folder / "dev.tsv").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def reader(runs: Path, films: Path) -> Path:
    return run_here(
        "text",
        runs / "reader",
        data=str(films),
        vocabulary=300,
        width=16,
        layers=1,
        heads=2,
        max_length=16,
        epochs=2,
        batch_size=8,
        shards=4,
    )


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

    def launch(*_: Any, **__: Any) -> Any:
        raise AssertionError("a device was started")

    monkeypatch.setattr(onefold, "launch", launch)


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


def best_scores(run: Path) -> dict[str, float]:
    """Of the epoch whose weights are used."""
    best = json.loads((run / "run.json").read_text())["best"]["epoch"]
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return next(
        line["scores"] for line in lines if line["kind"] == "epoch" and line["epoch"] == best
    )


# The same as in training.


@here
def test_pictures_get_the_accuracy_of_the_run(classifier: Path, classes: Path) -> None:
    rows = predicted(classifier, classes / "test").rows
    right = [row["classes"][0]["class"] == Path(row["file"]).parent.name for row in rows]
    assert len(right) == 15
    assert sum(right) / 15 == pytest.approx(best_scores(classifier)["accuracy"])


@here
def test_texts_get_the_accuracy_of_the_run(reader: Path, films: Path) -> None:
    rows = predicted(reader, films / "dev.tsv").rows
    labels = [line.split("\t")[1] for line in (films / "dev.tsv").read_text().splitlines()]
    right = [row["classes"][0]["class"] == label for row, label in zip(rows, labels, strict=True)]
    assert [row["text"] for row in rows] == FILMS
    assert sum(right) / 8 == pytest.approx(best_scores(reader)["accuracy"])


@here
def test_texts_get_the_confidences_of_the_run(reader: Path, films: Path) -> None:
    shown = json.loads((reader / "examples.json").read_text())["samples"]
    rows = predicted(reader, films / "dev.tsv").rows
    assert [row["classes"][0] for row in rows] == [
        {"class": each["predicted"], "confidence": each["confidence"]} for each in shown
    ]


@here
def test_masks_get_the_scores_of_the_run(segmenter: Path, pairs: Path, tmp_path: Path) -> None:
    rows = predicted(segmenter, pairs / "test" / "images", output=tmp_path / "masks").rows
    overlap = both = 0
    for row in rows:
        said = np.asarray(pillow.open(tmp_path / "masks" / row["mask"])) > 127
        meant = np.asarray(pillow.open(pairs / "test" / "masks" / row["file"])) > 127
        overlap, both = overlap + (said & meant).sum(), both + said.sum() + meant.sum()
        assert row["share"] == said.mean()
    assert overlap / (both - overlap) == pytest.approx(best_scores(segmenter)["iou"])


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
    model = {"model": "lenet"} if job == "classify" else {"encoder": "resnet18", "width": 4}
    run = run_here(job, tmp_path / "run", data=str(data), epochs=1, batch_size=4, shards=2, **model)
    kept = json.loads((run / "run.json").read_text())
    name = "picture_model" if job == "classify" else "mask_model"
    assert kept[name]["white"] == 4095
    shown = json.loads((run / "examples.json").read_text())["samples"][0]
    (picture,) = data.rglob(f"images/{shown['name']}" if job == "segment" else shown["name"])
    row = predicted(run, picture, output=tmp_path / "masks" if job == "segment" else None).rows[0]
    if job == "segment":
        expected = pillow.open(run / shown["prediction"])
        assert np.array_equal(pillow.open(tmp_path / "masks" / row["mask"]), expected)
    else:
        assert row["classes"][0]["confidence"] == pytest.approx(shown["confidence"], abs=1e-6)


@pytest.mark.parametrize("job", ["classify", "segment"])
def test_a_place_that_cannot_be_written_to_is_refused_early(
    job: str, classifier: Path, segmenter: Path, classes: Path
) -> None:
    run, output = (classifier, "/proc/self/x.csv") if job == "classify" else (segmenter, "/proc/x")
    words = "expected a folder that can be written to, got .*: --output names another one"
    with pytest.raises(LaunchError, match=words):
        predicted(run, classes / "gone", output=Path(output))


@here
def test_a_run_of_before_that_knows_no_white_still_predicts(
    classifier: Path, classes: Path, tmp_path: Path
) -> None:
    shutil.copytree(classifier, tmp_path / "old")
    record = json.loads((tmp_path / "old" / "run.json").read_text())
    del record["picture_model"]["white"]
    (tmp_path / "old" / "run.json").write_text(json.dumps(record))
    assert (
        predicted(tmp_path / "old", classes / "test").rows
        == predicted(classifier, classes / "test").rows
    )


# The same for everyone.


@here
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_the_batch_size_changes_nothing_but_roundings(
    classifier: Path, classes: Path, batch_size: int
) -> None:
    usual, other = (
        predicted(classifier, classes / "test", batch_size=size, top=3).rows
        for size in (None, batch_size)
    )
    assert [row["file"] for row in other] == [row["file"] for row in usual]
    for one, two in zip(usual, other, strict=True):
        sure = [
            {each["class"]: each["confidence"] for each in row["classes"]} for row in (one, two)
        ]
        assert sure[0] == pytest.approx(sure[1], abs=1e-6)


@here
@pytest.mark.parametrize("batch_size", [1, 5])
def test_masks_do_not_depend_on_the_other_pictures_of_a_batch(
    segmenter: Path, pairs: Path, tmp_path: Path, batch_size: int
) -> None:
    usual, other = (
        predicted(segmenter, pairs / "test", output=tmp_path / name, batch_size=size)
        for name, size in (("usual", None), ("other", batch_size))
    )
    assert names(other) == names(usual)
    shares = [row["share"] for row in usual.rows]
    assert 0 < min(shares) < max(shares) < 1
    assert [row["share"] for row in other.rows] == pytest.approx(shares, abs=0.002)


def drawn(folder: Path) -> dict[Path, bytes]:
    """All files of a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.read_bytes() for path in files}


Asked = tuple[str, Path, list[Path], PredictOptions]


def predict_all(asked: Sequence[Asked]) -> list[list[dict[str, Any]]]:
    """Every kind in turn, on every device."""
    return [
        predict._predict(job, run, best_checkpoint(run), predict._read(job, paths), options)
        for job, run, paths, options in asked
    ]


@pytest.mark.full
@pytest.mark.processes
def test_three_devices_give_the_bytes_of_one(
    classifier: Path,
    classes: Path,
    reader: Path,
    films: Path,
    segmenter: Path,
    pairs: Path,
    tmp_path: Path,
) -> None:
    one_picture = [classes / "test" / CLASSES[0] / "4.png"]

    def asked(masks: Path) -> list[Asked]:
        usual, by_fives = PredictOptions(top=3), PredictOptions(batch_size=5, top=3)
        return [
            ("classify", classifier, [classes / "test"], by_fives),
            ("classify", classifier, one_picture, usual),
            ("text", reader, [films / "dev.tsv"], by_fives),
            ("segment", segmenter, [pairs / "test"], PredictOptions(output=masks)),
        ]

    with on_cpu():
        alone = predict_all(asked(tmp_path / "alone"))
    together = onefold.launch(predict_all, devices="cpu:3", args=(asked(tmp_path / "together"),))
    assert [len(rows) for rows in alone] == [15, 1, 8, 6]
    assert together == alone
    assert drawn(tmp_path / "together") == drawn(tmp_path / "alone")


@pytest.mark.processes
def test_two_devices_give_the_bytes_of_one(segmenter: Path, pairs: Path, tmp_path: Path) -> None:
    for devices, started in ((1, direct), (2, onefold.launch)):
        output = tmp_path / str(devices)
        options = PredictOptions(devices=f"cpu:{devices}", output=output)
        with on_cpu() as patch:
            patch.setattr(onefold, "launch", started)
            prediction = predict_run(segmenter, [pairs / "test"], options)
        write_prediction(prediction, options, io.StringIO())
    one, two = drawn(tmp_path / "1"), drawn(tmp_path / "2")
    assert one == two
    assert len(one) == 7


# What is read.


@here
def test_rows_are_in_the_order_of_the_input(classifier: Path, tmp_path: Path) -> None:
    for name in ("b/2.png", "b/10.png", "b/a/1.png", "z.png", "a.png"):
        save(tmp_path / name, grey(16, 16))
    paths = [tmp_path / "z.png", tmp_path / "b", tmp_path / "a.png"]
    assert names(predicted(classifier, *paths)) == [
        "z.png",
        "10.png",
        "2.png",
        "a/1.png",
        "a.png",
    ]


@here
def test_a_picture_that_is_named_twice_is_told_once(classifier: Path, tmp_path: Path) -> None:
    path = save(tmp_path / "a" / "b" / "x.png", grey(16, 16))
    again = tmp_path / "." / "a" / "b" / "x.png"
    assert names(predicted(classifier, tmp_path / "a", path, again)) == ["b/x.png"]


@here
def test_pictures_of_one_name_are_told_apart(classifier: Path, tmp_path: Path) -> None:
    one, two = (save(tmp_path / folder / "x.png", grey(16, 16)) for folder in ("a", "b"))
    assert names(predicted(classifier, one.parent, two)) == [str(one), str(two)]


@here
def test_any_size_and_kind_of_picture_is_read(classifier: Path, tmp_path: Path) -> None:
    save(tmp_path / "large.jpg", grey(50, 90, 3))
    save(tmp_path / "small.bmp", grey(3, 4))
    save(tmp_path / "sheer.PNG", grey(16, 16, 4))
    save(tmp_path / "no picture.txt", grey(16, 16), format="PNG")
    assert names(predicted(classifier, tmp_path)) == ["large.jpg", "sheer.PNG", "small.bmp"]
    assert names(predicted(classifier, tmp_path / "no picture.txt")) == ["no picture.txt"]


@here
def test_a_folder_may_be_a_link(classifier: Path, classes: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(classes / "test")
    linked, straight = (predicted(classifier, p) for p in (tmp_path / "linked", classes / "test"))
    assert linked == straight


@here
def test_pictures_that_cannot_be_read_are_left_out_when_asked(
    classifier: Path, tmp_path: Path
) -> None:
    for name in ("a.png", "b.png", "c.png"):
        save(tmp_path / name, grey(16, 16))
    (tmp_path / "b.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=f"1 of .* cannot be used:\n  {tmp_path}/b.png: "):
        predicted(classifier, tmp_path)
    prediction = predicted(classifier, tmp_path, skip_bad=True)
    assert names(prediction) == ["a.png", "c.png"]
    assert [bad.path for bad in prediction.left_out] == [tmp_path / "b.png"]


@here
@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n \n"])
def test_texts_are_read_as_in_training(reader: Path, tmp_path: Path, end: str) -> None:
    lines = '\ufeff a fine film \r\ndull\tgood\n"so, so"\rdull' + end
    (tmp_path / "x.txt").write_bytes(lines.encode())
    rows = predicted(reader, tmp_path / "x.txt").rows
    assert [row["text"] for row in rows] == [" a fine film ", "dull", '"so, so"\rdull']
    assert [row["line"] for row in rows] == [1, 2, 3]
    assert {row["file"] for row in rows} == {str(tmp_path / "x.txt")}


@here
def test_lines_that_cannot_be_read_are_left_out_when_asked(reader: Path, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"fine\n\n\tgood\nd\xfcll\ndull\n")
    with pytest.raises(DataError, match=r"^3 of the files and lines cannot be used") as caught:
        predicted(reader, tmp_path / "x.txt")
    for told in ("line 2: expected a text", "line 3: expected a text", "line 4: expected UTF-8"):
        assert f"{tmp_path}/x.txt, {told}" in str(caught.value)
    prediction = predicted(reader, tmp_path / "x.txt", skip_bad=True)
    assert [(row["line"], row["text"]) for row in prediction.rows] == [(1, "fine"), (5, "dull")]
    assert [bad.line for bad in prediction.left_out] == [2, 3, 4]


@here
def test_texts_of_several_files_are_told_by_file(reader: Path, tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(f"{name}\nfine\n")
    rows = predicted(reader, tmp_path / "b.txt", tmp_path / "a.txt").rows
    told = [(row["file"], row["line"], row["text"]) for row in rows]
    assert told == [
        (str(tmp_path / name), line, text)
        for name in ("b.txt", "a.txt")
        for line, text in ((1, name), (2, "fine"))
    ]


# What is refused before any device is started.


@nowhere
def test_nothing_to_look_at_is_refused(classifier: Path, reader: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_bytes(b"\n")
    message = "empty: expected something to look at, found none"
    with pytest.raises(DataError, match=message):
        predicted(classifier, tmp_path / "empty")
    with pytest.raises(DataError, match=r"empty\.txt: expected something to look at"):
        predicted(reader, tmp_path / "empty.txt")


@nowhere
def test_nothing_sound_is_refused_even_where_bad_ones_are_left_out(
    classifier: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.png").write_bytes(b"")
    with pytest.raises(DataError, match="expected something to look at"):
        predicted(classifier, tmp_path, skip_bad=True)


@nowhere
def test_paths_that_are_not_there_are_refused(
    classifier: Path, reader: Path, classes: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}/x: expected a file or folder, there is none"):
        predicted(classifier, classes, tmp_path / "x")
    with pytest.raises(DataError, match=f"{tmp_path}: expected a file with one text a line"):
        predicted(reader, tmp_path)


@nowhere
@pytest.mark.parametrize(
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
@pytest.mark.parametrize("weights", ["best", "last"])
def test_a_run_without_weights_is_refused(tmp_path: Path, weights: Any) -> None:
    (tmp_path / "run.json").write_text('{"job": "classify", "best": null}')
    (tmp_path / "checkpoints").mkdir()
    message = "no best weights" if weights == "best" else "expected the run's checkpoints, found"
    with pytest.raises(CheckpointError, match=message):
        predicted(tmp_path, tmp_path, weights=weights)


@nowhere
def test_best_weights_that_are_gone_are_refused(classifier: Path, tmp_path: Path) -> None:
    run = shutil.copytree(classifier, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    message = f"{run}/checkpoints/step-.*: expected the run's best weights there, found nothing"
    with pytest.raises(CheckpointError, match=message):
        predicted(run, tmp_path)


@nowhere
def test_masks_need_a_folder(segmenter: Path, pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected --output with a folder for the masks"):
        predicted(segmenter, pairs / "test")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="expected a folder for the masks, this is a file"):
        predicted(segmenter, pairs / "test", output=tmp_path / "file")


@nowhere
def test_classes_need_a_file(classifier: Path, classes: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--output {tmp_path}: expected a file"):
        predicted(classifier, classes, output=tmp_path)


@nowhere
@pytest.mark.parametrize("other", ["a/x.jpg", "b/x.png"])
def test_two_masks_of_one_name_are_refused(segmenter: Path, tmp_path: Path, other: str) -> None:
    one = save(tmp_path / "a" / "x.png", grey(8, 8))
    two = save(tmp_path / other, grey(8, 8))
    with pytest.raises(DataError, match=r"x\..* and .*x\..* would have a mask .* x\.png"):
        predicted(segmenter, one, two, output=tmp_path / "masks")


@nowhere
@pytest.mark.parametrize("output", ["a", "a/../a", "link"])
def test_pictures_are_not_written_over_by_masks(
    segmenter: Path, tmp_path: Path, output: str
) -> None:
    picture = save(tmp_path / "a" / "x.png", grey(8, 8))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ValueError, match=f"expected another place, {picture} would be lost"):
        predicted(segmenter, tmp_path / "a", output=tmp_path / output)


@nowhere
def test_texts_are_not_written_over(reader: Path, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("fine\n")
    with pytest.raises(ValueError, match=r"expected another place, .*x\.txt would be lost"):
        predicted(reader, tmp_path / "x.txt", output=tmp_path / "x.txt")


@for_each(
    ("chosen", "message"),
    [
        ({"top": 0}, "--top 0: expected 1 or more"),
        ({"batch_size": 0}, "--batch-size 0: expected 1 or more"),
        ({"workers": -1}, "--workers -1: expected 0 or more"),
    ],
)
def test_options_out_of_range_are_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PredictOptions(**chosen)


# Which weights.


@here
def test_the_best_and_the_last_weights_are_those_of_the_run(
    classifier: Path, classes: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(classifier, tmp_path / "run")
    said = json.loads((run / "run.json").read_text())
    for step in (2, 10_000_000_000):
        copy = run / "checkpoints" / f"step-{step:08d}"
        reseal(shutil.copytree(best_checkpoint(classifier), copy), step=step)
    said["best"]["checkpoint"] = "checkpoints/step-00000002"
    (run / "run.json").write_text(json.dumps(said))
    file = run / "checkpoints" / "step-00000002" / "model.safetensors"
    save_file({name: torch.zeros_like(value) for name, value in load_file(file).items()}, file)
    reseal(file.parent)
    best, last, unchanged = (
        predicted(which, classes / "test", weights=weights, top=3).rows
        for which, weights in ((run, "best"), (run, "last"), (classifier, "best"))
    )
    third = torch.tensor(1.0).div(3).item()
    assert [[each["confidence"] for each in row["classes"]] for row in best] == [[third] * 3] * 15
    assert last == unchanged != best


def flip(file: Path) -> str:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    return r"step-\d+ is damaged: model.safetensors has other bytes than were written"


def remove_record(file: Path) -> str:
    (file.parent / "run.json").unlink()
    return r"step-\d+ is damaged: run.json is missing"


def poison(value: float) -> Callable[[Path], str]:
    def change(file: Path) -> str:
        tensors = load_file(file)
        name = next(iter(tensors))
        tensors[name].view(-1)[0] = value
        save_file(tensors, file)
        reseal(file.parent)
        return f"step-[0-9]+: {name} has values that are NaN or infinite"

    return change


DAMAGES = {"flipped": flip, "no record": remove_record}
DAMAGES |= {"nan": poison(float("nan")), "infinite": poison(float("inf"))}


@here
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("weights", ["best", "last"])
def test_damaged_weights_are_refused_by_name(
    classifier: Path, classes: Path, tmp_path: Path, weights: str, damage: str
) -> None:
    run = shutil.copytree(classifier, tmp_path / "run")
    for file in run.glob("checkpoints/step-*/model.safetensors"):
        message = DAMAGES[damage](file)
    with pytest.raises(CheckpointError, match=message):
        predicted(run, classes / "test", weights=weights)


ELSEWHERE = ["../other", "checkpoints/../../other", "/etc", "checkpoints/step-1", 7, ["a"], ""]


@pytest.mark.parametrize("named", ELSEWHERE)
def test_a_best_checkpoint_outside_the_run_is_refused(
    classifier: Path, classes: Path, tmp_path: Path, named: object
) -> None:
    run = shutil.copytree(classifier, tmp_path / "run")
    shutil.copytree(best_checkpoint(classifier), tmp_path / "other")
    said = json.loads((run / "run.json").read_text())
    said["best"]["checkpoint"] = named
    (run / "run.json").write_text(json.dumps(said))
    with pytest.raises(DataError, match="expected the best checkpoint to be one of the run"):
        predicted(run, classes / "test")


@here
@pytest.mark.parametrize(
    "said",
    [
        {"picture_model": 3},
        {"picture_model": {}},
        *({"shards": each} for each in ("two", -1, 1e300)),
    ],
)
def test_a_run_that_says_what_none_says_is_refused(
    classifier: Path, classes: Path, tmp_path: Path, said: dict[str, Any]
) -> None:
    run = shutil.copytree(classifier, tmp_path / "run")
    before = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**before, **said}))
    with pytest.raises(DataError, match="expected what the run has kept of its model"):
        predicted(run, classes / "test")


@here
@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("picture_model", "name", ["lenet"]),
        ("picture_model", "name", "resnet7"),
        ("picture_model", "classes", ""),
        ("picture_model", "mean", ["a"]),
        ("picture_model", "later", 3),
        ("mask_model", "encoder", {}),
        ("mask_model", "encoder", "resnet7"),
        ("mask_model", "width", [4]),
        ("mask_model", "width", 10**9),
        ("mask_model", "threshold", [0.5]),
        ("mask_model", "white", "x"),
        ("text_model", "max_length", -1),
        ("text_model", "max_length", "long"),
        ("text_model", "pad_id", [1]),
    ],
)
def test_a_model_that_no_run_has_kept_is_refused(
    kind: str,
    name: str,
    value: object,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    fixture, data = ASKED[kind]
    run = shutil.copytree(request.getfixturevalue(fixture), tmp_path / "run")
    said = json.loads((run / "run.json").read_text())
    said[kind][name] = value
    (run / "run.json").write_text(json.dumps(said))
    with pytest.raises(DataError, match=r"run\.json: expected what the run has kept of its model"):
        predicted(run, next(request.getfixturevalue(data).glob("[dt]e*")), output=tmp_path / "out")


ASKED = {
    "picture_model": ("classifier", "classes"),
    "mask_model": ("segmenter", "pairs"),
    "text_model": ("reader", "films"),
}
"""The run of each kind of model, and the data of which it predicts a part."""


@here
@pytest.mark.parametrize("said", [{"classes": ["good"]}, {"pad_id": 10**6}, {"pad_id": -1}])
def test_a_text_model_of_another_run_is_refused(
    reader: Path, films: Path, tmp_path: Path, said: dict[str, Any]
) -> None:
    run = shutil.copytree(reader, tmp_path / "run")
    facts = json.loads((run / "run.json").read_text())
    for name, value in said.items():
        (facts if name == "classes" else facts["text_model"])[name] = value
    (run / "run.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match=r"expected model_config\.json and run\.json to be of one"):
        predicted(run, films / "dev.tsv")


@here
def test_a_damaged_tokenizer_is_refused(reader: Path, films: Path, tmp_path: Path) -> None:
    run = shutil.copytree(reader, tmp_path / "run")
    (run / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"kept of its model, .*expected a tokenizer as JSON"):
        predicted(run, films / "dev.tsv")


@here
def test_all_classes_are_told_from_the_surest(classifier: Path, classes: Path) -> None:
    rows = predicted(classifier, classes / "test", top=7).rows
    for row in rows:
        sure = [each["confidence"] for each in row["classes"]]
        assert sure == sorted(sure, reverse=True)
        assert sum(sure) == pytest.approx(1, abs=1e-6)
        assert {each["class"] for each in row["classes"]} == set(CLASSES)
    first = predicted(classifier, classes / "test").rows
    assert [row["classes"] for row in first] == [row["classes"][:1] for row in rows]


def test_of_equal_classes_the_first_is_told() -> None:
    said = torch.tensor([[0.25, 0.5, 0.25], [0.0, 0.5, 0.5]])
    told = predict._classes(said, ("a", "b", "c"), 2)
    assert [[each["class"] for each in row] for row in told] == [["b", "a"], ["b", "c"]]


# What is written.


ODD = ["a,b.png", 'say "x".png', "two\nlines.png", " .png", "é.png", os.fsdecode(b"\xff.png")]


def odd() -> Prediction:
    found = [{"class": CLASSES[1], "confidence": 0.75}, {"class": CLASSES[0], "confidence": 0.25}]
    return Prediction([{"file": name, "classes": found} for name in ODD], [])


def test_names_of_all_kinds_come_back_from_csv(tmp_path: Path) -> None:
    path = write_prediction(odd(), PredictOptions(output=tmp_path / "x.csv"), io.StringIO())
    assert path == tmp_path / "x.csv"
    with path.open(newline="", errors="surrogateescape", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == ODD
    assert rows[0] == {
        "file": "a,b.png",
        "class": CLASSES[1],
        "confidence": "0.750000",
        "class_2": CLASSES[0],
        "confidence_2": "0.250000",
    }


@for_each("chosen", [{"output": "x.json"}, {"output": "x.csv", "format": "json"}])
def test_names_of_all_kinds_come_back_from_json(tmp_path: Path, chosen: dict[str, Any]) -> None:
    options = PredictOptions(**{**chosen, "output": tmp_path / chosen["output"]})
    path = write_prediction(odd(), options, io.StringIO())
    assert path is not None
    rows = json.loads(path.read_text(encoding="utf-8"))
    assert rows == odd().rows


@for_each("format", ["csv", "json"])
def test_names_of_all_kinds_can_be_shown(format: Any) -> None:
    text = written(odd(), format=format)
    assert "é.png" in text
    assert text.encode().endswith(b"\n")
    assert "\\udcff.png" in text


@here
def test_odd_names_are_predicted(classifier: Path, tmp_path: Path) -> None:
    for name in ODD[:4]:
        save(tmp_path / name, grey(16, 16))
    assert sorted(names(predicted(classifier, tmp_path))) == sorted(ODD[:4])


@here
def test_texts_come_back_from_csv(reader: Path, films: Path) -> None:
    prediction = predicted(reader, films / "dev.tsv")
    rows = list(csv.DictReader(io.StringIO(written(prediction), newline="")))
    assert [row["text"] for row in rows] == FILMS
    assert [int(row["line"]) for row in rows] == list(range(1, 9))
    assert list(rows[0]) == ["file", "line", "text", "class", "confidence"]


def test_the_file_is_put_in_place_when_it_is_whole(tmp_path: Path) -> None:
    output = tmp_path / "new" / "sub" / "x.csv"
    output.parent.mkdir(parents=True)
    output.write_text("file,class,confidence\n")
    (tmp_path / "kept").hardlink_to(output)
    write_prediction(odd(), PredictOptions(output=output), io.StringIO())
    assert (tmp_path / "kept").read_text() == "file,class,confidence\n"
    assert output.read_bytes().startswith(b"file,class,confidence")
    assert [path.name for path in output.parent.iterdir()] == ["x.csv"]


@for_each("kind", ["a file", "a link", "a link to nothing"])
@for_each("name", ["notes.csv", "notes.json"])
def test_files_of_others_are_not_written_over(tmp_path: Path, name: str, kind: str) -> None:
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


@for_each("before", ["csv", "json"])
@for_each("after", ["csv", "json"])
def test_predictions_of_before_are_written_over(tmp_path: Path, before: Any, after: Any) -> None:
    output = tmp_path / "x"
    for each in (before, after):
        write_prediction(odd(), PredictOptions(output=output, format=each), io.StringIO())
    assert output.read_bytes().startswith(b"[" if after == "json" else b"file,class")


@here
def test_masks_are_not_written_over_pictures_of_others(segmenter: Path, tmp_path: Path) -> None:
    save(tmp_path / "in" / "x.png", grey(16, 16, 3))
    save(tmp_path / "in" / "sub" / "y.png", grey(16, 16, 3))
    masks, elsewhere = tmp_path / "masks", tmp_path / "elsewhere"
    options = PredictOptions(output=masks)
    save(masks / "x.png", grey(4, 4))
    before = (masks / "x.png").read_bytes()
    with pytest.raises(ValueError, match=r"expected new masks, or masks of before, .*x\.png is a"):
        predict_run(segmenter, [tmp_path / "in"], options)
    assert (masks / "x.png").read_bytes() == before
    (masks / "x.png").unlink()
    elsewhere.mkdir()
    (masks / "sub").symlink_to(elsewhere)
    with pytest.raises(ValueError, match=r"expected folders of its own, .*sub is a link"):
        predict_run(segmenter, [tmp_path / "in"], options)
    assert list(elsewhere.iterdir()) == []
    (masks / "sub").unlink()
    first = predict_run(segmenter, [tmp_path / "in"], options).rows
    assert predict_run(segmenter, [tmp_path / "in"], options).rows == first


FORMULAS = {
    "=1+1": "'=1+1",
    "+cmd|'/c calc'!A0": "'+cmd|'/c calc'!A0",
    "-2+3": "'-2+3",
    "@SUM(1)": "'@SUM(1)",
    "\t=1": "'\t=1",
    "\r=1": "'\r=1",
    "\uff1d1": "'\uff1d1",
    "a;=1": "a;=1",
    "-5": "-5",
    "+1.5e3": "+1.5e3",
    "a=1": "a=1",
}


@for_each("text", FORMULAS)
def test_no_cell_is_a_formula(text: str) -> None:
    row = {"file": text, "line": 1, "text": text, "classes": [{"class": text, "confidence": 0.5}]}
    prediction = Prediction([row], [])
    content = written(prediction)
    (read,) = csv.DictReader(io.StringIO(content, newline=""))
    assert (read["file"], read["text"], read["class"]) == (FORMULAS[text],) * 3
    assert (read["line"], read["confidence"]) == ("1", "0.500000")
    assert json.loads(written(prediction, format="json")) == [row]


def test_the_folder_of_the_file_is_made(tmp_path: Path) -> None:
    output = tmp_path / "new" / "sub" / "x.csv"
    assert write_prediction(odd(), PredictOptions(output=output), io.StringIO()) == output
    assert output.is_file()


@here
@pytest.mark.parametrize("format", ["csv", "json"])
def test_masks_have_the_size_and_the_place_of_their_pictures(
    segmenter: Path, tmp_path: Path, format: Any
) -> None:
    sizes = {"a/x.jpg": (40, 30), "a/b/x.1.png": (33, 70), "y.bmp": (1, 65)}
    for name, size in sizes.items():
        save(tmp_path / "in" / name, grey(*size, 3))
    options = PredictOptions(output=tmp_path / "new" / "out", format=format)
    prediction = predict_run(segmenter, [tmp_path / "in"], options)
    table = write_prediction(prediction, options, io.StringIO())
    assert table == tmp_path / "new" / "out" / f"masks.{format}"
    assert {row["file"]: row["mask"] for row in prediction.rows} == {
        "a/x.jpg": "a/x.png",
        "a/b/x.1.png": "a/b/x.1.png",
        "y.bmp": "y.png",
    }
    for row in prediction.rows:
        mask = np.asarray(pillow.open(tmp_path / "new" / "out" / row["mask"]))
        assert mask.shape == sizes[row["file"]]
        assert set(np.unique(mask)) <= {0, 255}
        assert row["share"] == (mask == 255).mean()
    files = [path for path in (tmp_path / "new" / "out").rglob("*") if path.is_file()]
    assert len(files) == 4
