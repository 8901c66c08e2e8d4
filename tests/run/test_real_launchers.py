"""Runs that Slurm has started, with the bits of one device.

It is Debian's (``apt-get install slurm-wlm munge``), with all nodes on this machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "placed.py"
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "unshare")
pytestmark = [
    pytest.mark.full,
    pytest.mark.processes,
    pytest.mark.xdist_group("launchers"),
]

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores}
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores}
NodeName=nowhere NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs={cores}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
NODES = ("node1", "node2", "nowhere")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


@contextmanager
def running(command: list[str], log: Path, **environment: str) -> Iterator[None]:
    """A server, which is ended by its id."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A cluster of three nodes on this machine, one of which has a name that does not resolve."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.getuid() != 0:
        pytest.skip(f"Slurm on this machine needs root and slurm-wlm; missing: {missing}")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    host = socket.gethostname()
    text = CONFIGURATION.format(folder=folder, host=host, ports=free_ports(4), cores=os.cpu_count())
    (folder / "slurm.conf").write_text(text)
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + "\n127.0.0.1 node1 node2\n")
    (folder / "key").write_bytes(os.urandom(64))
    (folder / "key").chmod(0o400)
    found = {"SLURM_CONF": str(folder / "slurm.conf")}
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    munged = ["munged", "-F", "-f", f"-S{folder}/munge.socket", f"--key-file={folder}/key", *files]
    with ExitStack() as stack:
        stack.enter_context(running(munged, folder / "munged.log"))
        stack.enter_context(running(["slurmctld", "-D"], folder / "slurmctld.log", **found))
        for node in NODES:
            # Names of nodes, for whatever is started there and nobody else.
            mount = f"mount --bind {folder}/hosts /etc/hosts && exec slurmd -D -N {node}"
            command = ["unshare", "--mount", "sh", "-c", mount]
            stack.enter_context(running(command, folder / f"slurmd-{node}.log", **found))
        wait_until_idle(folder, found)
        yield found


def wait_until_idle(folder: Path, environment: dict[str, str]) -> None:
    ask = ["sinfo", "-h", "-N", "-o", "%t"]
    for _ in range(200):
        done = subprocess.run(
            ask, capture_output=True, text=True, env={**os.environ, **environment}
        )
        if done.stdout.split() == ["idle"] * len(NODES):
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
    pytest.fail(f"the nodes of Slurm did not come up: {done.stdout}{done.stderr}\n{logs}")


def alone() -> str:
    command = [sys.executable, str(SCRIPT), "main"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "options",
    [["-n2", "-wnode1"], ["-n3", "-wnode1"], ["-N2", "-n2", "-wnode1,node2"]],
    ids=["one node", "three tasks", "two nodes"],
)
def test_srun_gives_the_bits_of_one_device(slurm: dict[str, str], options: list[str]) -> None:
    done = subprocess.run(
        ["srun", "--oversubscribe", "--overcommit", *options, sys.executable, str(SCRIPT), "main"],
        capture_output=True,
        text=True,
        env={**os.environ, **slurm},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    size = "3" if "-n3" in options else "2"
    assert done.stdout == alone().replace("1 ", f"{size} ", 1)
