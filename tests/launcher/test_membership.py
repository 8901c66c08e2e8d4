"""Who hears of it when a process of a run fails, and what comes on the screen."""

import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from onefold.launcher import membership
from tests.tables import for_each

PROGRAM = """
import os, sys
from onefold.core.options import LaunchContext
from onefold.errors import PeerLost
from onefold.launcher.membership import hush_and_report, register

class Member:
    def close(self, failure=None):
        os.write(told, repr(failure).encode())

told = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT)
member = Member()
register(member)
hush_and_report(LaunchContext(rank=int(sys.argv[1]), size=3, launcher="torch"))
if sys.argv[4]:
    print("a line of the script")
    os.write(2, b"a line of a library\\n")
exec(sys.argv[2])
"""
LINES = "a line of the script\n", "a line of a library\n"
FAILS = "raise ArithmeticError('over the top')"
LOST = "raise PeerLost('a device is lost', device={})"


@pytest.mark.processes
@for_each(
    ("rank", "last_line", "talks", "said"),
    [
        (0, "", True, ""),
        (2, "", True, ""),
        (0, FAILS, True, "Traceback"),
        (2, FAILS, True, "Traceback"),
        # One device says that another one is lost.
        (0, LOST.format(2), True, "onefold: a device is lost\n"),
        (0, LOST.format(-1), True, "onefold: a device is lost\n"),
        (1, LOST.format(0), True, "onefold: a device is lost\n"),
        (2, LOST.format(0), True, ""),
        (1, LOST.format(2), False, ""),
    ],
)
def test_the_lead_speaks_on_the_screen(
    rank: int, last_line: str, talks: bool, said: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(rank), last_line, tmp_path / "told", "1" * talks],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == bool(last_line)
    assert done.stdout == (LINES[0] if rank == 0 else "")
    paths = list(tmp_path.glob("onefold-device-*/*.log"))
    has_log = bool(rank and last_line and talks)
    assert [sorted(path.read_text().splitlines(True)) for path in paths] == [
        sorted(LINES)
    ] * has_log
    assert len(list(tmp_path.glob("onefold-device-*"))) == has_log
    before, _, after = done.stderr.partition("ArithmeticError: over the top\n")
    assert before.startswith(LINES[1]) == (rank == 0)
    text = before.replace(LINES[1], "")
    places = "".join(f"onefold: output of device {rank}: {path}\n" for path in paths)
    if said == "Traceback":
        assert text.startswith("Traceback (most recent call last)")
        assert after == places
    else:
        assert text == said + places
    told = (tmp_path / "told").read_text()
    assert told.startswith(last_line.removeprefix("raise ").partition(", device")[0] or "None")


def test_a_forked_child_frees_nothing_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the memory of a GPU, which can be used by the process alone that asked for it."""

    class Held:
        def end(self) -> None:
            """What a member does in the end."""

    monkeypatch.setattr(membership.members, "endings", [])
    held = Held()
    membership.at_good_end(held.end)
    alive = weakref.ref(held)
    del held
    child = os.fork()
    if not child:
        os._exit(0 if alive() is not None and not membership.members.endings else 1)
    assert os.waitpid(child, 0)[1] == 0
