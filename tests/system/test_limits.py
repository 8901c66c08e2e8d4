"""Errors of the system say what was wanted, and which limit holds."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onefold.system.heap import naming_limits
from tests.tables import for_each


@for_each(
    ("number", "words"),
    [
        (errno.ENOSPC, "--home or ONEFOLD_HOME; `onefold plan` shows how large"),
        (errno.EDQUOT, "--home or ONEFOLD_HOME"),
        (errno.EFBIG, r"\(ulimit -f\)$"),
        (errno.ENOMEM, r"\(ulimit -v\)"),
        (errno.EIO, "Input/output error$"),
    ],
)
def test_each_limit_is_named(number: int, words: str) -> None:
    with (
        pytest.raises(OSError, match=rf"expected two pages, got: {os.strerror(number)}") as caught,
        naming_limits("two pages"),
    ):
        raise OSError(number, os.strerror(number))
    assert caught.value.errno == number
    with pytest.raises(OSError, match=words):
        raise caught.value


LIMITED = """
import resource, sys
from pathlib import Path
from onefold.system.heap import BareMemory
from onefold.system.heap import DiskHeap
folder = Path(sys.argv[1])
heap = DiskHeap(folder)
bare = BareMemory(folder) if "bare" in sys.argv else None
kept = heap.empty(8192) if "kept" in sys.argv else None
def limit(kind, nbytes):
    resource.setrlimit(kind, (nbytes, resource.getrlimit(kind)[1]))
def used():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
"""


@pytest.mark.full
@for_each(
    ("code", "kept", "words"),
    [
        ("limit(resource.RLIMIT_FSIZE, 1 << 20); heap.empty(2 << 20)", "", "2,097,152 more bytes"),
        (
            "limit(resource.RLIMIT_FSIZE, 65 << 20); heap.zeros(66 << 20)",
            "kept",
            "69,206,016 more bytes of the model in .*, beside 67,108,864 that it has there",
        ),
        ("limit(resource.RLIMIT_FSIZE, 1 << 20); BareMemory(folder)", "", "4,194,304 bytes of mem"),
        ("limit(resource.RLIMIT_AS, used() + (8 << 20)); heap.empty(9 << 20)", "", "9,437,184 mor"),
        (
            "limit(resource.RLIMIT_AS, used() + (8 << 20)); bare.room(9 << 20)",
            "bare",
            "9,437,184 bytes for a tensor without values",
        ),
    ],
)
def test_what_a_process_may_not_have_is_one_error(
    tmp_path: Path, code: str, kept: str, words: str
) -> None:
    done = run(code, tmp_path, kept)
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(f"^OSError: .*expected .*{words}.* \\(ulimit -", last), last


def test_a_limit_is_used_up_to_its_end(tmp_path: Path) -> None:
    """Files grow by large parts where they may."""
    code = "limit(resource.RLIMIT_FSIZE, 1 << 20); print(heap.empty(1 << 20).numel())"
    assert run(code, tmp_path).stdout == f"{1 << 20}\n"


def run(code: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # Limits of a process cannot be raised again, so it is one of its own.
    return subprocess.run(
        [sys.executable, "-c", LIMITED + code, str(folder), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
