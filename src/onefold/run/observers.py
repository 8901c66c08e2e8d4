"""Makes what watches the steps of a run: the trace, the timeline, the comparison of runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from onefold.core.fingerprint import fingerprint_of, named_tensors, tensor_digests
from onefold.core.randomness import forked_generators
from onefold.core.team import Team
from onefold.engine.step import Step
from onefold.system.record import append_line, keep_steps
from onefold.watch.probe import Probe
from onefold.watch.profile import Profile
from onefold.watch.timing import Span, Stopwatch

__all__ = ["Observers"]

_log = logging.getLogger("onefold")

Observer = Callable[[Step, Mapping[int, Sequence[Span]]], None]
"""Called with every finished step, and with what each device of this process did in it."""


class Observers:
    """All that is called with every finished step of a run, in order.

    Args:
        team: who takes part.
        model: the model of this process.
        watches: the stopwatches of this process's devices, by number.
        steps: how many steps are done so far.
    """

    def __init__(
        self,
        team: Team,
        model: torch.nn.Module,
        watches: Mapping[int, Stopwatch],
        steps: int,
    ) -> None:
        self._team = team
        self._of_script: list[Callable[[Step], object]] = []
        self.of_launcher = _launchers(team, model, watches, steps)
        """Those that `onefold run` and `onefold verify` asked for."""

    def add(self, observe: Callable[[Step], object]) -> None:
        """Call a function of the script with every step as well; see `Trainer.on_step`.

        Raises:
            TypeError: it is no function.
        """
        if not callable(observe):
            raise TypeError(
                f"on_step expects a function that takes a step, got {type(observe).__name__}"
            )
        if self._team.has_lead:
            self._of_script.append(observe)

    def observe(self, step: Step, spans: Mapping[int, Sequence[Span]]) -> None:
        """Call all of them with a step, and with what each device of this process did in it."""
        if self._of_script:
            with forked_generators(*self._team.own_devices.values()):
                for tell in self._of_script:
                    tell(step)
        for observe in self.of_launcher:
            observe(step, spans)


def _launchers(
    team: Team, model: torch.nn.Module, watches: Mapping[int, Stopwatch], steps: int
) -> list[Observer]:
    """Make the observers that the launcher asked for, in the order in which they are called.

    The trace follows the first trainer of a script, on the lead; a comparison follows every one.

    Args:
        team: who takes part.
        model: the model of this process.
        watches: the stopwatches of this process's devices, by number.
        steps: how many steps are done so far.
    """
    world = team.world
    found: list[Observer] = []
    if world.timeline_parts:
        found += _profilers(Path(world.timeline_parts), team, watches)
    if team.trainer == 0 and team.has_lead and world.options.trace:
        found.append(_tracer(Path(world.options.trace), model, steps))
    if world.options.probe and team.has_lead and not world.options.probe_mathematics:
        probe = Probe(
            Path(world.options.probe),
            records=world.options.probe_records,
            run=world.options.probe_run,
            trainer=team.trainer,
        )
        found.append(_prober(probe, model, world.options.probe_steps))
    return found


def _profilers(folder: Path, team: Team, watches: Mapping[int, Stopwatch]) -> list[Observer]:
    try:
        profile = Profile(folder, team, watches)
    except FileNotFoundError:  # a cleaner of temporary files was here: no reason to end the run
        _log.warning("%s was removed meanwhile: this trainer is missing in the timeline", folder)
        return []
    return [lambda step, spans: profile.add_step(step.number, spans)]


def _tracer(path: Path, model: torch.nn.Module, steps: int) -> Observer:
    done = steps
    keep_steps(path, done)

    def trace(step: Step, spans: Mapping[int, Sequence[Span]]) -> None:
        nonlocal done
        # The run was resumed from a checkpoint: later lines are of steps that come once more.
        if step.number != done + 1:
            keep_steps(path, step.number - 1)
        done = step.number
        line: dict[str, object] = {"step": step.number, "epoch": step.epoch}
        line |= {"loss": float(step.loss), "samples": step.samples}
        if step.name:
            line["name"] = step.name
        values = {name: float(value) for name, value in step.values.items()}
        if values:
            line["values"] = values
        line["fingerprint"] = fingerprint_of(tensor_digests(named_tensors(model)))
        append_line(path, line)

    return trace


def _prober(probe: Probe, model: torch.nn.Module, steps: int) -> Observer:
    probe.observe(0, model, None)
    done = 0

    def observe(step: Step, spans: Mapping[int, Sequence[Span]]) -> None:
        nonlocal done
        done += 1  # not step.number, which starts elsewhere if the script loads a checkpoint
        if done <= steps:
            probe.observe(done, model, float(step.loss))

    return observe
