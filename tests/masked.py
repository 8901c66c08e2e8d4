"""Small pictures in files, with masks or without."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onefold_jobs.runfolder import RunFolder


def save(path: Path, pixels: Any, **how: Any) -> Path:
    """Write (h, w) or (h, w, c) pixels as the path's ending says."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels)).save(path, **how)
    return path


def gray(*shape: int, seed: int = 0) -> Any:
    """Pixels of any brightness, uint8."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def black_and_white(*shape: int, seed: int = 0) -> Any:
    """Pixels of 0 and 255, uint8."""
    return np.where(gray(*shape, seed=seed) > 127, 255, 0).astype(np.uint8)


def save_pairs(folder: Path, sizes: Sequence[tuple[int, int]], first: int = 0) -> None:
    """Noise as ``images/N.png``, and where it is bright as ``masks/N.png``."""
    for number, (height, width) in enumerate(sizes, start=first):
        pixels = gray(height, width, seed=number)
        save(folder / "images" / f"{number}.png", pixels)
        save(folder / "masks" / f"{number}.png", np.where(pixels > 127, 255, 0).astype(np.uint8))


@contextmanager
def on_cpu() -> Iterator[pytest.MonkeyPatch]:
    """A trainer that this process makes takes the CPU, and writes no events."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(RunFolder, "open_events", lambda self, options, step: None)
        yield patch
