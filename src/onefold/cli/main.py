"""The commands of ``onefold``.

What the commands do is in the modules that they call; ``onefold run`` is in `onefold.cli.running`.
Other distributions add commands by entry points of the group ``onefold.commands``, each of which
names a `LateCommand`; onefold-jobs adds ``train``, ``predict`` and others.

Note: imports inside of commands
--------------------------------
typer reads every command before it runs one. A command imports what it needs, so that
``onefold run`` starts without the tables and the comparison. Entry points are read only if the
command is not one of onefold's own. The docstring of a command is its help; its first sentence fits
a line of the list of commands.
"""

from __future__ import annotations

import io
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

import onefold
from onefold import RunOptions
from onefold.cli import ENTRY_POINTS, Commands, declare, tell_next
from onefold.cli.running import (
    DEFAULT_PLACEMENT,
    PLACEMENT_VARIABLE,
    SCRIPT,
    AsJson,
    Devices,
    Exchange,
    Module,
    OffloadDir,
    PlacementOption,
    Script,
    Timeout,
    absolute_dir,
    command_of,
    run,
)
from onefold.errors import LaunchError, OnefoldError, RunFailed
from onefold.system.stop_signals import Stopped, stopped_by_signals
from onefold.system.words import in_shell, tell, visible

__all__ = ["main"]

_TRAIN, _CHECK, _LOOK = "Train", "Check before a run", "Look into a run"
_DEFAULTS = RunOptions()
_OF_JOBS = ("train", "init", "predict", "evaluate", "export", "report")
"""Commands of onefold-jobs: an error names the extra that installs them."""


class _Onefold(Commands):
    """The commands declared here, and those that entry points of other distributions name."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, in the order of the list."""
        self._add_others()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return a command, or None if there is none of that name.

        Raises:
            LaunchError: the command is part of the jobs, which are not installed.
        """
        if name not in self.commands:
            self._add_others()
        if name not in self.commands and name in _OF_JOBS:
            raise LaunchError(
                f"onefold {name} is part of the jobs, which are not installed here; run: "
                f"pip install 'onefold[jobs]'"
            )
        return super().get_command(ctx, name)

    def _add_others(self) -> None:
        for each in entry_points(group=ENTRY_POINTS):
            if each.name not in self.commands:
                self.commands[each.name] = each.load()


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


@declare(app, "demo", group=_TRAIN, examples=[("onefold demo", "takes a minute")])
def demo(
    output: Annotated[
        Path, Option("--output", "-o", metavar="DIR", help="Folder for the learning curve.")
    ] = Path("runs/demo"),
    devices: Devices = "auto",
) -> None:
    """Train on real digits, on one device and on all, and compare."""
    from onefold.cli.demo import demo as run_demo

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
    ] = DEFAULT_PLACEMENT,
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
    from onefold.cli.verify import read_ways, verify_resume, verify_script

    command = command_of(script, module, context.args)
    options = RunOptions(
        offload_dir=absolute_dir(offload_dir, placement),
        exchange=exchange,  # type: ignore[arg-type]  # RunOptions checks it
        timeout_s=timeout,
        quiet=True,
        tools={"verify": {"steps": steps, "trainers": trainers or 0}},
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


RunFolder = Annotated[Path, Argument(metavar="RUN", help="A run's folder, or its run.record.")]
Yes = Annotated[bool, Option("--yes", help="Run what a file of another user, or a bundle, names.")]
OneOfItsKind = Annotated[
    str,
    Option(
        metavar="N|auto|LIST",
        help="Devices to compute on, as for onefold run.",
        show_default="one of the kind that the run had",
    ),
]

record_app = typer.Typer(
    cls=Commands, help="Read the record of a run.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(record_app, name="record", rich_help_panel=_LOOK)


@record_app.callback()
def _group() -> None:
    """Have `show` be named, though it is the only command."""


@declare(
    record_app,
    "show",
    group="Commands",
    examples=[
        ("onefold record show ckpt", "the last steps"),
        ("onefold record show ckpt --step 40", "one step, with its shards"),
        ("onefold record show ckpt --json", "everything, a line for each entry"),
    ],
)
def show(
    folder: RunFolder,
    as_json: Annotated[
        bool, Option("--json", help="Print all entries, one JSON object a line.")
    ] = False,
    step: Annotated[
        int | None, Option(metavar="N", help="Only this step, with its shards.")
    ] = None,
) -> None:
    """Show the steps of a run, their shards, and who took part."""
    from onefold.cli.records import show_record

    show_record(folder, as_json=as_json, step=step)
    tell_next(f"onefold why {in_shell(folder)}")


@declare(
    app,
    "why",
    group=_LOOK,
    examples=[("onefold why ckpt", "the first step that stands out")],
)
def why(
    folder: RunFolder,
    step: Annotated[
        int | None,
        Option(
            min=1, metavar="N", help="Look at this step.", show_default="the first that stands out"
        ),
    ] = None,
    devices: OneOfItsKind = "",
    placement: PlacementOption = DEFAULT_PLACEMENT,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Say which shard, sample and operation made a loss or norm jump.

    Exit code 0: something stands out; 1: nothing does; 2: the run could not be computed again.
    """
    from onefold.cli.replay import explain

    where = {"devices": devices, "placement": placement}
    code = explain(folder, step, **where, confirmed=yes, as_json=as_json)
    if not code:
        tell_next(f"onefold replay {in_shell(folder)} --step N --pdb")
    raise typer.Exit(code)


