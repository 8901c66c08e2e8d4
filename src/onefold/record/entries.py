"""What a record of a run consists of: one kind of entry for each thing that is written down.

Every entry is a MessagePack map with the name of its kind under ``kind``. Numbers of shards lie in
``bytes`` of little-endian 64-bit values, V of them: floats in ``totals`` and ``weights``, whole
numbers in ``digests``.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from onefold.errors import RecordError

__all__ = [
    "AuditEntry",
    "BlockEntry",
    "Entry",
    "FailureEntry",
    "HangEntry",
    "Result",
    "SameProcessEntry",
    "SavedEntry",
    "StartEntry",
    "StepEntry",
    "decode",
    "encode",
]


class StartEntry(Struct, tag="begun", tag_field="kind", frozen=True, kw_only=True):
    """A run began here, or was resumed: what was written of later steps does not count."""

    run: str
    """The run's name, kept when it is resumed."""
    step: int
    """How many steps are done."""
    time: str
    """ISO 8601, UTC."""
    trainer: int = 0
    """Number of the Trainer among those of the script."""
    allow_changed: list[str] = []
    """What differed on purpose from the run that was resumed."""
    command: list[str]
    """The script with its arguments."""
    folder: str = ""
    """The working directory in which the program was started."""
    python: str = ""
    """Path of the Python interpreter."""
    module: str = ""
    """Name of the module that was run in place of a script."""
    script: str
    """Path of the script; empty where there is none."""
    script_digest: str
    """SHA-256 of its text, as hexadecimal digits."""
    flags: dict[str, str] = {}
    """The environment variables by which libraries choose their kernels."""
    libraries: dict[str, str] = {}
    """The version of each library that was loaded and says which one it is."""
    devices: list[str]
    description: dict[str, str]
    """What the numbers depend on, in words: settings, versions, processor, parameters; the same on
    all devices."""
    anew: bool = False
    """Whether no script could be answered from what was written before: it has gone back by
    `Trainer.load`, or something was changed on purpose."""
    kept: int = 0
    """How many of the entries before this one the checkpoint has seen; those that counted for it
    count."""


class StepEntry(Struct, tag="step", tag_field="kind", frozen=True, kw_only=True):
    """A step was made, or skipped."""

    step: int
    epoch: int
    samples: int
    name: str = ""
    """Of the loss, where there are several."""
    gradient: bool = False
    """Whether the update was the script's, by `Trainer.gradient`."""
    loss: float
    weight: float
    norm: float
    """Of the whole gradient before clipping; NaN where there was none."""
    skipped: str = ""
    """Why nothing was updated."""
    rates: list[float]
    """The learning rate of each of the optimizer's groups in this step."""
    values: dict[str, float] = {}
    """What the loss returned beside itself."""
    outputs: list[str] = []
    """The names of what it returned for each sample."""
    rows: bytes = b""
    """These outputs, as `onefold.core.wire.encode` writes them; empty where they are too large."""
    place: list[tuple[int, int, int, int]] = []
    """Loader, pass, where the batch ends in the pass, and its samples; for each loader in it."""
    totals: bytes
    """V float64: each shard's part of the loss, before the division by ``weight``."""
    weights: bytes
    """V float64: each shard's part of the divisor; below 0 where there is none."""
    digests: bytes = b""
    """V uint64: of the same sample of each shard's gradient."""
    time: float = 0.0
    """Seconds since 1970, when it was noted; 0 in records that have no times. Steps that differ in
    nothing else are equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepEntry) and encode(replace(self, time=0.0)) == encode(
            replace(other, time=0.0)
        )


class FailureEntry(Struct, tag="failed", tag_field="kind", frozen=True, kw_only=True):
    """A step that raised an error, which the script survived."""

    step: int
    line: str
    """Where in the script."""
    error: str
    """Its class, in `onefold.errors` or one of Python's."""
    text: str


class Result(Struct, tag="result", tag_field="kind", frozen=True, kw_only=True):
    """Something that the script asked for between two steps."""

    step: int
    call: str
    """``evaluate``, ``predict``, ``gather`` or ``broadcast``."""
    line: str
    """Where in the script."""
    value: bytes | None
    """As `onefold.core.wire.encode` writes it; None where it was too large to keep."""
    digest: str
    """Of the value, also where that was not kept."""


class BlockEntry(Struct, tag="modifying", tag_field="kind", frozen=True, kw_only=True):
    """A block of `Trainer.modifying` has ended."""

    step: int
    line: str
    """Where in the script."""
    digest: int
    """Of a sample of each parameter and buffer, as the block left them."""


class SavedEntry(Struct, tag="checkpoint", tag_field="kind", frozen=True, kw_only=True):
    """A checkpoint was begun."""

    step: int
    folder: str
    line: str = ""
    """Where in the script; empty where the launcher had it made."""


class AuditEntry(Struct, tag="audit", tag_field="kind", frozen=True, kw_only=True):
    """An audit has found a wrong result."""

    step: int
    shard: int
    """-1 for the update of a part of the parameters."""
    devices: list[int]
    """Who is at fault; two where it cannot be told which one."""
    persistent: bool
    healed: bool


class SameProcessEntry(Struct, tag="same_process", tag_field="kind", frozen=True, kw_only=True):
    """From here on, the only device audits its shards in the run's own process, without a child."""

    step: int
    why: str


class HangEntry(Struct, tag="hang", tag_field="kind", frozen=True, kw_only=True):
    """A device has waited for very long; what the launcher has told of it.

    Nothing depends on it: it counts as no entry where entries are counted.
    """

    step: int
    text: str
    """Who has waited for whom, with the stacks of all processes."""


Found = AuditEntry | SameProcessEntry
"""What an audit writes down."""
Entry = StartEntry | StepEntry | FailureEntry | Result | BlockEntry | SavedEntry | Found | HangEntry
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def encode(entry: Entry | list[tuple[int, Entry]]) -> bytes:
    """Write an entry as MessagePack, or several with their numbers as a list."""
    return _ENCODER.encode(entry)


def decode(body: bytes, where: str) -> Entry:
    """Read an entry.

    Raises:
        RecordError: it is none, or of a later version; ``where`` names it.
    """
    try:
        return _DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise RecordError(f"{where}: expected an entry of a record, got another: {error}") from None
