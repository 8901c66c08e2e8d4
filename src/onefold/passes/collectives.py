"""Collectives between steps, for numbers, text, tensors and batches, and digests of the model.

Note: digests if no device has all parameters
---------------------------------------------
Each stage is gathered on one device, which digests its parameters one by one and sends the digests
to all. So a stage is sent once, and all devices digest different stages at the same time.
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
    """Encode a value as bytes for other devices, before the collective starts.

    Raises:
        TypeError: the value is, or contains, something that cannot be sent.
        ValueError: it is a dict of numbers with a name that is empty or has several lines.
    """
    if isinstance(value, Mapping) and _is_numbers(value):
        for name in value:
            if "\n" in name or not name:
                raise ValueError(f"names of numbers must be single lines, but got {name!r}")
    return encode(value, "the value")


def gather(exchange: Exchange, own: Mapping[int, bytes]) -> list[Any]:
    """Gather a value from every device, in device order.

    Args:
        exchange: exchange with all devices.
        own: for each device of this process, the result of `written` for its value.

    Returns:
        The values. If all of them are dicts of numbers, the numbers are floats.

    Raises:
        DisagreementError: all values are dicts of numbers, and their names differ.
    """
    values = [decode(text) for text in exchange.transport.all_gather_objects(own)]
    if not all(map(_is_numbers, values)):
        return values
    check_names([list(each) for each in values])
    return [{name: float(number) for name, number in each.items()} for each in values]


def written_shards(shards: Mapping[int, object]) -> bytes:
    """Encode the payloads of a process's shards as bytes, before the collective starts.

    Raises:
        TypeError: a payload is, or contains, something that cannot be sent.
    """
    return encode(sorted(shards.items()), "the batch")


def gather_batch(exchange: Exchange, own: Sequence[int], text: bytes, batch: ShardedBatch) -> Any:
    """Gather the payload of all shards of a batch on the host; called on all devices.

    Args:
        exchange: exchange with all devices.
        own: numbers of this process's devices.
        text: result of `written_shards` for the process's shards.
        batch: the batch, whose sizes every process knows.
    """
    # Send once per process, because its devices have the same shards.
    texts = dict.fromkeys(own, b"") | {own[0]: text}
    found = exchange.transport.all_gather_objects(texts)
    payloads = dict(shard for each in found if each for shard in decode(each))
    shards = sorted(payloads)
    sizes = [batch.size_of(shard) for shard in shards]
    return join_rows([payloads[shard] for shard in shards], sizes, dim=batch.dim)


def broadcast(exchange: Exchange, text: bytes | None) -> Any:
    """Broadcast the lead's value to every device.

    Args:
        exchange: exchange with all devices.
        text: result of `written` on the lead's process; None elsewhere.
    """
    made = None if text is None else torch.frombuffer(bytearray(text), dtype=torch.uint8)
    given = exchange.transport.scatter_from_lead(None if made is None else lambda device: made)
    return decode(given.numpy().tobytes())


def _is_numbers(value: object) -> bool:
    """Return whether a value is a dict that contains only real numbers by name."""
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
    """Check that all devices have the same names.

    Raises:
        DisagreementError: two devices have different names.
    """
    first = next((each for each in names if each), [])
    for number, each in enumerate(names):
        if list(each) != list(first):
            raise DisagreementError(
                f"device {number} has {each} and another device {first}, but every device must "
                f"have the same names, in the same order"
            )


def model_digests(engine: Engine, step: int) -> dict[str, str]:
    """Digest every parameter and buffer of the model by name, in the model's order.

    Called on all devices, or on any device if this process has all parameters.

    Args:
        engine: the devices of this process.
        step: number of the next step.

    Raises:
        DisagreementError: another device makes another call.
        StateError, ValueError: the model has other parts than when Trainer was created.
    """
    # Otherwise the digests could belong to a part that was not trained.
    engine.context.replicas[0].parts.check_held()
    engine.agreement.refuse_torn(Call.FINGERPRINT)
    if engine.placement.partitioned:
        engine.agree(CallDigest(Call.FINGERPRINT, step))
    return agreed_digests(engine)


def agreed_digests(engine: Engine) -> dict[str, str]:
    """Return the result of `model_digests`, inside a call that all devices have agreed on."""
    tensors = named_tensors(engine.context.module)
    numbers = {id(p): n for n, p in enumerate(engine.placement.partitioned)}
    elsewhere = engine.placement.parameters.read_stages(tensor_digests)
    here = tensor_digests({name: t for name, t in tensors.items() if id(t) not in numbers})
    return {
        name: here[name] if name in here else elsewhere[numbers[id(tensor)]]
        for name, tensor in tensors.items()
    }
