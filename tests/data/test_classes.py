from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from onefold.data.arrays import read_digits, read_idx_folder
from onefold.data.classes import read_folders
from onefold.data.pictures import ArrayPictures
from onefold.data.splits import PictureClasses, Split, held_out
from onefold.errors import DataError, LaunchError
from tests.data.pictures import noise, write_class_folders, write_cut_jpeg, write_page
from tests.tables import for_each

PETS = ("cat", "dog")


def read(root: Path, *, holdout: float = 0.3, seed: int = 0, skip: bool = False) -> PictureClasses:
    return read_folders(root, holdout=holdout, seed=seed, skip_bad=skip)


def names(split: Split) -> list[str]:
    return [split.pictures.name(i) for i in range(len(split))]


def contents(data: PictureClasses) -> tuple[object, ...]:
    """Everything, in words and numbers."""
    parts = [(names(part), part.labels) for part in (data.train, data.test)]
    return (*parts, data.classes, data.mode, data.sizes, data.sums, list(map(str, data.left_out)))


@pytest.fixture
def given_test(tmp_path: Path) -> Path:
    """Cats and dogs, six of each to train and three to test with."""
    return write_class_folders(tmp_path / "pets", PETS)


@pytest.fixture
def unsplit(tmp_path: Path) -> Path:
    """Cats and dogs, ten of each."""
    return write_class_folders(tmp_path / "pets", PETS, train=10, test=0)


def test_folders_are_classes(given_test: Path) -> None:
    data = read(given_test)
    assert data.classes == ("cat", "dog")
    assert names(data.test) == [
        f"test/{pet}/{file}" for pet in PETS for file in ("0.png", "1.jpg", "2.png")
    ]
    assert data.test.labels == [0] * 3 + [1] * 3
    assert (len(data.train), data.train.labels) == (12, [0] * 6 + [1] * 6)
    assert (data.mode, data.left_out) == ("RGB", [])
    assert data.sizes == [(12, 10)] * 12
    assert data.train.pictures[0].size == (12, 10)


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_the_test_set_may_have_another_name(given_test: Path, name: str) -> None:
    (given_test / "test").rename(given_test / name)
    assert names(read(given_test).test)[0] == f"{name}/cat/0.png"


def test_a_test_set_goes_before_others(given_test: Path) -> None:
    shutil.copytree(given_test / "test", given_test / "val")
    assert names(read(given_test).test)[0] == "test/cat/0.png"


def test_train_without_test_is_refused(given_test: Path) -> None:
    shutil.rmtree(given_test / "test")
    with pytest.raises(DataError, match="has a folder train, and none of test, val, valid"):
        read(given_test)


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


def test_mean_and_deviation_are_those_of_the_training_pictures_alone(unsplit: Path) -> None:
    data = read(unsplit)
    arrays = [np.array(data.train.pictures[i]).reshape(-1, 3) for i in range(len(data.train))]
    pixels = torch.from_numpy(np.concatenate(arrays)).to(torch.float64) / 255
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in data.sums.mean_and_std())
    torch.testing.assert_close(mean, pixels.mean(dim=0), rtol=0, atol=1e-13)
    torch.testing.assert_close(std, pixels.std(dim=0, correction=0), rtol=0, atol=1e-13)


def test_sizes_are_those_of_the_training_pictures_alone(tmp_path: Path) -> None:
    for number in range(20):
        folder = tmp_path / PETS[number % 2]
        folder.mkdir(exist_ok=True)
        noise((4 + number, 5)).save(folder / f"{number}.png")
    data = read(tmp_path)
    assert len(data.sizes) == len(data.train) == 14
    assert data.sizes == [data.train.pictures[i].size for i in range(14)]


def test_grey_pictures_make_a_grey_data_set(tmp_path: Path) -> None:
    data = read(write_class_folders(tmp_path, PETS, mode="L"))
    assert (data.mode, len(data.sums.mean_and_std()[0])) == ("L", 1)


