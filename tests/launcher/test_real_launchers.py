"""Runs that Slurm, Open MPI and Ray Train have started, with the bits of one device.

Slurm and Open MPI are Debian's (``apt-get install slurm-wlm munge openmpi-bin``), with all nodes on
this machine; Ray Train is PyPI's (``pip install "ray[train]"``).
"""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.folders import steps_in
from tests.launcher.test_every_launcher import ONEFOLD, run
from tests.launcher.test_every_launcher import SCRIPT as STOPPED_ANYWHERE
from tests.launcher.test_launch_files import fated, whole
from tests.launcher.test_launch_files import variables as launch_variables
from tests.tools.test_host_watch import SCRIPT as SCRIPT_THAT_HANGS
from tests.tools.test_host_watch import started, told_by

SCRIPT = Path(__file__).parent.parent / "scripts" / "placed.py"
MAIN = [sys.executable, str(SCRIPT), "main"]
RAY = Path(__file__).parent.parent / "scripts" / "with_ray.py"
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "unshare")
pytestmark = [pytest.mark.full, pytest.mark.processes, pytest.mark.xdist_group("launchers")]

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
FirstJobId=12000
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
    """A cluster of three nodes on this machine, one of which has a name that does not resolve.

    The ports of its jobs follow their numbers; those of the first ones Ray may have.
    """
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
    return subprocess.run(MAIN, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "options", ["-n2 -wnode1", "-n3 -wnode1", "-N2 -n2 -wnode1,node2", "-n2 -wnowhere"]
)
def test_srun_gives_the_bits_of_one_device(slurm: dict[str, str], options: str) -> None:
    """On one node, whose name need not resolve, and on two."""
    command = ["srun", "--oversubscribe", "--overcommit", *options.split(), *MAIN]
    how: Any = {"capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(command, env={**os.environ, **slurm}, **how)
    size = "3" if "-n3" in options else "2"
    assert (done.returncode, done.stdout) == (0, alone().replace("1 ", f"{size} ", 1)), done.stderr


def test_a_run_under_srun_stops_and_resumes(slurm: dict[str, str], tmp_path: Path) -> None:
    """On two nodes, by the options of ``onefold run`` in each task."""
    joined = [*ONEFOLD, "--checkpoint", str(tmp_path), "--save-every", "100", STOPPED_ANYWHERE]
    command = ["srun", "--overcommit", "-N2", "-n2", "-wnode1,node2", *joined]
    how: Any = {"capture_output": True, "text": True, "timeout": 300}
    ends = []
    for fate in ("1 5 TERM", ""):
        done = subprocess.run(command, env={**os.environ, **slurm, "FATE": fate}, **how)
        ends.append((done.returncode, done.stdout.splitlines()[-1:]))
    _, whole = run("python")
    assert ends == [(75, []), (0, whole.splitlines()[-1:])], done.stderr


def test_a_name_that_does_not_resolve_is_named(slurm: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    nodes = ["-N2", "-n2", "-m", "plane=1", "-wnowhere,node1"]
    # The lead is the first in Slurm's order, which is that of the configuration.
    with running(["srun", "--overcommit", *nodes, *MAIN], log, **slurm, MASTER_ADDR="nowhere"):
        for _ in range(400):
            if "does not resolve" in log.read_text():
                break
            time.sleep(0.1)
    said = log.read_text()
    assert "device 1 has waited for 1" in said
    assert "device 0 cannot be reached at nowhere:" in said
    assert "the name nowhere does not resolve on " in said


def test_a_hang_under_srun_is_told(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT_THAT_HANGS)
    ranked = ["sh", "-c", 'RANK=$SLURM_PROCID exec "$@"', "sh", sys.executable, "train.py"]
    command = ["srun", "--overcommit", "-N2", "-n2", "-wnode1,node2", *ranked, "forward", "1"]
    text = told_by([started(command, tmp_path, slurm)], " has waited for ")
    assert "device 0 has waited for 1" in text
    assert "computes shard 1 in step 6:" in text
    assert "in loss\n" in text


def test_hosts_are_reached_through_ssh(tmp_path: Path) -> None:
    """The second host is this machine, behind a server of its own."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None or os.getuid() != 0:
        pytest.skip("needs root and openssh-server")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        path = str(tmp_path / name)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    (port,) = free_ports(1)
    settings = {
        "Port": port,
        "ListenAddress": "127.0.0.2",
        "HostKey": tmp_path / "host",
        "AuthorizedKeysFile": tmp_path / "user.pub",
        "PermitRootLogin": "yes",
        "StrictModes": "no",
    }
    (tmp_path / "server").write_text("".join(f"{k} {v}\n" for k, v in settings.items()))
    options = ("StrictHostKeyChecking=no", f"UserKnownHostsFile={tmp_path / 'known'}")
    ssh = ["ssh", "-i", str(tmp_path / "user"), "-p", str(port), *(f"-o{each}" for each in options)]
    command = [*ONEFOLD, "--hosts", "127.0.0.1,127.0.0.2", "--via", " ".join([*ssh, "{host}"])]
    with running([server, "-D", "-e", "-f", str(tmp_path / "server")], tmp_path / "log"):
        done = subprocess.run(
            [*command, "--devices", "cpu:1", STOPPED_ANYWHERE],
            capture_output=True,
            text=True,
            timeout=300,
        )
    _, whole = run("python")
    assert (done.returncode, done.stdout) == (0, whole.splitlines()[-1] + "\n"), done.stderr


def test_mpirun_is_refused_with_the_command_that_works() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed")
    mpirun = "mpirun --oversubscribe --allow-run-as-root -np 2"
    script = " ".join(MAIN)
    refused = subprocess.run(f"{mpirun} {script}", shell=True, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (1, "")
    (line,) = {line for line in refused.stderr.splitlines() if line.startswith("    mpirun")}
    command = line.partition("  (HOST")[0].replace("mpirun", mpirun, 1)
    command = command.replace("python train.py", script).replace("HOST", "127.0.0.1")
    port = str(free_ports(1)[0])
    done = subprocess.run(
        command.replace("29500", port), shell=True, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout) == (0, alone().replace("1 ", "2 ", 1)), done.stderr


def test_ray_train_gives_the_bits_of_one_device(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray Train is not installed")
    done = subprocess.run(
        [sys.executable, str(RAY), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    bits = [(tmp_path / f"bits-{rank}").read_text() for rank in range(2)]
    assert bits == [alone().split()[1]] * 2


# The launch files, which continue a run by themselves


def in_time(condition: Callable[[], object], limit_s: float = 240.0) -> Any:
    """Wait until a condition is true, and return its value."""
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, "this took too long"
        time.sleep(0.3)
    return found


@pytest.mark.parametrize("fate", ["notice", "killed process", "lost node"])
def test_a_job_of_slurm_requeues_itself_and_resumes(
    slurm: dict[str, str], tmp_path: Path, fate: str
) -> None:
    gpus, tasks = " --gpus-per-node=4", "--ntasks-per-node=4"
    changes = {gpus: "", tasks: "--ntasks-per-node=1 --overcommit", "10m": "20"}
    at = fated(tmp_path, "slurm.sbatch", changes)
    happens = {
        "notice": "scancel --signal=USR1 $SLURM_JOB_ID",  # as --signal of the job does
        "killed process": "kill -KILL $PID",
        "lost node": "scontrol update nodename=node2 state=down reason=test",
    }[fate]
    (at / "fate").write_text(f"70 other {happens}")
    environment = launch_variables(**slurm)

    def ask(*command: str) -> str:
        how: Any = {"capture_output": True, "text": True, "cwd": at, "env": environment}
        return subprocess.run(command, check=True, **how).stdout

    # After a loss, the job continues on the node that is left.
    job = ask("sbatch", "--parsable", "-N1-2", "-wnode1", "-xnowhere", "-oout", "slurm.sbatch")
    job = job.strip()

    def state() -> dict[str, str]:
        words = ask("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words)

    def ended() -> bool:
        found = state()
        if (found["JobState"], found["Restarts"]) == ("PENDING", "1"):
            # Slurm waits two minutes before it starts a job again.
            now = ["scontrol", "update", f"jobid={job}", "StartTime=now"]
            subprocess.run(now, env=environment, capture_output=True, check=False)
        return (found["JobState"], found["Restarts"]) == ("COMPLETED", "1")

    try:
        in_time(ended)
    finally:
        # The node may have returned by itself.
        for command in ("scancel " + job, "scontrol update nodename=node2 state=resume"):
            subprocess.run(command.split(), env=environment, check=False)
        wait_until_idle(at, slurm)
    said = (at / "out").read_text()
    (resumed,) = re.findall(r"resuming after step (\d+)", said)
    # Slurm ends the tasks of a lost node's job with SIGTERM, after which they may save the run.
    assert {"notice": 70, "killed process": 60, "lost node": 60}[fate] <= int(resumed) <= 71
    assert said.splitlines()[-1] == whole()


def test_ray_restarts_its_workers_and_the_run_resumes(tmp_path: Path) -> None:
    """The end is saved as well, though Ray kills its workers after the training function."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray Train is not installed")
    workers = {"num_workers=4, use_gpu=True": "num_workers=2", '"5m"': '"20"'}
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as temporary:
        local = f'num_cpus=4, include_dashboard=False, _temp_dir="{temporary}", runtime_env='
        at = fated(tmp_path, "ray_train.py", {**workers, "runtime_env=": local})
        environment = launch_variables(RAY_USAGE_STATS_ENABLED="0", RAY_TRAIN_V2_ENABLED="1")
        (at / "fate").write_text("70 lead kill -KILL $PID")
        ends = []
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "ray_train.py"],
                cwd=at,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stdout
            ends.append(done.stdout)
    assert "resuming after step 60" in ends[0]
    assert "resuming after step 200" in ends[1], "the whole run is done"
    assert steps_in(at / "runs" / "a")[-1] == 200
    assert whole() in ends[0]
    assert whole() in ends[1]