@declare(
    app,
    "replay",
    group=_LOOK,
    examples=[
        ("onefold replay ckpt --step 40", "its norms and samples"),
        ("onefold replay ckpt --step 40 --shard 3 --pdb", "a prompt in the step"),
        ("onefold replay ckpt --step 40 --bundle step.zip", "to be computed elsewhere"),
    ],
)
def replay(
    folder: Annotated[
        Path, Argument(metavar="RUN", help="A run's folder, its run.record, or a bundle.")
    ],
    step: Annotated[
        int, Option(min=0, metavar="N", help="Number of the step. A bundle has but one.")
    ] = 0,
    shard: Annotated[
        int | None, Option(min=0, metavar="K", help="Look into this shard alone.")
    ] = None,
    devices: OneOfItsKind = "",
    placement: PlacementOption = DEFAULT_PLACEMENT,
    bundle: Annotated[
        Path | None,
        Option(metavar="FILE", help="Put the step into this file, to be computed elsewhere."),
    ] = None,
    call: Annotated[
        str, Option(metavar="FILE:FUNCTION", help="Call function(model, shards, step) there.")
    ] = "",
    pdb: Annotated[bool, Option("--pdb", help="Open a Python prompt in the step.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Compute one step of a run again, on any devices.

    The run's command goes on from the checkpoint before the step. Every step on the way is compared
    with the record. What the step consists of is printed: its loss, the norm of each parameter's
    gradient, the samples of each shard. Nothing is written to the run.

    Exit code 0: all shards have the bits of the record; 1: they differ; 2: the run could not be
    computed again.
    """
    from onefold.cli.replay import replay_step

    code = replay_step(
        folder,
        step,
        shard=shard,
        devices=devices,
        placement=placement,
        bundle=bundle,
        function=call,
        prompt=pdb,
        confirmed=yes,
        as_json=as_json,
    )
    if bundle is not None:
        tell_next(f"onefold replay {in_shell(bundle)}")
    raise typer.Exit(code)


@declare(
    app,
    "compare",
    group=_LOOK,
    context_settings=SCRIPT,
    examples=[
        ("onefold compare runs/a runs/b", "the first difference"),
        ("onefold compare --git v1..HEAD -- onefold run a.py", "by which commit"),
    ],
)
def compare(
    context: typer.Context,
    first: Annotated[
        str | None, Argument(metavar="A B", help="Two runs' folders, or their run.record.")
    ] = None,
    devices: OneOfItsKind = "",
    git: Annotated[
        str | None,
        Option(metavar="GOOD..BAD", help="Name the commit that changed the bits of a command."),
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Say where two runs differ first, and why.

    With --git GOOD..BAD -- onefold run ..., the command is run in worktrees of the commits between
    the two, and the first one whose bits differ is named.

    Exit code 0: nothing differs; 1: something does; 2: a run could not be used.
    """
    from onefold.cli.records import compare_runs, find_commit

    given = [each for each in (first, *context.args) if each is not None]
    if git is not None and as_json:
        raise LaunchError(
            "--json: expected two runs to compare, got --git, which prints text alone"
        )
    if git is not None:
        raise typer.Exit(find_commit(git, given[given[0] == "--" :] if given else []))
    if len(given) != 2:
        raise LaunchError(
            f"expected two runs to compare, behind all options, got {in_shell(*given) or 'none'}"
        )
    code = compare_runs(*map(Path, given), devices=devices, confirmed=yes, as_json=as_json)
    if code:
        tell_next(f"onefold replay {in_shell(given[0])} --step N --shard K")
    raise typer.Exit(code)


def main() -> None:
    """Run the command line; errors that were foreseen become one line instead of a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As stderr does: names of files may hold bytes that are not UTF-8.
        sys.stdout.reconfigure(errors="backslashreplace")
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
            # Without the system's number for it.
            text = f"{visible(str(error.filename))}: {error.strerror}"
        tell(text)
        sys.exit(error.exit_code if isinstance(error, RunFailed) else 2)
