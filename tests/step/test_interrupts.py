"""A step that is interrupted anywhere leaves the model as before it or as after it, or says that it
is neither, and `load` goes on from there.

Ctrl-C comes at the end of a step. What raises at once (Ctrl-C twice, a time limit in a handler) is
simulated by an exception at each line of onefold that a step runs.
"""

import dis
import itertools
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import onefold
from onefold.core.options import LaunchContext, RunOptions
from onefold.core.randomness import comparable_state
from onefold.core.settings import PrecisionName
from onefold.errors import StateError
from onefold.update.optimizer import PartitionedOptimizer
from tests.tables import some

SOURCE = tuple(
    str(Path(str(package.__file__)).parent / name)
    for package, name in (
        (onefold, ""),
        (torch, "autograd/grad_mode.py"),
        (torch, "amp/autocast_mode.py"),
    )
)
"""Files whose lines are interrupted: onefold's, and those of PyTorch's contexts."""
MODES = tuple(
    f"{each}.__{name}__"
    for each in ("FakeTensorMode", "TorchFunctionMode", "TorchDispatchMode")
    for name in ("enter", "exit")
)
"""Further functions whose lines are interrupted."""
SAMPLE = 9
PARTS = 8
"""Parts of all lines, each a test of its own that ends in time."""
PLACES: dict[str, tuple[str, list[str], PrecisionName | None]] = {
    "one device": ("replicate", ["cpu"], None),
    "two devices": ("replicate", ["cpu", "cpu"], None),
    "partition": ("partition", ["cpu", "cpu"], None),
    "offload": ("offload", ["cpu"], None),
    "pipeline": ("pipeline", ["cpu", "cpu"], None),
    "fp16": ("replicate", ["cpu"], "fp16"),
}
"""Placement, devices of this process, and precision."""
BATCH = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 2


DATA = torch.utils.data.TensorDataset(*BATCH)


class State(NamedTuple):
    steps: int
    fingerprint: str
    scheduled: int
    momentum: list[list[float]]
    training: bool


class Run:
    """A Trainer that stands after two steps whenever `go_back` was called."""

    def __init__(self, trainer: onefold.Trainer, optimizer: Any, scheduler: Any, at: Path) -> None:
        self.trainer, self.optimizer, self.scheduler = trainer, optimizer, scheduler
        trainer.step(BATCH)
        self._folder = trainer.save(at)
        trainer.step(BATCH)
        self.states = [self.state(), self.go_on(), self.go_on()]
        """After two steps, three and four."""

    def go_back(self) -> None:
        self.trainer.load(self._folder)
        # Not the step after a load is interrupted, where old values are those of the load.
        self.trainer.step(BATCH)

    def state(self) -> State:
        trainer = self.trainer
        with trainer.modifying(optimizer_state=True):
            kept = [each["momentum_buffer"].flatten() for each in self.optimizer.state.values()]
            momentum = [each.tolist() for each in kept]
        modes = all(module.training for module in trainer.model.modules())
        return State(
            trainer.steps, trainer.fingerprint(), self.scheduler.last_epoch, momentum, modes
        )

    def go_on(self) -> State:
        self.trainer.step(BATCH)
        return self.state()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    made: list[onefold.Trainer] = []

    def make(place: str) -> Run:
        placement, devices, precision = PLACES[place]
        context = LaunchContext(options=RunOptions(placement=placement))
        monkeypatch.setattr("onefold.trainer.current_context", lambda: context)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        trainer = onefold.Trainer(
            model,
            optimizer,
            lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"),
            shards=4,
            devices=devices,
            scheduler=scheduler,
            threads=1,
            clip_norm=1.0,
            precision=precision,
        )
        made.append(trainer)
        return Run(trainer, optimizer, scheduler, tmp_path)

    yield make
    for trainer in made:
        trainer.close()


