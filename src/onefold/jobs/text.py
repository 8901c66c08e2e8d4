"""Texts with one label each: the options, the data, the model, and what is shown of it.

A run keeps its tokenizer and the description of its model as files, so that it can be used without
the folder of the pretrained model that it may have started from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.errors import CheckpointError, DataError
from onefold.jobs.data.files import read_whole, readable, refuse
from onefold.jobs.data.labels import check_apart, check_labels, check_one_label, untested
from onefold.jobs.data.scan import Scanning
from onefold.jobs.data.tsv import Line, TextSplits, read_splits
from onefold.jobs.examples import classifier_examples
from onefold.jobs.finetune import freeze, parameter_groups
from onefold.jobs.options import (
    MOST_FACTOR,
    MOST_STEPS,
    Optimizer,
    TrainOptions,
    expect,
    option,
    scaled_rate,
)
from onefold.jobs.runfolder import kept_facts, read_run
from onefold.jobs.text_models import (
    build_classifier,
    build_from_config,
    head_parts,
    load_pretrained,
    most_tokens,
)
from onefold.jobs.tokens import (
    PAD_ID,
    EncodedTexts,
    encode_texts,
    pad_shard,
    require,
    token_roles,
    train_tokenizer,
)
from onefold.jobs.training import Task, facts_of

__all__ = ["JOB", "TextModel", "TextOptions", "check_early", "make_task", "prepare", "settle"]

JOB = "text"
TINY = "tiny"
EVALUATION_BATCH_SIZE = 256
CONFIG_FILE = "model_config.json"
TOKENIZER_FILE = "tokenizer.json"
SHOWN_CHARACTERS = 400
_MOST_FILE_BYTES = 1 << 28
"""The largest file of a run's model that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions(TrainOptions):
    """Options of ``onefold train text``."""

    lr: float | None = option(
        None, "Learning rate.", shown="0.0005, or 0.00003 for --model DIR", most=MOST_FACTOR
    )
    epochs: int | None = option(
        None,
        "Times that the training set is read.",
        shown="10, or 3 for --model DIR",
        most=MOST_STEPS,
    )
    optimizer: Optimizer = option("adamw", "How the parameters are updated.")
    weight_decay: float = option(0.01, "Pull of the parameters towards zero.", most=MOST_FACTOR)
    clip_norm: float | None = option(1.0, "Scale larger gradients down to this norm.", most=1e20)
    dev: str | None = option(
        None, "TSV file to score on, if --data is a file.", shown="dev.tsv in the folder"
    )
    model: str = option(
        TINY, "tiny, made from the options below, or a folder with a pretrained model."
    )
    vocabulary: int = option(
        4000, "Tokens that the tokenizer learns from the training texts.", most=10**7
    )
    width: int = option(128, "Size of the tiny model's embeddings.", most=1 << 16)
    layers: int = option(2, "Of the tiny model.", most=1000)
    heads: int = option(4, "Attention heads in each layer of the tiny model.", most=1 << 16)
    dropout: float = option(0.2, "Of the tiny model.")
    max_length: int = option(
        128, "Tokens of a text at most; what is beyond is cut off.", most=1 << 20
    )
    token_dropout: float = option(
        0.15, "Share of tokens hidden in training, anew at every reading."
    )
    label_smoothing: float = option(0.0, "Share of a label that is spread over all classes.")
    labels_as_is: bool = option(
        False, "Accept every label as a class, even if they look like numbers, lists or typos."
    )

    def __post_init__(self) -> None:
        # Not super(), which fails here: see ClassifyOptions.
        TrainOptions.__post_init__(self)
        # 256 bytes and 5 special tokens; and two of those stand around a text.
        for name, least in (
            ("vocabulary", 261),
            ("width", 1),
            ("layers", 1),
            ("heads", 1),
            ("max_length", 3),
        ):
            value = getattr(self, name)
            expect(value >= least, name, value, f"{least} or more")
        expect(self.width % self.heads == 0, "width", self.width, f"a multiple of {self.heads}")
        for name in ("dropout", "token_dropout", "label_smoothing"):
            value = getattr(self, name)
            expect(0 <= value < 1, name, value, "0 or more and less than 1")


def check_early(options: TextOptions) -> None:
    """Refuse what is bound to fail, before the data are read.

    Raises:
        LaunchError: a library is missing.
        CheckpointError: the folder of the pretrained model does not exist.
    """
    require("tokenizers", "transformers")
    if options.model != TINY and not Path(options.model).is_dir():
        raise CheckpointError(
            f"--model {options.model}: expected {TINY}, or a folder with a pretrained model; there "
            f"is no such folder"
        )


