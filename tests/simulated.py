"""`onefold.launch` on simulated devices, with the same arguments: for what needs no processes."""

from collections.abc import Callable, Sequence
from typing import Any

from onefold.core.options import ExchangeName
from onefold.testing import simulate

__all__ = ["launch"]


def launch(
    function: Callable[..., Any],
    *,
    devices: str,
    args: Sequence[Any] = (),
    placement: str = "replicate",
    exchange: ExchangeName = "auto",
    seed: int = 0,
) -> Any:
    """What the lead returns; ``devices`` is ``cpu:N``. What a device raises comes as it is."""
    number = int(devices.removeprefix("cpu:"))
    return simulate(function, number, seed=seed, args=args, placement=placement, exchange=exchange)[
        0
    ]
