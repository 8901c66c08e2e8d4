"""Pictures with masks: what is cut and turned, what counts in losses and scores, what is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import onefold
from onefold.cli.verify import verify_script
from onefold.core.options import RunOptions
from onefold.data.augment import IMAGENET, Normalise
from onefold.data.masks import VOID, MaskRule
from onefold.data.pairs import MaskedPictures, Pair
from onefold.errors import CheckpointError, DataError
from onefold.jobs import segment
from onefold.jobs.finetune import best_checkpoint
from onefold.jobs.predict import PredictOptions, predict_run
from onefold.jobs.segment import (
    MaskModel,
    SegmentOptions,
    overlaps,
)
from onefold.jobs.segment_pictures import Crops, Padded, WholePictures, inside, whole_logits
from onefold.jobs.training import Task
from onefold.models.unet import UNet
from tests.masked import black_and_white, grey, on_cpu, run_here, save, save_pairs
from tests.small import bits, make_trainer

pytestmark = pytest.mark.full

pytest.importorskip("PIL", reason='needs pip install "onefold[images]"')

SIZES = [(40, 50), (33, 90), (32, 32), (20, 70), (9, 7)]
"""Height and width; crops of 32 cut all but the last and, in one direction, the one before it."""
TINY: dict[str, Any] = {"encoder": "resnet18", "width": 4, "devices": "cpu:1"}
PLAIN = Normalise((0.0,) * 3, (1.0,) * 3)


@pytest.fixture(scope="module")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    """Pictures that are their own masks, black and white."""
    folder = tmp_path_factory.mktemp("doubles")
    paths = [
        save(folder / f"{number}.png", black_and_white(*size, seed=number))
        for number, size in enumerate(SIZES)
    ]
    return [Pair(path, path) for path in paths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five pictures to train with and three to test with, not all of a size."""
    folder = tmp_path_factory.mktemp("pairs")
    save_pairs(folder / "train", [(40, 40), (33, 50), (40, 40), (20, 36), (40, 40)])
    save_pairs(folder / "test", [(40, 30), (34, 64), (20, 20)], first=5)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """A run of two epochs, crops of 32 and a last batch of one picture."""
    return run_here(
        "segment",
        tmp_path_factory.mktemp("runs") / "tiny",
        data=str(folder),
        epochs=2,
        batch_size=4,
        crop=32,
        normalise="imagenet",
        **TINY,
    )


def options(**chosen: Any) -> SegmentOptions:
    return SegmentOptions(**{**TINY, "crop": 32, "epochs": 1, "lr": 0.01, **chosen})


def task_of(folder: Path, **chosen: Any) -> Task:
    asked = options(data=str(folder), **chosen)
    data = segment.prepare(asked)
    return segment.make_task(segment.settle(asked, data), data)


def pixelwise() -> nn.Module:
    """A model that sees one pixel at a time: meant where the picture is bright."""
    model = nn.Conv2d(3, 1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(-1.5)
    return model


# Cutting and turning.


@settings(max_examples=60)
@given(
    number=st.integers(0, len(SIZES) - 1),
    seed=st.integers(0, 2**31),
    flip=st.sampled_from(["yes", "no"]),
    turns=st.sampled_from(["yes", "no"]),
)
def test_picture_and_mask_are_changed_together(
    doubles: list[Pair], number: int, seed: int, flip: Any, turns: Any
) -> None:
    crops = Crops(doubles, options(flip=flip, turns=turns, jitter=0.0), PLAIN)
    torch.manual_seed(seed)
    image, mask = crops[number]
    assert image.dtype == mask.dtype == torch.float32
    assert all(torch.equal(channel, mask) for channel in image)
    sides = sorted(min(32, side) for side in SIZES[number])
    assert sorted(mask.shape) == sides
    assert turns == "yes" or list(mask.shape) == [min(32, side) for side in SIZES[number]]


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    f"{quarters} quarters{', mirrored' if mirrored else ''}": (
        lambda pixels, quarters=quarters, mirrored=mirrored: torch.rot90(
            pixels.flip(1) if mirrored else pixels, quarters
        )
    )
    for mirrored in (False, True)
    for quarters in range(4)
}


