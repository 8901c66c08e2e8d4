"""The commands of ``onefold``.

What the commands do is in the modules that they call; ``onefold run`` is in `onefold.cli.running`.

Note: imports inside of commands
--------------------------------
typer reads every command before it runs one. The jobs, the tables and the comparison are imported
by the command that needs them, so that ``onefold run`` starts without them. The docstring of a
command is its help; its first sentence fits a line of the list of commands.
"""

from __future__ import annotations

import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

import onefold
from onefold import RunOptions
from onefold.cli.help import Commands, declare
from onefold.cli.looking import looking
from onefold.cli.running import (
    PLACEMENT_VARIABLE,
    SCRIPT,
    AsJson,
    Devices,
    Exchange,
    Module,
    OffloadDir,
    Script,
    Timeout,
    absolute_dir,
    command_of,
    print_json,
    run,
    tell_next,
)
from onefold.errors import OnefoldError, RunFailed
from onefold.system.process import Stopped, stopped_by_signals
from onefold.system.words import in_shell, tell

__all__ = ["main"]

_TRAIN, _CHECK, _USE = "Train", "Check before a run", "Use a run"
_DEFAULTS = RunOptions()
_OF_JOBS = ("train", "predict", "evaluate")
"""Commands that are made of the options of the jobs, whose modules take long to import."""


class _Onefold(Commands):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that is called, or whose words are completed."""
        if args and args[0] in _OF_JOBS:
            from onefold.cli.train import job_commands

            for name, command in job_commands().items():
                listed: Any = self.commands[name]
                command.rich_help_panel = listed.rich_help_panel
                self.commands[name] = command
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="onefold",
    cls=_Onefold,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"onefold {onefold.__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool,
        Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train on any number of devices and get the one model you would have got on one.

    Exit codes: 0 it went well; 1 what was compared differs, or the script failed; 2 the command or
    its data cannot be used; 75 the run has saved itself after a signal, and the same command
    resumes it; 128 + N it was ended by signal N.
    """


declare(
    app,
    "run",
    group=_TRAIN,
    context_settings=SCRIPT,
    examples=[
        ("onefold run train.py --lr 0.1", "GPUs, else CPU processes"),
        ("onefold run --devices 2 -m package.train", "on two devices"),
        ("onefold run --checkpoint ckpt train.py", "can be stopped and resumed"),
    ],
)(run)


@declare(app, "train", group=_TRAIN)
def _train() -> None:
    """Train a ready-made job on your data: classify, segment, text."""


@declare(
    app,
    "init",
    group=_TRAIN,
    examples=[
        ("onefold init", "with random data"),
        ("onefold init photos", "for pictures: photos/CLASS/"),
        ("onefold init table.csv -o fit.py", "for columns of numbers"),
    ],
)
def init(
    data: Annotated[
        Path | None, Argument(metavar="[DATA]", help="Folder or file of the data.")
    ] = None,
    output: Annotated[
        Path, Option("--output", "-o", metavar="FILE", help="The script to write.")
    ] = Path("train.py"),
) -> None:
    """Write the shortest training script for your data.

    It looks at the data: a folder of class folders with pictures; a CSV or TSV file, whose last
    column is what is to be predicted, by its columns of numbers and of few different texts; arrays
    x and y of an NPZ file, pictures among them. Nothing is overwritten.
    """
    from onefold.cli.init import write_script

    write_script(data, output)
    print(output)
    tell_next(f"onefold verify --devices 1,2 {in_shell(output)}")


@declare(app, "demo", group=_TRAIN, examples=[("onefold demo", "takes a minute")])
def demo(
    output: Annotated[
        Path, Option("--output", "-o", metavar="DIR", help="Folder for the learning curve.")
    ] = Path("runs/demo"),
    devices: Devices = "auto",
) -> None:
    """Train on real digits, on one device and on all, and compare."""
    from onefold.jobs.digits import demo as run_demo

    code = run_demo(output, devices=devices)
    tell_next("onefold init")
    raise typer.Exit(code)


