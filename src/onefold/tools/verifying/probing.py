"""Writes digests of the model after each step, for a comparison by ``onefold verify``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from onefold.core.flat import fingerprint_of, named_tensors, own_name, same_bits, tensor_digests
from onefold.core.options import LaunchContext
from onefold.session.run import RunSetup, RunView
from onefold.step.hook import Hook, ScriptCall, Spans
from onefold.step.result import Step
from onefold.system.safe_files import append_line

__all__ = ["Probe", "ProbeHook", "VerifyOptions", "options_of", "prepare"]


def prepare(start: RunSetup) -> Callable[[RunView], Hook | None]:
    """Compare the steps of a Trainer, unless its mathematics is compared."""
    options = options_of(start.context)
    return lambda run: None if options.mathematics else ProbeHook(run, options)


class ProbeHook(Hook):
    """Has the lead compare each step, with all parameters of the model.

    Args:
        run: the run.
        options: the options of the comparison.
    """

    def __init__(self, run: RunView, options: VerifyOptions) -> None:
        self._engine, self._devices = run.engine, run.devices
        self._probe = Probe(options, run.devices.trainer)
        self._steps, self._done = options.steps, 0
        self._observe(None)

    def after_step(self, asked: ScriptCall, step: Step, spans: Spans) -> None:
        """Compare a step."""
        if asked.computed:
            self._done += 1  # not step.number, which starts elsewhere after a checkpoint
            if self._done <= self._steps:
                self._observe(float(step.loss))

    def _observe(self, loss: float | None) -> None:
        with self._engine.placement.gathered():
            if self._devices.has_lead:
                self._probe.observe(self._done, self._engine.context.module, loss)


class Probe:
    """Writes the digests of each step, and how far the model is from that of the recorded run.

    Args:
        options: name the folder of the comparison, which all of its runs share, and this run; and
            whether its tensors are kept for the runs that follow, or compared with kept ones.
        trainer: number of the trainer among those of the script.
    """

    def __init__(self, options: VerifyOptions, trainer: int = 0) -> None:
        self._records = options.records
        folder = Path(options.folder)
        self._lines = folder / f"{options.run}-{trainer}.jsonl"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What `RunOptions.tools` has under ``verify``."""

    folder: str = ""
    """Folder of the comparison; empty if this run is not compared."""
    run: str = ""
    """Name of this run in that folder."""
    steps: int = 0
    """How many steps are compared."""
    trainers: int = 0
    """Number of Trainers after whose compared steps the script ends; 0 for all."""
    records: bool = False
    """Whether this run keeps its tensors for the others, instead of comparing them."""
    mathematics: str = ""
    """The dtype in which V shards are compared with one, ``float64`` or ``float32``."""


def options_of(context: LaunchContext) -> VerifyOptions:
    """Return the options of the comparison that a process takes part in."""
    return VerifyOptions(**context.options.tools.get("verify", {}))