@pytest.mark.parametrize(
    ("flip", "turns", "expected"),
    [
        ("no", "no", {"0 quarters"}),
        ("yes", "no", {"0 quarters", "0 quarters, mirrored"}),
        ("no", "yes", {f"{quarters} quarters" for quarters in range(4)}),
        ("yes", "yes", set(WAYS)),
    ],
)
def test_every_way_that_was_asked_for_happens(
    doubles: list[Pair], flip: Any, turns: Any, expected: set[str]
) -> None:
    crops = Crops(doubles, options(flip=flip, turns=turns, jitter=0.0), PLAIN)
    torch.manual_seed(0)
    square = WholePictures(doubles, PLAIN)[2][1]
    seen = [
        [way for way, turn in WAYS.items() if torch.equal(mask, turn(square))]
        for mask in (crops[2][1] for _ in range(60))
    ]
    assert all(len(ways) == 1 for ways in seen)
    assert {ways[0] for ways in seen} == expected


def test_crops_come_from_all_over_the_picture(tmp_path: Path) -> None:
    pixels = np.arange(34 * 33 * 3, dtype=np.int64).reshape(34, 33, 3)
    coded = np.stack([pixels[..., 0] // 256, pixels[..., 0] % 256, pixels[..., 0] * 0], axis=2)
    path = save(tmp_path / "x.png", coded.astype(np.uint8))
    crops = Crops([Pair(path, path)], options(flip="no", jitter=0.0), PLAIN)
    whole = PLAIN(pixel_picture(path))
    torch.manual_seed(0)
    corners = set()
    for image in (crops[0][0] for _ in range(60)):
        row, column = (whole == image[:, :1, :1]).all(dim=0).nonzero()[0].tolist()
        assert torch.equal(image, whole[:, row : row + 32, column : column + 32])
        corners.add((row, column))
    assert corners == {(row, column) for row in range(3) for column in range(2)}


def pixel_picture(path: Path) -> Any:
    from PIL import Image

    return Image.open(path)


def test_jitter_changes_the_picture_and_not_the_mask(tmp_path: Path) -> None:
    image = save(tmp_path / "image.png", grey(32, 32, 3))
    pair = Pair(image, save(tmp_path / "mask.png", black_and_white(32, 32)))
    whole, mask = WholePictures([pair], PLAIN)[0]
    crops = Crops([pair], options(flip="no", jitter=0.2), PLAIN)
    torch.manual_seed(0)
    drawn = [crops[0] for _ in range(8)]
    assert all(torch.equal(each, mask) for _, each in drawn)
    changes = [float((changed - whole).abs().mean()) for changed, _ in drawn]
    assert len(set(changes)) == len(changes)
    assert 0 < max(changes) < 0.4


def test_the_same_seed_gives_the_same_crop(doubles: list[Pair]) -> None:
    crops = Crops(doubles, options(turns="yes"), PLAIN)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(crops[0][0])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


# Padding.


@given(
    sizes=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=4),
    stride=st.sampled_from([16, 32]),
)
def test_pictures_of_any_size_make_a_shard(sizes: list[tuple[int, int]], stride: int) -> None:
    samples = [(torch.rand(3, *size), torch.rand(*size)) for size in sizes]
    batch = Padded(stride)(samples)
    height, width = batch["images"].shape[2:]
    most = [max(each) for each in zip(*sizes, strict=True)]
    assert [height, width] == [max(2, -(-side // stride)) * stride for side in most]
    assert batch["masks"].shape == (len(sizes), height, width)
    assert batch["sizes"].tolist() == [list(size) for size in sizes]
    counted = inside(batch["sizes"], height, width)
    for row, (image, mask) in enumerate(samples):
        assert torch.equal(batch["images"][row][:, counted[row]], image.flatten(1))
        assert torch.equal(batch["masks"][row][counted[row]], mask.flatten())
    assert not batch["images"].masked_select(~counted.unsqueeze(1)).any()
    assert not batch["masks"].masked_select(~counted).any()


@pytest.mark.parametrize("part", ["train_set", "test_set"])
def test_padding_counts_neither_in_the_loss_nor_in_scores(folder: Path, part: str) -> None:
    task = task_of(folder, pos_weight="3", jitter=0.0, flip="no")
    model, samples = pixelwise().requires_grad_(False), []
    for number in range(len(getattr(task, part))):
        torch.manual_seed(number)
        samples.append(getattr(task, part)[number])
    tight, wide, garish = (Padded(stride)(samples) for stride in (32, 96, 32))
    outside = ~inside(garish["sizes"], *garish["masks"].shape[1:])
    garish["images"].masked_fill_(outside.unsqueeze(1), 50.0)
    pixels = sum(mask.numel() for _, mask in samples)
    losses = [task.loss(model, batch) for batch in (tight, wide, garish)]
    assert [int(loss.weight) for loss in losses] == [pixels] * 3
    weight = torch.tensor(3.0)
    by_hand = sum(
        F.binary_cross_entropy_with_logits(
            model(image)[0], mask, pos_weight=weight, reduction="sum"
        ).item()
        for image, mask in samples
    )
    totals = torch.stack([loss.total for loss in losses]).tolist()
    assert totals == pytest.approx([by_hand] * 3, rel=1e-5)
    scores = [task.score(model, batch) for batch in (tight, wide, garish)]
    for name in ("iou", "dice"):
        values = {(float(score[name].total), float(score[name].weight)) for score in scores}
        assert len(values) == 1
    assert float(scores[1]["loss"].total) == pytest.approx(by_hand, rel=1e-5)


def test_padding_gives_no_gradient(folder: Path) -> None:
    task, model = task_of(folder), pixelwise()
    batch = Padded(32)([task.test_set[0], task.test_set[1]])
    batch["images"].requires_grad_()
    task.loss(model, batch).total.backward()
    counted = inside(batch["sizes"], *batch["masks"].shape[1:])
    gradient = batch["images"].grad.abs().sum(dim=1)
    assert bool((gradient > 0).eq(counted).all())


def test_what_is_said_of_a_picture_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    model = UNet("resnet18", width=8).eval()
    samples = [
        (torch.randn(3, *size), torch.zeros(size)) for size in [(40, 30), (90, 70), (60, 33)]
    ]
    with torch.no_grad():
        together = whole_logits(model, Padded(32)(samples), 32)
        for row, sample in enumerate(samples):
            alone = model(Padded(32)([sample])["images"])[0, 0]
            height, width = alone.shape
            torch.testing.assert_close(together[row, :height, :width], alone, rtol=1e-4, atol=1e-4)
            assert not together[row, height:].any()
            assert not together[row, :, width:].any()


# Scores.


def pictures(tmp_path: Path, said: Sequence[Any], meant: Sequence[Any]) -> list[Pair]:
    """Pictures that are bright where `pixelwise` is to say so, and the masks that are meant."""
    return [
        Pair(
            save(tmp_path / f"image-{number}.png", np.asarray(bright, dtype=np.uint8) * 255),
            save(tmp_path / f"mask-{number}.png", np.asarray(mask, dtype=np.uint8)),
        )
        for number, (bright, mask) in enumerate(zip(said, meant, strict=True))
    ]


SAID = ([[1, 1, 0, 0]], [[1], [0], [0]], [[0, 0], [0, 0]])
MEANT = ([[1, 0, 0, 0]], [[1], [1], [1]], [[0, 0], [0, 0]])


def test_pixels_are_counted_by_picture(tmp_path: Path) -> None:
    data = WholePictures(pictures(tmp_path, SAID, MEANT), PLAIN)
    batch = Padded(32)([data[number] for number in range(3)])
    found = overlaps(pixelwise()(batch["images"]).squeeze(1), batch, 0.5)
    assert [part.tolist() for part in found] == [[1, 1, 0], [2, 1, 0], [1, 3, 0]]
    assert {part.dtype for part in found} == {torch.float64}


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_scores_of_a_test_set_are_ratios_of_sums(
    tmp_path: Path, folder: Path, batch_size: int, shards: int
) -> None:
    task, padded = task_of(folder), Padded(32)
    data = WholePictures(pictures(tmp_path, SAID, MEANT), PLAIN)
    trainer = make_trainer(pixelwise(), task.loss, shards=shards)
    scores = trainer.evaluate(task.score, data, batch_size=batch_size, collate=padded)
    # Overlaps 1 + 1 + 0, predicted 2 + 1 + 0, meant 1 + 3 + 0; means of ratios: 0.42 and 0.58.
    assert scores["iou"] == pytest.approx(2 / (3 + 4 - 2), abs=1e-12)
    assert scores["dice"] == pytest.approx(2 * 2 / (3 + 4), abs=1e-12)
    # Logits are 1.5 where the picture is bright and -1.5 elsewhere, 11 pixels in all.
    right, wrong = float(F.softplus(torch.tensor(-1.5))), float(F.softplus(torch.tensor(1.5)))
    assert scores["loss"] == pytest.approx((8 * right + 3 * wrong) / 11, rel=1e-6)


@pytest.mark.parametrize(("threshold", "said"), [(0.1, 3), (0.5, 1), (0.8, 1), (0.9, 0)])
def test_the_threshold_is_a_probability(threshold: float, said: int) -> None:
    batch = {"masks": torch.zeros(1, 1, 3), "sizes": torch.tensor([[1, 3]])}
    logits = torch.tensor([[[1.5, -1.5, -1.5]]])  # probabilities 0.82, 0.18, 0.18
    assert int(overlaps(logits, batch, threshold)[1]) == said


# Void.


@pytest.fixture
def voids(tmp_path: Path) -> Path:
    """Masks of a class 1, a class 2, and a border of 255 between them and the rest."""
    for part, numbers in (("train", range(6)), ("test", range(6, 9))):
        for number in numbers:
            pixels = grey(40, 44, 3, seed=number)
            mask = np.zeros((40, 44), dtype=np.uint8)
            mask[8:32, 6:22], mask[8:32, 22:38] = 255, 255
            mask[10:30, 8:20], mask[10:30, 24:36] = 1, 2
            pixels[mask == 2] //= 4
            save(tmp_path / part / "images" / f"{number}.png", pixels)
            save(tmp_path / part / "masks" / f"{number}.png", mask)
    return tmp_path


VOID_OPTIONS: dict[str, Any] = {"foreground": ("2",), "void": ("255",)}


def test_void_counts_neither_in_the_loss_nor_in_the_scores(tmp_path: Path, folder: Path) -> None:
    rule = MaskRule(("1",), ("9",))
    given_masks = ([[1, 9, 0, 9]], [[9], [0], [1]], [[9, 9], [9, 9]])
    data = WholePictures(pictures(tmp_path, SAID, given_masks), PLAIN, rule)
    task, padded = task_of(folder), Padded(32)
    trainer = make_trainer(pixelwise(), task.loss, shards=2)
    scores = trainer.evaluate(task.score, data, batch_size=3, collate=padded)
    # Left are 1 of 1 and 0 of 0 in the first picture, 0 of 0 and 0 of 1 in the second.
    assert scores["iou"] == pytest.approx(1 / 2, abs=1e-12)
    assert scores["dice"] == pytest.approx(2 / 3, abs=1e-12)
    right, wrong = float(F.softplus(torch.tensor(-1.5))), float(F.softplus(torch.tensor(1.5)))
    assert scores["loss"] == pytest.approx((3 * right + wrong) / 4, rel=1e-6)


def test_what_a_model_says_of_void_pixels_is_not_learnt(folder: Path) -> None:
    task = task_of(folder)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    masks = torch.zeros(2, 32, 32)
    masks[:, :16], masks[:, :, 20:] = 1.0, VOID
    batch = {"images": images, "masks": masks, "sizes": torch.tensor([[32, 32]] * 2)}
    logits = torch.zeros(2, 1, 32, 32, requires_grad=True)
    loss = task.loss(lambda _: logits, batch)  # type: ignore[arg-type, return-value]
    assert float(loss.weight) == 2 * 32 * 20
    loss.total.backward()
    assert logits.grad is not None
    learnt = logits.grad.squeeze(1) != 0
    assert torch.equal(learnt, masks != VOID)


def test_a_crop_keeps_what_is_void(voids: Path) -> None:
    asked = options(data=str(voids), turns="yes", jitter=0.0, **VOID_OPTIONS)
    data = segment.prepare(asked)
    assert (data.foreground, data.void) == (6 * 240, 6 * (24 * 32 - 480))
    crops = Crops(data.train, segment.settle(asked, data), PLAIN)
    torch.manual_seed(0)
    seen = torch.cat([crops[number][1].flatten() for number in range(6)]).unique()
    assert seen.tolist() == [VOID, 0.0, 1.0]


def test_pixels_that_are_void_do_not_weigh(voids: Path) -> None:
    asked = options(data=str(voids), pos_weight="auto", **VOID_OPTIONS)
    data = segment.prepare(asked)
    task = segment.make_task(segment.settle(asked, data), data)
    counted = 40 * 44 - (24 * 32 - 480)
    assert task.facts["pos_weight"] == pytest.approx((counted - 240) / 240, rel=1e-6)


def test_masks_of_several_classes_need_a_rule(voids: Path) -> None:
    with pytest.raises(DataError, match="Name the foreground, such as --foreground"):
        segment.prepare(options(data=str(voids)))


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"foreground": ("red",)}, "--foreground red: expected values of the masks' pixels"),
        ({"foreground": ("1",), "void": ("0-3",)}, "--void 0-3: expected other values than those"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        options(**chosen)


def test_a_run_with_void_pixels_is_shown_and_predicts(voids: Path, tmp_path: Path) -> None:
    run = run_here(
        "segment", tmp_path / "run", data=str(voids), epochs=2, crop=32, **VOID_OPTIONS, **TINY
    )
    shown = json.loads((run / "examples.json").read_text())["samples"][0]
    from PIL import Image

    with Image.open(run / shown["mask"]) as mask:
        assert set(np.unique(np.asarray(mask)).tolist()) == {0, 128, 255}
    chosen = PredictOptions(devices="cpu:1", output=tmp_path / "predicted")
    with on_cpu():
        rows = predict_run(run, [voids / "test" / "images"], chosen).rows
    with Image.open(tmp_path / "predicted" / rows[0]["mask"]) as predicted:
        assert predicted.size == (44, 40)
        assert set(np.unique(np.asarray(predicted)).tolist()) <= {0, 255}


@pytest.mark.processes
def test_void_pixels_leave_the_bits_alone_on_any_number_of_devices(
    voids: Path, tmp_path: Path
) -> None:
    words = f"--data {voids} --runs {tmp_path} --encoder resnet18 --width 4 --crop 32 --shards 3"
    words += " --batch-size 4 --epochs 2 --workers 1 --foreground 2 --void 255"
    command = ["-m", "onefold", "train", "segment", *words.split()]
    assert verify_script(command, "1,2,3", steps=3, options=RunOptions(quiet=True)) == 0


# Weights of pixels.


def masked(foreground: int, pixels: int, folder: Path) -> MaskedPictures:
    data = segment.prepare(options(data=str(folder)))
    return replace(data, foreground=foreground, pixels=pixels)


def test_pixels_that_are_fewer_weigh_more(folder: Path) -> None:
    data = masked(25, 300, folder)
    asked = segment.settle(options(pos_weight="auto"), data)
    task = segment.make_task(asked, data)
    assert task.facts["pos_weight"] == 275 / 25
    batch = {
        "images": torch.zeros(1, 3, 1, 2),
        "masks": torch.tensor([[[1.0, 0.0]]]),
        "sizes": torch.tensor([[1, 2]]),
    }
    said = float(F.softplus(torch.tensor(1.5))), float(F.softplus(torch.tensor(-1.5)))
    total = task.loss(pixelwise(), batch).total.item()
    assert total == pytest.approx(11 * said[0] + said[1], rel=1e-6)


def test_auto_is_the_share_of_the_training_masks(folder: Path) -> None:
    data = segment.prepare(options(data=str(folder)))
    facts = segment.make_task(options(pos_weight="auto"), data).facts
    expected = (data.pixels - data.foreground) / data.foreground
    assert facts["pos_weight"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("meant", "which"), [(0, "no"), (300, "every")])
def test_auto_needs_two_kinds_of_pixels(folder: Path, meant: int, which: str) -> None:
    message = f"--pos-weight auto: expected masks with two kinds of pixels .* {which} pixel"
    with pytest.raises(DataError, match=message):
        segment.settle(options(pos_weight="auto"), masked(meant, 300, folder))


# Options.


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"holdout": 0.0}, "--holdout 0.0: expected more than 0 and less than 1"),
        ({"holdout": 1.0}, "--holdout 1.0"),
        ({"threshold": 0.0}, "--threshold 0.0: expected more than 0 and less than 1"),
        ({"threshold": 1.0}, "--threshold 1.0"),
        ({"jitter": -0.1}, "--jitter -0.1: expected 0 or more and less than 1"),
        ({"jitter": 1.0}, "--jitter 1.0"),
        ({"width": 0}, "--width 0: expected an even number"),
        ({"width": 7}, "--width 7"),
        ({"crop": 31}, "--crop 31: expected 32 or more"),
        ({"evaluation_batch_size": 0}, "--evaluation-batch-size 0: expected 1 or more"),
        ({"pos_weight": "0"}, "--pos-weight 0: expected auto, or a number above 0"),
        ({"pos_weight": "nan"}, "--pos-weight nan"),
        ({"pos_weight": "inf"}, "--pos-weight inf"),
        ({"pos_weight": "many"}, "--pos-weight many"),
        ({"pretrained_key": "model"}, "--pretrained-key: expected with --pretrained"),
        ({"shards": 0}, "--shards 0: expected 1 or more"),
    ],
)
def test_options_out_of_range_are_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(**chosen)


