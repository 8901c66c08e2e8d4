"""Where a step's time goes, by the card's own clock."""

from __future__ import annotations

import time

from tests.gpu.device import DEVICE, ON_GPU, each
from tests.gpu.net import batches, trainer_of
from tests.inside import engine_in


@each("devices", [1, 2])
def test_the_phases_add_up_to_no_more_than_the_step(devices: int) -> None:
    trainer = trainer_of(devices)
    steps = batches(10)
    for batch in steps[:5]:
        float(trainer.step(batch).loss)
    for batch in steps[5:]:
        start = time.perf_counter()
        step = trainer.step(batch)
        seconds = step.seconds
        wall = time.perf_counter() - start
        phases = [seconds.data, seconds.forward, seconds.backward, seconds.exchange, seconds.update]
        assert all(phase >= 0 for phase in phases)
        assert min(seconds.forward, seconds.backward, seconds.update) > 0
        # Another clock on a card, and phases of its first device alone.
        assert sum(phases) < wall * 1.2 + 1e-3, (phases, wall)


def test_times_may_be_asked_for_long_after() -> None:
    trainer = trainer_of()
    kept = [trainer.step(batch) for batch in batches(8)]
    assert all(step.seconds.backward > 0 for step in kept)
    spans = engine_in(trainer).replicas[0].watch.take()
    assert spans == []
    moments = {type(span.stop).__name__ for span in kept[0]._spans if span.phase == "forward"}
    assert moments == ({"Event"} if ON_GPU else {"float"}), DEVICE
