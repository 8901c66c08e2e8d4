"""A model that has no room in memory trains with its home in a file, and with the same bits."""

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "wide.py"
GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_MIB = 440

pytestmark = [pytest.mark.full, pytest.mark.processes, pytest.mark.fresh]


@pytest.fixture
def group() -> Iterator[Path]:
    """A group of processes that may use so much memory; the kernel ends what asks for more."""
    folder = GROUPS / f"onefold-{uuid.uuid4()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no limit of memory can be set here (cgroup v1, as root): {error}")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(LIMIT_MIB << 20))
        yield folder
    finally:
        folder.rmdir()


def run(group: Path | None, *command: str) -> subprocess.CompletedProcess[str]:
    enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"] if group else []
    return subprocess.run(
        [*enter, sys.executable, *command], capture_output=True, text=True, timeout=600
    )


def test_a_model_that_has_no_room_trains_from_a_file(group: Path, tmp_path: Path) -> None:
    plain = run(group, str(SCRIPT), "pytorch")
    assert plain.returncode == -9, plain.stderr

    start = ("-m", "onefold", "run", "--devices")
    home = ("--placement", "offload", "--offload-dir", str(tmp_path))
    limited = run(group, *start, "1", *home, str(SCRIPT), "onefold")
    assert limited.returncode == 0, limited.stderr
    roomy = run(None, *start, "2", str(SCRIPT), "onefold")
    assert roomy.returncode == 0, roomy.stderr
    assert limited.stdout == roomy.stdout != ""