@pytest.mark.parametrize(
    ("shortest", "crop"), [(9, 32), (32, 32), (63, 32), (64, 64), (250, 224), (1000, 256)]
)
def test_the_crop_is_what_there_is(folder: Path, shortest: int, crop: int) -> None:
    data = replace(segment.prepare(options(data=str(folder))), shortest=shortest)
    assert segment.settle(options(crop=None), data).crop == crop
    assert segment.settle(options(crop=100), data).crop == 100


@pytest.mark.parametrize(
    ("chosen", "rate"),
    [
        ({}, 0.001),
        ({"optimizer": "sgd"}, 0.05),
        ({"pretrained": "x"}, 0.0002),
        ({"lr": 0.3, "pretrained": "x"}, 0.3),
    ],
)
def test_the_rate_is_lower_for_pretrained_weights(
    folder: Path, chosen: dict[str, Any], rate: float
) -> None:
    data = segment.prepare(options(data=str(folder)))
    settled = segment.settle(SegmentOptions(**chosen), data)
    assert settled.lr == pytest.approx(rate)
    assert settled.epochs == (20 if settled.pretrained else 40)


def test_data_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"--data {tmp_path}/x: expected a folder with images"):
        segment.prepare(options(data=str(tmp_path / "x")))


# Pretrained weights and frozen parts.


