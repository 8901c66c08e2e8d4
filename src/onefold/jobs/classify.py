"""Pictures with one label each: the options, the data, the model, and what is shown of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.errors import LaunchError
from onefold.jobs.data.arrays import read_digits, read_idx_folder
from onefold.jobs.data.augment import (
    IMAGENET,
    CentreCrop,
    LabelledPictures,
    Normalise,
    RandomFlip,
    RandomResizedCrop,
    RandomShift,
)
from onefold.jobs.data.classes import PictureClasses, Split, read_folders
from onefold.jobs.data.decoding import require_pillow
from onefold.jobs.data.fetch import fetch_dataset
from onefold.jobs.data.pictures import Mode, require_folder
from onefold.jobs.data.scan import Scanning
from onefold.jobs.examples import classifier_examples, save_picture
from onefold.jobs.finetune import (
    best_checkpoint,
    freeze,
    load_body,
    load_finite,
    new_head,
    parameter_groups,
    require_pretrained,
    reuse_rows,
    run_of,
)
from onefold.jobs.models.catalog import MODELS, build_model, head_name, head_of, import_timm
from onefold.jobs.options import (
    MOST_FACTOR,
    MOST_SIDE,
    MOST_STEPS,
    Augment,
    TrainOptions,
    expect,
    option,
    scaled_rate,
    usual_rate,
)
from onefold.jobs.runfolder import RunFolder, kept_as, kept_facts, read_run
from onefold.jobs.training import Task, facts_of
from onefold.system.compat import BatchNorm

__all__ = ["JOB", "ClassifyOptions", "PictureModel", "check_early", "make_task", "prepare"]


JOB = "classify"
FETCHED = ("mnist", "fashion-mnist")
FASHION_CLASSES = (
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot",
)  # fmt: skip
EVALUATION_BATCH_SIZE = 256
USUAL_MODEL = "resnet18"
SMALL = 64
"""Pictures up to this side are shifted rather than cut, and tested as a whole."""
USUAL_SIDE = 224
FIXED_SIDE = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureModel:
    """What must be known of a model to use it on pictures; kept in ``run.json``."""

    name: str
    """The model's name in the catalog, or ``timm:NAME``."""
    classes: tuple[str, ...]
    image_size: int
    mode: Mode
    mean: tuple[float, ...]
    std: tuple[float, ...]
    small_stem: bool | None
    """Whether its first layers are those for small pictures; None if the model has no choice."""
    white: int | None = None
    """The brightest value of pictures with more than 8 bits a pixel; None if there are none."""

    @classmethod
    def of_run(cls, run: Path) -> PictureModel:
        """Read it from the folder of a run.

        Raises:
            DataError: the folder is not that of a run of this job, or its ``run.json`` is damaged.
        """
        facts = read_run(run, JOB)
        with kept_facts(run):
            made = kept_as(cls, facts["picture_model"])
            # Anybody may have written the file: a side of billions of pixels would take all memory.
            expect(8 <= made.image_size <= MOST_SIDE, "image_size", made.image_size, "a side")
            return made

    def build(self, *, small_stem: bool | None = None) -> nn.Module:
        """Build the model with fresh weights."""
        return build_model(
            self.name,
            num_classes=len(self.classes),
            in_channels=1 if self.mode == "L" else 3,
            image_size=self.image_size,
            small_images=self.small_stem if small_stem is None else small_stem,
        )

    @property
    def normalise(self) -> Normalise:
        """How its pictures become numbers."""
        return Normalise(self.mean, self.std)

    @property
    def test_changes(self) -> list[CentreCrop]:
        """How a picture is cut when it is classified rather than trained on."""
        # Large pictures lose their edges, as is usual: 224 out of 256 pixels.
        margin = 1.0 if self.image_size <= SMALL else 8 / 7
        return [CentreCrop(self.image_size, margin)]


def check_early(options: ClassifyOptions) -> None:
    """Refuse what is bound to fail, before the data are read, which may take long.

    Raises:
        LaunchError: a library is missing.
        CheckpointError, DataError: the pretrained weights are missing or damaged.
        ValueError: an option does not suit the model.
    """
    require_pillow()
    require_pretrained(options.pretrained, JOB, options.pretrained_classes)
    run = run_of(options.pretrained)
    model = options.model or (PictureModel.of_run(run).name if run else USUAL_MODEL)
    if model not in MODELS:
        import_timm(model)
    elif options.freeze or options.freeze_until:
        # Only for the names of its parts: the real one needs the data's number of classes.
        fresh = build_model(
            model, num_classes=2, in_channels=3, image_size=options.image_size or FIXED_SIDE
        )
        freeze(fresh, options, head_name(fresh))


