"""``onefold run --hosts``: this machine takes the part of two hosts, under two of its addresses."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkpoint.folders import steps_in
from tests.launcher.test_every_launcher import SCRIPT
from tests.tables import some

HOSTS = "127.0.0.1,127.0.0.2"
VIA = "env HOST={host}"
"""Stands in for ssh: starts the program here."""
ONEFOLD = [sys.executable, "-m", "onefold", "run", "--devices", "cpu:1"]
pytestmark = [pytest.mark.processes]


def command(*options: str, hosts: str = HOSTS, via: str = VIA) -> list[str]:
    return [*ONEFOLD, "--hosts", hosts, "--via", via, *options]


@contextmanager
def running(words: list[str], fate: str = "", **variables: str) -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "FATE": fate, **variables}
    with subprocess.Popen(words, env=environment, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def end_of(words: list[str], fate: str = "", **variables: str) -> tuple[int, str, str]:
    with running(words, fate, **variables) as process:
        out, errors = process.communicate(timeout=120)
        return process.returncode, out, errors


def parts_of(process: subprocess.Popen[str]) -> dict[str, int]:
    """Process ids of the parts of a run, by host."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            if b"onefold.launcher.part" in words and int(parent) == process.pid:
                host = re.search(rb"HOST=([0-9.]+)", (path / "environ").read_bytes())
                found[host[1].decode() if host else "127.0.0.1"] = int(path.name)
        except OSError:
            continue
    return found


def wait_until(condition: object) -> None:
    limit = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < limit
        time.sleep(0.05)


