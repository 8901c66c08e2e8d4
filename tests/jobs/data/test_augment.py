import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from onefold_jobs.data.augment import (
    CenterCrop,
    LabeledPictures,
    Mix,
    Normalize,
    RandomFlip,
    RandomResizedCrop,
    RandomShift,
    by_kornia,
)
from onefold_jobs.data.pictures import ArrayPictures, Mode
from tests.jobs.data.pictures import noise
from tests.tables import for_each

MEAN, STD = (0.5, 0.25, 0.125), (0.5, 0.25, 2.0)
TO_A_SQUARE: dict[str, Callable[[int], Callable[[Image.Image], Image.Image]]] = {
    "crop": lambda size: RandomResizedCrop(size, 0.35),
    "small crop": lambda size: RandomResizedCrop(size, 0.01),
    "whole crop": lambda size: RandomResizedCrop(size, 1.0),
    "shift": RandomShift,
    "center": CenterCrop,
    "center without margin": lambda size: CenterCrop(size, 1.0),
}
RANDOM = ["crop", "small crop", "shift"]
SIDES = st.integers(1, 90) | st.sampled_from([1, 2, 400])


def normalize(mode: Mode) -> Normalize:
    return Normalize(MEAN, STD) if mode == "RGB" else Normalize(MEAN[:1], STD[:1])


@settings(max_examples=60)
@given(
    width=SIDES,
    height=SIDES,
    size=st.integers(1, 40) | st.just(224),
    mode=st.sampled_from(["L", "RGB"]),
    name=st.sampled_from(sorted(TO_A_SQUARE)),
    seed=st.integers(0, 99),
)
@example(width=20_000, height=1, size=224, mode="RGB", name="center", seed=0)
@example(width=20_000, height=1, size=32, mode="L", name="small crop", seed=0)
def test_every_picture_becomes_a_square_of_numbers(
    width: int, height: int, size: int, mode: Mode, name: str, seed: int
) -> None:
    torch.manual_seed(seed)
    changes: list[Any] = [TO_A_SQUARE[name](size), RandomFlip()]
    picture = Image.new(mode, (width, height), "white")
    pictures: Any = [picture]
    tensor, _ = LabeledPictures(pictures, [0], mode, changes, normalize(mode))[0]
    assert tensor.shape == (3 if mode == "RGB" else 1, size, size)
    assert tensor.dtype == torch.float32
    assert tensor.isfinite().all()


def others() -> tuple[object, str]:
    return random.getstate(), str(np.random.get_state(legacy=False))


@for_each("name", [*RANDOM, "flip"])
def test_changes_are_drawn_from_pytorchs_generator_alone(name: str) -> None:
    change = RandomFlip() if name == "flip" else TO_A_SQUARE[name](16)
    picture, before = noise((40, 30)), others()

    def drawn(seed: int) -> list[bytes]:
        torch.manual_seed(seed)
        return [change(picture).tobytes() for _ in range(8)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(drawn(1))) > 1
    assert others() == before


@for_each("least_area", [0.05, 0.35, 0.9])
def test_a_random_box_is_large_enough_and_within_the_picture(least_area: float) -> None:
    """Columns and rows of a picture that grows evenly say which box was resized."""
    torch.manual_seed(0)
    columns, rows = np.meshgrid(np.arange(200), np.arange(150))
    picture = Image.fromarray(np.stack([columns, rows, rows], axis=2).astype(np.uint8))
    crop = RandomResizedCrop(8, least_area)
    for _ in range(100):
        found = np.array(crop(picture)).astype(int)
        width = (found[4, 7, 0] - found[4, 0, 0]) * 8 / 7
        height = (found[7, 4, 1] - found[0, 4, 1]) * 8 / 7
        assert 0 < width < 203
        assert 0 < height < 153
        assert width * height >= least_area * 200 * 150 * 0.9
        assert 0.6 < width / height < 1.6


