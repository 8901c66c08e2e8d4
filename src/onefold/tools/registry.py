"""The list of all tools, in the order of their hooks. A new tool is one module and one line here.

A tool is a module below ``onefold.tools``. It is imported if its line asks for it, so a run without
tools imports none. The module defines:

- ``prepare(start)``, required: acts on the checked arguments of a Trainer, before any device is
  used, and returns ``begin``. ``begin(run)`` acts once the run has its engine, and returns the
  tool's `Hook`, or None.
- ``adjust(start)``, optional: replaces settings before they are checked.
- ``prepare_process(context)``, optional: changes the process before the script begins.

Each is called on every device, in the order of the list. Options that belong to one tool alone are
in `RunOptions.tools`, under its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from onefold.core.call_digest import Call, CallDigest
from onefold.core.options import LaunchContext
from onefold.exchange.progress import places_of, progress_of

if TYPE_CHECKING:
    from onefold.session.run import RunSetup, RunView
    from onefold.step.hook import Hook
    from onefold.tools.step_calls import StepCalls

__all__ = ["TOOLS", "Tool", "Tools", "prepare_process"]


class Tool(NamedTuple):
    """A line of the list."""

    name: str
    wanted: Callable[[LaunchContext], object]
    """Whether a run needs the tool."""


def _saves(context: LaunchContext) -> bool:
    return bool(context.options.checkpoint)


def _is_looked_at(context: LaunchContext) -> bool:
    return not context.options.tools.keys().isdisjoint(("verify", "inspection"))


TOOLS = (
    # Outermost: it may end the script after a step, and every other hook must see that step first.
    Tool("verifying", _is_looked_at),
    # Outside answers: refuses a model that cannot be saved before the run's directory is taken.
    # Outside autosaving: the checkpoint of a step names the parameters that the step trains.
    Tool("checkpoints", lambda context: True),
    # Has no hook. Before answers, which start from scratch if the lead finds no checkpoint.
    Tool(
        "lead_folder",
        lambda context: _saves(context) and not (context.one_host or context.options.remote),
    ),
    # Before answers, which look for the checkpoints that it fetches.
    Tool("remote", lambda context: context.options.remote),
    # Before all hooks that inspect steps: a replayed step is neither saved nor recorded again.
    Tool("answers", _saves),
    # Outside recording: a step that it rejects is not a failure. Saves entries that are written.
    Tool("autosaving", _saves),
    Tool("verifying.probing", lambda context: "verify" in context.options.tools),
    Tool("profile", lambda context: context.timeline_parts),
    # Inside autosaving: a checkpoint has what these functions write. Outside recording and places:
    # if one raises, its step is recorded, and the failure is reported as in the next step.
    Tool("step_calls", lambda context: True),
    Tool("recording", lambda context: context.options.recorded_in),
    Tool("digests", lambda context: context.options.recorded_in or _is_looked_at(context)),
    Tool("inspection", lambda context: "inspection" in context.options.tools),
    Tool("audit", lambda context: context.options.audit),
    Tool("samples", lambda context: not context.one_host),
    Tool("stops", lambda context: context.options.may_stop),
    # Innermost: the first to note that a step is done.
    Tool("places", lambda context: places_of(context) is not None),
    # These tools have no hook.
    Tool("host_watch", lambda context: context.address),
    Tool("planning", lambda context: "plan" in context.options.tools),
)
"""All tools, the outermost hook first. Before a step it is called first, after a step last; see
`onefold.step.hook`."""


def _wanted(context: LaunchContext) -> Iterator[tuple[str, Any]]:
    for tool in TOOLS:
        if tool.wanted(context):
            yield tool.name, _module(tool.name)


def _module(name: str) -> Any:
    return import_module(f"onefold.tools.{name}")


def prepare_process(context: LaunchContext) -> None:
    """Let the tools of a run change the process, before its script imports anything."""
    for _, module in _wanted(context):
        if hasattr(module, "prepare_process"):
            module.prepare_process(context)


class Tools:
    """The tools of one Trainer.

    Args:
        context: how this process was started.
    """

    def __init__(self, context: LaunchContext) -> None:
        self._context = context
        self._modules = dict(_wanted(context))
        self._begin: dict[str, Callable[[RunView], Hook | None]] = {}
        self._hooks: dict[str, Hook] = {}

    def adjust(self, start: RunSetup) -> None:
        """Replace settings before they are checked."""
        for module in self._modules.values():
            if hasattr(module, "adjust"):
                module.adjust(start)

    def prepare(self, start: RunSetup) -> None:
        """Act on checked arguments, before any device is used; may end the script."""
        self._start = start
        for name, module in self._modules.items():
            self._begin[name] = module.prepare(start)

    def build_hooks(self, run: RunView) -> None:
        """Make the hooks of the run."""
        self._run, options = run, self._context.options
        run.progress, run.places = progress_of(self._context), places_of(self._context)
        if options.recorded_in and "inspection" not in options.tools and not run.devices.trainer:
            run.recorded_in = Path(options.recorded_in)
        try:
            self._make(self._begin)
        except BaseException:
            # The script may survive this, and make another Trainer.
            for hook in self._hooks.values():
                hook.close()
            raise

    def _make(self, tools: Mapping[str, Callable[[RunView], Hook | None]]) -> None:
        for name, begin in tools.items():
            if (hook := begin(self._run)) is not None:
                self._hooks[name] = hook
        hooks = [self._hooks[each.name] for each in TOOLS if each.name in self._hooks]
        self._run.engine.hooks.replace(hooks)

    def record(self, folder: Path) -> None:
        """Start a record in the middle of a run; see `Trainer.record`."""
        run = self._run
        if "inspection" in self._context.options.tools:
            return
        if run.recorded_in is not None:
            raise RuntimeError(
                f"the run is already recorded in {run.recorded_in}, but trainer.record was called "
                f"with {folder}. Record a run once"
            )
        run.engine.agree(CallDigest(Call.RECORD, run.position.step + 1))
        run.recorded_in = folder
        names = ("recording", "digests")
        self._make({name: _module(name).prepare(self._start) for name in names})

    @property
    def on_step(self) -> StepCalls:
        """Calls the functions of `Trainer.on_step`."""
        hook: Any = self._hooks["step_calls"]
        on_step: StepCalls = hook
        return on_step
