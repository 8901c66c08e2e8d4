"""Where the time of a step goes."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

import pytest
import torch
from torch import nn

from onefold.watch.timing import LAUNCH_STEPS, LaunchWatch, PhaseTime, Span, Stopwatch
from tests.small import Batch, make_trainer, points, square
from tests.tables import for_each


class Clock:
    """The host's clock: a second passes whenever it is read, and more where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        for module in ("watch.timing", "data_order.loader", "session.batches"):
            monkeypatch.setattr(f"onefold.{module}.host_now_s", self)

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


def test_spans_of_a_phase_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watch = Stopwatch(torch.device("cpu"))
    watch.note("update", "optimizer", watch.now())
    watch.note("forward", "shard 0", 1.0, 1.5)
    watch.note("forward", "shard 1", 3.0, 3.25)
    spans = watch.drain()
    assert (spans[0], clock.now_s) == (Span("update", "optimizer", 1.0, 2.0), 2.0)
    assert PhaseTime.of(spans) == PhaseTime(
        data=0.0, forward=0.75, backward=0.0, exchange=0.0, update=1.0
    )
    assert watch.drain() == []


@for_each("part", ["data", "forward", "backward"])
@for_each("devices", [1, 2])
def test_a_step_knows_where_its_time_went(
    part: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    late_s = 0

    class Data(torch.utils.data.Dataset[Batch]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Batch:
            clock.now_s += 100 * late_s if part == "data" else 0
            return points(8)[0][index], points(8)[1][index]

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        losses = square(model, batch)
        if part == "backward":
            losses.register_hook(lambda _: setattr(clock, "now_s", clock.now_s + 100 * late_s))
        clock.now_s += 100 * late_s if part == "forward" else 0
        if late_s == 2:
            raise ArithmeticError("on purpose")
        return losses

    trainer = make_trainer(loss=loss, devices=devices)
    loader = trainer.loader(Data(), batch_size=8)
    late_s, start = 1, clock.now_s
    seconds = asdict(trainer.step(next(iter(loader))).seconds)
    # The first batch, its first shard again, and three samples for the digest of the data; or a
    # device's share of shards.
    parts = 8 + 2 + 3 if part == "data" else 4 / devices
    assert seconds[part] == pytest.approx(100 * parts, abs=20)
    assert max(seconds, key=lambda name: seconds[name]) == part
    assert min(seconds.values()) > 0
    assert sum(seconds.values()) <= clock.now_s - start
    # Neither a step that failed nor the one before counts for the next.
    late_s = 2
    with pytest.raises(ArithmeticError, match="on purpose"):
        trainer.step(next(iter(loader)))
    late_s = 0
    assert max(asdict(trainer.step(points(8)).seconds).values()) < 100


# A device that waits for its launches


class Event:
    """An event that a device has, or has not, come to."""

    def __init__(self, past: bool) -> None:
        self.past = past

    def query(self) -> bool:
        return self.past


START = cast(Any, Event(True))


def told(steps: Sequence[tuple[bool, ...]], caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is told of steps, in each of which a device has or has not done its shards."""
    watch = Stopwatch(torch.device("cpu"))
    launches = LaunchWatch(3, watch)
    for shards in steps:
        for done in shards:
            watch.note("forward", "", START, START)
            # It has begun: the script may have waited for it in forward.
            watch.note("backward", "", START, cast(Any, Event(done)))
        watch.note("exchange", "", START, START)
        launches.sample_device(len(shards))
        watch.drain()
    return caplog.messages


KEPT_UP, LAGS = (True, True), (True, False)


def test_a_device_that_waits_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = told([KEPT_UP] * (3 * LAUNCH_STEPS), caplog)
    assert message.startswith("device 3 waits for the host")
    assert "the 2 shards of a step" in message


@for_each(
    "steps",
    [
        [LAGS] * 50,
        [*([KEPT_UP] * (LAUNCH_STEPS - 1)), LAGS] * 3,
        # There cannot be fewer shards than one, or than none.
        [(True,)] * 50,
        [()] * 50,
    ],
)
def test_no_other_device_is_named(
    steps: list[tuple[bool, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    assert told(steps, caplog) == []
