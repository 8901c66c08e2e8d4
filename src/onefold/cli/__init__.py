"""The command line: how commands are declared, also those of other distributions, and their help.

The help of a command has its usage, one sentence, examples, further paragraphs, and its options
under the headings that they were declared with, in 80 columns. `Commands` lists commands likewise.
Plain text, so that it looks the same on a terminal, in a file and in the documentation. The words
of messages (`counted`, `listed`, `in_shell`, `tell`, `visible`) are those of onefold's own
commands.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from onefold.system.safe_files import json_text, local_path
from onefold.system.words import counted, in_shell, listed, seconds_of, tell, visible

__all__ = [
    "Command",
    "Commands",
    "LateCommand",
    "Screen",
    "counted",
    "declare",
    "in_shell",
    "listed",
    "print_json",
    "seconds_of",
    "tell",
    "tell_next",
    "visible",
]

ENTRY_POINTS = "onefold.commands"
"""The group of entry points by which other distributions add commands."""
_Function = TypeVar("_Function", bound=Callable[..., None])
_Record = tuple[str, str]
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for arguments that it cannot use; the class has no public name."""
_FEW = 3
"""If more commands have an option, an error names none of them."""
_OTHER = "Other"
"""The heading of what was declared without one; it comes last."""


def with_examples(text: str, examples: Iterable[_Record]) -> str:
    """Put examples behind the first paragraph of a help.

    Args:
        text: the help; its first paragraph is one sentence.
        examples: commands, each with what it does.

    >>> print(with_examples("Sum up.", [("onefold sum a", "the rows of a")]).replace("\\b", "|"))
    Sum up.
    <BLANKLINE>
    |
    Examples:
      onefold sum a  # the rows of a
    """
    pairs = list(examples)
    first, _, rest = text.strip().partition("\n\n")
    width = max((len(command) for command, _ in pairs), default=0)
    lines = [f"  {command:<{width}}  # {what}" for command, what in pairs]
    # By the first character of a paragraph, its lines are kept as they are.
    shown = ["\n".join(["\b", "Examples:", *lines])] if lines else []
    return "\n\n".join([first, *shown, *([rest] if rest else [])])


def declare(
    app: typer.Typer,
    name: str,
    *,
    group: str,
    examples: Sequence[_Record] = (),
    text: str = "",
    cls: type[Command] | None = None,
    **settings: Any,
) -> Callable[[_Function], _Function]:
    """Declare a function as a command.

    Args:
        app: what the command becomes part of.
        name: of the command.
        group: the heading under which it is listed.
        examples: commands, each with what it does.
        text: the help, where it is not the function's docstring.
        cls: class of the command; None for `Command`.
        settings: of `typer.Typer.command`.
    """

    def declared(function: _Function) -> _Function:
        # Without the indentation of a docstring, which paragraphs would keep.
        lines = (text or function.__doc__ or "").split("\n")
        help = with_examples("\n".join(line.strip() for line in lines), examples)
        app.command(name, cls=cls or Command, help=help, rich_help_panel=group, **settings)(
            function
        )
        return function

    return declared


class Command(TyperCommand):
    """A command whose help has its options under headings."""

    other_names: ClassVar[Mapping[str, str]] = {}
    """The names that other programs have for its options, without dashes, to suggest its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; say which other command has an option that this one has not."""
        try:
            rest = super().parse_args(ctx, args)
            for parameter in self.params:
                if isinstance(path := ctx.params.get(parameter.name), Path):
                    _refuse_address(max(parameter.opts, key=len), path)
            return rest
        except _UsageError as wrong:
            error: Any = wrong
            # The library that checks values begins all of its messages with these words.
            error.message = error.message.replace("Value error, ", "")
            others = getattr(getattr(ctx.parent, "command", None), "commands", {})
            name = getattr(error, "option_name", "")
            have = [each for each, its in others.items() if any(name in p.opts for p in its.params)]
            # Of the library's errors, that of an unknown option alone names similar ones.
            if hasattr(error, "possibilities"):
                usual = self.other_names.get(name.lstrip("-").replace("-", "_"), name)
                few = 0 < len(have) <= _FEW
                own = () if few else [each for p in self.params for each in p.opts]
                error.possibilities = difflib.get_close_matches(usual, own, 1)
                named = listed(f"{ctx.parent.command_path} {each}" for each in have)
                error.message += f" in {ctx.command_path}: it is one of {named}" if few else ""
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, each group under its heading."""
        found = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                argument = parameter.param_type_name == "argument"
                heading = "Arguments" if argument else getattr(parameter, "rich_help_panel", None)
                found.append((heading or _OTHER, record))
        _write(formatter, found)


class LateCommand(Command):
    """A command of another distribution, which is imported when it is called.

    An entry point of the group ``onefold.commands`` names an instance, in a module that imports
    little: ``onefold --help`` loads that of every command.

    Args:
        name: of the command.
        group: the heading under which ``onefold --help`` lists it.
        summary: its line in that list, one sentence.
        make: imports the command and returns it; called once.
    """

    def __init__(self, name: str, *, group: str, summary: str, make: Callable[[], Any]) -> None:
        super().__init__(name, help=summary, rich_help_panel=group)
        self._make = make

    @cached_property
    def made(self) -> Any:
        """The command itself."""
        return self._make()

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Read the arguments of the command itself."""
        return self.made.make_context(info_name, args, parent, **extra)


class Commands(TyperGroup):
    """Commands, listed under their headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options of all commands, and behind them the commands."""
        self.format_commands(ctx, formatter)
        records = [parameter.get_help_record(ctx) for parameter in self.get_params(ctx)]
        _write(formatter, [("Options", record) for record in records if record is not None])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, each group under its heading."""
        found = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                heading = getattr(command, "rich_help_panel", None) or "Commands"
                found.append((str(heading), (name, command.get_short_help_str(formatter.width))))
        _write(formatter, found)


def _refuse_address(name: str, path: Path) -> None:
    try:
        local_path(name, path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _write(formatter: Any, found: Iterable[tuple[str, _Record]]) -> None:
    groups: dict[str, list[_Record]] = {}
    for heading, record in found:
        groups.setdefault(heading, []).append(record)
    for heading, records in sorted(groups.items(), key=lambda group: group[0] == _OTHER):
        with formatter.section(heading):
            formatter.write_dl(records)


class Screen(Console):
    """Where the text of a command goes: stdout, or stderr if stdout has a JSON object.

    Text is shown as it is, without markup, and control characters in it are spelled out. Lines are
    printed each by itself, as a line break in a text may come from a file.

    Args:
        as_json: whether stdout has a JSON object.
        settings: of `rich.console.Console`.
    """

    def __init__(self, *, as_json: bool = False, **settings: Any) -> None:
        super().__init__(stderr=as_json, highlight=False, markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Make text, also of each cell of a table, what can be shown."""
        return super().render_str(visible(text), **settings)

    def headed(self, style: str, head: str, text: str = "") -> None:
        """Print a line that begins in a style."""
        self.print(Text.assemble((visible(head), style), visible(text)))


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    print(json_text(value))


def tell_next(command: str) -> None:
    """Name the command that usually comes next, in the last line; on terminals alone."""
    if sys.stderr.isatty():
        tell(f"next: {command}")
