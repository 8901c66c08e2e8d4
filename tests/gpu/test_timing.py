"""Where a step's time goes, by the card's own clock."""

import time

from tests.gpu.device import each
from tests.gpu.net import batches, trainer_of


@each("devices", [1, 2])
def test_the_phases_add_up_to_no_more_than_the_step(devices: int) -> None:
    trainer = trainer_of(devices)
    kept = []
    for batch in batches(10):
        start = time.perf_counter()
        step = trainer.step(batch)
        seconds = step.seconds
        wall = time.perf_counter() - start
        kept.append(step)
        if step.number > 5:
            phases = [seconds.data, seconds.forward, seconds.backward, seconds.exchange]
            assert all(phase >= 0 for phase in (*phases, seconds.update))
            assert min(seconds.forward, seconds.backward, seconds.update) > 0
            # Another clock on a card, and phases of its first device alone.
            assert sum(phases) + seconds.update < wall * 1.2 + 1e-3, (phases, wall)
    # They may be asked for long after.
    assert all(step.seconds.backward > 0 for step in kept)
