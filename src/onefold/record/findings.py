"""What is asked of a step that is computed once more, and what is found in it."""

from __future__ import annotations

from msgspec import Struct

from onefold.shard.operations import ShardOperation

__all__ = ["Findings", "Inspection", "LayerFinding", "SampleFinding", "ShardFinding"]


class Inspection(Struct, frozen=True, kw_only=True):
    """What is to be looked at."""

    record: str
    """File of the record; empty where there is none to compare with."""
    step: int
    trainer: int = 0
    """Number of the Trainer among those of the script."""
    shards: list[int] | None = None
    """Which shards are computed once more, operation by operation; None for all."""
    samples: bool = True
    """Whether the samples of these shards are told apart."""
    digests: bool = False
    """Whether each operation of them, and each parameter before each step, is digested."""
    after: int = 0
    """After which step the Trainer stands when it is made; 0 where the run begins."""
    scale: float = 0.0
    """What losses are multiplied by, in a precision that needs it; 0 for what the run has."""
    bundle: str = ""
    """File in which the step is put, to be computed elsewhere; empty for none."""
    function: str = ""
    """``FILE:NAME`` of a function to call with the step; empty for none."""
    terminal: str = ""
    """The terminal at which a Python prompt is opened in the step; empty for none."""
    findings: str
    """File in which the lead writes what is found."""


class SampleFinding(Struct, frozen=True, kw_only=True):
    """A sample of a shard."""

    place: int
    """In the batch."""
    number: int | None
    """In the data set; None of a batch of the script's own."""
    loss: float | None
    """None where it is not known, or not finite."""
    finite: bool
    """Whether its loss, and its gradient where that was looked at, are finite."""
    words: str
    """What it holds, and what the data set says of it."""
    digest: str = ""
    """Of what it holds; empty where none was asked for."""


class LayerFinding(Struct, frozen=True, kw_only=True):
    """The gradient of a parameter, over the whole batch."""

    name: str
    norm: float | None
    """None where it is not finite."""
    given: bool
    """Whether there is a gradient."""
    of_parameter: float | None
    """The norm of the parameter itself."""


class ShardFinding(Struct, frozen=True, kw_only=True):
    """A shard that was computed once more by itself."""

    shard: int
    total: float | None
    """Its part of the loss; None where it is not finite."""
    equal: bool
    """Whether it has the same bits as in the step."""
    norm: float | None
    """Of its gradient; None where it is not finite."""
    bad_gradients: list[str]
    """Parameters whose gradients are not finite."""
    samples: list[SampleFinding]
    operations: list[ShardOperation]
    first: ShardOperation | None = None
    """The first operation that made something that is not finite, or far too large."""
    times: float | None = None
    """How many times as large as in other shards; None of what is not finite."""


class Findings(Struct, kw_only=True):
    """What was found."""

    step: int
    description: dict[str, str] = {}
    """What the numbers depend on, in words; see `onefold.record.entries.StartEntry`."""
    name: str = ""
    """Of the loss, where there are several."""
    samples: int = 0
    begun: int | None = None
    """After which step the computation began."""
    compared: int = 0
    """How many shards of how many steps were compared with the record."""
    differs: list[str] = []
    """What differs from the record, in the first step that does."""
    loss: float | None = None
    norm: float | None = None
    totals: list[float | None] = []
    weights: list[float] = []
    digests: list[int] = []
    printed: str = ""
    """What the function has printed that was called."""
    made: bool = False
    """Whether the record has the step itself."""
    layers: list[LayerFinding] = []
    shards: list[ShardFinding] = []
    parameters: dict[int, dict[str, str]] = {}
    """Digests of the model's tensors before each step, if they were asked for."""
