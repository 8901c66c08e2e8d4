"""Keeps averages of an engine's model, and shows them in it: `Trainer.average` and `averaged`.

Note: how averages are shown
----------------------------
Each process first copies what it must put back: all trained parameters and buffers. Where all
processes of a host compute with the same memory, all but the lead copy no more than their own
segments. Then the devices meet. The owner of each segment writes its average, rounded to the
model's dtype, where models see the segment, and it is handed on as after an update. Masters stay as
they are.

At the end the devices meet again, and everybody puts back its copies. That needs no word from
anybody else, so it is also done when the block is left by an exception, which the others may not
have seen.
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
from onefold.system.process import ctrl_c_later
from onefold.update.averages import AverageRule, Averages
from onefold.update.staging import SegmentState

__all__ = ["Averaging"]


class Averaging:
    """Keeps the averages of the model, and shows them in its place.

    Args:
        engine: the devices of this process.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.asked: AverageRule | None = None
        """The average that the script has asked for; None if it has not."""
        self._loaded = False
        self.expected: AverageRule | None = None
        """That of a checkpoint whose values are not taken yet."""
        self._kept: FlatTensors | None = None
        """The training values of all parameters, while averages are shown."""
        self._put_aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What was overwritten to show the averages: the place, and a copy of what was there."""

    @property
    def _context(self) -> StepContext:
        return self._engine.context

    @property
    def _averages(self) -> Averages:
        return self._context.update.averages

    def check_begin(self, rule: AverageRule) -> None:
        """Refuse an average that cannot be begun.

        Raises:
            ValueError: an average is kept already, which the script has asked for before, or which
                a checkpoint has brought and which is another one.
            RuntimeError: the script is inside a block that shows the average.
        """
        self._engine.agreement.refuse_inside(Call.AVERAGE)
        ours = self._averages.rule or self.expected
        if ours is None:
            return
        if not self._loaded and self.expected is None:
            raise ValueError(
                f"trainer.average({rule.words}) was called while the average of {ours.words} is "
                f"kept: a trainer keeps one average, so call it once"
            )
        if ours != rule:
            raise ValueError(
                f"the checkpoint that was loaded holds an average of {ours.words}, which goes on; "
                f"trainer.average({rule.words}) was called: expected the same. To begin another "
                f'one, load with allow_changed=["average"]'
            )

    def start_average(self, rule: AverageRule, step: int) -> None:
        """Begin an average, or go on with that of a checkpoint; called on all devices.

        Args:
            rule: how it follows the model; `check_begin` has let it pass.
            step: the number of the next step.
        """
        self._engine.agreement.start_call(
            CallDigest(Call.AVERAGE, step, arguments=digest(rule.words))
        )
        self.asked, self._loaded = rule, False
        if self._averages.rule is None:
            self._start_average(rule)

    @contextmanager
    def block(self, step: int, *, recomputes: bool = False) -> Iterator[None]:
        """Have every device's model hold the averages inside this context.

        Args:
            step: the number of the next step.
            recomputes: whether statistics of batch norms are recomputed first.

        Raises:
            ValueError: no average is kept.
            DisagreementError: another device is somewhere else.
            RuntimeError: the script is inside such a block already.
        """
        if self._averages.rule is None:
            raise ValueError(
                "trainer.averaged() was called and no average is kept: call "
                "trainer.average(decay=0.999) or trainer.average(mean=True) before the steps"
            )
        agreement = self._engine.agreement
        agreement.refuse_inside(Call.AVERAGED)
        with self._engine.gathered(step):
            self._context.first.check_places()
            self._prepare()
            try:
                agreement.start_call(CallDigest(Call.AVERAGED, step, arguments=int(recomputes)))
                agreement.averaged = True
                with ctrl_c_later():
                    self._show()
                yield
                agreement.start_call(CallDigest(Call.AVERAGED_END, step))
            finally:
                with ctrl_c_later():
                    self._put_back()
                    agreement.averaged = False
            if self._context.exchange.memory.is_common:
                # Nobody goes on before every owner has put back its segments.
                self._context.exchange.memory.publish_parameters()
                self._context.guard.note()

    @contextmanager
    def training_values(self) -> Iterator[FlatTensors]:
        """On the lead, have the module show its training values, also while averages are shown.

        Yields:
            The trained parameters that the module shows then.
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
        """Describe the average in a checkpoint; None if none is kept."""
        rule = self._averages.rule
        return None if rule is None else rule.to_json(self._averages.steps)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Copies of the averages of all buffers on the host, by name; none if none are kept."""
        kept = self._averages.buffers
        if kept is None:
            return {}
        named = zip(self._context.first.buffers.places.names, kept.views, strict=True)
        return {name: view.to("cpu", copy=True) for name, view in named}

    def loaded(self, rule: AverageRule | None, steps: int, buffers: Iterable[SegmentState]) -> None:
        """Go on as a checkpoint says, once the model and the states of segments are loaded.

        Args:
            rule: of the average that it holds; None if that is none, or none that is wanted. Then
                the one that the script has asked for begins with the values as they are now.
            steps: how many steps it had followed.
            buffers: the averages of buffers, by number.
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
        """Bring what a script may have changed since the last step to where it counts."""
        self._context.first.buffers.absorb()
        self._context.follow_first()
        self._engine.follow_parameters()

    def _prepare(self) -> None:
        """Copy what is about to be overwritten; before the devices meet, after which others may."""
        self._bring_changes()
        first, common = self._context.first, self._context.exchange.memory.is_common
        first.buffers.note_changes()
        first.buffers.carried.is_paused = True
        self._kept_buffers = first.buffers.flat.clone()
        aside = list(zip(first.buffers.flat.sections, self._kept_buffers.sections, strict=True))
        if common and first.number != 0:
            aside += [(place, place.clone()) for place in self._shown_segments()]
        else:
            # The lead's are all of them, as it also saves them.
            self._kept = first.trained.clone()
            aside += zip(first.trained.sections, self._kept.sections, strict=True)
        self._put_aside = aside

    def _shown_segments(self) -> list[torch.Tensor]:
        """Where models see the segments of this process."""
        return [
            (item.values if item.shown is None else item.shown).detach()
            for item in self._context.update.owned
        ]

    def _show(self) -> None:
        """Write the averages where models see the values, on all devices."""
        averages = [self._averages.segments[item.number] for item in self._context.update.owned]
        if averages:
            copy_each(self._shown_segments(), averages)
        kept = self._averages.buffers
        if kept is not None:
            self._context.first.buffers.flat.copy_(kept)
        self._context.exchange.memory.publish_parameters()
        self._context.guard.note()

    def _put_back(self) -> None:
        try:
            # What the block has put in the place of buffers goes first, or it would stay there.
            self._context.first.buffers.absorb()
        finally:
            for place, copy in self._put_aside:
                place.copy_(copy)
            self._put_aside, self._kept = [], None
            del self._kept_buffers
            self._context.first.buffers.carried.is_paused = False
            self._context.first.buffers.note_loaded()
            self._context.copy_first()
            self._context.guard.note()
