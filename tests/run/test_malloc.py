"""Memory that a process keeps."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from onefold.run.world import allocator_chosen
from tests.tables import for_each

PROGRAM = """
import resource, torch, onefold
model = torch.nn.Linear(2, 1)
trainer = onefold.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).square().mean(), shards=1
)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):  # until the first blocks have found their places
    torch.ones(40 << 18)
before = faults()
for _ in range(10):
    torch.ones(40 << 18)
print(faults() - before)
"""


def page_faults(**environment: str) -> int:
    """Of ten times making and dropping a tensor of 40 MB, which is ten thousand pages."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**own, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.processes
def test_a_trainer_has_its_process_keep_memory() -> None:
    assert page_faults() < 1000


@pytest.mark.full
@pytest.mark.processes
def test_the_users_own_settings_are_left_alone() -> None:
    assert page_faults(MALLOC_TRIM_THRESHOLD_="131072") > 50_000


@for_each(
    ("name", "value", "chosen"),
    [
        ("MALLOC_ARENA_MAX", "2", True),
        ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0", True),
        ("GLIBC_TUNABLES", "glibc.rtld.nns=4", False),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2", True),
        ("LD_PRELOAD", "/usr/lib/libfaketime.so", False),
    ],
)
def test_who_chooses_the_allocator(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, chosen: bool
) -> None:
    for variable in list(os.environ):
        if variable.startswith("MALLOC_") or variable in ("GLIBC_TUNABLES", "LD_PRELOAD"):
            monkeypatch.delenv(variable)
    assert not allocator_chosen()
    monkeypatch.setenv(name, value)
    assert allocator_chosen() is chosen


def test_shared_memory_that_the_limits_forbid_is_one_error() -> None:
    code = (
        "import resource, signal; from onefold.exchange.shared import new_file; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); new_file(1_000_000)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600
    )
    assert "OSError: [Errno 27] expected 1,000,000 bytes of memory that all devices" in done.stderr
    assert "ulimit -f" in done.stderr
