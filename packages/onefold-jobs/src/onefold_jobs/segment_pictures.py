"""The pictures of the segment job, and the scores of their masks.

Crops are for training, whole pictures for tests. `PicturePairs` reads them, `Padded` makes shards,
`overlaps` counts what a mask has in common with the one that it should be, and `mask_scores` sums
that up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from onefold_jobs.data.augment import Normalize, below, between
from onefold_jobs.data.masks import VOID, MaskClass, MaskRule, mask_tensor, read_mask
from onefold_jobs.data.pairs import Pair
from onefold_jobs.data.pictures import open_picture
from onefold_jobs.scores import Baseline, Measured

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "Augment",
    "Padded",
    "PicturePairs",
    "class_ious",
    "class_names",
    "class_weights_of",
    "counted_pixels",
    "mask_baseline",
    "mask_scores",
    "mask_scores_of_each",
    "overlaps",
    "predicted_numbers",
    "whole_logits",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Augment:
    """Cuts the same square out of a picture and its mask, and changes both alike.

    A side that is shorter than the square is taken whole.
    """

    side: int
    """Of the square."""
    flip: bool
    """Whether every second one is mirrored."""
    turns: bool
    """Whether they are turned by quarters."""
    jitter: float
    """The largest share by which brightness and contrast change."""

    def __call__(self, image: Image, mask: Image) -> tuple[Image, Image]:
        from PIL import Image

        # All that is drawn comes from PyTorch's generator, seeded for each sample: the order of the
        # draws is part of the result.
        left = below(max(1, image.width - self.side + 1))
        top = below(max(1, image.height - self.side + 1))
        right, bottom = min(left + self.side, image.width), min(top + self.side, image.height)
        image, mask = (each.crop((left, top, right, bottom)) for each in (image, mask))
        # By quarters only: these move pixels, while other angles would blend the values of a mask.
        turned = Image.Transpose
        ways = []
        if self.flip and below(2):
            ways.append(turned.FLIP_LEFT_RIGHT)
        if self.turns and (quarters := below(4)):
            ways.append([turned.ROTATE_90, turned.ROTATE_180, turned.ROTATE_270][quarters - 1])
        for way in ways:
            image, mask = image.transpose(way), mask.transpose(way)
        # Colors change in the picture alone; a mask has none to change.
        return _jittered(image, self.jitter), mask


@dataclass(eq=False)
class PicturePairs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pictures and their masks, as tensors."""

    pairs: Sequence[Pair]
    normalize: Normalize
    rule: MaskRule = field(default_factory=MaskRule)
    """Which values of a mask are foreground and void."""
    white: int | None = None
    """The brightest value of pictures with more than 8 bits a pixel."""
    augment: Augment | None = None
    """How they are changed, anew at every reading."""

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(3, h, w) and (h, w) float32: 1 for foreground, or class numbers; `VOID` for void."""
        pair = self.pairs[index]
        image = open_picture(pair.image, white=self.white).convert("RGB")
        mask = read_mask(pair.mask, self.rule)
        if self.augment is not None:
            image, mask = self.augment(image, mask)
        return self.normalize(image), mask_tensor(mask, classes=bool(self.rule.classes))


@dataclass(frozen=True, slots=True)
class Padded:
    """Makes a shard of pictures of any size, padded on the right and below to a common size."""

    stride: int
    """The common height and width are multiples of it, and twice it at least: otherwise a single
    picture could leave batch norm with a single value in a channel."""

    def __call__(self, samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return ``images`` (n, 3, h, w), ``masks`` (n, h, w) float32, ``sizes`` (n, 2) int64."""
        sizes = torch.tensor([image.shape[1:] for image, _ in samples])
        height, width = padded_size(sizes.amax(dim=0).tolist(), self.stride)
        # Zeros: in normalized pictures, that is the mean color.
        images = torch.zeros(len(samples), samples[0][0].shape[0], height, width)
        masks = torch.zeros(len(samples), height, width)
        for row, (image, mask) in enumerate(samples):
            images[row, :, : image.shape[1], : image.shape[2]] = image
            masks[row, : mask.shape[0], : mask.shape[1]] = mask
        return {"images": images, "masks": masks, "sizes": sizes}


