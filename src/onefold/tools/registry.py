"""The one place that knows all tools: makes the hooks of a run from its options, in their order.

A tool is imported when an option asks for it. So a run without tools loads none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from onefold.core.calldigest import Call, CallDigest
from onefold.core.context import LaunchContext
from onefold.core.settings import AS_GIVEN, Settings
from onefold.exchange.progress import places_of, progress_of
from onefold.session.runparts import RunParts
from onefold.session.userparts import UserParts
from onefold.shard.replica import LossFunction
from onefold.step.hook import Hook
from onefold.system.process import requests_by_signals
from onefold.tools.onstep import OnStep

if TYPE_CHECKING:
    import torch

    from onefold.checkpoint.autosave import Resumption
    from onefold.tools.verifying import Verifying

__all__ = ["Tools"]

ORDER = (
    *("verify", "answers", "checkpoints", "autosave", "probe", "profile", "on_step"),
    *("record", "digests", "inspect", "audit", "stops", "places"),
)
"""Outermost first. After a step: what is compared must be shown before ``verify`` may end the
script; what ``on_step`` writes is there for a checkpoint; a step is recorded, and its place noted,
before functions of the script may fail. Before a step: what is refused by ``autosave`` is no
failure of the step for ``record``, and what is answered is not recorded again."""


LEFT_OUT: set[str] = set()
"""What no Trainer of this process has: to show what the rest does without it."""


class Tools:
    """The tools of one Trainer's run.

    Args:
        context: how this process was started.
    """

    def __init__(self, context: LaunchContext) -> None:
        self._context, self._options = context, context.options
        self._requests: list[bool] = []
        self._hooks: dict[str, Hook] = {}
        self._verifying: Verifying | None = None
        self._resumption: Resumption | None = None

    def settings(self, settings: Settings) -> Settings:
        """The settings that the run is to have."""
        if self._options.probe_mathematics:
            # The loss function is compared, not how it is computed, which would hide it. Compiled
            # code would not see the random draws either that the comparison replaces.
            return replace(settings, precision=AS_GIVEN, microbatch=None, compile=False)
        return settings

    def before_devices(
        self, user: UserParts, optimizer: torch.optim.Optimizer, settings: Settings
    ) -> None:
        """Do what is done before any device is touched: the script's arguments are checked."""
        if self._options.plan:
            from onefold.tools.planning import plan_instead

            plan_instead(self._context, user, optimizer, settings)
        # Before others are waited for: a notice that comes meanwhile would end this process.
        self._requests = requests_by_signals(self._options.stop_signals)

    def losses(self, user: UserParts) -> Mapping[str, LossFunction]:
        """The losses that the engine is to use; nothing of the script is refused any more."""
        if self._options.probe or self._options.inspection:
            from onefold.tools.verifying import Verifying

            self._verifying = Verifying(self._context, user.module, user.losses)
            return self._verifying.losses
        return user.losses

    def begin(self, run: RunParts) -> None:
        """Make the hooks, now that there is a run."""
        self.run, options = run, self._options
        made = self._hooks
        made["on_step"] = self.on_step = OnStep(run.devices)
        if self._verifying is not None:
            self._verifying.begin(run.engine, run.devices, run.count)
            made["verify"] = self._verifying
        if "checkpoints" not in LEFT_OUT:
            self._follow_for_checkpoints()
        # May find a checkpoint, so what starts from the step that is done comes after it.
        self._save()
        if options.audit:
            from onefold.tools.audit import Auditor

            made["audit"] = Auditor(run.engine.context, run.engine.placement, options, self._tell)
        if options.inspection:
            self._inspect()
        elif options.recorded_in and not run.devices.trainer:
            with run.telling_others():
                self._record(Path(options.recorded_in))
        self._note_places()
        self._observe()
        self._settle()

    def record(self, folder: Path) -> None:
        """Begin a record in the middle of a run; see `Trainer.record`."""
        if self._options.inspection:
            return
        if "digests" in self._hooks:
            raise RuntimeError(f"the run has a record already: expected no other, in {folder}")
        run = self.run
        run.engine.agree(CallDigest(Call.RECORD, run.position.step + 1))
        if run.devices.has_lead:
            folder.mkdir(parents=True, exist_ok=True)
        self._record(folder)
        self._settle()

    def _settle(self) -> None:
        hooks = [self._hooks[name] for name in ORDER if name in self._hooks]
        self.run.engine.hooks.replace(hooks)

    def _tell(self, found: object) -> None:
        for tell in self.run.found:
            tell(found)

    def _follow_for_checkpoints(self) -> None:
        from onefold.checkpoint.resume import Checkpoints
        from onefold.tools.checkpoints import CheckpointCalls

        run = self.run
        run.checkpoints = Checkpoints(
            *(run.engine, run.averaging(), run.devices, run.position, run.scheduler),
            note=lambda *about: run.note_checkpoint(*about),
        )
        self._hooks["checkpoints"] = CheckpointCalls(run, run.checkpoints)

    def _save(self) -> None:
        run, progress = self.run, progress_of(self._context)
        if not self._options.checkpoint or progress is None:
            return
        from onefold.checkpoint.autosave import Autosave, Resumption
        from onefold.tools.answers import Answers
        from onefold.tools.autosaving import Autosaving

        with_run = run.engine, run.changes(), run.checkpoints, run.position
        resumption = Resumption(*with_run, on_lead=run.devices.has_lead)
        self._resumption = resumption
        # Loading may fail on one device alone, for lack of memory say: the others must be told.
        with run.telling_others():
            autosave = Autosave(
                *(run.devices, run.checkpoints, run.position, progress, resumption),
                blocks=lambda: run.changes().blocks,
            )
        self._hooks["answers"] = Answers(run, resumption)
        self._hooks["autosave"] = Autosaving(run, autosave, resumption)

    def _inspect(self) -> None:
        from onefold.tools.inspection import Inspector
        from onefold.tools.recording import Digesting

        run, path = self.run, Path(self._options.inspection)
        inspector = Inspector(path, run.engine, run.position, run.batches.datasets)
        if inspector.trainer == run.devices.trainer:
            self._hooks["inspect"], self._hooks["digests"] = inspector, Digesting(run.engine)

    def _record(self, folder: Path) -> None:
        from onefold.tools.recording import Digesting, RecordKeeping

        self._hooks["digests"] = Digesting(self.run.engine)
        if self.run.devices.has_lead:
            self._hooks["record"] = RecordKeeping(self.run, folder, self._resumption)

    def _note_places(self) -> None:
        context, run, places = self._context, self.run, places_of(self._context)
        if self._options.may_stop or places is not None:
            from onefold.tools.places import Places, StopRequests

            if self._options.may_stop:
                self._hooks["stops"] = StopRequests(run, progress_of(context), self._requests)
            if places is not None:
                self._hooks["places"] = Places(run, places)
        if places is not None and context.launcher == "torch" and run.engine.context.with_others:
            from onefold.tools.hostwatch import watch_for_hangs

            watch_for_hangs(context)

    def _observe(self) -> None:
        options, run = self._options, self.run
        if self._context.timeline_parts:
            from onefold.tools.observers import timeline_of

            watches = {each.number: each.watch for each in run.engine.context.replicas}
            if (profile := timeline_of(run.devices, watches)) is not None:
                self._hooks["profile"] = profile
        if options.probe and not options.probe_mathematics:
            from onefold.tools.observers import Probing

            self._hooks["probe"] = Probing(run.engine, run.devices)
