"""The commands that the jobs add to ``onefold``, registered as entry points.

``onefold --help`` imports this module, so slow imports are deferred until a command is called:
`onefold_jobs.cli.train` builds ``train``, ``predict`` and ``evaluate`` from the jobs' options.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option
from typer.main import get_command

from onefold.cli import LateCommand, declare, print_json, tell_next, visible

__all__ = ["evaluate", "export", "init", "predict", "report", "train", "tune"]

TRAIN, USE = "Train", "Use a run"
"""Headings of ``onefold --help`` that list these commands."""
AsJson = Annotated[bool, Option("--json", help="Print one JSON object; text goes to stderr.")]
_app = typer.Typer(rich_markup_mode=None)


def _output(help: str, shown: str | bool = True) -> Any:
    return Option("--output", "-o", metavar="FILE", help=help, show_default=shown)


def _late(name: str, group: str, summary: str) -> LateCommand:
    def make() -> Any:
        from onefold_jobs.cli.train import job_commands

        return job_commands()[name]

    return LateCommand(name, group=group, summary=summary, make=make)


train = _late("train", TRAIN, "Train a ready-made job on your data: classify, segment, text.")
tune = _late("tune", TRAIN, "Search good options of a ready-made job by training trials.")
predict = _late("predict", USE, "Predict the classes, labels or masks of new files.")
evaluate = _late("evaluate", USE, "Score a run on labeled data, by class and by sample.")


@declare(
    _app,
    "init",
    group=TRAIN,
    examples=[
        ("onefold init", "with random data"),
        ("onefold init photos", "images in photos/CLASS/"),
        ("onefold init table.csv -o fit.py", "numeric columns"),
    ],
)
def _init(
    data: Annotated[
        Path | None, Argument(metavar="[DATA]", help="Folder or file of the data.")
    ] = None,
    output: Annotated[Path, _output("Script to write.")] = Path("train.py"),
    labels_as_is: Annotated[
        bool, Option("--labels-as-is", help="Accept all folders and labels as classes.")
    ] = False,
) -> None:
    """Write the shortest training script for your data.

    The command inspects the data: all data of the jobs; a CSV or TSV file, whose last column is the
    target and whose numeric and categorical columns are inputs; or arrays x and y of an NPZ file,
    which may be images. It never overwrites a file.
    """
    from onefold_jobs.cli.init import write_script

    write_script(data, output, labels_as_is=labels_as_is)
    print(visible(str(output)))
    tell_next(f"onefold verify --devices 1,2 {shlex.quote(str(output))}")


@declare(
    _app,
    "export",
    group=USE,
    examples=[
        ("onefold export runs/a --to onnx", "runs/a/model.onnx"),
        ("onefold export runs/a --to torch-export --output a.pt2", "to another file"),
    ],
)
def _export(
    run_folder: Annotated[Path, Argument(metavar="RUN", help="Folder of a trained run.")],
    to: Annotated[Literal["onnx", "torch-export", "safetensors"], Option(help="File format.")],
    output: Annotated[Path | None, _output("File to write.", shown="model.* in the run")] = None,
    weights: Annotated[
        Literal["best", "last"], Option(help="Checkpoint of the run to use.")
    ] = "best",
    as_json: AsJson = False,
) -> None:
    """Export the model of a run for use without onefold."""
    from onefold_jobs.export import export_run

    made = export_run(run_folder, to, output, weights=weights)
    files = [visible(str(each)) for each in (made.file, *made.beside)]
    if as_json:
        compared = {"samples": made.samples, "difference": made.difference}
        print_json({"files": files, "compared": compared})
        return
    what = f"{made.samples} samples of the run" if made.samples else "random inputs"
    print("\n".join(files))
    largest = f"{made.difference:.1g} of the largest"
    print(f"On {what} its logits differ from the run's by {largest} at most.")


@declare(
    _app,
    "report",
    group=USE,
    examples=[
        ("onefold report runs/a", "runs/a/report.html"),
        ("onefold report runs/a runs/b", "also writes a comparison page"),
    ],
)
def _report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Folders of runs.")],
    output: Annotated[
        Path | None,
        _output(
            "HTML file for the report, or for the comparison of several.",
            shown="report.html in the run, or runs/comparison.html",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the report of a run, or a page that compares several runs."""
    from onefold_jobs.report import build_report, compare_runs

    if output is not None and output.is_dir():
        raise ValueError(f"--output {output}: expected a file, but this is a folder")
    if len(runs) == 1:
        pages = [build_report(runs[0], output)]
    else:
        pages = [build_report(run_folder) for run_folder in runs]
        pages.append(compare_runs(runs, output or Path("runs/comparison.html")))
    if as_json:
        print_json({"pages": [str(page) for page in pages]})
    else:
        print(*map(visible, map(str, pages)), sep="\n")
    tell_next(f"open {shlex.quote(str(pages[-1]))} in a browser")


_commands: dict[str, Any] = getattr(get_command(_app), "commands")  # noqa: B009  # not typed
init, export, report = (_commands[name] for name in ("init", "export", "report"))
