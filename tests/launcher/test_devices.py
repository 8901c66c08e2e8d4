"""What is found on a machine, whose GPUs a ``pynvml`` and a ``torch`` of our own report."""

import os
import re
import subprocess
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pynvml
import pytest

from onefold.errors import LaunchError
from onefold.launcher import devices as run_devices
from onefold.launcher.devices import Selection, emptiest_gpu, list_devices, select_devices
from onefold.system.process import cores
from tests.tables import for_each

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
# And a torch, which is imported by a process of its own.
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
def accelerators(*, check_available):
    assert check_available
    return types.SimpleNamespace(type={kind!r}) if GPUS else None
accelerator = types.SimpleNamespace(
    current_accelerator=accelerators, device_count=lambda: len(GPUS))
def get_device_module(device):
    return types.SimpleNamespace(get_device_properties=about, mem_get_info=memory)
"""
SIGNS = {"/proc/driver/nvidia/version": "version", "/dev/nvidiactl": "node", "/dev/dxg": "dxg"}
DRIVER = ("version", "node")
A100 = ("NVIDIA A100", 40 * 2**30, 7 * 2**30)
Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes a machine whose driver and PyTorch report these GPUs, or run a line before."""
    modules, there, real = tmp_path / "modules", set[str](), Path.exists
    modules.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(modules), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # a module may be written twice in a second
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def exists(path: Path, **how: Any) -> bool:
        sign = SIGNS.get(str(path))
        return real(path, **how) if sign is None else sign in there

    def build(
        *rows: Row,
        first: str = "pass",
        visible: str | None = None,
        split: Collection[int] = (),
        hidden: Collection[int] = (),
        signs: Collection[str] = ("dxg",),
        gpus: Sequence[tuple[str, int, int | None]] = (),
        cuda: str | None = "13.0",
        first_of_torch: str = "",
        kind: str = "cuda",
    ) -> None:
        text = NVML.format(rows=rows, split=split, hidden=hidden, first=first)
        (modules / "pynvml.py").write_text(text)
        text = TORCH.format(gpus=list(gpus), cuda=cuda, first=first_of_torch, kind=kind)
        (modules / "torch.py").write_text(text)
        there.clear()
        there.update(signs)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    monkeypatch.setattr(Path, "exists", exists)
    return build


def chosen(choice: int | str | Sequence[str]) -> tuple[str, ...]:
    return select_devices(choice).devices


