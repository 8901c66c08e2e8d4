"""Training and test folders, however they are named and nested: used if certain, or refused."""

from pathlib import Path

import pytest

from onefold.errors import DataError
from onefold_jobs.cli.init import look
from onefold_jobs.data.classes import PictureClasses, read_classes
from onefold_jobs.data.pairs import MaskedPictures, pairs_in, read_pairs
from onefold_jobs.data.splits import find_folders
from onefold_jobs.predict import EvaluateOptions, evaluate_run
from tests.jobs.tiny import CLASSES, run_here, write_masks, write_pictures
from tests.tables import for_each

pytest.importorskip("PIL.Image", reason='needs pip install "onefold-jobs[images]"')


def moved(root: Path, **places: str) -> Path:
    """Write class folders, and move its parts ``train`` and ``test`` below ``data``."""
    written = write_pictures(root / "written")
    for part, place in places.items():
        for each in place.split():
            target = root / "data" / each
            target.parent.mkdir(parents=True, exist_ok=True)
            (written / part).rename(target) if each == place else copied(written / part, target)
    return root / "data"


def copied(source: Path, target: Path) -> None:
    for path in source.rglob("*.png"):
        there = target / path.relative_to(source)
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(path.read_bytes())


def read(data: Path, *, as_is: bool = False) -> PictureClasses:
    return read_classes(data, holdout=0.25, seed=0, skip_bad=False, labels_as_is=as_is)


@for_each(
    ("train", "test"),
    [
        ("train", "test"),
        ("Training", "Testing"),
        ("Train", "Test"),
        ("train", "Validation"),
        ("train_set", "test_set"),
        ("TrainSet", "TestSet"),
        ("training_set", "test"),
        ("dataset-train", "dataset-val"),
        ("train2017", "val2017"),
        ("seg_train/seg_train", "seg_test/seg_test"),
        ("asl_alphabet_train/asl_alphabet_train", "asl_alphabet_test"),
        ("NAME/train", "NAME/test"),
        ("NAME/NAME/Train", "NAME/NAME/Test"),
    ],
)
def test_a_split_is_recognized_by_all_commands(tmp_path: Path, train: str, test: str) -> None:
    data = moved(tmp_path, train=train, test=test)
    (data / "docs").mkdir()
    if "NAME" in train:
        (data / "docs").rmdir()
    found = read(data)
    assert (found.classes, len(found.train), len(found.test), found.own_test) == (
        CLASSES,
        24,
        12,
        True,
    )
    assert found.test.pictures.name(0) == f"{test}/apple/0.png"
    assert bool(found.notes) == ((train, test) != ("train", "test"))
    script = look(data)
    assert (script.path, script.test) == (str(data / train), str(data / test))
    assert find_folders(data, choosing=False, classes=CLASSES).test == data / test
    # A part of the data is data as well: its folders are the classes.
    assert find_folders(data / test, choosing=False, classes=CLASSES).train == data / test


@for_each(
    ("places", "words"),
    [
        ({"train": "fold_0 fold_1"}, "all of fold_0, fold_1 contain the folders apple, pear, plum"),
        ({"train": "color gray"}, "all of color, gray contain the folders apple, pear, plum"),
        (
            {"train": ".", "test": "plums"},
            "plums contains folders with the same names as the",
        ),
        (
            {"train": "train", "test": "later"},
            "contains train, but none of val.*--data .*data/train",
        ),
        ({"train": "Training"}, "contains Training, but none of val.*--data .*data/Training"),
        ({"test": "val Test"}, "expected a training folder next to Test, val"),
        ({"train": "a_train b_train", "test": "a_test b_test"}, "got several: a_test, a_train"),
        (
            {"train": "train_1 train_2", "test": "test"},
            "_1, train_2 contain the folders apple",
        ),
        (
            {"train": "Train TRAINING", "test": "test"},
            "TRAINING, Train for the same part: merge",
        ),
        ({"train": ".", "test": "test"}, "test: expected one folder per class, got one that"),
    ],
)
def test_parts_of_other_names_are_no_classes(
    tmp_path: Path, places: dict[str, str], words: str
) -> None:
    if places["train" if "train" in places else "test"] == ".":
        data = write_pictures(tmp_path / "written") / "train"
        if places["test"] == "test":
            copied(data / "plum", data / "test")
        else:
            copied(data, tmp_path / "copy")
            (tmp_path / "copy").rename(data / places["test"])
    else:
        data = moved(tmp_path, **places)
    with pytest.raises(DataError, match=words):
        read(data)
    if "none of val" not in words:
        with pytest.raises(DataError, match=words):
            look(data)


