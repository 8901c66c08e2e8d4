"""A process that is alone where a launcher says that there are others does not train."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.core.options import LaunchContext
from onefold.errors import LaunchError
from onefold.launcher import foreign_launchers
from onefold.launcher.environment import read_context
from onefold.launcher.foreign_launchers import others_of
from onefold.launcher.launch import worker_environment
from onefold.session import forming
from tests.launcher.test_slurm import SRUN
from tests.tables import for_each

POD = {
    "PET_NNODES": "3",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "trainer-node-0-0.trainer",
    "PET_MASTER_PORT": "29400",
    "PET_NPROC_PER_NODE": "1",
}
"""Of Kubeflow's Trainer: torchrun's own variables, for torchrun to read."""


def mpi(prefix: str) -> dict[str, str]:
    names = {"RANK": "2", "SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    return {f"{prefix}_{name}": value for name, value in names.items()}


PMI = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
FLUX = {"FLUX_TASK_RANK": "2", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "0"}
FLUX |= {"FLUX_JOB_NNODES": "2"}
PROCESSES = {
    "Open MPI": mpi("OMPI_COMM_WORLD"),
    "MVAPICH": mpi("MV2_COMM_WORLD"),
    "jsrun": mpi("JSM_NAMESPACE"),
    "Horovod": mpi("HOROVOD"),
    "Flux": FLUX,
    "a launcher of MPI": PMI,
}
NODES = {
    "Kubeflow Trainer": {**POD, "PET_NPROC_PER_NODE": "4"},
    "SkyPilot": {"SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_RANK": "1"},
    "dstack": {"DSTACK_NODES_NUM": "3"},
    "SageMaker": {"SM_HOSTS": '["algo-1", "algo-2", "algo-3"]'},
    "Azure ML": {"AZUREML_NODE_COUNT": "3"},
    "LeaderWorkerSet": {"LWS_GROUP_SIZE": "3"},
    "Beaker": {"BEAKER_REPLICA_COUNT": "3"},
}


@for_each("name", [*PROCESSES, *NODES])
def test_who_is_alone_among_others_must_not_train(name: str) -> None:
    environment = PROCESSES.get(name) or NODES[name]
    context = read_context(environment)
    assert (context.size, context.launched) == (1, False)
    count = "4 processes" if name in PROCESSES else "3 nodes"
    assert f"means that {name} has started " in context.others
    assert context.others.endswith(count)
    for words in (
        context.others,
        "onefold run --devices 1 train.py",
        "To make all of them one run",
    ):
        assert words in context.refusal
    with pytest.raises(LaunchError, match="so each would train a separate model"):
        forming.choose_devices(context, None, shards=2, module=torch.nn.Linear(1, 1))


@for_each("name", PROCESSES)
def test_the_command_makes_one_run_of_all(name: str) -> None:
    """What it starts in place of the script here prints the environment that it was given."""
    command = others_of(PROCESSES[name]).refusal.split("\n    ")[1]
    begin, end = command.index("sh -c"), command.index("  (HOST")
    shell = command[begin:end].replace("python train.py", "env").replace("HOST", "node1")
    path = os.environ["PATH"]
    done = subprocess.run(
        ["sh", "-c", shell], env={**PROCESSES[name], "PATH": path}, capture_output=True, text=True
    )
    given = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    context = read_context(given)
    assert (context.rank, context.size, context.local_rank, context.local_size) == (2, 4, 0, 2)
    assert (context.launcher, context.address, context.refusal) == ("torch", "node1:29500", "")


NOT_REFUSED = {
    "mpirun -n 1": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
    "mpiexec -n 1": {"PMI_SIZE": "1", "PMI_RANK": "0", "PALS_RANKID": "0"},
    "one node": {"SKYPILOT_NUM_NODES": "1", "DSTACK_NODES_NUM": "1", "SM_HOSTS": '["algo-1"]'},
    "one pod": {**POD, "PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"},
    "what is no number": {"PMI_SIZE": "", "FLUX_JOB_SIZE": "many", "SM_HOSTS": "[algo"},
    "a terminal of srun": {**SRUN, "SLURM_PTY_PORT": "1", "PMI_SIZE": "6", "PMI_RANK": "5"},
    "a program that a device starts": {
        name: value
        for name, value in worker_environment(
            LaunchContext(rank=1, size=3, launcher="onefold")
        ).items()
        if name != "ONEFOLD_CONTEXT"
    },
}


@for_each("name", NOT_REFUSED)
def test_who_is_alone_by_right_may_train(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_launchers, "has_terminal", lambda: True)
    assert read_context(NOT_REFUSED[name]) == LaunchContext()


@for_each(
    ("environment", "words"),
    [
        (
            {"PMIX_RANK": "1"},
            "PMIX_RANK=1 means that a launcher of MPI has started other processes",
        ),
        ({**POD, "PET_NNODES": "1:4"}, "PET_NNODES=1:4 means that Kubeflow Trainer has started"),
        ({**POD, "PET_NPROC_PER_NODE": "auto"}, "on 3 nodes"),
        ({"PET_NNODES": "3"}, "on 3 nodes"),
        ({**POD, "PET_RDZV_ENDPOINT": "a:1"}, "on 3 nodes"),
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE=3 means that a launcher has started 3 processes"),
        ({"WORLD_SIZE": "3", "RANK": "0", "MASTER_ADDR": "a"}, "started 3 processes"),
        ({**SRUN, **mpi("OMPI_COMM_WORLD")}, "OMPI_COMM_WORLD_SIZE=4 means that Open MPI"),
    ],
)
def test_what_is_not_enough_to_join(environment: dict[str, str], words: str) -> None:
    context = read_context(environment)
    assert (context.size, context.launched) == (1, False)
    assert words in context.others
    if "RANK" in environment:
        assert "or set MASTER_PORT as well, or unset WORLD_SIZE" in context.refusal


SCRIPT = """
import torch, onefold
m = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
trainer = onefold.Trainer(m, optimizer, lambda m, x: m(x).square().mean(1), shards=2)
print(trainer.step(torch.ones(4, 2)).number)
"""
REFUSED = "LaunchError: OMPI_COMM_WORLD_SIZE=4 means that Open MPI has started 4 processes"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ([], 1, REFUSED),
        (["-m", "onefold", "run", "--devices", "cpu:1"], 0, "onefold starts a separate run, on"),
    ],
)
def test_a_script_is_refused(tmp_path: Path, command: list[str], code: int, words: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    around = {**os.environ, **PROCESSES["Open MPI"]}
    command = [sys.executable, *command, str(path)]
    done = subprocess.run(command, env=around, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "" if code else "1\n"), done.stderr
    assert words in done.stderr


READER = """
import os, torch
class Stream(torch.utils.data.IterableDataset):
    def __init__(self):
        self.size = os.environ.get("SLURM_NTASKS", 1)
        self.built = os.environ.get("WORLD_SIZE"), "RANK" in os.environ
    def __iter__(self):
        return iter([dict(os.environ), os.environ.copy(), {**os.environ}])