def prepare(options: TextOptions, scanning: Scanning | None = None) -> TextSplits:
    """Read the data, and refuse those that cannot be used.

    Args:
        options: of the run.
        scanning: not used, as texts are read in no time.

    Raises:
        DataError: the data are missing, damaged or unsuitable.
    """
    path = Path(options.data)
    if not path.exists():
        raise DataError(
            f"--data {path}: expected a folder with train.tsv and dev.tsv, or a TSV file; there is "
            f"none from {Path.cwd()}"
        )
    train, dev = (path / "train.tsv", path / "dev.tsv") if path.is_dir() else (path, None)
    dev = Path(options.dev) if options.dev else dev
    if dev is None:
        raise DataError(f"--data {path}: expected --dev with it, the TSV file to score on")
    for each in (train, dev):
        if not each.is_file():
            raise DataError(f"{each}: expected a TSV file of text and label, there is none")
    splits = read_splits(train, dev)
    if not options.skip_bad:
        refuse(splits.left_out)
    counts = Counter(line.label for line in splits.train)
    notes = [] if options.labels_as_is else check_labels(counts, readable(train))
    notes += untested(splits.classes, {line.label for line in splits.dev}, readable(dev))
    # A text that is trained on and scored on would make the score too good.
    notes += check_apart(
        [line.text for line in splits.train],
        [line.text for line in splits.dev],
        train_names=[f"line {line.line_number} of {readable(train)}" for line in splits.train],
        test_names=[f"line {line.line_number}" for line in splits.dev],
        where=readable(dev),
    )
    lines = [*splits.train, *splits.dev]
    parts = [train] * len(splits.train) + [dev] * len(splits.dev)
    notes += check_one_label(
        [line.text for line in lines],
        [line.label for line in lines],
        [f"line {n.line_number} of {readable(part)}" for n, part in zip(lines, parts, strict=True)],
        readable(path),
    )
    return replace(splits, notes=notes)


def settle(options: TextOptions, data: TextSplits) -> TextOptions:
    """Fill in the options that were left open, now that the data are known."""
    fine = options.model != TINY
    return replace(
        options,
        epochs=options.epochs or (3 if fine else 10),
        lr=options.lr if options.lr is not None else (3e-5 if fine else 5e-4),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """What must be known of a model to use it on texts; kept in the run's folder."""

    tokenizer: str
    """The tokenizer as JSON."""
    max_length: int
    pad_id: int
    classes: tuple[str, ...]

    @classmethod
    def of_run(cls, run: Path) -> TextModel:
        """Read it from the folder of a run.

        Raises:
            DataError: the folder is not that of a run of this job, or a file in it is damaged.
        """
        facts = read_run(run, JOB)
        with kept_facts(run):
            made = cls(
                tokenizer=_read_file(run / TOKENIZER_FILE),
                classes=tuple(map(str, facts["classes"])),
                max_length=int(facts["text_model"]["max_length"]),
                pad_id=int(facts["text_model"]["pad_id"]),
            )
            # Tried here, or a damaged tokenizer would only be met on the devices.
            made.encode(["text"])
            return made

    def build(self, run: Path) -> nn.Module:
        """Build the run's model with fresh weights.

        Raises:
            CheckpointError: its description is damaged.
            DataError: its description is not that of the model that ``run.json`` tells of.
        """
        model = build_of_run(run)
        config: Any = model.config
        if config.num_labels != len(self.classes) or not 0 <= self.pad_id < config.vocab_size:
            raise DataError(
                f"{run}: expected {CONFIG_FILE} and run.json to be of one model, got "
                f"{config.num_labels} classes of {config.vocab_size} tokens, and "
                f"{len(self.classes)} with padding by token {self.pad_id}"
            )
        return model

    def encode(self, texts: Sequence[str]) -> list[torch.Tensor]:
        """Token ids of each text, (t,) int64."""
        return encode_texts(texts, self.tokenizer, max_length=self.max_length)

    @property
    def collate(self) -> Any:
        """The function that makes a shard of texts."""
        return partial(pad_shard, pad_id=self.pad_id)


def make_task(options: TextOptions, data: TextSplits) -> Task:
    """Build the model, the data sets and the scores of a run; called on every device.

    Args:
        options: settled ones.
        data: what `prepare` returned.

    Raises:
        CheckpointError: the pretrained model cannot be used.
        LaunchError, ValueError: a library is missing, or an option does not suit the model.
    """
    # Every device draws the first weights by itself, and all must draw the same.
    torch.manual_seed(options.seed)
    model, kind = _build(options, data)
    head = head_parts(model)
    frozen = freeze(model, options, head)
    mask_id, special_ids = token_roles(kind.tokenizer)
    train_set = EncodedTexts(
        kind.encode([line.text for line in data.train]),
        _labels(data.train, kind.classes),
        token_dropout=options.token_dropout,
        mask_id=mask_id,
        special_ids=special_ids,
    )
    dev_labels = _labels(data.dev, kind.classes)
    dev_set = EncodedTexts(kind.encode([line.text for line in data.dev]), dev_labels)
    config: Any = model.config
    return Task(
        model=model,
        groups=parameter_groups(
            model, rate=scaled_rate(options), head=head, head_scale=options.head_lr_scale
        ),
        loss=_loss_of(options.label_smoothing),
        score=score,
        best="highest accuracy",
        train_set=train_set,
        test_set=dev_set,
        collate=kind.collate,
        # Texts of near length share a batch, so that little of a shard is padding.
        lengths=train_set.lengths.tolist(),
        evaluation_batch_size=EVALUATION_BATCH_SIZE,
        examples=lambda trainer, folder: _examples(trainer, dev_set, data.dev, kind, dev_labels),
        facts={
            "model": options.model,
            "text_model": {"max_length": kind.max_length, "pad_id": kind.pad_id},
            "frozen": frozen,
            "classes": list(kind.classes),
            **facts_of(data),
        },
        # use_diff=False writes defaults as well: those of a later transformers may be others.
        files={TOKENIZER_FILE: kind.tokenizer, CONFIG_FILE: config.to_json_string(use_diff=False)},
    )


def _loss_of(smoothing: float) -> Callable[[nn.Module, Any], torch.Tensor]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(
            logits(model, batch), batch["labels"], reduction="none", label_smoothing=smoothing
        )

    return loss


def build_of_run(run: Path) -> nn.Module:
    """Build a run's model with fresh weights."""
    try:
        return build_from_config(_read_file(run / CONFIG_FILE))
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"{run / CONFIG_FILE}: {error}") from error