def prepare(options: ClassifyOptions, scanning: Scanning | None = None) -> PictureClasses:
    """Read the data, and refuse those that cannot be used.

    Args:
        options: of the run.
        scanning: how to look through files.

    Raises:
        DataError, FileNotFoundError, ValueError: the data are missing, damaged or unsuitable.
        LaunchError: a library is missing.
    """
    require_pillow()
    if options.data == "digits":
        return read_digits(holdout=options.holdout, seed=options.seed)
    directory = Path(options.data)
    # A folder of the user's that happens to be called mnist is taken for what it is.
    if options.data in FETCHED and not directory.is_dir():
        directory = fetch_dataset(options.data, Path(options.cache).expanduser())
    require_folder(directory, f"a folder, or digits, {', '.join(FETCHED)}")
    if any(directory.glob("*-images-idx3-ubyte*")):
        names = FASHION_CLASSES if options.data == "fashion-mnist" else None
        return read_idx_folder(directory, names, labels_as_is=options.labels_as_is)
    return read_folders(
        directory,
        holdout=options.holdout,
        seed=options.seed,
        skip_bad=options.skip_bad,
        labels_as_is=options.labels_as_is,
        scanning=scanning,
    )


def settle(options: ClassifyOptions, data: PictureClasses) -> ClassifyOptions:
    """Fill in the options that were left open, now that the data are known.

    Raises:
        ValueError: an option does not suit the pretrained run.
    """
    run = run_of(options.pretrained)
    before = PictureModel.of_run(run) if run else None
    if before and options.model not in (None, before.name):
        raise ValueError(
            f"--model {options.model}: the run {run} is of {before.name}; leave --model out to "
            f"begin with its weights"
        )
    model = options.model or (before.name if before else USUAL_MODEL)
    # The weights of such a model, in its last layers, fit one size of picture only.
    fixed = before and not (model in MODELS and MODELS[model].any_size)
    if before and fixed and options.image_size not in (None, before.image_size):
        raise ValueError(
            f"--image-size {options.image_size}: the run {run} is of {model}, which has one size, "
            f"{before.image_size}; leave --image-size out"
        )
    size = options.image_size or (before.image_size if before else _side(model, data))
    fine = options.pretrained is not None
    return replace(
        options,
        model=model,
        image_size=size,
        epochs=options.epochs or (5 if fine else 10),
        lr=usual_rate(options, fine=fine) if options.lr is None else options.lr,
        augment=_augment(options.augment, size),
        flip=_flip(options.flip, data.mode),
    )


def _side(model: str, data: PictureClasses) -> int:
    # The median: a few huge pictures, or tiny ones, should not decide for all.
    shorter = [min(size) for size in data.sizes]
    usual = round(median(shorter))
    if model in MODELS and not MODELS[model].any_size:
        # LeNet halves its pictures twice and takes four pixels off in between: 12 is its least.
        fits = len(set(data.sizes)) == 1 and usual % 4 == 0 and 12 <= usual <= SMALL
        return usual if fits else FIXED_SIDE
    return usual if usual <= SMALL else min(usual, USUAL_SIDE)


def _augment(chosen: Augment, size: int) -> Augment:
    if chosen != "auto":
        return chosen
    return "shift" if size <= SMALL else "crop"


def _flip(chosen: Flip, mode: Mode) -> Flip:
    if chosen != "auto":
        return chosen
    # Grey pictures are often of digits and letters, which become others when they are mirrored.
    return "yes" if mode == "RGB" else "no"


def make_task(options: ClassifyOptions, data: PictureClasses) -> Task:
    """Build the model, the data sets and the scores of a run; called on every device.

    Args:
        options: settled ones.
        data: what `prepare` returned.

    Raises:
        CheckpointError: the pretrained weights do not fit.
        LaunchError, ValueError: an option does not suit the model.
    """
    # Every device draws the first weights by itself, and all must draw the same.
    torch.manual_seed(options.seed)
    kind = _picture_model(options, data)
    model, kind = _with_weights(options, kind) if options.pretrained else (kind.build(), kind)
    head = head_name(model)
    frozen = freeze(model, options, head)
    test_set = LabelledPictures(
        data.test.pictures, data.test.labels, kind.mode, kind.test_changes, kind.normalise
    )
    return Task(
        model=model,
        groups=parameter_groups(
            model, rate=scaled_rate(options), head=head, head_scale=options.head_lr_scale
        ),
        loss=_loss_of(options.label_smoothing),
        score=score,
        best="highest accuracy",
        # In training, batch norm raises an error if a channel has a single value, as it may after
        # the last pooling of a single picture.
        least_shard=2 if any(isinstance(part, BatchNorm) for part in model.modules()) else 1,
        train_set=LabelledPictures(
            data.train.pictures,
            data.train.labels,
            kind.mode,
            _train_changes(options, kind.image_size),
            kind.normalise,
        ),
        test_set=test_set,
        examples=lambda trainer, folder: _examples(
            trainer, folder, test_set, data.test, kind.classes, options.workers
        ),
        facts={
            **facts_of(data),
            "classes": list(kind.classes),
            "model": kind.name,
            "picture_model": asdict(kind),
            "frozen": frozen,
        },
        scan=data.scan,
    )


def _loss_of(smoothing: float) -> Callable[[nn.Module, Any], torch.Tensor]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels, reduction="none", label_smoothing=smoothing)

    return loss