def read():
    return os.environ["RANK"], os.getenv("LOCAL_RANK", "none")
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of an installed library, in the environment of a device of torchrun."""
    file = tmp_path / "site-packages" / "reading.py"
    file.parent.mkdir()
    file.write_text(READER)
    place = {"RANK": "1", "WORLD_SIZE": "2", "NNODES": "2"}
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_TMPDIR": "/tmp"}
    for name, value in (place | slurm).items():
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("reading", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plain = type(os.environ)
    yield module
    os.environ.__class__ = plain


def test_a_data_set_of_a_library_finds_a_single_process(library: Any) -> None:
    foreign_launchers.hide_place()
    made = library.Stream()
    assert (made.size, *made.built) == (1, None, False)
    for seen in made:
        found = {name for name in seen if name.startswith(("RANK", "NNODES", "SLURM_"))}
        assert found == {"SLURM_TMPDIR"}
        assert seen["PATH"] == os.environ["PATH"]


def test_the_script_and_other_libraries_see_the_place(library: Any) -> None:
    class Own(torch.utils.data.Dataset[str]):
        def __getitem__(self, index: int) -> str:
            return os.environ["RANK"]

    foreign_launchers.hide_place()
    assert library.read() == ("1", "none")
    assert os.environ["SLURM_PROCID"] == "1"
    assert Own()[0] == "1"
    assert dict(os.environ)["WORLD_SIZE"] == "2"


def test_a_data_set_made_before_the_trainer_is_named(
    library: Any, caplog: pytest.LogCaptureFixture
) -> None:
    foreign_launchers.note_readers()
    assert library.Stream().built == ("2", True)
    library.read()
    foreign_launchers.hide_place()
    (said,) = caplog.messages
    assert re.search(
        r"read SLURM_NTASKS \(\S*reading.py:5\), WORLD_SIZE \(\S*reading.py:6\), RANK", said
    )
    foreign_launchers.hide_place()
    assert len(caplog.messages) == 1