def test_classes_that_look_like_parts_are_classes(tmp_path: Path) -> None:
    written = write_pictures(tmp_path / "written")
    # A train is a vehicle, and a crash test is none of a model.
    for place, name in zip(("Train", "Car", "crash_test"), CLASSES, strict=True):
        copied(written / "train" / name, tmp_path / "vehicles" / place)
    assert read(tmp_path / "vehicles").classes == ("Car", "Train", "crash_test")
    # Said to be classes, they are.
    for place, part in (("north", "train"), ("south", "test")):
        copied(written / part, tmp_path / "sites" / place)
    with pytest.raises(DataError, match=r"north, south contain the folders.*--labels-as-is"):
        read(tmp_path / "sites")
    assert read(tmp_path / "sites", as_is=True).classes == ("north", "south")
    assert find_folders(tmp_path / "sites", classes=["north"]).train == tmp_path / "sites"
    # What a folder around one class folder holds.
    copied(written / "train", tmp_path / "archive" / "photos")
    assert read(tmp_path / "archive").classes == CLASSES


@pytest.mark.usefixtures("here")
def test_the_test_folder_of_another_name_is_scored(tmp_path: Path) -> None:
    data = moved(tmp_path, train="Training", test="Testing")
    run, _ = run_here("classify", data, tmp_path / "runs", model="lenet", augment="none")
    for place in (data, data / "Testing"):
        found = evaluate_run(run, place, EvaluateOptions())
        assert (found.data, len(found.prediction.rows)) == (data / "Testing", 12)
        assert not found.note
    note = evaluate_run(run, data / "Training", EvaluateOptions()).note
    assert note is not None
    assert "was trained on samples of" in note


def pairs(data: Path) -> MaskedPictures:
    return read_pairs(data, holdout=0.25, seed=0, skip_bad=False)


@for_each("inside", [False, True])
@for_each(("train", "test"), [("train", "test"), ("Training", "Testing"), ("seg_train", "seg_val")])
def test_masks_have_parts_as_well(tmp_path: Path, train: str, test: str, inside: bool) -> None:
    written, data = write_masks(tmp_path / "written"), tmp_path / "data"
    for part, place in (("train", train), ("test", test)):
        for kind in ("images", "masks"):
            target = data / kind / place if inside else data / place / kind
            for path in (written / part / kind).iterdir():
                name = path.name if part == "train" else f"1{path.name}"
                target.mkdir(parents=True, exist_ok=True)
                path.rename(target / name)
    found = pairs(data)
    assert (len(found.train), len(found.test), found.own_test) == (6, 3, True)
    assert all(test in str(pair.image) for pair in found.test)
    _, scored, _ = pairs_in(data, [], choosing=False)
    assert scored == found.test


def test_lists_beside_class_folders_are_reported(tmp_path: Path) -> None:
    data = moved(tmp_path, train="images")
    for name in ("train_list.txt", "train_test_split.txt", "labels.csv", "readme.txt", ".test.csv"):
        (data / name).write_text("")
    first, second = read(data).notes
    assert first.startswith(f"{data}: not used: labels.csv, train_list.txt, train_test_split.txt;")
    assert second == f"trains on {data / 'images'}"
    # Folders of a split are used, whatever is listed.
    (data / "images").rename(data / "train")
    copied(data / "train", data / "test")
    assert not any("not used" in note for note in find_folders(data).notes)
