"""The classify job: options, data, model, and the use of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import nn

from onefold.cli import listed
from onefold.errors import DataError
from onefold_jobs import finetune, require
from onefold_jobs.data.arrays import read_digits, read_idx_folder, read_labeled
from onefold_jobs.data.augment import (
    CenterCrop,
    LabeledPictures,
    Mix,
    RandomFlip,
    RandomResizedCrop,
    RandomShift,
    by_kornia,
)
from onefold_jobs.data.classes import (
    PictureClasses,
    class_files,
    listed_files,
    read_classes,
)
from onefold_jobs.data.columns import Columns
from onefold_jobs.data.fetch import fetch_dataset
from onefold_jobs.data.files import BadFile, name_below, readable
from onefold_jobs.data.labels import spelled
from onefold_jobs.data.pictures import ArrayPictures, Mode, require_folder
from onefold_jobs.data.samples import files_to_test, read_listed
from onefold_jobs.data.scan import Scanning
from onefold_jobs.data.splits import find_folders
from onefold_jobs.data.tables import is_table
from onefold_jobs.job import (
    Batch,
    EvaluateOptions,
    Input,
    Job,
    Labeled,
    LoadedModel,
    Predicted,
    RunFacts,
    Target,
    Use,
)
from onefold_jobs.models.catalog import (
    FIXED,
    MODELS,
    RESNETS,
    build_model,
    head_name,
    import_library,
)
from onefold_jobs.named_weights import model_named
from onefold_jobs.options import (
    FRACTION,
    MOST_SIDE,
    Augment,
    PictureOptions,
    again,
    expect,
    full_rate,
    option,
    within,
)
from onefold_jobs.picture_model import KeptModel, noise, paths_of, statistics_of
from onefold_jobs.runfolder import RunFolder
from onefold_jobs.targets import (
    LabelOptions,
    best_by_of,
    description_of,
    label_task,
    labels_of,
    lines_to_score,
    rows_of,
    sum_up_targets,
    target_of,
    targets,
)
from onefold_jobs.training import Task

__all__ = ["CLASSIFY", "ClassifyOptions", "PictureModel"]


JOB = "classify"
FETCHED = ("mnist", "fashion-mnist")
FASHION_CLASSES = (
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot",
)  # fmt: skip
USUAL_MODEL = "resnet18"
SMALL = 64
"""Images up to this side length are shifted instead of cropped, and tested uncropped."""
USUAL_SIDE = 224
FIXED_SIDE = 28
CHANNELS: dict[Mode, int] = {"L": 1, "RGB": 3}
"""Number of channels, by image mode."""


MIX = within(0, 1000)
"""Limits of the strength of mixup and CutMix, both parameters of a beta distribution."""
Flip = Literal["auto", "yes", "no"]
Stem = Literal["auto", "small", "large"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyOptions(LabelOptions, PictureOptions):
    """Options of ``onefold train classify``."""

    epochs: int | None = again("epochs", shown="10; pretrained: 5")
    model: str | None = option(None, "Name, such as resnet50, or timm:NAME.", shown="resnet18")
    dev: str | None = option(None, "Test table, if --data is a table.", shown="none")
    image_column: str | None = option(None, "Table column of image paths.", shown="a usual name")
    cache: str = option("~/.cache/onefold", "Folder of downloaded data.")
    image_size: int | None = option(
        None, "Image side in pixels.", within(8, MOST_SIDE), shown="from the data"
    )
    stem: Stem = option("auto", "First ResNet layers.")
    augment: Augment = option("auto", "Crops.")
    least_area: float = option(0.35, "Minimum area of a random crop.", FRACTION)
    flip: Flip = option("auto", "Horizontal flips.")
    randaugment: int = option(0, "RandAugment magnitude, such as 9 (kornia).", within(0, 30))
    erasing: float = option(0.0, "Probability of random erasing (kornia).", within(0, 1))
    mixup: float = option(0.0, "Mixup strength, such as 0.2.", MIX)
    cutmix: float = option(0.0, "CutMix strength, such as 1.", MIX)
    pretrained_classes: str | None = option(None, "File: a class name per line.", shown="the run's")
    reuse_classes: bool = option(False, "Copy last-layer rows of the same classes.")

    def __post_init__(self) -> None:
        # super() fails here: see PictureOptions.
        PictureOptions.__post_init__(self)
        LabelOptions.__post_init__(self)
        known = self.model is None or self.model in MODELS or self.model.startswith("timm:")
        expect(known, "model", self.model, f"{', '.join(MODELS)} or timm:NAME")


class PictureModel(KeptModel, frozen=True, kw_only=True):
    """Description of an image classifier, for later use."""

    job = JOB
    fact = "picture_model"
    name: str
    """Name of the model in the catalog, or ``timm:NAME``."""
    classes: tuple[str, ...]
    # The file may come from another user: a side of billions of pixels would exhaust memory.
    image_size: Annotated[int, msgspec.Meta(ge=8, le=MOST_SIDE)]
    mode: Mode
    small_stem: bool | None
    """Whether the ResNet stem is the one for small images; None for models without a choice."""
    target: Target = Target()

    def build(self) -> nn.Module:
        """Build the model with freshly initialized weights."""
        return build_model(
            self.name,
            num_classes=len(self.classes) or 1,
            in_channels=CHANNELS[self.mode],
            image_size=self.image_size,
            small_images=self.small_stem,
        )

    @property
    def test_changes(self) -> list[CenterCrop]:
        """Image transforms for predictions and tests."""
        # Large images lose their edges, as is usual: 224 of 256 pixels.
        margin = 1.0 if self.image_size <= SMALL else 8 / 7
        return [CenterCrop(self.image_size, margin)]


def check_early(options: ClassifyOptions) -> None:
    """Reject options that cannot work, before the data are read, which may take long.

    Raises:
        LaunchError: a library is not installed.
        CheckpointError, DataError: the pretrained weights are missing or damaged.
        ValueError: an option does not suit the model.
    """
    require("reading pictures", "images", "PIL")
    for name in ("randaugment", "erasing"):
        if getattr(options, name):
            require(f"--{name}", "augment", "kornia")
    finetune.require_pretrained(options.pretrained, JOB, options.pretrained_classes)
    before = PictureModel.before(options)
    model = _model_name(options, before)
    if model not in MODELS:
        import_library("timm", model)
    elif options.freeze or options.freeze_until:
        # Built only for its part names: the real model depends on the number of classes.
        fresh = build_model(
            model, num_classes=2, in_channels=3, image_size=options.image_size or FIXED_SIDE
        )
        finetune.freeze(fresh, options, head_name(fresh))


def _model_name(options: ClassifyOptions, before: PictureModel | None) -> str:
    usual = before.name if before else model_named(options.pretrained) or USUAL_MODEL
    return options.model or usual


def prepare(options: ClassifyOptions, scanning: Scanning | None = None) -> PictureClasses:
    """Read the data, and reject data that cannot be used.

    Args:
        options: options of the run.
        scanning: how to scan the files.

    Raises:
        DataError, FileNotFoundError, ValueError: the data are missing, damaged or unsuitable.
    """
    if options.task != "single-label" and options.data in ("digits", *FETCHED):
        raise ValueError(f"--task {options.task} cannot be used with --data {options.data}")
    if options.data == "digits":
        return read_digits(holdout=options.holdout, seed=options.seed, fold=options.fold)
    directory = Path(options.data)
    # A folder of the user that happens to be called mnist takes precedence over the download.
    if options.data in FETCHED and not directory.is_dir():
        directory = fetch_dataset(options.data, Path(options.cache).expanduser())
    columns = Columns("image", options.image_column, options.label_column)
    tabled = is_table(directory) or (directory.is_file() and options.label_column)
    if not tabled:
        require_folder(directory, f"a folder, a table, or one of digits, {', '.join(FETCHED)}")
    if any(directory.glob("*-images-idx3-ubyte*")):
        names = FASHION_CLASSES if options.data == "fashion-mnist" else None
        how: Any = {"seed": options.seed, "fold": options.fold}
        data = read_idx_folder(directory, names, labels_as_is=options.labels_as_is, **how)
        return replace(data, own_test=options.fold is None)
    task, as_is = options.task, options.labels_as_is
    return read_classes(
        read_listed(directory, options.dev, columns, task, labels_as_is=as_is)
        if tabled
        else directory,
        holdout=options.holdout,
        seed=options.seed,
        skip_bad=options.skip_bad,
        task=task,
        labels_as_is=as_is,
        scanning=scanning,
        fold=options.fold,
    )


def settle(options: ClassifyOptions, data: PictureClasses) -> ClassifyOptions:
    """Fill in options without a value, once the data are known.

    Raises:
        ValueError: an option does not suit the pretrained run.
    """
    before, run = PictureModel.before(options), options.pretrained
    if before and options.model not in (None, before.name):
        raise ValueError(
            f"--model {options.model}: the run {run} has a {before.name}; leave out --model to "
            f"start from its weights"
        )
    model = _model_name(options, before)
    # The last layers of these models fit only one image size.
    if before and model not in RESNETS and options.image_size not in (None, before.image_size):
        raise ValueError(
            f"--image-size {options.image_size}: the run {run} has a {model} with the fixed size "
            f"{before.image_size}; leave out --image-size"
        )
    size = options.image_size or (before.image_size if before else _side(model, data))
    fine = options.pretrained is not None
    usual: dict[str, Any] = {
        "augment": "shift" if size <= SMALL else "crop",
        # Gray images often show digits and letters, whose mirror images are different symbols.
        "flip": "yes" if data.mode == "RGB" else "no",
    }
    return replace(
        options,
        model=model,
        image_size=size,
        epochs=options.epochs or (5 if fine else 10),
        lr=full_rate(options, fine=fine, small=model in FIXED),
        best_by=best_by_of(options),
        **{name: each for name, each in usual.items() if getattr(options, name) == "auto"},
    )


def _shorter(data: PictureClasses) -> int:
    """Return the shorter side of the training images, in pixels."""
    # The median, so that a few huge or tiny images do not decide for all.
    return round(median(min(size) for size in data.sizes))


def _side(model: str, data: PictureClasses) -> int:
    usual = _shorter(data)
    if model in FIXED:
        # LeNet pools twice and loses four pixels in between: 12 is its minimum.
        fits = len(set(data.sizes)) == 1 and usual % 4 == 0 and 12 <= usual <= SMALL
        return usual if fits else FIXED_SIDE
    return usual if usual <= SMALL else min(usual, USUAL_SIDE)


def make_task(options: ClassifyOptions, data: PictureClasses) -> Task:
    """Build the model, the datasets and the scores of a run. Called on every device.

    Args:
        options: options with all values filled in.
        data: result of `prepare`.

    Raises:
        CheckpointError: the pretrained weights do not fit.
        LaunchError, ValueError: an option does not suit the model.
    """
    # Every device draws the initial weights itself, and all must draw the same ones.
    torch.manual_seed(options.seed)
    kind = _picture_model(options, data)
    model, kind = (
        finetune.with_weights(options, kind) if options.pretrained else (kind.build(), kind)
    )
    mix = Mix(len(kind.classes), options.mixup, options.cutmix)
    pictures = partial(LabeledPictures, mode=kind.mode, normalize=kind.normalize)
    changes = _train_changes(options, kind.image_size)
    test_set = pictures(data.test.pictures, targets(data.test.labels), changes=kind.test_changes)
    return label_task(
        "Image",
        kind,
        answer,
        options,
        labels=(data.train.labels, data.test.labels),
        model=model,
        head=head_name(model),
        # In training, batch norm raises an error if a channel has a single value, which is what the
        # last pooling leaves of a single image.
        least_shard=2
        if any(isinstance(part, finetune.BATCH_NORMS) for part in model.modules())
        else 1,
        train_set=pictures(data.train.pictures, targets(data.train.labels), changes=changes),
        test_set=test_set,
        train_collate=mix if options.mixup or options.cutmix else None,
        show=partial(_shown, test_set),
        facts={
            "model": kind.name,
            "picture_model": msgspec.to_builtins(kind),
            "shrunk": kind.image_size < _shorter(data),
        },
    )


def answer(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a shard's images, (n, classes) float32, and its labels."""
    images, labels = batch
    return model(images), labels


