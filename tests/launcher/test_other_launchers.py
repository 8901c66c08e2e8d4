"""Two processes that are started by hand, in the environments of other launchers."""

import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "placed.py"
pytestmark = [pytest.mark.processes]


def free_port() -> int:
    """Of those that Slurm's tasks may be given."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return port


def srun(rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(port - 10_000),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


def kubeflow_trainer(rank: int, port: int) -> dict[str, str]:
    """What version 2 sets is torchrun's; the pod's command is python all the same."""
    place = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    pods = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank)}
    # Pods have a network of their own.
    return {**place, **pods, "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run(environments: list[Mapping[str, str]], *script: str) -> list[tuple[int, str, str]]:
    started = [
        subprocess.Popen(
            [sys.executable, *(script or (str(SCRIPT), "main"))],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    try:
        said = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(p.returncode, out, err) for p, (out, err) in zip(started, said, strict=True)]


@pytest.mark.parametrize("launcher", [srun, kubeflow_trainer])
def test_the_model_is_that_of_one(launcher: Callable[[int, int], Mapping[str, str]]) -> None:
    ((code, alone, _),) = run([{}])
    assert code == 0
    port = free_port()
    ended = run([launcher(rank, port) for rank in (0, 1)])
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert [out for _, out, _ in ended] == [alone.replace("1 ", "2 ", 1), ""]


LIBRARY = """
import os, torch
class Split(torch.utils.data.IterableDataset):
    def __init__(self, samples):
        self.samples, self.built = samples, os.environ.get("WORLD_SIZE")
    def __iter__(self):
        size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        assert "RANK" not in dict(os.environ.items())
        yield from self.samples[rank::size]
def elsewhere():
    return os.environ["RANK"]
"""
SPLITTING = """
import os, torch, onefold
from splitting import Split, elsewhere
def loss(model, x):
    return model(x).square().mean(dim=1)
if __name__ == "__main__":
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    early = Split(x)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    trainer = onefold.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, shards=2)
    late = Split(x)
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"}
    plain = torch.utils.data.DataLoader(late, batch_size=4, **spawned)
    for data in (trainer.loader(late, batch_size=4), trainer.loader(plain)):
        for batch in data:
            trainer.step(batch)
    print(trainer.steps, trainer.fingerprint(), late.built)
    alone = len(trainer.devices) == 1
    assert alone or (early.built, os.environ["RANK"]) == ("2", elsewhere())
"""


@pytest.mark.full
def test_a_data_library_sees_a_single_process(tmp_path: Path) -> None:
    """Once the Trainer is made; the script and other libraries see the place of the process."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "splitting.py").write_text(LIBRARY)
    (tmp_path / "train.py").write_text(SPLITTING)
    path, script = {"PYTHONPATH": str(installed)}, str(tmp_path / "train.py")
    ((_, alone, _),) = run([path], script)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"LOCAL_WORLD_SIZE": "2", **path}
    ended = run([{**place, "RANK": n, "LOCAL_RANK": n} for n in "01"], script)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert alone.startswith("12 ")
    assert ended[0][1] == alone
    assert "a dataset was created before Trainer and read WORLD_SIZE" in ended[0][2]
