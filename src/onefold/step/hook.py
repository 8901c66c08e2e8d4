"""What a tool does around the steps of a run: a `Hook`. `Hooks` are those of one run, in order.

A session and an engine name no tool. They tell all hooks of the run what comes, by the methods of
`Hook`, and `onefold.tools` makes the list of these from the options of the run. A run without
tools has no hooks, and asks an empty list.

Note: the order of a step
-------------------------
::

    call                   a hook may answer here, and then nothing of what follows is done
      the batch is cut, the scheduler is checked
      around               the call is legal, and nothing has begun
        all devices agree on the step
        task               once
        around_compute     each time that all shards are computed
        the loss and the gradient are judged
        around_update      for each part of the segments that is updated at once
        the parameters are published
      around is left       the step is done for everybody
      the scheduler and the position count it
      after_step

Note: the order of hooks
------------------------
They lie around a step like shells: the first in the list is outermost. So ``call``, ``around``,
``task`` and ``around_compute`` reach the outermost first, and ``after_step`` the innermost: who
comes last before a step comes first after it.

Note: who may wait
------------------
``call``, ``around``, ``task``, ``around_compute`` and ``finish`` come on all devices alike, in one
order. There a hook may make calls to the others, if it does so on all devices; and what it decides
(to answer a call, to compute again, to stop) must follow from what all devices have in common. A
hook may be there on one device alone if it decides nothing and waits for nobody.
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
"""What a script asks for. ``result`` is whatever returns a value: an evaluation, a prediction, what
another device has. A ``loader`` is for steps, a ``pass`` goes once through other data. ``payloads``
are those of all shards of a loader's batch, ``statistics`` those of the averages."""

_ENDS_FIRST = ("step", "gradient", "load")
"""Calls that change the model. Ctrl-C waits for their end, so that it leaves no mixed state."""


@dataclass(slots=True, eq=False)
class ScriptCall:
    """A call of the script, as hooks see it: made anew for each, and theirs to write to."""

    kind: Kind
    words: str = ""
    """What users call it, as the record has it."""
    given: Any = None
    """What is acted on: a batch, a folder, the choices of a loader. A hook may put another value
    in its place."""
    name: str = ""
    """Of the loss."""
    dim: int = 0
    number: int = 0
    """Of the step."""
    begins: bool = True
    """Whether it is the first call of its step: there may be several gradients in one."""
    cut: ShardedBatch | None = None
    """The batch of a step, as it was given."""
    batch: ShardedBatch | None = None
    """The batch that is computed: another one if a hook has put it there."""
    computed: bool = True
    """Whether a step is computed; a hook that answers a call makes it False."""
    asked_to_stop: bool = False
    """Whether this process was asked to stop; a hook makes it True. All devices are told."""
    choices: Mapping[str, Any] = field(default_factory=dict)
    """How a run is saved or loaded."""
    key: object = None
    """Equal for calls that give the same, as long as the model does."""
    data: object = None
    """The object that it goes through."""
    inside: list[Callable[[], None]] = field(default_factory=list)
    """Called at the end of a block, while the model is there."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One computation of all shards of a step. There may be several, until it is whole."""

    task: ShardTask
    whole: bool = False
    """Whether its result is one that a step can be made of; known once it is computed."""
    again: bool = False
    """Whether to discard the result and compute all shards again; set by hooks."""
    gradient_taken: Callable[[float], None] | None = None
    """Called with the divisor once the gradient is taken, instead of the check that loss and
    gradient are finite; set by hooks."""


Make = Callable[[], Any]
Spans = Mapping[int, Sequence[Span]]
Update = Callable[[], object]
Surrounds = AbstractContextManager[object] | None


