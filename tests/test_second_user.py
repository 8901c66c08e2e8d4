"""Another user of the host tries all the while to get into a run, and to hold it up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import onefold
from tests.somebody import needs_root

pytestmark = pytest.mark.full

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = Path(__file__).parent / "soak" / "train.py"
SOURCE = Path(onefold.__file__).parent.parent
LIMIT_S = 170
needs_ip = pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip, of iproute2")


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


@needs_root
@needs_ip
@pytest.mark.processes
@pytest.mark.parametrize(
    ("attack", "exchange"),
    [("everything", "shared"), ("everything", "collective"), ("places", "shared")],
)
def test_another_user_gets_nothing_and_holds_nothing_up(
    tmp_path: Path, attack: str, exchange: str
) -> None:
    said = run(tmp_path, str(SCRIPTS / "attacked.py"), attack, exchange, str(tmp_path))
    rounds, got, code, output, errors = json.loads(said)
    assert got == []
    assert rounds > 5
    assert (code, output) == (0, run(tmp_path, str(TRAIN))), errors


@needs_root
@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("launcher", ["python", "onefold", "torchrun"])
def test_no_compiled_code_lies_where_another_user_can_change_it(
    tmp_path: Path, launcher: str
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    said = run(tmp_path, str(SCRIPTS / "attacked.py"), "code", launcher, str(home))
    rounds, got, code, output, errors = json.loads(said)
    assert got == []
    assert rounds > 5
    assert code == 0, errors
    assert len(output.split()[-1]) == 16
    (kept,) = (home / ".cache" / "onefold" / "compiled").iterdir()
    assert list(kept.rglob("*.so"))


@pytest.fixture
def networks() -> Iterator[tuple[list[str], list[str]]]:
    """Two networks that reach each other, as commands to run something in one."""
    names = [f"onefold-{os.getpid()}-{n}" for n in (1, 2)]
    ways = [f"of{os.getpid() % 10**8}{n}" for n in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ways[0], "type", "veth", "peer", "name", ways[1])
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"needs networks of its own: {error.stderr!r}")
    try:
        for number, (name, way) in enumerate(zip(names, ways, strict=True), 1):
            ip("link", "set", way, "netns", name)
            ip("-n", name, "link", "set", way, "name", "way")
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "way")
            for device in ("way", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield tuple(["ip", "netns", "exec", name] for name in names)  # type: ignore[misc]
    finally:
        for name in names:
            ip("netns", "del", name)


SECRET = {"ONEFOLD_SECRET": "long enough that nobody guesses it"}


def start(where: list[str], *words: object, **more: str) -> subprocess.Popen[str]:
    """Start something in a network; what it says is read by its user."""
    common = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29555", "WORLD_SIZE": "2"}
    alone = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "way"}
    return subprocess.Popen(
        [*where, sys.executable, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **common, **alone, **more},
    )


def end(*processes: subprocess.Popen[str] | None) -> None:
    for process in filter(None, processes):
        process.kill()
        process.communicate()


@needs_root
@needs_ip
@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(("when", "rank"), [("early", 1), ("late", 0)])
def test_a_stranger_who_reaches_the_store_does_not_get_between_devices(
    networks: tuple[list[str], list[str]], when: str, rank: int
) -> None:
    """Early: before the device comes whose part he takes; late: after it has said its own."""
    inside, outside = networks
    first = start(inside, SCRIPTS / "apart.py", "train", RANK="0", **SECRET)
    key = f"onefold/-29555-/kind/{rank}"
    stranger = start(outside, SCRIPTS / "stranger.py", "10.77.0.1", "29555", key, "cpu")
    second = None
    try:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "set\n"
        second = start(inside, SCRIPTS / "apart.py", "train", RANK="1", **SECRET)
        hurt = first if when == "early" else second
        said = "".join(hurt.communicate(timeout=LIMIT_S))
        assert hurt.returncode != 0
        assert f"a value under {key} that was written without the secret" in said
        assert "a stranger writes to the store" in said
    finally:
        end(first, second, stranger)


@needs_root
@needs_ip
@pytest.mark.processes
@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("when", "secret"),
    [
        # That he gets in between where there is no secret makes the others worth something.
        ("late", {}),
        ("late", SECRET),
        ("early", SECRET),
    ],
)
def test_a_relay_in_another_network_does_not_get_between_devices(
    networks: tuple[list[str], list[str]], when: str, secret: dict[str, str]
) -> None:
    """Early: he is there before the devices, and writes their addresses before they do; late: when
    device 0 has said its own kind. He has the store and the connection that device 1 makes."""
    inside, outside = networks
    low, high = "10.76.0.2", "10.77.0.2"
    subprocess.run([*outside, "ip", "addr", "add", f"{low}/32", "dev", "way"], check=True)
    subprocess.run([*inside, "ip", "route", "add", f"{low}/32", "via", high], check=True)
    between = (SCRIPTS / "between.py", "10.77.0.1", "29555", low, high)
    relay = start(outside, *between) if when == "early" else None
    first = start(inside, SCRIPTS / "apart.py", "train", RANK="0", **secret)
    key, second = "onefold/-29555-/group/0/1/onefold//cpu//0/0", None
    stranger = None
    try:
        if when == "early":
            stranger = start(outside, SCRIPTS / "stranger.py", "10.77.0.1", "29555", key, "x")
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "set\n"
        else:
            registered = (SCRIPTS / "registered.py", "10.77.0.1", "29555", "onefold/-29555-/kind/0")
            subprocess.run([*outside, sys.executable, *registered], check=True, timeout=LIMIT_S)
            relay = start(outside, *between)
        assert relay is not None
        assert relay.stdout is not None
        assert relay.stdout.readline() == "ready\n"
        place = {"MASTER_ADDR": high}
        second = start(inside, SCRIPTS / "apart.py", "train", RANK="1", **secret, **place)
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
    finally:
        end(first, second, stranger, relay)
