"""Simulates runs of several devices in one process, with a reproducible order of execution.

`simulate` runs a script's function on N devices, which are threads of this process. One thread runs
at a time. Threads switch only where devices of a real run communicate or wait for each other, in an
order drawn from a seed. All of onefold works as in a run of N processes, down to the bytes sent;
only processes, sockets between hosts and clocks are missing. A run therefore takes milliseconds,
and a failure is reproduced by the same seed.

`outcomes` also returns how each device ended, for runs in which a device is killed, stopped,
delayed or cut off at a chosen call (`Fault`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from onefold.core.options import DEFAULT_PLACEMENT, ExchangeName, LaunchContext, RunOptions
from onefold.errors import PeerError
from onefold.launcher.environment import simulated
from onefold.launcher.membership import end_well, leave
from onefold.testing.network import Connection, Network
from onefold.testing.scheduler import Fault, Killed, Scheduler

__all__ = ["Ended", "Fault", "outcomes", "simulate"]


_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Ended(Generic[_Value]):
    """The end of a simulated device; see `outcomes`."""

    value: _Value | None = None
    """Return value of its function."""
    error: BaseException | None = None
    """Exception raised by its function."""
    was_killed: bool = False
    """Whether the device was killed, or stopped and never resumed."""
    calls: int = 0
    """Number of transport calls by the device; `Fault` refers to them by number."""


def simulate(
    main: Callable[..., _Value],
    devices: int = 2,
    *,
    seed: int = 0,
    args: Sequence[Any] = (),
    placement: str = DEFAULT_PLACEMENT,
    exchange: ExchangeName = "auto",
    options: RunOptions | None = None,
) -> list[_Value]:
    """Run a function on simulated devices, as `onefold.launch` does on N processes.

    All devices are in this process: the function is called in N threads with the same arguments,
    and one thread runs at a time. Each device has its own generators. PyTorch's start as in a new
    process; those of ``random`` and NumPy start differently on each device.

    Args:
        main: called as ``main(*args)``; creates its Trainer without ``devices``.
        devices: number of devices.
        seed: seed of the execution order, which must not affect the result. The same
            seed gives the same order.
        args: passed to all devices, not copied.
        placement: as for ``onefold run --placement``.
        exchange: as for ``onefold run --exchange``.
        options: complete options of the run, instead of the two above.

    Returns:
        The return values of ``main``, in the order of the devices' numbers.

    Raises:
        BaseException: the exception of the first device that failed.

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
    # Raise the cause first: a PeerError only reports that another device failed.
    for number, error in sorted(failed.items(), key=lambda pair: isinstance(pair[1], PeerError)):
        error.add_note(f"raised on simulated device {number} of {devices}, with seed {seed}")
        raise error
    return [cast(_Value, each.value) for each in ended]


def outcomes(
    main: Callable[..., _Value],
    devices: int = 2,
    *,
    seed: int = 0,
    args: Sequence[Any] = (),
    options: RunOptions | None = None,
    faults: Sequence[Fault] = (),
) -> list[Ended[_Value]]:
    """Run a function on simulated devices with faults; return how each ended.

    Args:
        main: as for `simulate`; called in the same way.
        devices: number of devices.
        seed: seed of the execution order.
        args: passed to all devices.
        options: options of the run.
        faults: faults of the devices.

    Returns:
        The end of each device, in the order of their numbers.

    Raises:
        ValueError: a fault names a device that does not exist, or a call below 1.

    >>> def meet():
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     trainer = onefold.Trainer(model, optimizer, lambda m, x: m(x).square(), shards=2)
    ...     trainer.barrier()
    >>> lost, waiting = outcomes(meet, 2, faults=[Fault(device=0, call=2)])
    >>> lost.was_killed, type(waiting.error).__name__
    (True, 'PeerLost')
    """
    chosen = options or RunOptions()
    network: Network
    scheduler = Scheduler(devices, seed, faults, lambda number: network.cut(number))
    network = Network(devices, scheduler, chosen.timeout_s)
    found: list[Ended[_Value]] = [Ended() for _ in range(devices)]

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


def _lived(main: Callable[..., _Value], args: Sequence[Any]) -> Ended[_Value]:
    """Run the function as a worker process does, and end as a worker does."""
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
