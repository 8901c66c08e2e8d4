"""What devices compare at the start of every call, to find differences before they do harm.

Pure: it knows numbers and words, and neither devices nor tensors.

Note: what a head is made of
----------------------------
A head is one 64-bit number per field, so that agreeing costs one small message whatever is
compared: anything larger travels as its checksum. The order of the fields is the order in which a
difference is reported. It runs from cause to consequence: devices that make different calls differ
in nearly every other field as well, and the user should read about the call.

Two more numbers travel behind the compared ones and may differ: which parameter was changed behind
our back, and whether the process was asked to stop. Each device learns them from the same message,
so all of them come to the same conclusion in the same step.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Self

from onefold.errors import DisagreementError

__all__ = ["Agreed", "Call", "CallDigest", "checksum", "digest", "read_agreed"]


class Call(IntEnum):
    """What a device is about to do together with the others."""

    words: str
    """What users call it."""

    # Without words it is a look-up: `Call(7)`.
    def __new__(cls, number: int, words: str = "") -> Self:
        call = int.__new__(cls, number)
        call._value_, call.words = number, words
        return call

    STEP = 1, "trainer.step"
    EVALUATE = 2, "trainer.evaluate"
    PREDICT = 3, "trainer.predict"
    GATHER = 4, "trainer.gather"
    SAVE = 5, "trainer.save"
    LOAD = 6, "trainer.load"
    CHANGING = 7, "the beginning of trainer.modifying"
    CHANGED = 8, "the end of trainer.modifying"
    BARRIER = 9, "trainer.barrier"
    AVERAGE = 10, "trainer.average"
    AVERAGED = 11, "the beginning of trainer.averaged"
    AVERAGED_END = 12, "the end of trainer.averaged"
    UPDATE_BN = 13, "the update_bn of trainer.averaged"
    BROADCAST = 14, "trainer.broadcast"
    GRADIENT = 15, "trainer.gradient"
    WHOLE = 16, "the beginning of trainer.gathered"
    CLOSE = 17, "trainer.close"
    RECORD = 18, "trainer.record"
    FINGERPRINT = 19, "trainer.fingerprint"


class CallDigest(NamedTuple):
    """What must be the same on every device: one number each, 0 where a field does not apply."""

    call: int
    """Which of `Call` it is."""
    step: int
    """Number of the step, counted from 1: one more than are done."""
    loss: int = 0
    """Which of the run's losses the step is of, counted from 0."""
    samples: int = 0
    """Number of samples in the batch, or in the data set that is evaluated."""
    batch_size: int = 0
    """The batch size of an evaluation."""
    shares: int = 0
    """Checksum of the shares."""
    loader: int = 0
    """Number of the loader that made the batch; -1 for a batch of the script's own."""
    data_pass: int = 0
    """Number of the loader's pass."""
    place: int = 0
    """How many samples of the pass will have been used after this batch."""
    data: int = 0
    """Checksum of the data set's length and of a few of its samples."""
    batch: int = 0
    """Checksum of a batch of the script's own: shapes, types and sampled values."""
    settings: int = 0
    """Checksum of the settings of the optimizer's groups."""
    modes: int = 0
    """Checksum of the modules' modes, of numbers such as dropout's p, and of what is frozen."""
    values: int = 0
    """Checksum of sampled values of parameters and buffers."""
    arguments: int = 0
    """Checksum of the call's other arguments."""
    outside: int = 0
    """Checksum of sampled values of the modules that the loss uses beside the model.

    It is 0 where none are known, as on a device that has run no shard yet.
    """

    def word(self, *, changed: int = 0, stop: bool = False) -> bytes:
        """Pack the head into bytes, with two numbers that may differ between devices.

        Args:
            changed: number of the parameter that was changed between the previous call and this
                one, counted from 1; 0 for none.
            stop: whether this process has been asked to stop.
        """
        return _HEAD.pack(*self) + _REPORT.pack(changed, stop)


# Little-endian wherever it runs: devices may sit on machines of different kinds.
_HEAD, _REPORT = struct.Struct(f"<{len(CallDigest._fields)}q"), struct.Struct("<2q")


class Agreed(NamedTuple):
    """What the devices reported about themselves, once they agree on the rest."""

    changed: tuple[int, ...]
    """For each process, the number of the parameter that was changed; 0 for none."""
    stop: bool
    """Whether any device has been asked to stop."""


def read_agreed(words: Sequence[bytes], settings: Callable[[], str] = str) -> Agreed:
    """Compare the heads of all devices, and return what they report beside them.

    Args:
        words: the `CallDigest.word` of every process, in the order of their devices.
        settings: finds the names of the optimizer's settings that differ, on all devices alike.

    Raises:
        DisagreementError: the heads differ; the message names who differs, and in what.
    """
    reports = [_REPORT.unpack_from(word, _HEAD.size) for word in words]
    agreed = Agreed(tuple(changed for changed, _ in reports), any(stop for _, stop in reports))
    # This runs in every step, so equal heads are recognized as bytes, without being unpacked.
    first = words[0][: _HEAD.size]
    if any(word[: _HEAD.size] != first for word in words):
        _refuse_difference(words, settings, any(agreed.changed))
    return agreed