def _picture_model(options: ClassifyOptions, data: PictureClasses) -> PictureModel:
    before = PictureModel.before(options)
    # Published weights and ImageNet statistics are for color images. A run's first layer has as
    # many channels as its training images, whatever the new images have.
    colors = options.normalize == "imagenet" or (options.pretrained and not before)
    mode: Mode = "RGB" if colors else (before or data).mode
    mean, std = statistics_of(options, before, data.sums, channels=CHANNELS[mode])
    size, model = options.image_size or USUAL_SIDE, options.model or USUAL_MODEL
    stem = size <= SMALL if options.stem == "auto" else options.stem == "small"
    return PictureModel(
        name=model,
        classes=data.classes,
        image_size=size,
        mode=mode,
        mean=mean,
        std=std,
        small_stem=stem if model in RESNETS else None,
        target=target_of(options.task, data.train.labels),
        white=data.white,
    )


def _train_changes(options: ClassifyOptions, size: int) -> list[Any]:
    changes: dict[str, list[Any]] = {
        "none": [CenterCrop(size, 1.0)],
        "shift": [RandomShift(size)],
        "crop": [RandomResizedCrop(size, options.least_area)],
    }
    flips = [RandomFlip()] if options.flip == "yes" else []
    return [*changes[options.augment], *flips, *by_kornia(options.randaugment, options.erasing)]


