"""The commands of ``onefold``.

The modules that the commands call do the work; ``onefold run`` is in `onefold.cli.running`. Other
distributions add commands through entry points of the group ``onefold.commands``, each of which
names a `LateCommand`; onefold-jobs adds ``train``, ``predict`` and others.

Note: imports inside commands
-----------------------------
typer reads all commands before it runs one. Each command imports what it needs, so that ``onefold
run`` starts without the tables and the comparison. Entry points are read only if the command is not
one of onefold's own. A command's docstring is its help; the first sentence fits into one line of
the list of commands.
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
from onefold.options import variable
from onefold.system.stop_signals import Stopped, stopped_by_signals
from onefold.system.words import in_shell, tell, visible

__all__ = ["main"]

_TRAIN, _CHECK, _LOOK = "Train", "Check before a run", "Inspect a run"
_DEFAULTS = RunOptions()
_OF_JOBS = ("train", "tune", "init", "predict", "evaluate", "export", "report")
"""Commands of onefold-jobs; an error names the extra that installs them."""


class _Onefold(Commands):
    """The commands declared here, and those of other distributions' entry points."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, in their order in the list."""
        self._add_others()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return a command; None if no command has this name.

        Raises:
            LaunchError: the command belongs to onefold-jobs, which is not installed.
        """
        if name not in self.commands:
            self._add_others()
        if name not in self.commands and name in _OF_JOBS:
            raise LaunchError(
                f"onefold {name} is part of onefold-jobs, which is not installed. Run: pip install "
                f"'onefold[jobs]'"
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
    """Train on any number of devices and get bit-identical weights.

    Exit codes: 0: success; 1: a comparison found a difference, or the script failed; 2: the command
    or its data is not valid; 75: the run saved itself after a signal, and the same command resumes
    it; 128 + N: the run was ended by signal N.
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
        Path, Option("--output", "-o", metavar="DIR", help="Folder for the learning curves.")
    ] = Path("runs/demo"),
    devices: Devices = "auto",
) -> None:
    """Train on real digits on one device and on all, and compare the bits."""
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
            help="End the script after this many Trainers.",
            show_default="all",
        ),
    ] = None,
    resume: Annotated[
        int,
        Option(
            min=0,
            metavar="N",
            help="Test resuming instead: stop at N random steps and resume.",
        ),
    ] = 0,
    placement: Annotated[
        str,
        Option(
            envvar=variable("placement"),
            show_envvar=False,  # the variable has one placement, this option several
            metavar="PLACEMENTS",
            help="Placements to compare, such as replicate,partition.",
        ),
    ] = DEFAULT_PLACEMENT,
    as_json: AsJson = False,
    offload_dir: OffloadDir = None,
    exchange: Exchange = "auto",
    timeout: Timeout = _DEFAULTS.timeout_s,
) -> None:
    """Check that a script computes the same bits on several device counts.

    The bits of every Trainer are compared after each of its first steps. The script then continues
    to its end or its next Trainer, but computes no more steps: each returns the last result again.
    Its own code still runs and takes time; --trainers 1 ends the script at that point. Then the
    same steps run once more in float64, without dropout and with batch norm in eval mode. Each
    batch is also computed as a single shard, as in a plain loop: loss and gradient must agree to
    1e-9. If they do not, the likely cause is reported: a sum that is read as a mean, class weights,
    ignored targets, a loss of the whole batch, a batch that is cut along time. The whole batch must
    fit on one device.

    With --resume N, the script runs to its end once, and then N times with a stop at a random step.
    Each stopped run resumes on another of the device counts, as with onefold run --checkpoint. The
    model, all steps and all results must be the same at the end.

    During the check, trainer.save, torch.save and safetensors write to a temporary folder (not with
    --resume), and trainer.load(..., if_any=True) finds only what was saved there. Other files of
    the script are written as usual.

    Exit codes: 0: everything agrees; 1: it does not, nothing was trained, or onefold rejects the
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
    """Show how much memory a script's model needs on each device.

    It also shows the stages into which the model can be split. The script runs until it creates
    its first Trainer, and ends there: nothing is trained.
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
Yes = Annotated[bool, Option("--yes", help="Run code from a bundle or another user's record.")]
OneOfItsKind = Annotated[
    str,
    Option(
        metavar="N|auto|LIST",
        help="Devices to compute on, as for onefold run.",
        show_default="one of the run's type",
    ),
]

