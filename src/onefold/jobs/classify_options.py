"""Options of ``onefold train classify``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onefold.jobs.options import (
    MOST_FACTOR,
    MOST_SIDE,
    MOST_STEPS,
    Augment,
    TrainOptions,
    expect,
    option,
)
from onefold.models.catalog import MODELS

__all__ = ["ClassifyOptions", "Flip"]

Flip = Literal["auto", "yes", "no"]
Normalisation = Literal["auto", "imagenet", "data", "none"]
Stem = Literal["auto", "small", "large"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyOptions(TrainOptions):
    """Options of ``onefold train classify``."""

    epochs: int | None = option(
        None,
        "Times that the training set is read.",
        shown="10, or 5 with --pretrained",
        most=MOST_STEPS,
    )
    lr: float | None = option(
        None,
        "Learning rate.",
        shown="0.05 with sgd, else 0.001; a fifth with --pretrained",
        most=MOST_FACTOR,
    )
    model: str | None = option(
        None,
        f"{', '.join(MODELS)}, or timm:NAME where timm is installed.",
        shown="resnet18, or that of the pretrained run",
    )
    cache: str = option("~/.cache/onefold", "Where mnist and fashion-mnist are fetched to.")
    holdout: float = option(0.1, "Share of each class to test with, where there is no test set.")
    image_size: int | None = option(
        None,
        "Side of the square that pictures are brought to, in pixels.",
        shown="by the data",
        most=MOST_SIDE,
    )
    stem: Stem = option(
        "auto", "Beginning of a ResNet: for small pictures (up to 64 pixels) or large ones."
    )
    augment: Augment = option(
        "auto", "shift (moves a little) or crop (random resized crop); auto: by the picture's size."
    )
    least_area: float = option(0.35, "With --augment crop: the smallest share that is cut out.")
    flip: Flip = option("auto", "Mirror every second picture; auto: if they have colours.")
    normalise: Normalisation = option(
        "auto",
        "By the numbers of ImageNet or of the data; auto: as pretrained weights want it.",
    )
    label_smoothing: float = option(0.0, "Share of a label that is spread over all classes.")
    labels_as_is: bool = option(
        False, "Accept every label as a class, even if they look like numbers, lists or typos."
    )
    pretrained: str | None = option(
        None, "Begin with the weights of a file, or of the folder of a run.", shown="none"
    )
    pretrained_key: str | None = option(
        None, "Where the file keeps its weights, such as state_dict.", shown="at the top"
    )
    pretrained_classes: str | None = option(
        None, "File of the pretrained model's class names, one a line.", shown="those of the run"
    )
    reuse_classes: bool = option(
        False, "Begin with the pretrained last layer for the classes that both label sets have."
    )

    def __post_init__(self) -> None:
        # Not super(): dataclass(slots=True) makes the class a second time, and super() without
        # arguments still looks for the first.
        TrainOptions.__post_init__(self)
        expect(0 < self.holdout < 1, "holdout", self.holdout, "more than 0 and less than 1")
        expect(0 < self.least_area <= 1, "least_area", self.least_area, "more than 0, at most 1")
        expect(
            0 <= self.label_smoothing < 1, "label_smoothing", self.label_smoothing, "0 to below 1"
        )
        size = self.image_size
        expect(size is None or size >= 8, "image_size", size, "8 or more")
        known = self.model is None or self.model in MODELS or self.model.startswith("timm:")
        expect(known, "model", self.model, f"{', '.join(MODELS)} or timm:NAME")
        # An option that would do nothing is more likely a mistake than intended.
        if self.pretrained is None:
            wanting = [
                name
                for name in ("pretrained_key", "pretrained_classes", "reuse_classes")
                if getattr(self, name)
            ]
            for name in wanting:
                expect(False, name, "", "with --pretrained")
