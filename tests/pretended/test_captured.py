"""The golden problems with captured shards have the bits of eager ones."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import onefold.trainer
from onefold.checks import values
from onefold.core.settings import Settings
from onefold.session import forming
from onefold.shard import graphs
from onefold.shard.graphs import ShardGraphs
from tests import golden
from tests.gpu.device import DEVICE

pytestmark = pytest.mark.fresh

LEAST_COMPARED, LEAST_CAPTURED = 50, 30
"""Of 67 problems, eleven have constants on the host, others gather or wait for the device."""


@contextmanager
def on_the_device(*, captures: bool) -> Iterator[list[ShardGraphs]]:
    """Train on the device whatever a script names, with few eager steps; yields all graphs."""
    found: list[ShardGraphs] = []
    begin, where = ShardGraphs.__init__, torch.device(DEVICE)

    def noted(self: ShardGraphs, *given: Any, **options: Any) -> None:
        begin(self, *given, **options)
        found.append(self)

    def settings(**given: Any) -> Settings:
        return Settings(**{**given, "graphs": captures})

    with ExitStack() as stack:
        for owner, name, value in (
            (forming, "_checked", lambda named: where),
            (forming, "_default", lambda module: where),
            (values, "_FIRST_STEPS", 1),
            (graphs, "_EAGER", 1),
            (onefold.trainer, "Settings", settings),
            (ShardGraphs, "__init__", noted),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield found


def test_golden_problems_have_the_bits_of_eager_shards() -> None:
    compared, captured, different = 0, 0, []
    for problem in golden.problems():
        with on_the_device(captures=False):
            try:
                eager = [*map(str, problem.compute())]
            except RuntimeError as error:
                if "all tensors to be on the same device" in str(error):
                    continue
                raise
        with on_the_device(captures=True) as found:
            both = eager, [*map(str, problem.compute())]
        compared += 1
        captured += any(each.replays for each in found)
        different += [problem.name] if both[0] != both[1] else []
    assert different == []
    assert compared >= LEAST_COMPARED
    assert captured >= LEAST_CAPTURED
