"""Nothing in a step waits for a card: PyTorch is asked to raise where the host would."""

import re
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import onefold
from onefold.core.mean import Contribution, LateWeight
from tests.gpu.device import DEVICE, ON_GPU, each, needs, nobody_waits
from tests.gpu.net import Batch, Net, adamw, batches, score, sgd, trainer_of

WARM_UP = 5
"""In the first steps checks are made that wait, see `onefold.checks.values.CheckInterval`."""


def masked(model: torch.nn.Module, batch: Batch) -> onefold.Mean:
    """A loss whose weight only the card knows."""
    images, labels = batch
    counts = (labels != 3).float()
    losses = F.cross_entropy(model(images), labels, reduction="none")
    return onefold.Mean((losses * counts).sum(), counts.sum())


def terms(model: torch.nn.Module, batch: Batch) -> onefold.LossTerms:
    """A loss of two terms, of which each has a weight that only the card knows."""
    images, labels = batch
    losses = F.cross_entropy(model(images), labels, reduction="none")
    counts = (labels != 3).float(), (labels != 5).float()
    first, second = (onefold.Mean((losses * count).sum(), count.sum()) for count in counts)
    return first + 0.5 * second


CHOICES: list[tuple[str, dict[str, Any]]] = [
    *((where, {}) for where in ("card", "pinned", "host")),
    ("card", {"shards": 1}),
    ("pinned", {"optimizer": sgd}),
    ("host", {"optimizer": partial(adamw, fused=True)}),
    ("card", {"clip_norm": 0.5, "clip_value": 0.1}),
    ("pinned", {"precision": "bf16"}),
    ("host", {"precision": "bf16-params"}),
    ("card", {"devices": 2}),
    ("pinned", {"devices": 3, "shares": (0, 3, 1), "clip_norm": 0.5}),
    ("host", {"devices": 2, "deterministic": False}),
    *(("card", {"loss": loss, "devices": n}) for loss in (masked, terms) for n in (1, 2)),
    # Where something is to be read in the step, it is copied to pinned memory, and that awaited.
    ("card", {"precision": "fp16"}),
    ("pinned", {"on_nonfinite": "skip", "devices": 2}),
    *(("card", {"loss": loss, "shards": 1}) for loss in (masked, terms)),
    *(("host", {"loss": loss, "microbatch": 2}) for loss in (masked, terms)),
    ("card", {"model": onefold.SyncBatchNorm.convert(Net()), "devices": 2}),
]


def placed(steps: list[Batch], where: str) -> list[Batch]:
    """The batches on the card, in pinned memory, or where they are."""
    if where == "card":
        return [(images.to(DEVICE), labels.to(DEVICE)) for images, labels in steps]
    if where == "pinned":
        return [(images.pin_memory(), labels.pin_memory()) for images, labels in steps]
    return steps


@each("choice", CHOICES)
def test_no_step_waits(choice: tuple[str, dict[str, Any]]) -> None:
    needs(ON_GPU, "a GPU")
    where, options = choice
    trainer = trainer_of(**options)
    steps = placed(batches(12), where)
    for batch in steps[:WARM_UP]:
        trainer.step(batch)
    done: list[onefold.Step] = []
    with nobody_waits():
        for batch in steps[WARM_UP:]:
            done.append(trainer.step(batch))
    losses = [float(step.loss) for step in done]
    assert len(set(losses)) == len(losses)
    assert all(0 < loss < 10 for loss in losses)
    assert all(0 < step.grad_norm < 1000 for step in done)


READ = [*((loss, n, 4) for loss in (masked, terms) for n in (1, 2)), (masked, 1, 1)]


@each("case", READ)
def test_weights_are_read_when_all_passes_are_queued(case: tuple[Any, int, int]) -> None:
    """To read one between forward and backward would let the card run out of work."""
    needs(ON_GPU, "a GPU")
    loss, devices, shards = case
    trainer = trainer_of(devices, loss=loss, shards=shards)
    for batch in batches(WARM_UP):
        trainer.step(batch)
    calls: list[str] = []
    read, backward = LateWeight.read, Contribution.backward

    def reading(weight: LateWeight) -> float:
        calls.append("read")
        return read(weight)

    def going_back(part: Contribution, *given: Any) -> None:
        calls.append("backward")
        backward(part, *given)

    here: Any = LateWeight
    there: Any = Contribution
    here.read, there.backward = reading, going_back
    try:
        trainer.step(batches(1)[0])
    finally:
        here.read, there.backward = read, backward
    order = "".join(name[0] for name in calls)
    # Of several terms once for all, before their shards run.
    expected = "r+b{4}" if loss is terms else f"b{{{shards}}}r+"
    assert re.fullmatch(expected, order), order


def test_the_steps_before_would_have_been_noticed() -> None:
    """The checks of the first steps wait: or this way of looking would prove nothing."""
    needs(ON_GPU, "a GPU")
    trainer = trainer_of()
    trainer.step(batches(1)[0])
    waited = False
    with nobody_waits():
        try:
            float(trainer.step(batches(1)[0]).loss)
        except RuntimeError as error:
            waited = "synchroniz" in str(error)
    assert waited


def test_no_shard_of_an_evaluation_waits() -> None:
    """Only the end does, which brings the totals to the host."""
    needs(ON_GPU, "a GPU")
    trainer = trainer_of(2)
    seen = [0]

    watching = ExitStack()

    def counted(model: torch.nn.Module, batch: Batch) -> dict[str, Any]:
        seen[0] += 1
        # The first batch is looked at more closely, and the last shard is followed by the sums.
        if seen[0] == 5:
            watching.enter_context(nobody_waits())
        if seen[0] == 16:
            watching.close()
        return score(model, batch)

    with watching:
        trainer.evaluate(counted, TensorDataset(*batches(1, 61)[0]), batch_size=16)
    assert seen[0] == 16


class Slow(torch.nn.Linear):
    """Keeps a card busy while the next batches are read."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = images.flatten(1)
        for _ in range(80):
            hidden = super().forward(hidden).tanh()
        return hidden


def test_what_is_under_way_is_not_written_over() -> None:
    """Pinned memory, and losses. One loop waits after every step, so that nothing can be under way;
    the other never does."""
    found = set()
    for waits in (True, False):
        torch.manual_seed(0)
        trainer = trainer_of(model=Slow(196, 196))
        data = TensorDataset(*batches(1, 90)[0])
        loader = trainer.loader(data, batch_size=9, shuffle=True, workers=2)
        for _ in trainer.epochs(3):
            for batch in loader:
                step = trainer.step(batch)
                if waits:
                    float(step.loss)
        found.add(trainer.fingerprint())
        trainer.close()
    assert len(found) == 1
