"""The runner of ``make ecosystem``, without the libraries: verdicts, expectations and the page."""

import tomllib
from pathlib import Path

import pytest
from ecosystem import __main__ as runner
from ecosystem.__main__ import START, Outcome, Verdict

from tests.conftest import ROOT

FOLDERS = sorted(path.parent for path in (ROOT / "ecosystem").glob("*/about.toml"))
REFUSED = {"library": "a", "stage": "resume", "refused": "reads weights"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_each_folder_has_both_scripts_and_a_row_on_the_page(folder: Path) -> None:
    about = tomllib.loads((folder / "about.toml").read_text())
    assert {"plain.py", "with_onefold.py"} <= {path.name for path in folder.iterdir()}
    assert about.keys() <= {"library", "title", "remark", "random", "stage", "refused"}
    assert f"\n| {runner.title_of(about)} | " in runner.PAGE.read_text()


@pytest.mark.parametrize(
    ("verdict", "about", "expected"),
    [
        (Verdict("works"), {"library": "a"}, True),
        (Verdict("differs", "resume"), {"library": "a"}, False),
        (Verdict("differs", "resume"), REFUSED, False),
        (Verdict("works"), REFUSED, False),
        (Verdict("refused", "resume", "E: reads weights here"), REFUSED, True),
        (Verdict("refused", "one shard", "E: reads weights here"), REFUSED, False),
        (Verdict("refused", "resume", "E: no such file"), REFUSED, False),
        (Verdict("fails", "plain loop", "E: reads weights"), REFUSED, False),
    ],
)
def test_a_verdict_is_the_one_that_the_folder_announces(
    verdict: Verdict, about: dict[str, str], expected: bool
) -> None:
    assert runner.as_expected(verdict, about) is expected


def test_a_run_differs_or_is_refused_with_the_first_error() -> None:
    printed = "Traceback ...\nonefold.errors.StateError: reads weights\nValueError: another\n"
    assert runner.error_of(printed) == "StateError: reads weights"
    assert runner.error_of("onefold: device 0 was killed by SIGKILL\n") == ""
    assert runner.unlike("resume", Outcome("0f", "")) == ("differs", "resume", "")
    assert str(runner.unlike("resume", Outcome("", "E: x"))) == "refused (resume)"


def test_new_rows_replace_old_ones_and_rows_without_a_folder_go() -> None:
    page = f"head\n\n{START}| a | 1 |\n| c | 1 |\n\ntail\n"
    found = runner.with_rows(page, {"B": "| B | 2 |", "a": "| a | 2 |"}, {"a", "B"})
    assert found == f"head\n\n{START}| a | 2 |\n| B | 2 |\n\ntail\n"
    assert runner.with_rows(f"{START}\ntail\n", {"a": "| a |"}, {"a"}) == f"{START}| a |\n\ntail\n"
