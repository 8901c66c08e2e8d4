"""`PLACEMENTS` is the only list of placements: whatever takes one takes each of its forms."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

import onefold
from onefold import RunOptions
from onefold.cli.main import app
from onefold.core.placements import PLACEMENTS, implementation_of
from onefold.core.settings import Settings
from onefold.errors import LaunchError
from onefold.launcher.environment import PLACEMENT_VARIABLE, read_context
from onefold.placement.base import Placement
from onefold.testing import simulate
from tests.cli.test_help import every_command, parameters_of, shown
from tests.small import line, make_trainer, points
from tests.test_rooms import modules, room_of

DOCS = Path(__file__).parents[2] / "docs" / "do"
FORMS = [form for kind in PLACEMENTS.values() for form in kind.forms]
TAKEN = [form.replace("N", "2") for form in FORMS]
# Other arguments of each command that takes a placement, of which it refuses one after the
# placement. `why` and `replay` hand theirs on to `onefold run`, once they have a record.
REFUSED = {
    "run": (["--devices", "cuda:99", __file__], "cuda:99"),
    "verify": (["--devices", "many", __file__], "but got many"),
    "train classify": (["--data", "absent"], "--data absent"),
    "train segment": (["--data", "absent"], "--data absent"),
    "train text": (["--data", "absent"], "--data absent"),
    **{
        f"tune {job}": (["--data", "absent", "--search", "lr=1e-3:1e-2"], "--data absent")
        for job in ("classify", "segment", "text")
    },
    "why": (["absent"], ""),
    "replay": (["absent", "--step", "1"], ""),
}


def test_a_row_describes_a_placement() -> None:
    names = {"shares", *(each.name for kind in (RunOptions, Settings) for each in fields(kind))}
    for name, kind in PLACEMENTS.items():
        assert next(iter(kind.forms)) == name
        assert issubclass(implementation_of(name), Placement)
        assert {refused.partition("=")[0] for refused in kind.refuses} <= names
    assert RunOptions().placement == next(iter(PLACEMENTS))


def test_all_forms_train_to_the_same_bits() -> None:
    def trained() -> str:
        trainer = make_trainer(nn.Sequential(line(), line(1)), devices=None)
        for _ in range(3):
            trainer.step(points(8))
        return trainer.fingerprint()

    alone = simulate(trained, 1)
    assert [form for form in TAKEN if simulate(trained, 2, placement=form) != 2 * alone] == []


@pytest.mark.parametrize("words", REFUSED)
def test_every_command_takes_all_forms(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLACEMENT_VARIABLE, raising=False)
    arguments, refusal = REFUSED[words]
    command = [*words.split(), *arguments]
    for form in (*TAKEN, "spam"):
        option = [*words.split(), "--placement", form, *arguments]
        for given, variable in ((option, None), (command, form)):
            ended = CliRunner().invoke(app, given, env={PLACEMENT_VARIABLE: variable})
            wanted = "placement must be one of" if form == "spam" and refusal else refusal
            assert ended.exit_code == 1
            assert wanted in str(ended.exception), (form, variable)


def test_these_commands_take_a_placement() -> None:
    found = {
        " ".join(words): each
        for words in every_command()
        for each in parameters_of(words)
        if each.name == "placement"
    }
    assert found.keys() == REFUSED.keys()
    assert all(PLACEMENT_VARIABLE in str(each.envvar) for each in found.values())
    # Forms such as pipeline:N are those of a kind, and stand in the guides.
    assert [kind for kind in PLACEMENTS if kind not in shown("run")] == []


def test_launch_and_all_launchers_take_all_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}

    def supervised(command: object, selection: object, options: RunOptions, **_: Any) -> Any:
        raise LaunchError(options.placement)

    monkeypatch.setattr("onefold.launcher.launch.supervise", supervised)
    for form in TAKEN:
        for environment in ({}, {**torchrun, "LOCAL_RANK": "0"}):
            context = read_context({**environment, PLACEMENT_VARIABLE: form})
            assert context.options.placement == form
        with pytest.raises(LaunchError, match=f"^{form}$"):
            onefold.launch(len, devices="cpu:2", placement=form)
        monkeypatch.setenv(PLACEMENT_VARIABLE, form)
        with pytest.raises(LaunchError, match=f"^{form}$"):
            onefold.launch(len, devices="cpu:2")


def test_the_guides_describe_all_forms() -> None:
    for page in ("placement.md", "memory.md"):
        first = re.findall(r"(?m)^\| `([\w:]+)`", (DOCS / page).read_text())
        assert [form for form in FORMS if form not in first] == [], page


def test_no_other_module_lists_placements() -> None:
    """But for examples of options, the noun in an error, and the choice of `onefold plan`."""
    named = re.compile(rf"""["']({"|".join(PLACEMENTS)})(?::\w+)?["']""")
    found = {
        module
        for module, path in modules()
        if room_of(module) not in ("placement", "jobs") and named.search(path.read_text())
    }
    core = {f"onefold.core.{name}" for name in ("placements", "options", "shard")}
    assert found == core | {"onefold.cli.main"}