@for_each("file", ["train/cat/1.jpg", "test/dog/1.jpg"])
def test_one_coloured_picture_makes_a_coloured_data_set(tmp_path: Path, file: str) -> None:
    root = write_class_folders(tmp_path, PETS, mode="L")
    noise((12, 10)).save(root / file)
    data = read(root)
    assert (data.mode, len(data.sums.mean_and_std()[0])) == ("RGB", 3)


def test_one_grey_picture_among_coloured_ones_is_a_coloured_one(given_test: Path) -> None:
    noise((12, 10), "L").save(given_test / "train/cat/1.jpg")
    assert read(given_test).mode == "RGB"


def test_what_is_hidden_or_no_picture_is_passed_over(given_test: Path) -> None:
    expected = contents(read(given_test))
    cats = given_test / "train/cat"
    for name in (".DS_Store", "._0.png", "Thumbs.db", "notes.txt"):
        (cats / name).write_text("no picture")
    for folder in (cats / ".ipynb_checkpoints", given_test / "train/.git", given_test / ".cache"):
        folder.mkdir()
        shutil.copy(cats / "0.png", folder / "0-checkpoint.png")
    (given_test / "train/labels.csv").write_text("no class")
    assert contents(read(given_test)) == expected


def test_pictures_in_folders_within_belong_to_the_class(given_test: Path) -> None:
    within = given_test / "train/cat/siamese/2024.jpg"
    within.mkdir(parents=True)
    noise((4, 4)).save(within / "A.JPG", format="JPEG")
    data = read(given_test)
    assert names(data.train)[6] == "train/cat/siamese/2024.jpg/A.JPG"
    assert Counter(data.train.labels) == {0: 7, 1: 6}


def test_odd_names_are_names(tmp_path: Path) -> None:
    odd = ["ñandú", "猫", "a b", "'quoted'", "[x]", "%s", "-f", "train.png"]
    data = read(write_class_folders(tmp_path, odd, train=2, test=1))
    assert data.classes == tuple(sorted(odd))
    assert data.train.labels == [label for label in range(8) for _ in range(2)]


def test_a_class_whose_name_is_not_utf_8_can_be_told(tmp_path: Path) -> None:
    data = read(write_class_folders(tmp_path, ["dog", os.fsdecode(b"caf\xe9")], train=2, test=1))
    assert data.classes == ("caf\\xe9", "dog")
    assert names(data.train)[0].encode() == b"train/caf\\xe9/0.png"


def test_links_are_followed(given_test: Path, tmp_path: Path) -> None:
    expected = read(given_test)
    store = tmp_path / "store"
    shutil.move(given_test / "train/cat", store)
    linked = given_test / "train/cat"
    linked.mkdir()
    (linked / "0.png").symlink_to(store / "0.png")
    (linked / "rest").symlink_to(tmp_path / "rest")
    (tmp_path / "rest").mkdir()
    for number, suffix in enumerate(["jpg", "png", "jpg", "png", "jpg"], start=1):
        shutil.move(store / f"{number}.{suffix}", tmp_path / "rest")
    shutil.move(given_test / "test/dog", tmp_path / "dogs")
    (given_test / "test/dog").symlink_to(tmp_path / "dogs")
    data = read(given_test)
    assert names(data.train)[:2] == ["train/cat/0.png", "train/cat/rest/1.jpg"]
    assert names(data.test) == names(expected.test)
    assert (data.sums, data.train.labels) == (expected.sums, expected.train.labels)


def test_a_link_in_a_circle_is_gone_round_once(given_test: Path) -> None:
    expected = contents(read(given_test))
    (given_test / "train/cat/again").symlink_to(given_test / "train/cat")
    assert contents(read(given_test)) == expected


def test_a_link_that_leads_nowhere_is_bad(given_test: Path) -> None:
    (given_test / "train/cat/9.jpg").symlink_to(given_test / "gone.jpg")
    with pytest.raises(DataError, match=r"train/cat/9\.jpg: .*No such file or directory"):
        read(given_test)


