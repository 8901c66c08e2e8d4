"""``onefold train``, one command for each job, and ``onefold predict``: made from their options.

Note: commands that nobody wrote
--------------------------------
typer makes a command's options from the signature and the annotations of a function. Those are
built here from the fields of the options, so that an option, its help and its default stand
once, in the dataclass. Every parameter has the default None, which means that the option was not
given: only so can the command line take precedence over a config file, and can a resumed run be
compared with what was asked for. The defaults that the help shows are texts.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer.main import get_command

from onefold.cli import (
    Command,
    Commands,
    Screen,
    counted,
    declare,
    in_shell,
    print_json,
    tell,
    tell_next,
)
from onefold_jobs.catalog import JOBS
from onefold_jobs.data.files import readable
from onefold_jobs.job import Job
from onefold_jobs.options import OTHER_NAMES, expect
from onefold_jobs.predict import (
    EvaluateOptions,
    Evaluation,
    PredictOptions,
    evaluate_run,
    predict_run,
    write_prediction,
)
from onefold_jobs.run import read_options, run_job
from onefold_jobs.scores import Baseline, ClassScores, class_tables, no_better, spell

__all__ = ["GROUPS", "job_commands"]

_WORDS = {"True": "yes", "False": "no"}
GROUPS = {
    "Data": (
        *("config", "data", "dev", "holdout", "task", "text_column", "image_column"),
        *("label_column", "cache", "classes", "foreground", "void", "image_size", "crop"),
        *("normalize", "max_length", "skip_bad", "labels_as_is"),
    ),
    "Model": (
        *("model", "encoder", "stem", "pretrained", "pretrained_key", "pretrained_classes"),
        *("reuse_classes", "head_lr_scale", "freeze", "freeze_until"),
        *("layers", "width", "heads", "vocabulary", "dropout", "token_dropout"),
    ),
    "Training": (
        *("epochs", "batch_size", "lr", "optimizer", "momentum", "weight_decay", "schedule"),
        *("warmup_epochs", "decay_epochs", "decay", "scale_lr", "base_batch_size", "clip_norm"),
        *("patience", "max_time", "best_by", "ema", "label_smoothing", "class_weights", "balanced"),
        *("pos_weight", "precision", "compile", "microbatch", "seed"),
        *("evaluation_batch_size", "threshold"),
    ),
    "Augmentation": (
        *("augment", "least_area", "flip", "turns", "jitter", "randaugment", "erasing"),
        *("mixup", "cutmix"),
    ),
    "Devices": ("devices", "shards", "placement", "workers"),
    "Run": ("name", "resume", "runs", "save_every", "log"),
    "Results": ("output", "format", "json", "top", "weights"),
}
"""The options of the jobs under the headings of their help, most used first."""
_HEADINGS = {name: heading for heading, names in GROUPS.items() for name in names}
_WIDEST = 50
"""More characters of choices stand in the text of an option."""
_NAMES = {"output": ("--output", "-o")}
_METAVARS: dict[Any, str] = {
    **dict.fromkeys((int, int | None), "N"),
    **dict.fromkeys((float, float | None), "X"),
    **dict.fromkeys((str, str | None), "TEXT"),
    tuple[str, ...]: "LIST",
    Path | None: "PATH",
}


Config = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        metavar="FILE",
        help="TOML file with any of these options.",
        rich_help_panel="Data",
    ),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")]
LabeledData = Annotated[
    Path,
    typer.Argument(
        metavar="DATA", help="Data as in training, whose test set is used; or a test set alone."
    ),
]
Paths = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH...", help="Pictures, their folders or tables; files of one text a line."
    ),
]


class JobCommand(Command):
    """A command with the options of a job."""

    other_names = OTHER_NAMES


def job_commands() -> dict[str, Any]:
    """Make the commands that have the options of the jobs, by name."""
    jobs = typer.Typer(
        cls=Commands,
        help="Train a ready-made job on your data.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    for job in JOBS:
        examples = [
            (f"onefold train {job.name} --data {job.example} --name a", "writes runs/a"),
            (f"onefold train {job.name} --name a --resume", "after a stop"),
        ]
        made = declare(
            jobs, job.name, group="Jobs", text=job.help, examples=examples, cls=JobCommand
        )
        made(_command(job))
    app = typer.Typer(rich_markup_mode=None)
    app.add_typer(jobs, name="train")
    _declare_predict(app)
    _declare_evaluate(app)
    return dict(getattr(get_command(app), "commands"))  # noqa: B009  # typer does not type it


def _declare_predict(app: typer.Typer) -> None:
    examples = [
        ("onefold predict runs/a new_photos", "CSV on the screen"),
        ("onefold predict runs/a new.png --top 3 --json", "the best three"),
    ]

    def predict(run_folder: RunFolder, paths: Paths, **chosen: Any) -> None:
        """Predict the classes, labels or masks of new files: as CSV, JSON or PNG."""
        options = PredictOptions(**_given(chosen))
        both = options.json and options.format == "csv"
        expect(not both, "json", "", "it without --format csv")
        prediction = predict_run(run_folder, paths, options)
        for each in prediction.left_out:
            tell(f"left out: {each}")
        written = write_prediction(prediction, options, sys.stdout)
        if written is not None:
            tell(f"{len(prediction.rows)} predictions: {written}")

    declare(app, "predict", group="", examples=examples)(_with_options(predict, PredictOptions))


def _declare_evaluate(app: typer.Typer) -> None:
    examples = [
        ("onefold evaluate runs/a photos", "its test set"),
        ("onefold evaluate runs/a photos --json", "for a program"),
        ("onefold evaluate runs/a photos --output all.csv", "every sample"),
    ]

    def evaluate(run_folder: RunFolder, data: LabeledData, **chosen: Any) -> None:
        """Score a trained run on labeled data: overall, by class, and sample by sample."""
        options = EvaluateOptions(**_given(chosen))
        found = evaluate_run(run_folder, data, options)
        for each in found.prediction.left_out:
            tell(f"left out: {each}")
        if options.output is not None:
            # --json is about the scores.
            write_prediction(found.prediction, dataclasses.replace(options, json=False), sys.stdout)
        if options.json:
            print_json(found.as_dict())
        else:
            _tell_scores(found)

    declare(app, "evaluate", group="", examples=examples)(_with_options(evaluate, EvaluateOptions))


def _tell_scores(found: Evaluation) -> None:
    console = Screen(soft_wrap=True)
    samples = counted(len(found.prediction.rows), "sample")
    console.print(f"{found.weights} on {samples} of {readable(found.data)}")
    baseline = found.baseline.scores if found.baseline else {}
    for name, value in found.scores.items():
        least = f" (baseline {spell(name, baseline[name])})" if name in baseline else ""
        console.print(f"{name}: {spell(name, value)}{least}")
    if found.baseline:
        console.print(f"The baseline answers {found.baseline}.")
    for part in class_tables(found.by_class, found.confusion):
        console.print(part)
    if found.warning:
        console.print(f"Warning: {found.warning}")
    if found.note:
        console.print(found.note)


def _command(job: Job) -> Callable[..., None]:
    def command(config: Config = None, **chosen: Any) -> None:
        options = read_options(job, _given(chosen), config)
        result = run_job(job, options)
        if result["is_lead"]:
            _tell(result, Path(result["folder"]))

    return _with_options(command, job.options)


def _given(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given; lists split at commas, by which they may be given as well."""
    given = {}
    for name, value in chosen.items():
        # typer gives an empty list for a list that was not given. 0 and False were given.
        if isinstance(value, list) and value:
            given[name] = tuple(filter(None, map(str.strip, ",".join(value).split(","))))
        elif value not in (None, []):
            given[name] = value
    return given