@declare(
    app,
    "verify",
    group=_CHECK,
    context_settings=SCRIPT,
    examples=[
        ("onefold verify train.py", "on 1 and 2 devices"),
        ("onefold verify --devices cpu:1,3 train.py --lr 0.1", "on CPU processes"),
        ("onefold verify --resume 3 train.py", "stop and resume it"),
    ],
)
def verify(
    context: typer.Context,
    script: Script = None,
    module: Module = False,
    devices: Annotated[
        str, Option(metavar="COUNTS", help="Device counts to compare: 1,2,3 or cpu:1,2,3.")
    ] = "1,2",
    steps: Annotated[int, Option(min=1, metavar="N", help="Steps of each Trainer to compare.")] = 5,
    trainers: Annotated[
        int | None,
        Option(
            min=1,
            metavar="N",
            help="End the script after so many Trainers.",
            show_default="all",
        ),
    ] = None,
    resume: Annotated[
        int,
        Option(
            min=0,
            metavar="N",
            help="Instead, stop the script at so many random steps, and resume it.",
        ),
    ] = 0,
    placement: Annotated[
        str,
        Option(
            envvar=PLACEMENT_VARIABLE,
            show_envvar=False,  # it names one, and this may be several
            metavar="PLACEMENTS",
            help="Placements, each with every count: replicate,partition.",
        ),
    ] = "replicate",
    as_json: AsJson = False,
    offload_dir: OffloadDir = None,
    exchange: Exchange = "auto",
    timeout: Timeout = _DEFAULTS.timeout_s,
) -> None:
    """Say whether a script has the same bits on several device counts.

    The bits of every Trainer are compared after each of its first steps. The script then goes
    on to its end or its next Trainer, but computes no more steps: each returns the last one
    again. Its own code still runs and takes time; --trainers 1 ends the script at that point.
    Then the same steps are made once more in float64, without dropout and with batch norm by
    its statistics, and each batch is computed as one shard as well, as a plain loop would: loss
    and gradient must be the same to 1e-9. If not, the likely cause is named: a sum that is read
    as a mean, class weights, ignored targets, a loss of the whole batch, a batch that is cut
    along time. The whole batch must fit on one device.

    With --resume N the script is run to its end, and then N times with a stop at a random step,
    each resumed on another of the counts with the record of its run, as by onefold run
    --checkpoint. The ends are compared: the model, all steps and all results.

    trainer.save, torch.save and safetensors write to a temporary folder meanwhile (not with
    --resume), and trainer.load(..., if_any=True) finds nothing but what was saved there. Other
    files of the script are written as usual.

    Exit code 0: everything agrees; 1: it does not, nothing was trained, or onefold refuses the
    script; 2: a run failed.
    """
    from onefold.cli.resuming import verify_resume
    from onefold.cli.verify import read_ways, verify_script

    command = command_of(script, module, context.args)
    options = RunOptions(
        offload_dir=absolute_dir(offload_dir, placement),
        exchange=exchange,  # type: ignore[arg-type]  # RunOptions checks it
        timeout_s=timeout,
        quiet=True,
        probe_steps=steps,
        probe_trainers=trainers or 0,
    )
    if resume:
        ways = read_ways(devices, placement)
        code = verify_resume(command, ways, options=options, stops=resume, as_json=as_json)
    else:
        code = verify_script(
            command, devices, placement=placement, options=options, as_json=as_json
        )
    if not code:
        tell_next(f"onefold run {in_shell(*command)}")
    raise typer.Exit(code)


@declare(
    app,
    "plan",
    group=_CHECK,
    context_settings=SCRIPT,
    examples=[("onefold plan --devices 1,2,8 train.py", "memory by count and placement")],
)
def plan(
    context: typer.Context,
    script: Script = None,
    module: Module = False,
    devices: Annotated[
        str, Option(metavar="COUNTS", help="Device counts, such as 1,2,4.")
    ] = "1,2,4",
    as_json: AsJson = False,
    offload_dir: OffloadDir = None,
) -> None:
    """Show how much memory a script's model takes on each device.

    Its stages are shown as well, at which it can be cut. The script runs until it makes its first
    Trainer, and ends there: nothing is trained.
    """
    from onefold.cli.plan import plan_script

    command = command_of(script, module, context.args)
    options = RunOptions(placement="offload", offload_dir=absolute_dir(offload_dir, "offload"))
    code = plan_script(command, devices, options=options, as_json=as_json)
    if not code:
        tell_next(f"onefold run --placement partition {in_shell(*command)}")
    raise typer.Exit(code)