def test_what_is_bad_is_refused_by_name(given_test: Path) -> None:
    for number in range(4):
        write_cut_jpeg(given_test / f"train/cat/{number}.jpg")
        write_page(given_test / f"test/dog/{number}.jpg")
    with pytest.raises(DataError, match=r"^8 of the files and lines cannot be used:") as caught:
        read(given_test)
    told = str(caught.value)
    assert [f"train/cat/{n}.jpg" in told for n in range(4)] == [True] * 4
    assert "test/dog/0.jpg" in told
    assert "test/dog/1.jpg" not in told
    assert "and 3 more" in told


def test_what_is_bad_can_be_left_out(given_test: Path) -> None:
    write_cut_jpeg(given_test / "train/cat/1.jpg")
    write_page(given_test / "test/dog/0.png")
    data = read(given_test, skip=True)
    left = [str(bad.path.relative_to(given_test)) for bad in data.left_out]
    assert left == ["train/cat/1.jpg", "test/dog/0.png"]
    assert not set(left) & {*names(data.train), *names(data.test)}
    assert (len(data.train), len(data.sizes), len(data.test)) == (11, 11, 5)
    assert data.train.labels == [0] * 5 + [1] * 6
    assert data.sums.count == 11 * 12 * 10


def test_whoever_looks_leaves_the_same_out(unsplit: Path) -> None:
    for name in ("cat/1.jpg", "dog/0.png", "dog/7.jpg"):
        write_cut_jpeg(unsplit / name)
    assert contents(read(unsplit, skip=True)) == contents(read(unsplit, skip=True))
    sets = [read(unsplit, seed=seed, skip=True) for seed in range(3)]
    assert {tuple(map(str, data.left_out)) for data in sets} == {
        tuple(map(str, sets[0].left_out)),
    }
    assert all(len(data.train) + len(data.test) == 17 for data in sets)


@pytest.mark.parametrize("part", ["train", "test"])
def test_an_empty_class_folder_is_bad(given_test: Path, part: str) -> None:
    (given_test / part / "emu").mkdir()
    with pytest.raises(DataError, match=rf"{part}/emu: expected pictures of the class, found none"):
        read(given_test)
    data = read(given_test, skip=True)
    assert (data.classes, len(data.left_out)) == (("cat", "dog"), 1)


def test_a_class_of_which_all_is_bad_is_left_out_as_a_whole(tmp_path: Path) -> None:
    root = write_class_folders(tmp_path, ["ant", "cat", "dog"], train=2, test=1)
    for name in ("0.png", "1.jpg"):
        write_page(root / "train/ant" / name)
    data = read(root, skip=True)
    assert (data.classes, data.train.labels) == (("cat", "dog"), [0, 0, 1, 1])
    assert names(data.test) == ["test/cat/0.png", "test/dog/0.png"]
    assert data.test.labels == [0, 1]
    assert len(data.left_out) == 3
    assert "no picture of its class 'ant' in" in data.left_out[-1].reason


def test_an_unsplit_class_of_which_all_is_bad_is_left_out(tmp_path: Path) -> None:
    root = write_class_folders(tmp_path, ["ant", "cat", "dog"], train=2, test=0)
    for name in ("0.png", "1.jpg"):
        write_page(root / "ant" / name)
    data = read(root, skip=True)
    assert (data.classes, data.train.labels, data.test.labels) == (PETS, [0, 1], [0, 1])


def test_a_class_that_is_only_in_test_is_bad(given_test: Path) -> None:
    shutil.copytree(given_test / "test/cat", given_test / "test/emu")
    with pytest.raises(DataError, match=r"^3 .*\n.*test/emu/0\.png: no picture of its class 'emu'"):
        read(given_test)
    data = read(given_test, skip=True)
    assert (data.classes, len(data.test), len(data.left_out)) == (PETS, 6, 3)


def test_a_class_that_is_only_in_train_is_a_class(given_test: Path) -> None:
    shutil.rmtree(given_test / "test/cat")
    data = read(given_test)
    assert (data.classes, set(data.test.labels)) == (PETS, {1})


@for_each("test", [0, 2])
def test_one_class_alone_is_refused(tmp_path: Path, test: int) -> None:
    root = write_class_folders(tmp_path, ["cat"], train=4, test=test)
    with pytest.raises(DataError, match="pictures of two classes or more, found only 'cat'"):
        read(root)


