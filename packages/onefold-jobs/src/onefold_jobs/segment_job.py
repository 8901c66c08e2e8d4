"""The segment job, for images with one mask each: options, data, model, and the use of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch

from onefold.errors import DataError
from onefold_jobs import finetune, require
from onefold_jobs.data.files import BadFile
from onefold_jobs.data.labels import Label
from onefold_jobs.data.masks import AUTO, MaskClass, MaskRule, list_classes, mask_name
from onefold_jobs.data.pairs import MaskedPictures, Pair, read_pairs, read_pairs_to_test
from onefold_jobs.data.pictures import require_folder
from onefold_jobs.data.scan import Scanning
from onefold_jobs.job import (
    Batch,
    EvaluateOptions,
    Input,
    Job,
    Labeled,
    LoadedModel,
    Predicted,
    RunFacts,
    Use,
)
from onefold_jobs.models.catalog import SMP_PREFIX, build_unet, head_name
from onefold_jobs.models.unet import ENCODERS
from onefold_jobs.named_weights import find_weights, model_named
from onefold_jobs.options import (
    COUNT,
    MOST_FACTOR,
    MOST_SIDE,
    PART,
    SHARE,
    PictureOptions,
    Rate,
    again,
    expect,
    full_rate,
    option,
    read_config,
    within,
)
from onefold_jobs.picture_model import KeptModel, noise, paths_of, statistics_of
from onefold_jobs.progress import reading_bar
from onefold_jobs.runfolder import CONFIG, kept_facts, read_run
from onefold_jobs.scores import Measured
from onefold_jobs.segment_pictures import (
    Augment,
    Padded,
    PicturePairs,
    class_ious,
    class_names,
    class_weights_of,
    loss_and_measure,
    mask_baseline,
    mask_examples,
    mask_scores,
    mask_scores_of_each,
    mask_writer,
)
from onefold_jobs.targets import ClassWeights, compared
from onefold_jobs.training import Task

__all__ = ["SEGMENT", "MaskModel", "SegmentOptions"]

Switch = Literal["yes", "no"]

JOB = "segment"
USUAL_ENCODER = "resnet34"
USUAL_WIDTH = 64
MOST_WIDTH = 4096
"""Maximum number of channels of the encoder's first layer."""
LARGEST_CROP = 256
EVALUATION_BATCH_SIZE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOptions(PictureOptions):
    """Options of ``onefold train segment``."""

    shards: int = again("shards", 4)
    batch_size: int = again("batch_size", 8, help="Global batch size, over all devices.")
    epochs: int | None = again("epochs", shown="40; pretrained: 20")
    lr: Rate = again("lr", shown="0.001")
    warmup_epochs: float = again("warmup_epochs", 1.0)
    class_weights: ClassWeights = option("none", "Class weights.")
    best_by: Literal["iou", "dice", "loss"] | None = again(
        "best_by", help="Best epoch by.", shown="iou"
    )
    encoder: str | None = option(
        None, "Encoder: resnet18/34/101, vgg16, smp:NAME.", shown="resnet34"
    )
    width: int | None = option(
        None, "Channels of the encoder's first layer.", within(2, MOST_WIDTH), shown="64"
    )
    crop: int | None = option(
        None, "Side length of training crops in pixels.", within(32, MOST_SIDE), shown="256"
    )
    flip: Switch = option("yes", "Horizontal flips.")
    turns: Switch = option("no", "Random rotation by 90 degrees.")
    jitter: float = option(0.2, "Change of brightness and contrast.", SHARE)
    pos_weight: str = option("1", "Loss weight of foreground, or auto.")
    foreground: tuple[str, ...] = option((), "Foreground values: 15, 128-255.", shown="1 or bright")
    classes: tuple[str, ...] = option(
        (), "Mask classes: NAME=VALUE, a file, or auto.", shown="none"
    )
    void: tuple[str, ...] = option((), "Mask values to ignore, such as 255.", shown="none")
    threshold: float = option(0.5, "Minimum foreground probability.", PART)
    evaluation_batch_size: int = option(8, "Batch size of tests, in whole images.", COUNT)
    pretrained: str | None = again("pretrained", help="File, run, torchvision: or hf:NAME.")

    def __post_init__(self) -> None:
        # super() fails here: see PictureOptions.
        PictureOptions.__post_init__(self)
        encoders = ", ".join(ENCODERS)
        other = (self.encoder or "").startswith(SMP_PREFIX)
        known = other or self.encoder in (None, *ENCODERS)
        expect(known, "encoder", self.encoder, f"{encoders} or smp:NAME")
        expect(not other or not self.width, "width", self.width, "it without --encoder smp:NAME")
        known = model_named(self.pretrained) in (None, *ENCODERS)
        names = f"torchvision: and one of {encoders}"
        expect(known, "pretrained", self.pretrained, names)
        # The decoder's last layer has half as many channels.
        even = self.width is None or self.width % 2 == 0
        expect(even, "width", self.width, "an even number")
        known = self.pos_weight == "auto" or _is_positive(self.pos_weight)
        weights = "auto, or a number above 0 and at most a million"
        expect(known, "pos_weight", self.pos_weight, weights)
        # Evaluated only for its errors: now, rather than after the data are read.
        if self.classes not in ((), AUTO):
            # The file of class names is read once; the run stores its content.
            object.__setattr__(self, "classes", list_classes(self.classes))
        one = "masks of one foreground; --class-weights auto weighs --classes"
        expect(not self.classes or self.pos_weight == "1", "pos_weight", self.pos_weight, one)
        several = "--classes; --pos-weight auto weighs one foreground"
        weighed = self.class_weights != "none"
        expect(bool(self.classes) or not weighed, "class_weights", self.class_weights, several)
        _ = self.mask_rule

    @property
    def mask_rule(self) -> MaskRule:
        """Rule that maps mask values to foreground, background, classes and void."""
        return MaskRule(self.foreground, self.void, self.classes)


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) <= MOST_FACTOR
    except ValueError:
        return False


