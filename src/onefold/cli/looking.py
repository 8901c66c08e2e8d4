"""The commands that look into a run that was recorded: record, why, replay, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from onefold.cli.help import Commands, declare
from onefold.cli.running import DEFAULT_PLACEMENT, SCRIPT, AsJson, PlacementOption, tell_next
from onefold.errors import LaunchError
from onefold.system.words import in_shell

__all__ = ["looking"]

_GROUP = "Look into a run"

looking = typer.Typer()
RunFolder = Annotated[Path, Argument(metavar="RUN", help="A run's folder, or its run.record.")]
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
looking.add_typer(record_app, name="record", rich_help_panel=_GROUP)


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
    from onefold.cli.record import show_record

    show_record(folder, as_json=as_json, step=step)
    tell_next(f"onefold why {in_shell(folder)}")


@declare(
    looking,
    "why",
    group=_GROUP,
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
    as_json: AsJson = False,
) -> None:
    """Say which shard, sample and operation made a loss or norm jump.

    Exit code 0: something stands out; 1: nothing does; 2: the run could not be computed again.
    """
    from onefold.cli.replay import explain

    code = explain(folder, step, devices=devices, placement=placement, as_json=as_json)
    if not code:
        tell_next(f"onefold replay {in_shell(folder)} --step N --pdb")
    raise typer.Exit(code)


@declare(
    looking,
    "replay",
    group=_GROUP,
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
        as_json=as_json,
    )
    if bundle is not None:
        tell_next(f"onefold replay {in_shell(bundle)}")
    raise typer.Exit(code)


@declare(
    looking,
    "compare",
    group=_GROUP,
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
    as_json: AsJson = False,
) -> None:
    """Say where two runs differ first, and why.

    With --git GOOD..BAD -- onefold run ..., the command is run in worktrees of the commits between
    the two, and the first one whose bits differ is named.

    Exit code 0: nothing differs; 1: something does; 2: a run could not be used.
    """
    from onefold.cli.comparing import compare_runs, find_commit

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
    code = compare_runs(*map(Path, given), devices=devices, as_json=as_json)
    if code:
        tell_next(f"onefold replay {in_shell(given[0])} --step N --shard K")
    raise typer.Exit(code)