@declare(app, "devices", group=_CHECK, examples=[("onefold devices --json", "for a program")])
def show_devices(as_json: AsJson = False) -> None:
    """Show the devices of this machine."""
    from onefold.cli.plan import show_devices

    show_devices(as_json=as_json)
    tell_next("onefold run --devices N train.py")


@declare(app, "predict", group=_USE)
def _predict() -> None:
    """Predict the classes, labels or masks of new files."""


@declare(app, "evaluate", group=_USE)
def _evaluate() -> None:
    """Score a run on labelled data, by class and by sample."""


@declare(
    app,
    "export",
    group=_USE,
    examples=[
        ("onefold export runs/a --to onnx", "runs/a/model.onnx"),
        ("onefold export runs/a --to torch-export --output a.pt2", "another file"),
    ],
)
def export(
    run_folder: Annotated[Path, Argument(metavar="RUN", help="Folder of a trained run.")],
    to: Annotated[Literal["onnx", "torch-export", "safetensors"], Option(help="Kind of the file.")],
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write.",
            show_default="model.* in the run",
        ),
    ] = None,
    weights: Annotated[
        Literal["best", "last"], Option(help="Which checkpoint of the run.")
    ] = "best",
    as_json: AsJson = False,
) -> None:
    """Write the model of a run for programs without onefold."""
    from onefold.jobs.export import export_run

    made = export_run(run_folder, to, output, weights=weights)
    files = [str(each) for each in (made.file, *made.beside)]
    if as_json:
        compared = {"samples": made.samples, "difference": made.difference}
        print_json({"files": files, "compared": compared})
        return
    what = f"{made.samples} samples of the run" if made.samples else "random inputs"
    print("\n".join(files))
    largest = f"{made.difference:.1g} of the largest"
    print(f"On {what} its logits differ from the run's by {largest} at most.")


@declare(
    app,
    "report",
    group=_USE,
    examples=[
        ("onefold report runs/a", "runs/a/report.html"),
        ("onefold report runs/a runs/b", "and a page that compares them"),
    ],
)
def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Folders of runs.")],
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The page to write: of one run, its report; of several, the comparison.",
            show_default="report.html in the run, or runs/comparison.html",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the report of a run, or a page that compares several."""
    from onefold.jobs.report import build_report, compare_runs

    if output is not None and output.is_dir():
        raise ValueError(f"--output {output}: expected a file for the page, this is a folder")
    if len(runs) == 1:
        pages = [build_report(runs[0], output)]
    else:
        pages = [build_report(run_folder) for run_folder in runs]
        pages.append(compare_runs(runs, output or Path("runs/comparison.html")))
    if as_json:
        print_json({"pages": [str(page) for page in pages]})
    else:
        print(*pages, sep="\n")
    tell_next(f"open {in_shell(pages[-1])} in a browser")


app.add_typer(looking)


def main() -> None:
    """Run the command line; errors that were foreseen become one line instead of a traceback."""
    launched = False
    try:
        launched = onefold.is_launched()  # refused if a launcher has left something out
        signals: AbstractContextManager[list[signal.Signals]] = nullcontext([])
        with signals if launched else stopped_by_signals() as came:
            try:
                app()
            except SystemExit as end:
                # SIGTERM and SIGHUP raise a KeyboardInterrupt of ours. typer takes that for Ctrl-C,
                # and ends with the exit code of another signal than the one that came.
                if came and end.code == 128 + signal.SIGINT:
                    raise Stopped(came[0]) from None
                raise
    except Stopped as stop:
        tell(f"stopped by {stop.number.name}")
        sys.exit(128 + stop.number)
    except (OnefoldError, ValueError, OSError) as error:
        if launched:
            raise  # in a worker the launcher reports errors, and handles signals
        text = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            text = f"{error.filename}: {error.strerror}"  # without the system's number for it
        tell(text)
        sys.exit(error.exit_code if isinstance(error, RunFailed) else 2)
