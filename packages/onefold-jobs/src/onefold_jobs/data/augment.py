"""Turns images into tensors: augmented for training, center crops for testing.

Every random number comes from PyTorch's global generator, which a Trainer's loader seeds for each
sample, so the result depends neither on the number of workers nor on that of devices. Code in this
file must not use ``random``, NumPy's generators, or a generator of its own.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from onefold_jobs.data.pictures import Mode, Pictures

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "IMAGENET",
    "CenterCrop",
    "LabeledPictures",
    "Mix",
    "Normalize",
    "RandomFlip",
    "RandomResizedCrop",
    "RandomShift",
    "below",
    "between",
    "by_kornia",
]

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of ImageNet's pixels in [0, 1], as published weights expect."""

Change = Callable[["Image"], "Image"]

_TRIES = 10
"""Number of attempts to draw a box before the largest centered one is used."""
_ASPECTS = (3 / 4, 4 / 3)
"""Minimum and maximum aspect ratio of a random box, width over height."""
_MARGIN = 8 / 7
"""Shorter side of a resized test image relative to the crop: 256 for 224."""


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """Crop a random box and resize it to a square (Szegedy et al., 2014, "Going deeper")."""

    size: int
    """Side length of the square, in pixels."""
    least_area: float
    """Minimum area of a box as a fraction of the image, unless the image is too elongated."""

    def __call__(self, picture: Image) -> Image:
        return _resized(picture, self.size, self._box(*picture.size))

    def _box(self, width: int, height: int) -> tuple[float, float, float, float]:
        for _ in range(_TRIES):
            area = width * height * between(self.least_area, 1.0)
            # Uniform in the logarithm, or wide boxes would be more frequent than tall ones.
            aspect = math.exp(between(math.log(_ASPECTS[0]), math.log(_ASPECTS[1])))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            # Draw again if the box does not fit, because trimming it would change its aspect ratio.
            if 0 < w <= width and 0 < h <= height:
                left, top = below(width - w + 1), below(height - h + 1)
                return (left, top, left + w, top + h)
        # Hardly any box fits a very long image, but each sample must take bounded time.
        w, h = min(width, round(height * _ASPECTS[1])), min(height, round(width / _ASPECTS[0]))
        left, top = (width - w) // 2, (height - h) // 2
        return (left, top, left + w, top + h)


@dataclass(frozen=True, slots=True)
class RandomShift:
    """Fit the image to a square and shift it by up to an eighth of its side; gaps are black."""

    size: int
    """Side length of the square, in pixels."""

    def __call__(self, picture: Image) -> Image:
        whole = CenterCrop(self.size, margin=1.0)(picture)
        most = self.size // 8
        left, top = below(2 * most + 1) - most, below(2 * most + 1) - most
        # The box may extend beyond the image: Pillow fills the rest with zeros.
        return whole.crop((left, top, left + self.size, top + self.size))


@dataclass(frozen=True, slots=True)
class RandomFlip:
    """Flip the image horizontally with a probability of one half."""

    def __call__(self, picture: Image) -> Image:
        from PIL import ImageOps

        return ImageOps.mirror(picture) if below(2) else picture


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """Resize the image and crop the center."""

    size: int
    """Side length of the square, in pixels."""
    margin: float = _MARGIN
    """Length of the resized shorter side relative to the side of the square."""

    def __call__(self, picture: Image) -> Image:
        (left, right), (top, bottom) = (self._edges(picture, side) for side in picture.size)
        return _resized(picture, self.size, (left, top, right, bottom))

    def _edges(self, picture: Image, side: int) -> tuple[float, float]:
        """Return the start and the end of the crop along a side, in pixels of the whole image."""
        # Map the box back to the original, so that pixels outside the crop are never resized.
        shorter = round(self.size * self.margin)
        resized = max(shorter, round(side * shorter / min(picture.size)))
        start = (resized - self.size) // 2
        return start * side / resized, (start + self.size) * side / resized


@dataclass(frozen=True, slots=True)
class Normalize:
    """Normalize pixels to mean 0 and standard deviation 1 per channel."""

    mean: tuple[float, ...]  # (c,), for pixels in [0, 1]
    std: tuple[float, ...]  # (c,)

    def __call__(self, picture: Image) -> torch.Tensor:
        """Return the image as (c, h, w) float32."""
        # np.array copies: Pillow's memory is read-only, which from_numpy warns about.
        pixels = torch.from_numpy(np.array(picture, dtype=np.uint8))
        channels = pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1)
        mean, std = (
            torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)
            for values in (self.mean, self.std)
        )
        return (channels.to(torch.float32) / 255 - mean) / std


