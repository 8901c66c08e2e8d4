"""The commands of ``onefold``, and which of their arguments belong to a script that they run.

What the commands do is in the modules that they call.

Of the arguments of ``onefold run``, ``onefold verify`` and ``onefold plan``, only those before the
script, or before the module behind ``-m``, are the command's: everything behind belongs to the
script, whatever it is called. ``--`` may stand between the two.

Note: imports inside of commands
--------------------------------
typer reads every command before it runs one. The jobs, the tables and the comparison are imported
by the command that needs them, so that ``onefold run`` starts without them. The docstring of a
command is its help.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from typer import Argument, Option

import onefold
from onefold import Outcome, RunOptions, select_devices, supervise
from onefold.errors import LaunchError, OnefoldError, RunFailed
from onefold.system.process import Stopped, stopped_by_signals
from onefold.system.words import tell

__all__ = ["main"]


SCRIPT = {"allow_extra_args": True, "allow_interspersed_args": False}
"""Settings of a command that ends at its first argument, and hands on all others."""


def come_too_late(given: Sequence[str], options: Collection[str]) -> list[str]:
    """List the words among a script's arguments that are options of the command.

    >>> come_too_late(["--lr", "0.1", "--devices=2"], {"--devices", "-m"})
    ['--devices']
    """
    words = [each.partition("=")[0] for each in given if each.startswith("-")]
    return [word for word in words if word in options]


app = typer.Typer(
    name="onefold",
    help="Train on any number of devices and get the one model you would have got on one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_DEFAULTS = RunOptions()
_OF_CHECKPOINTS = ("every", "keep_last", "grace", "changed", "restarts", "restarts_with")
"""Options of ``onefold run`` that make no sense without ``--checkpoint``."""
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_USAGE = 2
"""The exit code of a program that cannot use its arguments."""

Script = Annotated[
    str | None,
    Argument(help="The script, or with -m the module; what follows it are its own arguments."),
]
Module = Annotated[bool, Option("-m", help="Run a module instead of a script, as python -m does.")]
Devices = Annotated[str, Option(help="N, auto, cpu:N, or a list of GPUs such as cuda:1,cuda:3.")]
_PLACEMENT_VARIABLE = "ONEFOLD_PLACEMENT"
PlacementOption = Annotated[
    str,
    Option(
        envvar=_PLACEMENT_VARIABLE,
        help="Where parameters lie: replicate (replicate:state: the optimizer's state as well), "
        "shard, offload or pipeline (pipeline:2: pipelines of two devices side by side).",
    ),
]
Home = Annotated[
    Path | None, Option(help="Folder on a disk for the file of --placement offload; else TMPDIR.")
]
Exchange = Annotated[str, Option(help="auto, shared or collective.")]
Timeout = Annotated[float, Option(help="Seconds that a device waits for another one.")]


@app.command(context_settings=SCRIPT)
def run(
    context: typer.Context,
    script: Script = None,
    module: Module = False,
    devices: Devices = "auto",
    placement: PlacementOption = "replicate",
    home: Home = None,
    exchange: Exchange = "auto",
    timeout: Timeout = _DEFAULTS.timeout_s,
    record: Annotated[
        Path | None,
        Option(help="Write the record of the run into this folder (that of --checkpoint)."),
    ] = None,
    profile: Annotated[
        Path | None, Option(help="Write a timeline into this folder, to open in Perfetto.")
    ] = None,
    logs: Annotated[
        Path | None,
        Option(help="Keep the output of the other devices in this folder, as device-1.log."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        Option(help="Go on from the newest checkpoint in this folder, and write new ones."),
    ] = None,
    every: Annotated[
        str,
        Option(help="From one checkpoint to the next: steps, time, or both (200; 10m; 500,1h)."),
    ] = str(_DEFAULTS.every),
    keep_last: Annotated[
        int, Option(help="How many of the newest checkpoints stay.")
    ] = _DEFAULTS.keep_last,
    grace: Annotated[
        float, Option(help="Seconds for saving after a signal to stop.")
    ] = _DEFAULTS.grace_s,
    changed: Annotated[
        str | None,
        Option(help="What differs on purpose from the run that was saved, such as seed."),
    ] = None,
    restarts: Annotated[
        int, Option(help="Start again after so many crashes without progress.")
    ] = _DEFAULTS.restarts,
    restarts_with: Annotated[
        Literal["same", "fewer"],
        Option(help="The same devices, or fewer: without one that was lost."),
    ] = _DEFAULTS.restarts_with,
    audit: Annotated[
        float, Option(help="Compute this share of all shards on another device as well.")
    ] = _DEFAULTS.audit,
    audit_finds: Annotated[
        Literal["heal", "stop"],
        Option(help="After a result that was wrong once, go on with the right one, or stop."),
    ] = "heal",
) -> None:
    """Run a script on the devices of this machine.

    With --checkpoint, the first SIGTERM, SIGHUP or Ctrl-C has the run save itself at the end of its
    step and end with exit code 75; the same command goes on. The second one ends it at once.
    SIGUSR1 and SIGUSR2, by which schedulers give notice, have it save itself as well.
    """
    # All that is wrong with the command is refused here, before any process is started.
    command = command_of(script, module, context.args)
    for folder in (profile, record):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    steps, seconds = _every(every)
    if checkpoint is not None:
        if checkpoint.exists() and not checkpoint.is_dir():
            raise LaunchError(f"--checkpoint {checkpoint}: expected a folder, this is a file")
        checkpoint.mkdir(parents=True, exist_ok=True)
    elif given := [each for each in _OF_CHECKPOINTS if _is_given(context, each)]:
        named = ", ".join(f"--{each.replace('_', '-')}" for each in given)
        raise LaunchError(f"{named}: expected with --checkpoint, which names the directory")
    # Absolute paths: the script may change its folder before a worker uses them.
    options = RunOptions(
        placement=placement,
        home=_folder(home, placement),
        exchange=exchange,  # type: ignore[arg-type]  # RunOptions checks it
        timeout_s=timeout,
        checkpoint=_absolute(checkpoint),
        every=steps,
        every_s=seconds,
        keep_last=keep_last,
        grace_s=grace,
        changed=tuple(changed.split(",")) if changed else (),
        restarts=restarts,
        restarts_with=restarts_with,
        record=_absolute(record),
        profile=_absolute(profile),
        logs=_absolute(logs),
        audit=audit,
        audit_stops=audit_finds == "stop",
    )
    outcome = supervise(command, select_devices(devices), options)
    _tell(outcome)
    _tell_of_late_options(context, command, outcome)
    raise typer.Exit(outcome.exit_code)


@app.command(context_settings=SCRIPT)
def verify(
    context: typer.Context,
    script: Script = None,
    module: Module = False,
    devices: Annotated[str, Option(help="Counts to compare: 1,2,3 or cpu:1,2,3.")] = "1,2",
    steps: Annotated[int, Option(min=1, help="Steps of each Trainer to compare.")] = 5,
    trainers: Annotated[
        int | None, Option(min=1, help="End the script after so many Trainers.", show_default="all")
    ] = None,
    resume: Annotated[
        int,
        Option(min=0, help="Instead, stop the script at so many random steps, and resume it."),
    ] = 0,
    placement: Annotated[
        str,
        Option(
            envvar=_PLACEMENT_VARIABLE,
            show_envvar=False,  # it names one, and this may be several
            help="Placements, each with every count: replicate,shard.",
        ),
    ] = "replicate",
    home: Home = None,
    exchange: Exchange = "auto",
    timeout: Timeout = _DEFAULTS.timeout_s,
) -> None:
    """Run a script on several device counts and say whether the bits and the mathematics agree.

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
        home=_folder(home, placement),
        exchange=exchange,  # type: ignore[arg-type]  # RunOptions checks it
        timeout_s=timeout,
        quiet=True,
        probe_steps=steps,
        probe_trainers=trainers or 0,
    )
    if resume:
        ways = read_ways(devices, placement)
        raise typer.Exit(verify_resume(command, ways, options=options, stops=resume))
    raise typer.Exit(verify_script(command, devices, placement=placement, options=options))


