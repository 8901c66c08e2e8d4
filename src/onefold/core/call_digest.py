"""Values that devices compare at the start of every call, to detect differences early.

Pure: this module knows numbers and strings, not devices or tensors.

Note: contents of a head
------------------------
A head has one 64-bit number per field, so that agreement costs one small message, whatever is
compared: larger values are represented by their checksum. Fields are ordered as differences are
reported, from cause to consequence: devices that make different calls differ in nearly every other
field as well, and the user should see the call.

Two more numbers follow the compared ones and may differ: the parameter that the script changed
between calls, and the requests of the process, such as one to stop. Each device reads them from the
same message, so all devices reach the same conclusion in the same step.
"""

from __future__ import annotations

import functools
import operator
import struct
import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum, IntFlag
from typing import NamedTuple, Self

from onefold.errors import DisagreementError

__all__ = ["Agreed", "Call", "CallDigest", "StepRequests", "checksum", "digest", "read_agreed"]


class Call(IntEnum):
    """The collective call that a device is about to make."""

    words: str
    """Name of the call in messages."""

    # Without words this is a lookup: `Call(7)`.
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
    CHANGING = 7, "trainer.modifying"
    CHANGED = 8, "the end of trainer.modifying"
    BARRIER = 9, "trainer.barrier"
    AVERAGE = 10, "trainer.average"
    AVERAGED = 11, "trainer.averaged"
    AVERAGED_END = 12, "the end of trainer.averaged"
    UPDATE_BN = 13, "trainer.averaged(update_bn=...)"
    BROADCAST = 14, "trainer.broadcast"
    GRADIENT = 15, "trainer.gradient"
    WHOLE = 16, "trainer.gathered"
    CLOSE = 17, "trainer.close"
    RECORD = 18, "trainer.record"
    FINGERPRINT = 19, "trainer.fingerprint"


class CallDigest(NamedTuple):
    """Values that must be the same on every device, one number each; 0 for unused fields."""

    call: int
    """A member of `Call`."""
    step: int
    """Step number, from 1: one more than the completed steps."""
    loss: int = 0
    """Index of the loss among the run's losses, from 0."""
    samples: int = 0
    """Number of samples in the batch, or in the data set being evaluated."""
    batch_size: int = 0
    """Batch size of an evaluation."""
    shares: int = 0
    """Checksum of the shares."""
    loader: int = 0
    """Number of the loader that made the batch; -1 for a batch that the script made."""
    data_pass: int = 0
    """Number of the loader's pass."""
    place: int = 0
    """Number of samples of the pass that will have been used after this batch."""
    data: int = 0
    """Checksum of the data set's length and of a few of its samples."""
    batch: int = 0
    """Checksum of a batch that the script made: shapes, types and sampled values."""
    settings: int = 0
    """Checksum of the settings of the optimizer's groups."""
    modes: int = 0
    """Checksum of the modules' modes, of numbers such as dropout's p, and of frozen parameters."""
    values: int = 0
    """Checksum of sampled values of parameters and buffers."""
    arguments: int = 0
    """Checksum of the call's other arguments."""
    outside: int = 0
    """Checksum of sampled values of the modules that the loss uses in addition to the model.

    It is 0 if none are known, as on a device that has not run a shard yet.
    """

    def word(self, *, changed: int = 0, requests: int = 0) -> bytes:
        """Pack the head into bytes, with two numbers that may differ between devices.

        Args:
            changed: number of the parameter that was changed between the previous call and this
                one, from 1; 0 for none.
            requests: `StepRequests` of this process to all devices.
        """
        return _HEAD.pack(*self) + _REPORT.pack(changed, requests)


# Little-endian everywhere, because hosts may differ in byte order.
_HEAD, _REPORT = struct.Struct(f"<{len(CallDigest._fields)}q"), struct.Struct("<2q")


class StepRequests(IntFlag):
    """StepRequests of one device to all devices, made before a step."""

    STOP = 1
    """End the run after this step."""
    SAVE = 2
    """Save the run after this step."""


class Agreed(NamedTuple):
    """Reports of the devices that may differ, after the comparison."""

    changed: tuple[int, ...]
    """Number of the changed parameter, for each process; 0 for none."""
    requests: StepRequests
    """StepRequests of any device."""


def read_agreed(words: Sequence[bytes], settings: Callable[[], str] = str) -> Agreed:
    """Compare the heads of all devices, and return their reports.

    Args:
        words: the `CallDigest.word` of every process, in device order.
        settings: returns the names of differing optimizer settings; called on all devices.

    Raises:
        DisagreementError: the heads differ; the message names the devices and the difference.
    """
    reports = [_REPORT.unpack_from(word, _HEAD.size) for word in words]
    changed, requests = zip(*reports, strict=True)
    agreed = Agreed(changed, StepRequests(functools.reduce(operator.or_, requests)))
    # This runs in every step, so compare heads as bytes and unpack them only if they differ.
    first = words[0][: _HEAD.size]
    if any(word[: _HEAD.size] != first for word in words):
        _refuse_difference(words, settings, any(agreed.changed))
    return agreed


