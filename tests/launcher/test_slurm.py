"""Which processes Slurm has started as one run, and where they find each other."""

import pytest

from onefold.errors import LaunchError
from onefold.launcher import foreign_launchers
from onefold.launcher.environment import read_context
from tests.tables import for_each

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[03-04,9]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_NTASKS": "6",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
"""A task of ``srun`` in a job on three nodes, two of which the step has."""
SBATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
    "SLURM_NTASKS": "6",
    "SLURM_NPROCS": "6",
    "SLURM_TASKS_PER_NODE": "4,2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
"""The script of a job of six tasks, before any srun."""


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in SRUN.items() if key != name}


ALONE: dict[str, dict[str, str]] = {
    "the script of a job": SBATCH,
    "the shell of salloc": {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_NNODES": "1"},
    "an interactive step": {**SRUN, "SLURM_STEP_ID": "4294967290"},
    "a batch step": {**SBATCH, "SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "6"},
    "a terminal of srun": {**SRUN, "SLURM_PTY_PORT": "40123", "SLURM_PTY_WIN_COL": "80"},
    "a step of one task": {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "nothing": {},
    "a step that was asked to be none": without("SLURM_STEP_ID"),
}


@for_each("name", ALONE)
def test_everything_else_is_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_launchers, "has_terminal", lambda: True)
    context = read_context(ALONE[name])
    assert (context.size, context.launched, context.address) == (1, False, "")
    # What is started from a terminal of srun inherits its variables, and has none itself.
    monkeypatch.setattr(foreign_launchers, "has_terminal", lambda: False)
    context = read_context(ALONE["a terminal of srun"])
    assert (context.rank, context.size) == (5, 6)


def test_the_steps_of_a_job_and_its_restarts_are_different_runs() -> None:
    changes: tuple[dict[str, str], ...] = (
        {},
        {"SLURM_STEP_ID": "1"},
        {"SLURM_RESTART_COUNT": "1"},
        {"SLURM_JOB_ID": "4712"},
    )
    contexts = [read_context({**SRUN, **change}) for change in changes]
    assert len({each.run_id for each in contexts}) == 4
    assert len({each.address for each in (contexts[0], contexts[1], contexts[3])}) == 3


ONE_NODE = {"SLURM_STEP_TASKS_PER_NODE": "6", "SLURM_NODEID": "0"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@for_each(
    ("changes", "place"),
    [
        *(({"SLURM_PROCID": str(r), "SLURM_NODEID": str(r // 4)}, "gpu03:") for r in range(6)),
        (ONE_NODE, "127.0.0.1:"),  # no name need resolve
        ({"MASTER_ADDR": "10.0.0.1"}, "10.0.0.1:"),
        ({"MASTER_PORT": "29500"}, "gpu03:29500"),
        ({"MASTER_ADDR": "fe80::1", "MASTER_PORT": "1234"}, "[fe80::1]:1234"),
        (TORCHRUN, "a:1"),
        *(
            ({"SLURM_STEP_NODELIST": nodes}, f"{first}:")
            for nodes, first in (
                ("node1,node2", "node1"),
                ("node[01-03,7]", "node01"),
                ("node[7,01-03]", "node7"),
                ("a-b[1-2].cluster.org,c", "a-b1.cluster.org"),
                ("rack[2-3]-node[1,4],x[1-2]", "rack2-node1"),
                ("gpu[07],cpu[1-2]", "gpu07"),
                ("10.1.2.3", "10.1.2.3"),
            )
        ),
    ],
)
def test_all_tasks_meet_in_one_place(changes: dict[str, str], place: str) -> None:
    context = read_context({**SRUN, **changes})
    assert context.address.startswith(place)
    assert context.size == (2 if changes is TORCHRUN else 6)
    port = read_context(SRUN).address.rpartition(":")[2]
    assert context.address == (place + port if place.endswith(":") else place)


@for_each(
    ("environment", "words"),
    [
        *(
            ({**SRUN, "SLURM_STEP_NODELIST": nodes}, "Slurm's node list must look like")
            for nodes in ("node[", "node[01", "node]", ",node", "node[]", "[[1]]")
        ),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2x3"}, "Slurm's task counts must look like"),
        *(
            (without(name), f"task {task} of an srun step, but {name}")
            for name, task in (
                ("SLURM_JOB_ID", "5"),
                ("SLURM_PROCID", r"\?"),
                ("SLURM_NODEID", "5"),
            )
        ),
        (
            {**SRUN, "SLURM_NODEID": "2"},
            "Slurm reports node 2 for this task, but lists tasks for 2 nodes only",
        ),
    ],
)
def test_a_place_that_cannot_be_read_is_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        read_context(environment)