@dataclass(eq=False)
class LabeledPictures(Dataset[tuple[torch.Tensor, int]]):
    """A dataset of images and labels, augmented at every access."""

    pictures: Pictures
    labels: Any
    """Label of each image: its class number, or a tensor."""
    mode: Mode
    """Mode that every image is converted to."""
    changes: Sequence[Change]
    """Transforms of an image, in this order."""
    normalize: Normalize
    """Conversion of the transformed image to a tensor."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = self.pictures[index].convert(self.mode)
        for change in self.changes:
            picture = change(picture)
        return self.normalize(picture), self.labels[index]


@dataclass(frozen=True, slots=True)
class ByKornia:
    """Transform an image with a kornia module, which takes tensors with three channels."""

    module: torch.nn.Module

    def __call__(self, picture: Image) -> Image:
        from PIL import Image

        pixels = torch.from_numpy(np.array(picture.convert("RGB"), dtype=np.uint8))
        changed = self.module(pixels.permute(2, 0, 1).unsqueeze(0).to(torch.float32) / 255)
        whole = (changed[0].clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0)
        return Image.fromarray(whole.numpy()).convert(picture.mode)


def by_kornia(randaugment: int, erasing: float) -> list[Change]:
    """Make kornia transforms: RandAugment (Cubuk et al., 2019) and erasing (Zhong et al., 2017).

    Args:
        randaugment: magnitude of two operations, 1 to 30; 0 disables them.
        erasing: probability of a black box; 0 disables it.
    """
    if not randaugment and not erasing:
        return []
    kornia: Any = importlib.import_module("kornia.augmentation")
    modules = [kornia.auto.RandAugment(n=2, m=randaugment)] if randaugment else []
    modules += [kornia.RandomErasing(p=erasing)] if erasing else []
    return [ByKornia(module) for module in modules]


@dataclass(frozen=True, slots=True)
class Mix:
    """Make a shard in which each image and its label are mixed with another one.

    mixup (Zhang et al., 2017) blends two images; CutMix (Yun et al., 2019) pastes a box of one
    image into the other. If both are enabled, each shard uses either with a probability of one
    half.
    """

    classes: int
    mixup: float
    """Both parameters of the beta distribution of mixing weights; 0 disables mixup."""
    cutmix: float
    """The same for CutMix."""

    def __call__(
        self, samples: Sequence[tuple[torch.Tensor, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images (n, c, h, w) float32, and class weights (n, classes) float32."""
        images, numbers = default_collate(list(samples))
        labels = torch.nn.functional.one_hot(numbers, self.classes).to(torch.float32)
        partners = torch.randperm(len(images))
        cuts = self.cutmix > 0 and (self.mixup == 0 or below(2) == 1)
        strength = self.cutmix if cuts else self.mixup
        kept = float(torch.distributions.Beta(strength, strength).sample())
        if cuts:
            mixed, kept = _with_box(images, images[partners], kept)
        else:
            mixed = kept * images + (1 - kept) * images[partners]
        return mixed, kept * labels + (1 - kept) * labels[partners]


def _with_box(
    images: torch.Tensor, others: torch.Tensor, kept: float
) -> tuple[torch.Tensor, float]:
    """Paste a box of other images; return the images, and the remaining fraction of each.

    Args:
        images: (n, c, h, w).
        others: (n, c, h, w).
        kept: fraction that would remain if the box did not extend beyond the edges.
    """
    height, width = images.shape[2:]
    half = math.sqrt(1 - kept) / 2
    (top, bottom), (left, right) = (
        (max(0, middle - round(half * side)), min(side, middle + round(half * side)))
        for side, middle in ((height, below(height)), (width, below(width)))
    )
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = others[:, :, top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / (height * width)


def between(low: float, high: float) -> float:
    """Draw a number uniformly from [low, high)."""
    return low + (high - low) * torch.rand(()).item()


def below(limit: int) -> int:
    """Draw an integer uniformly from 0 to ``limit - 1``."""
    return int(torch.randint(limit, ()).item())


def _resized(picture: Image, size: int, box: tuple[float, float, float, float]) -> Image:
    """Resize a box of an image to a square."""
    from PIL import Image

    # reducing_gap lets Pillow shrink a large box by an integer factor first, which is far cheaper;
    # with 2.0 the result can hardly be distinguished from a single resize.
    return picture.resize((size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
