"""Compiles the model and the loss of a shard together, so that every device runs the same code.

Note: the same code on any number of devices
--------------------------------------------
The code for a shard may depend on the shapes of that shard, but not on earlier computations. Shapes
are therefore static, with separate code for each, and kernels are chosen without timing them. The
code contains no addresses either: each device of a process has its parameters in other memory,
which CUDA graphs would not notice. `onefold.shard.kernels` enforces these settings while shards
run.

Note: random numbers
--------------------
By default the compiler generates dropout masks differently from PyTorch's own kernels. Option
``fallback_random`` makes it use theirs: compiled and eager runs then draw the same numbers and
differ only by rounding, so that `EagerComparison` can compare their losses.

Note: rehearsal
---------------
Compiled code does not show what a loss was divided by or which modules it called. In steps with
costly checks, the first shard of each device therefore runs forward once more, without compiled
code.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from onefold.core.gatherer import GatherRequest
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
"""Number of shapes above which to warn. A fitting data set has at most four: two sizes of shards,
and two in the last batch."""
_ADVICE = (
    "Reduce the number of shapes: pad texts in collate, for example to multiples of 64, and sort "
    "samples by length with trainer.loader(lengths=...). Or omit compile=True"
)
_OPTIONS = {
    # The same dropout masks as eager kernels: see the note on random numbers.
    "deterministic": True,
    "fallback_random": True,
    # These options choose kernels by timing; disable them even if the environment enables them.
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "benchmark_fusion": False,
    # These options embed addresses or values of parameters in the code.
    "freezing": False,
    "triton.cudagraphs": False,
}
"""Options of the code generator."""
_ROUNDING = 1e-3
"""Maximum relative difference between the losses of compiled and eager code."""
_ROUNDING_LOW = 0.05
"""Maximum relative difference if the loss is computed in 16 bits."""


def check_compiler(device: torch.device) -> None:
    """Refuse a device for which PyTorch has no working compiler.

    Raises:
        ValueError: there is no working compiler; the message names the missing part.
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
            f"compile=True: cannot compile for {device}: {error}. This requires {needed}. Install "
            f"it, or omit compile=True"
        ) from error


def check_layers(module: torch.nn.Module) -> None:
    """Refuse layers that cannot be compiled.

    Raises:
        ValueError: the model has such a layer; the message names it.
    """
    for name, part in module.named_modules():
        if isinstance(part, SyncBatchNorm):
            raise ValueError(
                f"compile=True: {name or 'the model'} is an onefold.SyncBatchNorm, which waits for "
                f"other shards in the middle of its code. Replace it by torch.nn.BatchNorm or a "
                f"group norm, or omit compile=True"
            )


class CompiledLoss:
    """The user's model and loss, compiled together for each shape of a shard.

    Args:
        loss: the user's loss function.
        deterministic: whether to refuse kernels that do not repeat their bits.
    """

    def __init__(self, loss: LossFunction, *, deterministic: bool) -> None:
        # Wrap the loss in a function, from which the compiler can start: it may be any callable.
        def loss_of_shard(model: torch.nn.Module, payload: object) -> object:
            return with_values_detached(loss(model, payload))

        options: dict[str, Any] = {**_OPTIONS, "deterministic": deterministic}
        self._run = torch.compile(loss_of_shard, dynamic=False, options=options)
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._warned = False

    def __call__(self, model: torch.nn.Module, payload: object) -> object:
        """Compute the loss of one shard; compile it first if its shape is new.

        Raises:
            LossError: the compiler's limit of shapes is exceeded.
        """
        if not self._warned:
            self._count(payload)
        try:
            return self._run(model, payload)
        except Exception as error:
            # Compare by name, because the compiler's exceptions are private.
            if type(error).__name__ == "FailOnRecompileLimitHit":
                raise LossError(
                    f"compile=True: the compiler's limit of shapes is reached, and this shard has "
                    f"another shape. {_ADVICE}"
                ) from error
            if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                error.add_note("omit compile=True to run the loss without compiling it")
            raise

    def _count(self, payload: object) -> None:
        self._shapes.add(tuple(tensor.shape for tensor in tensors_of(payload)))
        if len(self._shapes) > _MANY_SHAPES:
            self._warned = True
            _log.warning(
                "compile=True: shards have had %d shapes so far. Compiling the code for each takes "
                "seconds to minutes. %s",
                len(self._shapes),
                _ADVICE,
            )


class EagerComparison:
    """Runs a shard in eager mode before its compiled code, in steps with costly checks.

    Args:
        settings: the run's settings.
        external: modules that the loss uses in addition to the model.
        notes: whether to detect changes of such modules by hooks, about which a module that the
            script compiled would warn.
    """

    def __init__(self, settings: Settings, external: ExternalModules, *, notes: bool) -> None:
        self._limit = _ROUNDING if settings.precision.compute is None else _ROUNDING_LOW
        self._external = external
        self._notes = notes
        self._warned = False

    def before(
        self, replica: Replica, task: ShardTask, table: ShardTable
    ) -> AbstractContextManager[None]:
        """Return the context of a device's shards, which rehearses the first if a check is due.

        Raises:
            LossError: the loss is certainly not the loss that the script intends.
            StateError: the loss changes a module that is not part of the model.
        """
        # A pass over the whole batch may do anything that a plain loop may do.
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
            part = _rehearse(replica, shard, task)
        yield
        samples = task.batch.count_of(shard).samples
        whole = task.microbatch is None or samples <= task.microbatch
        if part is not None and whole and part.kind != "means" and not self._warned:
            self._compare(part, float(table.totals[shard]), samples, where)

    def check_gathering(self, *, gathers: bool) -> None:
        """Refuse a compiled loss that gathers.

        Raises:
            LossError: the loss gathers.
        """
        # A gathering loss first runs without gradients and is suspended in the middle. There the
        # compiler would fail with various errors, depending on the model.
        if gathers:
            raise LossError(
                "compile=True: the loss calls onefold.gather, which waits for other shards and "
                "cannot be compiled. Omit compile=True; the script may still compile parts of the "
                "model itself"
            )

    def _compare(self, part: Contribution, compiled: float, samples: int, where: str) -> None:
        """Warn once if two losses of the same shard differ by more than rounding."""
        written = float(part.total())
        # Losses of both signs may cancel: compare with the sum of absolute values, not with the
        # sum.
        size = max(float(part.root.detach().abs().double().sum()), abs(written), samples * 1e-3)
        difference = abs(written - compiled)
        if not math.isfinite(difference) or difference <= self._limit * size:
            return
        self._warned = True
        _log.warning(
            "compile=True: the loss of %s adds up to %g, but to %g without compiling, on the "
            "same samples with the same seeds. If the loss uses random numbers of NumPy or of "
            "the script's own generator, the order of draws may differ; otherwise the compiler "
            "is wrong: omit compile=True",
            where,
            compiled,
            written,
        )


def _rehearse(replica: Replica, shard: int, task: ShardTask) -> Contribution | None:
    """Run a shard, or its first microbatch, without compiled code; inspect the loss.

    Returns None if the loss gathers values from other shards.
    """
    with torch.compiler.set_stance("force_eager"), suppress(GatherRequest):
        read = Contribution.without_graph
        return replica.forward_alone(shard, task, read, inspected=True)[0]
    return None
