"""Another user of the host tries all the while to get into a run, and to hold it up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which

import pytest

import onefold
from tests.somebody import needs_root
from tests.warm import SCRIPTS

needs_ip = pytest.mark.skipif(which("ip") is None, reason="needs ip, of iproute2")
pytestmark = [pytest.mark.full, pytest.mark.processes, needs_root, needs_ip]

TRAIN = SCRIPTS.parent / "soak" / "train.py"
SOURCE = Path(onefold.__file__).parent.parent
LIMIT_S = 170


def run(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "SOAK_BEGUN": str(folder / "begun")}
    return subprocess.run(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LIMIT_S * 3 if "code" in words else LIMIT_S,
        cwd=folder,
        env=environment,
    ).stdout


@pytest.mark.parametrize(
    ("attack", "way"),
    [
        *(("everything", "shared"), ("everything", "collective"), ("places", "shared")),
        *(("code", launcher) for launcher in ("python", "onefold", "torchrun")),
    ],
)
def test_another_user_gets_nothing_and_holds_nothing_up(
    tmp_path: Path, attack: str, way: str
) -> None:
    """Nor does compiled code lie where he can change it."""
    (home := tmp_path / "home").mkdir(mode=0o700)
    folder = home if attack == "code" else tmp_path
    said = run(tmp_path, str(SCRIPTS / "attacked.py"), attack, way, str(folder))
    rounds, got, code, output, errors = json.loads(said)
    assert (got, code) == ([], 0), errors
    assert rounds > 5
    if attack == "code":
        assert len(output.split()[-1]) == 16
        (kept,) = (home / ".cache" / "onefold" / "compiled").iterdir()
        assert list(kept.rglob("*.so"))
    else:
        assert output == run(tmp_path, str(TRAIN)), errors


Network = list[str]
"""The beginning of a command that is run in one."""


@pytest.fixture
def networks() -> Iterator[tuple[Network, Network]]:
    """Two that reach each other."""
    names = [f"onefold-{os.getpid()}-{n}" for n in (1, 2)]
    ways = [f"of{os.getpid() % 10**8}{n}" for n in "ab"]

    def ip(*words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words], check=check, capture_output=True)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", ways[0], "type", "veth", "peer", "name", ways[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs networks of its own: {error.stderr!r}")
        for number, (name, way) in enumerate(zip(names, ways, strict=True), 1):
            ip("link", "set", way, "netns", name)
            ip("-n", name, "link", "set", way, "name", "way")
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "way")
            for device in ("way", "lo"):
                ip("-n", name, "link", "set", device, "up")
        inside, outside = (["ip", "netns", "exec", name] for name in names)
        yield inside, outside
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


SECRET = {"ONEFOLD_SECRET": "long enough that nobody guesses it"}
STORE = ("10.77.0.1", "29555")
Process = subprocess.Popen[str]
Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts something in a network; what it says is read by its user."""
    started: list[Process] = []
    common = {"MASTER_ADDR": STORE[0], "MASTER_PORT": STORE[1], "WORLD_SIZE": "2"}
    alone = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "way"}

    def begin(where: Network, script: str, *words: str, says: str = "", **more: str) -> Process:
        process = subprocess.Popen(
            [*where, sys.executable, str(SCRIPTS / script), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE), **common, **alone, **more},
        )
        started.append(process)
        assert process.stdout is not None
        assert not says or process.stdout.readline() == f"{says}\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("when", "rank"), [("early", 1), ("late", 0)])
def test_a_stranger_who_reaches_the_store_does_not_get_between_devices(
    networks: tuple[Network, Network], start: Start, when: str, rank: int
) -> None:
    """Early: before the device comes whose part he takes; late: after it has said its own."""
    inside, outside = networks
    first = start(inside, "apart.py", "train", RANK="0", **SECRET)
    key = f"onefold/-29555-/kind/{rank}"
    start(outside, "stranger.py", *STORE, key, "cpu", says="set")
    second = start(inside, "apart.py", "train", RANK="1", **SECRET)
    hurt = first if when == "early" else second
    said = "".join(hurt.communicate(timeout=LIMIT_S))
    assert hurt.returncode != 0
    assert f"a value under {key} that was written without the secret" in said
    assert "a stranger writes to the store" in said


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("when", "secret"),
    # That he gets in between where there is no secret makes the others worth something.
    [("late", {}), ("late", SECRET), ("early", SECRET)],
)
def test_a_relay_in_another_network_does_not_get_between_devices(
    networks: tuple[Network, Network], start: Start, when: str, secret: dict[str, str]
) -> None:
    """Early: he is there before the devices, and writes their addresses before they do; late: when
    device 0 has said its own kind. He has the store and the connection that device 1 makes."""
    inside, outside = networks
    low, high = "10.76.0.2", "10.77.0.2"
    subprocess.run([*outside, "ip", "addr", "add", f"{low}/32", "dev", "way"], check=True)
    subprocess.run([*inside, "ip", "route", "add", f"{low}/32", "via", high], check=True)
    relay = start(outside, "between.py", *STORE, low, high) if when == "early" else None
    first = start(inside, "apart.py", "train", RANK="0", **secret)
    if relay is not None:
        key = "onefold/-29555-/group/0/1/onefold//cpu//0/0"
        start(outside, "stranger.py", *STORE, key, "x", says="set")
        assert relay.stdout.readline() == "ready\n"
    else:
        waiting = start(outside, "registered.py", *STORE, "onefold/-29555-/kind/0")
        assert waiting.wait(LIMIT_S) == 0
        relay = start(outside, "between.py", *STORE, low, high, says="ready")
    second = start(inside, "apart.py", "train", RANK="1", **secret, MASTER_ADDR=high)
    devices = (first, second)
    said = ["".join(device.communicate(timeout=LIMIT_S)) for device in devices]
    relay.kill()
    done, _ = relay.communicate()
    assert ("passed on" in done) == (not secret), said
    assert "replaced" in done or when == "early"
    assert all((device.returncode == 0) == (not secret) for device in devices), said
    if secret:
        assert any("that was written without the secret of this run" in each for each in said)
        assert "a stranger writes to the store" in said[0] + said[1]