def score(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """The loss of every picture of a shard, and whether its class was predicted."""
    images, labels = batch
    logits = model(images)
    return {
        "loss": F.cross_entropy(logits, labels, reduction="none"),
        "accuracy": logits.argmax(dim=1) == labels,
    }


def confidences(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """The probability of every class, (n, classes) float32, for every picture of a shard."""
    images = batch[0]
    return {"confidence": model(images).softmax(dim=1)}


def _picture_model(options: ClassifyOptions, data: PictureClasses) -> PictureModel:
    mode, run = data.mode, run_of(options.pretrained)
    mean, std = data.sums.mean_and_std()
    normalise = options.normalise
    if run:
        # Its first layer has so many channels, whatever these pictures have.
        before = PictureModel.of_run(run)
        mode = before.mode
        if normalise == "auto":
            mean, std = before.mean, before.std
    elif options.pretrained:
        # Published weights are of colour pictures, normalised by the numbers of ImageNet.
        mode = "RGB"
        normalise = "imagenet" if normalise == "auto" else normalise
    if normalise == "imagenet":
        mode, (mean, std) = "RGB", IMAGENET
    elif normalise == "none":
        mean, std = (0.0,), (1.0,)
    channels = 1 if mode == "L" else 3
    size, model = options.image_size or USUAL_SIDE, options.model or USUAL_MODEL
    resnet = model in MODELS and MODELS[model].any_size
    stem = size <= SMALL if options.stem == "auto" else options.stem == "small"
    return PictureModel(
        name=model,
        classes=data.classes,
        image_size=size,
        mode=mode,
        mean=_for_channels(mean, channels),
        std=_for_channels(std, channels),
        small_stem=stem if resnet else None,
        white=data.white,
    )


def _for_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if len(values) == channels:
        return values
    return values * channels if len(values) == 1 else (sum(values) / len(values),)


def _with_weights(options: ClassifyOptions, kind: PictureModel) -> tuple[nn.Module, PictureModel]:
    """Build a model from pretrained weights and a new last layer, with the stem of the weights."""
    run = run_of(options.pretrained)
    weights = best_checkpoint(run) if run else Path(options.pretrained or "")
    stems = [kind.small_stem]
    if kind.small_stem is not None and options.stem == "auto":
        stems.append(not kind.small_stem)
    # The file decides which of the two it is; the one that suits the pictures is tried first.
    kinds = [replace(kind, small_stem=stem) for stem in stems]

    def fresh(each: PictureModel) -> nn.Module:
        # Seeded each time: what is drawn must not depend on how many were tried before.
        torch.manual_seed(options.seed)
        return each.build()

    head = head_name(fresh(kind))
    model = load_body(
        [lambda each=each: fresh(each) for each in kinds],  # type: ignore[misc]
        weights,
        head,
        key=options.pretrained_key,
    )
    if len(kinds) == 2:
        # The small stem begins with a kernel of 3x3, the large one with 7x7.
        first = dict(model.named_parameters())["conv1.weight"]
        kind = kinds[0] if (first.shape[-1] == 3) == kinds[0].small_stem else kinds[1]
    # Again: how many numbers were drawn by now depends on the stems that were tried.
    torch.manual_seed(options.seed)
    new_head(model.get_submodule(head))
    if options.reuse_classes:
        old_classes = _old_classes(options, run)
        old = replace(kind, classes=tuple(old_classes)).build()
        load_finite(old, weights, key=options.pretrained_key)
        reuse_rows(model.get_submodule(head), kind.classes, head_of(old), old_classes)
    return model, kind


def _old_classes(options: ClassifyOptions, run: Path | None) -> list[str]:
    if options.pretrained_classes:
        lines = Path(options.pretrained_classes).read_text(encoding="utf-8").splitlines()
        return [line.strip() for line in lines if line.strip()]
    if run is None:
        raise LaunchError(
            "--reuse-classes: a file of weights does not say its classes: expected "
            "--pretrained-classes with a file of their names, one a line, in order"
        )
    return list(PictureModel.of_run(run).classes)


def _train_changes(options: ClassifyOptions, size: int) -> list[Any]:
    changes: dict[str, list[Any]] = {
        "none": [CentreCrop(size, 1.0)],
        "shift": [RandomShift(size)],
        "crop": [RandomResizedCrop(size, options.least_area)],
    }
    return [*changes[options.augment], *([RandomFlip()] if options.flip == "yes" else [])]


def _examples(
    trainer: onefold.Trainer,
    folder: RunFolder,
    test_set: LabelledPictures,
    test: Split,
    classes: tuple[str, ...],
    workers: int,
) -> dict[str, Any]:
    """Show what the trained model predicts for the test pictures; called on every device."""
    predicted = trainer.predict(
        confidences, test_set, batch_size=EVALUATION_BATCH_SIZE, workers=workers
    )["confidence"]

    def show(number: int) -> dict[str, Any]:
        entry = {"name": test.pictures.name(number)}
        # All devices have the predictions; only the lead writes into the run's folder.
        if trainer.is_lead:
            entry["picture"] = save_picture(test.pictures[number], folder.pictures, number)
        return entry

    return classifier_examples(JOB, predicted, test.labels, classes, show)


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
