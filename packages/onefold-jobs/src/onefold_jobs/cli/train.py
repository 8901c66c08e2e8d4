"""``onefold train`` with one command per job, ``predict`` and ``evaluate``: built from their
options.

Note: generated commands
------------------------
typer derives a command's options from the signature and the annotations of a function. This module
builds both from the fields of the options, so that an option, its help and its default are defined
once, in the dataclass. Every parameter defaults to None, which means that the option was not given:
otherwise the command line could not take precedence over a config file, and a resumed run could not
be compared with the given options. The defaults in the help are only text.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table
from typer.main import get_command

from onefold.cli import (
    Command,
    Commands,
    Screen,
    counted,
    declare,
    in_shell,
    listed,
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
from onefold_jobs.run import read_options, resume_command, run_job
from onefold_jobs.scores import Baseline, ClassScores, class_tables, spell, verdict_of
from onefold_jobs.series import Outcome, cross_validate

__all__ = ["GROUPS", "job_commands"]

_WORDS = {"True": "yes", "False": ""}
GROUPS = {
    "Data": (
        *("config", "data", "dev", "holdout", "folds", "task", "text_column", "image_column"),
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
"""The options of the jobs by their heading in the help, most used first."""
_HEADINGS = {name: heading for heading, names in GROUPS.items() for name in names}
_WIDEST = 45
"""Maximum length of the choices that a help text lists."""
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
Searched = Annotated[
    list[str] | None,
    typer.Option(
        "--search",
        metavar="NAME=VALUES",
        help="Option to search: lr=1e-4:1e-1 or optimizer=sgd,adamw.",
        rich_help_panel="Search",
    ),
]
Trials = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Total number of trials. [20]",
        show_default=False,
        rich_help_panel="Search",
    ),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")]
LabeledData = Annotated[
    Path,
    typer.Argument(metavar="DATA", help="The training data (for its test set), or a test set."),
]
Paths = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH...", help="Images, folders or tables; files with one text per line."
    ),
]


class JobCommand(Command):
    """A command with the options of a job, and one line of help for each."""

    other_names = OTHER_NAMES

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, each group under its heading."""
        groups: dict[str, list[tuple[str, str]]] = {}
        heading = "Arguments"
        for parameter in self.get_params(ctx):
            # --help, which comes last and has no heading, joins the group before it.
            heading = getattr(parameter, "rich_help_panel", None) or heading
            if (record := parameter.get_help_record(ctx)) is not None:
                # Every flag also has --no-FLAG, which is left out to save a line. typer appends the
                # type to an argument's name.
                name = record[0].partition(" / ")[0].partition(" <")[0]
                groups.setdefault(heading, []).append((name, record[1]))
        for each, records in groups.items():
            with formatter.section(each):
                formatter.write_dl(records)


def _group(text: str) -> typer.Typer:
    return typer.Typer(cls=Commands, help=text, no_args_is_help=True, rich_markup_mode=None)


def job_commands() -> dict[str, Any]:
    """Build the commands that have the jobs' options, by name."""
    jobs = _group("Train a ready-made job on your data.")
    for job in JOBS:
        example = f"Example: onefold train {job.name} --data {job.example} --name a"
        text = f"{job.help}\n\n{example}"
        declare(jobs, job.name, group="Jobs", text=text, cls=JobCommand)(_command(job))
    app = typer.Typer(rich_markup_mode=None)
    app.add_typer(jobs, name="train")
    app.add_typer(tune_commands(), name="tune")
    _declare_predict(app)
    _declare_evaluate(app)
    return dict(getattr(get_command(app), "commands"))  # noqa: B009  # typer does not type it


