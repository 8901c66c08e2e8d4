"""Pictures with a mask each: the options, the data, the model, and what is shown of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset

import onefold
from onefold.errors import CheckpointError, DataError
from onefold.jobs.data.augment import IMAGENET, Normalise
from onefold.jobs.data.decoding import open_picture, require_pillow
from onefold.jobs.data.masks import read_mask
from onefold.jobs.data.pairs import MaskedPictures, Pair, read_pairs
from onefold.jobs.data.pictures import require_folder
from onefold.jobs.data.scan import Scanning
from onefold.jobs.examples import SHOWN, save_picture
from onefold.jobs.finetune import (
    best_checkpoint,
    freeze,
    is_run,
    lacking_names,
    load_finite,
    parameter_groups,
    require_pretrained,
    run_of,
)
from onefold.jobs.models.unet import UNet
from onefold.jobs.options import expect, scaled_rate, usual_rate
from onefold.jobs.runfolder import RunFolder, kept_as, kept_facts, read_run
from onefold.jobs.segment_options import MOST_WIDTH, SegmentOptions
from onefold.jobs.segment_pictures import (
    LARGEST_CROP,
    Crops,
    Padded,
    WholePictures,
    counted_pixels,
    whole_logits,
)
from onefold.jobs.training import Task, facts_of
from onefold.system.words import listed

__all__ = [
    "JOB",
    "MaskModel",
    "SegmentOptions",
    "check_early",
    "make_task",
    "overlaps",
    "prepare",
    "settle",
]

JOB = "segment"
HEAD = "head"
USUAL_ENCODER = "resnet34"
USUAL_WIDTH = 64
LARGEST_SHOWN = 512
"""The longer side of a prediction in a report, in pixels at most."""


def check_early(options: SegmentOptions) -> None:
    """Refuse what is bound to fail, before the data are read, which may take long.

    Raises:
        LaunchError: Pillow is missing.
        CheckpointError, DataError: the pretrained weights are missing or damaged.
        ValueError: an option does not suit the model.
    """
    require_pillow()
    require_pretrained(options.pretrained, JOB)
    if options.freeze or options.freeze_until:
        run = run_of(options.pretrained)
        encoder = options.encoder or (MaskModel.of_run(run).encoder if run else USUAL_ENCODER)
        # Only for the names of its parts, so the smallest that there is.
        freeze(UNet(encoder, width=2), options, HEAD)


def prepare(options: SegmentOptions, scanning: Scanning | None = None) -> MaskedPictures:
    """Read the data, and refuse those that cannot be used.

    Args:
        options: of the run.
        scanning: how to look through files.

    Raises:
        DataError: the data are missing, damaged or unsuitable.
        LaunchError: Pillow is missing.
    """
    require_pillow()
    directory = Path(options.data)
    require_folder(directory, "a folder with images and masks")
    return read_pairs(
        directory,
        holdout=options.holdout,
        seed=options.seed,
        skip_bad=options.skip_bad,
        rule=options.mask_rule,
        scanning=scanning,
    )


def settle(options: SegmentOptions, data: MaskedPictures) -> SegmentOptions:
    """Fill in the options that were left open, now that the data are known.

    Raises:
        DataError: an option does not suit the data.
    """
    # For what it refuses; the number itself is needed only on the devices.
    _pos_weight(options.pos_weight, data)
    fine = options.pretrained is not None
    run = run_of(options.pretrained)
    before = MaskModel.of_run(run) if run else None
    encoder: Any = before.encoder if before else USUAL_ENCODER
    # As large as the shortest side allows, and a multiple of every encoder's stride, so that crops
    # are hardly ever padded.
    crop = min(LARGEST_CROP, max(32, data.shortest // 32 * 32))
    return replace(
        options,
        encoder=options.encoder or encoder,
        width=options.width or (before.width if before else USUAL_WIDTH),
        crop=options.crop or crop,
        epochs=options.epochs or (20 if fine else 40),
        lr=usual_rate(options, fine=fine) if options.lr is None else options.lr,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskModel:
    """What must be known of a model to use it on pictures; kept in ``run.json``."""

    encoder: str
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    threshold: float
    white: int | None = None
    """The brightest value of pictures with more than 8 bits a pixel; None if there are none."""

    @classmethod
    def of_run(cls, run: Path) -> MaskModel:
        """Read it from the folder of a run.

        Raises:
            DataError: the folder is not that of a run of this job, or its ``run.json`` is damaged.
        """
        facts = read_run(run, JOB)
        with kept_facts(run):
            made = kept_as(cls, facts["mask_model"])
            # Anybody may have written the file: billions of channels would take all memory.
            expect(2 <= made.width <= MOST_WIDTH, "width", made.width, "a number of channels")
            return made

    def build(self) -> UNet:
        """Build the model with fresh weights."""
        return UNet(self.encoder, width=self.width)

    @property
    def normalise(self) -> Normalise:
        """How its pictures become numbers."""
        return Normalise(self.mean, self.std)


def make_task(options: SegmentOptions, data: MaskedPictures) -> Task:
    """Build the model, the data sets and the scores of a run; called on every device.

    Args:
        options: settled ones.
        data: what `prepare` returned.

    Raises:
        CheckpointError: the pretrained weights do not fit.
        ValueError: an option does not suit the model.
    """
    # Every device draws the first weights by itself, and all must draw the same.
    torch.manual_seed(options.seed)
    kind = _mask_model(options, data)
    model = kind.build()
    if options.pretrained:
        _load(model, Path(options.pretrained), options.pretrained_key)
    frozen = freeze(model, options, HEAD)
    weight = torch.tensor(_pos_weight(options.pos_weight, data))
    loss, score = _loss_and_score(weight, options.threshold, model.stride)
    padded = Padded(model.stride)
    test_set = WholePictures(data.test, kind.normalise, data.rule, data.white)
    return Task(
        model=model,
        groups=parameter_groups(
            model, rate=scaled_rate(options), head=HEAD, head_scale=options.head_lr_scale
        ),
        loss=loss,
        score=score,
        best="highest iou",
        train_set=Crops(data.train, options, kind.normalise, data.white),
        test_set=test_set,
        collate=padded,
        evaluation_batch_size=options.evaluation_batch_size,
        examples=lambda trainer, folder: _examples(trainer, folder, test_set, padded, options),
        facts={
            **facts_of(data),
            "model": f"U-Net, {kind.encoder}",
            "mask_model": asdict(kind),
            "pos_weight": float(weight),
            "frozen": frozen,
        },
        scan=data.scan,
    )


def _loss_and_score(
    weight: torch.Tensor, threshold: float, stride: int
) -> tuple[Callable[[nn.Module, Any], onefold.Mean], Callable[[nn.Module, Any], dict[str, Any]]]:
    """Make the loss and the score of a run, over the pixels that count.

    Args:
        weight: () float32, the weight of foreground pixels in the loss.
        threshold: probability from which a pixel is predicted to be foreground.
        stride: sides of pictures are padded to a multiple of it.
    """

    def mean_loss(logits: torch.Tensor, batch: Any) -> onefold.Mean:
        """Average over the pixels of the pictures, without padding and void parts of masks."""
        # Void is -1, which is no target of this loss: it becomes 0 here, and is not counted below.
        masks = batch["masks"].clamp(min=0)
        losses = F.binary_cross_entropy_with_logits(
            logits, masks, pos_weight=weight.to(logits.device), reduction="none"
        )
        counted = counted_pixels(batch)
        # No mean of the shard: shards differ in pixels, and onefold divides by those of the batch.
        return onefold.Mean((losses * counted).sum(), counted.sum())

    def loss(model: nn.Module, batch: Any) -> onefold.Mean:
        return mean_loss(model(batch["images"]).squeeze(1), batch)

    def score(model: nn.Module, batch: Any) -> dict[str, onefold.Mean]:
        logits = whole_logits(model, batch, stride)
        overlap, predicted, given = (part.sum() for part in overlaps(logits, batch, threshold))
        return {
            "loss": mean_loss(logits, batch),
            "iou": onefold.Mean(overlap, predicted + given - overlap),
            "dice": onefold.Mean(2 * overlap, predicted + given),
        }

    return loss, score


def overlaps(
    logits: torch.Tensor, batch: Any, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count each picture's pixels in both masks, in the predicted one, and in the given one.

    Args:
        logits: (n, h, w) float32.
        batch: what `Padded` returned.
        threshold: probability from which a pixel is in the predicted mask.

    Returns:
        Three counts (n,) float64, without void pixels.
    """
    counted = counted_pixels(batch)
    predicted = (logits.sigmoid() >= threshold) & counted
    # Void is -1 and padding 0, so neither is ever foreground here.
    given = batch["masks"] > 0.5
    # float64 holds every count exactly, and so do sums of them, in any order.
    pixels = (predicted & given, predicted, given)
    first, second, third = (part.sum(dim=(1, 2), dtype=torch.float64) for part in pixels)
    return first, second, third