def _with_options(command: Callable[..., None], options: type[Any]) -> Callable[..., None]:
    """Give a command a parameter for each option, as typer reads them, in place of ``**chosen``."""
    *own, _ = inspect.signature(command, eval_str=True).parameters.values()
    # The fields hold their types as text, since their module postpones annotations.
    hints = typing.get_type_hints(options)
    # In the help they come in the order of their groups.
    order = {name: place for place, name in enumerate(_HEADINGS)}
    fields = sorted(
        dataclasses.fields(options), key=lambda field: order.get(field.name, len(order))
    )
    parameters = [*own, *(_parameter(field, hints[field.name]) for field in fields)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    shown = field.metadata["shown"]
    default = _WORDS.get(str(field.default), str(field.default)) if shown is None else shown
    # Written by ourselves, as what typer knows of as a default is None.
    note = f" [default: {default}]" if default else ""
    words, metavar = field.metadata["help"], _METAVARS.get(hint)
    choices = [each for part in (hint, *typing.get_args(hint)) for each in _choices(part)]
    if len("|".join(choices)) > _WIDEST:
        words, metavar = f"{words} One of {', '.join(choices)}.", "NAME"
    described = typer.Option(
        *_NAMES.get(field.name, ()),
        help=f"{words}{note}",
        envvar=field.metadata["variable"],
        metavar=metavar,
        rich_help_panel=field.metadata["heading"] or _HEADINGS.get(field.name),
    )
    # typer has no tuples of any length; a list may be given by naming the option several times.
    asked = list[str] if typing.get_origin(hint) is tuple else hint
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(
        field.name, kind, default=None, annotation=Annotated[asked | None, described]
    )


def _choices(hint: Any) -> tuple[str, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def _tell(result: dict[str, Any], folder: Path) -> None:
    """Print the result of a run: its best epoch, its fingerprint, its report."""
    console = Screen(soft_wrap=True)
    best = result["best"]
    if best:
        console.print(
            f"Best: {best['score']} {spell(best['score'], best['value'])} after epoch "
            f"{best['epoch'] + 1}, kept in {folder / best['checkpoint']}"
        )
    confusion, rows = result["confusion"] or [], result["labels"] or result["ious"] or []
    if confusion:
        rows = [*ClassScores(np.array(confusion)).rows(result["classes"])]
    for part in class_tables(rows, confusion):
        console.print(part)
    baseline = result["baseline"] and Baseline(**result["baseline"])
    if best and baseline and (no := no_better(result["score"], best["value"], baseline)):
        # What weighs classes is refused for several labels, for numbers and for one foreground.
        weighed = ", --class-weights auto or --balanced" if confusion else ""
        weighed = weighed or (" or --class-weights auto" if result["ious"] else "")
        also = weighed or " or --batch-size"
        larger = " a larger --image-size," if result.get("shrunk") else ""
        console.print(f"Warning: {no}. More --epochs,{larger} another --lr{also} may help")
    console.print(f"Fingerprint: {result['fingerprint']}")
    none = f"No report, without matplotlib; later: onefold report {in_shell(folder)}"
    console.print(f"Report: {result['report']}" if result["report"] else none)
    tell_next(f"onefold predict {in_shell(folder)} PATH")