@app.command(context_settings=SCRIPT)
def plan(
    context: typer.Context,
    script: Script = None,
    module: Module = False,
    devices: Annotated[str, Option(help="Device counts, such as 1,2,4.")] = "1,2,4",
    home: Annotated[Path | None, Option(help="As for onefold run --placement offload.")] = None,
) -> None:
    """Show where a script's model may be cut, and what it would take on so many devices.

    The script runs until it makes its first Trainer, and ends there: nothing is trained.
    """
    from onefold.cli.plan import plan_script

    command = command_of(script, module, context.args)
    options = RunOptions(placement="offload", home=_folder(home, "offload"))
    raise typer.Exit(plan_script(command, devices, options=options))


@app.command("devices")
def show_devices() -> None:
    """Show what this machine has to compute on."""
    from onefold.cli.plan import device_table

    Console().print(device_table(onefold.list_devices()))


@app.command()
def demo(
    output: Annotated[Path, Option(help="Where the learning curve goes.")] = Path("runs/demo"),
    devices: Devices = "auto",
) -> None:
    """Train a small network on real digits, on one device and then on all, and compare."""
    from onefold.jobs.digits import demo as run_demo

    raise typer.Exit(run_demo(output, devices=devices))


@app.command()
def predict() -> None:
    """Use a trained run on files or folders: classes to CSV or JSON, masks to PNG."""


