"""Digests of a model's parameters and buffers, also where no device has all of them.

Each stage is brought to one of the devices, which digests its parameters one by one, and all learn
the digests. So a stage travels once, and every device digests other ones at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

from onefold.core.flat import named_tensors, tensor_digests
from onefold.core.head import Call, StepHead
from onefold.engine.engine import Engine

__all__ = ["agreed_digests", "model_digests"]


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
    engine.replicas[0].parts.check_held()
    if not engine.lending.is_whole:
        engine.agree(StepHead(Call.WHOLE, step))
    return agreed_digests(engine)


def agreed_digests(engine: Engine) -> dict[str, str]:
    """What `model_digests` returns, in a call that all devices have agreed on."""
    tensors = named_tensors(engine.replicas[0].module)
    if engine.lending.is_whole:
        return tensor_digests(tensors)
    numbers = {id(p): n for n, p in enumerate(engine.lending.parameters)}
    lent = _of_lent(engine)
    here = {name: tensor for name, tensor in tensors.items() if id(tensor) not in numbers}
    digests = tensor_digests(here)
    return {
        name: digests[name] if name in digests else lent[numbers[id(tensor)]]
        for name, tensor in tensors.items()
    }


def _of_lent(engine: Engine) -> dict[int, str]:
    """Digest the parameters that are elsewhere, each on one device; return digests by number."""
    first, exchange = engine.replicas[0], engine.exchange
    assert exchange.stages is not None
    parameters = engine.lending.parameters
    own: dict[str, str] = {}

    def look(numbers: Sequence[int]) -> None:
        own.update(tensor_digests({str(number): parameters[number] for number in numbers}))

    devices = exchange.board.shape.devices
    engine.lending.visit(range(first.number, len(exchange.stages.stages), devices), look)
    text = "".join(f"{number} {digest}\n" for number, digest in own.items()).encode()
    given = exchange.transport.gather_bytes({first.number: text})
    lines = [line.split() for text in given for line in text.decode().splitlines()]
    return {int(number): digest for number, digest in lines}
