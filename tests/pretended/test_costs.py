"""What a step of onefold's own costs on an accelerator: waits, launches and allocations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu.device import DEVICE
from tests.gpu.net import batches, trainer_of
from tests.gpu.test_waiting import masked, terms
from tests.pretended import device

pytestmark = pytest.mark.fresh
WARM_UP, STEPS = 8, 2
LAYERS = 40
SHARDS = 4


@contextmanager
def counted() -> Iterator[dict[str, Any]]:
    """Count what happens inside; what the block is given is filled at its end."""
    torch.accelerator.synchronize()
    device.reset_counts()
    found: dict[str, Any] = {}
    try:
        yield found
    finally:
        found.update(device.counts())
        device.reset_counts(counting=False)


def counts_of_step(steps: Sequence[tuple[torch.Tensor, ...]], **options: Any) -> dict[str, float]:
    """Launches, waits and allocations of a step, after the first ones."""
    trainer = trainer_of(**options)
    for batch in steps[:WARM_UP]:
        trainer.step(batch)
    with counted() as found:
        for batch in steps[WARM_UP:]:
            trainer.step(batch)
    trainer.close()
    sums = {kind: sum(found[kind].values()) for kind in ("launches", "waits")}
    return {kind: n / STEPS for kind, n in {**sums, "allocations": found["allocations"]}.items()}


WAITS: list[tuple[int, dict[str, Any]]] = [
    *((1, options) for options in ({}, {"shards": 1}, {"microbatch": 2}, {"devices": 2})),
    # Read at once: loss and norm together.
    *((1, {"precision": name}) for name in ("fp16", "fp16-params")),
    *((1, {"precision": "fp16", "shards": n, "devices": n}) for n in (1, 2)),
    (1, {"on_nonfinite": "skip"}),
    # Of a loss whose weight the card computes: when all passes are queued, for each of them.
    *((1, {"loss": masked, "shards": 1, "precision": name}) for name in (None, "bf16")),
    (2, {"loss": masked, "shards": 1, "precision": "fp16"}),
    (SHARDS, {"loss": masked}),
    (2 * SHARDS, {"loss": terms}),
    # Eighteen samples in microbatches of nine.
    (2, {"loss": masked, "shards": 1, "microbatch": 9}),
]


@pytest.mark.parametrize(("most", "options"), WAITS)
def test_the_host_waits_for_no_more_than_it_must_know(most: int, options: dict[str, Any]) -> None:
    """Without the usual case, in which it reads loss and norm of the step before, long done."""
    steps = [(x.to(DEVICE), y.to(DEVICE)) for x, y in batches(WARM_UP + STEPS)]
    assert counts_of_step(steps, **options)["waits"] <= most


class Deep(nn.Sequential):
    """Many small parameters."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(8, 8) for _ in range(LAYERS)))


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean(1)


class Normed(Deep):
    """With buffers, which every shard finds as the step has found them."""

    def __init__(self) -> None:
        super().__init__()
        for place in range(LAYERS, 0, -1):
            self.insert(place, nn.BatchNorm1d(8))


def own_counts(
    kind: type[nn.Module], make: Callable[[nn.Module], torch.optim.Optimizer]
) -> dict[str, float]:
    """The same of a plain loop that goes over the shards one after the other."""
    model = kind().to(DEVICE)
    optimizer, x = make(model), torch.ones(3, 8, device=DEVICE)
    for _ in range(2):
        with counted() as found:
            for _ in range(SHARDS):
                squares(model, (x,)).sum().div(12).backward()
            optimizer.step()
        optimizer.zero_grad()
    return {"launches": sum(found["launches"].values()), "allocations": found["allocations"]}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), foreach=True)


@pytest.mark.parametrize("kind", [Deep, Normed])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5, "clip_value": 0.1}])
def test_launches_and_allocations_beside_the_models_own(
    kind: type[nn.Module], devices: int, options: dict[str, Any]
) -> None:
    """At most one launch for each parameter, with the additions of shards' gradients."""
    own, parameters = own_counts(kind, adam), len(list(kind().parameters()))
    steps = [(torch.ones(12, 8, device=DEVICE),)] * (WARM_UP + STEPS)
    choices: dict[str, Any] = {"devices": devices, "shards": SHARDS, **options}
    found = counts_of_step(steps, model=kind(), loss=squares, optimizer=adam, **choices)
    assert found["launches"] - own["launches"] <= parameters
    assert found["allocations"] - own["allocations"] <= SHARDS * parameters


@pytest.mark.parametrize("kind", [Deep, Normed])
def test_the_host_launches_a_captured_shard_as_a_whole(kind: type[nn.Module]) -> None:
    """Eight shards take less than half the launches of a single eager one, and at most 14 each."""
    steps = [(torch.ones(48, 8, device=DEVICE),)] * (WARM_UP + STEPS)
    options: dict[str, Any] = {"loss": squares, "optimizer": adam}
    eager = counts_of_step(steps, model=kind(), shards=1, **options)["launches"]
    one, eight = (
        counts_of_step(steps, model=kind(), shards=shards, graphs=True, **options)["launches"]
        for shards in (1, 8)
    )
    assert eight < eager / 2
    assert eight - one <= 7 * 14