def _declare_predict(app: typer.Typer) -> None:
    examples = [
        ("onefold predict runs/a new_photos", "prints CSV"),
        ("onefold predict runs/a new.png --top 3 --json", "top three classes"),
    ]

    def predict(run_folder: RunFolder, paths: Paths, **chosen: Any) -> None:
        """Predict the classes, labels or masks of new files, as CSV, JSON or PNG."""
        options = PredictOptions(**_given(chosen))
        both = options.json and options.format == "csv"
        expect(not both, "json", "", "it without --format csv")
        prediction = predict_run(run_folder, paths, options)
        for each in prediction.left_out:
            tell(f"left out: {each}")
        written = write_prediction(prediction, options, sys.stdout)
        if written is not None:
            tell(f"{len(prediction.rows)} predictions: {written}")

    declare(app, "predict", group="", examples=examples, cls=JobCommand)(
        _with_options(predict, PredictOptions)
    )


def _declare_evaluate(app: typer.Typer) -> None:
    examples = [
        ("onefold evaluate runs/a photos", "scores its test set"),
        ("onefold evaluate runs/a photos --json", "for a program"),
        ("onefold evaluate runs/a photos --output all.csv", "scores each sample"),
    ]

    def evaluate(run_folder: RunFolder, data: LabeledData, **chosen: Any) -> None:
        """Score a trained run on labeled data: overall, by class, and by sample."""
        options = EvaluateOptions(**_given(chosen))
        found = evaluate_run(run_folder, data, options)
        for each in found.prediction.left_out:
            tell(f"left out: {each}")
        if options.output is not None:
            # --json applies to the scores.
            write_prediction(found.prediction, dataclasses.replace(options, json=False), sys.stdout)
        if options.json:
            print_json(found.as_dict())
        else:
            _tell_scores(found)

    declare(app, "evaluate", group="", examples=examples, cls=JobCommand)(
        _with_options(evaluate, EvaluateOptions)
    )


def _tell_scores(found: Evaluation) -> None:
    console = Screen(soft_wrap=True)
    samples = counted(len(found.prediction.rows), "sample")
    console.print(f"{found.weights} on {samples} of {readable(found.data)}")
    baseline = found.baseline.scores if found.baseline else {}
    for name, value in found.scores.items():
        least = f" (baseline {spell(name, baseline[name])})" if name in baseline else ""
        console.print(f"{name}: {spell(name, value)}{least}")
    if found.baseline:
        console.print(f"The baseline predicts {found.baseline}.")
    for part in class_tables(found.by_class, found.confusion):
        console.print(part)
    if found.warning:
        console.print(f"Warning: {found.warning}")
    if found.note:
        console.print(found.note)


def tune_commands() -> typer.Typer:
    """Build the commands that search options: those of ``onefold train``, with what to search."""
    app = _group("Search good options of a job by training trials.")
    for job in JOBS:
        what = f"onefold tune {job.name} --data {job.example} --search"
        examples = [
            (f"{what} lr=1e-4:1e-1", "a range"),
            (f"{what} optimizer=sgd,adamw", "a choice"),
        ]
        text = f"Search options of onefold train {job.name}."
        declare(app, job.name, group="Jobs", text=text, examples=examples, cls=JobCommand)(
            _tune_command(job)
        )
    return app


def _tune_command(job: Job) -> Callable[..., None]:
    def command(
        config: Config = None, search: Searched = None, trials: Trials = 20, **chosen: Any
    ) -> None:
        from onefold_jobs.search import search as find

        options = read_options(job, _given(chosen), config)
        resumed_by = f"{resume_command('tune', job, options)} --trials {trials}"
        tell_series(find(job, options, search or [], trials=trials, resumed_by=resumed_by))

    return _with_options(command, job.options)


def tell_series(found: Outcome) -> None:
    """Print the table of a series of runs, and the path of its report."""
    console = Screen(soft_wrap=True)
    if found.table:
        rows = Table(title=found.table.title, title_justify="left")
        for each in found.table.words:
            rows.add_column(each)
        for each in found.table.numbers:
            rows.add_column(each, justify="right")
        for row in found.table.rows:
            rows.add_row(*row)
        console.print(rows)
        for note in found.table.notes:
            console.print(note)
    if found.report:
        console.print(f"Report: {found.report}")