@app.command()
def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Folders of runs.")],
    output: Annotated[
        Path | None,
        Option(
            help="The page to write: of one run, its report; of several, the comparison. "
            "[default: report.html in the run, or runs/comparison.html]"
        ),
    ] = None,
) -> None:
    """Build the report of each run again; of several, a page that compares them as well."""
    from onefold.jobs.report import build_report, compare_runs

    if output is not None and output.is_dir():
        raise ValueError(f"--output {output}: expected a file for the page, this is a folder")
    if len(runs) == 1:
        print(build_report(runs[0], output))
        return
    for run_folder in runs:
        print(build_report(run_folder))
    print(compare_runs(runs, output or Path("runs/comparison.html")))


train_app = typer.Typer(
    help="Train a ready-made job on your own data, with one command.", no_args_is_help=True
)
app.add_typer(train_app, name="train")
record_app = typer.Typer(help="Read the record of a run.", no_args_is_help=True)
app.add_typer(record_app, name="record")


@record_app.callback()
def _group() -> None:
    """Have `show` be named, though it is the only command."""


@record_app.command()
def show(
    folder: Annotated[Path, Argument(metavar="RUN", help="A run's folder, or its run.record.")],
    as_json: Annotated[bool, Option("--json", help="One JSON object a line, of all.")] = False,
    step: Annotated[int | None, Option(help="Only this step, with its shards.")] = None,
) -> None:
    """Show what was computed in a run: its steps, their shards, and who took part."""
    from onefold.cli.record import show_record

    show_record(folder, as_json=as_json, step=step)


@app.command()
def replay(
    folder: Annotated[
        Path, Argument(metavar="RUN", help="A run's folder, its run.record, or a bundle.")
    ],
    step: Annotated[int, Option(min=0, help="Number of the step; not of a bundle.")] = 0,
    shard: Annotated[int | None, Option(min=0, help="Look into this shard alone.")] = None,
    devices: Annotated[
        str, Option(help="As for onefold run.", show_default="one of the kind that the run had")
    ] = "",
    placement: PlacementOption = "replicate",
    bundle: Annotated[
        Path | None, Option(help="Put the step into this file, to be computed elsewhere.")
    ] = None,
    call: Annotated[
        str, Option(metavar="FILE:FUNCTION", help="Call function(model, shards, step) there.")
    ] = "",
    pdb: Annotated[bool, Option("--pdb", help="Open a Python prompt in the step.")] = False,
) -> None:
    """Compute one step of a run once more, on any devices, and look into it.

    The run's command goes on from the checkpoint before the step. Every step on the way is compared
    with the record. What the step consists of is printed: its loss, the norm of each parameter's
    gradient, the samples of each shard. Nothing is written to the run.

    Exit code 0: all shards have the bits of the record; 1: they differ; 2: the run could not be
    computed again.
    """
    from onefold.cli.replay import replay_step

    raise typer.Exit(
        replay_step(
            folder,
            step,
            shard=shard,
            devices=devices,
            placement=placement,
            bundle=bundle,
            function=call,
            prompt=pdb,
        )
    )


@app.command()
def why(
    folder: Annotated[Path, Argument(metavar="RUN", help="A run's folder, or its run.record.")],
    step: Annotated[
        int | None, Option(min=1, help="This step.", show_default="the first that stands out")
    ] = None,
    devices: Annotated[
        str, Option(help="As for onefold run.", show_default="one of the kind that the run had")
    ] = "",
    placement: PlacementOption = "replicate",
) -> None:
    """Say where a loss or norm first jumped, and which shard, sample and operation did it.

    Exit code 0: something stands out; 1: nothing does; 2: the run could not be computed again.
    """
    from onefold.cli.replay import explain

    raise typer.Exit(explain(folder, step, devices=devices, placement=placement))