def check_early(options: SegmentOptions) -> None:
    """Reject options that cannot work, before the data are read, which may take long.

    Raises:
        LaunchError: Pillow is not installed.
        CheckpointError, DataError: the pretrained weights are missing or damaged.
        ValueError: an option does not suit the model.
    """
    require("reading pictures", "images", "PIL")
    finetune.require_pretrained(options.pretrained, JOB)
    encoder = _encoder(options, MaskModel.before(options))
    if options.freeze or options.freeze_until or encoder.startswith(SMP_PREFIX):
        # Built only for its part names, so with the smallest width.
        fresh = build_unet(encoder, width=2)
        finetune.freeze(fresh, options, head_name(fresh))


def _encoder(options: SegmentOptions, before: MaskModel | None) -> str:
    usual = before.encoder if before else model_named(options.pretrained) or USUAL_ENCODER
    return options.encoder or usual


def prepare(options: SegmentOptions, scanning: Scanning | None = None) -> MaskedPictures:
    """Read the data, and reject data that cannot be used.

    Args:
        options: options of the run.
        scanning: how to scan the files.

    Raises:
        DataError: the data are missing, damaged or unsuitable.
    """
    directory = Path(options.data)
    require_folder(directory, "a folder with images and masks")
    return read_pairs(
        directory,
        holdout=options.holdout,
        seed=options.seed,
        skip_bad=options.skip_bad,
        rule=options.mask_rule,
        scanning=scanning,
        fold=options.fold,
    )


