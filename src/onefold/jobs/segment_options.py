"""Options of ``onefold train segment``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onefold.jobs.data.masks import MaskRule
from onefold.jobs.options import (
    MOST_FACTOR,
    MOST_SAMPLES,
    MOST_SHARDS,
    MOST_SIDE,
    MOST_STEPS,
    Optimizer,
    TrainOptions,
    expect,
    option,
)

__all__ = ["MOST_WIDTH", "SegmentOptions"]

Encoder = Literal["vgg16", "resnet18", "resnet34", "resnet101"]
Switch = Literal["yes", "no"]
MOST_WIDTH = 4096
"""The most channels of the encoder's first layer."""
Normalisation = Literal["auto", "imagenet", "data", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOptions(TrainOptions):
    """Options of ``onefold train segment``."""

    shards: int = option(
        4, "Parts of every batch: the most devices that may share one.", most=MOST_SHARDS
    )
    batch_size: int = option(8, "Pictures of a batch, over all devices.", most=MOST_SAMPLES)
    epochs: int | None = option(
        None,
        "Times that the training set is read.",
        shown="40, or 20 with --pretrained",
        most=MOST_STEPS,
    )
    lr: float | None = option(
        None, "Learning rate.", shown="0.001, or 0.0002 with --pretrained", most=MOST_FACTOR
    )
    optimizer: Optimizer = option("adamw", "How the parameters are updated.")
    weight_decay: float = option(0.01, "Pull of the parameters towards zero.", most=MOST_FACTOR)
    warmup_epochs: float = option(
        1.0, "Epochs in which the learning rate rises to its full value.", most=MOST_STEPS
    )
    encoder: Encoder | None = option(
        None,
        "The half of the U-Net that looks at the picture.",
        shown="resnet34, or that of the pretrained run",
    )
    width: int | None = option(
        None,
        "Channels of its first layer; published weights need 64.",
        shown="64, or that of the pretrained run",
        most=MOST_WIDTH,
    )
    holdout: float = option(0.1, "Share to test with, where there is no test set.")
    crop: int | None = option(
        None,
        "Side of the squares that are cut out for training.",
        shown="256, or what there is",
        most=MOST_SIDE,
    )
    flip: Switch = option("yes", "Mirror every second picture and its mask.")
    turns: Switch = option("no", "Turn by 0, 90, 180 or 270 degrees: where no side is up.")
    jitter: float = option(0.2, "How much brightness and contrast vary.")
    pos_weight: str = option(
        "1", "Weight of the mask's pixels in the loss; auto: as many times as they are fewer."
    )
    foreground: tuple[str, ...] = option(
        (),
        "Values of the masks' pixels that are foreground, such as 15, 128-255 or '#ff0000'.",
        shown="1, or what is brighter than half",
    )
    void: tuple[str, ...] = option(
        (),
        "Values of the masks' pixels that are left out of loss and scores, such as 255.",
        shown="none",
    )
    threshold: float = option(0.5, "Probability from which a pixel is in the predicted mask.")
    evaluation_batch_size: int = option(8, "Whole pictures of a batch in tests.", most=MOST_SAMPLES)
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
        # Not super(), which fails here: see ClassifyOptions.
        TrainOptions.__post_init__(self)
        expect(0 < self.holdout < 1, "holdout", self.holdout, "more than 0 and less than 1")
        expect(0 < self.threshold < 1, "threshold", self.threshold, "more than 0 and less than 1")
        expect(0 <= self.jitter < 1, "jitter", self.jitter, "0 or more and less than 1")
        # The decoder ends with half as many channels.
        even = self.width is None or (self.width >= 2 and self.width % 2 == 0)
        expect(even, "width", self.width, "an even number above 0")
        crop, many = self.crop, self.evaluation_batch_size
        expect(crop is None or crop >= 32, "crop", crop, "32 or more")
        expect(many >= 1, "evaluation_batch_size", many, "1 or more")
        known = self.pos_weight == "auto" or _is_positive(self.pos_weight)
        expect(
            known,
            "pos_weight",
            self.pos_weight,
            "auto, or a number above 0 and at most a million",
        )
        # Made only because it refuses what it cannot read: now, and not after the data are read.
        MaskRule(self.foreground, self.void)
        if self.pretrained is None:
            expect(not self.pretrained_key, "pretrained_key", "", "with --pretrained")

    @property
    def mask_rule(self) -> MaskRule:
        """Which values of a mask are foreground, background and void."""
        return MaskRule(self.foreground, self.void)


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) <= MOST_FACTOR
    except ValueError:
        return False
