"""Records the model after each step, so that runs can be compared bit for bit."""

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
    """Writes the digests of each step, and how far the model is from that of the recorded run.

    Args:
        folder: folder of the comparison, shared by all of its runs.
        records: keep the tensors for the runs that follow, rather than compare with kept ones.
        run: name of this run; its lines go to ``RUN-TRAINER.jsonl``.
        trainer: number of the trainer among those of the script.
    """

    def __init__(self, folder: Path, *, records: bool, run: str, trainer: int = 0) -> None:
        self._folder = folder
        self._records = records
        self._trainer = trainer
        self._lines = folder / f"{run}-{trainer}.jsonl"
        self._differs = False

    def observe(self, step: int, module: torch.nn.Module, loss: float | None) -> None:
        """Write one line for a step; step 0 is the model before the first step."""
        tensors = {name: tensor.detach() for name, tensor in named_tensors(module).items()}
        digests = tensor_digests(tensors)
        line: dict[str, Any] = {"step": step, "loss": loss, "digests": digests}
        line["fingerprint"] = fingerprint_of(digests)
        line["parameters"] = [own_name(name) for name, _ in module.named_parameters()]
        kept = self._folder / f"trainer-{self._trainer}-step-{step}.safetensors"
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
