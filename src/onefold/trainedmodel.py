"""The half of `Trainer` that has to do with the model as a whole: to change, save and load it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch

from onefold.checkpoint.folder import Checkpoint, Keeping
from onefold.core.averaging import AverageRule
from onefold.core.flat import fingerprint_of
from onefold.core.head import Call, StepHead
from onefold.core.jsonvalue import to_json
from onefold.core.randomness import forked_generators
from onefold.engine.between import broadcast, gather, written
from onefold.engine.digests import model_digests
from onefold.errors import CheckpointError
from onefold.exchange.memory import Memory
from onefold.reading.reader import Collate, SizedDataset
from onefold.run.session import Session

__all__ = ["TrainedModel"]


class TrainedModel:
    """The model that a `Trainer` trains; its methods are the Trainer's."""

    def __init__(self, session: Session) -> None:
        self._session = session
        # The model outlives a Trainer that the script drops. By a weak reference, as an observer of
        # the session may refer to this Trainer; the memory refers to nothing of the script's.
        memory = session.engine.exchange.memory
        weakref.finalize(self, _dropped, weakref.ref(session), memory).atexit = False

    @property
    def model(self) -> torch.nn.Module:
        """The user's own module with the current parameters."""
        return self._session.engine.replicas[0].module

    @property
    def steps(self) -> int:
        """Steps done, those before a checkpoint included."""
        return self._session.position.step

    @contextmanager
    def changing(self, *, optimizer_state: bool | None = None) -> Iterator[None]:
        """A block in which the model may be changed between steps; called on every device.

        When it ends, the lead's parameters, buffers and optimizer settings are everybody's; what
        other devices wrote is dropped, so the lines may run on all of them or on the lead alone.
        With several devices, other changes are refused at the next call.

        Args:
            optimizer_state: whether ``optimizer.state`` of whole parameters is there, to read and
                to change; it is brought to every device, and the lead's goes back to those that
                update it. None has it there for optimizers with methods of their own, such as
                ``train()`` and ``eval()``. Elsewhere it is refused where it is divided.

        Raises:
            DisagreementError: another device is somewhere else.
            RuntimeError: the trainer is called inside the block, other than by `gradient`.

        >>> with trainer.changing():
        ...     _ = model.weight.data.clamp_(-0.1, 0.1)
        """
        with self._session.changing(optimizer_state=optimizer_state):
            yield

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A block in which every device has all parameters; called on every device.

        They always do, unless the run was started with ``--keep span`` and its devices do not share
        memory (GPUs, several hosts): then each keeps its span, and what is brought for a step goes
        again with it. Outside of this block the parameters of such a model are NaN, and
        ``state_dict()`` is refused. The model may be read in the block; what is written to it is
        lost, and belongs into `changing`.

        Raises:
            DisagreementError: another device is somewhere else.

        >>> with trainer.whole():
        ...     largest = max(float(p.detach().abs().max()) for p in model.parameters())
        """
        session = self._session
        with session.telling_others(), session.engine.whole(self.steps + 1):
            yield

    def average(
        self,
        *,
        decay: float | None = None,
        mean: bool = False,
        every: int = 1,
        after: str | None = None,
    ) -> None:
        """Keep an average of the model from here on, beside the values that are trained.

        It begins with the values as they are now. Steps that are skipped do not move it. It is in
        every checkpoint, and goes on with it; the line may then stand before `load` or after it, or
        be left out. Called on every device, before the first step or later.

        Args:
            decay: of an exponential average, how much of it stays in each update: at least 0, and
                less than 1. In update k it is ``(1 + k) / (10 + k)`` where that is less.
            mean: average all values alike, as stochastic weight averaging does. The values at the
                beginning do not count.
            every: update after each so many steps.
            after: the name of a loss, where there are several: count and follow its steps alone.

        Raises:
            TypeError, ValueError: both kinds are chosen or none, a number is out of range, there is
                no such loss, or another average is kept.

        >>> trainer.average(decay=0.999)
        >>> with trainer.averaged():
        ...     said = trainer.predict(lambda m, x: {"y": m(x)}, torch.ones(5, 2), batch_size=4)
        >>> said["y"].shape
        torch.Size([5, 1])
        """
        session = self._session
        loss = "" if after is None else session.parts.loss_name(after)
        rule = AverageRule.chosen(decay=decay, mean=mean, every=every, after=loss)
        session.engine.averaging.check_begin(rule)
        with session.telling_others():
            session.engine.averaging.begin(rule, self.steps + 1)

    @contextmanager
    def averaged(
        self,
        *,
        update_bn: SizedDataset | None = None,
        batch_size: int | None = None,
        workers: int = 0,
        collate: Collate | None = None,
    ) -> Iterator[None]:
        """A block in which the model holds its averages; called on every device.

        Evaluate, predict, save and read the model there. Afterwards, also after an exception, the
        values that are trained are back, to the bit. A checkpoint that is saved there has the
        averages in ``model.safetensors``, and `load` goes on with the values that are trained all
        the same.

        Args:
            update_bn: a data set over which the statistics of batch norms are recomputed with the
                averaged weights, as `torch.optim.swa_utils.update_bn` does: by the loss function,
                in training mode. Without it they are averaged like everything else.
            batch_size, workers, collate: of ``update_bn``, as for `loader`.

        Raises:
            ValueError: no average is kept, or only one of update_bn and batch_size is given.
            RuntimeError: `step`, `load`, `changing` or `average` is called inside the block.
            DisagreementError: another device is somewhere else.
        """
        if (update_bn is None) != (batch_size is None):
            raise ValueError("expected update_bn and batch_size together, or neither of them")
        session = self._session
        with session.telling_others():
            session.engine.check_last_step()
            with session.averaged(update_bn, batch_size, workers=workers, collate=collate):
                yield

    def barrier(self) -> None:
        """Wait until every device is here; raises PeerError or DisagreementError if one is not."""
        with self._session.telling_others():
            self._session.engine.agree(StepHead(Call.BARRIER, self.steps + 1))

    def broadcast(self, value: object = None) -> Any:
        """The lead's value on every device; called on every device.

        Args:
            value: on the lead what `gather` may have; elsewhere it is ignored, and may be left out.

        Returns:
            A copy of the lead's value, as `gather` returns it.

        Raises:
            TypeError: the lead's value is, or holds, something that cannot be sent.

        >>> trainer.broadcast({"name": "run 7", "order": torch.arange(3)})
        {'name': 'run 7', 'order': tensor([0, 1, 2])}
        """
        session = self._session
        with session.telling_others():
            text = written(value) if session.team.has_lead else None
            session.engine.agree(StepHead(Call.BROADCAST, self.steps + 1))
            return broadcast(session.engine.exchange, text)

    def gather(self, value: object) -> list[Any]:
        """A value of every device's process, such as seconds or a score; called on every device.

        Args:
            value: of this process and so of all its devices: None, a bool, int, float, str or
                bytes; a tensor or a NumPy array or scalar of any numbers and shape; or lists,
                tuples and dicts of these, with text for keys.

        Returns:
            A copy of it for each of `devices`, in their order, on every device, to the bit; tensors
            on the host, other mappings as dicts. Where every device has a dict of numbers alone
            (0-d tensors count), the numbers are floats, of the same names everywhere.

        Raises:
            TypeError: the value is, or holds, something that cannot be sent; raised before
                anything is.
            DisagreementError, ValueError: the names of numbers differ between devices, or are not
                of one line.

        >>> trainer.gather({"seconds": 2}), trainer.gather(("a", None))
        ([{'seconds': 2.0}], [('a', None)])
        """
        session = self._session
        with session.telling_others():
            text = written(value)
            session.engine.agree(StepHead(Call.GATHER, self.steps + 1))
            return gather(session.engine.exchange, dict.fromkeys(session.team.own, text))

    @contextmanager
    def fork_rng(self) -> Iterator[None]:
        """A block whose random numbers do not shift those that come after it.

        When it ends, the generators of PyTorch (this process's devices included), ``random`` and
        NumPy are where they were when it began. What only the lead draws (samples to look at,
        names) belongs in such a block, or what a script draws later differs between devices. It
        waits for nobody, so the lead alone may open it; steps, evaluations and loaders have seeds
        of their own and need none.

        >>> state = torch.get_rng_state()
        >>> if trainer.is_lead:
        ...     with trainer.fork_rng():
        ...         noise = torch.randn(3)
        >>> torch.equal(torch.get_rng_state(), state)
        True
        """
        with forked_generators(*self._session.team.own_devices.values()):
            yield

    def fingerprint(self) -> str:
        """16 hexadecimal digits over parameters and buffers: the same for the same bits.

        Called on every device where each keeps its span (see `whole`); elsewhere on any.
        """
        session = self._session
        with session.telling_others():
            return fingerprint_of(model_digests(session.engine, self.steps + 1))

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
        folder is there whole or not at all. Called on every device; the lead writes. In
        `averaged` it holds the averages, and what is trained is in another file there.

        Args:
            directory: holds the checkpoints of a run; made if it is not there.
            scores: numbers to remember with this checkpoint, such as what `evaluate` returned.
            keep: how many of the newest of this run stay there; with None this one stays for good.
                What anybody else put there is left alone.
            best: ``"highest NAME"`` or ``"lowest NAME"`` of ``scores``: from here on, of those of
                this run, the checkpoint with that score stays too.
            wait: return when all is on the disk; else a failure is raised by the next call. Where
                devices share no memory and keep their spans, it is waited for all the same.
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
            session.resumption.begin_save()
            place = session.verifying.writes_to(directory)
            save = partial(session.checkpoints.save, keeping=keeping, wait=wait, extra=copied)
            what = (place, keeping, copied)
            saved: Path = session.verifying.result(what, None, lambda: save(place))
            return saved

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
        sample where the run was saved. What the script changes from here on acts on that, also
        where the whole run has done it before. A checkpoint that is damaged is left out with a
        warning. Called on every device; the lead reads.

        Args:
            directory: what was given to `save`, or the folder of one checkpoint.
            changed: what may differ from the run that was saved, each giving up a part of the
                promise: ``"seed"``, ``"shards"``, ``"batch_size"``, ``"dataset"``,
                ``"clip_norm"``, ``"precision"``, ``"microbatch"``, ``"compile"``, ``"optimizer"``,
                ``"schedule"``, ``"average"``.
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
                found = session.checkpoints.load(place, changed=names, if_any=if_any)
                if found is not None:
                    session.resumption.begin_anew()
                return found
        finally:
            session.gradients.forget()
            session.note_progress()

    def close(self) -> None:
        """Leave the run, and have the model be the script's; called on every device.

        Each process then has all values of the model for itself, the same everywhere, and may
        change them. The optimizer's state, which lies in parts on the devices, is let go: what
        follows needs another optimizer. Another Trainer of the model, or of a part of it, closes
        this one first. So need no call: the end of the program, after which nothing changes.

        With ``onefold run --checkpoint``, while an exception is handled on one of several devices,
        that happens only at its end. A device that is handling one waits for no other.

        Raises:
            DisagreementError: with several devices, the script has changed parameters since the
                last call, outside of `changing`; or another device is somewhere else.
            OSError: a checkpoint could not be written.
            PeerError: another device failed.

        >>> import onefold
        >>> net = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> run = onefold.Trainer(net, optimizer, lambda m, x: m(x).square().mean(1), shards=2)
        >>> step = run.step(torch.ones(6, 2))
        >>> run.close()
        >>> _ = net.weight.data.mul_(0.5)
        """
        self._session.close()


def _dropped(reference: weakref.ref[Session], memory: Memory) -> None:
    """Leave the model to the script, which has dropped its Trainer."""
    session = reference()
    if session is not None:
        session.drop()
    else:  # both were garbage together
        memory.make_own()
