"""Images and masks of the segment job: loss, scores and examples.

Training uses crops, tests use whole images. `PicturePairs` reads both, `Padded` makes shards,
`overlaps` counts the pixels that a predicted and a given mask share, and `mask_scores` turns the
counts into scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, Subset

import onefold
from onefold.files import aside_of
from onefold_jobs.data.augment import Normalize, below, between
from onefold_jobs.data.masks import (
    MASK_NOTE,
    VOID,
    MaskClass,
    MaskRule,
    colored_mask,
    mask_tensor,
    read_mask,
)
from onefold_jobs.data.pairs import Pair
from onefold_jobs.data.pictures import open_picture
from onefold_jobs.runfolder import RunFolder
from onefold_jobs.scores import Baseline, Measure, Measured, Predict
from onefold_jobs.targets import spread

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "Augment",
    "Padded",
    "PicturePairs",
    "class_ious",
    "class_names",
    "class_weights_of",
    "loss_and_measure",
    "mask_baseline",
    "mask_examples",
    "mask_scores",
    "mask_scores_of_each",
    "mask_writer",
]


SHOWN = 12
"""Number of examples of each kind in a report; each is three images."""
LARGEST_SHOWN = 512
"""Maximum length of the longer side of a prediction in a report, in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Augment:
    """Crops the same square from an image and its mask, and transforms both the same way.

    If a side is shorter than the square, all of it is used.
    """

    side: int
    """Side length of the square, in pixels."""
    flip: bool
    """Whether to flip horizontally with a probability of one half."""
    turns: bool
    """Whether to rotate by a random multiple of 90 degrees."""
    jitter: float
    """Maximum relative change of brightness and contrast."""

    def __call__(self, image: Image, mask: Image) -> tuple[Image, Image]:
        from PIL import Image

        # All draws use PyTorch's generator, which is seeded for each sample. Their order is part of
        # the result.
        left = below(max(1, image.width - self.side + 1))
        top = below(max(1, image.height - self.side + 1))
        right, bottom = min(left + self.side, image.width), min(top + self.side, image.height)
        image, mask = (each.crop((left, top, right, bottom)) for each in (image, mask))
        # Turning by multiples of 90 degrees only moves pixels; other angles would interpolate mask
        # values.
        turned = Image.Transpose
        ways = []
        if self.flip and below(2):
            ways.append(turned.FLIP_LEFT_RIGHT)
        if self.turns and (quarters := below(4)):
            ways.append([turned.ROTATE_90, turned.ROTATE_180, turned.ROTATE_270][quarters - 1])
        for way in ways:
            image, mask = image.transpose(way), mask.transpose(way)
        # The colors change in the image only; a mask has none.
        return _jittered(image, self.jitter), mask


@dataclass(eq=False)
class PicturePairs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images and their masks, as tensors."""

    pairs: Sequence[Pair]
    normalize: Normalize
    rule: MaskRule = field(default_factory=MaskRule)
    """Mask values that are foreground or void."""
    white: int | None = None
    """Brightest value of images with more than 8 bits per pixel."""
    augment: Augment | None = None
    """Augmentation, drawn at every access."""

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (3, h, w) and (h, w) float32: 1 for foreground, or class numbers; `VOID` for
        void."""
        pair = self.pairs[index]
        image = open_picture(pair.image, white=self.white).convert("RGB")
        mask = read_mask(pair.mask, self.rule)
        if self.augment is not None:
            image, mask = self.augment(image, mask)
        return self.normalize(image), mask_tensor(mask, classes=bool(self.rule.classes))