def _refuse_difference(words: Sequence[bytes], settings: Callable[[], str], changed: int) -> None:
    """Name the first field that differs, and the devices that differ from device 0 in it."""
    heads = [CallDigest(*_HEAD.unpack_from(word)) for word in words]
    # Not knowing a module beside the model is no difference: a device without shards has never seen
    # it being called. Such devices take the checksum of one that has.
    known = max(head.outside for head in heads)
    heads = [head if head.outside else head._replace(outside=known) for head in heads]
    lead = heads[0]
    places = [i for i, ours in enumerate(lead) if any(head[i] != ours for head in heads)]
    name = CallDigest._fields[places[0]] if places else ""
    # Values that differ because a parameter was changed between two calls are not raised here: the
    # caller knows the parameter's name, and its error is the more helpful one.
    if not name or (name == "values" and changed):
        return
    others = [n for n, head in enumerate(heads) if head[places[0]] != lead[places[0]]]
    who = f"device{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
    where = f"step {lead.step}, {Call(lead.call).words}"
    theirs, ours = (_shown(name, head[places[0]]) for head in (heads[others[0]], lead))
    theirs = settings() if name == "settings" else theirs
    raise DisagreementError(_WORDS[name].format(who=who, where=where, theirs=theirs, ours=ours))


def checksum(text: bytes) -> int:
    """A 32-bit checksum; different texts share one in about one case in four billion."""
    return zlib.crc32(text)


def digest(arguments: object) -> int:
    """A checksum of a call's arguments, which must have a complete repr."""
    return checksum(repr(arguments).encode())


def _shown(name: str, number: int) -> str:
    if name == "call":
        return Call(number).words
    if name == "loader":
        return "a batch of the script's own" if number < 0 else f"a batch of loader {number}"
    return f"{number:,}"


_SAME = "every device must run the same script on the same data"
_WORDS = {
    "call": "{who} calls {theirs} while device 0 calls {ours}: all devices must make the same "
    "calls of the trainer in the same order, and none under `if trainer.is_lead:`. Where something "
    "is written, as in trainer.save, all devices call and the lead writes",
    "step": "{who} is in step {theirs} and device 0 in step {ours}: " + _SAME,
    "loss": "{where}: {who} computes loss {theirs} of the Trainer's and device 0 loss {ours} "
    "(counted from 0): all devices must make the same steps in the same order",
    "samples": "{where}: {who} has {theirs} samples and device 0 has {ours}: every device must be "
    "given the same whole batch, or the same data set",
    "batch_size": "{where}: {who} has a batch_size of {theirs} and device 0 one of {ours}: "
    + _SAME,
    "shares": "{where}: {who} has other shares than device 0: set trainer.shares alike on every "
    "device, before the same step",
    "loader": "{where}: {who} has {theirs} and device 0 {ours}: " + _SAME,
    "data_pass": "{where}: {who} is in pass {theirs} over the data and device 0 in pass {ours}: "
    + _SAME,
    "place": "{where}: {who} is at sample {theirs} of a pass over the data and device 0 at sample "
    "{ours}: every device must use every batch of a loader",
    "data": "{where}: the data set of {who} has other samples than that of device 0: make it alike "
    "on every device; seed what is random in it before it is made. Paths, times and numbers of "
    "processes in a sample count as well. A sampler, a stream or the function of "
    "trainer.batches must give the same everywhere, too: one that takes its own part by rank and "
    "world size must drop that split, as onefold cuts each batch itself",
    "batch": "{where}: {who} was given another batch than device 0: a batch that the script cuts "
    "itself must be the same whole batch on every device. Did the lead draw random numbers that "
    "the others did not? What one device draws alone belongs in `with trainer.fork_rng():`",
    "settings": "{where}: the optimizer's settings of {who} differ from those of device 0, in "
    "{theirs}: change them alike on every device, or in trainer.modifying()",
    "modes": "{where}: {who} has modules in another mode (train, eval), with other numbers (the p "
    "of dropout, the momentum of batch norm), or other frozen parameters than device 0: set them "
    "alike on every device",
    "values": "{where}: {who} has other parameters or buffers than device 0: they were changed "
    "between two calls, and not alike. Change them in trainer.modifying()",
    "outside": "{where}: a module that the loss uses beside the model has other values on {who} "
    "than on device 0: seed what is random in it before it is made",
    "arguments": "{where}: the arguments of {who} differ from those of device 0: make the call "
    "alike on every device",
}
