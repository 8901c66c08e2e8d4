"""What is found on a machine; its GPUs are told by an ``nvidia-smi`` and a ``torch`` of our own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from onefold.errors import LaunchError
from onefold.run import devices as found
from onefold.run.devices import Selection, cores, list_devices, select_devices

# index, pci.bus_id, uuid, name, memory.total, memory.free; not in the order of the bus
ROWS = (
    "0, 00000000:C1:00.0, GPU-dd44, NVIDIA H100 80GB, 81559, 10000",
    "1, 00000000:01:00.0, GPU-aa11, NVIDIA A100, 40960, 20000",
    "2, 00000000:41:00.0, GPU-bb22, NVIDIA A100, 40960, 30000",
    "3, 00000000:81:00.0, GPU-bb33, NVIDIA A100, 40960, 30000",
)

Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes an ``nvidia-smi`` that prints these rows and ends with this code."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(found, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(found, "_DEVICE_NODE", tmp_path / "nvidiactl")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def build(*rows: str, code: int = 0, visible: str | None = None) -> None:
        tool = tmp_path / "nvidia-smi"
        lines = "".join(f"echo '{row}'\n" for row in rows)
        tool.write_text(f"#!/bin/sh\n{lines}exit {code}\n")
        tool.chmod(0o755)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return build


@pytest.fixture
def without_gpus(machine: Machine) -> None:
    machine("NVIDIA-SMI has failed because it could not reach the driver", code=9)


def chosen(choice: int | str | Sequence[str]) -> tuple[str, ...]:
    return select_devices(choice).devices


@pytest.mark.usefixtures("without_gpus")
@pytest.mark.parametrize(
    ("choice", "devices"),
    [
        (1, ("cpu",)),
        (3, ("cpu",) * 3),
        ("2", ("cpu",) * 2),
        (" 2 ", ("cpu",) * 2),
        ("cpu:4", ("cpu",) * 4),
        ("cpu", ("cpu",)),
        ("cpu,cpu", ("cpu",) * 2),
        (["cpu", "cpu"], ("cpu",) * 2),
        (("cpu",), ("cpu",)),
        (["cpu:2"], ("cpu",) * 2),
    ],
)
def test_without_gpus_processes_compute(
    choice: int | str | Sequence[str], devices: tuple[str, ...]
) -> None:
    assert select_devices(choice) == Selection(devices, may_leave=False)


@pytest.mark.usefixtures("without_gpus")
def test_all_of_a_processor_is_a_process_for_each_core() -> None:
    assert select_devices("auto") == Selection(("cpu",) * cores(), may_leave=True)


@pytest.mark.usefixtures("without_gpus")
@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("", "--devices '': expected a number, 'auto', 'cpu:N', or a list"),
        ([], "--devices '': expected a number"),
        ("gpu", "'gpu' is none of these"),
        ("cuda", "'cuda' is none of these"),
        ("cuda:x", "'cuda:x' is none of these"),
        ("cpu:", "'cpu:' is none of these"),
        ("cpu:-1", "'cpu:-1' is none of these"),
        ("-1", "'-1' is none of these"),
        ("1.5", r"'1.5' is none of these"),
        ("cpu:2,cpu:2", "'cpu:2' is none of these"),
        ("cuda:0;cuda:1", "'cuda:0;cuda:1' is none of these"),
        (0, "--devices 0: expected at least one device"),
        ("cpu:0", "--devices cpu:0: expected at least one device"),
    ],
)
def test_a_choice_that_cannot_be_read_is_explained(choice: int | str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        select_devices(choice)


@pytest.mark.usefixtures("without_gpus")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"^cuda:0 is not there: this machine has no GPU"):
        select_devices("cuda:0")


def test_a_machine_without_a_driver_has_no_gpus(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [device.kind for device in list_devices()] == ["cpu"]


def test_a_driver_that_fails_has_no_gpus(machine: Machine) -> None:
    machine(*ROWS, code=15)
    assert [device.kind for device in list_devices()] == ["cpu"]


def test_a_driver_that_cannot_be_run_has_no_gpus(machine: Machine, tmp_path: Path) -> None:
    machine(*ROWS)
    (tmp_path / "nvidia-smi").write_text("#!/no/such/shell\n")
    assert [device.kind for device in list_devices()] == ["cpu"]


def test_gpus_are_numbered_in_the_order_of_the_bus(machine: Machine) -> None:
    machine(*ROWS)
    *gpus, processor = list_devices()
    assert [(gpu.index, gpu.name, gpu.free_bytes) for gpu in gpus] == [
        (0, "NVIDIA A100", 20000 * 2**20),
        (1, "NVIDIA A100", 30000 * 2**20),
        (2, "NVIDIA A100", 30000 * 2**20),
        (3, "NVIDIA H100 80GB", 10000 * 2**20),
    ]
    assert {gpu.kind for gpu in gpus} == {"cuda"}
    assert gpus[3].total_bytes == 81559 * 2**20
    assert processor.kind == "cpu"


def test_memory_that_the_driver_does_not_tell_counts_as_none(machine: Machine) -> None:
    machine("0, 00000009:01:00.0, GPU-aa11, NVIDIA GB10, [N/A], [N/A]")
    gpu, _ = list_devices()
    assert (gpu.name, gpu.total_bytes, gpu.free_bytes) == ("NVIDIA GB10", 0, 0)


def test_lines_that_are_no_gpus_are_passed_over(machine: Machine) -> None:
    machine("warning: persistence mode is off", "", ROWS[1])
    assert [gpu.name for gpu in list_devices() if gpu.kind == "cuda"] == ["NVIDIA A100"]


@pytest.mark.parametrize(
    ("number", "devices"),
    [
        (1, ("cuda:1",)),
        (2, ("cuda:1", "cuda:2")),
        (3, ("cuda:0", "cuda:1", "cuda:2")),
        (4, ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
    ],
)
def test_the_gpus_with_the_most_free_memory_are_taken(
    machine: Machine, number: int, devices: tuple[str, ...]
) -> None:
    machine(*ROWS)
    assert select_devices(number) == Selection(devices, may_leave=False)


def test_all_gpus(machine: Machine) -> None:
    machine(*ROWS)
    devices = tuple(f"cuda:{index}" for index in range(4))
    assert select_devices("auto") == Selection(devices, may_leave=True)


def test_gpus_are_taken_as_they_are_named(machine: Machine) -> None:
    machine(*ROWS)
    assert chosen("cuda:3,cuda:1") == chosen(["cuda:3", "cuda:1"]) == ("cuda:3", "cuda:1")
    assert chosen("cpu:2") == ("cpu", "cpu")


def test_more_devices_than_gpus_are_refused(machine: Machine) -> None:
    machine(*ROWS)
    words = r"^5 devices were asked for and this machine has 4 GPUs\. Use --devices 4, or .*cpu:5"
    with pytest.raises(LaunchError, match=words):
        select_devices(5)


def test_a_gpu_beyond_those_here_is_refused(machine: Machine) -> None:
    machine(*ROWS[:2])
    words = r"^cuda:2 is not there: this machine has cuda:0, cuda:1 \(see: onefold devices\)"
    with pytest.raises(LaunchError, match=words):
        select_devices("cuda:0,cuda:2")


@pytest.mark.parametrize(
    ("visible", "free"),
    [
        ("3", [10000]),
        ("3,0", [10000, 20000]),
        (" 1 , 2 ", [30000, 30000]),
        ("GPU-dd44", [10000]),
        ("GPU-dd44,GPU-aa", [10000, 20000]),
        ("0,GPU-bb33", [20000, 30000]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,9,1", [20000]),
        ("0,,1", [20000]),
    ],
)
def test_what_the_user_hides_is_not_there(machine: Machine, visible: str, free: list[int]) -> None:
    """By number or by UUID, and as CUDA does only up to the first that it does not know."""
    machine(*ROWS, visible=visible)
    gpus = list_devices()[:-1]
    assert [gpu.free_bytes // 2**20 for gpu in gpus] == free
    assert [gpu.index for gpu in gpus] == list(range(len(free)))


def test_a_choice_counts_what_is_visible(machine: Machine) -> None:
    machine(*ROWS, visible="3,1")
    assert chosen(1) == ("cuda:1",)
    assert chosen("auto") == ("cuda:0", "cuda:1")
    with pytest.raises(LaunchError, match="this machine has cuda:0, cuda:1"):
        select_devices("cuda:3")


def test_the_processor_is_described() -> None:
    processor = list_devices()[-1]
    assert processor.kind == "cpu"
    assert processor.name
    assert processor.count == cores() == len(os.sched_getaffinity(0))
    assert 0 < processor.free_bytes <= processor.total_bytes


def test_the_same_gpu_twice_is_refused(machine: Machine) -> None:
    machine(*ROWS)
    with pytest.raises(ValueError, match="cuda:1 is named twice"):
        select_devices("cuda:1,cuda:0,cuda:1")


@pytest.mark.usefixtures("without_gpus")
def test_a_list_of_numbers_is_explained() -> None:
    with pytest.raises(ValueError, match="'0' is none of these"):
        select_devices([0, 1])  # type: ignore[list-item]


# A torch of our own: what it is asked is asked of a process that imports it.
TORCH = """
import os, sys, types
GPUS = {gpus!r}
assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
assert "" not in sys.path
{first}
def about(index):
    return types.SimpleNamespace(name=GPUS[index][0], total_memory=GPUS[index][1])
