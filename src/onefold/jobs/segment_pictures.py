"""The pictures of the segment job: crops for training, whole ones for tests, shards of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from onefold.jobs.data.augment import Normalise, below, between
from onefold.jobs.data.decoding import open_picture
from onefold.jobs.data.masks import VOID, MaskRule, mask_tensor, read_mask
from onefold.jobs.data.pairs import Pair
from onefold.jobs.segment_options import SegmentOptions

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["LARGEST_CROP", "Crops", "Padded", "WholePictures", "counted_pixels", "whole_logits"]

LARGEST_CROP = 256


class Crops(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Squares cut out of pictures and out of their masks, augmented together.

    A side that is shorter than the square is taken whole.

    Args:
        pairs: the pictures and masks.
        options: settled ones.
        normalise: turns pictures into numbers.
        white: the brightest value of pictures with more than 8 bits a pixel.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        options: SegmentOptions,
        normalise: Normalise,
        white: int | None = None,
    ) -> None:
        self._pairs = pairs
        self._options = options
        self._normalise = normalise
        self._white = white

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(3, h, w) and (h, w) float32, h and w at most ``crop``; void pixels are `VOID`."""
        pair, options = self._pairs[index], self._options
        image = open_picture(pair.image, white=self._white).convert("RGB")
        mask = read_mask(pair.mask, options.mask_rule)
        # All that is drawn comes from PyTorch's generator, seeded for each sample: the order of the
        # draws is part of the result.
        image, mask = _cut_both(image, mask, options.crop or LARGEST_CROP)
        image, mask = _turn_both(image, mask, options)
        # Colours change in the picture alone; a mask has none to change.
        return self._normalise(_jittered(image, options.jitter)), mask_tensor(mask)


class WholePictures(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Whole pictures and masks, without augmentation.

    Args:
        pairs: the pictures and masks.
        normalise: turns pictures into numbers.
        rule: which values of a mask are foreground and void.
        white: the brightest value of pictures with more than 8 bits a pixel.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        normalise: Normalise,
        rule: MaskRule | None = None,
        white: int | None = None,
    ) -> None:
        self.pairs = pairs
        self.rule = rule or MaskRule()
        self.white = white
        self._normalise = normalise

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(3, h, w) and (h, w) float32; void pixels are `VOID`."""
        pair = self.pairs[index]
        image = self._normalise(open_picture(pair.image, white=self.white).convert("RGB"))
        return image, mask_tensor(read_mask(pair.mask, self.rule))


class Padded:
    """Makes a shard of pictures of any size, padded on the right and below to a common size.

    Args:
        stride: the common height and width are multiples of it, and twice it at least: otherwise a
            single picture could leave batch norm with a single value in a channel.
    """

    def __init__(self, stride: int) -> None:
        self.stride = stride

    def __call__(self, samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return ``images`` (n, 3, h, w), ``masks`` (n, h, w) float32, ``sizes`` (n, 2) int64."""
        sizes = torch.tensor([image.shape[1:] for image, _ in samples])
        height, width = padded_size(sizes.amax(dim=0).tolist(), self.stride)
        # Zeros: in normalised pictures, that is the mean colour.
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
        (n, h, w) float32, 0 outside of each picture's own padding.
    """
    images = batch["images"]
    alike: dict[tuple[int, int], list[int]] = {}
    for row, size in enumerate(batch["sizes"].tolist()):
        alike.setdefault(padded_size(size, stride), []).append(row)
    # Outside of its own padding a picture's logits are never read, but they must be numbers: the
    # loss multiplies them by 0, and 0 times NaN is NaN.
    logits: torch.Tensor = images.new_zeros(len(images), *images.shape[2:])
    for (height, width), rows in alike.items():
        values = model(images[rows, :, :height, :width]).squeeze(1)
        # Under autocast the model returns a smaller type than the images have.
        logits[rows, :height, :width] = values.to(logits.dtype)
    return logits


def _cut_both(image: Image, mask: Image, side: int) -> tuple[Image, Image]:
    """Cut the same square out of both, or as much of it as they have."""
    left = below(max(1, image.width - side + 1))
    top = below(max(1, image.height - side + 1))
    box = (left, top, min(left + side, image.width), min(top + side, image.height))
    return image.crop(box), mask.crop(box)


def _turn_both(image: Image, mask: Image, options: SegmentOptions) -> tuple[Image, Image]:
    """Mirror and turn both in the same way."""
    from PIL import Image

    # By quarters only: these move pixels, while other angles would blend the values of a mask.
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
    """Change brightness and contrast by a random share of up to ``most``."""
    if not most:
        return image
    from PIL import ImageEnhance

    image = ImageEnhance.Brightness(image).enhance(between(1 - most, 1 + most))
    return ImageEnhance.Contrast(image).enhance(between(1 - most, 1 + most))
