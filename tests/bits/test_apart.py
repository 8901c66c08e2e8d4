"""Devices that keep nothing, and have memory of their own beside the host's, as GPUs have: the bits
are those of devices that keep all. See tests/apart.py for what stands for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from onefold.core.options import KeepName, RunOptions
from onefold.core.world import World
from tests.apart import apart
from tests.bits import large, options
from tests.bits.large import CASES
from tests.bits.options import STEPS, STOP_AFTER
from tests.bits.test_keep import OTHERWISE, Counting, reference, with_a_rate_of_the_scripts
from tests.engine.test_lending import launched

pytestmark = pytest.mark.xdist_group("bits")

ALONE = [name for name in options.OPTIONS if name != "compile"]


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[KeepName], None]]:
    """Sets what the device of this process keeps."""

    def keep(what: KeepName) -> None:
        world = World(options=RunOptions(keep=what))
        monkeypatch.setattr("onefold.trainer.current_world", lambda: world)

    with apart():
        yield keep


def with_memory_apart(call: Callable[..., Any], *given: object) -> Any:
    """In a launched process."""
    with apart():
        return call(*given)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_models_in_stages(case: large.Case, keeping: Callable[[KeepName], None]) -> None:
    keeping("host")
    found = large.run(case)
    keeping("all")
    assert found == reference(case.reference)


@pytest.mark.parametrize("shards", [1, options.SHARDS])
@pytest.mark.parametrize("option", ALONE)
def test_whatever_else_is_asked_for(
    option: str,
    shards: int,
    keeping: Callable[[KeepName], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "SHARDS", shards)
    case = options.Case("transformer", ("clip-norm", option))
    keeping("host")
    found = options.run_part(case, None, STEPS)
    keeping("all")
    assert found == options.run_part(case, None, STEPS)


@pytest.mark.parametrize("ways", [("host", "all"), ("all", "host"), ("host", "host")], ids="-".join)
@pytest.mark.parametrize("names", OTHERWISE, ids="-".join)
def test_a_run_goes_on_with_another_choice(
    names: Sequence[str],
    ways: tuple[KeepName, KeepName],
    keeping: Callable[[KeepName], None],
    tmp_path: Path,
) -> None:
    case = options.Case("transformer", tuple(names))
    found = ""
    for keep, stop in zip(ways, (STOP_AFTER, STEPS), strict=True):
        keeping(keep)
        found = options.run_part(case, tmp_path / "run", stop)
    keeping("all")
    assert found == options.run_part(case, None, STEPS)


@pytest.mark.parametrize("kind", [Counting], ids=["own"])
def test_an_optimizer_that_looks_at_all_parameters(
    kind: Any, keeping: Callable[[KeepName], None]
) -> None:
    keeping("host")
    found = with_a_rate_of_the_scripts(kind)
    keeping("all")
    assert found == with_a_rate_of_the_scripts(kind)


@pytest.mark.processes
@pytest.mark.parametrize("devices", [2, 3])
def test_devices_of_several_processes(devices: int) -> None:
    found = launched(with_memory_apart, large.run_all, CASES, devices=devices, keep="host")
    pairs = zip(CASES, found, strict=True)
    assert [case for case, result in pairs if result != reference(case.reference)] == []


@pytest.mark.processes
def test_several_processes_go_on_as_one(tmp_path: Path) -> None:
    cases = [options.Case("transformer", names) for names in OTHERWISE]
    for devices, keep, stop in ((3, "host", STOP_AFTER), (2, "host", STEPS)):
        found = launched(
            with_memory_apart, options.run_parts, cases, tmp_path, stop, devices=devices, keep=keep
        )
    assert found == [options.run_part(case, None, STEPS, ["cpu"]) for case in cases]
