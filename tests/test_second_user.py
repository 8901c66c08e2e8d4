"""Another user of the host tries all the while to get into a run, and to hold it up."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import onefold
from tests.somebody import needs_root, somebody_trying

SCRIPT = Path(__file__).parent / "soak" / "train.py"
SOURCE = Path(onefold.__file__).parent.parent
ROUNDS = 5
held: list[socket.socket] = []
"""Places that were taken, in the other user's process."""
JUNK = (b"", b"\0" * 8, b"\x80\x04\x95", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 4096, b"\1\0\0\0")


def run_processes() -> list[str]:
    """Numbers of the processes of the run."""
    found = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if str(SCRIPT).encode() in Path("/proc", number, "cmdline").read_bytes():
                found.append(number)
    return found


def abstract_names() -> Iterator[str]:
    """Of sockets without a file; anybody may list them."""
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        name = line.rpartition(" ")[2]
        if name.startswith("@onefold"):
            yield "\0" + name[1:]


def following(name: str) -> str:
    """The name of another device of the run, if names were counted."""
    return name[:-1] + chr(ord(name[-1]) + 1)


def loopback_ports() -> Iterator[int]:
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        address, state = line.split()[1], line.split()[3]
        if state == "0A" and address.startswith("0100007F:"):
            yield int(address.rpartition(":")[2], 16)


def intrude(connection: socket.socket, address: str | tuple[str, int]) -> bytes:
    """Connect and talk; what came back."""
    connection.settimeout(0.05)
    answer = b""
    with suppress(OSError), connection:
        connection.connect(address)
        for junk in JUNK:
            connection.send(junk)
        answer = connection.recv(4096)
    return answer


def attack(temporary: Path) -> Iterable[str]:
    """One round of everything that another user can do."""
    for number in run_processes():
        for name in ("environ", "mem", "maps"):
            with suppress(OSError), open(f"/proc/{number}/{name}", "rb") as file:
                if file.read(64):
                    yield f"has read {name} of the run"
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{number}/fd"):
                yield f"has seen descriptor {descriptor}"
        with suppress(OSError):
            os.kill(int(number), 0)
            yield "may signal the run"
    for name in abstract_names():
        if intrude(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), name):
            yield "has got an answer of a device"
    for port in loopback_ports():
        intrude(socket.socket(), ("127.0.0.1", port))
    for path in temporary.iterdir():
        with suppress(OSError):
            inside = list(path.iterdir()) if path.is_dir() else path.read_bytes()
            yield f"has looked into {path.name}: {inside!r:.60}"


def take_places(_: Path) -> Iterable[str]:
    """For half a second, take the place of each device that would follow one that is there."""
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        for name in abstract_names():
            taken = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                taken.bind(following(name))
                held.append(taken)
            except OSError:
                taken.close()
    return []


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files that everybody may list, as /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


@needs_root
@pytest.mark.processes
@pytest.mark.parametrize(
    ("exchange", "trying"),
    [("shared", attack), ("collective", attack), ("shared", take_places)],
)
def test_another_user_gets_nothing_and_holds_nothing_up(
    tmp_path: Path, temporary: Path, exchange: str, trying: Callable[[Path], Iterable[str]]
) -> None:
    command = [sys.executable, "-m", "onefold", "run", "--exchange", exchange, "--timeout", "60"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "SOAK_BEGUN": str(tmp_path / "begun"),
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
    }

    def fingerprint(devices: str) -> str:
        done = subprocess.run(
            [*command, "--devices", devices, str(SCRIPT)],
            capture_output=True,
            text=True,
            check=False,
            timeout=150,
            cwd=tmp_path,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        return re.findall(r"^end 24 ([0-9a-f]+)$", done.stdout, re.MULTILINE)[0]

    with somebody_trying(lambda: trying(temporary)) as said:
        attacked = fingerprint("cpu:3")
    rounds, *got = said
    assert got == []
    assert int(rounds) > ROUNDS
    assert attacked == fingerprint("cpu:1")
