"""Defines `Hook`, the interface of tools around the steps of a run, and `Hooks`, a run's hooks.

Session and engine know no tool by name. They call the methods of `Hook` on all hooks of the run,
and `onefold.tools` builds the list of hooks from the options of the run. A run without tools has no
hooks.

Note: the order of a step
-------------------------
::

    call                   a hook may answer here; the step is then only counted (after_step)
      the batch is cut, the scheduler is checked
      around               the call is allowed, and nothing has started
        all devices agree on the step
        task               once
        around_compute     each time that all shards are computed
        the loss and the gradient are judged
        around_update      for each group of segments that is updated at once
        the parameters are published
      around is left       all devices have made the step
      the scheduler and the position count it
      after_step

Note: the order of hooks
------------------------
Hooks surround a step like shells: the first in the list is outermost. ``call``, ``around``,
``task``, ``around_compute`` and ``around_update`` therefore reach the outermost hook first, and
``after_step`` the innermost.

Note: who may wait
------------------
All devices run ``call``, ``around``, ``task``, ``around_compute`` and ``finish``, in the same
order. In these methods a hook may make collective calls if it does so on all devices. Its decisions
(to answer a call, to compute again, to stop) must follow from values that all devices share. A hook
may exist on one device only if it decides nothing and waits for no other device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.call_digest import StepRequests
from onefold.shard.task import ShardTask
from onefold.step.result import Step
from onefold.system.process import ctrl_c_later
from onefold.watch.timing import Span

__all__ = ["Attempt", "Hook", "Hooks", "Kind", "Make", "ScriptCall", "Spans", "Surrounds", "Update"]

Kind = Literal[
    "step",
    "gradient",
    "result",
    "save",
    "load",
    "modifying",
    "averaged",
    "loader",
    "pass",
    "payloads",
    "statistics",
    "replaying",
]
"""Calls of a script. ``result`` is any call that returns a value, such as an evaluation, a
prediction, or a value of another device. A ``loader`` provides steps; a ``pass`` reads other data
once. ``payloads`` gathers the payloads of all shards of a loader's batch, ``statistics`` updates
the batch norm statistics of the EMA."""

_ENDS_FIRST = ("step", "gradient", "load")
"""Calls that change the model. Ctrl-C is delayed until they end, to keep the model consistent."""


@dataclass(slots=True, eq=False)
class ScriptCall:
    """A call of the script, as hooks see it. Each call has a new object, which hooks may change."""

    kind: Kind
    words: str = ""
    """The call in the user's words, as the record stores it."""
    given: Any = None
    """The argument: a batch, a folder, the options of a loader. A hook may replace it."""
    name: str = ""
    """Name of the loss."""
    dim: int = 0
    number: int = 0
    """Number of the step."""
    begins: bool = True
    """Whether this is the first call of its step; a step may have several gradients."""
    cut: ShardedBatch | None = None
    """The batch of a step, as the script passed it."""
    batch: ShardedBatch | None = None
    """The batch to compute: another one if a hook replaced it."""
    computed: bool = True
    """Whether a step is computed; a hook that answers a call sets this to False."""
    requests: StepRequests = StepRequests(0)
    """Requests of this process to all devices; hooks add to them."""
    choices: Mapping[str, Any] = field(default_factory=dict)
    """Options of a save or a load."""
    key: object = None
    """Equal for calls that return the same value as long as the model is the same."""
    data: object = None
    """The data set that the call reads."""
    inside: list[Callable[[], None]] = field(default_factory=list)
    """Called at the end of a block, while the model is still available."""


@dataclass(slots=True, eq=False)
class Attempt:
    """A computation of all shards of a step. A step may need several."""

    task: ShardTask
    whole: bool = False
    """Whether the step can use the result; known after the computation."""
    again: bool = False
    """Whether to discard the result and compute all shards again. Hooks may set it."""
    gradient_taken: Callable[[float], None] | None = None
    """Called with the denominator after the gradient is loaded, instead of the check that loss and
    gradient are finite. Hooks may set it."""


Make = Callable[[], Any]
Spans = Mapping[int, Sequence[Span]]
Update = Callable[[], object]
Surrounds = AbstractContextManager[object] | None


