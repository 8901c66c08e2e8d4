"""Watches the steps of a run: `Profile` writes the timeline, `Probing` what a comparison needs."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from onefold.core.assignment import Devices
from onefold.core.flat import fingerprint_of, named_tensors, own_name, same_bits, tensor_digests
from onefold.core.options import RunOptions
from onefold.step.engine import Engine
from onefold.step.hook import Asked, Hook, Spans
from onefold.step.result import Step
from onefold.system.jsonlines import append_line
from onefold.watch.timeline import TimelinePart, name_row, slice_of
from onefold.watch.timing import Moment, Span, Stopwatch, elapsed_s, host_now_s, is_past

__all__ = ["Probing", "Profile", "timeline_of"]

_log = logging.getLogger("onefold")


PROFILED_STEPS = 1000
"""How many steps, the first of the run, a timeline holds; viewers cannot open many more."""


class Profile(Hook):
    """Writes the spans of each step to this process's part of the timeline.

    On a GPU a step is written when the next one is done: by then its times are known, in most cases
    without waiting. The last step is written at the end of the program.

    Args:
        folder: folder of the timeline's parts.
        devices: those of the run, and of this process.
        watches: the stopwatches of this process's devices, by number.
    """

    def __init__(self, folder: Path, devices: Devices, watches: Mapping[int, Stopwatch]) -> None:
        self._group = devices.trainer
        self._part = TimelinePart(folder, f"{devices.trainer}-{devices.own[0]}")
        self._origins = {number: _origin(watch) for number, watch in watches.items()}
        # The last step and its spans, while the GPU may still be at work on them.
        self._held: tuple[int, Mapping[int, Sequence[Span]]] = 0, {}
        self._ends = dict.fromkeys(watches, 0.0)
        for number in watches:
            name = f"device {number} ({devices.all[number]})"
            self._part.append(name_row(group=self._group, row=number, name=name))
        atexit.register(self._write_rest)

    def after_step(self, asked: Asked, step: Step, spans: Spans) -> None:
        """Add a step that was computed."""
        if asked.computed:
            self.add_step(step.number, spans)

    def add_step(self, step: int, spans: Mapping[int, Sequence[Span]]) -> None:
        """Add what each device of this process did in a step."""
        # The last step of a GPU is mostly past by now; if it is not, this waits for it, so that no
        # more than one step of events is ever held.
        self._write()
        if step <= PROFILED_STEPS:
            self._held = step, spans
            # On a CPU always: its moments are numbers.
            if _is_over(spans):
                self._write()

    def _write_rest(self) -> None:
        """Write the last step, without waiting: if the run failed, the device may never finish."""
        try:
            if _is_over(self._held[1]):
                self._write()
        # At exit nobody could catch it: a CUDA error of the run is raised again by every query.
        except RuntimeError as error:
            _log.info("the last step is missing in the timeline: %s", error)

    def _write(self) -> None:
        """Write the step that is held, if there is one."""
        (step, held), self._held = self._held, (0, {})
        for device, spans in held.items():
            known = [(span.label, span.phase, *self._bounds(device, span)) for span in spans]
            first, last = min(each[2] for each in known), max(each[3] for each in known)
            rows = [(f"step {step}", "step", first, last), *known]
            self._part.append(
                [slice_of(*row, group=self._group, row=device, step=step) for row in rows]
            )
            self._ends[device] = last

    def _bounds(self, device: int, span: Span) -> tuple[float, float]:
        """When a span starts and stops, in seconds on the host's clock.

        The slices of a row must not overlap. The clocks of host and GPU drift apart by
        microseconds, enough to make two steps overlap: so neither is before the last step's end.
        """
        start, stop = (self._host_s(device, moment) for moment in (span.start, span.stop))
        return max(start, self._ends[device]), max(stop, self._ends[device])

    def _host_s(self, device: int, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        # A GPU only measures between two of its events, so each is placed by one whose time on the
        # host's clock is known.
        host_s, event = self._origins[device]
        return host_s + elapsed_s(event, moment)


def _is_over(spans: Mapping[int, Sequence[Span]]) -> bool:
    """Whether all spans are done, so that their times are known without waiting."""
    return all(is_past(span.stop) for ones in spans.values() for span in ones)


def _origin(watch: Stopwatch) -> tuple[float, Moment]:
    """The same moment on the host's clock and on the device's; waits for the device."""
    moment = watch.now()
    # Asking for the time elapsed waits until the event is reached: only then is it now.
    elapsed_s(moment, moment)
    return host_now_s(), moment


def timeline_of(devices: Devices, watches: Mapping[int, Stopwatch]) -> Profile | None:
    """Make the timeline of a Trainer in the run's folder, if that is there."""
    parts = devices.context.timeline_parts
    try:
        return Profile(Path(parts), devices, watches)
    except FileNotFoundError:  # a cleaner of temporary files was here: no reason to end the run
        _log.warning("%s was removed meanwhile: this trainer is missing in the timeline", parts)
        return None


