"""A trained run on new files: what is read, in which order, what is said of it and where."""

import csv
import io
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import onefold
from onefold.errors import CheckpointError, DataError, LaunchError
from onefold_jobs.finetune import best_checkpoint
from onefold_jobs.predict import Prediction, PredictOptions, as_csv, predict_run, write_prediction
from tests import simulated
from tests.capabilities import needs_text
from tests.checkpoint.folders import reseal
from tests.jobs import tiny
from tests.jobs.tiny import TESTED, direct
from tests.masked import gray, on_cpu, save
from tests.tables import for_each

pillow = pytest.importorskip("PIL.Image", reason='needs pip install "onefold-jobs[images]"')
needs_text()

FACTS = {"classify": "picture_model", "segment": "mask_model", "text": "text_model"}
Paths = dict[str, Path]


@pytest.fixture
def _nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be started."""
    monkeypatch.setattr(onefold, "launch", lambda *_, **__: pytest.fail("a device was started"))


here = pytest.mark.usefixtures("here")
nowhere = pytest.mark.usefixtures("_nowhere")


def predicted(run: Path, *paths: Path, **chosen: Any) -> Prediction:
    return predict_run(run, paths, PredictOptions(**chosen))


def refused(words: str, run: Path, *paths: Path, **chosen: Any) -> None:
    with pytest.raises((CheckpointError, DataError, LaunchError, ValueError), match=words):
        predicted(run, *paths, **chosen)


def names(prediction: Prediction) -> list[str]:
    return [row["file"] for row in prediction.rows]


def written(prediction: Prediction, **chosen: Any) -> str:
    screen = io.StringIO()
    assert write_prediction(prediction, PredictOptions(**chosen), screen) is None
    return screen.getvalue()


def put(prediction: Prediction, output: Path, **chosen: Any) -> Path | None:
    return write_prediction(prediction, PredictOptions(output=output, **chosen), io.StringIO())


def facts_of(run: Path) -> Any:
    return json.loads((run / "run.json").read_text())


def changed(run: Path, folder: Path, change: Callable[[Any], object]) -> Path:
    copy = shutil.copytree(run, folder)
    facts = facts_of(run)
    change(facts)
    (copy / "run.json").write_text(json.dumps(facts))
    return copy


def drawn(folder: Path) -> dict[Path, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.read_bytes() for path in found}


@here
def test_the_batch_size_and_an_older_record_change_nothing(
    runs: Paths, data: Paths, tmp_path: Path
) -> None:
    run, pictures = runs["classify"], data["classify"] / "test"
    # Earlier versions knew no white.
    old = changed(run, tmp_path / "old", lambda facts: facts["picture_model"].pop("white"))
    usual = predicted(run, pictures, top=7).rows
    other = predicted(old, pictures, top=7, batch_size=1).rows
    for one, two in zip(usual, other, strict=True):
        sure = [each["confidence"] for each in one["classes"]]
        assert sure == sorted(sure, reverse=True)
        assert sum(sure) == pytest.approx(1, abs=1e-6)
        of_each = [{c["class"]: c["confidence"] for c in row["classes"]} for row in (one, two)]
        assert of_each[0] == pytest.approx(of_each[1], abs=1e-6)
        assert set(of_each[0]) == set(tiny.CLASSES)


@pytest.mark.parametrize("kind", [*FACTS, pytest.param("processes", marks=pytest.mark.processes)])
def test_several_devices_give_the_bytes_of_one(
    kind: str, runs: Paths, data: Paths, tmp_path: Path
) -> None:
    started = onefold.launch if kind == "processes" else simulated.launch
    kind = "segment" if kind == "processes" else kind
    inputs = data[kind] / TESTED[kind]
    if kind == "segment":
        inputs = tmp_path / "in"
        for number, size in enumerate([(40, 30), (33, 70), (20, 20)]):
            save(inputs / f"{number}.png", gray(*size, 3))
    for devices, launch in ((1, direct), (3, started)):
        output = tmp_path / str(devices)
        if kind != "segment":
            output.mkdir()
            output /= "rows.csv"
        top = 1 if kind == "segment" else 3
        options = PredictOptions(devices=f"cpu:{devices}", output=output, batch_size=5, top=top)
        with on_cpu() as patch:
            patch.setattr(onefold, "launch", launch)
            prediction = predict_run(runs[kind], [inputs], options)
        write_prediction(prediction, options, io.StringIO())
    one = drawn(tmp_path / "1")
    assert one == drawn(tmp_path / "3")
    assert len(one) == (4 if kind == "segment" else 1)


ODD = ["a,b.png", 'say "x".png', "two\nlines.png", " .png", "é.png", os.fsdecode(b"\xff.png")]


@here
def test_each_picture_is_told_once_in_the_given_order(runs: Paths, tmp_path: Path) -> None:
    classifier = runs["classify"]
    for name in ("b/2.png", "b/10.png", "b/a/1.png", "z.png", "a.png"):
        save(tmp_path / name, gray(16, 16))
    (tmp_path / "linked").symlink_to(tmp_path / "b")
    again = tmp_path / "b" / "." / "2.png"
    paths = [tmp_path / "z.png", tmp_path / "b", again, tmp_path / "a.png"]
    told = ["z.png", "10.png", "2.png", "a/1.png", "a.png"]
    assert names(predicted(classifier, *paths)) == told
    assert names(predicted(classifier, tmp_path / "linked")) == told[1:4]
    # Of one name in two folders.
    one, two = (save(tmp_path / folder / "x.png", gray(16, 16)) for folder in ("c", "d"))
    assert names(predicted(classifier, one.parent, two)) == [str(one), str(two)]


@here
@for_each(
    ("job", "folders", "expected", "words"),
    [
        ("classify", ["train/a", "test/a"], ["test/a/x.png", "train/a/x.png"], "test"),
        ("classify", ["seg_train/a", "seg_test/b"], 2, "seg_test"),
        ("classify", ["wrapped/Training/a", "wrapped/Testing/a"], 2, "wrapped/Testing"),
        ("classify", ["a", "test"], 2, ""),
        ("classify", ["north/a", "north/b", "south/a", "south/b"], 4, ""),
        ("classify", ["images", "masks"], 2, ""),
        ("segment", ["images", "masks"], ["images/x.png"], "leaves out 1 mask\n"),
        (
            "segment",
            ["images/a", "masks/a", "b/masks"],
            ["b/masks/x.png", "images/a/x.png"],
            "1 mask",
        ),
        ("segment", ["train/images", "train/masks", "test/images", "test/masks"], 2, "2 masks"),
    ],
)
def test_parts_of_a_dataset_are_reported_and_masks_left_out(
    job: str,
    folders: list[str],
    expected: Any,
    words: str,
    runs: Paths,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path_factory.mktemp("data")
    for folder in folders:
        save(data / folder / "x.png", gray(16, 16))
    found = names(predicted(runs[job], data, output=data / "out" if job == "segment" else None))
    assert (len(found) if isinstance(expected, int) else found) == expected
    said = capsys.readouterr().err
    if job == "segment":
        assert words in said
        assert names(predicted(runs[job], data / folders[-1], output=data / "out")) == ["x.png"]
    else:
        sentence = f"for the test set alone, name {data / words}\n"
        assert (sentence in said) == bool(words)
        assert ("all parts" in said) == bool(words)


@here
def test_what_cannot_be_read_is_left_out_when_asked(runs: Paths, tmp_path: Path) -> None:
    run, bad = runs["classify"], tmp_path / "b.png"
    save(tmp_path / "a.png", gray(16, 16))
    bad.write_bytes(b"no image")
    refused(f"1 file cannot be used:\n  {bad}: ", run, tmp_path)
    prediction = predicted(run, tmp_path, skip_bad=True)
    assert (names(prediction), [each.path for each in prediction.left_out]) == (["a.png"], [bad])
    run, texts = runs["text"], tmp_path / "x.txt"
    texts.write_bytes(b"fine\n\n\tgood\nd\xfcll\ndull\n")
    reasons = ((2, "expected a text"), (3, "likewise"), (4, "expected UTF-8"))
    told = [f"{texts}, line {n}: {words}" for n, words in reasons]
    words = "(?s)^3 lines of 1 file cannot be used" + "".join(f".*{each}" for each in told)
    refused(words, run, texts)
    prediction = predicted(run, texts, skip_bad=True)
    assert [(row["line"], row["text"]) for row in prediction.rows] == [(1, "fine"), (5, "dull")]
    assert [each.line for each in prediction.left_out] == [2, 3, 4]


@here
@for_each("end", ["", "\n", "\r\n", "\n\n \n"])
def test_texts_are_read_as_in_training(runs: Paths, tmp_path: Path, end: str) -> None:
    one, two = tmp_path / "x.txt", tmp_path / "a.txt"
    one.write_bytes(('\ufeff a fine film \r\ndull\tgood\n"so, so"\rdull' + end).encode())
    two.write_text("fine\n")
    rows = predicted(runs["text"], one, two).rows
    assert [(row["file"], row["line"], row["text"]) for row in rows] == [
        *((str(one), 1, " a fine film "), (str(one), 2, "dull"), (str(one), 3, '"so, so"\rdull')),
        (str(two), 1, "fine"),
    ]


@nowhere
def test_what_cannot_be_looked_at_is_refused(runs: Paths, tmp_path: Path) -> None:
    run, text = runs["classify"], runs["text"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_bytes(b"\n")
    save(tmp_path / "bad" / "x.png", gray(2, 2)).write_bytes(b"")
    refused("empty: expected images, found none", run, tmp_path / "empty")
    refused(r"empty\.txt: expected texts, found none", text, tmp_path / "empty.txt")
    refused("expected images, found none", run, tmp_path / "bad", skip_bad=True)
    refused("x: expected a file or folder, but it does not exist", run, tmp_path / "x")
    refused(f"{tmp_path}: expected a file with one text per line", text, tmp_path)


@nowhere
def test_what_is_no_run_or_has_no_weights_is_refused(runs: Paths, tmp_path: Path) -> None:
    refused("expected the folder of a run, which contains run.json", tmp_path, tmp_path)
    for content, words in (
        ("{", "run.json: expected the JSON of a run"),
        ('{"job": "digits"}', "expected a run of classify, segment, text, got digits"),
        ("{}", "expected a run of classify, segment, text, got None"),
        ('{"job": "classify", "best": null}', "no best weights"),
    ):
        (tmp_path / "run.json").write_text(content)
        refused(f"^{tmp_path}.*{words}", tmp_path, tmp_path)
    refused("expected the run's checkpoints, found", tmp_path, tmp_path, weights="last")
    run = shutil.copytree(runs["classify"], tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    words = f"{run}/checkpoints/step-.*: expected the run's best weights there, found nothing"
    refused(words, run, tmp_path)


@nowhere
def test_an_output_that_does_not_suit_is_refused(runs: Paths, tmp_path: Path) -> None:
    run, text, masks = (runs[kind] for kind in ("classify", "text", "segment"))
    picture, file = save(tmp_path / "a" / "x.png", gray(8, 8)), tmp_path / "x.txt"
    file.write_text("fine\n")
    (tmp_path / "link").symlink_to(picture.parent)
    place = "cannot write there: .*: name another one with --output"
    refused("masks require --output with a folder", masks, picture)
    refused("expected a folder for the masks, not a file", masks, picture, output=file)
    refused(f"--output {tmp_path}: expected a file", run, picture, output=tmp_path)
    refused(place, run, picture, output=Path("/proc/self/x.csv"))
    refused(place, masks, picture, output=Path("/proc/x"))
    for name in ("a", "a/../a", "link"):
        words = f"would overwrite the input {picture}; name another one"
        refused(words, masks, picture.parent, output=tmp_path / name)
    refused(r"would overwrite the input .*x\.txt; name another one", text, file, output=file)
    for name in ("a/x.jpg", "b/x.png"):
        other = save(tmp_path / name, gray(8, 8))
        words = r"x\..* and .*x\..* would have the same mask, x\.png"
        refused(words, masks, picture, other, output=tmp_path / "masks")


@here
def test_the_best_and_the_last_weights_are_those_of_the_run(
    runs: Paths, data: Paths, tmp_path: Path
) -> None:
    old, where = runs["classify"], "checkpoints/step-00000002"
    run = changed(old, tmp_path / "run", lambda said: said["best"].update(checkpoint=where))
    for step in (2, 10_000_000_000):
        copy = run / "checkpoints" / f"step-{step:08d}"
        reseal(shutil.copytree(best_checkpoint(old), copy), step=step)
    file = run / where / "model.safetensors"
    save_file({name: torch.zeros_like(value) for name, value in load_file(file).items()}, file)
    reseal(file.parent)
    best, last, unchanged = (
        predicted(which, data["classify"] / "test", weights=weights, top=3).rows
        for which, weights in ((run, "best"), (run, "last"), (old, "best"))
    )
    # Of equal classes the first is told first.
    third = torch.tensor(1.0).div(3).item()
    alike = [{"class": name, "confidence": third} for name in tiny.CLASSES]
    assert [row["classes"] for row in best] == [alike] * 12
    assert last == unchanged != best


@here
@for_each("damage", ["flipped", "no record", "infinite"])
def test_damaged_weights_are_refused_by_name(
    runs: Paths, data: Paths, tmp_path: Path, damage: str
) -> None:
    run = shutil.copytree(runs["classify"], tmp_path / "run")
    for file in run.glob("checkpoints/step-*/model.safetensors"):
        if damage == "flipped":
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        elif damage == "no record":
            (file.parent / "run.json").unlink()
        else:
            save_file({name: value / 0 for name, value in load_file(file).items()}, file)
            reseal(file.parent)
    words = {
        "flipped": r"step-\d+ is damaged: model.safetensors changed after it was written",
        "no record": r"step-\d+ is damaged: run.json is missing",
        "infinite": "step-[0-9]+: .* has values that are NaN or infinite",
    }
    for weights in ("best", "last"):
        refused(words[damage], run, data["classify"] / "test", weights=weights)


KEPT = r"run\.json: expected the description of the run's model"
ANY = r"run\.json: expected the JSON of a run"
NO_FIELDS: dict[str, object] = {}
OF_ONE = r"model_config\.json and run\.json describe different models"


@here
@for_each(
    ("kind", "changes", "words"),
    [
        *(("classify", {"picture_model": each}, KEPT) for each in (3, NO_FIELDS)),
        *(("classify", {"shards": each}, ANY) for each in ("two", -1, 1e300)),
        *(("classify", {"std": [each]}, KEPT) for each in (0.0, -1.0, math.nan, math.inf)),
        ("classify", {"mean": [math.nan]}, KEPT),
        ("segment", {"std": [0.1, 0.0, 0.1]}, KEPT),
        ("segment", {"mean": [0.5], "std": [0.5]}, KEPT),
        *(("text", {"target": {"std": each}}, KEPT) for each in (0.0, math.nan)),
        *(("classify", {"name": each}, KEPT) for each in (["lenet"], "resnet7")),
        *(("classify", each, KEPT) for each in ({"classes": ""}, {"mean": ["a"]}, {"later": 3})),
        *(("segment", {"encoder": each}, KEPT) for each in (NO_FIELDS, "resnet7")),
        *(("segment", {"width": each}, KEPT) for each in ([4], 10**9)),
        *(("segment", each, KEPT) for each in ({"threshold": [0.5]}, {"white": "x"})),
        *(("text", {"max_length": each}, KEPT) for each in (-1, "long")),
        ("text", {"pad_id": [1]}, KEPT),
        *(("text", {"pad_id": each}, OF_ONE) for each in (10**6, -1)),
        ("text", {"classes": ["good"]}, OF_ONE),
    ],
)
def test_facts_of_no_run(
    kind: str, changes: Any, words: str, runs: Paths, data: Paths, tmp_path: Path
) -> None:
    outer = set(changes) <= {*FACTS.values(), "shards"} or (
        kind == "text" and set(changes) <= {"classes", "target"}
    )
    change = lambda said: (said if outer else said[FACTS[kind]]).update(changes)  # noqa: E731
    run = changed(runs[kind], tmp_path / "run", change)
    refused(words, run, data[kind] / TESTED[kind], output=tmp_path / "out")


CLASSES = ("dark, all", "light", 'mid "way"')
FOUND = [{"class": CLASSES[2], "confidence": 0.75}, {"class": CLASSES[0], "confidence": 0.25}]


def odd() -> Prediction:
    return Prediction([{"file": name, "classes": FOUND} for name in ODD], [])


def test_names_of_all_kinds_come_back(tmp_path: Path) -> None:
    output = tmp_path / "new" / "sub" / "x.csv"
    assert put(odd(), output) == output
    with output.open(newline="", errors="surrogateescape", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == ODD
    second = {"class_2": CLASSES[0], "confidence_2": "0.250000"}
    assert rows[0] == {"file": ODD[0], "class": CLASSES[2], "confidence": "0.750000", **second}
    for name, chosen in (("x.json", {}), ("y.csv", {"format": "json"})):
        put(odd(), tmp_path / name, **chosen)
        assert json.loads((tmp_path / name).read_text(encoding="utf-8")) == odd().rows
    for format, name in (("csv", "\\xff.png"), ("json", "\\udcff.png")):
        text = written(odd(), format=format)
        assert "é.png" in text
        assert name in text
        assert text.endswith("\n")


@for_each("kind", ["a file", "a link", "a link to nothing"])
@for_each("name", ["notes.csv", "notes.json"])
def test_files_of_others_are_not_written_over(tmp_path: Path, name: str, kind: str) -> None:
    output, theirs = tmp_path / "in" / name, tmp_path / "theirs"
    output.parent.mkdir()
    if kind != "a link to nothing":
        theirs.write_text("a,b\n1,2\n")
    if kind == "a file":
        theirs.rename(output)
        theirs = output
    else:
        output.symlink_to(theirs)
    with pytest.raises(ValueError, match=f"{output}: expected a new file, or earlier predictions"):
        put(odd(), output)
    assert not theirs.exists() or theirs.read_text() == "a,b\n1,2\n"
    output.unlink()
    # One's own are, once the new file is whole.
    for format, start in (("csv", b"file,class"), ("json", b"["), ("json", b"["), ("csv", b"f")):
        if output.exists():
            (tmp_path / f"kept {len(list(tmp_path.iterdir()))}").hardlink_to(output)
        put(odd(), output, format=format)
        assert output.read_bytes().startswith(start)
        assert list(output.parent.iterdir()) == [output]
    assert all(path.read_bytes() for path in tmp_path.glob("kept*"))


@here
def test_masks_are_not_written_over_pictures_of_others(runs: Paths, tmp_path: Path) -> None:
    run, given, masks, elsewhere = runs["segment"], *(tmp_path / n for n in ("a", "b", "c"))
    save(given / "x.png", gray(16, 16, 3))
    save(given / "sub" / "y.png", gray(16, 16, 3))
    before = save(masks / "x.png", gray(4, 4)).read_bytes()
    words = r"expected new masks, or earlier masks, .*x\.png is a"
    refused(words, run, given, output=masks)
    assert (masks / "x.png").read_bytes() == before
    (masks / "x.png").unlink()
    elsewhere.mkdir()
    (masks / "sub").symlink_to(elsewhere)
    refused(r"sub is a link, and masks are not written through links", run, given, output=masks)
    assert list(elsewhere.iterdir()) == []
    (masks / "sub").unlink()
    first, again = (predicted(run, given, output=masks) for _ in range(2))
    assert first == again


FORMULAS = {text: f"'{text}" for text in ("=1+1", "+cmd|'/c calc'!A0", "-2+3", "@SUM(1)", "\ra")}
FORMULAS |= {text: f"'{text}" for text in ("\ta", "\uff1d1")}
FORMULAS |= {text: text for text in ("-5", "+1.5e3", "a=1", "a, -b", "a\r\n\r\nb")}
# Whoever reads with another separator finds cells within ours, whatever the quotes are.
FORMULAS |= {f"a{each}=1": f"a{each}'=1" for each in ",;|\t\r\n"}
FORMULAS |= {f"a;{each}1": f"a;'{each}1" for each in "+-@\t\r\uff20"}
FORMULAS |= {"\t=1": "'\t'=1", "\r=1": "'\r'=1", '";=1': "\";'=1"}


def separated(text: str, separator: str) -> list[str]:
    """The cells of a file that is read with another separator than it was written with."""
    return [
        cell
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        for cell in row
    ]


@for_each("text", FORMULAS)
def test_no_cell_is_a_formula(text: str) -> None:
    row = {"file": text, "line": 1, "text": text, "classes": [{"class": text, "confidence": 0.5}]}
    prediction = Prediction([row], [])
    (read,) = csv.DictReader(io.StringIO(as_csv([row]), newline=""))
    assert (read["file"], read["text"], read["class"]) == (FORMULAS[text],) * 3
    assert (read["line"], read["confidence"]) == ("1", "0.500000")
    assert json.loads(written(prediction, format="json")) == [row]
    cells = [cell for each in ",;|\t" for cell in separated(written(prediction), each)]
    begin = {cell[:1] for cell in cells if text not in ("-5", "+1.5e3")}
    assert not begin & set("=+-@\t\r\uff1d\uff0b\uff0d\uff20")


@here
@for_each("format", ["csv", "json"])
def test_masks_have_the_size_of_their_pictures(runs: Paths, tmp_path: Path, format: Any) -> None:
    sizes = {"a/x.jpg": (40, 30), "a/b/x.1.png": (33, 70), "y.bmp": (1, 65)}
    for name, size in sizes.items():
        save(tmp_path / "in" / name, gray(*size, 3))
    folder = tmp_path / "new" / "out"
    prediction = predicted(runs["segment"], tmp_path / "in", output=folder)
    assert put(prediction, folder, format=format) == folder / f"masks.{format}"
    masks = {row["file"]: row["mask"] for row in prediction.rows}
    assert masks == {"a/x.jpg": "a/x.png", "a/b/x.1.png": "a/b/x.1.png", "y.bmp": "y.png"}
    for row in prediction.rows:
        mask = np.asarray(pillow.open(folder / row["mask"]))
        assert mask.shape == sizes[row["file"]]
        assert set(np.unique(mask)) <= {0, 255}
        assert row["share"] == (mask == 255).mean()
    assert len(drawn(folder)) == 4
