"""All that a GPU can show of onefold, in one command: ``python -m tests.gpu --results DIR``.

Runs the tests of this folder, the demo, and a short benchmark beside plain PyTorch, in less than
ten minutes on one card, with PyTorch, safetensors and msgspec: nothing is installed or fetched,
and what cannot run for want of a package is named. ``DIR/gpu.json``, ``DIR/gpu.txt`` and
``DIR/gpu.html`` are written anew after each part. With ``--device cpu`` the same is done on the
processor with tiny sizes, to try the command itself.

Exit code: 0 if all is well, 1 if something failed, 2 if there is no GPU or no PyTorch.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.parts import ROOT, Part, Result, missing, parts_of, run_part
from tests.gpu.report import as_page, as_text

__all__ = ["main"]

LIMIT_S = 570.0
"""For all parts together."""
LEAST_S = 5.0
"""A part that has less than this left is not begun."""
TESTS_AT_ONCE = 6

MACHINE = """
import json, platform, sys, torch
found = {"card": "", "versions": {"Python": platform.python_version(), "torch": torch.__version__}}
kind = torch.accelerator.current_accelerator(check_available=True)
if kind is not None:
    about = torch.get_device_module(kind).get_device_properties(0)
    many = torch.accelerator.device_count()
    found["card"] = f"{many} x {about.name}, {about.total_memory >> 30} GiB"
if torch.version.cuda:
    found["versions"] |= {"CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}
print(json.dumps(found))
"""


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, help="where the two files go")
    parser.add_argument("--device", default="cuda:0", help="a card, or cpu")
    parser.add_argument("--parts", nargs="+", default=[], help="only those with one of these words")
    options = parser.parse_args()
    if lacking := missing(("torch", "numpy", "safetensors", "msgspec")):
        print(f"{sys.executable} has no {', '.join(lacking)}: onefold needs it", file=sys.stderr)
        return 2
    machine = describe_machine()
    if options.device != "cpu" and not machine["card"]:
        print(
            "there is no GPU that PyTorch sees: nothing was run. To try the command itself on the "
            "processor: make gpu DEVICE=cpu",
            file=sys.stderr,
        )
        return 2
    if options.device == "cpu":
        machine["card"] = "the processor"
    wanted = [
        part
        for part in parts_of(options.device)
        if not options.parts or any(word in part.name for word in options.parts)
    ]
    return run(wanted, machine, options.device, options.results)


def describe_machine() -> dict[str, Any]:
    """The card and the versions, asked in a process of its own: this one must not use the card."""
    said = subprocess.check_output([sys.executable, "-c", MACHINE], text=True, timeout=90)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def run(wanted: Sequence[Part], machine: Mapping[str, Any], device: str, results: Path) -> int:
    """Run the parts, and write what is known after each."""
    results.mkdir(parents=True, exist_ok=True)
    lacking = {part.name: ", ".join(missing(part.needs)) for part in wanted}
    left_out = {name: f"there is no {packages}" for name, packages in lacking.items() if packages}
    if missing(["pytest"]):
        left_out["pytest"] = "not there: the tests are run one by one, without looking for leaks"
    found: dict[str, Any] = {
        "onefold": own_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "machine": machine,
        "left_out": left_out,
        "parts": [],
    }
    parts = [part for part in wanted if part.name not in left_out]
    with tempfile.TemporaryDirectory() as folder:
        environment = environment_of_parts(device, Path(folder))
        for result in results_of(parts, environment, Path(folder), device):
            print(f"{result.name}: ended {result.ended}, {result.seconds:.1f} s", flush=True)
            found["parts"].append(asdict(result))
            write(found, results)
    write(found, results)
    print((results / "gpu.txt").read_text(encoding="utf-8"))
    return int(any(went_wrong(part) for part in found["parts"]))


def results_of(
    parts: Sequence[Part], environment: Mapping[str, str], folder: Path, device: str
) -> Iterator[Result]:
    """Run the parts that measure nothing beside each other, and then the others one by one."""
    end = time.monotonic() + LIMIT_S
    begin = partial(begun, environment=environment, folder=folder, end=end)
    at_once = min(TESTS_AT_ONCE, len(os.sched_getaffinity(0)) // 2) if device != "cpu" else 1
    with ThreadPoolExecutor(max(1, at_once)) as pool:
        under_way = [pool.submit(begin, part) for part in parts if not part.alone]
        yield from (future.result() for future in as_completed(under_way))
    alone = [part for part in parts if part.alone]
    for number, part in enumerate(alone):
        # None takes the time of those that come after it.
        share_s = (end - time.monotonic()) / (len(alone) - number)
        yield begin(replace(part, limit_s=min(part.limit_s, share_s)))


def begun(part: Part, *, environment: Mapping[str, str], folder: Path, end: float) -> Result:
    """Run a part for as long as it may, and as long as there is time."""
    left_s = end - time.monotonic()
    if left_s < LEAST_S:
        return Result(name=part.name, ended="without being begun: no time left", seconds=0.0)
    return run_part(part, environment, folder, min(part.limit_s, left_s))


def environment_of_parts(device: str, folder: Path) -> dict[str, str]:
    """The environment of all parts: onefold is taken from the tree, installed or not."""
    paths = [ROOT / "src", ROOT]
    try:
        importlib.metadata.version("onefold")
    except importlib.metadata.PackageNotFoundError:
        # It asks for its own version, which an installation would have left.
        about = folder / f"onefold-{own_version()}.dist-info"
        about.mkdir()
        text = f"Metadata-Version: 2.1\nName: onefold\nVersion: {own_version()}\n"
        (about / "METADATA").write_text(text, encoding="utf-8")
        paths.append(folder)
    before = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([before] if before else [])]),
        "PYTHONHASHSEED": "0",
        "ONEFOLD_GPU_TESTS_ON": device,
        "ONEFOLD_TESTS_FRESH": "1",
    }


def own_version() -> str:
    """The version that the tree gives itself."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["version"])


def went_wrong(part: Mapping[str, Any]) -> bool:
    """Whether a part, or something in it, failed."""
    failed = any(line.get("outcome") == "failed" or "failed" in line for line in part["lines"])
    return failed or part["ended"] != "well"


def write(found: Mapping[str, Any], results: Path) -> None:
    """Write the data, the text and the page, each whole or not at all."""
    texts = {"gpu.json": json.dumps(found, indent=1) + "\n", "gpu.txt": as_text(found)}
    texts["gpu.html"] = as_page(found)
    for name, text in texts.items():
        aside = results / f"{name}.new"
        aside.write_text(text, encoding="utf-8")
        aside.replace(results / name)


if __name__ == "__main__":
    raise SystemExit(main())