def settle(options: SegmentOptions, data: MaskedPictures) -> SegmentOptions:
    """Fill in options without a value, once the data are known.

    Raises:
        DataError: an option does not suit the data.
    """
    # Call this only for its errors; the devices compute the number themselves.
    _pos_weight(options.pos_weight, data)
    fine = options.pretrained is not None
    before = MaskModel.before(options)
    # The crop is as large as the shortest side allows, rounded down to a multiple of every
    # encoder's stride so that crops rarely need padding.
    crop = min(LARGEST_CROP, max(32, data.shortest // 32 * 32))
    encoder = _encoder(options, before)
    width = options.width or (before.width if before else USUAL_WIDTH)
    return replace(
        options,
        encoder=encoder,
        width=None if encoder.startswith(SMP_PREFIX) else width,
        crop=options.crop or crop,
        epochs=options.epochs or (20 if fine else 40),
        lr=full_rate(options, fine=fine),
        best_by=options.best_by or "iou",
    )


class MaskModel(KeptModel, frozen=True, kw_only=True):
    """Description of a segmentation model, for later use."""

    job = JOB
    fact = "mask_model"
    # Two inputs with the same name would get the same mask file, and are rejected.
    unique = False
    # The pattern matters: other names could make a library download something.
    encoder: Annotated[str, msgspec.Meta(pattern=r"\A(smp:)?[\w.-]+\Z")]
    # The file may come from another user: billions of channels would exhaust memory.
    width: Annotated[int, msgspec.Meta(ge=2, le=MOST_WIDTH)]
    threshold: float
    classes: tuple[MaskClass, ...] = ()
    """Classes of the pixels; empty for foreground and background."""

    def build(self) -> Any:
        """Build the model with freshly initialized weights."""
        return build_unet(self.encoder, width=self.width, out_channels=len(self.classes) or 1)


def make_task(options: SegmentOptions, data: MaskedPictures) -> Task:
    """Build the model, the datasets and the scores of a run. Called on every device.

    Args:
        options: options with all values filled in.
        data: result of `prepare`.

    Raises:
        CheckpointError: the pretrained weights do not fit.
        ValueError: an option does not suit the model.
    """
    # Every device draws the initial weights itself, and all must draw the same ones.
    torch.manual_seed(options.seed)
    kind = _mask_model(options, data)
    model = kind.build()
    if options.pretrained:
        run = finetune.run_of(options.pretrained)
        before = MaskModel.before(options)
        if run and before and len(before.classes) != len(kind.classes):
            finetune.load_body(model, finetune.best_checkpoint(run), head_name(model), key=None)
        elif run:
            finetune.load_finite(model, finetune.best_checkpoint(run))
        else:
            # A classifier's file also contains a last layer, which the encoder lacks.
            file, key = find_weights(options.pretrained), options.pretrained_key
            finetune.load_body(model.encoder, file, "", key=key)
    weight = torch.tensor(_pos_weight(options.pos_weight, data))
    by_class = class_weights_of(data.counts[0]) if options.class_weights == "auto" else None
    loss, measure = loss_and_measure(weight, options.threshold, model.stride, by_class)
    padded = Padded(model.stride)
    augment = Augment(
        side=options.crop or LARGEST_CROP,
        flip=options.flip == "yes",
        turns=options.turns == "yes",
        jitter=options.jitter,
    )
    test_set = PicturePairs(data.test, kind.normalize, data.rule, data.white)
    return Task(
        model=model,
        head=head_name(model),
        loss=loss,
        measure=measure,
        score=partial(mask_scores, classes=kind.classes),
        baseline=mask_baseline(*data.counts, kind.classes, float(weight)),
        class_counts=data.counts,
        class_weights=None if by_class is None else by_class.tolist(),
        train_set=PicturePairs(data.train, kind.normalize, data.rule, data.white, augment),
        test_set=test_set,
        collate=padded,
        evaluation_batch_size=options.evaluation_batch_size,
        examples=partial(
            mask_examples,
            measure=measure,
            test_set=test_set,
            stride=model.stride,
            threshold=kind.threshold,
            classes=kind.classes,
        ),
        facts={
            "purpose": "Image segmentation",
            "model": f"U-Net, {kind.encoder}",
            "classes": class_names(kind.classes),
            "mask_model": msgspec.to_builtins(kind),
            "pos_weight": float(weight),
        },
    )


def _mask_model(options: SegmentOptions, data: MaskedPictures) -> MaskModel:
    before = MaskModel.before(options)
    mean, std = statistics_of(options, before, data.sums, channels=3)
    return MaskModel(
        encoder=options.encoder or USUAL_ENCODER,
        width=options.width or USUAL_WIDTH,
        mean=mean,
        std=std,
        threshold=options.threshold,
        white=data.white,
        classes=data.classes,
    )


def _pos_weight(chosen: str, data: MaskedPictures) -> float:
    if chosen != "auto":
        return float(chosen)
    if data.foreground in (0, data.pixels):
        which = "every" if data.foreground else "no"
        raise DataError(
            f"--pos-weight auto: expected training masks with both kinds of pixels, but {which} "
            f"pixel is foreground"
        )
    return (data.pixels - data.foreground) / data.foreground


_RULE = "foreground", "void"

_PADDED = (
    "zeros after normalization, on the right and below, to a common height and width that are "
    "multiples of side_multiple, and twice it at least"
)


class _Weight(msgspec.Struct):
    """The entries of ``run.json`` that evaluation needs."""

    pos_weight: float = 1.0


def _weight_of(run: Path) -> float:
    return msgspec.convert(read_run(run, shape=_Weight), _Weight).pos_weight


def _predict(use: Use) -> Predicted:
    """Write predicted masks, and return the share of foreground in each."""
    kind, model = MaskModel.built(use.run)
    padded, names = Padded(model.stride), [mask_name(each.name) for each in use.inputs]
    output = use.options.output or Path()
    output.mkdir(parents=True, exist_ok=True)
    draw = mask_writer(output, names, model.stride, kind.threshold, kind.classes)
    data = kind.inputs_of(use, range(len(use.inputs)))
    collate = partial(_numbered, padded=padded)
    found = use.measured(model, draw, data, collate, batch_size=EVALUATION_BATCH_SIZE)
    # Foreground masks report only the second share.
    columns = [f"share {each.name}" for each in kind.classes] or ["share"]
    shares = found["share"][:, 0 if kind.classes else 1 :].tolist()
    return [
        {**each.row, "mask": name, **dict(zip(columns, own, strict=True))}
        for each, name, own in zip(use.inputs, names, shares, strict=True)
    ], found


def _numbered(samples: list[tuple[torch.Tensor, int]], padded: Padded) -> dict[str, torch.Tensor]:
    """Make a shard of images, with the image's number in place of its mask."""
    return padded([(image, torch.full((1, 1), float(number))) for image, number in samples])


def _labeled(run: Path, data: Path, facts: RunFacts, options: EvaluateOptions) -> Labeled:
    """Read images and masks."""
    del options  # tables contain no masks
    require("reading pictures", "images", "PIL")
    require_folder(data, "a folder with images and masks")
    bad: list[BadFile] = []
    with reading_bar() as watch:
        scanning = Scanning(watch=watch, white=MaskModel.of_run(run).white or 0)
        folder, pairs = read_pairs_to_test(data, _mask_rule(run), bad, scanning)
    inputs = [
        Input(pair.image, str(pair.image.relative_to(folder / "images")), mask=pair.mask)
        for pair in pairs
    ]
    return Labeled(folder, inputs, bad)


def _mask_rule(run: Path) -> MaskRule:
    options = read_config(run / CONFIG, JOB)
    kind = MaskModel.of_run(run)
    # Use the run's classes, not those of the options: the masks that they came from may have moved.
    classes = tuple(f"{each.name}={'|'.join(each.values)}" for each in kind.classes)
    with kept_facts(run):
        foreground, void = (
            msgspec.convert(options.get(name, ()), tuple[str, ...]) for name in _RULE
        )
        return MaskRule(foreground, void, classes)


def _score(use: Use) -> Predicted:
    """Compare predicted masks with the given ones. Runs on every device."""
    kind, model = MaskModel.built(use.run)
    _, measure = loss_and_measure(torch.tensor(_weight_of(use.run)), kind.threshold, model.stride)
    pairs = [Pair(each.path, each.mask) for each in use.inputs if each.mask is not None]
    data = PicturePairs(pairs, kind.normalize, _mask_rule(use.run), kind.white)
    size = EVALUATION_BATCH_SIZE
    found = use.measured(model, measure, data, Padded(model.stride), batch_size=size)
    scores = (each.tolist() for each in mask_scores_of_each(found))
    return [
        {**each.row, "iou": iou, "dice": dice}
        for each, iou, dice in zip(use.inputs, *scores, strict=True)
    ], found


def _sum_up(found: Measured, labels: list[Label], facts: RunFacts) -> dict[str, Any]:
    classes = MaskModel.of_run(facts.run).classes
    baseline, counts = None, facts.class_counts
    if counts is not None:
        given = [int(each) for each in found["given"].sum(dim=0, keepdim=True).flatten()]
        test = given if classes else [int(found["counted"].sum()) - given[0], given[0]]
        baseline = mask_baseline(counts[0], test, classes, _weight_of(facts.run))
    by_class = class_ious(found, classes) if classes else []
    summed = {"scores": mask_scores(found, classes), "by_class": by_class}
    return compared(summed, baseline, facts)


def _load(run: Path) -> LoadedModel:
    kind, model = MaskModel.built(run)

    def preprocess(pictures: Sequence[Any]) -> Batch:
        images = kind.tensors_of(pictures)
        mask = torch.zeros(1, 1)
        return {"images": Padded(model.stride)([(image, mask) for image in images])["images"]}

    before = {**kind.preprocessing, "side_multiple": model.stride, "padded": _PADDED}
    facts = {"threshold": kind.threshold, "classes": [each.name for each in kind.classes]}
    return LoadedModel(model, model, preprocess, {**facts, "preprocessing": before})


SEGMENT = Job(
    name=JOB,
    help="Image segmentation with a U-Net.",
    example="cracks",
    options=SegmentOptions,
    check_early=check_early,
    prepare=prepare,
    settle=settle,
    make_task=make_task,
    sample="image",
    read=MaskModel.read,
    predict=_predict,
    labeled=_labeled,
    score=_score,
    sum_up=_sum_up,
    tested=lambda data: paths_of(each.image for each in data.test),
    load=_load,
    noise=noise,
    free=(0, 2, 3),
    draws=True,
)
