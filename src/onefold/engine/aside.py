"""Puts aside what a shard sees while others compute, and gives it back.

A shard that stops in the middle shares the module and the generators with those that go on. What it
finds afterwards must be what it left, whoever ran in between, or its bits would depend on the plan:
gradients, buffers, modes and other attributes of the model's modules, frozen parameters, random
numbers. Not covered is what a loss keeps elsewhere, in an object of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from onefold.core.randomness import GeneratorStates
from onefold.engine.gradients import gradients_of
from onefold.engine.replica import Replica
from onefold.system.tables import buffers_of

__all__ = ["put_aside"]


def put_aside(replica: Replica) -> Callable[[], None]:
    """Take away what a shard has made so far; the result puts it back.

    Args:
        replica: computes the shard; attached now, and again when it is put back.
    """
    parameters, buffers = list(replica.parts.named.values()), replica.buffers
    gradients = gradients_of(parameters)
    _put_gradients(parameters, [None] * len(gradients))
    # Before `absorb`, which writes what has come in place of a buffer into its memory: the graph
    # of this shard may hold that memory, and what was there must be there again for backward.
    sections = [section.clone() for section in buffers.flat.sections]
    homes = [(buffers_of(o), name) for each in buffers.places.homes for o, name in each]
    held = [table.get(name) for table, name in homes]
    buffers.absorb()
    # Shallow: the tables in which a module holds its parameters and parts stay the same objects.
    modules = [(part, dict(part.__dict__)) for part in replica.module.modules()]
    trainable = replica.parts.trainable()
    generators = GeneratorStates(replica.device)

    def put_back() -> None:
        for part, attributes in modules:
            if not _same(part.__dict__, attributes):
                part.__dict__.clear()
                part.__dict__.update(attributes)
        buffers.absorb()
        for target, section in zip(buffers.flat.sections, sections, strict=True):
            target.copy_(section)
        for (table, name), value in zip(homes, held, strict=True):
            table[name] = value
        replica.parts.restore_frozen(trainable)
        _put_gradients(parameters, gradients)
        generators.restore()

    return put_back


def _same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether two tables hold the very same objects."""
    # Not by ==, which compares tensors element by element.
    return list(now) == list(before) and all(map(operator.is_, now.values(), before.values()))


def _put_gradients(
    parameters: list[torch.nn.Parameter], gradients: list[torch.Tensor | None]
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        # Setting .grad takes several times as long as reading it, and mostly there is nothing.
        if parameter.grad is not gradient:
            parameter.grad = gradient
