"""Reads what a run keeps in its checkpoints besides the model: how far it is, and its best epoch.

A checkpoint that is sound by its digests may still be another script's, put in the run's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

from onefold.errors import CheckpointError
from onefold.jobs.runfolder import CHECKPOINTS

__all__ = ["read_saved"]

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Best(TypedDict):
    epoch: _Count
    score: str
    value: float
    # Nothing but a checkpoint of the run: it is loaded for the examples.
    checkpoint: Annotated[str, msgspec.Meta(pattern=rf"\A{CHECKPOINTS}/step-[0-9]{{8,}}\Z")]


class _Saved(TypedDict):
    part: dict[str, float]
    epochs_done: _Count
    best: _Best | None


def read_saved(
    extra: object, checkpoints: Path
) -> tuple[dict[str, float], int, dict[str, Any] | None]:
    """Read the ``extra`` of a run's checkpoint.

    Args:
        extra: what ``Trainer.load`` returned of it.
        checkpoints: the folder of the run's checkpoints, for the error.

    Returns:
        The numbers of the epoch that was begun, the number of whole epochs, and the best of them.

    Raises:
        CheckpointError: it was not saved by ``onefold train``.
    """
    try:
        saved = msgspec.convert(extra, _Saved)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise CheckpointError(
            f"{checkpoints}: expected checkpoints of onefold train, the newest was saved by "
            f"something else ({error}): remove it, or begin a new run with another --name"
        ) from error
    best = saved["best"]
    return saved["part"], saved["epochs_done"], None if best is None else {**best}