def _shown(test_set: LabeledPictures, folder: RunFolder, number: int) -> dict[str, Any]:
    """Write an image for the report, and return its entry."""
    picture = folder.save_picture(test_set.pictures[number], number)
    return {"name": test_set.pictures.name(number), "picture": picture}


_RESIZED = (
    "Pillow's resize((center_crop, center_crop), BILINEAR, box, reducing_gap=2.0): antialiased, "
    "rounded to 8 bits; of both sides resized = max(shorter_side, round(side * shorter_side / "
    "shorter of both)), start = (resized - center_crop) // 2, and the box reaches from start * "
    "side / resized to (start + center_crop) * side / resized"
)


def _predict(use: Use) -> Predicted:
    """Predict the classes of images."""
    kind, model = PictureModel.built(use.run)
    return rows_of(use, kind, model, answer, kind.inputs_of(use, labels_of(use, kind)))


def _labeled(run: Path, data: Path, facts: RunFacts, options: EvaluateOptions) -> Labeled:
    """Read labeled images from class folders, a table, or the IDX files of a test set."""
    require("reading pictures", "images", "PIL")
    bad: list[BadFile] = []
    if files_to_test(data):
        where, rows, bad = lines_to_score(run, "image", data, facts, options)
        root, listing = where.parent, listed_files(rows, where, bad)
        found = [(path, line.label) for path, line in listing]
    else:
        require_folder(data, "a folder of class folders, or a table")
        if any(data.glob("*-images-idx3-ubyte*")):
            return _arrays(data, facts)
        folders = find_folders(data, choosing=False, classes=facts.classes)
        where = folders.require_test() if folders.is_split else folders.train
        root, found = where, class_files(where, {}, bad, facts.target.task)
        expected = f"expected a class of the run ({listed(facts.classes)})"
        unknown = dict.fromkeys(spelled(label) for _, label in found if not facts.known(label))
        bad += [BadFile(where / each, f"{expected}, got {each!r}") for each in unknown]
        found = [(path, label) for path, label in found if facts.known(label)]
    inputs = [Input(path, name_below(path, root), label=label) for path, label in found]
    return Labeled(where, PictureModel.of_run(run).readable(inputs, bad), bad)


