"""What a Trainer can be asked for, alone and in pairs: the same bits on any number of devices, by
any exchange, and where a run goes on elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

import onefold
from tests.bits.options import (
    MODELS,
    OPTIONS,
    STEPS,
    STOP_AFTER,
    Case,
    name_of,
    pairs,
    run_part,
    run_parts,
)
from tests.compiler import cache, fresh_compiler

__all__ = ["cache", "fresh_compiler"]

WAYS = (("local", "shared"), ("shared", "collective"), ("collective", "local"))
"""The exchange before the stop, on three devices, and that after it, on two."""

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("bits"),
    # The compiler's own: where it copies what a tensor knows of its gradient, and where it loads.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


def differing(cases: list[Case], way: tuple[str, str], folder: Path) -> list[Case]:
    """The cases whose bits are not those of one device that never stopped."""
    go_on(cases, way[0], 3, folder, STOP_AFTER)
    found = go_on(cases, way[1], 2, folder, STEPS)
    never_stopped = [run_part(case, None, STEPS, ["cpu"]) for case in cases]
    assert len(set(never_stopped)) > 1
    alike = zip(cases, found, never_stopped, strict=True)
    return [case for case, mine, expected in alike if mine != expected]


def go_on(
    cases: list[Case], exchange: str, devices: int, folder: Path, stop_after: int
) -> list[str]:
    if exchange == "local":
        several = ["cpu"] * devices
        return [run_part(case, folder / name_of(case), stop_after, several) for case in cases]
    return onefold.launch(  # type: ignore[no-any-return]
        run_parts,
        devices=f"cpu:{devices}",
        args=(cases, folder, stop_after),
        exchange=exchange,  # type: ignore[arg-type]
        timeout_s=300,
    )


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_each_option(way: tuple[str, str], tmp_path: Path) -> None:
    """On the quickest model; compiled runs have a file of tests of their own."""
    turn = WAYS.index(way)
    cases = [Case("transformer", (name,)) for name in OPTIONS if name != "compile"][turn::3]
    assert differing(cases, way, tmp_path) == []


@pytest.mark.full
@pytest.mark.usefixtures("cache", "fresh_compiler")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("model", MODELS)
def test_each_option_of_every_model_in_every_way(
    model: str, way: tuple[str, str], tmp_path: Path
) -> None:
    assert differing([Case(model, (name,)) for name in OPTIONS], way, tmp_path) == []


@pytest.mark.full
@pytest.mark.usefixtures("cache", "fresh_compiler")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("model", MODELS)
def test_every_pair_of_options(model: str, way: tuple[str, str], tmp_path: Path) -> None:
    """The ways take turns, so that each model and each option sees all of them."""
    turn = (WAYS.index(way) + list(MODELS).index(model)) % 3
    cases = [Case(model, pair) for pair in pairs()][turn::3]
    assert differing(cases, way, tmp_path) == []