@cache
def blocks_of(function: CodeType) -> list[tuple[int, int]]:
    """First and last instruction of each block that handles exceptions."""
    entries = vars(dis)["_parse_exception_table"](function)
    return [(entry.start, entry.end) for entry in entries]


@cache
def code_of(function: CodeType) -> bytes:
    return function.co_code


def runs_handlers(frame: FrameType, before: int) -> bool:
    """Whether Python may run signal handlers between two instructions.

    It does so when a function begins, or has returned: not before the NOP of a ``try:``, and not
    between the last call of a block and what ends the block (``__exit__``, or a ``finally:``).
    """
    at, function = frame.f_lasti, frame.f_code
    left = any(
        start <= before < end and not start <= at < end for start, end in blocks_of(function)
    )
    return not left and code_of(function)[at] != dis.opmap["NOP"]


class Interrupts:
    """Counts the lines of `SOURCE` that are run, and interrupts one."""

    def __init__(self, at: int, interrupt: Callable[[], object], *functions: str) -> None:
        self._at, self._interrupt = at, interrupt
        self.lines = self.update = 0
        """Lines in all, and up to the optimizer's step."""
        self.where = ""
        self.inside: list[int] = []
        """Numbers of the lines of some functions, or files."""
        self._functions = functions
        self._at_before: dict[int, int] = {}
        """Last instruction of each frame at which this was called."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        # A generator goes on at its last instruction.
        self._at_before[id(frame)] = frame.f_lasti
        return (
            self._line if code.co_filename.startswith(SOURCE) or code.co_qualname in MODES else None
        )

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        before, self._at_before[id(frame)] = self._at_before[id(frame)], frame.f_lasti
        if event == "line" and runs_handlers(frame, before):
            self.lines += 1
            code = frame.f_code
            if code.co_qualname in self._functions or code.co_filename.endswith(self._functions):
                self.inside.append(self.lines)
            if frame.f_code is PartitionedOptimizer.step.__code__:
                self.update = self.update or self.lines
            if self.lines == self._at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                self._interrupt()
        return self._line


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def press_twice() -> None:
    press()
    press()


def raise_at_once() -> None:
    raise KeyboardInterrupt


def counted(run: Run, *functions: str) -> Interrupts:
    run.go_back()
    counting = Interrupts(0, press, *functions)
    with counting.watching():
        run.trainer.step(BATCH)
    return counting


def left_by(run: Run, at: int, interrupt: Callable[[], object], folder: Path) -> str:
    """Interrupt a step at a line, and tell what is left: `before`, `after`, or `torn`.

    Whatever it is, the next steps must be those of a run that was not interrupted.
    """
    run.go_back()
    interrupts, trainer = Interrupts(at, interrupt), run.trainer
    with pytest.raises(KeyboardInterrupt), interrupts.watching():
        trainer.step(BATCH)
    try:
        trainer.evaluate(lambda m, b: {"mean": m(b[0]).mean(1)}, DATA, batch_size=16)
    except StateError as error:
        refused = str(error)
        assert "evaluate was called after step 3 was interrupted" in refused, interrupts.where
        for call in (
            lambda: trainer.step(BATCH),
            lambda: trainer.save(folder),
            lambda: trainer.predict(lambda m, b: {"out": m(b[0])}, DATA, batch_size=16),
            trainer.fingerprint,
        ):
            with pytest.raises(StateError, match=r"step 3 was interrupted, .* trainer\.load"):
                call()
        run.go_back()
        left, found = "torn", 0
    else:
        found = trainer.steps - 2
        left = ("before", "after")[found]
        trainer.save(folder)
    assert run.state() == run.states[found], interrupts.where
    # Outside of a step, a plain loop may clip several parameters at once.
    nn.utils.clip_grad_norm_([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))], 1.0)
    trainer.step(BATCH)
    assert run.state() == run.states[found + 1], interrupts.where
    return left


def interrupt_all(
    run: Run, lines: list[int], interrupt: Callable[[], object], folder: Path
) -> Counter[str]:
    return Counter(left_by(run, at, interrupt, folder / "other") for at in lines)


def sample_of(run: Run) -> list[int]:
    """Some lines from all of a step, and more from the part in which the model changes."""
    found, draw = counted(run), Random(0)
    late = range(found.update, min(found.update + 200, found.lines))
    lines = {*draw.sample(range(1, found.lines + 1), SAMPLE), *draw.sample(late, SAMPLE)}
    # The last ones first: an interrupt inside the end of a block may leave hooks, and so more lines
    # before the update.
    return sorted(lines, reverse=True)


@pytest.mark.parametrize("place", some(PLACES, 2))
def test_ctrl_c_comes_at_the_end_of_a_step(
    place: str, make: Callable[[str], Run], tmp_path: Path
) -> None:
    run = make(place)
    found = interrupt_all(run, sample_of(run), press, tmp_path)
    # At the very first line the delay has not begun.
    assert found["after"] >= sum(found.values()) - 1
    assert not found["torn"]


@pytest.mark.parametrize(
    ("interrupt", "place"), some(itertools.product([raise_at_once, press_twice], PLACES), 2)
)
def test_what_breaks_a_step_off_leaves_one_state_or_says_so(
    place: str, interrupt: Callable[[], object], make: Callable[[str], Run], tmp_path: Path
) -> None:
    run = make(place)
    found = interrupt_all(run, sample_of(run), interrupt, tmp_path)
    assert found["before"] > SAMPLE / 2
    assert found["torn"]


RESTORING = {
    "two devices": (
        *("StepContext.follow_first", "Replica.check_places", "BufferSet.begin_step"),
        *(f"kept_generators.__{each}__" for each in ("init", "enter", "exit")),
        *(f"_Repeatable.__{each}__" for each in ("enter", "exit")),
        *("KernelSettings.repeat_bits", "KernelSettings.put_back", "StepContext.computing"),
    ),
    "pipeline": ("StageBoundary.followed", "StageBoundary.undo", *MODES),
    "fp16": (
        *(f"no_grad.__{each}__" for each in ("enter", "exit")),
        *(f"set_grad_enabled.__{each}__" for each in ("init", "enter", "exit")),
        *(f"autocast.__{each}__" for each in ("enter", "exit")),
    ),
}
"""Code that restores what a step has changed, by placement."""


RESTORING_CALLS = (
    *("StepContext.attached", "Replica.attach", "BufferSet.restore", "StepContext.computing"),
    *("_Mode.__enter__", "_Mode.__exit__", "put_gradients", "keeping_gradients"),
    *("undone_by", "Averaging.block", "Modifying.block"),
)
"""Code that restores what an evaluation or a block has changed."""


def surroundings() -> list[object]:
    """What a step changes in the process, and restores."""
    generators = [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)]
    return [
        *map(comparable_state, generators),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        nesting(),
        vars(torch._C)["_len_torch_function_stack"](),
        vars(torch._C)["_len_torch_dispatch_stack"](),
        vars(torch.autograd)["_engine_run_backward"],
    ]


def nesting() -> int:
    """Return the number of autocast blocks around this line."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


