"""Computes the shards of a step on a line of devices, each of which has some stages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.line import waiting
from onefold.core.stages import ROOT, Stages
from onefold.engine.athand import Lending
from onefold.engine.kernels import Compilers
from onefold.engine.lineworker import LineWorker
from onefold.engine.passing import Passing
from onefold.engine.replica import Replica
from onefold.engine.shardtask import ShardTask
from onefold.exchange.exchange import Exchange

__all__ = ["Line", "line_of"]

_log = logging.getLogger("onefold")


class Line:
    """The devices of this process in a line of all devices.

    Args:
        replicas: the model on each of them.
        attached: has the module compute on one of them.
        exchange: with all devices.
        lending: has the parameters of a device's stages there.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        attached: Callable[[Replica], AbstractContextManager[object]],
        exchange: Exchange,
        lending: Lending,
    ) -> None:
        self._replicas = replicas
        self._attached = attached
        self._exchange = exchange
        self._lending = lending
        modules = replicas[0].stages
        assert modules is not None
        stages = modules.stages
        self._passings = [Passing(modules, n.number % stages.line, lending) for n in replicas]
        if replicas[0].number == 0:
            shape = exchange.board.shape
            _tell(stages, shape.devices // stages.line, shape.shards)

    def run(self, batch: ShardedBatch, task: ShardTask) -> None:
        """Compute all shards of a step, and hand over what each stage gave.

        Raises:
            LineError: the model cannot be computed by a line of devices.
            LossError, GradientError, StateError: see `Replica.compute`.
            PeerError: another device is lost or has failed.
        """
        exchange = self._exchange
        relay, fold = exchange.relay, exchange.stages
        assert relay is not None
        assert fold is not None
        relay.clear()  # of a step that failed, and was survived
        fold.begin(shard for shard, size in enumerate(batch.sizes) if not size)
        workers = []
        for replica, passing in zip(self._replicas, self._passings, strict=True):
            exchange.board.clear_rows(replica.number, batch.plan.shards_of(replica.number))
            replica.begin(task)
            workers.append(LineWorker(replica, passing, self._attached, batch, task, exchange))
        with self._lending.in_line(due=task.due):
            while busy := [worker for worker in workers if not worker.is_done]:
                for worker in busy:
                    while not worker.is_done and worker.can_go():
                        worker.go()
            relay.finish()
            fold.end_round()
        for replica in self._replicas:
            replica.end()


def line_of(
    replicas: Sequence[Replica],
    attached: Callable[[Replica], AbstractContextManager[object]],
    exchange: Exchange,
    lending: Lending,
    compilers: Compilers,
) -> Line | None:
    """Make the `Line` of this process's devices; None if each computes whole shards.

    Raises:
        ValueError: ``torch.compile`` has a part in the model or its loss, or ``torch.jit`` in one
            of its stages.
    """
    if exchange.relay is None:
        return None
    if compilers.compiled:
        raise ValueError(
            "expected a model that is not compiled with --keep stages, which leaves the loss in "
            "its midst: leave out torch.compile and compile=True, or use --keep span"
        )
    stages = replicas[0].stages
    assert stages is not None
    for name, module in zip(stages.stages.names[ROOT + 1 :], stages.modules, strict=True):
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"expected stages that Python calls with --keep stages, got {name}, which "
                f"torch.jit has compiled: leave out torch.jit, or use --keep span"
            )
    return Line(replicas, attached, exchange, lending)


def _tell(stages: Stages, lines: int, shards: int) -> None:
    """Say which device has which stages, and what lines cost."""
    parts = []
    for place in range(stages.line):
        own = [n for n, at in zip(stages.names, stages.places, strict=True) if at == place]
        named = own[ROOT + 1 :] if place == 0 else own
        parts.append(named[0] if len(named) == 1 else f"{named[0]} to {named[-1]}")
    most = -(-shards // lines)
    _log.warning(
        "%s of %d devices: %s. With %d shard%s%s a step takes %.0f %% longer than the work of one "
        "device, waiting for others: more shards wait less",
        "a line" if lines == 1 else f"{lines} lines side by side, each",
        stages.line,
        " | ".join(parts),
        most,
        "" if most == 1 else "s",
        "" if lines == 1 else " in a line",
        100 * waiting(stages.line, most),
    )
