"""All runs of this folder by name, and ways to place them. Also called in launched processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import onefold
import onefold.trainer
from onefold.core.options import RunOptions
from onefold.core.world import World
from onefold.system import heap
from tests.apart import apart
from tests.bits import adapted, cases, large, lined, loaders, options

APART = "host, apart"
"""As on a GPU: what a device does not keep lies in another memory."""


class Way(NamedTuple):
    """How many devices compute a run, and how."""

    exchange: str
    """``local``: one process drives all devices."""
    keep: str
    devices: int


Run = Callable[[Sequence[str] | None, int], Any]
"""Computes a run on the named devices, or on those of a launched process; how many there are."""
Part = Callable[[Path | None, int | None], Any]
"""Goes on from a folder in a launched process, to a step or to the end, and saves there."""


class Counting(torch.optim.Optimizer):
    """Counts its calls, and takes the norm of all gradients that it is called with."""

    def __init__(self, parameters: Any, lr: Any) -> None:
        super().__init__(parameters, {"lr": lr, "steps": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["steps"] += 1
            norm = sum(float(p.grad.square().sum()) for p in group["params"])
            rate = float(group["lr"]) / (self.calls + group["steps"] + norm)
            for parameter in group["params"]:
                parameter -= rate * parameter.grad


def with_a_rate_of_the_scripts(kind: Any, devices: Sequence[str] | None, _: int) -> str:
    """Train with a learning rate that the script changes in its own tensor, and several layers."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(7, 7) for _ in range(4)])
    rate = torch.tensor(0.1)

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean(dim=1)

    optimizer = kind(model.parameters(), lr=rate)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1, devices=devices)
    for _ in range(3):
        trainer.step(torch.randn(8, 7, generator=torch.Generator().manual_seed(2)))
        rate.mul_(0.5)
    found = trainer.fingerprint()
    trainer.close()
    return found


def loaded(kind: str, devices: Sequence[str] | None, count: int) -> Any:
    """Batches of a loader, with workers and changing plans where there are several devices."""
    plan = {2: (3, 1), 3: (1, 0, 3)}.get(count)
    workers = 0 if count == 1 or kind == "rule" else 2
    return loaders.run_part(kind, workers, Path("nowhere"), None, plan, devices)


@cache
def runs() -> dict[str, Run]:
    """What can be computed in every placement but lines."""
    pairs = [(name,) for name in options.OPTIONS] + options.pairs()
    chosen = [names for names in pairs if "compile" not in names]
    asked = [options.Case("transformer", names) for names in chosen]
    heavy = ("cnn", "resnet18")
    asked += [options.Case(heavy[n % 2], names) for n, names in enumerate(chosen[::3])]
    adamw = partial(torch.optim.AdamW, foreach=False)
    return {
        **{str(case): partial(_run, cases.run, case) for case in cases.covering()},
        **{str(case): partial(_run, large.run, case) for case in large.CASES},
        **{str(case): partial(_run, _optional, case) for case in asked},
        **{f"loader {kind}": partial(loaded, kind) for kind in loaders.KINDS},
        **{
            f"optimizer {n}": partial(with_a_rate_of_the_scripts, kind)
            for n, kind in enumerate((Counting, adamw))
        },
        **frozen_runs(),
    }


def _run(run: Callable[..., Any], case: Any, devices: Sequence[str] | None, _: int) -> Any:
    return run(getattr(case, "reference", case) if devices == ["cpu"] else case, devices)


def _optional(case: options.Case, devices: Sequence[str] | None) -> str:
    return options.run_part(case, None, options.STEPS, devices)


def _frozen(average: bool, devices: Sequence[str] | None, _: int) -> Any:
    return adapted.all_that_a_run_can_be(devices, average)


def frozen_runs() -> dict[str, Run]:
    return {f"frozen {average}": partial(_frozen, average) for average in (False, True)}


@cache
def runs_in_lines() -> dict[str, Run]:
    """What a line of devices can compute."""
    return {
        **{str(case): partial(_run, lined.run, case) for case in lined.CASES},
        **frozen_runs(),
    }


IN_A_LINE = (("bf16-params", "decay"), ("clip-norm", "skip"), ("microbatch", "mean"))
OTHERWISE = (*IN_A_LINE, ("sync-batch-norm", "gather"), ("fp16",), ("clip-value",))


def parts(*, in_line: bool) -> dict[str, Part]:
    """Runs that are stopped and go on."""

    def optional(case: options.Case, folder: Path | None, stop: int | None) -> Any:
        last = stop or options.STEPS
        return options.run_part(case, folder, last, uneven=not in_line)

    def read(kind: str, folder: Path | None, stop: int | None) -> Any:
        first = loaders.STEPS_OF_AN_EPOCH.get(kind, 4) + 2  # in the second epoch
        return loaders.run_part(kind, 0, folder or Path("nowhere"), first if stop else None)

    def frozen(folder: Path | None, stop: int | None) -> Any:
        """The second part begins with other frozen values, which the checkpoint replaces."""
        seed = 5 if stop or folder is None else 6
        return adapted.part_of_a_run(folder, 2 if stop else 4, seed)[0]

    names = IN_A_LINE if in_line else OTHERWISE
    return {
        **{"-".join(each): partial(optional, options.Case("transformer", each)) for each in names},
        **({} if in_line else {kind: partial(read, kind) for kind in loaders.KINDS}),
        "frozen": frozen,
    }


@contextmanager
def all_in_files(keep: str) -> Iterator[None]:
    """The models here are small, and the home is to have all of them."""
    least = heap.LEAST_BYTES
    heap.LEAST_BYTES = 1
    try:
        with ExitStack() as stack:
            if keep == APART:
                stack.enter_context(apart())
            yield
    finally:
        heap.LEAST_BYTES = least


def in_each(call: Callable[..., Any], names: Sequence[str], keep: str, *given: Any) -> list[Any]:
    """In a launched process."""
    with all_in_files(keep):
        return [call(name, *given) for name in names]


def run_named(name: str, lines: bool, count: int) -> Any:
    return (runs_in_lines() if lines else runs())[name](None, count)


def part_named(name: str, in_line: bool, folder: Path, stop: int | None) -> Any:
    return parts(in_line=in_line)[name](folder / name.replace(" ", "-"), stop)


def launched(way: Way, call: Callable[..., Any], names: Sequence[str], *given: Any) -> list[Any]:
    """What the lead of several processes has of each name."""
    found: list[Any] = onefold.launch(
        in_each,
        devices=f"cpu:{way.devices}",
        args=(call, names, way.keep, *given),
        keep=way.keep.partition(",")[0],
        exchange=way.exchange,  # type: ignore[arg-type]
        timeout_s=300,
    )
    return found


def local(way: Way, names: Sequence[str], lines: bool) -> list[Any]:
    """The same on devices of this process, which nobody launched."""
    module: Any = onefold.trainer
    before, world = module.current_world, World(options=RunOptions(keep=way.keep.partition(",")[0]))
    module.current_world = lambda: world
    try:
        with all_in_files(way.keep):
            each = runs_in_lines() if lines else runs()
            return [each[name](["cpu"] * way.devices, way.devices) for name in names]
    finally:
        module.current_world = before
