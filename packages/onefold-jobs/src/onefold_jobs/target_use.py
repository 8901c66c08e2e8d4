"""Predicts and scores with runs whose samples have classes, labels or a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import nn

from onefold_jobs.data.files import BadFile
from onefold_jobs.data.labels import Label, numbered, spelled
from onefold_jobs.data.samples import read_to_score
from onefold_jobs.data.tables import Line
from onefold_jobs.job import EvaluateOptions, Predicted, RunFacts, Use, columns_of
from onefold_jobs.scores import Baseline, Measured, no_better
from onefold_jobs.targets import (
    Answer,
    Labels,
    baseline_of,
    class_scores,
    label_table,
    scores_of,
    target_measure,
    target_rows,
    targets,
)
from onefold_jobs.words import listed

__all__ = [
    "compared",
    "description_of",
    "labels_of",
    "lines_to_score",
    "rows_of",
    "strange",
    "sum_up_targets",
]


def rows_of(
    use: Use,
    kind: Labels,
    model: nn.Module,
    answer: Answer,
    data: Any,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Predicted:
    """Report the number of each sample, or its classes: all that it has, or the surest."""
    found = use.measured(model, target_measure(answer, kind.target), data, collate)
    rows = target_rows(found, kind.target, kind.classes, use.options.top)
    labeled = any(each.label != "" for each in use.inputs)
    return [
        {**each.row, **({"label": spelled(each.label)} if labeled else {}), **own}
        for each, own in zip(use.inputs, rows, strict=True)
    ], found


def labels_of(use: Use, kind: Labels) -> Any:
    """The number of each input's class; 0 where it is not known, so that its loss is void."""
    classes = kind.classes
    if kind.target.task != "single-label":
        nothing = torch.zeros(len(use.inputs), len(classes))
        if not use.scored:
            return nothing if classes else nothing.sum(dim=1)
        return targets(numbered([each.label for each in use.inputs], classes))
    numbers = {name: number for number, name in enumerate(classes)}
    return [numbers.get(spelled(each.label), 0) for each in use.inputs]


def sum_up_targets(found: Measured, labels: list[Label], facts: RunFacts) -> dict[str, Any]:
    """Score one class for each sample, several, or a number; and the baseline if there is one."""
    target, classes = facts.target, facts.classes
    truth = np.array(numbered(labels, classes))
    summed: dict[str, Any] = {"scores": scores_of(found, truth, target, len(classes))}
    if target.task == "multi-label":
        summed["by_class"] = label_table(truth, found["confidence"].numpy(), classes)
    elif target.task == "single-label":
        scores = class_scores(found, truth, len(classes))
        summed["by_class"] = [*scores.rows(classes)]
        summed["confusion"] = scores.counts.tolist()
    baseline = baseline_of(target, facts.class_counts, facts.train_samples, truth, classes)
    return compared(summed, baseline, facts)


def compared(summed: dict[str, Any], baseline: Baseline | None, facts: RunFacts) -> dict[str, Any]:
    """Add the baseline, and whether the score of the run is no better."""
    name = facts.score.partition(" ")[2]
    if baseline is None or name not in summed["scores"]:
        return {**summed, "baseline": baseline}
    warning = no_better(facts.score, summed["scores"][name], baseline)
    return {**summed, "baseline": baseline, "warning": warning}


def strange(path: Path, label: str, facts: RunFacts, line: int | None = None) -> BadFile:
    """What is reported of a label that the run does not know."""
    expected = f"expected a class of the run ({listed(facts.classes)})"
    return BadFile(path, f"{expected}, got {label!r}", line)


def lines_to_score(
    run: Path, kind: Literal["image", "text"], data: Path, facts: RunFacts, options: EvaluateOptions
) -> tuple[Path, list[Line], list[BadFile]]:
    """Read a table, or the file to test with in a folder; divide labels as in training."""
    columns = columns_of(run, kind, options)
    columns = columns._replace(label=options.label_column or columns.label)
    path, lines, bad = read_to_score(
        data, columns, facts.target.task, lambda x: facts.known(*facts.divided([x]))
    )
    labels = facts.divided([line.label for line in lines])
    return path, [replace(line, label=x) for line, x in zip(lines, labels, strict=True)], bad


def description_of(kind: Labels, preprocessing: dict[str, Any]) -> dict[str, Any]:
    """Describe a model for programs without onefold."""
    facts = {
        "target": msgspec.to_builtins(kind.target),
        "classes": list(kind.classes),
        "preprocessing": preprocessing,
    }
    number = kind.target.task == "regression"
    return {**facts, "value": "logits * target.std + target.mean"} if number else facts
