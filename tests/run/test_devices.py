"""What is found on a machine, whose GPUs a ``pynvml`` and a ``torch`` of our own report."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pynvml
import pytest
import torch

from onefold.errors import LaunchError
from onefold.run import devices as found
from onefold.run.devices import Selection, cores, list_devices, select_devices

# bus, UUID, name, memory and free memory in MiB; not in the order of the bus
Row = tuple[int, str, str, int | None, int]
ROWS: tuple[Row, ...] = (
    (0xC1, "GPU-dd44", "NVIDIA H100 80GB", 81559, 10000),
    (0x01, "GPU-aa11", "NVIDIA A100", 40960, 20000),
    (0x41, "GPU-bb22", "NVIDIA A100", 40960, 30000),
    (0x81, "GPU-bb33", "NVIDIA A100", 40960, 30000),
)
BROKEN = "raise NVMLError_LibraryNotFound('NVML Shared Library Not Found')"

# A pynvml of our own, with what is asked of the real one.
NVML = """
import sys, types
ROWS, SPLIT, HIDDEN = {rows!r}, {split!r}, {hidden!r}
NVML_DEVICE_MIG_ENABLE = 1
class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass
class NVMLError_NoPermission(NVMLError): pass
class NVMLError_LibraryNotFound(NVMLError): pass
def nvmlInit():
    {first}
def nvmlDeviceGetCount():
    return len(ROWS)
def nvmlDeviceGetHandleByIndex(index):
    if index in HIDDEN:
        raise NVMLError_NoPermission("Insufficient Permissions")
    return index
def nvmlDeviceGetPciInfo(gpu):
    return types.SimpleNamespace(domain=0, bus=ROWS[gpu][0], device=0)
def nvmlDeviceGetUUID(gpu):
    return ROWS[gpu][1]
def nvmlDeviceGetName(gpu):
    return ROWS[gpu][2]
def nvmlDeviceGetMemoryInfo(gpu):
    if ROWS[gpu][3] is None:
        raise NVMLError_NotSupported("Not Supported")
    return types.SimpleNamespace(total=ROWS[gpu][3] * 2**20, free=ROWS[gpu][4] * 2**20)
def nvmlDeviceGetMigMode(gpu):
    if not SPLIT:
        raise NVMLError_NotSupported("Not Supported")
    return [int(gpu in SPLIT), 0]
"""

Machine = Callable[..., None]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules are found first by a process that is started."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # a module may be written twice in a second
    (tmp_path / "modules").mkdir()
    return tmp_path / "modules"


@pytest.fixture
def machine(tmp_path: Path, modules: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes a ``pynvml`` that sees these GPUs, and runs a line when it begins."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(found, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(found, "_DEVICE_NODE", tmp_path / "nvidiactl")
    monkeypatch.setattr(found, "_WINDOWS_NODE", tmp_path / "dxg")
    (tmp_path / "dxg").touch()

    def build(
        *rows: Row,
        first: str = "pass",
        visible: str | None = None,
        split: Collection[int] = (),
        hidden: Collection[int] = (),
    ) -> None:
        text = NVML.format(rows=rows, split=split, hidden=hidden, first=first)
        (modules / "pynvml.py").write_text(text)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return build


@pytest.fixture
def without_gpus(machine: Machine) -> None:
    machine(first=BROKEN)


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


def test_a_machine_without_a_driver_has_no_gpus(machine: Machine) -> None:
    machine(*ROWS, first=BROKEN)
    assert [device.kind for device in list_devices()] == ["cpu"]


def test_a_machine_without_a_sign_of_a_driver_is_not_asked(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be a tenth of a second of every launch."""
    machine(*ROWS)
    (tmp_path / "dxg").unlink()
    monkeypatch.setattr(found, "_ask", None)
    assert [device.kind for device in list_devices()] == ["cpu"]
    (tmp_path / "dxg").touch()
    with pytest.raises(TypeError, match="not callable"):
        list_devices()


def test_a_driver_that_fails_has_no_gpus(machine: Machine) -> None:
    machine(*ROWS, first="raise NVMLError('GPU is lost')")
    assert [device.kind for device in list_devices()] == ["cpu"]


def test_a_pynvml_that_cannot_be_imported_has_no_gpus(machine: Machine, modules: Path) -> None:
    (modules / "pynvml.py").write_text("raise ImportError('no such module')")
    assert [device.kind for device in list_devices()] == ["cpu"]


def test_all_that_is_asked_of_nvml_is_there() -> None:
    names = set(re.findall(r"\b(?:nvml|NVML)\w+", found._ASK_DRIVER))
    assert names
    assert names <= set(dir(pynvml))


def test_the_real_pynvml_answers_in_its_own_words_where_there_is_no_driver() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        with pytest.raises(LaunchError, match=f"asking NVML failed: pynvml.*: {error}"):
            found._ask("NVML", found._ASK_DRIVER, 60)
    else:
        pynvml.nvmlShutdown()
        pytest.skip("there is a driver")


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
    machine((1, "GPU-aa11", "NVIDIA GB10", None, 0))
    gpu, _ = list_devices()
    assert (gpu.name, gpu.total_bytes, gpu.free_bytes) == ("NVIDIA GB10", 0, 0)


def test_lines_that_are_no_gpus_are_passed_over(machine: Machine) -> None:
    machine(ROWS[1], first="print('warning: persistence mode is off')")
    assert [gpu.name for gpu in list_devices() if gpu.kind == "cuda"] == ["NVIDIA A100"]