class Hook:
    """A tool around the steps of a run. Every method does nothing by default.

    Methods are listed in the order of calls. If one raises an exception, the step fails.
    """

    saves_run = False
    """Whether the hook saves the run and ends it on a stop request, instead of the script."""

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Surround any call of the script; return its result.

        Runs on all devices, before they agree on anything; only loaders and ``replaying`` may
        differ between devices. The hook may answer without ``make``, change the argument, and
        inspect the result.

        Args:
            asked: the call.
            make: calls the next hook, or makes the call if there is none.
        """
        return make()

    def around(self, asked: ScriptCall) -> Surrounds:
        """Surround a step or a block that may change the model.

        Entered on all devices, after the batch is cut and the call is checked, before anything has
        started. Left when all devices have made the step, before it is counted. The hook may wait
        for other devices, replace ``asked.batch``, and raise `RunStopped`.

        Returns:
            The context manager that is left then, also on an exception; None if there is nothing to
            do at the end.
        """
        return None

    def task(self, task: ShardTask) -> ShardTask:
        """Extend the task of a step. Runs on all devices, after the step has started."""
        return task

    def around_compute(self, attempt: Attempt) -> Surrounds:
        """Surround each computation of all shards; on all devices.

        The hook may wait, inspect what shards noted, and set ``attempt.again`` if
        ``attempt.whole``.
        """
        return None

    def around_update(
        self,
        task: ShardTask,
        optimizer: torch.optim.Optimizer,
        segments: Sequence[torch.Tensor],
        update: Update,
    ) -> None:
        """Surround an update of segments.

        Runs only on the device that updates them, so it must not wait for other devices.

        Args:
            task: the task of the step.
            optimizer: holds the gradients.
            segments: the values that it updates.
            update: makes the update; call it at least once.
        """
        update()

    def after_step(self, asked: ScriptCall, step: Step, spans: Spans) -> None:
        """Inspect a step that is finished and counted, or answered (see `ScriptCall.computed`).

        Runs on all devices. If a step has several gradients, it runs after the first. An exception
        here is raised on this device only, unless the hook reports it to the others.
        """

    def finish(self) -> None:
        """Write unsaved data, at the normal end of the script or when the run is left.

        Runs on all devices, so the hook may wait for them.
        """

    def close(self) -> None:
        """Release all resources. Must not wait, and may be called more than once."""


_NOTHING: AbstractContextManager[object] = nullcontext()


class Hooks:
    """The hooks of one run, outermost first; initially empty.

    A method that no hook overrides costs nothing: each method has a list of the hooks that override
    it.
    """

    def __init__(self) -> None:
        self.every: Sequence[Hook] = ()
        """All hooks."""
        self.replace(())

    def replace(self, hooks: Sequence[Hook]) -> None:
        """Replace the hooks, between two steps; outermost first."""
        self.every = tuple(hooks)

        def of(name: str) -> list[Any]:
            # Compare functions of the classes: bound methods are created anew by every access.
            own = [h for h in hooks if getattr(type(h), name) is not getattr(Hook, name)]
            return [getattr(hook, name) for hook in own]

        self._calls: list[Callable[[ScriptCall, Make], Any]] = of("call")
        self._around, self._computes = of("around"), of("around_compute")
        self.tasks: list[Callable[[ShardTask], ShardTask]] = of("task")
        self.updates: list[Callable[..., None]] = of("around_update")
        # Reverse the order: the innermost hook sees a finished step first.
        self.after_step: list[Callable[[ScriptCall, Step, Spans], None]] = of("after_step")[::-1]
        self._finishes, self._closes = of("finish"), of("close")
        self.saves_run = any(hook.saves_run for hook in hooks)

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Make a call of the script through all hooks; see `Hook.call`."""
        # Wrap from the innermost outward, so that the first hook runs first.
        for hook in reversed(self._calls):
            make = partial(hook, asked, make)
        # Delay Ctrl-C outside of all hooks, so that it cannot interrupt a hook halfway.
        with ctrl_c_later() if asked.kind in _ENDS_FIRST else _NOTHING:
            return make()

    def around(self, asked: ScriptCall) -> AbstractContextManager[object]:
        """Surround a step or a block; see `Hook.around`."""
        return _Shells(self._around, asked) if self._around else _NOTHING

    def around_compute(self, attempt: Attempt) -> AbstractContextManager[object]:
        """Surround a computation of shards; see `Hook.around_compute`."""
        return _Shells(self._computes, attempt) if self._computes else _NOTHING

    def finish(self) -> None:
        """Write unsaved data; see `Hook.finish`."""
        for finish in self._finishes:
            finish()

    def close(self) -> None:
        """Release all resources; see `Hook.close`."""
        for close in self._closes:
            close()


class _Shells(AbstractContextManager[None]):
    """The context managers of some hooks, the first outermost; cheap if the hooks return none."""

    __slots__ = ("_hooks", "_of", "_stack")

    def __init__(self, hooks: Sequence[Callable[[Any], Surrounds]], of: object) -> None:
        self._hooks, self._of = hooks, of
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        try:
            for hook in self._hooks:
                if (context := hook(self._of)) is not None:
                    # Most hooks return None, so the stack is created only when one does not.
                    self._stack = self._stack or ExitStack()
                    self._stack.enter_context(context)
        except BaseException as error:
            # Python calls no `__exit__` after a failed `__enter__`: leave entered hooks here.
            # The hook that failed was never entered, and is not left.
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return self._stack is not None and bool(self._stack.__exit__(kind, error, trace))
