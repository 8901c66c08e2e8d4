"""Golden problems in real processes, and what is too heavy for them on devices of one process."""

import json
from pathlib import Path
from typing import Any

import pytest

import onefold
from tests import golden
from tests.bits import cases, loaders, options
from tests.bits.test_smoke import check
from tests.capabilities import NO_LSTM

# One test worker has them all: each of them needs the runs on one device that others need too.
pytestmark = [
    *(pytest.mark.full, pytest.mark.processes),
    *(pytest.mark.xdist_group("bits"), pytest.mark.timeout(7200)),
]

WAYS = [
    *(("shared", "replicate", 2), ("collective", "replicate", 4), ("shared", "partition", 4)),
    *(("collective", "partition", 3), ("shared", "offload", 3), ("collective", "offload", 2)),
]
LINES = [
    *(("shared", "pipeline", 2), ("shared", "pipeline:2", 6), ("collective", "pipeline", 3)),
    ("collective", "pipeline:2", 4),
]


@pytest.mark.parametrize(("exchange", "placement", "devices"), [*WAYS, *LINES])
def test_golden_problems_in_processes(exchange: str, placement: str, devices: int) -> None:
    names = [problem.name for problem in golden.problems()]
    if placement.startswith("pipeline"):
        names = [name for name in names if name.startswith(("line-", "frozen-"))]
        names.remove("frozen-stopped")
    check(exchange, placement, devices, tuple(names))


def test_devices_of_one_process() -> None:
    """Every model, option and loader, with uneven shares that change, and workers that read."""
    several = {2: (3, 1), 3: (1, 0, 3)}
    for number, case in enumerate(cases.covering()):
        found = cases.run(case, ["cpu"] * (2 + number % 3))
        assert found == cases.run(case.reference, ["cpu"]), case
    asked = [names for names in options.pairs() if "compile" not in names]
    for number, names in enumerate(asked):
        option = options.Case(list(options.MODELS)[number % 3], names)
        ways = ["cpu"] * (2 + number % 2), ["cpu"]
        one, other = (options.run_part(option, None, options.STEPS, way) for way in ways)
        assert one == other, option
    for number, kind in enumerate(loaders.KINDS):
        devices, workers = 2 + number % 2, 0 if kind == "rule" else 2
        given = (several[devices], ["cpu"] * devices)
        read = loaders.run_part(kind, workers, Path("nowhere"), None, *given)
        alone = loaders.run_part(kind, 0, Path("nowhere"), None, None, ["cpu"])
        assert read == alone, kind


def test_the_reference_is_no_special_case() -> None:
    """Different runs have different bits, or these comparisons would show nothing."""
    several = [cases.Case("lenet", "sgd", shards) for shards in (2, 4, 7)]
    assert len({cases.run(case, ["cpu"])[0] for case in several}) == 3
    if cases.left_out():
        pytest.skip(f"{NO_LSTM}: {', '.join(map(str, cases.left_out()))}")


OF_ONE_RUN = ("sha256", "run", "time", "devices", "serial", "threads")
"""What may differ between two runs in their records."""


def files_of(folder: Path) -> dict[str, Any]:
    """The newest checkpoint in a folder."""
    (*_, newest) = sorted(folder.glob("step-*"))
    record = json.loads((newest / "run.json").read_text())
    kept = {key: value for key, value in record.items() if key not in OF_ONE_RUN}
    files = {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}
    return {"run": json.dumps(kept), **files}


def parts(names: list[str], folder: Path, stops: bool) -> dict[str, Any]:
    """Stop golden problems where each is to be stopped, or go on to the end."""
    known = {problem.name: problem for problem in golden.problems()}
    return {
        name: known[name].part(folder / name, known[name].stop if stops else None)  # type: ignore[misc]
        for name in names
    }


@pytest.mark.parametrize(
    "ways",
    [
        (("shared", "partition", 3), ("collective", "replicate", 2)),
        (("collective", "replicate", 3), ("shared", "partition", 2)),
        (("shared", "offload", 3), ("collective", "partition", 2)),
        (("collective", "replicate", 1), ("shared", "offload", 2)),
        (("shared", "pipeline", 2), ("collective", "replicate", 3)),
        (("collective", "partition", 3), ("shared", "pipeline:2", 4)),
        (("collective", "pipeline", 2), ("collective", "offload", 2)),
    ],
    ids=str,
)
def test_a_stopped_run_goes_on_in_another_way(
    ways: tuple[tuple[Any, str, int], tuple[Any, str, int]], tmp_path: Path
) -> None:
    """With the bits of the run that never stopped, and the files of another placement."""
    chosen = {each.name: each for each in golden.problems() if each.part is not None}
    names = ["frozen-stopped"] if "pipeline" in str(ways) else list(chosen)
    found: dict[str, Any] = {}
    for folder, both in (
        ("one", ways),
        ("replicate", (("shared", "replicate", 2), ("shared", "replicate", 2))),
    ):
        for stops, (exchange, placement, devices) in zip((True, False), both, strict=True):
            way = {"exchange": exchange, "placement": placement, "devices": f"cpu:{devices}"}
            given = (names, tmp_path / folder, stops)
            found = onefold.launch(parts, args=given, timeout_s=300, **way)
        files = [files_of(tmp_path / each / "frozen-stopped") for each in ("one", folder)]
        assert files[0] == files[1]
        assert found == {name: chosen[name].compute() for name in names}