def test_nothing_sound_is_refused_even_if_it_may_be_left_out(tmp_path: Path) -> None:
    for pet in PETS:
        (tmp_path / pet).mkdir()
        write_page(tmp_path / pet / "0.jpg")
    with pytest.raises(DataError, match="pictures of two classes or more, found none"):
        read(tmp_path, skip=True)


def test_nothing_to_test_with_is_refused(given_test: Path) -> None:
    for path in (given_test / "test").rglob("*.*"):
        write_page(path)
    with pytest.raises(DataError, match="to train and to test with, found 12 and 0"):
        read(given_test, skip=True)


def test_a_class_of_one_picture_leaves_nothing_to_test_with(tmp_path: Path) -> None:
    root = write_class_folders(tmp_path, [*PETS, "emu"], train=4, test=0)
    for name in ("1.jpg", "2.png", "3.jpg"):
        (root / "emu" / name).unlink()
    words = r"emu/0\.png: expected at least two pictures of class 'emu', one of them to test with"
    with pytest.raises(DataError, match=words):
        read(root)
    data = read(root, skip=True)
    assert (data.classes, len(data.left_out)) == (PETS, 1)
    assert set(data.test.labels) == {0, 1}


def test_classes_of_one_picture_alone_are_refused_even_if_they_may_be_left_out(
    tmp_path: Path,
) -> None:
    root = write_class_folders(tmp_path, PETS, train=1, test=0)
    with pytest.raises(DataError, match="pictures of two classes or more, found none"):
        read(root, skip=True)


def test_a_class_without_a_test_picture_is_mentioned(given_test: Path) -> None:
    assert read(given_test).notes == []
    shutil.rmtree(given_test / "test/cat")
    (note,) = read(given_test).notes
    assert note == (
        f"{given_test}: the test set has no sample of 1 of the 2 classes (cat): the score says "
        f"nothing about them"
    )


@for_each("within", ["", "train"])
@for_each(
    ("folders", "words"),
    [
        (("images", "masks"), r"onefold train segment --data [^ ]*/data$"),
        (("imgs", "labels"), r"segment --data [^ ]*/data with folders named images and masks$"),
        (("Images", "GT", "more"), r"got Images and GT, which look like pictures with a mask"),
    ],
)
def test_pictures_and_their_masks_are_no_two_classes(
    tmp_path: Path, within: str, folders: tuple[str, ...], words: str
) -> None:
    root = tmp_path / "data"
    write_class_folders(root / within, folders, train=4, test=0)
    with pytest.raises(DataError, match=words):
        read(root)


@for_each("folders", [("images", "texts"), ("masks", "faces")])
def test_a_class_may_have_the_name_of_a_kind_of_file(
    tmp_path: Path, folders: tuple[str, ...]
) -> None:
    root = write_class_folders(tmp_path / "data", folders, train=4, test=0)
    assert read(root).classes == tuple(sorted(folders))


