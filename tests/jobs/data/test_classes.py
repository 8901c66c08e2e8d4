"""Folders of pictures, a folder a class."""

import pickle
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.errors import DataError
from onefold_jobs.data.classes import PictureClasses, Split, read_classes
from onefold_jobs.data.samples import hold_out
from onefold_jobs.data.splits import find_folders
from tests.jobs.data.pictures import noise, write_class_folders, write_cut_jpeg, write_page
from tests.tables import for_each

PETS = ("cat", "dog")


def read(root: Path, *, skip: bool = False, **choices: Any) -> PictureClasses:
    return read_classes(root, **{"holdout": 0.3, "seed": 0, "skip_bad": skip, **choices})


def names(split: Split) -> list[str]:
    return [split.pictures.name(i) for i in range(len(split))]


def contents(data: PictureClasses) -> tuple[object, ...]:
    parts = [(names(part), part.labels) for part in (data.train, data.test)]
    return (*parts, data.classes, data.mode, data.sizes, data.sums, list(map(str, data.left_out)))


@pytest.fixture
def given_test(tmp_path: Path) -> Path:
    return write_class_folders(tmp_path / "pets", PETS)


def test_folders_are_classes(given_test: Path) -> None:
    data = read(given_test)
    files = ("0.png", "1.jpg", "2.png")
    assert names(data.test) == [f"test/{pet}/{file}" for pet in PETS for file in files]
    assert data.test.labels == [0] * 3 + [1] * 3
    assert (len(data.train), data.train.labels) == (12, [0] * 6 + [1] * 6)
    assert (data.classes, data.mode, data.left_out, data.notes) == (PETS, "RGB", [], [])
    folder = given_test / "test"
    for name in ("valid", "validation", "val"):
        folder = folder.rename(given_test / name)
        assert names(read(given_test).test)[0] == f"{name}/cat/0.png"
    folder.rename(given_test / "later")
    with pytest.raises(DataError, match="contains train, but none of val, valid"):
        read(given_test)


def test_a_validation_set_chooses_the_epoch_and_leaves_the_test_set_unseen(
    given_test: Path,
) -> None:
    shutil.copytree(given_test / "test", given_test / "val")
    assert names(read(given_test).test)[0] == "val/cat/0.png"
    assert find_folders(given_test, choosing=False).test == given_test / "test"


def test_the_order_is_that_of_the_names_and_not_of_the_disk(tmp_path: Path) -> None:
    for root, order in (("a", [3, 1, 10, 2]), ("b", [10, 2, 3, 1])):
        for number in order:
            folder = tmp_path / root / f"class {number}"
            folder.mkdir(parents=True)
            for i in order:
                noise((4, 4), seed=100 * number + i).save(folder / f"{i}.png")
    one, other = read(tmp_path / "a"), read(tmp_path / "b")
    assert contents(one) == contents(other)
    assert one.classes == ("class 1", "class 10", "class 2", "class 3")


def test_hidden_files_are_passed_over_and_links_followed(given_test: Path, tmp_path: Path) -> None:
    expected = contents(read(given_test))
    cats = given_test / "train/cat"
    for name in (".DS_Store", "._0.png", "Thumbs.db", "notes.txt"):
        (cats / name).write_text("no image")
    for folder in (cats / ".ipynb_checkpoints", given_test / "train/.git"):
        folder.mkdir()
        shutil.copy(cats / "0.png", folder / "0-checkpoint.png")
    (given_test / "train/labels.csv").write_text("no class")
    (cats / "again").symlink_to(cats)  # in a circle, which is followed once
    assert contents(read(given_test)) == expected
    (cats / "siamese").mkdir()
    shutil.move(cats / "5.jpg", cats / "siamese/A.JPG")
    (tmp_path / "rest").mkdir()
    (cats / "rest").symlink_to(tmp_path / "rest")
    shutil.move(cats / "1.jpg", tmp_path / "rest")
    data = read(given_test)
    found = ["0.png", "2.png", "3.jpg", "4.png", "rest/1.jpg", "siamese/A.JPG"]
    assert names(data.train)[:6] == [f"train/cat/{name}" for name in found]
    assert data.sums == expected[-2]


