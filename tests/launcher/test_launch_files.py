"""The files in ``examples/launch``: each is checked, and each is run as far as one machine can.

What the files of clusters contain is checked by the packages of those clusters, if they are
installed (``make launchers``). Slurm and Ray are in `tests.launcher.test_real_launchers`.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from onefold.options import OPTIONS, variable
from onefold.system.process import STOPPED_CODE
from tests.conftest import ROOT
from tests.launcher.test_other_launchers import free_port
from tests.tables import for_each

FILES = ROOT / "examples" / "launch"
NAMES = (
    *("dstack.yml", "hosts.sh", "pytorchjob.yaml", "ray_train.py", "sky.yaml", "slurm.sbatch"),
    *("torchrun.sh", "trainjob.yaml"),
)
BIN = Path(sys.executable).parent

# Fate: a command of the shell, once, after a step of the lead or of another device.
FATED = '''"""The script of examples/launch, and its fate."""

import os
import time
from pathlib import Path

import example
import onefold

FATE = Path({fate!r})
real = onefold.Trainer.step


def step(self, *arguments, **named):
    made = real(self, *arguments, **named)
    try:
        number, who, command = FATE.read_text().split(maxsplit=2)
    except FileNotFoundError:
        return made
    mine = self.is_lead == (who == "lead") and not self.replaying
    if mine and self.steps == int(number):
        FATE.unlink()
        os.environ["PID"] = str(os.getpid())
        os.system(command)
        time.sleep(5)  # until the signal has arrived
    return made


def main():
    onefold.Trainer.step = step
    example.main()


if __name__ == "__main__":
    main()
'''


def read(name: str) -> str:
    return (FILES / name).read_text()


def fated(folder: Path, name: str, changes: Mapping[str, str]) -> Path:
    """A folder with a launch file, changed for this machine, and the script that it starts."""
    text = read(name)
    for old, new in {"/shared": str(folder), **changes}.items():
        assert old in text or old == "/shared", old
        text = text.replace(old, new)
    (folder / name).write_text(text)
    shutil.copy(FILES / "torchrun.sh", folder / "torchrun.sh") if name != "torchrun.sh" else None
    shutil.copy(FILES / "train.py", folder / "example.py")
    (folder / "train.py").write_text(FATED.format(fate=str(folder / "fate")))
    return folder


def variables(**own: str) -> dict[str, str]:
    """The environment, in which onefold and torchrun are those of this Python."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **own}


def whole() -> str:
    """The last line of a run that nothing happened to, on one device."""
    done = subprocess.run(
        [sys.executable, str(FILES / "train.py")],
        capture_output=True,
        text=True,
        check=True,
        env=variables(),
    )
    return done.stdout.splitlines()[-1]


def ended(
    commands: Sequence[Sequence[str]],
    at: Path,
    environments: Sequence[Mapping[str, str]],
    fate: str = "",
) -> tuple[list[int], str]:
    """Run the commands side by side; return their exit codes, and what all of them printed."""
    if fate:
        (at / "fate").write_text(fate)
    with ExitStack() as stack:
        processes = []
        for number, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            output = stack.enter_context((at / f"output-{number}").open("w"))
            numbered = ["sh", "-c", f'echo $$ > {at}/pid-{number}; exec "$@"', "sh", *command]
            how: dict[str, Any] = {
                "stdout": output,
                "stderr": output,
                "env": variables(**environment),
            }
            processes.append(subprocess.Popen(numbered, cwd=at, **how))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        codes = [process.wait(240) for process in processes]
    said = "".join((at / f"output-{number}").read_text() for number in range(len(commands)))
    assert not (at / "fate").exists(), said
    return codes, said


# Static checks: of what each file must contain, and that its names exist


def test_there_are_eight_files_and_one_script() -> None:
    assert {path.name for path in FILES.iterdir() if path.is_file()} == {*NAMES, "train.py"}


@for_each("name", NAMES)
def test_every_file_has_a_checkpoint_a_secret_and_a_restart(name: str) -> None:
    text = read(name)
    # A run without a checkpoint folder starts from scratch after each restart.
    assert "ONEFOLD_CHECKPOINT" in text or "--checkpoint" in text
    assert "ONEFOLD_SECRET" in text or name == "hosts.sh"
    assert str(STOPPED_CODE) in text or name == "ray_train.py"
    assert all(len(line) <= 100 for line in text.splitlines())


@for_each("name", NAMES)
def test_variables_and_options_exist(name: str) -> None:
    text = read(name)
    known = {*map(variable, OPTIONS), "ONEFOLD_SECRET"}
    assert {*re.findall(r"ONEFOLD_[A-Z_]+\b(?!\*)", text)} - {"ONEFOLD_"} <= known
    options = {f"--{each.replace('_', '-')}" for each in OPTIONS} | {
        "--devices",
        "--hosts",
        "--via",
    }
    for command in re.findall(r"onefold,? run(?:.*\\\n)*.*", text):
        assert {*re.findall(r"--[a-z-]+", command)} <= options