record_app = typer.Typer(
    cls=Commands, help="Read the record of a run.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(record_app, name="record", rich_help_panel=_LOOK)


@record_app.callback()
def _group() -> None:
    """Make `show` a named subcommand, although it is the only one."""


@declare(
    record_app,
    "show",
    group="Commands",
    examples=[
        ("onefold record show ckpt", "the last steps"),
        ("onefold record show ckpt --step 40", "one step, with its shards"),
        ("onefold record show ckpt --json", "everything, one entry per line"),
    ],
)
def show(
    folder: RunFolder,
    as_json: Annotated[
        bool, Option("--json", help="Print all entries, one JSON object per line.")
    ] = False,
    step: Annotated[
        int | None, Option(metavar="N", help="Show only this step, with its shards.")
    ] = None,
) -> None:
    """Show the steps of a run, their shards, and the devices."""
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
            min=1, metavar="N", help="Step to explain.", show_default="the first that stands out"
        ),
    ] = None,
    devices: OneOfItsKind = "",
    placement: PlacementOption = DEFAULT_PLACEMENT,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Find the shard, sample and operation that made a loss or norm jump.

    Exit codes: 0: something stands out; 1: nothing does; 2: the run could not be recomputed.
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
        ("onefold replay ckpt --step 40 --bundle step.zip", "for another machine"),
    ],
)
def replay(
    folder: Annotated[
        Path, Argument(metavar="RUN", help="A run's folder, its run.record, or a bundle.")
    ],
    step: Annotated[
        int, Option(min=0, metavar="N", help="Step to recompute. A bundle has only one.")
    ] = 0,
    shard: Annotated[
        int | None, Option(min=0, metavar="K", help="Inspect only this shard, sample by sample.")
    ] = None,
    devices: OneOfItsKind = "",
    placement: PlacementOption = DEFAULT_PLACEMENT,
    bundle: Annotated[
        Path | None,
        Option(metavar="FILE", help="File to store the step in, for another machine."),
    ] = None,
    call: Annotated[
        str, Option(metavar="FILE:FUNCTION", help="Call function(model, shards, step) in the step.")
    ] = "",
    pdb: Annotated[bool, Option("--pdb", help="Open a Python prompt in the step.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Recompute one step of a run, on any devices.

    The run's command resumes from the checkpoint before the step. Every recomputed step is compared
    with the record. The details of the step are printed: its loss, the norm of each parameter's
    gradient, the samples of each shard. Nothing is written to the run.

    Exit codes: 0: all shards have the bits of the record; 1: they differ; 2: the run could not be
    recomputed.
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
        ("onefold compare --git v1..HEAD -- onefold run a.py", "find the commit"),
    ],
)
def compare(
    context: typer.Context,
    first: Annotated[
        str | None, Argument(metavar="A B", help="Folders of two runs, or their run.record.")
    ] = None,
    devices: OneOfItsKind = "",
    git: Annotated[
        str | None,
        Option(metavar="GOOD..BAD", help="Find the commit that changed a command's bits."),
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Find where two runs differ first, and why.

    With --git GOOD..BAD -- onefold run ..., the command runs in worktrees of the commits between
    the two, and the first commit whose bits differ is reported.

    Exit codes: 0: nothing differs; 1: something does; 2: a run could not be used.
    """
    from onefold.cli.records import compare_runs, find_commit

    given = [each for each in (first, *context.args) if each is not None]
    if git is not None and as_json:
        raise LaunchError("--json cannot be combined with --git, which prints text only")
    if git is not None:
        raise typer.Exit(find_commit(git, given[given[0] == "--" :] if given else []))
    if len(given) != 2:
        raise LaunchError(
            f"compare takes two runs, after all options, but got {in_shell(*given) or 'none'}"
        )
    code = compare_runs(*map(Path, given), devices=devices, confirmed=yes, as_json=as_json)
    if code:
        tell_next(f"onefold replay {in_shell(given[0])} --step N --shard K")
    raise typer.Exit(code)


def main() -> None:
    """Run the command line; print expected errors as one line instead of a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Like stderr: file names may contain bytes that are not UTF-8.
        sys.stdout.reconfigure(errors="backslashreplace")
    launched = False
    try:
        launched = onefold.is_launched()  # raises if a launcher did not set all variables
        signals: AbstractContextManager[list[signal.Signals]] = nullcontext([])
        with signals if launched else stopped_by_signals() as came:
            try:
                app()
            except SystemExit as end:
                # SIGTERM and SIGHUP raise a subclass of KeyboardInterrupt, which typer takes for
                # Ctrl-C, and exits with the code of SIGINT instead of that of the real signal.
                if came and end.code == 128 + signal.SIGINT:
                    raise Stopped(came[0]) from None
                raise
    except Stopped as stop:
        tell(f"stopped by {stop.number.name}")
        sys.exit(128 + stop.number)
    except (OnefoldError, ValueError, OSError) as error:
        if launched:
            raise  # in a worker, the launcher reports errors and handles signals
        text = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            # Without the error number.
            text = f"{visible(str(error.filename))}: {error.strerror}"
        tell(text)
        sys.exit(error.exit_code if isinstance(error, RunFailed) else 2)
