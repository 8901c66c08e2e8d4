"""The half of `Trainer` that has to do with the model as a whole: to change, save and load it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import overload

import torch

from onefold.checkpoint.keeping import Checkpoint, Keeping
from onefold.core.fingerprint import fingerprint_of, named_tensors, tensor_digests
from onefold.core.head import Call, StepHead
from onefold.core.jsonvalue import to_json
from onefold.errors import CheckpointError
from onefold.run.session import Session

__all__ = ["TrainedModel"]


class TrainedModel:
    """The model that a `Trainer` trains; its methods are the Trainer's."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def model(self) -> torch.nn.Module:
        """The user's own module with the current parameters."""
        return self._session.engine.replicas[0].module

    @property
    def steps(self) -> int:
        """Steps done, those before a checkpoint included."""
        return self._session.position.step

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A block in which the model may be changed between steps; called on every device.

        When it ends, the lead's parameters, buffers and optimizer settings are everybody's; what
        other devices wrote is dropped, so the lines may run on all of them or on the lead alone.
        With several devices, other changes are refused at the next call.

        Raises:
            DisagreementError: another device is somewhere else.
            RuntimeError: the trainer is called inside the block.

        >>> with trainer.changing():
        ...     _ = model.weight.data.clamp_(-0.1, 0.1)
        """
        session = self._session
        with session.telling_others(), session.engine.changing(self.steps + 1):
            yield

    def barrier(self) -> None:
        """Wait until every device is here; raises PeerError or DisagreementError if one is not."""
        with self._session.telling_others():
            self._session.engine.agree(StepHead(Call.BARRIER, self.steps + 1))

    def fingerprint(self) -> str:
        """16 hexadecimal digits over parameters and buffers: the same for the same bits."""
        return fingerprint_of(tensor_digests(named_tensors(self.model)))

    def save(
        self,
        directory: str | Path,
        *,
        scores: Mapping[str, float] | None = None,
        keep: int | None = 3,
        best: str | None = None,
        wait: bool = True,
        extra: object = None,
    ) -> Path:
        """Write the run as it is now to ``directory/step-00001234/``, and return that folder.

        ``model.safetensors`` there holds parameters and buffers under the user's own names. The
        folder is there whole or not at all. Called on every device; the lead writes.

        Args:
            directory: holds the checkpoints of a run; made if it is not there.
            scores: numbers to remember with this checkpoint, such as what `evaluate` returned.
            keep: how many of the newest of this run stay there; with None this one stays for good.
                What anybody else put there is left alone.
            best: ``"highest NAME"`` or ``"lowest NAME"`` of ``scores``: from here on, of those of
                this run, the checkpoint with that score stays too.
            wait: return when all is on the disk; else a failure is raised by the next call.
            extra: None, numbers, text, or lists, tuples and dicts of these; `load` gives it back.

        Raises:
            OSError: it could not be written; what was there before is still there.
            StateError: a parameter is not finite, or a step broke off in its update.
            TypeError, ValueError: an argument is not usable, or no file can hold the state.

        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> trainer.save(directory, extra={"note": "first try"}).name
        'step-00000000'
        >>> trainer.load(directory).extra
        {'note': 'first try'}
        """
        keeping = Keeping.checked(keep, best, scores or {})
        copied = to_json(extra, "extra")
        session = self._session
        with session.telling_others():
            place = session.verifying.writes_to(directory)
            return session.checkpoints.save(place, keeping=keeping, wait=wait, extra=copied)

    @overload
    def load(self, directory: str | Path, *, changed: Collection[str] = ...) -> Checkpoint: ...

    @overload
    def load(
        self, directory: str | Path, *, changed: Collection[str] = ..., if_any: bool
    ) -> Checkpoint | None: ...

    def load(
        self, directory: str | Path, *, changed: Collection[str] = (), if_any: bool = False
    ) -> Checkpoint | None:
        """Go on from the newest checkpoint of a directory, on any number of devices.

        Model, optimizer and schedule are then as they were, and `epochs` and loaders go on at the
        sample where the run was saved. A checkpoint that is damaged is left out with a warning.
        Called on every device; the lead reads.

        Args:
            directory: what was given to `save`, or the folder of one checkpoint.
            changed: what may differ from the run that was saved, each giving up a part of the
                promise: ``"seed"``, ``"shards"``, ``"batch_size"``, ``"dataset"``,
                ``"clip_norm"``, ``"precision"``, ``"compile"``, ``"optimizer"``, ``"schedule"``.
            if_any: where there is no checkpoint yet, do nothing, and return None.

        Raises:
            CheckpointError: there is no checkpoint, none is whole, or it does not fit this run.
                Raised alike on all devices; nothing has changed, so the script may start afresh.
        """
        names = (changed,) if isinstance(changed, str) else tuple(changed)
        session = self._session
        try:
            with session.telling_others(but=CheckpointError):
                place = session.verifying.reads_from(directory, if_any=if_any)
                return session.checkpoints.load(place, changed=names, if_any=if_any)
        finally:
            session.note_progress()

    def close(self) -> None:
        """Leave the run; the model keeps its values. Also done at the end of the program.

        With ``onefold run --checkpoint``, while an exception is handled on one of several devices,
        that happens only at its end. Raises OSError if a checkpoint could not be written.
        """
        self._session.close()