@pytest.mark.parametrize("place", RESTORING)
def test_what_restores_the_process_may_be_interrupted(
    place: str, make: Callable[[str], Run], tmp_path: Path
) -> None:
    run = make(place)
    found = counted(run, *RESTORING[place]).inside
    before = surroundings()
    wanted = SAMPLE // 2 if place == "pipeline" else 4 * SAMPLE
    for at in Random(0).sample(found, min(wanted, len(found))):
        left_by(run, at, raise_at_once, tmp_path / "other")
        assert surroundings() == before, at


def evaluate(trainer: onefold.Trainer) -> None:
    trainer.evaluate(lambda m, b: {"mean": m(b[0]).mean(1)}, DATA, batch_size=4)


def predict(trainer: onefold.Trainer) -> None:
    trainer.predict(lambda m, b: {"out": m(b[0])}, DATA, batch_size=4)


def show_averages(trainer: onefold.Trainer) -> None:
    with trainer.averaged():
        trainer.fingerprint()


def open_a_block(trainer: onefold.Trainer) -> None:
    with trainer.modifying(optimizer_state=True):
        pass


@pytest.mark.parametrize(
    ("call", "interrupt"),
    [*itertools.product([evaluate, predict, show_averages, open_a_block], [press, raise_at_once])],
)
@pytest.mark.parametrize("place", ["two devices", "partition"])
def test_interrupts_leave_nothing_of_other_calls(
    place: str,
    call: Callable[[onefold.Trainer], None],
    interrupt: Callable[[], object],
    make: Callable[[str], Run],
) -> None:
    run = make(place)
    trainer = run.trainer
    if call is show_averages:
        trainer.average(decay=0.5)
    run.go_on()
    here, around = run.state(), surroundings()
    for _ in range(2):  # the first one may import something
        counting = Interrupts(0, press, *RESTORING_CALLS)
        with counting.watching():
            call(trainer)
    draw, inside = Random(0), counting.inside
    lines = draw.sample(inside, min(len(inside), 2 * SAMPLE))
    if interrupt is press:
        lines += draw.sample(range(1, counting.lines + 1), SAMPLE)
    for at in lines:
        interrupts = Interrupts(at, interrupt)
        with pytest.raises(KeyboardInterrupt), interrupts.watching():
            call(trainer)
        assert run.state() == here, interrupts.where
        assert surroundings() == around, interrupts.where