def memory(index):
    if GPUS[index][2] is None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")
    return GPUS[index][2], GPUS[index][1]
version = types.SimpleNamespace(cuda={cuda!r})
cuda = types.SimpleNamespace(is_available=lambda: bool(GPUS), device_count=lambda: len(GPUS),
    get_device_properties=about, mem_get_info=memory)
"""

FakeTorch = Callable[..., None]


@pytest.fixture
def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """Makes a ``torch`` that sees these GPUs, and runs a line when it is imported."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)

    def build(
        *gpus: tuple[str, int, int | None], cuda: str | None = "13.0", first: str = ""
    ) -> None:
        (tmp_path / "modules").mkdir()
        text = TORCH.format(gpus=list(gpus), cuda=cuda, first=first)
        (tmp_path / "modules" / "torch.py").write_text(text)

    return build


@pytest.fixture
def driver(machine: Machine, tmp_path: Path) -> Path:
    """A machine whose driver is loaded and has GPUs, without an ``nvidia-smi``."""
    (tmp_path / "version").write_text("NVRM version")
    (tmp_path / "nvidiactl").touch()
    return tmp_path


def without_tool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize("loaded", ["version", "nvidiactl"])
def test_without_nvidia_smi_pytorch_is_asked_where_there_is_a_driver(
    driver: Path, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, loaded: str
) -> None:
    for other in {"version", "nvidiactl"} - {loaded}:
        (driver / other).unlink()
    without_tool(driver, monkeypatch)
    fake_torch(("NVIDIA A100", 40 * 2**30, 7 * 2**30), ("NVIDIA H100", 80 * 2**30, None))
    first, second, processor = list_devices()
    assert (first.index, first.name, first.total_bytes) == (0, "NVIDIA A100", 40 * 2**30)
    assert (first.kind, first.free_bytes) == ("cuda", 7 * 2**30)
    assert (second.index, second.name, second.free_bytes) == (1, "NVIDIA H100", 0)
    assert processor.kind == "cpu"
    assert chosen(1) == ("cuda:0",)
    assert chosen("auto") == ("cuda:0", "cuda:1")