@for_each("name", [each for each in NAMES if each.endswith((".sh", ".sbatch"))])
def test_shell_scripts_parse(name: str) -> None:
    subprocess.run(["sh", "-n", str(FILES / name)], check=True)


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(read(name)))


def test_a_trainjob_restarts_after_75_without_counting() -> None:
    runtime, job = documents("trainjob.yaml")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    jobs = runtime["spec"]["template"]["spec"]
    (rule,) = jobs["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    of_pods = jobs["replicatedJobs"][0]["template"]["spec"]
    (policy,) = of_pods["podFailurePolicy"]["rules"]
    assert (policy["action"], policy["onExitCodes"]["values"]) == ("FailJob", [STOPPED_CODE])
    pod = of_pods["template"]["spec"]
    # Kubernetes accepts a podFailurePolicy with this policy only.
    assert pod["restartPolicy"] == "Never"
    assert pod["containers"][0]["name"] == policy["onExitCodes"]["containerName"] == "node"
    mounts = {each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    assert Path(folder_of(job["spec"]["trainer"]["command"])).parent in map(Path, mounts)


def folder_of(command: list[str]) -> str:
    return command[command.index("--checkpoint") + 1]


def test_pods_of_a_pytorchjob_are_the_same_and_restart_after_any_code() -> None:
    (job,) = documents("pytorchjob.yaml")
    lead, others = (job["spec"]["pytorchReplicaSpecs"][each] for each in ("Master", "Worker"))
    assert lead["template"] == others["template"]
    assert {lead["restartPolicy"], others["restartPolicy"]} == {"OnFailure"}
    (container,) = lead["template"]["spec"]["containers"]
    assert container["name"] == "pytorch", "the operator looks for this name"
    assert Path(folder_of(container["command"])).parent == Path("/runs")


def test_skypilot_and_dstack_restart_after_75() -> None:
    (task,) = documents("sky.yaml")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [STOPPED_CODE]
    (task,) = documents("dstack.yml")
    assert set(task["retry"]["on_events"]) == {"no-capacity", "interruption", "error"}


# With the clusters' own packages


def package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return pytest.skip(f"{name} is not installed: make launchers")


@pytest.mark.full
def test_trainjob_is_valid_for_kubeflow() -> None:
    """Unknown fields would be dropped."""
    models = package("kubeflow_trainer_api.models")
    kinds = [models.TrainerV1alpha1TrainingRuntime, models.TrainerV1alpha1TrainJob]
    for kind, document in zip(kinds, documents("trainjob.yaml"), strict=True):
        assert kind.from_dict(document).to_dict() == document


@pytest.mark.full
def test_pytorchjob_is_valid_for_kubeflow() -> None:
    """The old package of the Training Operator has the names of the fields, and no more."""
    models = package("kubeflow.training.models")
    (job,) = documents("pytorchjob.yaml")
    spec = job["spec"]
    assert {*job} <= {*models.KubeflowOrgV1PyTorchJob.attribute_map.values()}
    assert {*spec} <= {*models.KubeflowOrgV1PyTorchJobSpec.attribute_map.values()}
    assert {*spec["runPolicy"]} <= {*models.KubeflowOrgV1RunPolicy.attribute_map.values()}
    for each in spec["pytorchReplicaSpecs"].values():
        assert {*each} <= {*models.KubeflowOrgV1ReplicaSpec.attribute_map.values()}
    core = package("kubeflow_trainer_api.models")
    pod = spec["pytorchReplicaSpecs"]["Master"]["template"]
    assert core.IoK8sApiCoreV1PodTemplateSpec.from_dict(pod).to_dict() == pod


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of the packages that SkyPilot imports
def test_sky_is_valid_for_skypilot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    sky = package("sky")
    (task,) = documents("sky.yaml")
    secret = [("ONEFOLD_SECRET", "0" * 32)]
    made = sky.Task.from_yaml_config(task, secrets_overrides=secret)
    (resources,) = made.resources
    assert resources.job_recovery["recover_on_exit_codes"] == [STOPPED_CODE]
    # With unknown fields, which a client of SkyPilot leaves to its server. It has emptied the dict.
    (task,) = documents("sky.yaml")
    assert {*task["resources"]["job_recovery"]} <= {
        "max_restarts_on_errors",
        "recover_on_exit_codes",
    }


@pytest.mark.full
def test_dstack_is_valid_for_dstack() -> None:
    configurations = package("dstack._internal.core.models.configurations")
    (task,) = documents("dstack.yml")
    made = configurations.parse_run_configuration(task)
    assert made.retry.duration == 24 * 60 * 60
    assert made.env["ONEFOLD_SECRET"] == "${{ secrets.onefold }}"


# On this machine


def of_torchrun(**own: str) -> dict[str, str]:
    return {"DEVICES": "2", "ONEFOLD_SAVE_EVERY": "20", "ONEFOLD_SECRET": "0" * 32, **own}


def check_stop_and_restart(name: str, at: Path, environment: dict[str, str]) -> None:
    """Save after a signal and restart after a kill, to the bits of a run that never stopped."""
    run = [["sh", name]], at, [environment]
    codes, said = ended(*run, fate=f"70 lead kill -TERM $(cat {at}/pid-0)")
    assert codes == [STOPPED_CODE], said
    codes, said = ended(*run, fate="130 other kill -KILL $PID")
    assert codes == [0], said
    assert "resuming after step 120" in said
    assert said.splitlines()[-1] == whole()


@pytest.mark.full
@pytest.mark.processes
def test_torchrun_restarts_after_a_kill_and_saves_after_a_signal(tmp_path: Path) -> None:
    at = fated(tmp_path, "torchrun.sh", {"29500": str(free_port())})
    check_stop_and_restart("torchrun.sh", at, of_torchrun())


@pytest.mark.full
@pytest.mark.processes
def test_two_torchruns_restart_together(tmp_path: Path) -> None:
    at = fated(tmp_path, "torchrun.sh", {"29500": str(free_port())})
    run = [["sh", "torchrun.sh"]] * 2, at, [of_torchrun(NODES="2", DEVICES="1")] * 2
    codes, said = ended(*run, fate="70 other kill -KILL $PID")
    assert codes == [0, 0], said
    assert "resuming after step" in said
    assert whole() in said.splitlines()


@pytest.mark.full
@pytest.mark.processes
def test_hosts_restart_after_a_kill_and_save_after_a_signal(tmp_path: Path) -> None:
    """This machine takes the part of both hosts, and ``env`` that of ssh."""
    ssh = {"node1,node2": "127.0.0.1,127.0.0.2", "ssh {host}": "env HOST={host}", "10m": "20"}
    at = fated(tmp_path, "hosts.sh", {**ssh, "onefold run": "onefold run --devices cpu:1"})
    check_stop_and_restart("hosts.sh", at, {})


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("name", ["sky.yaml", "dstack.yml"])
def test_the_commands_of_a_cloud_start_torchrun(tmp_path: Path, name: str) -> None:
    at = fated(tmp_path, name, {})
    (task,) = documents(name)
    commands = task["run"] if "run" in task else "\n".join(task["commands"][1:])
    script = (at / "torchrun.sh").read_text().replace("29500", str(free_port()))
    (at / "torchrun.sh").write_text(script)
    nodes = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "127.0.0.1\n"}
    nodes |= {"DSTACK_NODES_NUM": "1", "DSTACK_MASTER_NODE_IP": "127.0.0.1"}
    environment = of_torchrun(**nodes, ONEFOLD_CHECKPOINT=str(at / "runs"))
    codes, said = ended([["bash", "-c", commands]], at, [environment])
    assert (codes, said.splitlines()[-1]) == ([0], whole()), said


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("name", ["trainjob.yaml", "pytorchjob.yaml"])
def test_the_command_of_a_pod_saves_after_its_signal(tmp_path: Path, name: str) -> None:
    """It resumes with one pod more."""
    at = fated(tmp_path, name, {"/runs/digits": f"{tmp_path}/runs", "10m": "'20'"})
    spec = [*yaml.safe_load_all((at / name).read_text())][-1]["spec"]
    place, port = pod_of_trainjob, free_port()
    if name == "pytorchjob.yaml":
        place = pod_of_pytorchjob
        spec["trainer"] = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    command = spec["trainer"]["command"]
    secret = {"ONEFOLD_SECRET": "0" * 32}
    pods = [{**place(rank, 2, port), **secret} for rank in range(2)]
    codes, said = ended([command] * 2, at, pods, fate="70 other kill -TERM $PID")
    assert codes == [STOPPED_CODE] * 2, said
    pods = [{**place(rank, 3, port), **secret} for rank in range(3)]
    codes, said = ended([command] * 3, at, pods)
    assert (codes, said.splitlines()[-1]) == ([0] * 3, whole()), said


def pod_of_trainjob(rank: int, size: int, port: int) -> dict[str, str]:
    """As Kubeflow's Trainer does for a pod with one process."""
    place = {"PET_NNODES": str(size), "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": "1"}
    return place | {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}


def pod_of_pytorchjob(rank: int, size: int, port: int) -> dict[str, str]:
    """As Kubeflow's Training Operator does."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    return place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
