"""Pictures with a mask each: the options, the data, the model, and what is shown of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, Subset

import onefold
from onefold.data.augment import Normalise, below, between
from onefold.data.pairs import MaskedPictures, Pair, mask_tensor, read_mask, read_pairs
from onefold.data.pictures import open_picture, require_pillow
from onefold.errors import CheckpointError, DataError
from onefold.jobs.examples import SHOWN, save_picture
from onefold.jobs.finetune import (
    best_checkpoint,
    freeze,
    is_run,
    lacking_names,
    listed,
    parameter_groups,
)
from onefold.jobs.options import TrainOptions, expect, option
from onefold.jobs.rates import scaled_rate, usual_rate
from onefold.jobs.runfolder import RunFolder, read_run
from onefold.jobs.training import Task
from onefold.models.unet import UNet

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["JOB", "MaskModel", "SegmentOptions", "make_task", "prepare", "settle"]

JOB = "segment"
HEAD = "head"
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
LARGEST_CROP = 256
USUAL_ENCODER = "resnet34"
USUAL_WIDTH = 64
LARGEST_SHOWN = 512
"""Pixels of a prediction's longer side in a report."""

Encoder = Literal["vgg16", "resnet18", "resnet34", "resnet101"]
Switch = Literal["yes", "no"]
Normalisation = Literal["auto", "imagenet", "data", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOptions(TrainOptions):
    """Options of ``onefold train segment``."""

    shards: int = option(4, "Parts of every batch: the most devices that may share one.")
    batch_size: int = option(8, "Pictures of a batch, over all devices.")
    epochs: int | None = option(None, "Times that the training set is read.", shown="40")
    lr: float | None = option(None, "Learning rate.", shown="0.001, or 0.0002 with --pretrained")
    optimizer: Literal["sgd", "adam", "adamw"] = option("adamw", "How the parameters are updated.")
    weight_decay: float = option(0.01, "Pull of the parameters towards zero.")
    warmup_epochs: float = option(1.0, "Epochs in which the learning rate rises to its full value.")
    encoder: Encoder | None = option(
        None,
        "The half of the U-Net that looks at the picture.",
        shown="resnet34, or that of the pretrained run",
    )
    width: int | None = option(
        None,
        "Channels of its first layer; published weights need 64.",
        shown="64, or that of the pretrained run",
    )
    holdout: float = option(0.1, "Share to test with, where there is no test set.")
    crop: int | None = option(
        None, "Side of the squares that are cut out for training.", shown="256, or what there is"
    )
    flip: Switch = option("yes", "Mirror every second picture and its mask.")
    turns: Switch = option("no", "Turn by 0, 90, 180 or 270 degrees: where no side is up.")
    jitter: float = option(0.2, "How much brightness and contrast vary.")
    pos_weight: str = option(
        "1", "Weight of the mask's pixels in the loss; auto: as many times as they are fewer."
    )
    threshold: float = option(0.5, "Probability from which a pixel is in the predicted mask.")
    evaluation_batch_size: int = option(8, "Whole pictures of a batch in tests.")
    normalise: Normalisation = option(
        "auto", "By the numbers of ImageNet or of the data; auto: as pretrained weights want it."
    )
    pretrained: str | None = option(
        None,
        "Begin with an encoder from a file of torchvision's names, or a whole run of this job.",
        shown="none",
    )
    pretrained_key: str | None = option(
        None, "Where the file keeps its weights, such as state_dict.", shown="at the top"
    )

    def __post_init__(self) -> None:
        TrainOptions.__post_init__(self)
        expect(0 < self.holdout < 1, "holdout", self.holdout, "more than 0 and less than 1")
        expect(0 < self.threshold < 1, "threshold", self.threshold, "more than 0 and less than 1")
        expect(0 <= self.jitter < 1, "jitter", self.jitter, "0 or more and less than 1")
        even = self.width is None or (self.width >= 2 and self.width % 2 == 0)
        expect(even, "width", self.width, "an even number above 0")
        crop, many = self.crop, self.evaluation_batch_size
        expect(crop is None or crop >= 32, "crop", crop, "32 or more")
        expect(many >= 1, "evaluation_batch_size", many, "1 or more")
        known = self.pos_weight == "auto" or _is_positive(self.pos_weight)
        expect(known, "pos_weight", self.pos_weight, "auto, or a number above 0")
        if self.pretrained is None:
            expect(not self.pretrained_key, "pretrained_key", "", "with --pretrained")


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def prepare(options: SegmentOptions) -> MaskedPictures:
    """Read and check the data.

    Raises:
        DataError: they cannot be used.
        LaunchError: Pillow is missing.
    """
    require_pillow()
    directory = Path(options.data)
    if not directory.is_dir():
        raise DataError(
            f"--data {directory}: expected a folder with images and masks; there is no such folder "
            f"from {Path.cwd()}"
        )
    return read_pairs(
        directory, holdout=options.holdout, seed=options.seed, skip_bad=options.skip_bad
    )


def settle(options: SegmentOptions, data: MaskedPictures) -> SegmentOptions:
    """Fill in what was left to the data.

    Raises:
        DataError: an option does not suit them.
    """
    _pos_weight(options.pos_weight, data)
    fine = options.pretrained is not None
    run = _run_of(options)
    before = MaskModel.of_run(run) if run else None
    encoder: Any = before.encoder if before else USUAL_ENCODER
    crop = min(LARGEST_CROP, max(32, data.shortest // 32 * 32))
    return replace(
        options,
        encoder=options.encoder or encoder,
        width=options.width or (before.width if before else USUAL_WIDTH),
        crop=options.crop or crop,
        epochs=options.epochs or 40,
        lr=usual_rate(options, fine=fine) if options.lr is None else options.lr,
    )


def _run_of(options: SegmentOptions) -> Path | None:
    """The run whose weights are the beginning, if it is one."""
    path = Path(options.pretrained or "")
    return path if options.pretrained and is_run(path) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskModel:
    """What a model needs to know of its pictures; kept in ``run.json``."""

    encoder: str
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    threshold: float

    @classmethod
    def of_run(cls, run: Path) -> MaskModel:
        """As a run has kept it.

        Raises:
            DataError: it is no run of this job.
        """
        said = read_run(run)
        if said.get("job") != JOB:
            raise DataError(f"{run}: expected a run of onefold train {JOB}, got {said.get('job')}")
        kept = said["mask_model"]
        return cls(**{**kept, "mean": tuple(kept["mean"]), "std": tuple(kept["std"])})

    def build(self) -> UNet:
        """The model with fresh weights."""
        return UNet(self.encoder, width=self.width)

    @property
    def normalise(self) -> Normalise:
        """Of its pictures."""
        return Normalise(self.mean, self.std)


class Crops(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Squares out of pictures and the same out of their masks, changed together.

    A picture that is smaller is taken as it is, in that direction.

    Args:
        pairs: the pictures and masks.
        options: settled ones.
        normalise: of the pictures.
    """

    def __init__(
        self, pairs: Sequence[Pair], options: SegmentOptions, normalise: Normalise
    ) -> None:
        self._pairs = pairs
        self._options = options
        self._normalise = normalise

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(3, h, w) and (h, w) float32, where h and w are at most ``crop``."""
        pair, options = self._pairs[index], self._options
        image, mask = open_picture(pair.image).convert("RGB"), read_mask(pair.mask)
        image, mask = _cut_both(image, mask, options.crop or LARGEST_CROP)
        image, mask = _turn_both(image, mask, options)
        return self._normalise(_jittered(image, options.jitter)), mask_tensor(mask)


class WholePictures(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pictures and masks as they are.

    Args:
        pairs: the pictures and masks.
        normalise: of the pictures.
    """

    def __init__(self, pairs: Sequence[Pair], normalise: Normalise) -> None:
        self.pairs = pairs
        self._normalise = normalise

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(3, h, w) and (h, w) float32."""
        pair = self.pairs[index]
        image = self._normalise(open_picture(pair.image).convert("RGB"))
        return image, mask_tensor(read_mask(pair.mask))


class Padded:
    """Makes a shard of pictures of any size: padded on the right and below, to a common size.

    Args:
        stride: of which the common height and width are multiples; they are two of it at least, or
            batch norm would find a single value in a channel of a single picture.
    """

    def __init__(self, stride: int) -> None:
        self.stride = stride

    def __call__(self, samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """``images`` (n, 3, h, w) and ``masks`` (n, h, w) float32, ``sizes`` (n, 2) int64."""
        sizes = torch.tensor([image.shape[1:] for image, _ in samples])
        height, width = padded_size(sizes.amax(dim=0).tolist(), self.stride)
        images = torch.zeros(len(samples), samples[0][0].shape[0], height, width)
        masks = torch.zeros(len(samples), height, width)
        for row, (image, mask) in enumerate(samples):
            images[row, :, : image.shape[1], : image.shape[2]] = image
            masks[row, : mask.shape[0], : mask.shape[1]] = mask
        return {"images": images, "masks": masks, "sizes": sizes}


def padded_size(size: Sequence[int], stride: int) -> tuple[int, int]:
    """Height and width as multiples of the stride.

    >>> padded_size([33, 20], 32)
    (64, 64)
    """
    height, width = (max(2, -(-side // stride)) * stride for side in size)
    return height, width


def inside(sizes: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(n, height, width) bool: True where there is a picture and not its padding.

    >>> inside(torch.tensor([[1, 2]]), 2, 3).int()
    tensor([[[1, 1, 0],
             [0, 0, 0]]], dtype=torch.int32)
    """
    rows = torch.arange(height, device=sizes.device) < sizes[:, :1]
    columns = torch.arange(width, device=sizes.device) < sizes[:, 1:]
    return rows.unsqueeze(2) & columns.unsqueeze(1)


def make_task(options: SegmentOptions, data: MaskedPictures) -> Task:
    """The model, the data sets and the scores of a run.

    Args:
        options: settled ones.
        data: of `prepare`.

    Raises:
        CheckpointError: the pretrained weights do not fit.
        ValueError: an option does not suit the model.
    """
    torch.manual_seed(options.seed)
    kind = _mask_model(options, data)
    model = kind.build()
    if options.pretrained:
        _load(model, Path(options.pretrained), options.pretrained_key)
    frozen = freeze(model, options, HEAD)
    weight = torch.tensor(_pos_weight(options.pos_weight, data))
    threshold = options.threshold

    def mean_loss(logits: torch.Tensor, batch: Any) -> onefold.Mean:
        """Over the pixels of the pictures, not of their padding."""
        losses = F.binary_cross_entropy_with_logits(
            logits, batch["masks"], pos_weight=weight.to(logits.device), reduction="none"
        )
        counted = inside(batch["sizes"], *logits.shape[1:])
        return onefold.Mean((losses * counted).sum(), counted.sum())

    def loss(model: nn.Module, batch: Any) -> onefold.Mean:
        return mean_loss(model(batch["images"]).squeeze(1), batch)

    def score(model: nn.Module, batch: Any) -> dict[str, onefold.Mean]:
        logits = whole_logits(model, batch, padded.stride)
        overlap, said, meant = (part.sum() for part in overlaps(logits, batch, threshold))
        return {
            "loss": mean_loss(logits, batch),
            "iou": onefold.Mean(overlap, said + meant - overlap),
            "dice": onefold.Mean(2 * overlap, said + meant),
        }

    padded = Padded(model.stride)
    test_set = WholePictures(data.test, kind.normalise)
    return Task(
        model=model,
        groups=parameter_groups(
            model, rate=scaled_rate(options), head=HEAD, head_scale=options.head_lr_scale
        ),
        loss=loss,
        score=score,
        best="highest iou",
        train_set=Crops(data.train, options, kind.normalise),
        test_set=test_set,
        collate=padded,
        evaluation_batch_size=options.evaluation_batch_size,
        examples=lambda trainer, folder: _examples(trainer, folder, test_set, padded, options),
        facts={
            "model": f"U-Net, {kind.encoder}",
            "mask_model": {name: getattr(kind, name) for name in kind.__dataclass_fields__},
            "pos_weight": float(weight),
            "frozen": frozen,
            "left_out": [str(each) for each in data.left_out],
        },
    )


def whole_logits(model: nn.Module, batch: Any, stride: int) -> torch.Tensor:
    """Logits of whole pictures, each padded for itself: what is said does not depend on the others.

    Padding to the size of a larger one would change the borders, and with them what a deep network
    says all over the picture. Those of one size go through the model together.

    Args:
        model: in evaluation mode.
        batch: of `Padded`.
        stride: of which height and width are multiples.

    Returns:
        (n, h, w) float32, 0 in what padding there is beyond a picture's own.
    """
    images = batch["images"]
    alike: dict[tuple[int, int], list[int]] = {}
    for row, size in enumerate(batch["sizes"].tolist()):
        alike.setdefault(padded_size(size, stride), []).append(row)
    logits: torch.Tensor = images.new_zeros(len(images), *images.shape[2:])
    for (height, width), rows in alike.items():
        said = model(images[rows, :, :height, :width]).squeeze(1)
        logits[rows, :height, :width] = said.to(logits.dtype)
    return logits


def overlaps(
    logits: torch.Tensor, batch: Any, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each picture: pixels in both masks, in the predicted one, in the given one.

    Args:
        logits: (n, h, w).
        batch: of `Padded`.
        threshold: probability from which a pixel is in the predicted mask.

    Returns:
        Three times (n,) float64.
    """
    counted = inside(batch["sizes"], *logits.shape[1:])
    said = (logits.sigmoid() >= threshold) & counted
    meant = batch["masks"] > 0.5
    pixels = (said & meant, said, meant)
    first, second, third = (part.sum(dim=(1, 2), dtype=torch.float64) for part in pixels)
    return first, second, third


def _mask_model(options: SegmentOptions, data: MaskedPictures) -> MaskModel:
    mean, std = data.sums.mean_and_std()
    run, normalise = _run_of(options), options.normalise
    if normalise == "auto" and options.pretrained:
        if run:
            before = MaskModel.of_run(run)
            mean, std = before.mean, before.std
        else:
            normalise = "imagenet"
    if normalise == "imagenet":
        mean, std = IMAGENET
    elif normalise == "none":
        mean, std = (0.0,) * 3, (1.0,) * 3
    return MaskModel(
        encoder=options.encoder or USUAL_ENCODER,
        width=options.width or USUAL_WIDTH,
        mean=mean,
        std=std,
        threshold=options.threshold,
    )


def _load(model: UNet, path: Path, key: str | None) -> None:
    """Weights for the whole model from a run of this job, or for the encoder from a file."""
    if is_run(path):
        onefold.load_weights(model, best_checkpoint(path))
        return
    loaded = onefold.load_weights(model.encoder, path, key=key, strict=False)
    lacking = lacking_names(loaded.missing, HEAD)
    if lacking:
        raise CheckpointError(
            f"{path}: expected values of the right shape for the whole encoder, it has none for "
            f"{listed(lacking)}"
        )


def _pos_weight(chosen: str, data: MaskedPictures) -> float:
    if chosen != "auto":
        return float(chosen)
    if data.meant in (0, data.pixels):
        which = "every" if data.meant else "no"
        raise DataError(
            f"--pos-weight auto: expected masks with two kinds of pixels to train with, {which} "
            f"pixel is meant"
        )
    return (data.pixels - data.meant) / data.meant


def _cut_both(image: Image, mask: Image, side: int) -> tuple[Image, Image]:
    """The same square out of both, or as much of it as there is."""
    left = below(max(1, image.width - side + 1))
    top = below(max(1, image.height - side + 1))
    box = (left, top, min(left + side, image.width), min(top + side, image.height))
    return image.crop(box), mask.crop(box)


def _turn_both(image: Image, mask: Image, options: SegmentOptions) -> tuple[Image, Image]:
    from PIL import Image

    turned = Image.Transpose
    ways = []
    if options.flip == "yes" and below(2):
        ways.append(turned.FLIP_LEFT_RIGHT)
    if options.turns == "yes" and (quarters := below(4)):
        ways.append([turned.ROTATE_90, turned.ROTATE_180, turned.ROTATE_270][quarters - 1])
    for way in ways:
        image, mask = image.transpose(way), mask.transpose(way)
    return image, mask


def _jittered(image: Image, most: float) -> Image:
    """Brightness and contrast changed by a share up to ``most``."""
    if not most:
        return image
    from PIL import ImageEnhance

    image = ImageEnhance.Brightness(image).enhance(between(1 - most, 1 + most))
    return ImageEnhance.Contrast(image).enhance(between(1 - most, 1 + most))


def _examples(
    trainer: onefold.Trainer,
    folder: RunFolder,
    test_set: WholePictures,
    padded: Padded,
    options: SegmentOptions,
) -> dict[str, Any]:
    """Pictures, masks and predictions: some from all over the test set, and the worst."""

    def measure(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        logits = whole_logits(model, batch, padded.stride)
        names = ("overlap", "said", "meant")
        return dict(zip(names, overlaps(logits, batch, options.threshold), strict=True))

    reading: dict[str, Any] = {
        "batch_size": options.evaluation_batch_size,
        "workers": options.workers,
        "collate": padded,
    }
    found = trainer.predict(measure, test_set, **reading)
    overlap, both = found["overlap"], found["said"] + found["meant"]
    nothing = both == 0  # neither mask has a pixel: they agree
    iou = torch.where(nothing, 1.0, overlap / (both - overlap).clamp(min=1))
    dice = torch.where(nothing, 1.0, 2 * overlap / both.clamp(min=1))
    count = min(SHOWN, len(test_set))
    samples = [number * len(test_set) // count for number in range(count)]
    worst = iou.argsort(stable=True)[:count].tolist()
    shown = sorted({*samples, *worst})
    draw = _Drawing(options.threshold, padded.stride)
    drawn = trainer.predict(draw, Subset(test_set, shown), **reading)

    def told(number: int) -> dict[str, Any]:
        pair = test_set.pairs[number]
        entry = {"name": pair.name, "iou": float(iou[number]), "dice": float(dice[number])}
        if trainer.is_lead:
            row = shown.index(number)
            entry.update(_pictures(folder, number, pair, drawn["mask"][row], drawn["size"][row]))
        return entry

    return {
        "kind": JOB,
        "threshold": options.threshold,
        "samples": [told(number) for number in samples],
        "worst": [told(number) for number in worst],
    }


class _Drawing:
    """Predicted masks small enough for a report, all on squares of one size.

    Args:
        threshold: probability from which a pixel is in the mask.
        stride: of the model.
    """

    def __init__(self, threshold: float, stride: int) -> None:
        self._threshold = threshold
        self._stride = stride

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """``mask`` (n, side, side) uint8, of which ``size`` (n, 2) int64 is the mask."""
        logits = whole_logits(model, batch, self._stride).unsqueeze(1)
        masks = (logits.sigmoid() >= self._threshold).to(torch.float32)
        canvas = torch.zeros(len(masks), LARGEST_SHOWN, LARGEST_SHOWN, dtype=torch.uint8)
        sizes = torch.zeros(len(masks), 2, dtype=torch.int64)
        for row, (height, width) in enumerate(batch["sizes"].tolist()):
            scale = min(1.0, LARGEST_SHOWN / max(height, width))
            size = [max(1, round(height * scale)), max(1, round(width * scale))]
            mask = F.adaptive_max_pool2d(masks[row, :, :height, :width], size)
            canvas[row, : size[0], : size[1]] = (mask[0] * 255).to(torch.uint8)
            sizes[row] = torch.tensor(size)
        return {"mask": canvas, "size": sizes}


def _pictures(
    folder: RunFolder, number: int, pair: Pair, mask: torch.Tensor, size: torch.Tensor
) -> dict[str, str]:
    from PIL import Image

    height, width = size.tolist()
    prediction = Image.fromarray(np.ascontiguousarray(mask[:height, :width].numpy()))
    parts = {
        "image": open_picture(pair.image),
        "mask": read_mask(pair.mask),
        "prediction": prediction,
    }
    return {
        name: save_picture(picture, folder.pictures, f"{number}-{name}")
        for name, picture in parts.items()
    }