def test_gpus_that_this_user_may_not_use_are_passed_over(machine: Machine) -> None:
    machine(*ROWS, hidden=[0, 2])
    assert [gpu.free_bytes // 2**20 for gpu in list_devices()[:-1]] == [20000, 30000]


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
    words = (
        r"^5 devices were asked for and the number of GPUs here is 4\. .* at most 4, or for cpu:5"
    )
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
def fake_torch(modules: Path) -> FakeTorch:
    """Makes a ``torch`` that sees these GPUs, and runs a line when it is imported."""

    def build(
        *gpus: tuple[str, int, int | None], cuda: str | None = "13.0", first: str = ""
    ) -> None:
        text = TORCH.format(gpus=list(gpus), cuda=cuda, first=first)
        (modules / "torch.py").write_text(text)

    return build


@pytest.fixture
def driver(machine: Machine, tmp_path: Path) -> Path:
    """A machine whose driver is loaded and has GPUs, without its library."""
    machine(first=BROKEN)
    (tmp_path / "version").write_text("NVRM version")
    (tmp_path / "nvidiactl").touch()
    return tmp_path


@pytest.mark.parametrize("loaded", ["version", "nvidiactl"])
def test_without_nvml_pytorch_is_asked_where_there_is_a_driver(
    driver: Path, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, loaded: str
) -> None:
    for other in {"version", "nvidiactl"} - {loaded}:
        (driver / other).unlink()
    fake_torch(("NVIDIA A100", 40 * 2**30, 7 * 2**30), ("NVIDIA H100", 80 * 2**30, None))
    first, second, processor = list_devices()
    assert (first.index, first.name, first.total_bytes) == (0, "NVIDIA A100", 40 * 2**30)
    assert (first.kind, first.free_bytes) == ("cuda", 7 * 2**30)
    assert (second.index, second.name, second.free_bytes) == (1, "NVIDIA H100", 0)
    assert processor.kind == "cpu"
    assert chosen(1) == ("cuda:0",)
    assert chosen("auto") == ("cuda:0", "cuda:1")


def test_a_library_that_fails_is_not_believed_where_there_is_a_driver(
    machine: Machine, driver: Path, fake_torch: FakeTorch
) -> None:
    machine(*ROWS, first="raise NVMLError('Driver/library version mismatch')")
    fake_torch(("NVIDIA A100", 40 * 2**30, 7 * 2**30))
    assert chosen("auto") == ("cuda:0",)


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ("raise NVMLError('RM has detected a mismatch')", r"NVMLError: RM has detected a mismatch"),
        ("import time; time.sleep(60)", r"NVML did not answer within 2 s"),
    ],
    ids=["fails", "hangs"],
)
def test_a_driver_whose_gpus_nobody_sees_is_an_error(
    machine: Machine,
    driver: Path,
    fake_torch: FakeTorch,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    words: str,
) -> None:
    """It was a run on the processor, without a word."""
    monkeypatch.setattr(found, "_DRIVER_LIMIT_S", 2 if "sleep" in first else 60)
    machine(*ROWS, first=first)
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
    fake_torch(cuda=None)
    with pytest.raises(LaunchError, match=r"PyTorch sees no GPU \(it was built without CUDA\)"):
        select_devices(2)


def test_a_container_without_gpus_on_a_machine_that_has_some(
    driver: Path, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's version is seen there, its device is not."""
    (driver / "nvidiactl").unlink()
    fake_torch()
    assert chosen(2) == ("cpu", "cpu")


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_gpus_that_are_hidden_are_not_asked_for(
    driver: Path, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
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
    machine: Machine, fake_torch: FakeTorch, tmp_path: Path
) -> None:
    machine(*ROWS, visible=MIG)
    (tmp_path / "dxg").unlink()  # nor is there a sign of a driver
    fake_torch()
    with pytest.raises(LaunchError, match=f"^CUDA_VISIBLE_DEVICES={MIG} names parts of GPUs, and"):
        select_devices("auto")


def test_gpus_that_are_split_are_counted_by_pytorch(
    machine: Machine, fake_torch: FakeTorch
) -> None:
    """Where nothing is chosen, programs see one part, and not the whole GPUs of the list."""
    machine(*ROWS, split=[1])
    fake_torch(("NVIDIA A100 MIG 1g.5gb", 5 * 2**30, 4 * 2**30))
    assert [device.name for device in list_devices()[:-1]] == ["NVIDIA A100 MIG 1g.5gb"]
    machine(*ROWS, split=[4])
    assert len(list_devices()) == 5


def test_a_split_gpu_that_pytorch_does_not_see_is_an_error(
    machine: Machine, fake_torch: FakeTorch
) -> None:
    machine(*ROWS, split=[0])
    fake_torch()
    with pytest.raises(
        LaunchError, match=r"^a GPU is split into parts \(MIG\), and PyTorch sees no"
    ):
        select_devices("auto")


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ("raise ImportError('libcudart.so.13 is missing')", "ImportError: libcudart.so.13 is miss"),
        (
            "print('hello', flush=True); os._exit(0)",
            "expected the answer of PyTorch as JSON, got 'hello'",
        ),
        (
            "print('[]', flush=True); os._exit(0)",
            r"expected the answer of PyTorch as JSON, got '\[\]'",
        ),
        ("import time; time.sleep(60)", "PyTorch did not answer within 2 s"),
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
    monkeypatch.setattr(found, "_TORCH_LIMIT_S", 2 if "sleep" in first else 60)
    fake_torch(first=first)
    words = rf"^NVIDIA's driver is loaded and asking NVML failed: .* Not Found, and .*{words}"
    with pytest.raises(LaunchError, match=words):
        select_devices(1)


@pytest.mark.processes
def test_the_real_pytorch_answers_as_well(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (driver / "nvidiactl").unlink()
    assert len(list_devices()) == 1 + torch.cuda.device_count()