class Hook:
    """A tool around the steps of a run; each method does nothing, and is overridden at will.

    In the order in which they are called. Where an exception comes out of one, the step fails.
    """

    saves_run = False
    """Whether it saves the run, and ends it where it is asked to stop: the script is not asked."""

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Surround any call of the script; return what it gives.

        On all devices alike, but for loaders and ``replaying``, before anything is agreed on. May
        answer it without ``make``, change what is given, and look at what comes.

        Args:
            asked: the call.
            make: goes on with the next hook, and in the end makes the call.
        """
        return make()

    def around(self, asked: ScriptCall) -> Surrounds:
        """Surround a step or a block in which the model may change.

        On all devices, the batch cut, the call legal and nothing begun; left when the step is done
        for everybody and not counted yet. May wait for the others, put another batch into
        ``asked.batch``, and raise `RunStopped`.

        Returns:
            What is left then, also by an exception; None where nothing is to be done afterwards.
        """
        return None

    def task(self, task: ShardTask) -> ShardTask:
        """Say what shards do beside computing; on all devices alike, once the step has begun."""
        return task

    def around_compute(self, attempt: Attempt) -> Surrounds:
        """Surround the computing of all shards, each time; on all devices.

        May wait, look at what shards have noted, and set ``attempt.again`` if ``attempt.whole``.
        """
        return None

    def around_update(
        self,
        task: ShardTask,
        optimizer: torch.optim.Optimizer,
        segments: Sequence[torch.Tensor],
        update: Update,
    ) -> None:
        """Surround an update of segments; on each device of them alone, so it waits for nobody.

        Args:
            task: that of the step.
            optimizer: has the gradients.
            segments: the values that it updates.
            update: makes it; to be called at least once.
        """
        update()

    def after_step(self, asked: ScriptCall, step: Step, spans: Spans) -> None:
        """Look at a step that is done and counted, or answered (`ScriptCall.computed` says which).

        On all devices; of several gradients of one step after the first one. What raises here
        fails on this device alone, unless it tells the others.
        """

    def finish(self) -> None:
        """Write what is still to be saved, at the good end of the script, or as the run is left.

        On all devices, which are still there: may wait for them.
        """

    def close(self) -> None:
        """Let go of everything; waits for nobody, and may be called more than once."""


_NOTHING: AbstractContextManager[object] = nullcontext()


class Hooks:
    """The hooks of one run, outermost first; empty to begin with.

    What no hook overrides costs nothing: for each method there is a list of those that do.
    """

    def __init__(self) -> None:
        self.every: Sequence[Hook] = ()
        """All of them."""
        self.replace(())

    def replace(self, hooks: Sequence[Hook]) -> None:
        """Have these hooks from here on, outermost first; between two steps."""
        self.every = tuple(hooks)

        def of(name: str) -> list[Any]:
            own = [h for h in hooks if getattr(type(h), name) is not getattr(Hook, name)]
            return [getattr(hook, name) for hook in own]

        self._calls: list[Callable[[ScriptCall, Make], Any]] = of("call")
        self._around, self._computes = of("around"), of("around_compute")
        self.tasks: list[Callable[[ShardTask], ShardTask]] = of("task")
        self.updates: list[Callable[..., None]] = of("around_update")
        self.after_step: list[Callable[[ScriptCall, Step, Spans], None]] = of("after_step")[::-1]
        self._finishes, self._closes = of("finish"), of("close")
        self.saves_run = any(hook.saves_run for hook in hooks)

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Make a call of the script; see `Hook.call`."""
        for hook in reversed(self._calls):
            make = partial(hook, asked, make)
        with ctrl_c_later() if asked.kind in _ENDS_FIRST else _NOTHING:
            return make()

    def around(self, asked: ScriptCall) -> AbstractContextManager[object]:
        """Surround a step or a block; see `Hook.around`."""
        return _Shells(self._around, asked) if self._around else _NOTHING

    def around_compute(self, attempt: Attempt) -> AbstractContextManager[object]:
        """Surround the computing of shards; see `Hook.around_compute`."""
        return _Shells(self._computes, attempt) if self._computes else _NOTHING

    def finish(self) -> None:
        """Write what is still to be saved; see `Hook.finish`."""
        for finish in self._finishes:
            finish()

    def close(self) -> None:
        """Let go of everything."""
        for close in self._closes:
            close()


class _Shells(AbstractContextManager[None]):
    """What some hooks surround, the first outermost; cheap where they have nothing to do later."""

    __slots__ = ("_hooks", "_of", "_stack")

    def __init__(self, hooks: Sequence[Callable[[Any], Surrounds]], of: object) -> None:
        self._hooks, self._of = hooks, of
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        try:
            for hook in self._hooks:
                if (context := hook(self._of)) is not None:
                    self._stack = self._stack or ExitStack()
                    self._stack.enter_context(context)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return self._stack is not None and bool(self._stack.__exit__(kind, error, trace))