def test_an_nvidia_smi_that_fails_is_not_believed_where_there_is_a_driver(
    machine: Machine, driver: Path, fake_torch: FakeTorch
) -> None:
    machine(*ROWS, code=18)
    fake_torch(("NVIDIA A100", 40 * 2**30, 7 * 2**30))
    assert chosen("auto") == ("cuda:0",)


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("echo 'Driver/library version mismatch'\nexit 18", r"exit code 18 \(Driver/library ver"),
        ("exec sleep 60", r"nvidia-smi did not answer within 0\.3 s"),
    ],
    ids=["fails", "hangs"],
)
def test_a_driver_whose_gpus_nobody_sees_is_an_error(
    driver: Path,
    fake_torch: FakeTorch,
    monkeypatch: pytest.MonkeyPatch,
    tool: str,
    words: str,
) -> None:
    """It was a run on the processor, without a word."""
    monkeypatch.setattr(found, "_QUERY_LIMIT_S", 0.3)
    (driver / "nvidia-smi").write_text(f"#!/bin/sh\n{tool}\n")
    (driver / "nvidia-smi").chmod(0o755)
    fake_torch(first="print('CUDA initialization: error 803', file=sys.stderr)")
    words = rf"^NVIDIA's driver is loaded and .*{words}.* PyTorch sees no GPU \(CUDA init.* cpu:N"
    for choice in (2, "auto", "cuda:0"):
        with pytest.raises(LaunchError, match=words):
            select_devices(choice)
    with pytest.raises(LaunchError, match=words):
        list_devices()
    assert chosen("cpu:2") == chosen("cpu,cpu") == ("cpu", "cpu")