@dataclass(frozen=True, slots=True)
class Padded:
    """Makes a shard of images of any size, padded on the right and below to a common size."""

    stride: int
    """Height and width become multiples of this number, and at least twice it: otherwise a single
    image could leave batch norm with a single value per channel."""

    def __call__(self, samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return ``images`` (n, 3, h, w), ``masks`` (n, h, w) float32, ``sizes`` (n, 2) int64."""
        sizes = torch.tensor([image.shape[1:] for image, _ in samples])
        height, width = padded_size(sizes.amax(dim=0).tolist(), self.stride)
        # Zero is the mean color of normalized images.
        images = torch.zeros(len(samples), samples[0][0].shape[0], height, width)
        masks = torch.zeros(len(samples), height, width)
        for row, (image, mask) in enumerate(samples):
            images[row, :, : image.shape[1], : image.shape[2]] = image
            masks[row, : mask.shape[0], : mask.shape[1]] = mask
        return {"images": images, "masks": masks, "sizes": sizes}


def padded_size(size: Sequence[int], stride: int) -> tuple[int, int]:
    """Round height and width up to multiples of the stride, and to at least twice the stride.

    >>> padded_size([33, 20], 32)
    (64, 64)
    """
    height, width = (max(2, -(-side // stride)) * stride for side in size)
    return height, width


def inside(sizes: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return (n, height, width) bool: True inside the image, False in its padding.

    Args:
        sizes: (n, 2) int64, height and width of each image.
        height, width: size of the padded images.

    >>> inside(torch.tensor([[1, 2]]), 2, 3).int()
    tensor([[[1, 1, 0],
             [0, 0, 0]]], dtype=torch.int32)
    """
    rows = torch.arange(height, device=sizes.device) < sizes[:, :1]
    columns = torch.arange(width, device=sizes.device) < sizes[:, 1:]
    return rows.unsqueeze(2) & columns.unsqueeze(1)


def counted_pixels(batch: Any) -> torch.Tensor:
    """Return (n, h, w) bool: True inside the image, except where its mask is void.

    Args:
        batch: result of `Padded`.
    """
    masks: torch.Tensor = batch["masks"]
    return inside(batch["sizes"], *masks.shape[1:]) & (masks != VOID)


def whole_logits(model: nn.Module, batch: Any, stride: int) -> torch.Tensor:
    """Compute the logits of whole images so that no image depends on the others of its shard.

    Each image keeps only as much padding as it would have alone. More padding, up to the size of a
    larger image, would change the borders, and therefore the predictions of a deep network all over
    the image. Images with the same padded size are computed together.

    Args:
        model: model in evaluation mode.
        batch: result of `Padded`.
        stride: the model requires heights and widths that are multiples of it.

    Returns:
        (n, c, h, w) float32, 0 outside each image's own padding.
    """
    images = batch["images"]
    alike: dict[tuple[int, int], list[int]] = {}
    for row, size in enumerate(batch["sizes"].tolist()):
        alike.setdefault(padded_size(size, stride), []).append(row)
    # Logits outside an image's own padding are never used, but they must be finite: the loss
    # multiplies them by 0, and 0 times NaN is NaN.
    logits: torch.Tensor | None = None
    for (height, width), rows in alike.items():
        values = model(images[rows, :, :height, :width])
        if logits is None:
            logits = images.new_zeros(len(images), values.shape[1], *images.shape[2:])
        # Under autocast, the model returns a smaller dtype than the images have.
        logits[rows, :, :height, :width] = values.to(logits.dtype)
    assert logits is not None
    return logits


def _jittered(image: Image, most: float) -> Image:
    """Change brightness and contrast by a random factor of up to ``most``."""
    if not most:
        return image
    from PIL import ImageEnhance

    image = ImageEnhance.Brightness(image).enhance(between(1 - most, 1 + most))
    return ImageEnhance.Contrast(image).enhance(between(1 - most, 1 + most))


def mask_scores(found: Measured, classes: Sequence[MaskClass] = ()) -> dict[str, float]:
    """Compute test scores from the measurements of all images.

    Args:
        found: measurements of the images.
        classes: classes of the masks; with them, IoU and Dice are means over the classes that
            occur.
    """
    sums = {name: each.sum(dim=0) for name, each in found.items()}
    overlap, both = sums["overlap"], sums["predicted"] + sums["given"]
    scores = {
        "loss": sums["loss"] / sums["counted"],
        "iou": (overlap / (both - overlap)).nanmean(),
        "dice": (2 * overlap / both).nanmean(),
    }
    if classes:
        scores["pixel-accuracy"] = overlap.sum() / sums["counted"]
    return {name: float(score) for name, score in scores.items()}


def class_names(classes: Sequence[MaskClass]) -> list[str]:
    """Return the class names; for foreground masks, the names of both kinds of pixels."""
    return [each.name for each in classes] or ["background", "foreground"]


def mask_baseline(
    train: Sequence[int], test: Sequence[int], classes: Sequence[MaskClass], weight: float = 1.0
) -> Baseline:
    """Compute the scores of a constant prediction: the most frequent class, or foreground.

    Its loss is that of predicting the class frequencies of the training set as probabilities.

    Args:
        train: number of training pixels of each class, or of background and foreground.
        test: number of test pixels of each class.
        classes: classes of the masks; empty for foreground masks.
        weight: loss weight of foreground pixels.

    >>> baseline = mask_baseline([80, 20], [60, 40], ())
    >>> print(baseline, baseline.scores["iou"])
    'foreground' for every pixel 0.4
    """
    given, shares = (torch.tensor(each, dtype=torch.float64) for each in (test, train))
    # Background is not scored: predicting it everywhere would have an IoU of 0.
    most = int(shares.argmax()) if classes else 1
    losses = -torch.xlogy(given, shares / shares.sum())
    losses[1] *= 1.0 if classes else weight
    predicted = torch.zeros_like(given)
    predicted[most] = given.sum()
    pixels = {"overlap": predicted.minimum(given), "predicted": predicted, "given": given}
    found = {name: each[None] if classes else each[None, 1] for name, each in pixels.items()}
    found |= {"loss": losses.sum()[None], "counted": given.sum()[None]}
    return Baseline(class_names(classes)[most], mask_scores(found, classes), "pixel")


def class_weights_of(counts: Sequence[int]) -> torch.Tensor:
    """Return loss weights that are inversely proportional to the pixel counts of the classes."""
    pixels = torch.tensor(counts, dtype=torch.float64)
    return (pixels.sum() / (len(counts) * pixels.clamp(min=1))).to(torch.float32)


def class_ious(found: Measured, classes: Sequence[MaskClass]) -> list[dict[str, Any]]:
    """Return the test IoU of each class, None if it never occurs, and its fraction of the
    pixels."""
    sums = {name: each.sum(dim=0) for name, each in found.items()}
    iou = sums["overlap"] / (sums["predicted"] + sums["given"] - sums["overlap"])
    shares = sums["given"] / sums["counted"]
    return [
        {"class": each.name, "color": each.color, "iou": float(iou[n]), "share": float(shares[n])}
        for n, each in enumerate(classes)
    ]


def mask_scores_of_each(found: Measured) -> tuple[torch.Tensor, torch.Tensor]:
    """Return IoU and Dice of each image, (n,) float64 each; means over its classes."""
    overlap, both = found["overlap"], found["predicted"] + found["given"]
    scores = [overlap / (both - overlap), 2 * overlap / both]
    scores = [each if each.dim() == 1 else each.nanmean(dim=1) for each in scores]
    # If neither mask has a pixel, the score is 0 / 0, and the masks agree.
    iou, dice = (each.nan_to_num(nan=1.0) for each in scores)
    return iou, dice


def predicted_numbers(logits: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return each pixel's class, (n, h, w) int64; for a single logit, 1 for foreground, otherwise
    0.

    Args:
        logits: (n, c, h, w) float32.
        threshold: minimum probability of foreground pixels.
    """
    if logits.shape[1] == 1:
        return (logits.squeeze(1).sigmoid() >= threshold).to(torch.int64)
    return logits.argmax(dim=1)


def overlaps(logits: torch.Tensor, batch: Any, threshold: float) -> dict[str, torch.Tensor]:
    """Count each image's pixels: in both masks, in the predicted mask, in the given mask, in total.

    Args:
        logits: (n, c, h, w) float32.
        batch: result of `Padded`.
        threshold: minimum probability of predicted foreground pixels.

    Returns:
        ``overlap``, ``predicted``, ``given`` and ``counted``, (n,) float64 each, without void
        pixels; with several classes, (n, c) except for ``counted``.
    """
    counted = counted_pixels(batch)
    predicted, classes = predicted_numbers(logits, threshold), logits.shape[1]
    found: dict[str, list[torch.Tensor]] = {"overlap": [], "predicted": [], "given": []}
    for number in range(classes) if classes > 1 else [1]:
        here = (predicted == number) & counted
        given = (batch["masks"] == number) & counted
        for name, pixels in (("overlap", here & given), ("predicted", here), ("given", given)):
            # float64 represents every count exactly, and so do its sums, in any order.
            found[name].append(pixels.sum(dim=(1, 2), dtype=torch.float64))
    sums = {name: torch.stack(each, dim=1) for name, each in found.items()}
    if classes == 1:
        sums = {name: each.squeeze(1) for name, each in sums.items()}
    return {**sums, "counted": counted.sum(dim=(1, 2), dtype=torch.float64)}


def loss_and_measure(
    weight: torch.Tensor, threshold: float, stride: int, by_class: torch.Tensor | None = None
) -> tuple[Callable[[nn.Module, Any], onefold.Mean], Measure]:
    """Make the loss of a run and the measure for its scores, both over all pixels but void ones.

    Args:
        weight: () float32, loss weight of foreground pixels.
        threshold: minimum probability of predicted foreground pixels.
        stride: images are padded to multiples of it.
        by_class: (classes,) float32, weight of each class in the loss, but not in the scores.
    """

    def losses_of(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the loss of each pixel, (n, h, w); 0 in the padding and in void pixels."""
        # Void is -1, which is not a valid target: clamp it to 0 here, and do not count it.
        masks = batch["masks"].clamp(min=0)
        if logits.shape[1] == 1:
            losses = F.binary_cross_entropy_with_logits(
                logits.squeeze(1), masks, pos_weight=weight.to(logits.device), reduction="none"
            )
        else:
            # Flattened to rows: PyTorch's loss for images sums in nondeterministic order on GPUs.
            rows = logits.permute(0, 2, 3, 1).flatten(0, 2)
            targets = masks.to(torch.int64)
            losses = F.cross_entropy(rows, targets.flatten(), reduction="none").view_as(masks)
        return losses * counted_pixels(batch)

    def loss(model: nn.Module, batch: Any) -> onefold.Mean:
        losses, weights = losses_of(model(batch["images"]), batch), counted_pixels(batch)
        if by_class is not None:
            numbers = batch["masks"].clamp(min=0).to(torch.int64)
            weights = by_class.to(losses.device)[numbers] * weights
            losses = losses * weights
        # A mean over the shard would be wrong: shards differ in pixels, and onefold divides by the
        # batch's pixels.
        return onefold.Mean(losses.sum(), weights.sum())

    def measure(model: nn.Module, batch: Any) -> Measured:
        logits = whole_logits(model, batch, stride)
        losses = losses_of(logits, batch).sum(dim=(1, 2), dtype=torch.float64)
        return {"loss": losses, **overlaps(logits, batch, threshold)}

    return loss, measure


def mask_examples(
    predict: Predict,
    folder: RunFolder,
    measure: Measure,
    test_set: PicturePairs,
    *,
    stride: int,
    threshold: float,
    classes: Sequence[MaskClass],
) -> dict[str, Any]:
    """Show masks and predictions of samples and of the worst images. Runs on every device."""
    from PIL import Image

    found = predict(measure, test_set)
    iou, dice = mask_scores_of_each(found)
    samples = spread(len(test_set), SHOWN)
    # A stable sort: all devices together predict the images below, so they must choose the same.
    worst = iou.argsort(stable=True)[: len(samples)].tolist()
    shown = sorted({*samples, *worst})
    draw = partial(_draw, threshold=threshold, stride=stride)
    # Predict only these again, because the masks of a whole test set would exhaust memory.
    drawn = predict(draw, Subset(test_set, shown))["mask"]

    def entry_of(number: int) -> dict[str, Any]:
        pair = test_set.pairs[number]
        scores = {"iou": float(iou[number]), "dice": float(dice[number])}
        image = open_picture(pair.image, white=test_set.white)
        height, width = _shown_size(image.height, image.width)
        mask = drawn[shown.index(number), :height, :width].contiguous().numpy()
        parts = {"image": image, "mask": read_mask(pair.mask, test_set.rule)}
        parts["prediction"] = Image.fromarray(mask)
        if classes:
            for part in ("mask", "prediction"):
                parts[part] = colored_mask(np.asarray(parts[part]), classes, values=False)
        pictures = {
            name: folder.save_picture(picture, f"{number}-{name}")
            for name, picture in parts.items()
        }
        return {"name": pair.image.name, **scores, **pictures}

    return {
        **({"ious": class_ious(found, classes)} if classes else {}),
        "threshold": None if classes else threshold,
        "samples": [entry_of(number) for number in samples],
        "worst": [entry_of(number) for number in worst],
    }


def _draw(
    model: nn.Module, batch: Any, *, threshold: float, stride: int
) -> dict[str, torch.Tensor]:
    """Predict masks in report size, each in the corner of a square of fixed size.

    Args:
        model: model in evaluation mode.
        batch: result of `Padded`.
        threshold: minimum probability of foreground pixels.
        stride: stride of the model.

    Returns:
        ``mask`` (n, side, side) uint8, of which each image uses its `_shown_size`: 255 for
        foreground, or class numbers.
    """
    # `Trainer.predict` requires values of the same shape for all samples.
    logits = whole_logits(model, batch, stride)
    masks = predicted_numbers(logits, threshold).unsqueeze(1).to(torch.float32)
    canvas = torch.zeros(len(masks), LARGEST_SHOWN, LARGEST_SHOWN, dtype=torch.uint8)
    for row, (height, width) in enumerate(batch["sizes"].tolist()):
        h, w = _shown_size(height, width)
        whole = masks[row, :, :height, :width]
        if logits.shape[1] == 1:
            # The maximum of the pixels, not their mean, so that thin lines do not vanish.
            mask = F.adaptive_max_pool2d(whole, (h, w)) * 255
        else:
            mask = F.interpolate(whole.unsqueeze(0), (h, w), mode="nearest-exact")[0]
        canvas[row, :h, :w] = mask[0].to(torch.uint8)
    return {"mask": canvas}


def _shown_size(height: int, width: int) -> tuple[int, int]:
    """Return height and width of an image's mask in a report."""
    scale = min(1.0, LARGEST_SHOWN / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def mask_writer(
    output: Path,
    names: Sequence[str],
    stride: int,
    threshold: float,
    classes: Sequence[MaskClass],
) -> Measure:
    """Make a measure that predicts masks and writes each on the device that computes it.

    Args:
        output: folder of the masks.
        names: paths of the masks in it; samples contain the number of their name in place of a
            mask.
        stride: stride of the model.
        threshold: minimum probability of foreground pixels.
        classes: classes of the masks.

    Returns:
        A measure: ``share`` (n, classes or 2) float64, each class's fraction of the pixels.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    note = PngInfo()
    note.add_text("Software", MASK_NOTE)

    def draw(model: nn.Module, batch: Any) -> Measured:
        masks = predicted_numbers(whole_logits(model, batch, stride), threshold)
        shares = []
        # The mask's first pixel; float32 represents numbers up to 16,777,216 exactly.
        numbers = batch["masks"][:, 0, 0].to(torch.int64).tolist()
        for mask, number, size in zip(masks, numbers, batch["sizes"].tolist(), strict=True):
            pixels = mask[: size[0], : size[1]].cpu()
            levels = pixels.numpy().astype(np.uint8)
            if classes:
                drawn = colored_mask(levels, classes, values=True)
            else:
                drawn = Image.fromarray(levels * np.uint8(255))
            # Write atomically, so that a stop leaves no partial file.
            with aside_of(output / names[number], below=output) as file:
                drawn.save(file, format="PNG", pnginfo=note)
            counts = torch.bincount(pixels.flatten(), minlength=max(2, len(classes)))
            shares.append(counts.to(torch.float64) / pixels.numel())
        return {"share": torch.stack(shares)}

    return draw
