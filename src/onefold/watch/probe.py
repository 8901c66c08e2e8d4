"""What is written down at the end of steps: a trace for people, a record for comparing runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from onefold.core.fingerprint import fingerprint_of, named_tensors, tensor_digests
from onefold.core.flat import same_bits
from onefold.core.names import own_name
from onefold.system.record import append_line

__all__ = ["Probe"]


class Probe:
    """Writes each step's digests, and how far it is from the recorded run.

    Args:
        folder: of the comparison, common to all runs.
        records: keep the tensors for the runs that follow, rather than compare with those kept.
        run: name of this run; its lines go to ``RUN-TRAINER.jsonl``.
        trainer: number of the trainer, among those of the script.
    """

    def __init__(self, folder: Path, *, records: bool, run: str, trainer: int = 0) -> None:
        self._folder = folder
        self._records = records
        self._trainer = trainer
        self._lines = folder / f"{run}-{trainer}.jsonl"
        self._differs = False

    def observe(self, step: int, module: torch.nn.Module, loss: float | None) -> None:
        """Write one line; step 0 is the model before the first step."""
        tensors = {name: tensor.detach() for name, tensor in named_tensors(module).items()}
        digests = tensor_digests(tensors)
        line: dict[str, Any] = {"step": step, "loss": loss, "digests": digests}
        line["fingerprint"] = fingerprint_of(digests)
        line["parameters"] = [own_name(name) for name, _ in module.named_parameters()]
        kept = self._folder / f"trainer-{self._trainer}-step-{step}.safetensors"
        if self._records:
            save_file({n: t.cpu().contiguous().clone() for n, t in tensors.items()}, kept)
        elif not self._differs and kept.exists():
            line["differences"] = _differences(load_file(kept), tensors)
            self._differs = bool(line["differences"])
        append_line(self._lines, line)


def _differences(
    kept: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]
) -> dict[str, float | None]:
    """For every tensor that differs in its bits, the largest difference; None for another shape."""
    found: dict[str, float | None] = {}
    for name, value in now.items():
        if name not in kept or kept[name].shape != value.shape:
            found[name] = None
            continue
        theirs = kept[name]
        if not same_bits(value.cpu(), theirs):
            wide = torch.complex128 if value.is_complex() else torch.float64
            found[name] = float((value.cpu().to(wide) - theirs.to(wide)).abs().max())
    return found