def test_a_pytorch_without_cuda_is_named(
    driver: Path, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_tool(driver, monkeypatch)
    fake_torch(cuda=None)
    with pytest.raises(LaunchError, match=r"PyTorch sees no GPU \(it was built without CUDA\)"):
        select_devices(2)


def test_a_container_without_gpus_on_a_machine_that_has_some(
    driver: Path, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's version is seen there, its device is not."""
    (driver / "nvidiactl").unlink()
    without_tool(driver, monkeypatch)
    fake_torch()
    assert chosen(2) == ("cpu", "cpu")


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_gpus_that_are_hidden_are_not_asked_for(
    driver: Path, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    without_tool(driver, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    fake_torch(first="raise SystemExit('asked')")
    assert chosen(2) == ("cpu", "cpu")


MIG = "MIG-5d1b3cf2-7b5c-5d0f-9a3e-0f0d4f6c2a11"


def test_parts_of_a_gpu_are_counted_by_pytorch(machine: Machine, fake_torch: FakeTorch) -> None:
    """The driver's plain list has whole GPUs only: none would have matched."""
    machine(*ROWS, visible=MIG)
    fake_torch(("NVIDIA A100 MIG 1g.5gb", 5 * 2**30, 4 * 2**30))
    assert [device.name for device in list_devices()[:-1]] == ["NVIDIA A100 MIG 1g.5gb"]
    assert chosen(1) == ("cuda:0",)


def test_a_part_of_a_gpu_that_pytorch_does_not_see_is_an_error(
    machine: Machine, fake_torch: FakeTorch
) -> None:
    machine(*ROWS, visible=MIG)
    fake_torch()
    with pytest.raises(LaunchError, match=f"^CUDA_VISIBLE_DEVICES={MIG} names parts of GPUs, and"):
        select_devices("auto")


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ("raise ImportError('libcudart.so.13 is missing')", "ImportError: libcudart.so.13 is miss"),
        (
            "print('hello', flush=True); os._exit(0)",
            "expected PyTorch's answer as JSON, got 'hello'",
        ),
        ("print('[]', flush=True); os._exit(0)", r"expected PyTorch's answer as JSON, got '\[\]'"),
        ("import time; time.sleep(60)", "asking PyTorch failed: .* timed out after 2"),
    ],
    ids=["fails", "no JSON", "other JSON", "hangs"],
)
def test_a_pytorch_that_cannot_say_is_an_error(
    driver: Path,
    fake_torch: FakeTorch,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    words: str,
) -> None:
    without_tool(driver, monkeypatch)
    monkeypatch.setattr(found, "_TORCH_LIMIT_S", 2 if "sleep" in first else 60)
    fake_torch(first=first)
    words = rf"^NVIDIA's driver is loaded and there is no nvidia-smi, and .*{words}"
    with pytest.raises(LaunchError, match=words):
        select_devices(1)


@pytest.mark.processes
def test_the_real_pytorch_answers_as_well(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (driver / "nvidiactl").unlink()
    without_tool(driver, monkeypatch)
    assert len(list_devices()) == 1 + torch.cuda.device_count()
