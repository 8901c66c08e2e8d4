"""The command line, and what other distributions need to add commands to it."""

from onefold.cli.help import Command, Commands, LateCommand, declare
from onefold.cli.running import print_json, tell_next

__all__ = ["Command", "Commands", "LateCommand", "declare", "print_json", "tell_next"]
