"""The job classify: how its runs are used, and the `Job` itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from onefold.errors import DataError
from onefold_jobs import require
from onefold_jobs.classify_job import (
    HELP,
    JOB,
    ClassifyOptions,
    PictureModel,
    answer,
    check_early,
    make_task,
    prepare,
    settle,
)
from onefold_jobs.data.arrays import read_labeled
from onefold_jobs.data.augment import LabeledPictures
from onefold_jobs.data.classes import class_files, listed_files, test_folder
from onefold_jobs.data.files import BadFile, name_below, readable
from onefold_jobs.data.labels import spelled
from onefold_jobs.data.pictures import ArrayPictures, require_folder
from onefold_jobs.data.samples import files_to_test
from onefold_jobs.data.tables import Columns
from onefold_jobs.data.tsv import Line
from onefold_jobs.job import (
    Batch,
    EvaluateOptions,
    Input,
    Job,
    Labeled,
    LoadedModel,
    Predicted,
    RunFacts,
    Usage,
    Use,
)
from onefold_jobs.picture_use import (
    files_of,
    noise,
    numbers_of,
    paths_of,
    read_pictures,
    readable_pictures,
    tensors_of,
)
from onefold_jobs.target_use import (
    description_of,
    labels_of,
    lines_to_score,
    rows_of,
    strange,
    sum_up_targets,
)

__all__ = ["CLASSIFY"]

_RESIZED = (
    "Pillow's resize((center_crop, center_crop), BILINEAR, box, reducing_gap=2.0): antialiased, "
    "rounded to 8 bits; of both sides resized = max(shorter_side, round(side * shorter_side / "
    "shorter of both)), start = (resized - center_crop) // 2, and the box reaches from start * "
    "side / resized to (start + center_crop) * side / resized"
)


def _read(run: Path, paths: Sequence[Path], columns: Columns) -> tuple[list[Input], list[BadFile]]:
    return read_pictures(PictureModel.of_run(run), run, paths, columns)


def _predict(use: Use) -> Predicted:
    """Predict the classes of pictures."""
    kind, model = PictureModel.built(use.run)
    data = LabeledPictures(
        use.arrays or files_of(use, kind),
        labels_of(use, kind.classes, kind.target),
        kind.mode,
        kind.test_changes,
        kind.normalize,
    )
    return rows_of(use, model, answer, data, kind.target, kind.classes)


def _labeled(run: Path, data: Path, facts: RunFacts, options: EvaluateOptions) -> Labeled:
    """Read pictures in class folders or a table, or the IDX files of a test set."""
    require("reading pictures", "images", "PIL")
    if files_to_test(data):
        return _listed(run, facts, *lines_to_score(run, "image", data, facts, options))
    require_folder(data, "a folder of class folders, or a table")
    if any(data.glob("*-images-idx3-ubyte*")):
        return _arrays(data, facts)
    folder = test_folder(data, choosing=False) if (data / "train").is_dir() else data
    bad: list[BadFile] = []
    inputs = []
    unknown: dict[str, BadFile] = {}
    for path, named in class_files(folder, {}, bad, facts.target.task):
        label = spelled(named)
        if facts.known(named):
            inputs.append(Input(path, str(path.relative_to(folder)), label=named))
        else:
            unknown.setdefault(label, strange(folder / label, label, facts))
    bad += unknown.values()
    return Labeled(folder, readable_pictures(PictureModel.of_run(run), inputs, bad), bad)


def _listed(
    run: Path, facts: RunFacts, table: Path, rows: list[Line], bad: list[BadFile]
) -> Labeled:
    found = listed_files(rows, table, bad)
    inputs = []
    for path, label in found:
        if facts.known(label):
            inputs.append(Input(path, name_below(path, table.parent), label=label))
        else:
            bad.append(strange(path, spelled(label), facts))
    return Labeled(table, readable_pictures(PictureModel.of_run(run), inputs, bad), bad)


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
        return {"images": torch.stack(tensors_of(pictures, kind, kind.mode, kind.test_changes))}

    (cut,) = kind.test_changes
    shorter = round(cut.size * cut.margin)
    before = {"mode": kind.mode, "shorter_side": shorter, "center_crop": cut.size}
    how = {**before, **numbers_of(kind), "resized": _RESIZED}
    described = description_of(kind.target, kind.classes, how)
    return LoadedModel(model, model, preprocess, described)


CLASSIFY = Job(
    name=JOB,
    help=HELP,
    example="photos",
    options=ClassifyOptions,
    check_early=check_early,
    prepare=prepare,
    settle=settle,
    make_task=make_task,
    use=Usage(
        sample="image",
        read=_read,
        predict=_predict,
        labeled=_labeled,
        score=_predict,
        sum_up=sum_up_targets,
        tested=lambda data: paths_of(data.test.pictures.paths),
        load=_load,
        noise=noise,
    ),
)
