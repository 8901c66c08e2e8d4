"""What limits a run: the host, which launches its work, its data, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from onefold.core.assignment import Devices
from onefold.core.options import LaunchContext
from onefold.tools.profile import Profile
from onefold.watch.limits import DATA_SHARE, HOST_SHARE, LAUNCH_STEPS, LEAST_DATA_S, LaunchWatch
from onefold.watch.timing import Phase, PhaseTime, Span, Stopwatch
from tests.small import Batch, make_trainer, points
from tests.tables import for_each


def of(*, data: float = 0.0, launch: float = 0.0, total: float = 1.0) -> PhaseTime:
    each = (total - data) / 4
    return PhaseTime(
        data=data, forward=each, backward=each, exchange=each, update=each, launch=launch
    )


@for_each(
    "named",
    [
        (of(), ""),
        # Just below each limit.
        (of(launch=HOST_SHARE - 0.01), ""),
        (of(data=DATA_SHARE - 0.01), ""),
        (of(data=0.9 * LEAST_DATA_S, total=LEAST_DATA_S), ""),
        (of(data=0.0, total=0.0), ""),
        (of(launch=0.9), "the host: launches take 900 of 1000 ms of a step. Use fewer shards"),
        (of(data=0.7), "data: a step waits for its batch for 700 of 1000 ms. Use workers="),
        # The larger one.
        (of(launch=0.6, data=0.3), "the host: launches take 600"),
        (of(launch=0.5, data=0.6), "data: a step waits for its batch for 600"),
        # Of several steps, the mean.
        (reduce(add, [of(data=0.2), of(data=0.4)]), "data: a step waits for its batch for 300"),
        (reduce(add, [of(data=0.6), *[of()] * 3]), ""),
    ],
)
def test_a_limit_is_named_with_what_helps(named: tuple[PhaseTime, str]) -> None:
    seconds, words = named
    assert bool(seconds.limit) == bool(words)
    assert seconds.limit.startswith(f"limited by {words}" if words else "")


# Data, on a CPU


class Slow(torch.utils.data.Dataset[Batch]):
    """Samples that take as long as the test says, on the clock of the run."""

    read_s = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        for module in ("watch.timing", "data_order.loader", "session.batches"):
            monkeypatch.setattr(f"onefold.{module}.host_now_s", self.passed)

    def passed(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Batch:
        self.now_s += self.read_s
        return points(32)[0][index], points(32)[1][index]


@for_each("read_s", [0.0, 0.1])
def test_a_step_that_waits_for_its_data_says_so(
    read_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, trainer = Slow(monkeypatch), make_trainer()
    batches = iter(trainer.loader(data, batch_size=8))
    # The first step reads more, for the digest of the data.
    trainer.step(next(batches))
    data.read_s = read_s
    limit = trainer.step(next(batches)).seconds.limit
    words = "limited by data: a step waits for its batch for 80"
    assert limit.startswith(words) if read_s else limit == ""


@for_each("data_s", [0.0, 0.9])
def test_a_profile_says_what_limits_the_run(
    data_s: float, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Any] = []
    monkeypatch.setattr("atexit.register", ends.append)
    devices = Devices(all=(torch.device("cpu"),), own=(0,), context=LaunchContext(), trainer=0)
    made = Profile(tmp_path, devices, {0: Stopwatch(torch.device("cpu"))})
    # The first step starts processes, and is not counted.
    for step, waited_s in enumerate((60.0, data_s, data_s)):
        start = 100.0 * step
        bounds: list[tuple[Phase, float]] = [("data", waited_s), ("forward", 1.0)]
        work = [Span(phase, "", start, start + each_s) for phase, each_s in bounds]
        made.add_step(step + 1, {0: work})
    ends[0]()
    found = [message.partition(".")[0] for message in caplog.messages]
    words = "device 0 is limited by data: a step waits for its batch for 900 of 1900 ms"
    assert found == [words] * bool(data_s)


# A device that waits for its launches


class Event:
    """An event that a device has, or has not, come to."""

    def __init__(self, past: bool) -> None:
        self.past = past

    def query(self) -> bool:
        return self.past


START = cast(Any, Event(True))


def watched(steps: Sequence[tuple[bool, ...]]) -> Iterator[list[Span]]:
    """The launches noted in steps, in each of which a device has or has not done its shards."""
    watch = Stopwatch(torch.device("cpu"))
    launches = LaunchWatch(3, watch, watch)
    for shards in steps:
        with launches:
            for number, done in enumerate(shards):
                watch.note("forward", "", START, START)
                # It has begun: the script may have waited for it in forward.
                watch.note("backward", f"backward shard {number}", START, cast(Any, Event(done)))
            watch.note("exchange", "", START, START)
        yield [span for span in watch.drain() if span.phase == "launch"]


def told(steps: Sequence[tuple[bool, ...]], caplog: pytest.LogCaptureFixture) -> list[str]:
    for _ in watched(steps):
        pass
    return caplog.messages


KEPT_UP, LAGS = (True, True), (True, False)


def test_launches_count_where_the_device_has_done_all_of_them() -> None:
    kept, lags, alone, without = watched([KEPT_UP, LAGS, (True,), ()])
    assert [len(each) for each in (kept, lags, alone, without)] == [1, 0, 1, 0]
    assert PhaseTime.of(kept).launch > 0


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
