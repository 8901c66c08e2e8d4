"""How long a start takes: from the command to the note, and what is made of it."""

from __future__ import annotations

import sys

import pytest

from measure import spread
from start import COMMANDS, REFERENCE, first_step_s, show, summary

pytestmark = pytest.mark.full


def test_the_note_is_compared_with_the_start() -> None:
    program = "import sys, time; open(sys.argv[1], 'w').write(str(time.monotonic() + 100))"
    assert 100 < first_step_s([sys.executable, "-c", program]) < 160


def test_a_program_that_fails_is_told_of() -> None:
    with pytest.raises(RuntimeError, match=r"ended with 1: out of luck"):
        first_step_s([sys.executable, "-c", "exit('out of luck')"])


def test_a_program_that_ends_badly_has_trained_its_step() -> None:
    program = "import sys; open(sys.argv[1], 'w').write('1e12'); exit('a peer has left first')"
    assert first_step_s([sys.executable, "-c", program]) > 1e11


def test_starts_are_compared_round_by_round(capsys: pytest.CaptureFixture[str]) -> None:
    found = summary({"other": [1.0, 4.0], REFERENCE: [2.0, 4.0]}, 0.0)
    assert found["times_the_reference"]["other"] == spread([0.5, 1.0])
    show(found)
    assert "0.75 (0.50-1.00)" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.parametrize("name", COMMANDS)
def test_every_program_trains_a_step(name: str) -> None:
    assert 0 < first_step_s(COMMANDS[name]) < 120