def _refuse_difference(words: Sequence[bytes], settings: Callable[[], str], changed: int) -> None:
    """Raise an error for the first differing field, with the devices that differ from device 0."""
    heads = [CallDigest(*_HEAD.unpack_from(word)) for word in words]
    # An unknown module outside the model is not a difference: a device without shards has never
    # seen a call of it. Such devices take the checksum of a device that has.
    known = max(head.outside for head in heads)
    heads = [head if head.outside else head._replace(outside=known) for head in heads]
    lead = heads[0]
    places = [i for i, ours in enumerate(lead) if any(head[i] != ours for head in heads)]
    name = CallDigest._fields[places[0]] if places else ""
    # If a parameter was changed between two calls, differing values are not raised here: the caller
    # knows the parameter's name and raises the more helpful error.
    if not name or (name == "values" and changed):
        return
    others = [n for n, head in enumerate(heads) if head[places[0]] != lead[places[0]]]
    who = f"device{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
    is_, has = ("are", "have") if len(others) > 1 else ("is", "has")
    where = f"step {lead.step}, {Call(lead.call).words}"
    theirs, ours = (_shown(name, head[places[0]]) for head in (heads[others[0]], lead))
    theirs = settings() if name == "settings" else theirs
    raise DisagreementError(
        _WORDS[name].format(who=who, is_=is_, has=has, where=where, theirs=theirs, ours=ours)
    )


def checksum(text: bytes) -> int:
    """Return a 32-bit checksum; about one in four billion pairs of different texts collides."""
    return zlib.crc32(text)


def digest(arguments: object) -> int:
    """Return a checksum of a call's arguments, which must have a complete repr."""
    return checksum(repr(arguments).encode())


def _shown(name: str, number: int) -> str:
    if name == "call":
        return Call(number).words
    if name == "loader":
        return "a batch that the script made" if number < 0 else f"a batch of loader {number}"
    return f"{number:,}"


_SAME = "every device must run the same script on the same data"
_WORDS = {
    "call": "{who} reached {theirs} while device 0 reached {ours}: all devices must make the same "
    "trainer calls in the same order, and none under `if trainer.is_lead:`. This includes calls "
    "that write files, such as trainer.save: only the lead writes",
    "step": "{who} {is_} in step {theirs} and device 0 in step {ours}: " + _SAME,
    "loss": "{where}: {who} {is_} computing loss {theirs} of the Trainer and device 0 loss {ours} "
    "(counted from 0): all devices must make the same steps in the same order",
    "samples": "{where}: {who} {has} {theirs} samples and device 0 has {ours}: every device must "
    "receive the same whole batch, or the same data set",
    "batch_size": "{where}: {who} {has} a batch_size of {theirs} and device 0 has {ours}: " + _SAME,
    "shares": "{where}: {who} {has} other shares than device 0: set trainer.shares to the same "
    "value on every device, before the same step",
    "loader": "{where}: {who} {has} {theirs} and device 0 {ours}: " + _SAME,
    "data_pass": "{where}: {who} {is_} in pass {theirs} over the data and device 0 in pass {ours}: "
    + _SAME,
    "place": "{where}: {who} {is_} at sample {theirs} of a pass over the data and device 0 at "
    "sample {ours}: every device must use every batch of a loader",
    "data": "{where}: the data set of {who} has other samples than that of device 0: create the "
    "same data set on every device, and seed its random values first. Paths, times and process "
    "numbers in a sample count as differences. A sampler, a stream or the function of "
    "trainer.batches must also give the same values everywhere: remove any split by rank and "
    "world size, because onefold cuts each batch itself",
    "batch": "{where}: {who} received another batch than device 0: a batch that the script makes "
    "must be the same whole batch on every device. Did the lead draw random numbers that "
    "the others did not? Random draws on one device belong in `with trainer.fork_rng():`",
    "settings": "{where}: the optimizer's settings of {who} differ from those of device 0, in "
    "{theirs}: make the same change on every device, or change them in trainer.modifying()",
    "modes": "{where}: {who} {has} modules in another mode (train, eval), with other numbers (the "
    "p of dropout, the momentum of batch norm), or other frozen parameters than device 0: set them "
    "to the same values on every device",
    "values": "{where}: {who} {has} other parameters or buffers than device 0: they were changed "
    "differently between two calls. Change them in trainer.modifying()",
    "outside": "{where}: a module that the loss uses in addition to the model has other values on "
    "{who} than on device 0: seed its random values before creating it",
    "arguments": "{where}: the arguments of {who} differ from those of device 0: pass the same "
    "arguments on every device",
}
