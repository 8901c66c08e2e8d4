"""Turns pictures into tensors: augmented for training, cut from the middle for testing.

Every random number comes from PyTorch's global generator, which the loader of a Trainer seeds for
each sample: so the result depends neither on the number of workers nor on that of devices. Nothing
here may draw from ``random`` or NumPy instead, nor keep a generator of its own.
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
"""Mean and standard deviation of ImageNet's pixels in [0, 1], which published weights expect."""

Change = Callable[["Image"], "Image"]

_TRIES = 10
"""How often a box is drawn before the largest one in the middle is taken instead."""
_ASPECTS = (3 / 4, 4 / 3)
"""Least and greatest width over height of a random box."""
_MARGIN = 8 / 7
"""How much longer than the crop the shorter side of a test picture is made: 256 for 224."""


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """Cut out a random box and resize it to a square (Szegedy et al., 2014, "Going deeper")."""

    size: int
    """Pixels of the square's side."""
    least_area: float
    """The smallest share of the picture that a box may have, unless the picture is too long."""

    def __call__(self, picture: Image) -> Image:
        return _resized(picture, self.size, self._box(*picture.size))

    def _box(self, width: int, height: int) -> tuple[float, float, float, float]:
        for _ in range(_TRIES):
            area = width * height * between(self.least_area, 1.0)
            # Uniform in the logarithm, or wide boxes would be more frequent than tall ones.
            aspect = math.exp(between(math.log(_ASPECTS[0]), math.log(_ASPECTS[1])))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            # A box that does not fit is drawn again, not trimmed, which would change its aspect.
            if 0 < w <= width and 0 < h <= height:
                left, top = below(width - w + 1), below(height - h + 1)
                return (left, top, left + w, top + h)
        # A very long picture fits hardly any box, and each sample must end in bounded time.
        w, h = min(width, round(height * _ASPECTS[1])), min(height, round(width / _ASPECTS[0]))
        left, top = (width - w) // 2, (height - h) // 2
        return (left, top, left + w, top + h)


@dataclass(frozen=True, slots=True)
class RandomShift:
    """Fit the picture to a square and move it by up to an eighth of its side; gaps are black."""

    size: int
    """Pixels of the square's side."""

    def __call__(self, picture: Image) -> Image:
        whole = CenterCrop(self.size, margin=1.0)(picture)
        most = self.size // 8
        left, top = below(2 * most + 1) - most, below(2 * most + 1) - most
        # A box that reaches beyond the picture is not an error: Pillow fills the rest with zeros.
        return whole.crop((left, top, left + self.size, top + self.size))


@dataclass(frozen=True, slots=True)
class RandomFlip:
    """Mirror the picture left to right, with a probability of one half."""

    def __call__(self, picture: Image) -> Image:
        from PIL import ImageOps

        return ImageOps.mirror(picture) if below(2) else picture


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """Resize the shorter side to a multiple of the square's, and cut out the middle."""

    size: int
    """Pixels of the square's side."""
    margin: float = _MARGIN
    """Length of the resized shorter side over that of the square's side."""

    def __call__(self, picture: Image) -> Image:
        (left, right), (top, bottom) = (self._edges(picture, side) for side in picture.size)
        return _resized(picture, self.size, (left, top, right, bottom))

    def _edges(self, picture: Image, side: int) -> tuple[float, float]:
        """Return where the cut begins and ends along a side, in pixels of the whole picture."""
        # The box is mapped back, so that the pixels outside the cut are never resized at all.
        shorter = round(self.size * self.margin)
        resized = max(shorter, round(side * shorter / min(picture.size)))
        start = (resized - self.size) // 2
        return start * side / resized, (start + self.size) * side / resized


@dataclass(frozen=True, slots=True)
class Normalize:
    """Turn pixels into numbers of mean 0 and standard deviation 1, channel by channel."""

    mean: tuple[float, ...]  # (c,), of pixels in [0, 1]
    std: tuple[float, ...]  # (c,)

    def __call__(self, picture: Image) -> torch.Tensor:
        """Return the picture as (c, h, w) float32."""
        # np.array copies: a view of Pillow's memory is read-only, which from_numpy warns about.
        pixels = torch.from_numpy(np.array(picture, dtype=np.uint8))
        channels = pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1)
        mean, std = (
            torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)
            for values in (self.mean, self.std)
        )
        return (channels.to(torch.float32) / 255 - mean) / std


@dataclass(eq=False)
class LabeledPictures(Dataset[tuple[torch.Tensor, int]]):
    """A data set of pictures and their labels, augmented anew at every reading."""

    pictures: Pictures
    labels: Any
    """Of each picture: the number of its class, or a tensor."""
    mode: Mode
    """The mode that every picture is converted to."""
    changes: Sequence[Change]
    """What is done to a picture, in this order."""
    normalize: Normalize
    """What turns the changed picture into a tensor."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = self.pictures[index].convert(self.mode)
        for change in self.changes:
            picture = change(picture)
        return self.normalize(picture), self.labels[index]


@dataclass(frozen=True, slots=True)
class ByKornia:
    """Change a picture by a module of kornia, which takes tensors of three channels."""

    module: torch.nn.Module

    def __call__(self, picture: Image) -> Image:
        from PIL import Image

        pixels = torch.from_numpy(np.array(picture.convert("RGB"), dtype=np.uint8))
        changed = self.module(pixels.permute(2, 0, 1).unsqueeze(0).to(torch.float32) / 255)
        whole = (changed[0].clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0)
        return Image.fromarray(whole.numpy()).convert(picture.mode)


def by_kornia(randaugment: int, erasing: float) -> list[Change]:
    """Changes of kornia: RandAugment (Cubuk et al., 2019), and erasing (Zhong et al., 2017).

    Args:
        randaugment: magnitude of two operations, 1 to 30; 0 for none.
        erasing: probability that a box becomes black; 0 for none.
    """
    if not randaugment and not erasing:
        return []
    kornia: Any = importlib.import_module("kornia.augmentation")
    modules = [kornia.auto.RandAugment(n=2, m=randaugment)] if randaugment else []
    modules += [kornia.RandomErasing(p=erasing)] if erasing else []
    return [ByKornia(module) for module in modules]


@dataclass(frozen=True, slots=True)
class Mix:
    """Make a shard in which each picture is mixed with another one, and its label as well.

    mixup (Zhang et al., 2017) adds up both pictures; CutMix (Yun et al., 2019) puts a box of one
    into the other. With both, each shard has one of them, with a probability of one half.
    """

    classes: int
    mixup: float
    """Both parameters of the beta distribution that the shares are drawn from; 0 for no mixup."""
    cutmix: float
    """The same for CutMix."""

    def __call__(
        self, samples: Sequence[tuple[torch.Tensor, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pictures (n, c, h, w) float32, and shares of classes (n, classes) float32."""
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
    """Put a box of other pictures into pictures; return them, and the share that is left of each.

    Args:
        images: (n, c, h, w).
        others: (n, c, h, w).
        kept: share that would be left if the box reached nowhere beyond the edge.
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
    """Draw a whole number uniformly from 0 to ``limit - 1``."""
    return int(torch.randint(limit, ()).item())


def _resized(picture: Image, size: int, box: tuple[float, float, float, float]) -> Image:
    """Resize a box of a picture to a square."""
    from PIL import Image

    # The gap lets Pillow shrink a large box by whole pixels first: far cheaper, and with 2.0 the
    # result can hardly be told from that of one resize.
    return picture.resize((size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
