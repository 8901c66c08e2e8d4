"""Compiles the model and the loss of a shard together, so that every device runs the same code.

Note: the same code on any number of devices
--------------------------------------------
Code for a shard may depend on the shapes of that shard and on nothing that was computed before it.
So shapes are fixed, each with code of its own, kernels are chosen without timing them, and no
address is built in: parameters lie in other memory on each device of a process, which CUDA graphs
would not see. `onefold.shard.kernels` holds the compiler to that while shards run.

Note: random numbers
--------------------
The compiler would draw dropout in another way than PyTorch's own kernels do. It is asked not to:
then a compiled run draws the same numbers as one that is not compiled, the two differ by rounding
alone, and one loss can be compared with the other, see `EagerComparison`.

Note: a rehearsal
-----------------
Code does not say what a loss was divided by, nor which modules it called. So in the steps in which
costly checks are due the first shard of each device runs forward once more, as it is written.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from onefold.core.gathering import SyncBatchNorm
from onefold.core.mean import Contribution
from onefold.core.settings import Settings
from onefold.core.structure import tensors_of
from onefold.core.values import with_values_detached
from onefold.errors import LossError
from onefold.exchange.shard_table import ShardTable
from onefold.shard.model_parts import ExternalModules
from onefold.shard.replica import LossFunction, Replica, ShardTask
from onefold.system.internals import code_compiler

__all__ = ["CompiledLoss", "EagerComparison", "check_compiler", "check_layers"]

_log = logging.getLogger("onefold")
_MANY_SHAPES = 16
"""More shapes than a data set has that was made for it: two sizes of shards, and two of a last
batch."""
_ADVICE = (
    "Give batches few shapes: have collate pad texts to multiples of 64, say, and sort samples by "
    "length with trainer.loader(lengths=...). Or leave out compile=True"
)
_OPTIONS = {
    "deterministic": True,
    "fallback_random": True,
    # These choose by timing, also where the environment asks for them.
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "benchmark_fusion": False,
    # These build in addresses or values of parameters.
    "freezing": False,
    "triton.cudagraphs": False,
}
"""What is asked of the code generator."""
_ROUNDING = 1e-3
"""How far, relatively, a loss may differ in compiled code."""
_ROUNDING_LOW = 0.05
"""The same where it is computed in 16 bits."""


def check_compiler(device: torch.device) -> None:
    """Refuse to compile for a device where what is needed for it is missing.

    Raises:
        ValueError: there is no working compiler; the message says which is missing.
    """
    try:
        code_compiler(device)
    except RuntimeError as error:
        needed = "Triton, which comes with PyTorch for GPUs"
        if device.type == "cpu":
            needed = (
                "a C++ compiler and Python's headers (on Debian and Ubuntu: apt install g++ "
                "python3-dev; CXX may name another compiler)"
            )
        raise ValueError(
            f"compile=True: nothing can be compiled for {device}: {error}. Expected {needed}. "
            f"Install what is missing, or leave out compile=True"
        ) from error


def check_layers(module: torch.nn.Module) -> None:
    """Refuse layers that cannot be compiled.

    Raises:
        ValueError: there is one; the message names it.
    """
    for name, part in module.named_modules():
        if isinstance(part, SyncBatchNorm):
            raise ValueError(
                f"compile=True: {name or 'the model'} is an onefold.SyncBatchNorm, which waits for "
                f"other shards in the middle of the code. Use torch.nn.BatchNorm or a group norm "
                f"there, or leave out compile=True"
            )


class CompiledLoss:
    """The user's model and loss, compiled together for each shape that a shard has.

    Args:
        loss: the loss function, made by the user.
        deterministic: whether kernels that do not repeat their bits are refused.
    """

    def __init__(self, loss: LossFunction, *, deterministic: bool) -> None:
        # A loss may be any callable; the compiler begins with a function.
        def loss_of_shard(model: torch.nn.Module, payload: object) -> object:
            return with_values_detached(loss(model, payload))

        options: dict[str, Any] = {**_OPTIONS, "deterministic": deterministic}
        self._run = torch.compile(loss_of_shard, dynamic=False, options=options)
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._warned = False

    def __call__(self, model: torch.nn.Module, payload: object) -> object:
        """Compute the loss of one shard; compile it first where its shape is new.

        Raises:
            LossError: code was made for more shapes than anybody can have meant.
        """
        if not self._warned:
            self._count(payload)
        try:
            return self._run(model, payload)
        except Exception as error:
            # By name, as the compiler's exceptions are private.
            if type(error).__name__ == "FailOnRecompileLimitHit":
                raise LossError(
                    f"compile=True: code was made for as many shapes as it may be, and this shard "
                    f"has another one. {_ADVICE}"
                ) from error
            if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                error.add_note("leave out compile=True to run the loss as it is written")
            raise

    def _count(self, payload: object) -> None:
        self._shapes.add(tuple(tensor.shape for tensor in tensors_of(payload)))
        if len(self._shapes) > _MANY_SHAPES:
            self._warned = True
            _log.warning(
                "compile=True: shards have had %d shapes so far, and code is made for each, which "
                "takes seconds to minutes. %s",
                len(self._shapes),
                _ADVICE,
            )


class EagerComparison:
    """Runs a shard as it is written, now and then, before compiled code does.

    Args:
        settings: the settings of the run.
        external: modules that the loss uses beside the model.
        notes: whether to look for them; a module that the script has compiled warns of that.
    """

    def __init__(self, settings: Settings, external: ExternalModules, *, notes: bool) -> None:
        self._limit = _ROUNDING if settings.precision.compute is None else _ROUNDING_LOW
        self._external = external
        self._notes = notes
        self._warned = False

    def before(
        self, replica: Replica, task: ShardTask, table: ShardTable
    ) -> AbstractContextManager[None]:
        """Surround a device's shards: its first one is rehearsed, if a check is due.

        Raises:
            LossError: the loss is certainly not the one that the script means.
            StateError: the loss changes a module that is no part of the model.
        """
        # What sees the whole batch may do what a plain loop may.
        if not task.run_checks or task.is_plain:
            return nullcontext()
        own = task.batch.shares.shards_of(replica.number)
        shards = [n for n in own if n in task.batch.shards]
        return self._rehearsed(shards[0], replica, task, table) if shards else nullcontext()

    @contextmanager
    def _rehearsed(
        self, shard: int, replica: Replica, task: ShardTask, table: ShardTable
    ) -> Iterator[None]:
        where = f"step {task.step}, shard {shard}"
        notes = self._notes and task.shards > 1
        with self._external.refusing_changes(f"{where}, the loss") if notes else nullcontext():
            part = replica.rehearse(shard, task)
        yield
        samples = task.batch.count_of(shard).samples
        whole = task.microbatch is None or samples <= task.microbatch
        if part is not None and whole and part.kind != "means" and not self._warned:
            self._compare(part, float(table.totals[shard]), samples, where)

    def check_gathering(self, *, gathers: bool) -> None:
        """Refuse a compiled loss that turns out to gather.

        Raises:
            LossError: it gathers.
        """
        # What is gathered is first computed without gradients, and suspended in the middle: there
        # the compiler fails in ways of its own, by what else is in the model.
        if gathers:
            raise LossError(
                "compile=True: the loss calls onefold.gather, and a loss that waits for other "
                "shards cannot be compiled. Leave out compile=True; parts of the model that a "
                "script compiles itself may stay so"
            )

    def _compare(self, part: Contribution, compiled: float, samples: int, where: str) -> None:
        """Warn once if two losses of the same shard differ by more than rounding."""
        written = float(part.total())
        # Of losses of either sign a sum may be far smaller than what it was rounded by.
        size = max(float(part.root.detach().abs().double().sum()), abs(written), samples * 1e-3)
        difference = abs(written - compiled)
        if not math.isfinite(difference) or difference <= self._limit * size:
            return
        self._warned = True
        _log.warning(
            "compile=True: the loss of %s adds up to %g, and to %g without compiling, on the same "
            "samples with the same seeds. Random numbers of NumPy or of a generator of the "
            "script's own may be drawn in another order; else it is an error of the compiler, and "
            "compile=True is to be left out",
            where,
            compiled,
            written,
        )