def encoder_file(path: Path, encoder: str = "resnet18", **more: torch.Tensor) -> dict[str, Any]:
    """Write published weights as torchvision names them, and return them."""
    torch.manual_seed(7)
    state = UNet(encoder, width=4).encoder.state_dict()
    state = {name: torch.rand_like(value.float()) for name, value in state.items()}
    state = {n: v for n, v in state.items() if not n.endswith("num_batches_tracked")}
    torch.save({**state, **more}, path)
    return state


def test_the_encoder_begins_with_a_file_of_torchvisions_names(tmp_path: Path, folder: Path) -> None:
    last = {"fc.weight": torch.zeros(10, 32), "fc.bias": torch.zeros(10)}
    state = encoder_file(tmp_path / "resnet18.pth", **last)
    task = task_of(folder, pretrained=str(tmp_path / "resnet18.pth"))
    loaded = task.model.get_submodule("encoder").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    assert {"conv1.weight", "layer4.1.bn2.running_var"} <= set(state)
    assert task.facts["mask_model"]["mean"] == IMAGENET[0]


def test_weights_may_be_under_a_key(tmp_path: Path, folder: Path) -> None:
    state = encoder_file(tmp_path / "plain.pth")
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "keyed.pth")
    task = task_of(folder, pretrained=str(tmp_path / "keyed.pth"), pretrained_key="state_dict")
    loaded = task.model.state_dict()
    assert torch.equal(loaded["encoder.conv1.weight"], state["conv1.weight"])