def _read_file(path: Path) -> str:
    return read_whole(path, _MOST_FILE_BYTES).decode()


def logits(model: nn.Module, batch: Any) -> torch.Tensor:
    """The logits of every text of a shard, (n, classes) float32."""
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    values: torch.Tensor = output.logits
    return values


def score(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """The loss of every text of a shard, and whether its class was predicted."""
    values, labels = logits(model, batch), batch["labels"]
    return {
        "loss": F.cross_entropy(values, labels, reduction="none"),
        "accuracy": values.argmax(dim=1) == labels,
    }


def confidences(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """The probability of every class, (n, classes) float32, for every text of a shard."""
    return {"confidence": logits(model, batch).softmax(dim=1)}


def _build(options: TextOptions, data: TextSplits) -> tuple[nn.Module, TextModel]:
    """Build the model, from a folder or from scratch, and its tokenizer."""
    classes = tuple(data.classes)
    if options.model != TINY:
        model, tokenizer = load_pretrained(options.model, len(classes))
        config: Any = model.config
        pad_id = config.pad_token_id if config.pad_token_id is not None else PAD_ID
        length = min(options.max_length, most_tokens(model) or options.max_length)
        kind = TextModel(tokenizer=tokenizer, max_length=length, pad_id=pad_id, classes=classes)
        return model, kind
    # Each device trains its own; they come out alike, see the note in onefold.jobs.tokens.
    tokenizer = train_tokenizer([line.text for line in data.train], options.vocabulary)
    model = build_classifier(
        options.vocabulary,
        len(classes),
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        max_length=options.max_length,
        dropout=options.dropout,
    )
    kind = TextModel(
        tokenizer=tokenizer, max_length=options.max_length, pad_id=PAD_ID, classes=classes
    )
    return model, kind


def _labels(lines: Sequence[Line], classes: Sequence[str]) -> list[int]:
    numbers = {name: number for number, name in enumerate(classes)}
    return [numbers[line.label] for line in lines]


def _examples(
    trainer: onefold.Trainer,
    dev_set: EncodedTexts,
    dev: Sequence[Line],
    kind: TextModel,
    labels: Sequence[int],
) -> dict[str, Any]:
    """Show what the trained model predicts for the test texts; called on every device."""
    predicted = trainer.predict(
        confidences, dev_set, batch_size=EVALUATION_BATCH_SIZE, collate=kind.collate
    )["confidence"]

    def show(number: int) -> dict[str, Any]:
        line = dev[number]
        return {"name": f"line {line.line_number}", "text": line.text[:SHOWN_CHARACTERS]}

    return classifier_examples(JOB, predicted, labels, kind.classes, show)
