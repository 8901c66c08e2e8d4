"""The command line: declares commands, including those of other distributions, and formats help.

The help of a command has its usage, one sentence, examples, further paragraphs, and its options
under the headings of their groups, in 80 columns. `Commands` formats lists of commands in the same
way. The help is plain text, so that it looks the same on a terminal, in a file and in the docs.
Other distributions format their messages with the functions of onefold's own commands: `counted`,
`listed`, `in_shell`, `tell`, `visible`.
"""

from __future__ import annotations

import difflib
import re
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
from onefold.system.words import (
    counted,
    in_shell,
    listed,
    seconds_of,
    show_traceback,
    tell,
    visible,
)

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
    "tell_failure",
    "tell_next",
    "visible",
]

ENTRY_POINTS = "onefold.commands"
"""Group of entry points through which other distributions add commands."""
_Function = TypeVar("_Function", bound=Callable[..., None])
_Record = tuple[str, str]
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Exception that typer raises for arguments it cannot use; the class has no public name."""
_FEW = 3
"""Maximum number of commands with an option that an error lists; beyond that it lists none."""
_LONG_ERROR = 100
"""Minimum length of an error that is not repeated after its traceback."""
_OTHER = "Other"
"""Heading of options that were declared without one; it comes last."""


def with_examples(text: str, examples: Iterable[_Record]) -> str:
    """Insert examples after the first paragraph of a help text.

    Args:
        text: the help text; its first paragraph is one sentence.
        examples: commands, each with a description.

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
    # The first character of a paragraph tells typer to keep its line breaks.
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
        app: application that the command is added to.
        name: name of the command.
        group: heading under which it is listed.
        examples: commands, each with a description.
        text: help text, if it is not the function's docstring.
        cls: class of the command; `Command` if None.
        settings: arguments of `typer.Typer.command`.
    """

    def declared(function: _Function) -> _Function:
        # Remove the docstring's indentation, which paragraphs would keep.
        lines = (text or function.__doc__ or "").split("\n")
        help = with_examples("\n".join(line.strip() for line in lines), examples)
        app.command(name, cls=cls or Command, help=help, rich_help_panel=group, **settings)(
            function
        )
        return function

    return declared


class Command(TyperCommand):
    """A command whose help lists its options under headings."""

    other_names: ClassVar[Mapping[str, str]] = {}
    """Names that other programs use for this command's options, without dashes, for suggestions."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; if an option is unknown, name the commands that have it."""
        try:
            rest = super().parse_args(ctx, args)
            for parameter in self.params:
                if isinstance(path := ctx.params.get(parameter.name), Path):
                    _refuse_address(max(parameter.opts, key=len), path)
            return rest
        except _UsageError as wrong:
            error: Any = wrong
            # The library that checks values starts all of its messages with these words.
            error.message = error.message.replace("Value error, ", "")
            others = getattr(getattr(ctx.parent, "command", None), "commands", {})
            name = getattr(error, "option_name", "")
            have = [each for each, its in others.items() if any(name in p.opts for p in its.params)]
            # Only the error for an unknown option suggests similar names.
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
                # typer appends the type to an argument's name, and puts choices into brackets.
                name = re.sub(" <.*>$" if argument else "[<>]", "", record[0])
                found.append((heading or _OTHER, (name, record[1])))
        _write(formatter, found)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, without typer's additional braces and brackets."""
        pieces = super().collect_usage_pieces(ctx)
        pieces = [re.sub(r"\{(.*)\}(\.\.\.)?", r"\1", piece) for piece in pieces]
        return [re.sub(r"^\[(\[\w+\])\]$", r"\1", piece) for piece in pieces]


class LateCommand(Command):
    """A command of another distribution, imported when it is called.

    An entry point of the group ``onefold.commands`` names an instance, in a module with few
    imports, because ``onefold --help`` loads these modules of all commands.

    Args:
        name: name of the command.
        group: heading under which ``onefold --help`` lists it.
        summary: its description in that list, one sentence.
        make: imports the command and returns it; called once.
    """

    def __init__(self, name: str, *, group: str, summary: str, make: Callable[[], Any]) -> None:
        super().__init__(name, help=summary, rich_help_panel=group)
        self._make = make

    @cached_property
    def made(self) -> Any:
        """The imported command."""
        return self._make()

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Parse the arguments of the imported command."""
        return self.made.make_context(info_name, args, parent, **extra)


class Commands(TyperGroup):
    """A group of commands, listed under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the options of the group."""
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
    """Console for the text of a command: stdout, or stderr if stdout has a JSON object.

    Text is printed without markup, and control characters in it are escaped. Each line is printed
    separately, because a line break in a text may come from a file.

    Args:
        as_json: whether stdout has a JSON object.
        settings: arguments of `rich.console.Console`.
    """

    def __init__(self, *, as_json: bool = False, **settings: Any) -> None:
        super().__init__(stderr=as_json, highlight=False, markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Escape control characters in text, including the cells of tables."""
        return super().render_str(visible(text), **settings)

    def headed(self, style: str, head: str, text: str = "") -> None:
        """Print a line whose beginning has a style."""
        self.print(Text.assemble((visible(head), style), visible(text)))


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    print(json_text(value))


def tell_failure(message: str, traceback: str) -> None:
    """Print the traceback and the message of a failed run, without repeating a long error.

    Args:
        message: the failed device, and the error.
        traceback: traceback that ends with the same error; may be empty.
    """
    show_traceback(traceback)
    parts = message.split(": ")
    for number, kind in enumerate(parts[1:], start=1):
        error = ": ".join(parts[number:])
        if len(error) > _LONG_ERROR and error in traceback:
            message = f"{': '.join(parts[:number])}: {kind} (see above)"
            break
    tell(message)


def tell_next(command: str) -> None:
    """Print the next command that a user usually needs, but only on a terminal."""
    if sys.stderr.isatty():
        tell(f"next: {command}")
