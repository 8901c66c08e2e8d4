"""A placement that is not onefold's: a type in a file, here this one, and a row of `PLACEMENTS`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from onefold.core.options import RunOptions
from onefold.core.placements import PLACEMENTS, PlacementKind
from onefold.core.results import Gradients, ShardResult
from onefold.placement.base import Before, Placement, ResidentParameters, StepContext
from onefold.placement.replicated import run_share
from onefold.shard.task import ShardTask
from onefold.testing import simulate
from tests.small import make_trainer, points


class DictParameters(ResidentParameters):
    """The parameters of a model that are copies of what lies in a dict."""

    def __init__(self, context: StepContext) -> None:
        self._named = context.parts.trained
        self.kept: dict[str, torch.Tensor] = {}
        self.keep()

    def keep(self) -> None:
        self.kept = {name: p.detach().clone() for name, p in self._named.items()}

    def load(self) -> None:
        for name, parameter in self._named.items():
            parameter.data.copy_(self.kept[name])

    @contextmanager
    def gathered(self, *, detect_writes: bool = False) -> Iterator[None]:
        self.load()
        yield
        self.keep()


class InADict(Placement):
    """One device, which has its parameters from a dict in each step."""

    parameters: DictParameters

    def start(self, context: StepContext) -> None:
        super().start(context)
        self.parameters = DictParameters(context)

    def run_shards(
        self,
        task: ShardTask,
        done: Mapping[int, ShardResult],
        before: Before,
    ) -> Gradients | None:
        context = self.context
        self.parameters.load()
        with context.attached(context.first), before(context.first):
            gradients = run_share(context.first, task, context.exchange, done)
        return gradients if task.shards == 1 else None

    def publish(self) -> None:
        super().publish()
        self.parameters.keep()

    def may_write(self, shards: int) -> bool:
        return True  # to copies


def trained(*, spoils: bool = False) -> list[list[float]]:
    trainer = make_trainer(devices=None)
    for _ in range(3):
        if spoils:
            for parameter in trainer.model.parameters():
                parameter.data.fill_(7.0)
        trainer.step(points(8))
    with trainer.gathered():
        return [parameter.flatten().tolist() for parameter in trainer.model.parameters()]


def test_a_placement_is_a_type_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = PlacementKind(
        implementation=f"{__name__}:InADict",
        forms={"dict": "one device, which copies its parameters from a dict"},
        refuses={"compile": "compiled code is not tried here"},
    )
    monkeypatch.setitem(PLACEMENTS, "dict", row)
    replicated = simulate(trained, 1)
    assert simulate(trained, 1, placement="dict") == replicated
    spoiled = simulate(partial(trained, spoils=True), 1, placement="dict")
    assert spoiled == replicated, "what is in the dict counts"
    with pytest.raises(ValueError, match=r", dict .one device, .*, but got 'list'$"):
        RunOptions(placement="list")
    with pytest.raises(ValueError, match=r"compiled code is not tried here\. Omit compile"):
        RunOptions(placement="dict").check_combination(compile=True)
