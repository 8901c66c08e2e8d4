"""The text job, for labeled texts: options, data, model, and the use of its runs.

A run stores its tokenizer and the configuration of its model, so that it can be used without the
folder of the pretrained model that it may have started from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from onefold.cli import counted
from onefold.errors import CheckpointError, DataError
from onefold_jobs import require, text_models
from onefold_jobs.data.columns import Columns
from onefold_jobs.data.files import BadFile, read_whole, readable, refuse
from onefold_jobs.data.labels import Sample, check_same, check_task, numbered, parts_of, untested
from onefold_jobs.data.samples import TextSplits, read_listed, read_splits
from onefold_jobs.data.scan import Scanning
from onefold_jobs.data.tables import Line, decoded, is_table, read_lines, read_table
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
from onefold_jobs.named_weights import find_weights
from onefold_jobs.options import SHARE, Rate, TrainOptions, again, expect, option, within
from onefold_jobs.runfolder import kept_facts, read_run
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
from onefold_jobs.text_models import EncodedTexts
from onefold_jobs.training import Task

__all__ = ["TEXT", "TextModel", "TextOptions"]

JOB = "text"
TINY = "tiny"
CONFIG_FILE = "model_config.json"
TOKENIZER_FILE = "tokenizer.json"
SHOWN_CHARACTERS = 400
PADDED = 32
"""Compiled models pad texts to a multiple of this number of tokens."""
_MOST_FILE_BYTES = 1 << 28
"""Maximum size of a model file that is read, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions(LabelOptions, TrainOptions):
    """Options of ``onefold train text``."""

    lr: Rate = again("lr", shown="0.0005")
    epochs: int | None = again("epochs", shown="10; pretrained: 3")
    clip_norm: float | None = again("clip_norm", 1.0, shown=None)
    dev: str | None = option(None, "Test file.", shown="dev, or a fraction of the texts")
    text_column: str | None = option(None, "Text column(s): title,body.", shown="a usual name")
    model: str = option(TINY, "Model: tiny, or the folder of one.")
    pretrained: str | None = option(None, "Weights: hf:ORG/NAME, or a model folder.", shown="none")
    # At least 256 bytes and 5 special tokens.
    vocabulary: int = option(4000, "Vocabulary size of the tokenizer.", within(261, 10**7))
    width: int = option(128, "Embedding size of the tiny model.", within(1, 1 << 16))
    layers: int = option(2, "Layers of the tiny model.", within(1, 1000))
    heads: int = option(4, "Attention heads per layer (tiny model).", within(1, 1 << 16))
    dropout: float = option(0.2, "Dropout of the tiny model.", SHARE)
    # Every text has two special tokens.
    max_length: int = option(128, "Maximum length of a text, in tokens.", within(3, 1 << 20))
    token_dropout: float = option(0.15, "Fraction of tokens to mask in training.", SHARE)

    def __post_init__(self) -> None:
        # super() fails here: see PictureOptions.
        TrainOptions.__post_init__(self)
        once = self.pretrained is None or self.model == TINY
        expect(once, "pretrained", self.pretrained, "it without --model, which does the same")
        LabelOptions.__post_init__(self)
        expect(self.width % self.heads == 0, "width", self.width, f"a multiple of {self.heads}")


def _begins_with(options: TextOptions) -> str | None:
    """Return the pretrained model to start from; None for training from scratch."""
    return options.pretrained or (None if options.model == TINY else options.model)


def check_early(options: TextOptions) -> None:
    """Reject options that cannot work, before the data are read.

    Raises:
        LaunchError: a library is not installed.
        CheckpointError: the folder of the pretrained model does not exist.
    """
    require("the text job", "text", "tokenizers", "transformers")
    begins_with = _begins_with(options)
    if begins_with and not find_weights(begins_with, whole=True).is_dir():
        name, first = ("pretrained", "hf:ORG/NAME") if options.pretrained else ("model", TINY)
        raise CheckpointError(
            f"--{name} {begins_with}: expected {first}, or a folder with a pretrained model, but "
            f"there is no such folder"
        )


def prepare(options: TextOptions, scanning: Scanning | None = None) -> TextSplits:
    """Read the data, and reject data that cannot be used.

    Args:
        options: options of the run.
        scanning: not used, because reading texts takes no time.

    Raises:
        DataError: the data are missing, damaged or unsuitable.
    """
    path = Path(options.data)
    columns = Columns("text", options.text_column, options.label_column)
    samples = read_listed(
        path, options.dev, columns, options.task, labels_as_is=options.labels_as_is
    )
    # Check this before reporting bad lines: labels of the wrong kind may explain most of them.
    labels = [line.label for line in samples.train]
    where, as_is = readable(samples.paths[0]), options.labels_as_is
    notes = check_task(labels, options.task, where, labels_as_is=as_is)
    how: Any = {"holdout": options.holdout, "seed": options.seed}
    splits = read_splits(samples, **how, fold=options.fold)
    if not options.skip_bad:
        refuse(splits.left_out, [*splits.train, *splits.dev])
    tested = {name for line in splits.dev for name in parts_of(line.label)}
    notes += untested(splits.classes, tested, readable(splits.paths[1]))
    # A text in both sets would make the score too good.
    both = [
        [Sample(f"line {x.line_number} of {file}", x.label, x.text) for x in lines]
        for file, lines in zip(splits.paths, (splits.train, splits.dev), strict=True)
    ]
    notes += check_same(both, readable(path))
    return replace(splits, notes=[*splits.notes, *notes])


