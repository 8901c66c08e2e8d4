"""Random courses of one run under all launchers: killed or stopped, then continued by another."""

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.test_every_launcher import COMMANDS, DEVICES, check_course
from tests.launcher.test_real_launchers import slurm  # noqa: F401  # a fixture

pytestmark = [pytest.mark.full, pytest.mark.processes, pytest.mark.xdist_group("launchers")]
HAVE_HOSTS = ("onefold run --hosts", "two torchruns")
RUN_IN_THREADS = ("ray",)
"""Launchers that call the script outside the main thread, where Python handles no signals."""


def drawn(seed: int) -> list[tuple[str, str]]:
    """Draw three launchers, and what ends the first two runs."""
    draw, course, step = random.Random(seed), [], 0
    names = [each for each in COMMANDS if each != "ray" or importlib.util.find_spec("ray")]
    for launcher in draw.sample(names, 3):
        # A run that is asked to stop ends one step later, and the next run must reach its own end.
        step += draw.randrange(2, 6)
        kinds = ["KILL", *["TERM"] * (launcher not in RUN_IN_THREADS)]
        kinds += ["HOST"] * (launcher in HAVE_HOSTS)
        course.append(
            (launcher, f"{draw.randrange(DEVICES[launcher])} {step} {draw.choice(kinds)}")
        )
    return course


@pytest.mark.parametrize("seed", range(60))
def test_a_course_ends_like_the_run_that_never_stopped(
    seed: int,
    slurm: dict[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    check_course(tmp_path, drawn(seed), **slurm)
    if seed % 15:
        return
    # The record of a run under several launchers is one as of any other.
    folder = str(tmp_path / "course")
    onefold = [sys.executable, "-m", "onefold"]
    for words, codes in (
        (["replay", folder, "--step", "9", "--devices", "1"], {0}),
        (["why", folder, "--step", "9"], {0, 1}),
        (["compare", folder, str(tmp_path / "whole")], {0}),
    ):
        done = subprocess.run([*onefold, *words], capture_output=True, text=True, timeout=300)
        assert done.returncode in codes, (words, done.stdout, done.stderr)
