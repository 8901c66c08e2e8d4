"""Tells the arguments of ``onefold run`` and ``onefold verify`` from those of the script.

Only what stands before the script, or before ``-m MODULE`` and in it, is the command's: everything
behind belongs to the script, whatever it is called. ``--`` may stand between the two.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from typer.core import TyperCommand

__all__ = ["SCRIPT", "ScriptCommand", "come_too_late", "with_end_of_options"]

SCRIPT = {"allow_extra_args": True, "allow_interspersed_args": False}
"""Settings of a command that ends at its first argument, and hands on all others."""
_MODULE = "-m"


class ScriptCommand(TyperCommand):
    """A command that runs a script, or a module by ``-m``, with arguments of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command's own options; see `with_end_of_options`."""
        return super().parse_args(ctx, with_end_of_options(args, self._options()))

    def _options(self) -> set[str]:
        """List the options that take a value, as all of these commands do."""
        return {name for option in self.params for name in option.opts if name.startswith("-")}


def with_end_of_options(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """Put ``--`` behind ``-m MODULE``, where typer would go on looking for options.

    Args:
        arguments: of the command.
        options: the command's own, all of which take a value.

    >>> with_end_of_options(["--devices", "2", "-m", "train", "--devices", "3"], {"--devices"})
    ['--devices', '2', '-m', 'train', '--', '--devices', '3']
    """
    place = 0
    while place < len(arguments):
        word = arguments[place]
        if word in ("-", "--") or not word.startswith("-"):
            break  # the script, or the end of options already
        if word.startswith(_MODULE):
            end = place + (2 if word == _MODULE else 1)
            own, rest = list(arguments[:end]), list(arguments[end:])
            return [*own, *(["--"] if rest and rest[0] != "--" else []), *rest]
        place += 2 if word in options else 1
    return list(arguments)


def come_too_late(given: Sequence[str], options: Collection[str]) -> list[str]:
    """List the words among a script's arguments that are options of the command.

    >>> come_too_late(["--lr", "0.1", "--devices=2"], {"--devices", "-m"})
    ['--devices']
    """
    words = (word.partition("=")[0] for word in given)
    return [word for word in words if word in options]