def settle(options: TextOptions, data: TextSplits) -> TextOptions:
    """Fill in options without a value, once the data are known."""
    fine = _begins_with(options) is not None
    return replace(
        options,
        epochs=options.epochs or (3 if fine else 10),
        lr=options.lr if options.lr is not None else (3e-5 if fine else 5e-4),
        best_by=best_by_of(options),
    )


class TextModel(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a text classifier; stored in the run's folder."""

    tokenizer: str
    """Tokenizer in JSON."""
    max_length: int
    pad_id: int
    classes: tuple[str, ...]
    target: Target = Target()

    @classmethod
    def of_run(cls, run: Path) -> TextModel:
        """Read the description from the folder of a run.

        Raises:
            DataError: the folder does not contain a run of this job, or a file in it is damaged.
            LaunchError: a library is not installed.
        """
        require("the text job", "text", "tokenizers", "transformers")
        facts = read_run(run, JOB)
        with kept_facts(run):
            tokenizer = _read_file(run / TOKENIZER_FILE)
            shared = {name: facts[name] for name in ("target", "classes")}
            kept = {**facts["text_model"], **shared, "tokenizer": tokenizer}
            made = msgspec.convert(kept, cls)
            # Tried here, or a damaged tokenizer would only fail on the devices.
            made.encode(["text"])
            return made

    def build(self, run: Path) -> nn.Module:
        """Build the run's model with freshly initialized weights.

        Raises:
            CheckpointError: the configuration is damaged.
            DataError: the configuration does not match ``run.json``.
        """
        try:
            model = text_models.build_from_config(_read_file(run / CONFIG_FILE))
        except (CheckpointError, ValueError) as error:
            raise CheckpointError(f"{run / CONFIG_FILE}: {error}") from error
        config: Any = model.config
        if (
            config.num_labels != (len(self.classes) or 1)
            or not 0 <= self.pad_id < config.vocab_size
        ):
            raise DataError(
                f"{run}: {CONFIG_FILE} and run.json describe different models: "
                f"{config.num_labels} classes of {config.vocab_size} tokens, and "
                f"{len(self.classes)} with padding by token {self.pad_id}"
            )
        return model

    def encode(self, texts: Sequence[str]) -> list[torch.Tensor]:
        """Return the token ids of each text, (t,) int64."""
        return text_models.encode_texts(texts, self.tokenizer, max_length=self.max_length)

    @property
    def collate(self) -> Any:
        """Function that makes a shard of texts."""
        return partial(text_models.pad_shard, pad_id=self.pad_id)


def make_task(options: TextOptions, data: TextSplits) -> Task:
    """Build the model, the datasets and the scores of a run. Called on every device.

    Args:
        options: options with all values filled in.
        data: result of `prepare`.

    Raises:
        CheckpointError: the pretrained model cannot be used.
        LaunchError, ValueError: a library is not installed, or an option does not suit the model.
    """
    # Every device draws the initial weights itself, and all must draw the same ones.
    torch.manual_seed(options.seed)
    model, kind = _build(options, data)
    train_labels, dev_labels = (
        numbered([line.label for line in lines], kind.classes) for lines in (data.train, data.dev)
    )
    mask_id, special_ids = text_models.token_roles(kind.tokenizer)
    train_set = text_models.EncodedTexts(
        kind.encode([line.text for line in data.train]),
        targets(train_labels),
        token_dropout=options.token_dropout,
        mask_id=mask_id,
        special_ids=special_ids,
    )
    dev_ids = kind.encode([line.text for line in data.dev])
    dev_set = text_models.EncodedTexts(dev_ids, targets(dev_labels))
    long = sum(len(ids) == kind.max_length for ids in (*train_set.ids, *dev_ids))
    cut = (
        f"{counted(long, 'text')} of {len(train_set) + len(dev_set):,} fill {kind.max_length} "
        f"tokens and may be truncated: increase --max-length to keep more"
    )
    config: Any = model.config
    return label_task(
        "Text",
        kind,
        answer,
        options,
        labels=(train_labels, dev_labels),
        model=model,
        head=text_models.head_parts(model),
        train_set=train_set,
        test_set=dev_set,
        collate=kind.collate,
        # Each padded length is compiled separately, so there must be few of them.
        train_collate=partial(kind.collate, multiple=PADDED, longest=kind.max_length)
        if options.compile
        else None,
        # Grouping texts by length keeps padding small.
        lengths=train_set.lengths.tolist(),
        show=lambda _, number: _shown(data.dev[number]),
        facts={
            "model": _begins_with(options) or TINY,
            "text_model": {"max_length": kind.max_length, "pad_id": kind.pad_id},
        },
        notes=[cut] if long else [],
        # use_diff=False also writes defaults, which may differ in a later version of transformers.
        files={TOKENIZER_FILE: kind.tokenizer, CONFIG_FILE: config.to_json_string(use_diff=False)},
    )


def _read_file(path: Path) -> str:
    return read_whole(path, _MOST_FILE_BYTES).decode()


def answer(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a shard's texts, (n, classes) float32, and its labels."""
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return output.logits, batch["labels"]


def _build(options: TextOptions, data: TextSplits) -> tuple[nn.Module, TextModel]:
    """Build the model, pretrained or from scratch, and its tokenizer."""
    begins_with = _begins_with(options)
    if begins_with is None:
        # Each device trains its own, with identical results: see the note in text_models.
        texts = [line.text for line in data.train]
        tokenizer = text_models.train_tokenizer(texts, options.vocabulary)
        model = text_models.build_classifier(
            options.vocabulary,
            len(data.classes) or 1,
            width=options.width,
            layers=options.layers,
            heads=options.heads,
            max_length=options.max_length,
            dropout=options.dropout,
        )
    else:
        model, tokenizer = text_models.load_pretrained(
            find_weights(begins_with, whole=True), len(data.classes) or 1
        )
    config: Any = model.config
    return model, TextModel(
        tokenizer=tokenizer,
        max_length=min(options.max_length, text_models.most_tokens(model) or options.max_length),
        pad_id=text_models.PAD_ID if config.pad_token_id is None else config.pad_token_id,
        classes=tuple(data.classes),
        target=target_of(options.task, [line.label for line in data.train]),
    )


def _shown(line: Line) -> dict[str, Any]:
    """Return a report's entries of a text."""
    return {"name": f"line {line.line_number}", "text": line.text[:SHOWN_CHARACTERS]}


def _read(run: Path, paths: Sequence[Path], columns: Columns) -> tuple[list[Input], list[BadFile]]:
    """Read one text per line, and the label after its tab if there is one.

    Args:
        run: not used, because all runs read texts the same way.
        paths: paths of the files; a table has one text per row.
        columns: columns of a table.
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
            came = "a folder" if path.is_dir() else "nothing"
            raise DataError(f"{path}: expected a file with one text per line, got {came}")
        for number, content in enumerate(read_lines(path), start=1):
            try:
                line, *labels = decoded(content, path).split("\t")
                if not line.strip():
                    raise ValueError("expected a text, but the line has none")
                # With more columns, the second one is not a label.
                label = labels[0].strip() if len(labels) == 1 else ""
                inputs.append(Input(path, str(path), line, number, label))
            except ValueError as wrong:
                bad.append(BadFile(path, str(wrong), number))
    return inputs, bad


def _predict(use: Use) -> Predicted:
    """Predict the classes of texts."""
    kind = TextModel.of_run(use.run)
    ids = kind.encode([each.text for each in use.inputs])
    data = EncodedTexts(ids, labels_of(use, kind))
    model = kind.build(use.run)
    return rows_of(use, kind, model, answer, data, kind.collate)


def _labeled(run: Path, data: Path, facts: RunFacts, options: EvaluateOptions) -> Labeled:
    """Read the texts of a file, or of the test file in a folder."""
    path, lines, bad = lines_to_score(run, "text", data, facts, options)
    inputs = [Input(path, str(path), x.text, x.line_number, x.label) for x in lines]
    return Labeled(path, inputs, bad)


def _load(run: Path) -> LoadedModel:
    kind = TextModel.of_run(run)
    model = kind.build(run)

    def preprocess(texts: Sequence[str]) -> Batch:
        batch = kind.collate([(ids, 0) for ids in kind.encode(texts)])
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    before = {"tokenizer": TOKENIZER_FILE, "max_length": kind.max_length, "pad": kind.pad_id}
    return LoadedModel(model, TextLogits(model), preprocess, description_of(kind, before))


class TextLogits(nn.Module):
    """Wrapper of a transformers model that returns only its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return logits (n, classes) float32 for ids and masks, (n, t) int64 each."""
        logits: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


TEXT = Job(
    name=JOB,
    help="Text classification, from TSV files and other tables.",
    example="reviews",
    options=TextOptions,
    check_early=check_early,
    prepare=prepare,
    settle=settle,
    make_task=make_task,
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
)
