"""The job text: how its runs are used, and the `Job` itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from onefold.errors import DataError
from onefold_jobs.data.files import BadFile
from onefold_jobs.data.labels import spelled
from onefold_jobs.data.tables import Columns, is_table, read_table
from onefold_jobs.data.tsv import decoded, read_lines
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
from onefold_jobs.target_use import (
    description_of,
    labels_of,
    lines_to_score,
    rows_of,
    strange,
    sum_up_targets,
)
from onefold_jobs.text_job import (
    HELP,
    JOB,
    TOKENIZER_FILE,
    TextModel,
    TextOptions,
    answer,
    check_early,
    make_task,
    prepare,
    settle,
)
from onefold_jobs.text_models import EncodedTexts

__all__ = ["TEXT"]


def _read(run: Path, paths: Sequence[Path], columns: Columns) -> tuple[list[Input], list[BadFile]]:
    """Read one text from each line, and the label behind its tab, if it has one.

    Args:
        run: not used, as all runs read texts in one way.
        paths: of the files; a table has a text in each row.
        columns: where they are in a table.
    """
    inputs: list[Input] = []
    bad: list[BadFile] = []
    for path in paths:
        if is_table(path):
            rows, wrong_rows, _ = read_table(path, columns, None)
            inputs += [Input(path, str(path), x.text, x.line_number, str(x.label)) for x in rows]
            bad += wrong_rows
            continue
        if not path.is_file():
            came = "a folder" if path.is_dir() else "nothing there"
            raise DataError(f"{path}: expected a file with one text a line, got {came}")
        for number, content in enumerate(read_lines(path), start=1):
            try:
                line, *labels = decoded(content).split("\t")
                if not line.strip():
                    raise ValueError("expected a text, got none")
                # More columns are something else.
                label = labels[0].strip() if len(labels) == 1 else ""
                inputs.append(Input(path, str(path), line, number, label))
            except ValueError as wrong:
                bad.append(BadFile(path, str(wrong), number))
    return inputs, bad


def _predict(use: Use) -> Predicted:
    """Predict the classes of texts."""
    kind = TextModel.of_run(use.run)
    ids = kind.encode([each.text for each in use.inputs])
    data = EncodedTexts(ids, labels_of(use, kind.classes, kind.target))
    model = kind.build(use.run)
    return rows_of(use, model, answer, data, kind.target, kind.classes, kind.collate)


def _labeled(run: Path, data: Path, facts: RunFacts, options: EvaluateOptions) -> Labeled:
    """Read the texts of a file, or of the one to test with in a folder."""
    path, lines, bad = lines_to_score(run, "text", data, facts, options)
    inputs = []
    for line in lines:
        if facts.known(line.label):
            inputs.append(Input(path, str(path), line.text, line.line_number, line.label))
        else:
            bad.append(strange(path, spelled(line.label), facts, line.line_number))
    return Labeled(path, inputs, bad)


def _load(run: Path) -> LoadedModel:
    kind = TextModel.of_run(run)
    model = kind.build(run)

    def preprocess(texts: Sequence[str]) -> Batch:
        batch = kind.collate([(ids, 0) for ids in kind.encode(texts)])
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    before = {"tokenizer": TOKENIZER_FILE, "max_length": kind.max_length, "pad": kind.pad_id}
    described = description_of(kind.target, kind.classes, before)
    return LoadedModel(model, TextLogits(model), preprocess, described)


class TextLogits(nn.Module):
    """A model of transformers that returns nothing but its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return logits (n, classes) float32 of ids and masks, (n, t) int64 each."""
        logits: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


TEXT = Job(
    name=JOB,
    help=HELP,
    example="reviews",
    options=TextOptions,
    check_early=check_early,
    prepare=prepare,
    settle=settle,
    make_task=make_task,
    use=Usage(
        sample="text",
        read=_read,
        predict=_predict,
        labeled=_labeled,
        score=_predict,
        sum_up=sum_up_targets,
        tested=lambda data: ((data.paths[1].resolve(), line.line_number) for line in data.dev),
        load=_load,
        noise=lambda: ["one text and", "another", "a third"],
        free=(0, 1),
        files=(TOKENIZER_FILE,),
    ),
)