def _arrays(data: Path, facts: RunFacts) -> Labeled:
    pixels, labels = read_labeled(data, "t10k")
    if int(labels.max()) >= len(facts.classes):
        raise DataError(
            f"{readable(data)}: expected labels of the run, 0 to {len(facts.classes) - 1}, got "
            f"{int(labels.max())}"
        )
    pictures = ArrayPictures(pixels, "test picture")
    inputs = [
        Input(data, pictures.name(number), label=facts.classes[label])
        for number, label in enumerate(labels.tolist())
    ]
    return Labeled(data, inputs, [], pictures)


def _load(run: Path) -> LoadedModel:
    kind, model = PictureModel.built(run)

    def preprocess(pictures: Sequence[Any]) -> Batch:
        return {"images": torch.stack(kind.tensors_of(pictures))}

    (cut,) = kind.test_changes
    shorter = round(cut.size * cut.margin)
    sides = {"shorter_side": shorter, "center_crop": cut.size, "resized": _RESIZED}
    described = description_of(kind, {**kind.preprocessing, **sides})
    return LoadedModel(model, model, preprocess, described)


CLASSIFY = Job(
    name=JOB,
    help="Image classification: class folders, tables, IDX files or digits.",
    example="photos",
    options=ClassifyOptions,
    check_early=check_early,
    prepare=prepare,
    settle=settle,
    make_task=make_task,
    sample="image",
    read=PictureModel.read,
    predict=_predict,
    labeled=_labeled,
    score=_predict,
    sum_up=sum_up_targets,
    tested=lambda data: paths_of(data.test.pictures.paths),
    load=_load,
    noise=noise,
)
