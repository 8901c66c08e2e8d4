"""Pictures with labels: the options, the data, the model, and how its runs are used."""

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
from onefold_jobs.data.fetch import fetch_dataset
from onefold_jobs.data.files import BadFile, name_below, readable
from onefold_jobs.data.labels import spelled
from onefold_jobs.data.pictures import ArrayPictures, Mode, require_folder
from onefold_jobs.data.samples import files_to_test, read_listed
from onefold_jobs.data.scan import Scanning
from onefold_jobs.data.splits import find_folders
from onefold_jobs.data.tables import Columns, is_table
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
"""Pictures up to this side are shifted rather than cut, and tested as a whole."""
USUAL_SIDE = 224
FIXED_SIDE = 28
CHANNELS: dict[Mode, int] = {"L": 1, "RGB": 3}
"""Channels of a picture, by its mode."""


MIX = within(0, 1000)
"""Of the strength of mixup and CutMix: both parameters of a beta distribution."""
Flip = Literal["auto", "yes", "no"]
Stem = Literal["auto", "small", "large"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyOptions(LabelOptions, PictureOptions):
    """Options of ``onefold train classify``."""

    epochs: int | None = again("epochs", shown="10, or 5 with --pretrained")
    lr: float | None = again(
        "lr", shown="0.001 (lenet, mnist-cnn: 0.003), or 0.05 with sgd; a fifth with --pretrained"
    )
    model: str | None = option(
        None,
        f"{', '.join(MODELS)}, or timm:NAME where timm is installed.",
        shown="resnet18, or that of the pretrained run",
    )
    dev: str | None = option(
        None, "Table to test with, if --data is one.", shown="a share of the pictures"
    )
    image_column: str | None = option(
        None, "Column with the paths of the pictures in a table.", shown="the one of a usual name"
    )
    cache: str = option("~/.cache/onefold", "Where mnist and fashion-mnist are fetched to.")
    image_size: int | None = option(
        None,
        "Side of the square that pictures are brought to, in pixels.",
        within(8, MOST_SIDE),
        shown="the median shorter side, at most 224; lenet, mnist-cnn: mostly 28",
    )
    stem: Stem = option(
        "auto", "Beginning of a ResNet: for small pictures (up to 64 pixels) or large ones."
    )
    augment: Augment = option(
        "auto", "shift (moves a little) or crop (random resized crop); auto: by the picture's size."
    )
    least_area: float = option(
        0.35, "With --augment crop: the smallest share that is cut out.", FRACTION
    )
    flip: Flip = option("auto", "Mirror every second picture; auto: if they have colors.")
    randaugment: int = option(
        0, "Magnitude of two random operations (RandAugment), such as 9; by kornia.", within(0, 30)
    )
    erasing: float = option(
        0.0, "Probability that a random box of a picture becomes black; by kornia.", within(0, 1)
    )
    mixup: float = option(
        0.0, "Mix each picture and label with another of its shard; usual are 0.2 to 1.", MIX
    )
    cutmix: float = option(
        0.0, "Put a box of another picture of its shard into each; usual is 1.", MIX
    )
    pretrained_classes: str | None = option(
        None, "File of the pretrained model's class names, one a line.", shown="those of the run"
    )
    reuse_classes: bool = option(
        False, "Begin with the pretrained last layer for the classes that both label sets have."
    )

    def __post_init__(self) -> None:
        # Not super(), which fails here: see PictureOptions.
        PictureOptions.__post_init__(self)
        LabelOptions.__post_init__(self)
        known = self.model is None or self.model in MODELS or self.model.startswith("timm:")
        expect(known, "model", self.model, f"{', '.join(MODELS)} or timm:NAME")


class PictureModel(KeptModel, frozen=True, kw_only=True):
    """What must be known of a model to classify pictures with it."""

    job = JOB
    fact = "picture_model"
    name: str
    """The model's name in the catalog, or ``timm:NAME``."""
    classes: tuple[str, ...]
    # Anybody may have written the file: a side of billions of pixels would take all memory.
    image_size: Annotated[int, msgspec.Meta(ge=8, le=MOST_SIDE)]
    mode: Mode
    small_stem: bool | None
    """Whether its first layers are those for small pictures; None if the model has no choice."""
    target: Target = Target()

    def build(self) -> nn.Module:
        """Build the model with fresh weights."""
        return build_model(
            self.name,
            num_classes=len(self.classes) or 1,
            in_channels=CHANNELS[self.mode],
            image_size=self.image_size,
            small_images=self.small_stem,
        )

    @property
    def test_changes(self) -> list[CenterCrop]:
        """How a picture is cut when it is classified rather than trained on."""
        # Large pictures lose their edges, as is usual: 224 out of 256 pixels.
        margin = 1.0 if self.image_size <= SMALL else 8 / 7
        return [CenterCrop(self.image_size, margin)]


def check_early(options: ClassifyOptions) -> None:
    """Refuse what is bound to fail, before the data are read, which may take long.

    Raises:
        LaunchError: a library is missing.
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
        # Only for the names of its parts: the real one needs the data's number of classes.
        fresh = build_model(
            model, num_classes=2, in_channels=3, image_size=options.image_size or FIXED_SIDE
        )
        finetune.freeze(fresh, options, head_name(fresh))


def _model_name(options: ClassifyOptions, before: PictureModel | None) -> str:
    usual = before.name if before else model_named(options.pretrained) or USUAL_MODEL
    return options.model or usual


def prepare(options: ClassifyOptions, scanning: Scanning | None = None) -> PictureClasses:
    """Read the data, and refuse those that cannot be used.

    Args:
        options: of the run.
        scanning: how to look through files.

    Raises:
        DataError, FileNotFoundError, ValueError: the data are missing, damaged or unsuitable.
    """
    if options.task != "single-label" and options.data in ("digits", *FETCHED):
        raise ValueError(f"--task {options.task}: expected other data than {options.data}")
    if options.data == "digits":
        return read_digits(holdout=options.holdout, seed=options.seed)
    directory = Path(options.data)
    # A folder of the user's that happens to be called mnist is taken for what it is.
    if options.data in FETCHED and not directory.is_dir():
        directory = fetch_dataset(options.data, Path(options.cache).expanduser())
    columns = Columns("image", options.image_column, options.label_column)
    tabled = is_table(directory) or (directory.is_file() and options.label_column)
    if not tabled:
        require_folder(directory, f"a folder, a table, or digits, {', '.join(FETCHED)}")
    if any(directory.glob("*-images-idx3-ubyte*")):
        names = FASHION_CLASSES if options.data == "fashion-mnist" else None
        data = read_idx_folder(directory, names, labels_as_is=options.labels_as_is)
        return replace(data, own_test=True)
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
    )


def settle(options: ClassifyOptions, data: PictureClasses) -> ClassifyOptions:
    """Fill in the options that were left open, now that the data are known.

    Raises:
        ValueError: an option does not suit the pretrained run.
    """
    before, run = PictureModel.before(options), options.pretrained
    if before and options.model not in (None, before.name):
        raise ValueError(
            f"--model {options.model}: the run {run} is of {before.name}; leave --model out to "
            f"begin with its weights"
        )
    model = _model_name(options, before)
    # The weights of such a model, in its last layers, fit one size of picture only.
    if before and model not in RESNETS and options.image_size not in (None, before.image_size):
        raise ValueError(
            f"--image-size {options.image_size}: the run {run} is of {model}, which has one size, "
            f"{before.image_size}; leave --image-size out"
        )
    size = options.image_size or (before.image_size if before else _side(model, data))
    fine = options.pretrained is not None
    usual: dict[str, Any] = {
        "augment": "shift" if size <= SMALL else "crop",
        # Gray pictures are often of digits and letters, which become others when mirrored.
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
    """The shorter side of the training pictures, in pixels."""
    # The median: a few huge pictures, or tiny ones, should not decide for all.
    return round(median(min(size) for size in data.sizes))


def _side(model: str, data: PictureClasses) -> int:
    usual = _shorter(data)
    if model in FIXED:
        # LeNet halves its pictures twice and takes four pixels off in between: 12 is its least.
        fits = len(set(data.sizes)) == 1 and usual % 4 == 0 and 12 <= usual <= SMALL
        return usual if fits else FIXED_SIDE
    return usual if usual <= SMALL else min(usual, USUAL_SIDE)


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
        # In training, batch norm raises an error if a channel has a single value, as it may after
        # the last pooling of a single picture.
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
    """The logits of every picture of a shard, (n, classes) float32, and its labels."""
    images, labels = batch
    return model(images), labels


def _picture_model(options: ClassifyOptions, data: PictureClasses) -> PictureModel:
    before = PictureModel.before(options)
    # Published weights are of color pictures, and so are the numbers of ImageNet. The first layer
    # of a run has so many channels as its pictures had, whatever these have.
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
    """What a report shows of a picture, which is written for it."""
    picture = folder.save_picture(test_set.pictures[number], number)
    return {"name": test_set.pictures.name(number), "picture": picture}


_RESIZED = (
    "Pillow's resize((center_crop, center_crop), BILINEAR, box, reducing_gap=2.0): antialiased, "
    "rounded to 8 bits; of both sides resized = max(shorter_side, round(side * shorter_side / "
    "shorter of both)), start = (resized - center_crop) // 2, and the box reaches from start * "
    "side / resized to (start + center_crop) * side / resized"
)


def _predict(use: Use) -> Predicted:
    """Predict the classes of pictures."""
    kind, model = PictureModel.built(use.run)
    return rows_of(use, kind, model, answer, kind.inputs_of(use, labels_of(use, kind)))


def _labeled(run: Path, data: Path, facts: RunFacts, options: EvaluateOptions) -> Labeled:
    """Read pictures in class folders or a table, or the IDX files of a test set."""
    require("reading pictures", "images", "PIL")
    bad: list[BadFile] = []
    if files_to_test(data):
        where, rows, bad = lines_to_score(run, "image", data, facts, options)
        root, found = where.parent, listed_files(rows, where, bad)
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
    help="Pictures with one label each: from class folders, IDX files or digits.",
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
