"""Simulated devices: runs of several devices in one process, repeatable to the last call.

`simulate` runs a script's function on N devices that are threads of this process, of which one at a
time goes on. They hand over to each other where a run's devices wait for each other or tell each
other something, and nowhere else, in an order that is drawn from a seed. All of onefold works as in
a run of N processes, down to the bytes that are sent; processes, sockets and clocks are what is
missing. So a run takes milliseconds, and what fails fails again with the same seed.

`outcomes` also says how each device ended, for runs in which one is killed, stopped, late or cut
off at a call of your choice (`Fault`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onefold.core.options import DEFAULT_PLACEMENT, ExchangeName, LaunchContext, RunOptions
from onefold.errors import PeerError
from onefold.launcher.environment import simulated
from onefold.launcher.membership import end_well, leave
from onefold.testing.network import Connection, Network
from onefold.testing.scheduler import Fault, Killed, Scheduler

__all__ = ["Ended", "Fault", "outcomes", "simulate"]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a simulated device ended; see `outcomes`."""

    value: Any = None
    """What its function returned."""
    error: BaseException | None = None
    """What its function raised."""
    was_killed: bool = False
    """Whether it was killed, or stopped and never went on."""
    calls: int = 0
    """How many calls of the transport it made: `Fault` names one of them."""


def simulate(
    main: Callable[..., Any],
    devices: int = 2,
    *,
    seed: int = 0,
    args: Sequence[Any] = (),
    placement: str = DEFAULT_PLACEMENT,
    exchange: ExchangeName = "auto",
    options: RunOptions | None = None,
) -> list[Any]:
    """Run a function on simulated devices, as `onefold.launch` does on N processes.

    All devices are in this process: the function is called in N threads with the same arguments,
    and one of them goes on at a time. Each has generators of its own; PyTorch's begin as in a new
    process, those of ``random`` and NumPy otherwise on each device.

    Args:
        main: called as ``main(*args)``; makes its Trainer without ``devices``.
        devices: how many.
        seed: of the order in which devices go on, which must not matter to the result. The same
            seed has the same order.
        args: handed to all devices, not copied.
        placement: as for ``onefold run --placement``.
        exchange: as for ``onefold run --exchange``.
        options: more options of a run, in place of both.

    Returns:
        What ``main`` returned on each device, in the order of their numbers.

    Raises:
        BaseException: what the first device that failed has raised.

    >>> def main():
    ...     torch.manual_seed(0)
    ...     model = torch.nn.Linear(3, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     loss = lambda model, batch: model(batch).square().mean(dim=1)
    ...     trainer = onefold.Trainer(model, optimizer, loss, shards=4)
    ...     trainer.step(torch.randn(8, 3))
    ...     return trainer.fingerprint()
    >>> one, two, three = (set(simulate(main, devices=n)) for n in (1, 2, 3))
    >>> one == two == three
    True
    """
    chosen = options or RunOptions(placement=placement, exchange=exchange)
    ended = outcomes(main, devices, seed=seed, args=args, options=chosen)
    failed = {number: each.error for number, each in enumerate(ended) if each.error is not None}
    # What a device raises because another one has failed is not the cause.
    for number, error in sorted(failed.items(), key=lambda pair: isinstance(pair[1], PeerError)):
        error.add_note(f"raised on simulated device {number} of {devices}, with seed {seed}")
        raise error
    return [each.value for each in ended]


def outcomes(
    main: Callable[..., Any],
    devices: int = 2,
    *,
    seed: int = 0,
    args: Sequence[Any] = (),
    options: RunOptions | None = None,
    faults: Sequence[Fault] = (),
) -> list[Ended]:
    """Run a function on simulated devices of which some fail; say how each ended.

    Args:
        main: as for `simulate`, and so the others.
        devices: how many.
        seed: of the order in which devices go on.
        args: handed to all devices.
        options: of the run.
        faults: what happens to devices, and when.

    Returns:
        How each device ended, in the order of their numbers.

    Raises:
        ValueError: a fault names a device that there is not, or no call.

    >>> def meet():
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     trainer = onefold.Trainer(model, optimizer, lambda m, x: m(x).square(), shards=2)
    ...     trainer.barrier()
    >>> lost, told = outcomes(meet, 2, faults=[Fault(device=0, call=2)])
    >>> lost.was_killed, type(told.error).__name__
    (True, 'PeerLost')
    """
    chosen = options or RunOptions()
    network: Network
    scheduler = Scheduler(devices, seed, faults, lambda number: network.cut(number))
    network = Network(devices, scheduler, chosen.timeout_s)
    found = [Ended() for _ in range(devices)]

    def live(number: int) -> None:
        context = LaunchContext(
            rank=number,
            size=devices,
            local_rank=number,
            local_size=devices,
            launcher="onefold",
            run_id="simulated",
            devices=("cpu",) * devices,
            options=chosen,
            network=Connection(network, number),
        )
        with simulated(context):
            ended = _lived(main, args)
        found[number] = replace(ended, calls=scheduler.states[number].calls)
        if ended.error is None and not ended.was_killed:
            network.left.append(number)

    try:
        scheduler.run(live)
    finally:
        network.end()
    return found


def _lived(main: Callable[..., Any], args: Sequence[Any]) -> Ended:
    """Run the function as a worker does, and end as one does."""
    try:
        try:
            value = main(*args)
            end_well()
        except Killed:
            raise
        except BaseException as error:
            leave(error)
            return Ended(error=error)
        leave()
        return Ended(value)
    except Killed:
        return Ended(was_killed=True)
