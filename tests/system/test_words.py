import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from onefold.cli import tell_failure
from onefold.cli.main import app
from onefold.system.words import message_of, visible, words_of_failure
from onefold_jobs.data.fetch import cause_of
from tests.conftest import ROOT


class Silent(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


def test_a_message_can_always_be_shown() -> None:
    assert message_of(ValueError("one\ntwo")) == "one\ntwo"
    assert message_of(Silent()) == "its message cannot be shown, because str() raised KeyError"
    assert message_of(ValueError("\udcff")) == "\\udcff"
    assert len(message_of(ValueError("x" * 10**6))) == 4000


def test_what_a_terminal_obeys_is_written_out() -> None:
    text = "a\x1b[2J\n\x7f\x9b\u202e\u2028\ufeff\udcff\ud800ñ猫 \u05e9\u200d👍"
    words = r"a\x1b[2J\n\x7f\u009b\u202e\u2028\ufeff\xff\ud800ñ猫 " + "\u05e9\u200d👍"
    assert visible(text) == words
    assert visible(words) == words
    assert visible("one\ntwo\r", "\n") == "one\ntwo\\r"


def test_the_cause_below_the_words_of_libraries_is_named() -> None:
    refused = RuntimeError("HTTPSConnectionPool(host='hub', port=443): Max retries exceeded")
    refused.__cause__ = ConnectionRefusedError(111, "Connection refused")
    assert cause_of(refused) == "[Errno 111] Connection refused"
    assert cause_of(ValueError("one\ntwo")) == "one"


def test_the_end_of_a_device_is_told_as_what_it_was() -> None:
    assert words_of_failure(KeyError("a"), 2) == "failed in step 2: KeyError: 'a'"
    assert words_of_failure(Silent(), 2).startswith("failed in step 2: Silent: its message cannot")
    assert words_of_failure(SystemExit(0), 2).startswith("ended by sys.exit(0) in step 2; either")


def test_a_long_error_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    for length, told in ((150, "LossError (see above)"), (10, f"LossError: {10 * 'x'}")):
        error = f"LossError: {length * 'x'}"
        tell_failure(f"device 1 failed in step 4: {error}", f"onefold.errors.{error}\n")
        last = f"onefold: device 1 failed in step 4: {told}\n"
        assert capsys.readouterr().err == f"onefold.errors.{error}\n{last}"


COMMANDS: Any = get_command(app)
COMMAND = re.compile(
    rf"(onefold ({'|'.join(COMMANDS.list_commands(None))})|--runs|truncate)( [^.;:,()]*)?$"
)
NO_PATHS = {
    *("at", "job.name", "job", "where", "other", "what", "job.example", "series.job.name"),
    "_task(found, image, label)",
}


def values_in_commands(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """What messages put into a command for the shell, and the line."""
    for node in ast.walk(tree):
        text = ""
        for part in node.values if isinstance(node, ast.JoinedStr) else ():
            if isinstance(part, ast.Constant):
                text += str(part.value)
            elif isinstance(part, ast.FormattedValue):
                value = ast.unparse(part.value)
                if COMMAND.search(text) or re.match(r"' '.join\(.*(command|given|argv)", value):
                    yield part.lineno, value
                text += "VALUE"


def test_every_command_in_a_message_can_be_pasted() -> None:
    found = [
        (path.name, *value)
        for source in ("src", "packages/onefold-jobs/src")
        for path in sorted((ROOT / source).rglob("*.py"))
        for value in values_in_commands(ast.parse(path.read_text()))
    ]
    assert len(found) > 20
    unquoted = [each for each in found if not each[2].startswith("in_shell(")]
    assert {each[2] for each in unquoted} <= NO_PATHS, unquoted
