"""A run of ``tests/soak/train.py`` that another user attacks: ``attacked.py KIND EXCHANGE FOLDER``.

KIND is a name of `ATTACKS`; with ``code``, EXCHANGE is a launcher. Run and attack are in a network
of their own, so that nobody else on the host is met. Prints, as JSON, how often was attacked, what
was got hold of, and how the run ended. Needs root.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.somebody import somebody_trying

SCRIPT = Path(__file__).parents[1] / "soak" / "train.py"
COMPILING = Path(__file__).parent / "compiling.py"
_CLONE_NEWNET = 0x40000000
JUNK = (b"", b"\0" * 8, b"\x80\x04\x95", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 4096, b"\1\0\0\0")
held: list[socket.socket] = []
"""Places that were taken, in the other user's process."""


def own_network() -> None:
    """Leave the host's network for one that has a loopback interface and nothing else."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "expected to be able to have a network of its own")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def run_processes() -> list[str]:
    """Numbers of the processes of runs of the script."""
    found = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            command = Path("/proc", number, "cmdline").read_bytes()
            if str(SCRIPT).encode() in command and b"attacked" not in command:
                found.append(number)
    return found


def abstract_names() -> Iterator[str]:
    """Of sockets without a file; anybody may list them."""
    for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]:
        name = line.rpartition(" ")[2]
        if name.startswith("@onefold"):
            yield "\0" + name[1:]


def loopback_ports() -> Iterator[int]:
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
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


def try_everything(temporary: Path) -> Iterable[str]:
    """One round of all that another user can do."""
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
                taken.bind(name[:-1] + chr(ord(name[-1]) + 1))  # if names were counted
                held.append(taken)
            except OSError:
                taken.close()
    return []


def plant_code(temporary: Path) -> Iterable[str]:
    """Make PyTorch's folder for compiled code first, and look for whatever trusts it."""
    theirs = temporary / "torchinductor_root"
    inside = theirs / "precompiled_headers"
    for folder in (theirs, inside, inside / "locks", theirs / "fxgraph", theirs / "aotautograd"):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
    for path in theirs.rglob("*"):
        if path.stat().st_uid != os.geteuid():
            yield f"was trusted with {path.relative_to(temporary)}"


ATTACKS: dict[str, Callable[[Path], Iterable[str]]] = {
    "everything": try_everything,
    "places": take_places,
    "code": plant_code,
}


def main(kind: str, exchange: str, folder: Path) -> None:
    if kind == "code":
        attack_compiler(exchange, folder)
        return
    own_network()
    options = ("--devices=cpu:3", "--timeout=60", f"--exchange={exchange}")
    variables = {"SOAK_BEGUN": str(folder / "begun")}
    attack(kind, ["-m", "onefold", "run", *options, str(SCRIPT)], variables)


def attack_compiler(launcher: str, folder: Path) -> None:
    """A run that compiles, under a launcher: ``onefold``, ``torchrun`` or none, ``python``."""
    commands = {
        "onefold": ["-m", "onefold", "run", "--devices=cpu:2"],
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        "python": [],
    }
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    variables = {"HOME": str(folder), "LOGNAME": "root"}
    attack("code", [*commands[launcher], str(COMPILING)], variables)


def attack(kind: str, command: list[str], variables: dict[str, str]) -> None:
    """Run a command of Python's while another user tries, and print what came of both."""
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        Path(temporary).chmod(0o1777)  # as /tmp is
        with somebody_trying(lambda: ATTACKS[kind](Path(temporary))) as got:
            if kind == "code":
                time.sleep(1)  # he is there first
            done = subprocess.run(
                [sys.executable, *command],
                capture_output=True,
                text=True,
                check=False,
                timeout=400,
                env={**os.environ, "TMPDIR": temporary, **variables},
            )
    rounds, *held_by_other = got
    print(json.dumps([int(rounds), held_by_other, done.returncode, done.stdout, done.stderr]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
