"""Pictures with masks: what is cut and turned, what counts in losses and scores, what is loaded."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import onefold
import onefold_jobs
from onefold.errors import CheckpointError, DataError, LaunchError
from onefold_jobs import segment_job
from onefold_jobs.data.augment import IMAGENET, Normalize
from onefold_jobs.data.masks import VOID, MaskRule
from onefold_jobs.data.pairs import Pair
from onefold_jobs.finetune import best_checkpoint
from onefold_jobs.segment_job import MaskModel, SegmentOptions
from onefold_jobs.segment_pictures import Augment, Padded, PicturePairs, inside
from onefold_jobs.training import Task
from tests.jobs.tiny import run_here, write_class_masks
from tests.masked import black_and_white, gray, save, save_pairs
from tests.small import bits, make_trainer
from tests.tables import for_each

pillow = pytest.importorskip("PIL.Image", reason='needs pip install "onefold-jobs[images]"')

SIZES = [(40, 50), (33, 90), (32, 32), (20, 70), (9, 7)]
"""Height and width; crops of 32 cut all but the last and, in one direction, the one before it."""
TINY: dict[str, Any] = {"encoder": "resnet18", "width": 4, "devices": "cpu:1"}
PLAIN = Normalize((0.0,) * 3, (1.0,) * 3)
RIGHT, WRONG = (float(F.softplus(torch.tensor(sign * 1.5))) for sign in (-1, 1))
"""The loss of a pixel of which `pixelwise` is right, and of one of which it is not."""


@pytest.fixture(scope="module")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    """Pictures that are their own masks, black and white."""
    folder = tmp_path_factory.mktemp("doubles")
    pixels = [black_and_white(*size, seed=number) for number, size in enumerate(SIZES)]
    paths = [save(folder / f"{number}.png", each) for number, each in enumerate(pixels)]
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
    """A run with crops of 32 and a last batch of one picture."""
    runs = tmp_path_factory.mktemp("runs")
    return run_here("segment", folder, runs, crop=32, normalize="imagenet", **TINY)[0]


def options(**chosen: Any) -> SegmentOptions:
    return SegmentOptions(**{**TINY, "crop": 32, "epochs": 1, "lr": 0.01, **chosen})


def settled(folder: Path, **chosen: Any) -> tuple[SegmentOptions, Any]:
    asked = options(data=str(folder), **chosen)
    data = segment_job.prepare(asked)
    return segment_job.settle(asked, data), data


def task_of(folder: Path, **chosen: Any) -> Task:
    return segment_job.make_task(*settled(folder, **chosen))


def pixelwise() -> nn.Module:
    """A model that sees one pixel at a time: meant where the picture is bright."""
    model = nn.Conv2d(3, 1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        nn.init.constant_(model.get_parameter("bias"), -1.5)
    return model


@for_each("flip", ["no", "yes"])
@for_each("turns", ["no", "yes"])
def test_picture_and_mask_turn_together(doubles: list[Pair], flip: Any, turns: Any) -> None:
    """In every way that was asked for, and alike by the same seed."""
    change = Augment(side=32, flip=flip == "yes", turns=turns == "yes", jitter=0.0)
    crops = PicturePairs(doubles, PLAIN, augment=change)
    square = PicturePairs(doubles, PLAIN)[2][1]
    ways = [torch.rot90(square.flip(1) if m else square, q) for m in range(2) for q in range(4)]
    seen = set()
    for seed in range(60):
        for number, size in enumerate(SIZES):
            if seed > 9 and number != 2:
                continue
            torch.manual_seed(seed)
            image, mask = crops[number]
            assert image.dtype == mask.dtype == torch.float32
            assert all(torch.equal(channel, mask) for channel in image)
            sides = [min(32, side) for side in size]
            assert list(mask.shape) == sides or (turns == "yes" and list(mask.shape) == sides[::-1])
            torch.manual_seed(seed)
            assert torch.equal(crops[number][0], image)
            if number == 2:
                (way,) = (n for n, turned in enumerate(ways) if torch.equal(mask, turned))
                seen.add(way)
    quarters = range(4 if turns == "yes" else 1)
    assert seen == {4 * m + q for m in range(2 if flip == "yes" else 1) for q in quarters}


@settings(max_examples=50)
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


@for_each("part", ["train_set", "test_set"])
def test_padding_counts_neither_in_the_loss_nor_in_scores(folder: Path, part: str) -> None:
    task = task_of(folder, pos_weight="3", jitter=0.0, flip="no")
    model, data = pixelwise(), getattr(task, part)
    samples = [data[number] for number in range(len(data))]
    tight, wide, garish = (Padded(stride)(samples) for stride in (32, 96, 32))
    counted = inside(garish["sizes"], *garish["masks"].shape[1:])
    garish["images"].masked_fill_(~counted.unsqueeze(1), 50.0).requires_grad_()
    losses = [task.loss(model, batch) for batch in (tight, wide, garish)]
    losses[2].total.backward()
    assert garish["images"].grad is not None
    assert bool((garish["images"].grad.abs().sum(dim=1) > 0).eq(counted).all())
    how: dict[str, Any] = {"pos_weight": torch.tensor(3.0), "reduction": "sum"}
    with torch.no_grad():
        found = [task.measure(model, batch) for batch in (tight, wide, garish)]
        by_hand = sum(
            float(F.binary_cross_entropy_with_logits(model(image)[0], mask, **how))
            for image, mask in samples
        )
    pixels = float(sum(mask.numel() for _, mask in samples))
    for loss, rows in zip(losses, found, strict=True):
        assert float(loss.weight) == float(rows["counted"].sum()) == pixels
        for total in (loss.total.detach(), rows["loss"].sum()):
            assert total.item() == pytest.approx(by_hand, rel=1e-5)
    for name in ("overlap", "predicted", "given"):
        assert all(torch.equal(rows[name], found[0][name]) for rows in found)


SAID = ([[1, 1, 0, 0]], [[1], [0], [0]], [[0, 0], [0, 0]])
MEANT = ([[1, 0, 0, 0]], [[1], [1], [1]], [[0, 0], [0, 0]])


def scored(
    tmp_path: Path, folder: Path, meant: Sequence[Any], rule: MaskRule, **how: Any
) -> dict[str, float]:
    pairs = []
    for number, (bright, mask) in enumerate(zip(SAID, meant, strict=True)):
        image = save(tmp_path / f"{number}.png", np.asarray(bright, dtype=np.uint8) * 255)
        path = tmp_path / f"mask-{number}.png"
        pairs.append(Pair(image, save(path, np.asarray(mask, dtype=np.uint8))))
    task = task_of(folder, threshold=how.pop("threshold", 0.5))
    data = PicturePairs(pairs, PLAIN, rule)
    trainer = make_trainer(pixelwise(), task.loss, shards=how.pop("shards", 2))
    reading: Any = {"batch_size": 3, **how}
    return task.score(trainer.predict(task.measure, data, collate=Padded(32), **reading))


@for_each(("batch_size", "shards"), [(1, 1), (2, 4), (3, 2)])
def test_scores_are_of_sums(tmp_path: Path, folder: Path, batch_size: int, shards: int) -> None:
    how = {"batch_size": batch_size, "shards": shards}
    scores = scored(tmp_path, folder, MEANT, MaskRule(), **how)
    # Overlaps 1 + 1 + 0, predicted 2 + 1 + 0, meant 1 + 3 + 0; means of ratios: 0.42 and 0.58.
    assert scores["iou"] == pytest.approx(2 / (3 + 4 - 2), abs=1e-12)
    assert scores["dice"] == pytest.approx(2 * 2 / (3 + 4), abs=1e-12)
    assert scores["loss"] == pytest.approx((8 * RIGHT + 3 * WRONG) / 11, rel=1e-6)


def test_void_counts_neither_in_the_loss_nor_in_the_scores(tmp_path: Path, folder: Path) -> None:
    masks = ([[1, 9, 0, 9]], [[9], [0], [1]], [[9, 9], [9, 9]])
    scores = scored(tmp_path, folder, masks, MaskRule(("1",), ("9",)))
    # Left are 1 of 1 and 0 of 0 in the first picture, 0 of 0 and 0 of 1 in the second.
    assert scores["iou"] == pytest.approx(1 / 2, abs=1e-12)
    assert scores["dice"] == pytest.approx(2 / 3, abs=1e-12)
    assert scores["loss"] == pytest.approx((3 * RIGHT + WRONG) / 4, rel=1e-6)


VOID_OPTIONS: dict[str, Any] = {"foreground": ("2",), "void": ("255",)}


@pytest.fixture
def voids(tmp_path: Path) -> Path:
    """Masks of a class 1, a class 2, and a border of 255 between them and the rest."""
    for number in range(9):
        pixels, mask = gray(40, 44, 3, seed=number), np.zeros((40, 44), dtype=np.uint8)
        mask[8:32, 6:22], mask[8:32, 22:38] = 255, 255
        mask[10:30, 8:20], mask[10:30, 24:36] = 1, 2
        pixels[mask == 2] //= 4
        part = tmp_path / ("train" if number < 6 else "test")
        save(part / "images" / f"{number}.png", pixels)
        save(part / "masks" / f"{number}.png", mask)
    return tmp_path


def test_classes_are_weighed_as_pytorch_weighs_them(tmp_path: Path) -> None:
    """By their pixels in training, in the loss alone, and without those that count for none."""
    data = write_class_masks(tmp_path / "data")
    named = {"classes": ("ground=0", "bird=3", "person=15"), "void": ("255",)}
    weighed, plain = (task_of(data, class_weights=each, **named) for each in ("auto", "none"))
    assert weighed.class_counts is not None
    assert weighed.collate is not None
    counts = np.array(weighed.class_counts[0])
    assert weighed.class_weights == pytest.approx(counts.sum() / (3 * counts))
    batch = weighed.collate([weighed.train_set[number] for number in range(4)])
    logits, masks = weighed.model(batch["images"]), batch["masks"]
    targets = masks.where(inside(batch["sizes"], *masks.shape[1:]), VOID).to(torch.int64)
    for task in (weighed, plain):
        weight = torch.tensor(task.class_weights) if task.class_weights else None
        expected = F.cross_entropy(logits, targets, weight, ignore_index=int(VOID))
        loss = task.loss(weighed.model, batch)
        torch.testing.assert_close(loss.total / loss.weight, expected)
    assert weighed.baseline == plain.baseline
    assert weighed.baseline is not None
    assert weighed.baseline.answer == "ground"


def test_answering_alike_for_every_pixel_is_the_baseline(folder: Path) -> None:
    """For one foreground its IoU is that of a mask that is everywhere."""
    task = task_of(folder)
    assert task.class_counts is not None
    assert task.baseline is not None
    (_, train), (background, foreground) = task.class_counts
    assert train > 0
    scores = task.baseline.scores
    assert scores["iou"] == pytest.approx(foreground / (background + foreground))
    assert str(task.baseline) == "'foreground' for every pixel"


def test_void_is_kept_in_crops_and_does_not_weigh(voids: Path) -> None:
    with pytest.raises(DataError, match="Name the foreground, such as --foreground"):
        settled(voids)
    asked, data = settled(voids, turns="yes", jitter=0.0, pos_weight="auto", **VOID_OPTIONS)
    assert (data.foreground, data.void) == (6 * 240, 6 * (24 * 32 - 480))
    task = segment_job.make_task(asked, data)
    torch.manual_seed(0)
    seen = torch.cat([task.train_set[number][1].flatten() for number in range(6)]).unique()
    assert seen.tolist() == [VOID, 0.0, 1.0]
    counted = 40 * 44 - (24 * 32 - 480)
    assert task.facts["pos_weight"] == pytest.approx((counted - 240) / 240, rel=1e-6)


class OtherUnet(nn.Module):
    """Stands in for the U-Net of segmentation-models-pytorch: its arguments, and its parts."""

    def __init__(
        self, encoder_name: str, *, encoder_weights: None, in_channels: int, classes: int
    ) -> None:
        super().__init__()
        if encoder_name != "resnet18":
            raise KeyError(f"Wrong encoder name {encoder_name}")
        encoder: Any = nn.Conv2d(in_channels, 4, 3, padding=1)
        encoder.output_stride = 16
        self.encoder = encoder
        self.segmentation_head = nn.Conv2d(4, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        masks: torch.Tensor = self.segmentation_head(self.encoder(images))
        return masks


def test_a_unet_of_another_library_goes_by_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, chosen = "segmentation_models_pytorch", {"encoder": "smp:resnet18", "width": None}
    asked = SegmentOptions(data=str(folder), encoder="smp:resnet18")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        LaunchError, match=r"^smp:resnet18 requires .* pip install segmentation-models"
    ):
        segment_job.check_early(asked)
    monkeypatch.setitem(sys.modules, library, SimpleNamespace(Unet=OtherUnet))
    segment_job.check_early(asked)
    run, said = run_here("segment", folder, tmp_path, **chosen, freeze="encoder")
    assert said["model"] == "U-Net, smp:resnet18"
    assert said["frozen"] == ["encoder.weight", "encoder.bias"]
    loaded = onefold_jobs.load_run(run)
    assert isinstance(loaded.module, OtherUnet)
    description: Any = loaded.description
    assert description["preprocessing"]["side_multiple"] == 16
    again = settled(folder, **chosen, pretrained=str(run))
    assert bits(segment_job.make_task(*again).model) == bits(loaded.module)
    with pytest.raises(ValueError, match=r"smp:vgg7: expected smp: and .*Wrong encoder name vgg7"):
        segment_job.check_early(replace(asked, encoder="smp:vgg7"))
    for wrong, words in (
        ({"encoder": "vgg7"}, "--encoder vgg7: expected resnet18, .* or smp:NAME"),
        ({"width": 8}, "--width 8: expected it without --encoder smp:NAME"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(asked, **wrong)


def test_a_run_keeps_what_its_model_needs(folder: Path, run: Path, tmp_path: Path) -> None:
    kind = MaskModel.of_run(run)
    assert (kind.encoder, kind.width, kind.threshold) == ("resnet18", 4, 0.5)
    assert kind.normalize == Normalize(*IMAGENET)
    kept = kind.build()
    onefold.load_weights(kept, best_checkpoint(run))
    task = task_of(folder, pretrained=str(run))
    assert bits(task.model) == bits(kept) != bits(task_of(folder).model)
    facts = task.facts["mask_model"]
    assert (facts["mean"], facts["std"]) == IMAGENET
    with pytest.raises(CheckpointError, match="does not fit the model, which is unchanged"):
        task_of(folder, pretrained=str(run), width=8)
    with pytest.raises(DataError, match=r"expected the folder of a run, which contains run\.json"):
        MaskModel.of_run(tmp_path)
    (tmp_path / "run.json").write_text('{"job": "text"}')
    with pytest.raises(DataError, match="expected a run of onefold train segment, got text"):
        task_of(folder, pretrained=str(tmp_path))