def lacking_a_layer(path: Path) -> str:
    state = encoder_file(path)
    torch.save({n: v for n, v in state.items() if not n.startswith("layer4.1.conv2")}, path)
    return r"whole encoder, it has none for layer4\.1\.conv2\.weight"


def of_another_encoder(path: Path) -> str:
    encoder_file(path, "vgg16")
    return "does not fit the model, which is unchanged"


def of_another_width(path: Path) -> str:
    torch.save(UNet("resnet18", width=8).encoder.state_dict(), path)
    return r"the whole encoder, it has none for conv1\.weight, bn1\.weight, .* and 9[0-9] more"


@pytest.mark.parametrize("spoil", [lacking_a_layer, of_another_encoder, of_another_width])
def test_other_weights_are_refused_with_names(
    tmp_path: Path, folder: Path, spoil: Callable[[Path], str]
) -> None:
    path = tmp_path / "weights.pth"
    message = spoil(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        task_of(folder, pretrained=str(path))
    assert str(path) in str(caught.value)


def test_a_whole_run_is_gone_on_from(folder: Path, run: Path) -> None:
    task = task_of(folder, pretrained=str(run))
    kept = UNet("resnet18", width=4)
    onefold.load_weights(kept, best_checkpoint(run))
    assert bits(task.model) == bits(kept) != bits(task_of(folder).model)
    assert task.facts["mask_model"]["mean"] == IMAGENET[0]
    assert task.facts["mask_model"]["std"] == IMAGENET[1]


def test_a_run_of_another_shape_is_refused(folder: Path, run: Path) -> None:
    with pytest.raises(CheckpointError, match="does not fit the model, which is unchanged"):
        task_of(folder, pretrained=str(run), width=8)


def test_a_run_of_another_job_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "run.json").write_text('{"job": "text"}')
    with pytest.raises(DataError, match="expected a run of onefold train segment, got text"):
        task_of(folder, pretrained=str(tmp_path))