def test_the_normalized_pixels_are_those_computed_by_hand() -> None:
    picture = Image.new("RGB", (2, 1))
    picture.putpixel((0, 0), (0, 255, 51))
    picture.putpixel((1, 0), (255, 0, 102))
    expected = torch.tensor([[[-1.0, 1.0]], [[3.0, -1.0]], [[0.0375, 0.1375]]])
    gray = Image.fromarray(np.array([[0, 255]], dtype=np.uint8))
    torch.set_default_dtype(torch.float64)  # which it does not follow
    try:
        found = Normalize(MEAN, STD)(picture), Normalize((0.5,), (0.5,))(gray)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[1], expected[:1])


@for_each(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_samples_reach_other_processes_with_their_changes(mode: Mode, channels: int) -> None:
    pixels = torch.arange(5 * 12, dtype=torch.uint8).view(5, 3, 4)
    changes: list[Any] = [RandomResizedCrop(6, 0.3), RandomShift(6), RandomFlip()]
    labels = [3, 1, 4, 1, 5]
    data = LabeledPictures(ArrayPictures(pixels, "digit"), labels, mode, changes, normalize(mode))

    def read(data: LabeledPictures) -> torch.Tensor:
        torch.manual_seed(4)
        samples = [data[i] for i in range(len(data))]
        assert [label for _, label in samples] == labels
        return torch.stack([picture for picture, _ in samples])

    first = read(data)
    assert first.shape == (5, channels, 6, 6)
    data[2][0].zero_()  # a sample is the caller's own
    assert torch.equal(read(data), first)
    assert torch.equal(read(pickle.loads(pickle.dumps(data))), first)


@for_each(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
def test_a_label_has_the_shares_that_the_picture_is_mixed_of(mixup: float, cutmix: float) -> None:
    mix = Mix(5, mixup, cutmix)
    samples = [(torch.full((3, 8, 6), float(number)), number) for number in range(5)]
    blends = boxes = 0
    for seed in range(40):
        torch.manual_seed(seed)
        pictures, labels = mix(samples)
        torch.testing.assert_close(labels.sum(dim=1), torch.ones(5))
        shares = labels @ torch.arange(5.0)
        torch.testing.assert_close(pictures.mean(dim=(1, 2, 3)), shares)
        values = pictures.flatten(1).unique(dim=1).shape[1]
        boxes += values > 1
        blends += values == 1 and not bool((labels == 1).any(dim=1).all())
        torch.manual_seed(seed)
        assert torch.equal(mix(samples)[0], pictures)
    assert (blends > 10) == (mixup > 0)
    assert (boxes > 10) == (cutmix > 0)


def test_a_single_picture_is_mixed_with_itself() -> None:
    picture = torch.randn(1, 4, 4)
    for mix in (Mix(2, 0.5, 0.0), Mix(2, 0.0, 0.5)):
        mixed, labels = mix([(picture, 1)])
        torch.testing.assert_close(mixed[0], picture)
        torch.testing.assert_close(labels, torch.tensor([[0.0, 1.0]]))


@pytest.mark.full
@for_each(("randaugment", "erasing"), [(9, 0.0), (0, 1.0), (9, 0.5)])
def test_kornias_changes_depend_on_the_seed_alone(randaugment: int, erasing: float) -> None:
    pytest.importorskip("kornia")
    for mode in ("L", "RGB"):
        picture = noise((30, 20), mode)
        seen = []
        for seed in (1, 1, 2, 3):
            changes = by_kornia(randaugment, erasing)
            torch.manual_seed(seed)
            changed = picture
            for change in changes:
                changed = change(changed)
            assert (changed.mode, changed.size) == (mode, picture.size)
            seen.append(changed.tobytes())
        assert seen[0] == seen[1]
        assert len(set(seen)) > 1


def test_no_library_is_asked_for_nothing() -> None:
    assert by_kornia(0, 0.0) == []
