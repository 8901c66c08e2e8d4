"""Two hosts on one machine: network namespaces joined by a link of known speed. Requires root.

A namespace has its own loopback, addresses and ports, so processes in two namespaces see each other
like two hosts. Traffic leaving either end of the link passes a token bucket (`tc tbf`), and, for a
latency, a delaying queue (`tc netem`).
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cable", "Host", "NetworkError", "alone_on_loopback", "two_hosts", "why_not"]

TOOLS = ("ip", "tc", "unshare")
NAMESPACES = Path("/run/netns")
"""Where `ip` stores the names of namespaces."""
BURST = "128kb"
QUEUE = "16mb"
"""Long enough that nothing is dropped, because TCP's reaction to losses is not measured here."""
END_LIMIT_S = 10.0


class NetworkError(RuntimeError):
    """The network could not be created."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """The link between two hosts."""

    mbit_per_s: int
    """Speed in each direction, including headers."""
    delay_ms: float = 0.0
    """Each way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One end of the link."""

    name: str
    """Name of the namespace, and of the network interface in it."""
    address: str
    """Its IPv4 address."""

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on this host."""
        return ["ip", "netns", "exec", self.name, *command]


def why_not() -> str | None:
    """Return why no network can be created here, in one line; None if it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)}, which are not installed"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return "requires root to create network namespaces"
    return None


def alone_on_loopback(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` in a separate namespace with only a loopback."""
    script = 'ip link set lo up && exec "$@"'
    return ["unshare", "--net", "sh", "-c", script, "sh", *command]


@contextmanager
def two_hosts(cable: Cable) -> Iterator[tuple[Host, Host]]:
    """Create two hosts joined by `cable`; remove them and all their processes at the end.

    Raises:
        NetworkError: a command failed. The message names it.
    """
    reason = why_not()
    if reason is not None:
        raise NetworkError(reason)
    hosts = tuple(
        Host(name=f"of{os.getpid()}{side}", address=f"10.77.0.{number}")
        for number, side in ((1, "a"), (2, "b"))
    )
    with ExitStack() as undo:
        for host in hosts:
            undo.callback(_remove, host)  # first, because Ctrl-C may follow immediately
            _do("ip", "netns", "add", host.name)
        first, second = hosts
        ends = ("type", "veth", "peer", "name", second.name, "netns", second.name)
        _do("ip", "link", "add", first.name, "netns", first.name, *ends)
        for host in hosts:
            _set_up(host, cable)
        yield first, second


def _set_up(host: Host, cable: Cable) -> None:
    inside = ("-n", host.name)
    _do("ip", *inside, "address", "add", f"{host.address}/24", "dev", host.name)
    _do("ip", *inside, "link", "set", "lo", "up")
    _do("ip", *inside, "link", "set", host.name, "up")
    queue = ("tc", *inside, "qdisc", "add", "dev", host.name)
    place: tuple[str, ...] = ("root", "handle", "1:")
    if cable.delay_ms:
        _do(*queue, *place, "netem", "delay", f"{cable.delay_ms}ms", "limit", "100000")
        place = ("parent", "1:1", "handle", "2:")
    bucket = ("tbf", "rate", f"{cable.mbit_per_s}mbit", "burst", BURST, "limit", QUEUE)
    _do(*queue, *place, *bucket)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")


def _remove(host: Host) -> None:
    """Stop remaining processes on the host, and remove it if it was created."""
    if not (NAMESPACES / host.name).exists():
        return
    limit_s = time.monotonic() + END_LIMIT_S
    while (running := _processes(host)) and time.monotonic() < limit_s:
        for pid in running:
            _kill(pid)
        time.sleep(0.05)
    _do("ip", "netns", "delete", host.name)


def _processes(host: Host) -> list[int]:
    listed = subprocess.run(
        ["ip", "netns", "pids", host.name], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in listed.stdout.split()]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended by itself