@for_each("pair", [("Lob", "lob"), ("caf\u00e9", "cafe\u0301"), ("a b", "a  b")])
def test_classes_that_differ_by_spelling_are_refused_before_anything_is_read(
    tmp_path: Path, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_class_folders(tmp_path, pair, train=4, test=0)
    assert read_folders(
        root, holdout=0.3, seed=0, skip_bad=False, labels_as_is=True
    ).classes == tuple(sorted(pair))
    monkeypatch.setattr("onefold.data.classes.scan_pictures", lambda *_: pytest.fail("read"))
    with pytest.raises(DataError, match="expected one spelling of every class"):
        read(root)


def test_folders_named_by_measured_values_are_refused(tmp_path: Path) -> None:
    root = write_class_folders(tmp_path, [f"{n / 7:.3f}" for n in range(30)], train=2, test=0)
    with pytest.raises(DataError, match="got 30 different ones on 60 samples, all of them numbers"):
        read(root)
    data = read_folders(root, holdout=0.3, seed=0, skip_bad=False, labels_as_is=True)
    assert len(data.classes) == 30


def test_a_test_set_of_training_pictures_is_refused(given_test: Path) -> None:
    shutil.rmtree(given_test / "test")
    shutil.copytree(given_test / "train", given_test / "test")
    words = r"12 of 12 test samples are in the training set as well \(test/cat/0\.png is the same"
    with pytest.raises(DataError, match=words):
        read(given_test)


def test_a_few_training_pictures_in_the_test_set_are_mentioned(given_test: Path) -> None:
    shutil.copy(given_test / "train/dog/3.jpg", given_test / "test/dog/9.jpg")
    (note,) = read(given_test).notes
    assert note == (
        f"{given_test}: 1 of 7 test samples is in the training set as well: test/dog/9.jpg is the "
        f"same as train/dog/3.jpg"
    )


def test_pictures_of_two_classes_that_are_the_same_are_mentioned(given_test: Path) -> None:
    shutil.copy(given_test / "train/cat/0.png", given_test / "train/dog/9.png")
    (note,) = read(given_test).notes
    assert note == (
        f"{given_test}: 1 sample is the same as one with another label: train/dog/9.png is the "
        f"same as train/cat/0.png"
    )


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda root: exchange(root / "train/cat/0.png", root / "train/dog/0.png"),
            id="exchanged between classes",
        ),
        pytest.param(
            lambda root: exchange(root / "test/cat/0.png", root / "test/dog/0.png"),
            id="exchanged between classes of the test set",
        ),
        pytest.param(
            lambda root: shutil.copy(root / "train/cat/0.png", root / "test/cat/0.png"),
            id="copied from training to test",
        ),
        pytest.param(
            lambda root: noise((12, 10), seed=77).save(root / "test/dog/0.png"),
            id="another test picture",
        ),
    ],
)
def test_the_digest_is_that_of_each_picture_in_its_place(
    given_test: Path, change: Callable[[Path], object]
) -> None:
    before = read(given_test)
    assert read(given_test).digest == before.digest
    change(given_test)
    assert read(given_test).digest != before.digest


def test_the_digest_stays_where_the_data_have_moved(given_test: Path, tmp_path: Path) -> None:
    before = read(given_test).digest
    given_test.rename(tmp_path / "moved")
    assert read(tmp_path / "moved").digest == before


def test_classes_that_differ_in_bytes_alone_stay_apart(tmp_path: Path) -> None:
    other = [os.fsdecode(name) for name in (b"caf\xe8", b"caf\xe9")]
    data = read(write_class_folders(tmp_path, ["dog", *other], train=2, test=1))
    assert data.classes == ("caf\\xe8", "caf\\xe9", "dog")
    assert json.loads(json.dumps(data.classes)) == list(data.classes)


def test_classes_that_would_be_written_alike_are_refused(tmp_path: Path) -> None:
    write_class_folders(tmp_path, [os.fsdecode(b"caf\xe9"), "caf\\xe9"], train=2, test=1)
    with pytest.raises(DataError, match="expected names of classes that can be told apart"):
        read(tmp_path)


def deep(path: Path, largest: int, seed: int) -> None:
    """A picture of 16 bits with values up to a largest one."""
    values = np.random.default_rng(seed).integers(0, largest + 1, (10, 12))
    values[0, 0] = largest
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint16)).save(path)


def test_pictures_of_twelve_bits_keep_their_greys(tmp_path: Path) -> None:
    for number in range(12):
        largest = 4000 if number == 5 else 150 + number
        deep(tmp_path / PETS[number % 2] / f"{number}.png", largest, number)
    data = read(tmp_path)
    assert data.white == 4095
    (note,) = data.notes
    assert note == (
        "12 of 12 pictures have more than 8 bits a pixel and values up to 4000: 4095 is used as "
        "white for all of these"
    )
    pixels = {}
    for split in (data.train, data.test):
        for i in range(len(split)):
            pixels[split.pictures.name(i)] = np.asarray(split.pictures[i])
    assert len(np.unique(pixels["dog/5.png"])) > 50
    assert {name for name, values in pixels.items() if values.max() > 10} == {"dog/5.png"}
    arrays = [np.asarray(data.train.pictures[i]).reshape(-1) for i in range(len(data.train))]
    expected = np.concatenate(arrays).astype(np.int64)
    assert data.sums.totals == [int(expected.sum())]


