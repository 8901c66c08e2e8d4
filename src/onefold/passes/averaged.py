"""Keeps averages of a model and shows them in the model: `Trainer.average` and `averaged`.

Note: how averages are shown
----------------------------
Each process first copies the values to restore: all trained parameters and buffers. If all
processes of a host share the memory of the parameters, all but the lead copy only their own
segments. Then the devices meet. The owner of each segment writes its average, rounded to the
model's dtype, to the parameters, which are published as after an update. Masters do not change.

At the end the devices meet again, and each process restores its copies. This requires no message
from other devices, so it also works if an exception ends the block on this device alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onefold.core.call_digest import Call, CallDigest, digest
from onefold.core.flat import FlatTensors
from onefold.placement.base import StepContext
from onefold.step.engine import Engine
from onefold.system.compat import copy_each
from onefold.system.process import ctrl_c_later, undone_by
from onefold.update.averages import AverageRule, Averages
from onefold.update.staging import SegmentState

__all__ = ["Averaging"]


class Averaging:
    """Keeps averages of the model, and shows them in the model.

    Args:
        engine: the devices of this process.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.asked: AverageRule | None = None
        """The average that the script requested; None if it requested none."""
        self._loaded = False
        self.expected: AverageRule | None = None
        """The average of a checkpoint whose values are not loaded yet."""
        self._kept: FlatTensors | None = None
        """Training values of all parameters, while averages are shown."""
        self._put_aside: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        """Memory that is overwritten to show the averages, and a copy of its content; None outside
        a block."""

    @property
    def _context(self) -> StepContext:
        return self._engine.context

    @property
    def _averages(self) -> Averages:
        return self._context.update.averages

    def check_begin(self, rule: AverageRule) -> None:
        """Check that an average can start.

        Raises:
            ValueError: the script already started an average, or a loaded checkpoint contains a
                different one.
            RuntimeError: the script is inside a block that shows the average.
        """
        self._engine.agreement.refuse_inside(Call.AVERAGE)
        ours = self._averages.rule or self.expected
        if ours is None:
            return
        if not self._loaded and self.expected is None:
            raise ValueError(
                f"trainer.average({rule.words}) was called, but the average of {ours.words} "
                f"already exists. A trainer keeps one average: call it once"
            )
        if ours != rule:
            raise ValueError(
                f"trainer.average({rule.words}) was called, but the loaded checkpoint contains an "
                f"average of {ours.words}, which continues. Pass the same arguments. To start "
                f"another average, load with "
                f'allow_changed=["average"]'
            )

    def start_average(self, rule: AverageRule, step: int) -> None:
        """Start an average, or continue that of a checkpoint; called on all devices.

        Args:
            rule: rule of the average, accepted by `check_begin`.
            step: number of the next step.
        """
        self._engine.agreement.start_call(
            CallDigest(Call.AVERAGE, step, arguments=digest(rule.words))
        )
        self.asked, self._loaded = rule, False
        if self._averages.rule is None:
            self._start_average(rule)

    @contextmanager
    def block(self, step: int, *, recomputes: bool = False) -> Iterator[None]:
        """Show the averages in the model on every device, inside this context.

        Args:
            step: number of the next step.
            recomputes: whether batch norm statistics are recomputed first.

        Raises:
            ValueError: there is no average.
            DisagreementError: another device makes another call.
            RuntimeError: the script is already inside such a block.
        """
        if self._averages.rule is None:
            raise ValueError(
                "trainer.averaged() was called, but there is no average. Call "
                "trainer.average(decay=0.999) or trainer.average(mean=True) before the steps"
            )
        agreement = self._engine.agreement
        agreement.refuse_inside(Call.AVERAGED)
        with self._engine.gathered(step):
            self._context.first.check_places()
            with undone_by(self._end):
                self._prepare()
                agreement.start_call(CallDigest(Call.AVERAGED, step, arguments=int(recomputes)))
                agreement.averaged = True
                with ctrl_c_later():
                    self._show()
                yield
                agreement.start_call(CallDigest(Call.AVERAGED_END, step))
            if self._context.exchange.memory.is_common:
                # Wait until every owner has restored its segments.
                self._context.exchange.memory.publish_parameters()
                self._context.guard.note()

    @contextmanager
    def training_values(self) -> Iterator[FlatTensors]:
        """On the lead, show the training values in the module, even while averages are shown.

        Yields:
            The trained parameters that the module shows.
        """
        first = self._context.first
        if self._kept is None:
            yield first.trained
            return
        first.buffers.absorb()
        try:
            for parameter, view in zip(first.parts.trained.values(), self._kept.views, strict=True):
                parameter.data = view
            for tensor, view in zip(
                first.buffers.places.tensors, self._kept_buffers.views, strict=True
            ):
                tensor.data = view
            yield self._kept
        finally:
            first.attach()

    def to_json(self) -> dict[str, Any] | None:
        """Describe the average for a checkpoint; None if there is none."""
        rule = self._averages.rule
        return None if rule is None else rule.to_json(self._averages.steps)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return copies of the averages of all buffers on the host, by name; empty without any."""
        kept = self._averages.buffers
        if kept is None:
            return {}
        named = zip(self._context.first.buffers.places.names, kept.views, strict=True)
        return {name: view.to("cpu", copy=True) for name, view in named}

    def loaded(self, rule: AverageRule | None, steps: int, buffers: Iterable[SegmentState]) -> None:
        """Continue from a checkpoint, after the model and the states of segments are loaded.

        Args:
            rule: rule of the checkpoint's average; None if it has none, or is not to be used. Then
                an average that the script requested starts from the current values.
            steps: number of steps that the average has followed.
            buffers: averages of buffers, by number.
        """
        self._loaded, self.expected = True, None
        brought = dict(self._averages.segments)
        self._averages.end()
        if rule is not None:
            self._averages.segments = brought
            self._averages.adopt_buffers(self._context.first.buffers.flat, buffers)
            self._start_average(rule, steps)
        elif self.asked is not None:
            self._start_average(self.asked)

    def _start_average(self, rule: AverageRule, steps: int = 0) -> None:
        self._bring_changes()
        self._averages.start(
            rule, self._context.update.exact_values(), self._context.first.buffers.flat, steps=steps
        )

    def _bring_changes(self) -> None:
        """Apply changes that the script may have made since the last step to the training state."""
        self._context.first.buffers.absorb()
        self._context.follow_first()
        self._engine.follow_parameters()

    def _prepare(self) -> None:
        """Copy the values to overwrite, before the devices meet, because others may write
        afterwards."""
        self._bring_changes()
        first, common = self._context.first, self._context.exchange.memory.is_common
        first.buffers.note_changes()
        buffers, kept = first.buffers.flat.clone(), None
        aside = list(zip(first.buffers.flat.sections, buffers.sections, strict=True))
        if common and first.number != 0:
            aside += [(place, place.clone()) for place in self._shown_segments()]
        else:
            # The lead copies all parameters, because it also saves them.
            kept = first.trained.clone()
            aside += zip(first.trained.sections, kept.sections, strict=True)
        # In one line, so that Ctrl-C does not come between them.
        self._put_aside, self._kept, self._kept_buffers = aside, kept, buffers
        first.buffers.carried.is_paused = True

    def _shown_segments(self) -> list[torch.Tensor]:
        """Return the memory that models read for the segments of this process."""
        return [
            (item.values if item.shown is None else item.shown).detach()
            for item in self._context.update.owned
        ]

    def _show(self) -> None:
        """Write the averages to the memory that models read, on all devices."""
        averages = [self._averages.segments[item.number] for item in self._context.update.owned]
        if averages:
            copy_each(self._shown_segments(), averages)
        kept = self._averages.buffers
        if kept is not None:
            self._context.first.buffers.flat.copy_(kept)
        self._context.exchange.memory.publish_parameters()
        self._context.guard.note()

    def _end(self) -> None:
        """Restore what `_prepare` has copied, if anything."""
        self._engine.agreement.averaged = False
        if self._put_aside is None:
            return
        try:
            # First absorb buffers that the block replaced, or the replacements would remain.
            self._context.first.buffers.absorb()
        finally:
            for place, copy in self._put_aside:
                place.copy_(copy)
            self._context.first.buffers.carried.is_paused = False
            self._context.first.buffers.note_loaded()
            self._context.copy_first()
            self._context.guard.note()
            self._put_aside = self._kept = None
            del self._kept_buffers