@pytest.mark.parametrize(
    ("normalise", "mean", "std"),
    [("imagenet", *IMAGENET), ("none", (0.0,) * 3, (1.0,) * 3)],
)
def test_pictures_are_normalised_as_asked(
    folder: Path, normalise: Any, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    kept = task_of(folder, normalise=normalise).facts["mask_model"]
    assert (kept["mean"], kept["std"]) == (mean, std)


@pytest.mark.parametrize("normalise", ["auto", "data"])
def test_pictures_are_normalised_by_the_training_set(folder: Path, normalise: Any) -> None:
    data = segment.prepare(options(data=str(folder)))
    kept = task_of(folder, normalise=normalise).facts["mask_model"]
    assert (kept["mean"], kept["std"]) == data.sums.mean_and_std()


def test_a_frozen_encoder_keeps_its_bits(folder: Path) -> None:
    task = task_of(folder, freeze=("encoder",))
    names = [name for name, _ in task.model.named_parameters()]
    assert task.facts["frozen"] == [name for name in names if name.startswith("encoder.")]
    before = bits(task.model)
    optimizer = torch.optim.SGD(list(task.groups), lr=0.1)
    trainer = make_trainer(task.model, task.loss, optimizer=optimizer, shards=2)
    torch.manual_seed(0)
    batch = [[task.train_set[number]] for number in range(2)]
    for each in batch:
        trainer.step(Padded(32)(each * 2))
    changed = {name for name, value in bits(trainer.model).items() if value != before[name]}
    assert not any(name.startswith("encoder.") for name in changed)
    assert {"head.weight", "decoder.0.conv1.weight", "decoder.0.bn1.running_mean"} <= changed


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"freeze": ("backbone",)}, "--freeze backbone: the model has no such part.* encoder, dec"),
        ({"freeze": ("head",)}, "would freeze the model's last layer, head"),
        ({"freeze_until": "neck"}, "--freeze-until neck: the model has no such part"),
    ],
)
def test_what_cannot_be_frozen_is_refused(
    folder: Path, chosen: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        task_of(folder, **chosen)


# A run.


def test_a_run_keeps_what_its_model_needs(run: Path) -> None:
    kind = MaskModel.of_run(run)
    assert (kind.encoder, kind.width, kind.threshold) == ("resnet18", 4, 0.5)
    assert (kind.mean, kind.std) == IMAGENET
    assert kind.normalise == Normalise(*IMAGENET)
    assert kind.build().state_dict().keys() == UNet("resnet18", width=4).state_dict().keys()


def test_a_run_shows_its_best_and_worst(run: Path) -> None:
    shown = json.loads((run / "examples.json").read_text())
    assert [each["name"] for each in shown["samples"]] == ["5.png", "6.png", "7.png"]
    worst = [each["iou"] for each in shown["worst"]]
    assert worst == sorted(worst)
    for each in shown["samples"]:
        assert all((run / each[part]).is_file() for part in ("image", "mask", "prediction"))
        iou = each["iou"]
        assert each["dice"] == pytest.approx(2 * iou / (1 + iou))


def test_a_folder_that_is_no_run_of_this_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected the folder of a run, with run\.json in it"):
        MaskModel.of_run(tmp_path)