def free() -> list[int]:
    *gpus, processor = list_devices()
    assert [gpu.index for gpu in gpus] == list(range(len(gpus)))
    assert {gpu.kind for gpu in gpus} <= {"cuda"}
    assert processor.kind == "cpu"
    return [gpu.free_bytes // 2**20 for gpu in gpus]


@for_each(
    ("choice", "number"),
    [
        *((1, 1), (3, 3), ("2", 2), (" 2 ", 2), ("cpu:4", 4), ("cpu", 1), ("cpu,cpu", 2)),
        *((["cpu", "cpu"], 2), (("cpu",), 1), (["cpu:2"], 2), ("auto", cores())),
    ],
)
def test_without_gpus_processes_compute(machine: Machine, choice: Any, number: int) -> None:
    for first in (BROKEN, "raise NVMLError('GPU is lost')", "raise ImportError('no module')"):
        machine(*ROWS, first=first)
        assert free() == []
    with pytest.raises(LaunchError, match=r"^cuda:0 does not exist: this machine has no GPU"):
        select_devices("cuda:0")
    assert select_devices(choice) == Selection(("cpu",) * number, may_leave=choice == "auto")


@for_each(
    ("choice", "words"),
    [
        ("", "devices '': '' is not a device. Pass a number, 'auto', 'cpu:N', or a list"),
        ([], "devices '': '' is not a device"),
        ([0, 1], "devices '0,1': '0' is not a device"),
        ("gpu", "devices 'gpu': 'gpu' is not a device"),
        ("cuda", "devices 'cuda': 'cuda' is not a device"),
        ("cuda:x", "devices 'cuda:x': 'cuda:x' is not a device"),
        ("cpu:", "devices 'cpu:': 'cpu:' is not a device"),
        ("cpu:-1", "devices 'cpu:-1': 'cpu:-1' is not a device"),
        ("-1", "devices '-1': '-1' is not a device"),
        ("1.5", "devices '1.5': '1.5' is not a device"),
        ("cpu:2,cpu:2", "devices 'cpu:2,cpu:2': 'cpu:2' is not a device"),
        ("cuda:0;cuda:1", "devices 'cuda:0;cuda:1': 'cuda:0;cuda:1' is not a device"),
        (0, "devices must be at least 1, but got 0"),
        ("cpu:0", "devices must be at least 1, but got cpu:0"),
        ("cuda:1,cuda:0,cuda:1", "cuda:1 is listed twice"),
    ],
)
def test_what_cannot_be_read_is_explained(machine: Machine, choice: Any, words: str) -> None:
    machine(*ROWS)
    with pytest.raises(ValueError, match=words):
        select_devices(choice)


def test_without_a_driver_nobody_is_asked(machine: Machine, monkeypatch: Any) -> None:
    """It would be a tenth of a second of every launch."""
    asked: list[str] = []
    run = subprocess.run

    def noted(command: list[str], **how: Any) -> Any:
        asked.append(command[-1])
        return run(command, **how)

    monkeypatch.setattr(subprocess, "run", noted)
    for signs in ((), ("dxg",)):
        machine(*ROWS, signs=signs)
        assert (len(free()), len(asked)) == (len(ROWS) * len(signs), len(signs))
    names = set(re.findall(r"\b(?:nvml|NVML)\w+", asked[0]))
    assert len(names) > 5
    assert names <= set(dir(pynvml))


def test_gpus_are_numbered_in_the_order_of_the_bus(machine: Machine) -> None:
    machine(*ROWS)
    assert free() == [20000, 30000, 30000, 10000]
    last = list_devices()[3]
    assert (last.name, last.total_bytes) == ("NVIDIA H100 80GB", 81559 * 2**20)
    assert select_devices("auto") == Selection(
        tuple(f"cuda:{index}" for index in range(4)), may_leave=True
    )
    assert chosen("cuda:3,cuda:1") == chosen(["cuda:3", "cuda:1"]) == ("cuda:3", "cuda:1")
    assert chosen("cpu:2") == ("cpu", "cpu")


@for_each(("number", "indices"), [(1, [1]), (2, [1, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3])])
def test_the_freest_gpus_are_taken(machine: Machine, number: int, indices: list[int]) -> None:
    machine(*ROWS)
    devices = tuple(f"cuda:{index}" for index in indices)
    assert select_devices(number) == Selection(devices, may_leave=False)


def test_more_gpus_than_there_are_are_refused(machine: Machine) -> None:
    machine(*ROWS)
    words = (
        r"^requested 5 devices, but the number of GPUs here is 4\. Request at most 4, or cpu:5 f"
    )
    with pytest.raises(LaunchError, match=words):
        select_devices(5)
    machine(*ROWS[:2])
    words = r"^cuda:2 does not exist: this machine has cuda:0, cuda:1\. Run onefold devices to"
    with pytest.raises(LaunchError, match=words):
        select_devices("cuda:0,cuda:2")


@for_each(
    ("how", "expected"),
    [
        ({"rows": [(1, "GPU-aa11", "NVIDIA GB10", None, 0)]}, [0]),  # memory is not reported
        ({"rows": [ROWS[1]], "first": "print('warning: persistence mode is off')"}, [20000]),
        ({"hidden": [0, 2]}, [20000, 30000]),  # this user may not use them
        # By number or by UUID, and as CUDA does only up to the first that it does not know.
        ({"visible": "3"}, [10000]),
        ({"visible": "3,0"}, [10000, 20000]),
        ({"visible": " 1 , 2 "}, [30000, 30000]),
        ({"visible": "GPU-dd44"}, [10000]),
        ({"visible": "GPU-dd44,GPU-aa"}, [10000, 20000]),
        ({"visible": "0,GPU-bb33"}, [20000, 30000]),
        ({"visible": ""}, []),
        ({"visible": "-1"}, []),
        ({"visible": "NoDevFiles"}, []),
        ({"visible": "0,9,1"}, [20000]),
        ({"visible": "0,,1"}, [20000]),
    ],
)
def test_what_is_hidden_is_not_there(machine: Machine, how: Any, expected: list[int]) -> None:
    machine(*how.get("rows", ROWS), **{name: how[name] for name in how if name != "rows"})
    assert free() == expected


MIG = "MIG-5d1b3cf2-7b5c-5d0f-9a3e-0f0d4f6c2a11"
BUSY = ("NVIDIA H100", 80 * 2**30, None)


@for_each(
    ("how", "devices"),
    [
        ({"first": BROKEN, "signs": ["version"], "gpus": [A100, BUSY]}, ("cuda:0", "cuda:1")),
        ({"first": BROKEN, "signs": ["node"], "gpus": [A100, BUSY]}, ("cuda:0", "cuda:1")),
        ({"first": "raise NVMLError('mismatch')", "signs": DRIVER, "gpus": [A100]}, ("cuda:0",)),
        ({"visible": MIG, "gpus": [A100]}, ("cuda:0",)),  # the driver lists whole GPUs only
        ({"split": [1], "gpus": [A100]}, ("cuda:0",)),
        ({"split": [4]}, tuple(f"cuda:{index}" for index in range(4))),
        # In a container the driver's version is seen, and not its device.
        ({"first": BROKEN, "signs": ["version"]}, ("cpu",) * cores()),
        *(
            ({"visible": v, "signs": DRIVER, "first_of_torch": "1 / 0"}, ("cpu",) * cores())
            for v in ("", "-1", "NoDevFiles")
        ),
    ],
)
def test_pytorch_is_asked(machine: Machine, how: dict[str, Any], devices: tuple[str, ...]) -> None:
    machine(*ROWS, **how)
    assert chosen("auto") == devices
    if devices == ("cuda:0", "cuda:1"):
        first, second, _ = list_devices()
        assert (first.name, first.total_bytes, first.free_bytes) == A100
        assert (second.name, second.free_bytes) == ("NVIDIA H100", 0)
        assert chosen(1) == ("cuda:0",)


@for_each(
    ("torch_version", "backends", "devices"),
    [
        ("2.13.0+xpu", (), ("xpu:0",)),
        ("2.13.0", ("torch_npu",), ("xpu:0",)),
        ("2.13.0+cpu", (), ("cpu",) * cores()),
    ],
)
def test_pytorch_is_asked_for_accelerators_of_other_kinds(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    torch_version: str,
    backends: tuple[str, ...],
    devices: tuple[str, ...],
) -> None:
    machine(signs=[], gpus=[A100], kind="xpu")
    monkeypatch.setattr(run_devices, "version", lambda name: torch_version)
    monkeypatch.setattr(run_devices, "entry_points", lambda group: backends)
    assert chosen("auto") == devices
    if devices == ("xpu:0",):
        assert chosen("xpu:0") == devices
        with pytest.raises(LaunchError, match=r"^cuda:0 does not exist: this machine has xpu:0"):
            chosen("cuda:0")


@for_each(
    ("rows", "first", "number"),
    [(ROWS[1:3], "", 1), (ROWS[1:], "", 1), (ROWS, "", 0), ((), "", 0), (ROWS, BROKEN, 0)],
)
def test_the_emptiest_gpu_is_found_without_pytorch(
    machine: Machine, rows: Sequence[Row], first: str, number: int
) -> None:
    """Of several types the first is taken."""
    machine(*rows, signs=DRIVER, first=first or "pass", first_of_torch="1 / 0")
    assert emptiest_gpu() == number


@for_each(
    ("visible", "order", "rows", "warns"),
    [
        ("1,0", "", ROWS, True),
        ("1", "PCI_BUS_ID", ROWS, False),
        ("GPU-aa11", "", ROWS, False),
        ("1", "", ROWS[1:], False),
        (None, "", ROWS, False),
    ],
)
def test_numbers_that_mean_other_gpus_elsewhere_are_told(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    visible: str | None,
    order: str,
    rows: Sequence[Row],
    warns: bool,
) -> None:
    machine(*rows, visible=visible)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    caplog.clear()
    list_devices()
    assert ("onefold numbers the GPUs by PCI bus" in caplog.text) == warns


LOADED = r"^NVIDIA's driver is loaded and "
SILENT = "print('CUDA initialization: error 803', file=sys.stderr)"
SAID = "PyTorch must answer in JSON, but got "


@for_each(
    ("how", "words"),
    [
        (
            {"first": "raise NVMLError('RM has detected a mismatch')", "first_of_torch": SILENT},
            LOADED + r".*NVMLError: RM has .* PyTorch sees no GPU \(CUDA init.* cpu:N",
        ),
        ({"first": BROKEN, "cuda": None}, r"sees no GPU \(it was built without CUDA\)"),
        ({"visible": MIG, "signs": []}, f"^CUDA_VISIBLE_DEVICES={MIG} names parts of GPUs, and"),
        ({"split": [0]}, r"^a GPU is split into parts \(MIG\), and PyTorch sees no"),
        (
            {"first": BROKEN, "first_of_torch": "raise ImportError('libcudart.so is missing')"},
            LOADED
            + "the query of NVML failed: .* Not Found, and .*ImportError: libcudart.so is missing",
        ),
        ({"first": BROKEN, "first_of_torch": "print('x', flush=True); os._exit(0)"}, SAID + "'x'"),
        (
            {"first": BROKEN, "first_of_torch": "print('[]', flush=True); os._exit(0)"},
            SAID + r"'\[\]'",
        ),
    ],
)
def test_unlisted_gpus_are_an_error(machine: Machine, how: dict[str, Any], words: str) -> None:
    """It was a run on the processor, without a word."""
    machine(*ROWS, **{"signs": DRIVER, **how})
    for choice in (2, "auto"):
        with pytest.raises(LaunchError, match=words):
            select_devices(choice)
    with pytest.raises(LaunchError, match=words):
        list_devices()
    assert chosen("cpu:2") == chosen("cpu,cpu") == ("cpu", "cpu")


def test_who_does_not_answer_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    machine(*ROWS, signs=DRIVER)
    monkeypatch.setattr(subprocess, "run", hang)
    words = r"NVML did not answer within \d+ s, and PyTorch did not answer within \d+ s"
    with pytest.raises(LaunchError, match=LOADED + words):
        select_devices(1)