def test_what_is_bad_is_refused_by_name(given_test: Path) -> None:
    for number in range(4):
        write_cut_jpeg(given_test / f"train/cat/{number}.jpg")
        write_page(given_test / f"test/dog/{number}.jpg")
    (given_test / "train/cat/9.jpg").symlink_to(given_test / "gone.jpg")
    with pytest.raises(DataError, match=r"^9 files cannot be used:") as caught:
        read(given_test)
    message = str(caught.value)
    assert [f"train/cat/{n}.jpg" in message for n in (*range(4), 9)] == [True] * 5
    assert "test/dog" not in message
    every = re.search(r"and 4 more; all of them are listed in (.*)\n", message)
    assert every
    listed = Path(every[1]).read_text()
    Path(every[1]).unlink()
    assert len(re.findall(r"test/dog/\d\.jpg: ", listed)) == 4


def test_what_is_bad_can_be_left_out_and_is_the_same_for_all(given_test: Path) -> None:
    write_cut_jpeg(given_test / "train/cat/1.jpg")
    write_page(given_test / "test/dog/0.png")
    data = read(given_test, skip=True)
    left = [str(bad.path.relative_to(given_test)) for bad in data.left_out]
    assert left == ["train/cat/1.jpg", "test/dog/0.png"]
    assert not set(left) & {*names(data.train), *names(data.test)}
    assert (len(data.train), len(data.sizes), len(data.test)) == (11, 11, 5)
    assert data.train.labels == [0] * 5 + [1] * 6
    assert data.sums.count == 11 * 12 * 10
    copy = pickle.loads(pickle.dumps(data))
    assert contents(copy) == contents(data) == contents(read(given_test, seed=3, skip=True))
    assert copy.train.pictures[3].tobytes() == data.train.pictures[3].tobytes()


def test_a_class_that_cannot_be_learned_or_tested_is_bad(given_test: Path, tmp_path: Path) -> None:
    (given_test / "train/emu").mkdir()
    shutil.copytree(given_test / "test/cat", given_test / "test/fox")
    for part in ("train", "test"):
        shutil.copytree(given_test / "test/cat", given_test / part / "ant")
    for path in (given_test / "train/ant").iterdir():
        write_page(path)
    data = read(given_test, skip=True)
    assert (data.classes, len(data.train), len(data.test)) == (PETS, 12, 6)
    left = "\n".join(map(str, data.left_out))
    assert "train/emu: expected images of the class, found none" in left
    assert len(re.findall(r"test/fox/\d.*: no usable image of its class 'fox' in", left)) == 3
    assert len(re.findall(r"test/ant/\d.*: no usable image of its class 'ant' in", left)) == 3
    with pytest.raises(DataError, match="10 files cannot be used"):
        read(given_test)
    unsplit = write_class_folders(tmp_path / "unsplit", PETS, train=4, test=0)
    write_class_folders(unsplit, ["emu"], train=1, test=0)
    data = read(unsplit)
    assert (data.classes, data.left_out) == ((*PETS, "emu"), [])
    assert (set(data.train.labels), set(data.test.labels)) == ({0, 1, 2}, {0, 1})
    assert "the test set has no samples of 1 of the 3 classes (emu)" in data.notes[0]


def test_too_little_is_refused_even_where_bad_ones_are_left_out(tmp_path: Path) -> None:
    for classes, train, test, spoilt, words in (
        (
            ["cat"],
            4,
            0,
            "",
            "two different labels, got only 'cat', on 3 usable samples$",
        ),
        (PETS, 1, 0, "", "expected test images, found none"),
        (
            PETS,
            2,
            1,
            "*/*/*",
            r"two different labels, got 0 usable samples; \d+ others are unusable, such as",
        ),
        (PETS, 6, 3, "test/*/*", "expected test images, found none"),
        ([], 0, 0, "", "data: expected a folder"),
    ):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        root = write_class_folders(tmp_path / "data", classes, train=train, test=test)
        for path in root.glob(spoilt) if spoilt else ():
            write_page(path)
        with pytest.raises(DataError, match=words):
            read(root, skip=True)