LOOPING = "data_order/position.py", "data_order/loader.py", "update/scheduler.py"
"""Code of a loop outside of its steps."""


def looped(at: int) -> tuple[tuple[int, str, int], Interrupts]:
    """Run a loop with Ctrl-C at a line, and once more; return its end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trainer = onefold.Trainer(
        model,
        optimizer,
        lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"),
        shards=2,
        devices=["cpu"],
        scheduler=scheduler,
        scheduler_every="epoch",
        threads=1,
    )
    loader = trainer.loader(DATA, batch_size=6, shuffle=True)
    interrupts = Interrupts(at, press, *LOOPING)
    # Python drops the interrupt in the end of a loop, and the loop is complete.
    with suppress(KeyboardInterrupt), interrupts.watching():
        loop(trainer, loader)
    loop(trainer, loader)
    end = trainer.steps, trainer.fingerprint(), scheduler.last_epoch
    trainer.close()
    return end, interrupts


def loop(trainer: onefold.Trainer, loader: Any) -> None:
    for _ in trainer.epochs(2):
        for batch in loader:
            trainer.step(batch)


def test_a_loop_that_ctrl_c_stopped_ends_like_one_that_it_did_not() -> None:
    looped(0)  # the first one imports something
    whole, counting = looped(0)
    draw, inside = Random(0), counting.inside
    assert whole[0] == 6
    assert len(inside) > 200
    lines = some(inside, 17) + draw.sample(range(1, counting.lines + 1), 3 * SAMPLE)
    for at in lines:
        end, interrupts = looped(at)
        assert end == whole, interrupts.where


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("interrupt", [press, raise_at_once])
@pytest.mark.parametrize("place", PLACES)
def test_every_line_of_a_step_may_be_interrupted(
    place: str,
    interrupt: Callable[[], object],
    part: int,
    make: Callable[[str], Run],
    tmp_path: Path,
) -> None:
    run = make(place)
    every = counted(run).lines
    # Most of a pipeline's lines are the same ones for each shard.
    stride = max(1, every // 5000)
    lines = [*range(1 + part * stride, every + 1, PARTS * stride)]
    found = interrupt_all(run, lines, interrupt, tmp_path)
    if interrupt is press:
        assert not found["torn"]
    else:
        assert found["torn"] < len(lines) / 8
