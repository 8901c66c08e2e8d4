"""Writes a model so that a folder holds all of it or is not there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

__all__ = ["write_checkpoint"]


def write_checkpoint(directory: Path, module: torch.nn.Module, run: Mapping[str, object]) -> None:
    """Write ``model.safetensors`` and ``run.json`` to a folder, in place of what it held.

    The files are written aside, synced and renamed, the folder last.

    Args:
        directory: the folder; it may hold an earlier checkpoint, and nothing else.
        module: its ``state_dict`` is written under the user's own names, tied weights once each.
        run: JSON about the run.

    Raises:
        FileExistsError: the folder holds files that are not a checkpoint's.
    """
    _check_ours(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    _sweep(directory)
    aside = _beside(directory, "part")
    aside.mkdir()
    try:
        _save_tensors(_plain(module), aside / "model.safetensors")
        (aside / "run.json").write_text(json.dumps(dict(run), indent=2) + "\n")
        for path in (*aside.iterdir(), aside):
            _sync(path)
        _replace(aside, directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _sync(directory.parent)


def _beside(directory: Path, what: str) -> Path:
    return directory.with_name(f".{directory.name}.{os.getpid()}.{what}")


def _sweep(directory: Path) -> None:
    """Tidy up what a process of the same number, killed at this, has left beside the folder."""
    if _beside(directory, "old").exists() and not directory.exists():
        os.rename(_beside(directory, "old"), directory)  # it was killed between the two renames
    for what in ("part", "old"):
        if _beside(directory, what).exists():
            shutil.rmtree(_beside(directory, what))


def _save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(f"{path.parent} could not be written: {error}") from error


def _plain(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that own their memory: the format has no room for two names of one."""
    return {
        name: value.detach().cpu().contiguous().clone()
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def _check_ours(directory: Path) -> None:
    if directory.exists():
        strange = {path.name for path in directory.iterdir()} - {"model.safetensors", "run.json"}
        if strange:
            raise FileExistsError(
                f"{directory} holds {', '.join(sorted(strange))}, which is no part of a "
                f"checkpoint: expected a folder of its own. Save elsewhere, or move these away"
            )


def _replace(aside: Path, directory: Path) -> None:
    if directory.exists():
        old = _beside(directory, "old")
        os.rename(directory, old)
        os.rename(aside, directory)
        shutil.rmtree(old)
    else:
        os.rename(aside, directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