@for_each(
    ("classes", "words"),
    [
        (("images", "masks"), r"onefold train segment --data [^ ]*/data$"),
        (("imgs", "labels"), r"segment --data [^ ]*/data with folders named images and masks$"),
        (("Images", "GT", "more"), r"got Images and GT, which look like images with masks"),
        (("Lob", "lob"), "expected one spelling of every class"),
        (("caf\u00e9", "cafe\u0301"), "expected one spelling of every class"),
        ([f"{n / 7:.3f}" for n in range(30)], "got 30 different ones on 60 samples, all of them"),
    ],
)
def test_names_that_are_no_classes_are_refused_before_anything_is_read(
    tmp_path: Path, classes: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_class_folders(tmp_path / "data", classes, train=2, test=0)
    if words.startswith(("expected", "got 30")):
        assert read(root, labels_as_is=True).classes == tuple(sorted(classes))
    monkeypatch.setattr("onefold_jobs.data.classes.scan_pictures", lambda *_: pytest.fail("read"))
    with pytest.raises(DataError, match=words):
        read(root)


def test_samples_that_are_the_same_are_mentioned_or_refused(given_test: Path) -> None:
    shutil.copy(given_test / "train/dog/3.jpg", given_test / "test/dog/9.jpg")
    shutil.copy(given_test / "train/cat/0.png", given_test / "train/dog/9.png")
    first, second = sorted(note.partition(": ")[2] for note in read(given_test).notes)
    assert first.startswith("1 of 7 test samples is also in the training set: test/dog/9.jpg is")
    assert second.startswith("1 sample is the same as one with another label: train/dog/9.png is")
    shutil.rmtree(given_test / "test/cat")
    assert "no samples of 1 of the 2 classes (cat), so" in " ".join(read(given_test).notes)
    shutil.copytree(given_test / "train/cat", given_test / "test/cat")
    shutil.rmtree(given_test / "test/dog")
    words = r"6 of 6 test samples are also in the training set \(test/cat/0\.png is"
    with pytest.raises(DataError, match=words):
        read(given_test)


def test_the_digest_is_that_of_each_picture_in_its_place(given_test: Path, tmp_path: Path) -> None:
    root = given_test
    digests = [read(root).digest]
    root = root.rename(tmp_path / "moved")
    assert read(root).digest == digests[0]
    for part in ("train", "test"):  # two classes exchange a picture
        (root / part / "cat/0.png").rename(root / "aside")
        (root / part / "dog/0.png").rename(root / part / "cat/0.png")
        (root / "aside").rename(root / part / "dog/0.png")
        digests.append(read(root).digest)
    shutil.copy(root / "train/cat/0.png", root / "test/cat/0.png")
    digests.append(read(root).digest)
    assert len(set(digests)) == 4


def test_the_parts_are_the_whole_and_the_seed_decides(tmp_path: Path) -> None:
    unsplit = write_class_folders(tmp_path, PETS, train=10, test=0)
    data = read(unsplit)
    files = sorted(str(path.relative_to(unsplit)) for path in unsplit.rglob("*.*"))
    assert sorted(names(data.train) + names(data.test)) == files
    assert (Counter(data.train.labels), Counter(data.test.labels)) == ({0: 7, 1: 7}, {0: 3, 1: 3})
    assert contents(read(unsplit)) == contents(data)
    assert len({tuple(names(read(unsplit, seed=seed).test)) for seed in range(4)}) > 1


@given(
    labels=st.lists(st.sampled_from("abc"), max_size=60),
    share=st.floats(0.001, 0.999),
    seed=st.integers(0, 2**31),
)
def test_a_share_of_every_class_is_held_out(labels: list[str], share: float, seed: int) -> None:
    before = torch.get_rng_state()
    numbers = range(len(labels))
    kept, held = hold_out(numbers, labels, share=share, seed=seed)
    assert (kept, held) == hold_out(numbers, labels, share=share, seed=seed)
    assert sorted([*kept, *held]) == list(numbers)
    assert torch.equal(torch.get_rng_state(), before)
    out = Counter(labels[i] for i in held)
    for label, count in Counter(labels).items():
        assert min(1, count - 1) <= out[label] <= count - 1
        assert count == 1 or abs(out[label] - share * count) <= 1