class Probing(Hook):
    """Has the lead compare each step, with all parameters of the model.

    Args:
        engine: the devices of this process.
        devices: who takes part; all of them make this hook.
    """

    def __init__(self, engine: Engine, devices: Devices) -> None:
        self._engine, options = engine, devices.context.options
        self._probe = Probe(options, devices.trainer) if devices.has_lead else None
        self._steps, self._done = options.probe_steps, 0
        self._observe(None)

    def after_step(self, asked: Asked, step: Step, spans: Spans) -> None:
        """Compare a step."""
        if asked.computed:
            self._done += 1  # not step.number, which starts elsewhere after a checkpoint
            if self._done <= self._steps:
                self._observe(float(step.loss))

    def _observe(self, loss: float | None) -> None:
        with self._engine.placement.gathered():
            if self._probe is not None:
                self._probe.observe(self._done, self._engine.context.module, loss)


class Probe:
    """Writes the digests of each step, and how far the model is from that of the recorded run.

    Args:
        options: name the folder of the comparison, which all of its runs share, and this run; and
            whether its tensors are kept for the runs that follow, or compared with kept ones.
        trainer: number of the trainer among those of the script.
    """

    def __init__(self, options: RunOptions, trainer: int = 0) -> None:
        self._records = options.probe_records
        folder = Path(options.probe)
        self._lines = folder / f"{options.probe_run}-{trainer}.jsonl"
        self._kept = str(folder / f"trainer-{trainer}-step-")
        self._differs = False

    def observe(self, step: int, module: torch.nn.Module, loss: float | None) -> None:
        """Write one line for a step; step 0 is the model before the first step."""
        tensors = {name: tensor.detach() for name, tensor in named_tensors(module).items()}
        digests = tensor_digests(tensors)
        line: dict[str, Any] = {"step": step, "loss": loss, "digests": digests}
        line["fingerprint"] = fingerprint_of(digests)
        line["parameters"] = [own_name(name) for name, _ in module.named_parameters()]
        kept = Path(f"{self._kept}{step}.safetensors")
        if self._records:
            # Cloned: safetensors refuses tensors that share storage, and writes dense ones only.
            save_file({n: t.cpu().contiguous().clone() for n, t in tensors.items()}, kept)
        # Only the first difference is of interest: from there on everything differs.
        elif not self._differs and kept.exists():
            line["differences"] = _differences(load_file(kept), tensors)
            self._differs = bool(line["differences"])
        append_line(self._lines, line)


def _differences(
    kept: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]
) -> dict[str, float | None]:
    """The largest difference of each tensor whose bits differ; None if its shape differs."""
    found: dict[str, float | None] = {}
    for name, value in now.items():
        # Other shapes have no largest difference; the line says so by null.
        if name not in kept or kept[name].shape != value.shape:
            found[name] = None
            continue
        theirs = kept[name]
        if not same_bits(value.cpu(), theirs):
            # Subtracted in double precision: in their own dtype the difference could round to 0, or
            # overflow.
            wide = torch.complex128 if value.is_complex() else torch.float64
            found[name] = float((value.cpu().to(wide) - theirs.to(wide)).abs().max())
    return found
