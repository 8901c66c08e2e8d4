"""The command line's help, its version, its completion, and what programs read of it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import onefold
from onefold.cli.main import app
from tests.started import ended
from tests.tables import for_each

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"
SCRIPT = Path(__file__).parents[1] / "scripts" / "planned.py"


def every_command() -> Iterator[list[str]]:
    """The words of each command that does something, with those of the jobs."""
    group: Any = get_command(app)
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        inner = getattr(getattr(command, "made", command), "commands", None)
        yield from ([name, each] for each in inner) if inner else [[name]]


def parameters_of(words: list[str]) -> list[Any]:
    """What a command declares, arguments and options."""
    command: Any = get_command(app)
    for name in words:
        command = command.get_command(None, name)
        command = getattr(command, "made", command)  # it may be one that is imported late
    return list(command.params)


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_help_fits_80_columns_and_begins_with_examples() -> None:
    for words in [[], ["train"], ["record"], *every_command()]:
        text = shown(*words)
        assert [line for line in text.splitlines() if len(line) > 80] == [], words
        assert [line for line in text.splitlines()[1:] if line.endswith("...")] == [], words
        assert "\b" not in text
        if words in every_command():
            examples = re.findall(
                r"^(?:    |  Example: )(onefold .*?)(?:  +#|$)", text, re.MULTILINE
            )
            assert examples, words
            assert all(each.split()[1 : 1 + len(words)] == words for each in examples)


def test_examples_name_options_that_exist() -> None:
    for words in every_command():
        text = shown(*words)
        named = re.findall(r"^  (-[-\w]+(?:, -[-\w]+)*)", text, re.MULTILINE)
        options = {each for names in named for each in names.split(", ")}
        for example in re.findall(r"^    onefold (.*?)(?:  +#|$)", text, re.MULTILINE):
            own = re.split(r" \S+\.py| -- ", example)[0].split()
            assert {each for each in own if each.startswith("-")} <= options, example


def test_what_an_option_takes_is_not_its_own_name() -> None:
    """Some releases of typer take it for the name, in capitals."""
    for words in every_command():
        options = [each for each in parameters_of(words) if each.param_type_name == "option"]
        assert options
        for each in options:
            taken = str(each.metavar).casefold().replace("-", "_")
            assert taken != each.name.casefold(), (words, each.name)


def test_the_help_of_an_option_is_short() -> None:
    """A noun phrase or an imperative; what it takes is written in one way."""
    for words in every_command():
        for each in parameters_of(words):
            text = re.sub(r" \[.*\]$", "", each.help)  # the jobs' options have their default there
            assert re.fullmatch(r"[^a-z].{,58}\.", text), (words, each.name, text)
            assert not re.match("(What|How|Where|Whether|Of) ", text), (words, each.name, text)
        taken = re.findall(r"^(?:Usage: |  -|  [A-Z]+)(.*?)(?:  |$)", shown(*words), re.MULTILINE)
        assert [each for each in taken if set(each) & set("<>{}") or "[[" in each] == [], words


def test_what_trains_nothing_has_no_options_of_training() -> None:
    for command in ("predict", "evaluate"):
        text = shown(command)
        assert "--batch-size" in text
        assert "Training:" not in text
    assert "--patience" in shown("train", "text")


def test_the_list_of_commands_is_grouped_and_whole() -> None:
    text = shown()
    names = re.findall(r"^  (\w+)  +[A-Z].*\.$", text, re.MULTILINE)
    assert sorted(names) == sorted({words[0] for words in every_command()})
    assert text.index("  run ") < text.index("  verify ") < text.index("  predict ")


def test_the_document_has_every_command_and_its_exit_codes() -> None:
    text = DOCUMENT.read_text()
    for words in every_command():
        assert f"`onefold {' '.join(words)}" in text, words


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"onefold {onefold.__version__}\n"


@for_each(
    ("words", "expected"),
    [
        ("onefold ver", {"verify"}),
        ("onefold train cl", {"classify"}),
        ("onefold train classify --label-sm", {"--label-smoothing"}),
        ("onefold run --check", {"--checkpoint"}),
    ],
)
def test_words_are_completed(words: str, expected: set[str]) -> None:
    place = str(len(words.split()) - 1)
    asked = {"_ONEFOLD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
    result = CliRunner().invoke(app, prog_name="onefold", env=asked)
    assert set(result.output.split()) == expected


@for_each(
    ("words", "error"),
    [
        ("train text --early-stopping 3", "--early-stopping (Possible options: --patience)"),
        ("train text --bs 3", "--bs (Possible options: --batch-size)"),
        ("train text --mixup 0.2", "in onefold train text: it is one of onefold train classify\n"),
        ("train segment --dev a", "of onefold train classify, onefold train text\n"),
        ("train text --crop 3", "of onefold train segment\n"),
        ("why a --shard 3", "--shard in onefold why: it is one of onefold replay\n"),
        ("run --nowhere", "No such option: --nowhere\n"),
        ("run --device 2", "No such option: --device (Possible options: --devices"),
        ("train text --task words", "Invalid value for '--task': 'words' is not one of"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_option_is_said_with_where_it_belongs(words: str, error: str) -> None:
    result = CliRunner().invoke(app, words.split(), prog_name="onefold")
    assert (result.exit_code, error in result.output) == (2, True), result.output


def printed(*arguments: str, code: int = 0) -> Any:
    """The JSON object that a command prints, which is the last line of stdout."""
    done = ended(*arguments)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.processes
def test_programs_read_json() -> None:
    (device,) = printed("devices", "--json")["devices"][-1:]
    assert device["kind"] == "cpu"
    assert device["free_bytes"] <= device["total_bytes"]

    planned = printed("plan", "--json", "--devices", "1,4", str(SCRIPT), "adamw")
    assert [row["devices"] for row in planned["rows"]] == [1, 4]
    assert planned["rows"][1]["partition"] < planned["rows"][0]["partition"]


@pytest.mark.processes
def test_how_a_run_ended_is_the_last_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint('of the script')\nsys.exit(5)\n")
    found = printed("run", "--devices", "cpu:1", "--json", str(script), code=5)
    assert (found["exit_code"], found["devices"], found["record"]) == (5, ["cpu"], None)
    assert found["message"]