def _command(job: Job) -> Callable[..., None]:
    def command(config: Config = None, **chosen: Any) -> None:
        options = read_options(job, _given(chosen), config)
        if options.fold and not options.fold.number:
            tell_series(cross_validate(job, options))
            return
        result = run_job(job, options)
        if result["is_lead"]:
            _tell(result, Path(result["folder"]))

    return _with_options(command, job.options)


def _given(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options; lists are also split at commas."""
    given = {}
    for name, value in chosen.items():
        # For a list that was not given, typer passes an empty list. 0 and False are given values.
        if isinstance(value, list) and value:
            given[name] = tuple(filter(None, map(str.strip, ",".join(value).split(","))))
        elif value not in (None, []):
            given[name] = value
    return given


def _with_options(command: Callable[..., None], options: type[Any]) -> Callable[..., None]:
    """Replace a command's ``**chosen`` by a typer parameter for each option."""
    *own, _ = inspect.signature(command, eval_str=True).parameters.values()
    # The fields contain their types as strings, because their module postpones annotations.
    hints = typing.get_type_hints(options)
    # The help lists options in the order of their groups.
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
    # Add the default to the help text, because typer only knows the default None.
    note = f" [{default}]" if default else ""
    words, metavar = field.metadata["help"], _METAVARS.get(hint)
    choices = [each for part in (hint, *typing.get_args(hint)) for each in _choices(part)]
    # A number or a word, such as auto, which the option's text names.
    number = next(
        (each for each in typing.get_args(hint) if choices and each in (int, float)), None
    )
    if choices:
        metavar = "NAME" if number is None else _METAVARS[number]
    # The text of --task names its choices itself; those of --best-by are too many for one line.
    if choices and choices[0] not in words and len(", ".join(choices)) <= _WIDEST:
        words = f"{words.removesuffix('.')}: {', '.join(choices)}."
    described = typer.Option(
        *_NAMES.get(field.name, ()),
        help=f"{words}{note}",
        envvar=field.metadata["variable"],
        show_envvar=False,
        metavar=metavar,
        parser=number and _number_or(choices, number),
        rich_help_panel=field.metadata["heading"] or _HEADINGS.get(field.name),
    )
    # typer does not support tuples of any length; lists may be given by repeating the option.
    asked = list[str] if typing.get_origin(hint) is tuple else str if number else hint
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(
        field.name, kind, default=None, annotation=Annotated[asked | None, described]
    )


def _number_or(words: Sequence[str], number: type[int | float]) -> Callable[[str], Any]:
    """Make the parser of an option that takes a number, or one of a few words."""

    def parsed(text: str) -> Any:
        try:
            return text if text in words else number(text)
        except ValueError:
            kind = "a whole number" if number is int else "a number"
            raise typer.BadParameter(f"expected {kind} or {listed(words)}, got {text}") from None

    return parsed


def _choices(hint: Any) -> tuple[str, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def _tell(result: dict[str, Any], folder: Path) -> None:
    """Print the result of a run: its best epoch, fingerprint and report."""
    console = Screen(soft_wrap=True)
    best, baseline = result["best"], result["baseline"] and Baseline(**result["baseline"])
    if best and baseline:
        verdict = verdict_of(
            result["score"],
            best["value"],
            baseline,
            steps=result["steps"],
            examples=result,
            shrunk=bool(result.get("shrunk")),
        )
        if verdict:
            console.print(f"Warning: {verdict}")
    if best:
        console.print(
            f"Best: {best['score']} {spell(best['score'], best['value'])} after epoch "
            f"{best['epoch']}, saved in {folder / best['checkpoint']}"
        )
    confusion, rows = result["confusion"] or [], result["labels"] or result["ious"] or []
    if confusion:
        rows = [*ClassScores(np.array(confusion)).rows(result["classes"])]
    for part in class_tables(rows, confusion):
        console.print(part)
    console.print(f"Fingerprint: {result['fingerprint']}")
    none = f"Report: none without matplotlib; later, run onefold report {in_shell(folder)}"
    console.print(f"Report: {result['report']}" if result["report"] else none)
    tell_next(f"onefold predict {in_shell(folder)} PATH")
