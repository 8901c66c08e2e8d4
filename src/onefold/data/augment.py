"""Turns pictures into tensors: augmented for training, cut from the middle for testing.

What is drawn comes from PyTorch's global generator, which a Trainer's loader seeds for each sample:
so it depends neither on the number of workers nor on that of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset

from onefold.data.pictures import Mode, Pictures

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "IMAGENET",
    "CentreCrop",
    "LabelledPictures",
    "Normalise",
    "RandomFlip",
    "RandomResizedCrop",
    "RandomShift",
    "below",
    "between",
    "chain",
]

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of ImageNet's pixels in [0, 1], which published weights expect."""

Change = Callable[["Image"], "Image"]

_TRIES = 10
"""So often a box is drawn before the middle is taken, as large as the aspects allow."""
_ASPECTS = (3 / 4, 4 / 3)
"""Width over height of a random box."""
_MARGIN = 8 / 7
"""How much larger than the crop a test picture is made: 256 for 224."""


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A random box of the picture, resized to a square (Szegedy et al., 2014, "Going deeper")."""

    size: int
    """Pixels of the square's side."""
    least_area: float
    """The smallest share of the picture that a box may have, unless the picture is too long."""

    def __call__(self, picture: Image) -> Image:
        box = self._box(*picture.size)
        return picture.resize((self.size, self.size), _bilinear(), box=box, reducing_gap=2.0)

    def _box(self, width: int, height: int) -> tuple[float, float, float, float]:
        for _ in range(_TRIES):
            area = width * height * between(self.least_area, 1.0)
            aspect = math.exp(between(math.log(_ASPECTS[0]), math.log(_ASPECTS[1])))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                left, top = below(width - w + 1), below(height - h + 1)
                return (left, top, left + w, top + h)
        w, h = min(width, round(height * _ASPECTS[1])), min(height, round(width / _ASPECTS[0]))
        left, top = (width - w) // 2, (height - h) // 2
        return (left, top, left + w, top + h)


@dataclass(frozen=True, slots=True)
class RandomShift:
    """The picture on a square, moved by up to an eighth of its side; what comes in is black."""

    size: int
    """Pixels of the square's side."""

    def __call__(self, picture: Image) -> Image:
        whole = CentreCrop(self.size, margin=1.0)(picture)
        most = self.size // 8
        left, top = below(2 * most + 1) - most, below(2 * most + 1) - most
        return whole.crop((left, top, left + self.size, top + self.size))


@dataclass(frozen=True, slots=True)
class RandomFlip:
    """Left and right change places in every second picture."""

    def __call__(self, picture: Image) -> Image:
        from PIL import Image

        if below(2):
            return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return picture


@dataclass(frozen=True, slots=True)
class CentreCrop:
    """The shorter side resized, and the middle cut out."""

    size: int
    """Pixels of the square's side."""
    margin: float = _MARGIN
    """How many times as long as the square's the shorter side is made."""

    def __call__(self, picture: Image) -> Image:
        (left, right), (top, bottom) = (self._edges(picture, side) for side in picture.size)
        box = (left, top, right, bottom)
        return picture.resize((self.size, self.size), _bilinear(), box=box, reducing_gap=2.0)

    def _edges(self, picture: Image, side: int) -> tuple[float, float]:
        """Where the cut lies along a side; nothing is resized but what it holds."""
        shorter = round(self.size * self.margin)
        resized = max(shorter, round(side * shorter / min(picture.size)))
        start = (resized - self.size) // 2
        return start * side / resized, (start + self.size) * side / resized


@dataclass(frozen=True, slots=True)
class Normalise:
    """Pixels to numbers of mean 0 and standard deviation 1, by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, picture: Image) -> torch.Tensor:
        """(c, h, w) float32."""
        pixels = torch.from_numpy(np.array(picture, dtype=np.uint8))
        channels = pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1)
        mean, std = (
            torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)
            for values in (self.mean, self.std)
        )
        return (channels.to(torch.float32) / 255 - mean) / std


class LabelledPictures(Dataset[tuple[torch.Tensor, int]]):
    """Pictures and their labels, changed anew at every reading.

    Args:
        pictures: the pictures.
        labels: one number for each.
        mode: that they are brought to.
        changes: in turn.
        normalise: at last.
    """

    def __init__(
        self,
        pictures: Pictures,
        labels: Sequence[int],
        mode: Mode,
        changes: Sequence[Change],
        normalise: Normalise,
    ) -> None:
        self.pictures = pictures
        self.labels = labels
        self.mode = mode
        self.changes = changes
        self.normalise = normalise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = self.pictures[index].convert(self.mode)
        return self.normalise(chain(self.changes, picture)), self.labels[index]


def chain(changes: Sequence[Change], picture: Image) -> Image:
    """A picture after all changes."""
    for change in changes:
        picture = change(picture)
    return picture


def between(low: float, high: float) -> float:
    """A number drawn from a range."""
    return low + (high - low) * torch.rand(()).item()


def below(limit: int) -> int:
    """A whole number drawn from those below a limit."""
    return int(torch.randint(limit, ()).item())


def _bilinear() -> int:
    from PIL import Image

    return Image.Resampling.BILINEAR