def workers_of(part: int) -> list[int]:
    children = Path(f"/proc/{part}/task/{part}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def once(folder: Path, line: str) -> str:
    """Write a script that calls the common one, after a line that runs once on the second host."""
    script = folder / "script.py"
    script.write_text(
        f"import os, pathlib, runpy\n"
        f"mark = pathlib.Path({str(folder / 'mark')!r})\n"
        f"os.environ['FATE'] = ''\n"
        f"assert os.environ.get('OMP_SCHEDULE') == os.environ.get('FIRST_HOSTS')\n"
        f"if os.environ.get('HOST') and not mark.exists():\n"
        f"    mark.touch()\n"
        f"    {line}\n"
        f"runpy.run_path({SCRIPT!r})\n"
    )
    return str(script)


@pytest.mark.parametrize("killed", some([False, True], 2))
def test_a_run_on_two_hosts_has_the_bits_of_one_device(
    killed: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if it goes on by itself after a worker of the second host was killed."""
    runpy.run_path(SCRIPT)
    expected = capfd.readouterr().out.splitlines()[-1]
    script = once(tmp_path, "os.environ['FATE'] = '1 5 KILL'" if killed else "pass")
    options = ("--checkpoint", str(tmp_path / "run"), "--save-every", "2", "--max-restarts", "1")
    # As ssh does, this hides the variables of the first host.
    via = "env -u OMP_SCHEDULE HOST={host}"
    flags = {"OMP_SCHEDULE": "static", "FIRST_HOSTS": "static"}
    code, out, said = end_of(command(*options, "--json", script, via=via), **flags)
    assert code == 0, said
    told = re.search(r"127\.0\.0\.2: device 1 \(cpu, process \d+\) was killed by SIGKILL", said)
    assert bool(told) == ("restarting (1 of 1)" in said) == killed
    *lines, outcome = out.splitlines()
    assert lines == [expected]
    assert json.loads(outcome)["devices"] == ["cpu", "cpu"]


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts over a folder, which needs root")
def test_the_folder_of_the_first_host_is_enough(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(SCRIPT)
    expected = capfd.readouterr().out.splitlines()[-1]
    seen, other = tmp_path / "seen", tmp_path / "other"
    other.mkdir()
    via = f"unshare --mount sh -c 'mount --bind {other} {seen} && exec \"$@\"' {{host}}"
    seen.mkdir()
    options = ("--checkpoint", str(seen / "run"), "--save-every", "2")
    code, _, said = end_of(command(*options, SCRIPT, via=via), "1 6 TERM")
    assert code == 75, said
    assert "checkpoints are kept on" in said
    code, out, said = end_of(command(*options, SCRIPT, via=via))
    assert (code, out.splitlines()) == (0, [expected]), said
    # Now the second host has them, and the first one has none.
    other.rmdir()
    seen.rename(other)
    seen.mkdir()
    code, _, said = end_of(command(*options, SCRIPT, via=via))
    assert code == 1
    assert "has a checkpoint of step 15" in said


@pytest.mark.full
def test_an_error_on_another_host_is_told_once(tmp_path: Path) -> None:
    code, out, said = end_of(command(once(tmp_path, "raise RuntimeError('once')")))
    assert code == 1
    assert said.count("RuntimeError: once") == 2  # the traceback, and the line about it
    assert "127.0.0.2: device 1" in said
    assert not out


def endless(folder: Path) -> str:
    """Write the common script so that it runs until something ends it."""
    script = folder / "endless.py"
    script.write_text(Path(SCRIPT).read_text().replace("epochs(3)", "epochs(30_000)"))
    return str(script)


@pytest.mark.parametrize("gone", some(["second host", "first host", "launcher"], 3))
def test_all_hosts_end_together(gone: str, tmp_path: Path) -> None:
    options = ("--checkpoint", str(tmp_path / "run"), "--save-every", "1000")
    with running(command(*options, endless(tmp_path))) as process:
        wait_until(lambda: (tmp_path / "run" / "run.record").exists())
        parts = parts_of(process)
        assert len(parts) == 2
        workers = [pid for part in parts.values() for pid in workers_of(part)]
        assert len(workers) == 2
        host = {"first host": "127.0.0.1", "second host": "127.0.0.2"}.get(gone, "")
        os.kill(parts[host] if host else process.pid, signal.SIGKILL)
        _, said = process.communicate(timeout=60)
        if host:
            assert f"{host}: the connection ended" in said
            assert process.returncode == 1
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_a_notice_on_any_host_stops_the_run(tmp_path: Path) -> None:
    options = ("--checkpoint", str(tmp_path / "run"), "--save-every", "1000")
    with running(command(*options, endless(tmp_path))) as process:
        wait_until(lambda: (tmp_path / "run" / "run.record").exists())
        os.kill(parts_of(process)["127.0.0.2"], signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert len(steps_in(tmp_path / "run")) == 1


REFUSED = {
    "another machine first": (
        {"hosts": "192.0.2.7,127.0.0.2"},
        r"the first of --hosts must be this machine .* but got 192\.0\.2\.7",
    ),
    "twice": ({"hosts": "127.0.0.1,127.0.0.1"}, "hosts must differ"),
    "a program that fails": (
        {"via": "sh -c 'exit 255' {host}"},
        r"127\.0\.0\.2: the connection ended \(`.*`: exit code 255\)",
    ),
    "no such program": ({"via": "no-such-program {host}"}, "no-such-program could not be started"),
    "no host in the command": ({"via": "ssh"}, r"--via must be a command with \{host\}"),
    "a shell that greets": (
        {"via": "sh -c 'echo Welcome; exec \"$@\"' {host}"},
        "Its shell must print nothing to stdout",
    ),
    "another version": (
        {"via": "sh -c 'echo \"$HELLO\"; cat' {host}"},
        "127.0.0.2 has onefold 0.1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_before_any_step(case: str) -> None:
    given, words = REFUSED[case]
    code, out, said = end_of(command(SCRIPT, **given), HELLO='{"onefold": "0.1"}')
    assert code not in (0, 75)
    assert re.search(words, said), said
    assert "Traceback" not in said
    assert not out


def test_a_script_that_a_host_lacks_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    words = command(str(script), via=f"sh -c 'rm {script}; exec \"$@\"' {{host}}")
    code, _, said = end_of(words)
    assert code != 0
    assert "does not exist on" in said


def test_hosts_come_from_a_file_or_a_variable(tmp_path: Path) -> None:
    from onefold.options import options_of

    file = tmp_path / "hosts"
    file.write_text("node1  # the first\n\nnode2\n")
    assert options_of({"ONEFOLD_HOSTS": str(file)}).hosts == ("node1", "node2")
    assert options_of({"ONEFOLD_HOSTS": "a, b"}).hosts == ("a", "b")
    file.write_text("node1 slots=4\n")
    with pytest.raises(Exception, match=r"one per line of a file, but got 'node1 slots=4'"):
        options_of({"ONEFOLD_HOSTS": str(file)})


def test_options_of_one_host_are_refused(tmp_path: Path) -> None:
    code, _, said = end_of(command("--profile", str(tmp_path), SCRIPT))
    assert code != 0
    assert "--profile cannot be used with --hosts" in said