def test_the_white_of_a_data_set_is_that_of_training_and_test(tmp_path: Path) -> None:
    for part, largest in (("train", 900), ("test", 3000)):
        for number in range(6):
            deep(tmp_path / part / PETS[number % 2] / f"{number}.png", largest, number)
    data = read(tmp_path)
    assert data.white == 4095
    assert max(np.asarray(data.train.pictures[i]).max() for i in range(6)) == 900 * 255 // 4095


@for_each("kind", ["nothing", "a file", "an empty folder", "pictures"])
def test_what_is_no_folder_of_class_folders_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data"
    if kind == "a file":
        path.write_text("no folder")
    elif kind != "nothing":
        path.mkdir()
    if kind == "pictures":
        noise((3, 3)).save(path / "0.png")
    with pytest.raises(DataError, match=re.escape(f"{path}: expected a folder")):
        read(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_bad(given_test: Path) -> None:
    folder = given_test / "train/cat"
    folder.chmod(0)
    try:
        with pytest.raises(DataError, match="train/cat: expected a folder that can be read"):
            read(given_test)
    finally:
        folder.chmod(0o755)


def test_the_same_seed_holds_the_same_out(unsplit: Path) -> None:
    assert contents(read(unsplit, seed=1)) == contents(read(unsplit, seed=1))
    assert len({tuple(names(read(unsplit, seed=seed).test)) for seed in range(4)}) > 1


def test_the_parts_are_the_whole_and_share_nothing(unsplit: Path) -> None:
    data = read(unsplit, holdout=0.3)
    train, test = names(data.train), names(data.test)
    assert sorted(train + test) == sorted(
        str(path.relative_to(unsplit)) for path in unsplit.rglob("*.*")
    )
    assert not set(train) & set(test)
    assert (Counter(data.train.labels), Counter(data.test.labels)) == ({0: 7, 1: 7}, {0: 3, 1: 3})


@given(
    labels=st.lists(st.sampled_from("abc"), max_size=60),
    share=st.floats(0.001, 0.999),
    seed=st.integers(0, 2**31),
)
def test_of_every_class_a_share_isheld_out_never_none_never_all(
    labels: list[str], share: float, seed: int
) -> None:
    before = torch.get_rng_state()
    held = held_out(labels, share=share, seed=seed)
    assert held == held_out(labels, share=share, seed=seed)
    assert torch.equal(torch.get_rng_state(), before)
    out = Counter(labels[i] for i in held)
    for label, count in Counter(labels).items():
        if count == 1:
            assert out[label] == 0
        else:
            assert 1 <= out[label] <= count - 1
            assert abs(out[label] - share * count) <= 1


def test_the_data_set_reaches_other_processes(unsplit: Path) -> None:
    write_page(unsplit / "cat/1.jpg")
    data = read(unsplit, skip=True)
    copy = pickle.loads(pickle.dumps(data))
    assert contents(copy) == contents(data)
    assert copy.train.pictures[3].tobytes() == data.train.pictures[3].tobytes()


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def write_four(
    root: Path,
    train: list[int],
    test: list[int],
    sizes: tuple[tuple[int, int], tuple[int, int]] = ((5, 4), (5, 4)),
) -> Path:
    """MNIST's four files of these labels, and the pixels of the training images."""
    generator = np.random.default_rng(0)
    for prefix, labels, size in zip(("train", "t10k"), (train, test), sizes, strict=True):
        pixels = generator.integers(0, 256, (len(labels), *size), dtype=np.uint8)
        write_idx(root / f"{prefix}-images-idx3-ubyte.gz", pixels)
        write_idx(root / f"{prefix}-labels-idx1-ubyte.gz", np.array(labels))
    return root


def test_four_idx_files_are_a_data_set(tmp_path: Path) -> None:
    data = read_idx_folder(write_four(tmp_path, [2, 0, 1, 2], [1, 0]))
    assert (data.classes, data.mode, data.left_out) == (("0", "1", "2"), "L", [])
    assert (data.train.labels, data.test.labels) == ([2, 0, 1, 2], [1, 0])
    assert data.sizes == [(4, 5)] * 4
    assert data.train.pictures[0].size == (4, 5)
    assert (data.train.pictures.name(3), data.test.pictures.name(0)) == (
        "training picture 3",
        "test picture 0",
    )
    pixels = np.stack([np.asarray(data.train.pictures[i]) for i in range(4)]) / 255
    mean, std = data.sums.mean_and_std()
    assert mean == pytest.approx([pixels.mean()], abs=1e-13)
    assert std == pytest.approx([pixels.std()], abs=1e-13)


def test_idx_classes_may_have_names(tmp_path: Path) -> None:
    assert read_idx_folder(write_four(tmp_path, [1, 0], [1]), PETS).classes == PETS


def test_the_idx_data_set_reaches_other_processes(tmp_path: Path) -> None:
    data = read_idx_folder(write_four(tmp_path, [1, 0], [1]))
    copy = pickle.loads(pickle.dumps(data))
    assert contents(copy) == contents(data)
    assert copy.test.pictures[0].tobytes() == data.test.pictures[0].tobytes()


@for_each(
    ("train", "test", "words"),
    [
        ([0, 1], [2], "t10k-labels.*expected labels of the training set, 0 to 1, got 2"),
        ([0, 0], [0], "train-labels.*expected two classes or more, found only 0"),
        ([0, 2], [0], "train-labels.*expected labels 0 to 1, got 2"),
    ],
)
def test_idx_labels_that_are_no_classes_are_refused(
    tmp_path: Path, train: list[int], test: list[int], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        read_idx_folder(write_four(tmp_path, train, test), PETS)


def test_idx_labels_that_are_measured_values_are_refused(tmp_path: Path) -> None:
    root = write_four(tmp_path, list(range(60)), [0, 1])
    with pytest.raises(DataError, match="got 60 different ones on 60 samples, all of them numbers"):
        read_idx_folder(root)
    assert len(read_idx_folder(root, labels_as_is=True).classes) == 60


def test_an_idx_test_set_of_training_pictures_is_refused(tmp_path: Path) -> None:
    write_four(tmp_path, [0, 1, 1, 0], [0, 1, 1, 0])
    for kind in ("images-idx3", "labels-idx1"):
        shutil.copy(tmp_path / f"train-{kind}-ubyte.gz", tmp_path / f"t10k-{kind}-ubyte.gz")
    with pytest.raises(DataError, match="4 of 4 test samples are in the training set as well"):
        read_idx_folder(tmp_path)


def test_a_missing_idx_file_is_named(tmp_path: Path) -> None:
    (write_four(tmp_path, [0, 1], [1]) / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match="t10k-labels-idx1-ubyte"):
        read_idx_folder(tmp_path)


@pytest.fixture(scope="module")
def _with_scikit_learn() -> None:
    """Imported before a test begins, as importing it sets variables of the environment."""
    pytest.importorskip("sklearn.datasets")


@pytest.mark.usefixtures("_with_scikit_learn")
def test_the_digits_are_split_by_class_and_seed() -> None:
    data, same, other = (read_digits(holdout=0.2, seed=seed) for seed in (3, 3, 4))
    assert (len(data.train) + len(data.test), len(data.classes)) == (1797, 10)
    assert data.sizes[0] == data.train.pictures[0].size == (8, 8)
    whole, held = Counter(data.train.labels + data.test.labels), Counter(data.test.labels)
    assert [held[c] for c in range(10)] == [round(0.2 * whole[c]) for c in range(10)]
    sources = [each.test.pictures for each in (data, same, other)]
    pixels = [source.pixels for source in sources if isinstance(source, ArrayPictures)]
    assert (int(pixels[0].min()), int(pixels[0].max())) == (0, 255)
    assert torch.equal(pixels[0], pixels[1])
    assert not torch.equal(pixels[0], pixels[2])
    assert contents(data) == contents(same)


def test_without_scikit_learn_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r'pip install "onefold\[demo\]"'):
        read_digits(holdout=0.1, seed=0)