@app.command(context_settings=SCRIPT)
def compare(
    context: typer.Context,
    first: Annotated[
        str | None, Argument(metavar="A", help="A run's folder, or its run.record.")
    ] = None,
    devices: Annotated[
        str, Option(help="As for onefold run.", show_default="one of the kind that the run had")
    ] = "",
    git: Annotated[
        str | None,
        Option(metavar="GOOD..BAD", help="Name the commit that changed the bits of a command."),
    ] = None,
) -> None:
    """Say where two runs differ first, A and B, and why: step, shard, sample, operation.

    With --git GOOD..BAD -- onefold run ..., the command is run in worktrees of the commits between
    the two, and the first one whose bits differ is named.

    Exit code 0: nothing differs; 1: something does; 2: a run could not be used.
    """
    from onefold.cli.comparing import compare_runs, find_commit

    given = [each for each in (first, *context.args) if each is not None]
    if git is not None:
        raise typer.Exit(find_commit(git, given[given[0] == "--" :] if given else []))
    if len(given) != 2:
        raise LaunchError(
            f"expected two runs to compare, behind all options, got {' '.join(given) or 'none'}"
        )
    raise typer.Exit(compare_runs(*map(Path, given), devices=devices))


def main() -> None:
    """Run the command line; errors that were foreseen become one line instead of a traceback."""
    launched = False
    try:
        launched = onefold.is_launched()  # refused if a launcher has left something out
        signals: AbstractContextManager[list[signal.Signals]] = nullcontext([])
        with signals if launched else stopped_by_signals() as came:
            try:
                _run_command()
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


def _run_command() -> None:
    """Run the command that ``sys.argv`` names."""
    # Commands that are made from the options of the jobs, whose modules take long to import.
    if sys.argv[1:2] in (["train"], ["predict"]):
        from onefold.cli.train import add_jobs, add_predict

        add_jobs(train_app)
        add_predict(app)
    app()


def _absolute(path: Path | None) -> str:
    return str(path.absolute()) if path else ""


def _folder(home: Path | None, placement: str) -> str:
    """The folder of ``--home``; empty if none is named."""
    if home is None:
        return ""
    if all(RunOptions(placement=each.strip()).keeps_whole for each in placement.split(",")):
        raise LaunchError(
            f"--home {home}: expected --placement offload, shard or pipeline with it, which may "
            f"have a file there"
        )
    return _absolute(home)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _every(text: str) -> tuple[int, float]:
    """Read how far apart checkpoints are: 200, 10m, or 200,10m for whichever comes first.

    Returns:
        Steps and seconds, of which one may be 0.

    Raises:
        LaunchError: it is neither a number of steps nor a time.
    """
    steps, seconds = 0, 0.0
    for part in text.split(","):
        number, unit = (part[:-1], part[-1]) if part[-1:] in _SECONDS else (part, "")
        if not (number.isascii() and number.isdecimal() and int(number)):
            raise LaunchError(
                f"--every {text}: expected a number of steps of at least 1, a time such as 30s, "
                f"10m or 1h, or both as in 500,1h"
            )
        if unit:
            seconds = float(int(number) * _SECONDS[unit])
        else:
            steps = int(number)
    return steps, seconds


def command_of(script: str | None, module: bool, rest: list[str]) -> list[str]:
    """Return what a worker has to run; a script must exist.

    Raises:
        LaunchError: there is no script of this name, or none was given.
    """
    if script is None:
        raise LaunchError("expected a script, or -m and the name of a module")
    if module:
        return ["-m", script, *(rest[1:] if rest[:1] == ["--"] else rest)]
    if not Path(script).is_file():
        raise LaunchError(
            f"there is no script {script}: expected the path of a Python file, from this folder "
            f"({Path.cwd()})"
        )
    return [script, *rest]


def _tell(outcome: Outcome) -> None:
    """Report how a run ended; stdout is left to the script."""
    if outcome.timeline:
        tell(f"timeline: {outcome.timeline} (opens in ui.perfetto.dev)")
    if not outcome.exit_code:
        return
    print(outcome.traceback, file=sys.stderr, end="")
    tell(outcome.message)
    if outcome.logs:
        tell(f"output of the other devices: {outcome.logs}")


def _tell_of_late_options(context: typer.Context, command: list[str], outcome: Outcome) -> None:
    """Where a script has refused its arguments, say which of them are ours elsewhere."""
    # As argparse, click and typer end a program; an exception would have come with a traceback.
    if outcome.exit_code != _USAGE or outcome.traceback:
        return
    given = command[2:] if command[0] == "-m" else command[1:]
    own = {name for option in context.command.params for name in option.opts}
    late = come_too_late(given, own)
    if late:
        tell(
            f"what stands after the script is the script's: give {', '.join(late)} before it if "
            f"onefold run was meant"
        )