def padded_size(size: Sequence[int], stride: int) -> tuple[int, int]:
    """Round height and width up to multiples of the stride, and to twice it at least.

    >>> padded_size([33, 20], 32)
    (64, 64)
    """
    height, width = (max(2, -(-side // stride)) * stride for side in size)
    return height, width


def inside(sizes: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(n, height, width) bool: True inside the picture, False in its padding.

    Args:
        sizes: (n, 2) int64, height and width of each picture.
        height, width: of the padded pictures.

    >>> inside(torch.tensor([[1, 2]]), 2, 3).int()
    tensor([[[1, 1, 0],
             [0, 0, 0]]], dtype=torch.int32)
    """
    rows = torch.arange(height, device=sizes.device) < sizes[:, :1]
    columns = torch.arange(width, device=sizes.device) < sizes[:, 1:]
    return rows.unsqueeze(2) & columns.unsqueeze(1)


def counted_pixels(batch: Any) -> torch.Tensor:
    """(n, h, w) bool: True inside the picture, where its mask is not void.

    Args:
        batch: what `Padded` returned.
    """
    masks: torch.Tensor = batch["masks"]
    return inside(batch["sizes"], *masks.shape[1:]) & (masks != VOID)


def whole_logits(model: nn.Module, batch: Any, stride: int) -> torch.Tensor:
    """Compute the logits of whole pictures, so that none depends on the others of its shard.

    Each picture keeps only as much padding as it would have alone. More of it, up to the size of a
    larger picture, would change the borders, and with them what a deep network predicts all over
    the picture. Pictures of one padded size go through the model together.

    Args:
        model: in evaluation mode.
        batch: what `Padded` returned.
        stride: height and width that the model takes are multiples of it.

    Returns:
        (n, c, h, w) float32, 0 outside of each picture's own padding.
    """
    images = batch["images"]
    alike: dict[tuple[int, int], list[int]] = {}
    for row, size in enumerate(batch["sizes"].tolist()):
        alike.setdefault(padded_size(size, stride), []).append(row)
    # Outside of its own padding a picture's logits are never read, but they must be numbers: the
    # loss multiplies them by 0, and 0 times NaN is NaN.
    logits: torch.Tensor | None = None
    for (height, width), rows in alike.items():
        values = model(images[rows, :, :height, :width])
        if logits is None:
            logits = images.new_zeros(len(images), values.shape[1], *images.shape[2:])
        # Under autocast the model returns a smaller type than the images have.
        logits[rows, :, :height, :width] = values.to(logits.dtype)
    assert logits is not None
    return logits


def _jittered(image: Image, most: float) -> Image:
    """Change brightness and contrast by a random share of up to ``most``."""
    if not most:
        return image
    from PIL import ImageEnhance

    image = ImageEnhance.Brightness(image).enhance(between(1 - most, 1 + most))
    return ImageEnhance.Contrast(image).enhance(between(1 - most, 1 + most))


def mask_scores(found: Measured, classes: Sequence[MaskClass] = ()) -> dict[str, float]:
    """The scores of a test set, from what was measured of its pictures.

    Args:
        found: values of the pictures.
        classes: of the masks; then IoU and Dice are the means of the classes that occur.
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
    """Names of the classes; of plain masks, of the two kinds of their pixels."""
    return [each.name for each in classes] or ["background", "foreground"]


def mask_baseline(
    train: Sequence[int], test: Sequence[int], classes: Sequence[MaskClass], weight: float = 1.0
) -> Baseline:
    """The scores of answering alike for every pixel: the most frequent class, or foreground.

    The loss is that of predicting the classes' shares of the training set as their probabilities.

    Args:
        train: number of training pixels of each class, or of background and foreground.
        test: number of test pixels of each.
        classes: of the masks; none for foreground.
        weight: of foreground pixels in the loss.

    >>> baseline = mask_baseline([80, 20], [60, 40], ())
    >>> print(baseline, baseline.scores["iou"])
    'foreground' for every pixel 0.4
    """
    given, shares = (torch.tensor(each, dtype=torch.float64) for each in (test, train))
    # Background is not scored, so that answering it everywhere would have an IoU of 0.
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
    """What the loss of each class is multiplied by: as many times as it has fewer pixels."""
    pixels = torch.tensor(counts, dtype=torch.float64)
    return (pixels.sum() / (len(counts) * pixels.clamp(min=1))).to(torch.float32)


def class_ious(found: Measured, classes: Sequence[MaskClass]) -> list[dict[str, Any]]:
    """The IoU of each class over a test set, None if it is nowhere, and its share of the pixels."""
    sums = {name: each.sum(dim=0) for name, each in found.items()}
    iou = sums["overlap"] / (sums["predicted"] + sums["given"] - sums["overlap"])
    shares = sums["given"] / sums["counted"]
    return [
        {"class": each.name, "color": each.color, "iou": float(iou[n]), "share": float(shares[n])}
        for n, each in enumerate(classes)
    ]


def mask_scores_of_each(found: Measured) -> tuple[torch.Tensor, torch.Tensor]:
    """The IoU and the Dice score of each picture, (n,) float64 both; means of its classes."""
    overlap, both = found["overlap"], found["predicted"] + found["given"]
    scores = [overlap / (both - overlap), 2 * overlap / both]
    scores = [each if each.dim() == 1 else each.nanmean(dim=1) for each in scores]
    # Where neither mask has a pixel, it is 0 / 0, and they agree.
    iou, dice = (each.nan_to_num(nan=1.0) for each in scores)
    return iou, dice


def predicted_numbers(logits: torch.Tensor, threshold: float) -> torch.Tensor:
    """The class of each pixel, (n, h, w) int64; of one logit, 1 for foreground and 0 for the rest.

    Args:
        logits: (n, c, h, w) float32.
        threshold: probability from which a pixel is foreground.
    """
    if logits.shape[1] == 1:
        return (logits.squeeze(1).sigmoid() >= threshold).to(torch.int64)
    return logits.argmax(dim=1)


def overlaps(logits: torch.Tensor, batch: Any, threshold: float) -> dict[str, torch.Tensor]:
    """Count each picture's pixels: in both masks, in the predicted and the given one, and in all.

    Args:
        logits: (n, c, h, w) float32.
        batch: what `Padded` returned.
        threshold: probability from which a pixel is in the predicted mask.

    Returns:
        ``overlap``, ``predicted``, ``given`` and ``counted``, (n,) float64 each, without void
        pixels; of several classes, (n, c) but for ``counted``.
    """
    counted = counted_pixels(batch)
    predicted, classes = predicted_numbers(logits, threshold), logits.shape[1]
    found: dict[str, list[torch.Tensor]] = {"overlap": [], "predicted": [], "given": []}
    for number in range(classes) if classes > 1 else [1]:
        here = (predicted == number) & counted
        given = (batch["masks"] == number) & counted
        for name, pixels in (("overlap", here & given), ("predicted", here), ("given", given)):
            # float64 holds every count exactly, and so do sums of them, in any order.
            found[name].append(pixels.sum(dim=(1, 2), dtype=torch.float64))
    sums = {name: torch.stack(each, dim=1) for name, each in found.items()}
    if classes == 1:
        sums = {name: each.squeeze(1) for name, each in sums.items()}
    return {**sums, "counted": counted.sum(dim=(1, 2), dtype=torch.float64)}