def _mask_model(options: SegmentOptions, data: MaskedPictures) -> MaskModel:
    mean, std = data.sums.mean_and_std()
    run, normalise = run_of(options.pretrained), options.normalise
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
        white=data.white,
    )


def _load(model: UNet, path: Path, key: str | None) -> None:
    """Load the whole model from a run of this job, or its encoder from a file."""
    if is_run(path):
        load_finite(model, best_checkpoint(path))
        return
    # Not strict: the file of a classifier has a last layer more. What it lacks is looked for here.
    loaded = load_finite(model.encoder, path, key=key, strict=False)
    lacking = lacking_names(loaded.missing, HEAD)
    if lacking:
        raise CheckpointError(
            f"{path}: expected values of the right shape for the whole encoder, it has none for "
            f"{listed(lacking)}"
        )


def _pos_weight(chosen: str, data: MaskedPictures) -> float:
    if chosen != "auto":
        return float(chosen)
    if data.foreground in (0, data.pixels):
        which = "every" if data.foreground else "no"
        raise DataError(
            f"--pos-weight auto: expected masks with two kinds of pixels to train with, {which} "
            f"pixel is foreground"
        )
    return (data.pixels - data.foreground) / data.foreground


def _examples(
    trainer: onefold.Trainer,
    folder: RunFolder,
    test_set: WholePictures,
    padded: Padded,
    options: SegmentOptions,
) -> dict[str, Any]:
    """Show masks and predictions from all over the test set, and the worst; on every device."""

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
    # Where neither mask has a pixel, they agree; without the least of 1 it would be 0 / 0.
    nothing = both == 0
    iou = torch.where(nothing, 1.0, overlap / (both - overlap).clamp(min=1))
    dice = torch.where(nothing, 1.0, 2 * overlap / both.clamp(min=1))
    count = min(SHOWN, len(test_set))
    samples = [number * len(test_set) // count for number in range(count)]
    # Stable: the pictures below are predicted by all devices together, which must choose alike.
    worst = iou.argsort(stable=True)[:count].tolist()
    shown = sorted({*samples, *worst})
    draw = _Drawing(options.threshold, padded.stride)
    # Predicted once more, and only those: the masks of a whole test set would take all memory.
    drawn = trainer.predict(draw, Subset(test_set, shown), **reading)

    def entry_of(number: int) -> dict[str, Any]:
        pair = test_set.pairs[number]
        entry = {"name": pair.name, "iou": float(iou[number]), "dice": float(dice[number])}
        if trainer.is_lead:
            row = shown.index(number)
            parts = _parts(test_set, pair, drawn["mask"][row], drawn["size"][row])
            entry.update(
                {
                    name: save_picture(picture, folder.pictures, f"{number}-{name}")
                    for name, picture in parts.items()
                }
            )
        return entry

    return {
        "kind": JOB,
        "threshold": options.threshold,
        "samples": [entry_of(number) for number in samples],
        "worst": [entry_of(number) for number in worst],
    }


class _Drawing:
    """Predicts masks at the size of a report, each in the corner of a square of one size.

    Args:
        threshold: probability from which a pixel is in the mask.
        stride: of the model.
    """

    def __init__(self, threshold: float, stride: int) -> None:
        self._threshold = threshold
        self._stride = stride

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Return ``mask`` (n, side, side) uint8, of which ``size`` (n, 2) int64 is used."""
        # `Trainer.predict` wants values of one shape for all samples.
        logits = whole_logits(model, batch, self._stride).unsqueeze(1)
        masks = (logits.sigmoid() >= self._threshold).to(torch.float32)
        canvas = torch.zeros(len(masks), LARGEST_SHOWN, LARGEST_SHOWN, dtype=torch.uint8)
        sizes = torch.zeros(len(masks), 2, dtype=torch.int64)
        for row, (height, width) in enumerate(batch["sizes"].tolist()):
            scale = min(1.0, LARGEST_SHOWN / max(height, width))
            size = [max(1, round(height * scale)), max(1, round(width * scale))]
            # The largest of the pixels and not their mean, or thin lines would vanish.
            mask = F.adaptive_max_pool2d(masks[row, :, :height, :width], size)
            canvas[row, : size[0], : size[1]] = (mask[0] * 255).to(torch.uint8)
            sizes[row] = torch.tensor(size)
        return {"mask": canvas, "size": sizes}


def _parts(
    test_set: WholePictures, pair: Pair, mask: torch.Tensor, size: torch.Tensor
) -> dict[str, Any]:
    """Return a picture, its mask, and the predicted mask."""
    from PIL import Image

    height, width = size.tolist()
    return {
        "image": open_picture(pair.image, white=test_set.white),
        "mask": read_mask(pair.mask, test_set.rule),
        "prediction": Image.fromarray(np.ascontiguousarray(mask[:height, :width].numpy())),
    }
