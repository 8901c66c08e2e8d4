"""Brings values from device to device between steps: numbers, text and tensors, and batches.

Note: digests where no device has all parameters
-------------------------------------------------
Each stage is gathered on one of the devices, which digests its parameters one by one, and all learn
the digests. So a stage travels once, and every device digests other ones at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from onefold.core.batch import ShardedBatch
from onefold.core.call_digest import Call, CallDigest
from onefold.core.encoding import decode, encode
from onefold.core.flat import named_tensors, tensor_digests
from onefold.core.shard import join_rows
from onefold.errors import DisagreementError
from onefold.exchange.exchange import Exchange
from onefold.step.engine import Engine

__all__ = [
    "agreed_digests",
    "broadcast",
    "check_names",
    "gather",
    "gather_batch",
    "model_digests",
    "written",
    "written_shards",
]


def written(value: object) -> bytes:
    """Write a value as bytes for other devices; done before the devices meet.

    Raises:
        TypeError: it is, or holds, something that cannot be sent.
        ValueError: it is a dict of numbers with a name that is empty or has several lines.
    """
    if isinstance(value, Mapping) and _is_numbers(value):
        for name in value:
            if "\n" in name or not name:
                raise ValueError(f"expected names of one line for numbers, got {name!r}")
    return encode(value, "the value")


def gather(exchange: Exchange, own: Mapping[int, bytes]) -> list[Any]:
    """Gather a value from every device, in the devices' order.

    Args:
        exchange: with all devices.
        own: for each own device what `written` made of its value.

    Returns:
        The values. Where all of them are dicts of numbers, the numbers are floats.

    Raises:
        DisagreementError: all are dicts of numbers, and their names differ.
    """
    values = [decode(text) for text in exchange.transport.all_gather_objects(own)]
    if not all(map(_is_numbers, values)):
        return values
    check_names([list(each) for each in values])
    return [{name: float(number) for name, number in each.items()} for each in values]


def written_shards(shards: Mapping[int, object]) -> bytes:
    """Write the payloads of a process's shards as bytes; done before the devices meet.

    Raises:
        TypeError: a payload is, or holds, something that cannot be sent.
    """
    return encode(sorted(shards.items()), "the batch")


def gather_batch(exchange: Exchange, own: Sequence[int], text: bytes, batch: ShardedBatch) -> Any:
    """Gather a batch's payload, that of all shards, on the host; called on all devices.

    Args:
        exchange: with all devices.
        own: the numbers of this process's devices.
        text: what `written_shards` made of the process's shards.
        batch: the batch, whose sizes are known everywhere.
    """
    # Once for each process, whose devices have the same.
    texts = dict.fromkeys(own, b"") | {own[0]: text}
    found = exchange.transport.all_gather_objects(texts)
    payloads = dict(shard for each in found if each for shard in decode(each))
    shards = sorted(payloads)
    sizes = [batch.size_of(shard) for shard in shards]
    return join_rows([payloads[shard] for shard in shards], sizes, dim=batch.dim)


def broadcast(exchange: Exchange, text: bytes | None) -> Any:
    """Bring the lead's value to every device.

    Args:
        exchange: with all devices.
        text: on the lead's process, what `written` made of its value; elsewhere None.
    """
    made = None if text is None else torch.frombuffer(bytearray(text), dtype=torch.uint8)
    given = exchange.transport.scatter_from_lead(None if made is None else lambda device: made)
    return decode(given.numpy().tobytes())


def _is_numbers(value: object) -> bool:
    """Whether a value is a dict of real numbers by name, and nothing else."""
    return isinstance(value, Mapping) and all(
        type(name) is str and _is_number(number) for name, number in value.items()
    )


def _is_number(value: object) -> bool:
    if isinstance(value, np.generic):
        return value.dtype.kind in "biuf"
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_complex()
    return type(value) in (bool, int, float)


def check_names(names: Sequence[Sequence[str]]) -> None:
    """Refuse devices that have different names.

    Raises:
        DisagreementError: two of them have.
    """
    first = next((each for each in names if each), [])
    for number, each in enumerate(names):
        if list(each) != list(first):
            raise DisagreementError(
                f"device {number} has {each} and another one {first}: expected the same "
                f"names, in the same order, on every device"
            )


def model_digests(engine: Engine, step: int) -> dict[str, str]:
    """Digest every parameter and buffer of the model, under its own name, in the model's order.

    Called on all devices, or on any where this process has all parameters.

    Args:
        engine: the devices of this process.
        step: the number of the next step.

    Raises:
        DisagreementError: another device is somewhere else.
        StateError, ValueError: the model holds other parts than when Trainer was made.
    """
    # Or they would be those of a part that was not trained.
    engine.context.replicas[0].parts.check_held()
    engine.agreement.refuse_torn(Call.FINGERPRINT)
    if engine.placement.partitioned:
        engine.agree(CallDigest(Call.FINGERPRINT, step))
    return agreed_digests(engine)


def agreed_digests(engine: Engine) -> dict[str, str]:
    """What `model_digests` returns, in a call that all devices have agreed on."""
    tensors = named_tensors(engine.context.module)
    numbers = {id(p): n for n, p in enumerate(engine.placement.partitioned)}
    elsewhere = engine.placement.parameters.read_stages(tensor_digests)
    here = tensor_digests({name: t for name, t in tensors.items() if id(t) not in numbers})
    return {
        name: here[name] if name in here else elsewhere[numbers[id(tensor)]]
        for name, tensor in tensors.items()
    }
