"""Speed of the gradient exchange between two processes: onefold and gloo, alternately.

    python benchmarks/exchange.py [--repeats 7] [--output FILE]

An exchange is done when both processes have published their gradients, the sum is formed, and both
may read the result. For onefold these are `collect` and `publish_parameters`, without an update in
between; `publish` is measured with and without them, because copying gradients to shared memory is
part of a step, while DistributedDataParallel has its gradients where gloo reads them. For gloo it
is `all_reduce`. Each process has one thread.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from measure import (
    add_output,
    deliver,
    in_turn,
    machine_busy_s,
    print_disturbance,
    print_table,
    ratio,
    record,
    spread,
)
from onefold.core.assignment import Assignment
from onefold.core.flat import FlatTensors, lay_out
from onefold.core.shard import Shares
from onefold.core.storage import Storage, cut_segments
from onefold.exchange.collective import CollectiveTransport
from onefold.exchange.connections import Connections, LateWatch, PeerWatch
from onefold.exchange.exchange import Exchange, exchange_over
from onefold.exchange.group import JoinedGroup
from onefold.exchange.mailbox import Mailbox, connected
from onefold.exchange.memory import Start
from onefold.exchange.shared import SharedTransport

__all__ = ["main"]

PROCESSES = 2
SHARES = Shares.even(shards=PROCESSES, devices=PROCESSES)
TENSORS = 4
"""Number of parameters that share the bytes of an exchange equally."""
TIMEOUT_S = 60.0
GLOO = "gloo all_reduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Results for one amount."""

    times_us: dict[str, list[float]]
    """Mean microseconds per exchange, one value per round, by name of the exchange."""
    others_cores: float
    """Number of cores that other programs used: near 0 on an idle machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Amount of data to exchange, and repetitions per measurement."""

    title: str
    size_bytes: int
    iterations: int

    def gradients(self, value: float) -> list[torch.Tensor]:
        """Return `TENSORS` tensors of `value`, (size_bytes / 4 / TENSORS,) float32 each."""
        numel = self.size_bytes // torch.float32.itemsize // TENSORS
        return [torch.full((numel,), value) for _ in range(TENSORS)]


AMOUNTS = [
    Amount(title="44 MB", size_bytes=44_000_000, iterations=20),
    Amount(title="4 KB", size_bytes=4096, iterations=2000),
]


def main() -> None:
    """Start the two processes, let them measure, and show the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7, help="measurements per exchange")
    add_output(parser)
    args = parser.parse_args()
    found = run_processes(args.repeats)
    results = [summary(amount, one) for amount, one in zip(AMOUNTS, found, strict=True)]
    show(results)
    settings = {"repeats": args.repeats, "threads": 1, "processes": PROCESSES}
    deliver(record("exchange", settings=settings, results=results), args.output)


def run_processes(repeats: int) -> list[Found]:
    """Run both processes; return their results by amount."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        mp.spawn(run_process, args=(repeats, Path(folder) / "store", result), nprocs=PROCESSES)
        found: list[Found] = torch.load(result, weights_only=False)
        return found


def run_process(rank: int, repeats: int, store: Path, result: Path) -> None:
    """Run one of the two processes; the first one writes the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    found = [measure(rank, amount, rounds=repeats) for amount in AMOUNTS]
    if rank == 0:
        torch.save(found, result)
    dist.barrier()  # gloo may hang if one process leaves early
    dist.destroy_process_group()


def measure(rank: int, amount: Amount, *, rounds: int) -> Found:
    """Measure every exchange of one amount, alternately."""
    exchanges = exchanges_of(rank, amount)
    for run in exchanges.values():
        timed_us(run, max(1, amount.iterations // 10))  # warmup
    before_s, cpu_before_s, start_s = machine_busy_s(), time.process_time(), time.perf_counter()
    times_us = in_turn(
        {name: partial(timed_us, run, amount.iterations) for name, run in exchanges.items()},
        rounds=rounds,
    )
    own_s = torch.tensor(time.process_time() - cpu_before_s)
    dist.all_reduce(own_s)
    others_s = machine_busy_s() - before_s - own_s.item()
    others_cores = max(0.0, others_s / (time.perf_counter() - start_s))
    return Found(times_us=times_us, others_cores=others_cores)


def timed_us(run: Callable[[], object], iterations: int) -> float:
    """Return the mean microseconds of `run`, in the slower process."""
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(iterations):
        run()
    taken_us = torch.tensor((time.perf_counter() - start_s) / iterations * 1e6)
    dist.all_reduce(taken_us, dist.ReduceOp.MAX)
    return taken_us.item()


def exchanges_of(rank: int, amount: Amount) -> dict[str, Callable[[], object]]:
    """Return everything to measure with one amount, by name."""
    shared, collective = new_shared(rank, amount), new_collective(rank, amount)
    for exchange in (shared, collective):
        check(exchange, rank, amount)
    zeros = amount.gradients(0.0)
    everything = torch.zeros(amount.size_bytes // torch.float32.itemsize)
    return {
        "shared": partial(trade, shared),
        "shared, publish too": partial(publish_and_trade, shared, rank, zeros),
        GLOO: partial(dist.all_reduce, everything),
        "collective on gloo": partial(publish_and_trade, collective, rank, zeros),
    }


def new_shared(rank: int, amount: Amount) -> Exchange:
    """Make onefold's exchange in shared memory."""
    address = f"onefold-benchmark-{os.getppid()}-{amount.size_bytes}"
    mailbox = Mailbox(
        connected(address, rank, PROCESSES, TIMEOUT_S), rank=rank, timeout_s=TIMEOUT_S
    )
    storage = storage_of(amount)
    transport = SharedTransport(mailbox)
    return exchange_over(transport, storage, start_of(amount), roster_of(storage))


def new_collective(rank: int, amount: Amount) -> Exchange:
    """Make onefold's exchange over torch.distributed."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed created no process group")
    store = dist.distributed_c10d._get_default_store()
    connections, lateness = Connections(), LateWatch(store, rank, PROCESSES)
    watch = PeerWatch({}, connections, lateness)
    joined = JoinedGroup(group, store, connections, watch, lateness, list)
    storage = storage_of(amount)
    transport = CollectiveTransport(torch.device("cpu"), joined, TIMEOUT_S)
    return exchange_over(transport, storage, start_of(amount), roster_of(storage))


def storage_of(amount: Amount) -> Storage:
    """Return a model that consists of `amount` of parameters."""
    trained = lay_out({str(number): one for number, one in enumerate(amount.gradients(0.0))})
    return Storage(
        parameters=trained,
        other=lay_out({}),
        buffers=lay_out({}),
        segments=cut_segments(trained, by_element=True),
        shards=PROCESSES,
        devices=PROCESSES,
    )


def roster_of(storage: Storage) -> Assignment:
    """Return CPU devices of one host, with one shard each."""
    devices = [torch.device("cpu")] * PROCESSES
    return Assignment.first(devices, shares=SHARES, segments=storage.segments)


def start_of(amount: Amount) -> Start:
    """Return the initial parameters of such a model."""
    return Start(trained=amount.gradients(0.0), other=[], buffers=FlatTensors(lay_out({})))


def check(exchange: Exchange, rank: int, amount: Amount) -> None:
    """Exchange ones and twos, and raise `RuntimeError` unless the result is threes."""
    exchange.memory.start_step(SHARES)
    exchange.memory.publish(rank, 0, amount.gradients(rank + 1.0))
    exchange.collect(SHARES)
    wrong = [total for total in exchange.totals(rank) if not total.eq(3.0).all()]
    exchange.publish_parameters()
    if wrong:
        raise RuntimeError(f"{type(exchange).__name__}: 1 and 2 did not add up to 3")
    exchange.memory.start_step(SHARES)
    # Values that are added repeatedly must stay zero.
    exchange.memory.publish(rank, 0, amount.gradients(0.0))


def trade(exchange: Exchange) -> None:
    """Run an exchange whose gradients are already published."""
    exchange.memory.start_step(SHARES)
    finish(exchange)


def finish(exchange: Exchange) -> None:
    """Finish an exchange after the gradients are published."""
    exchange.collect(SHARES)
    exchange.publish_parameters()


def publish_and_trade(exchange: Exchange, rank: int, gradients: Sequence[torch.Tensor]) -> None:
    """Run a complete exchange."""
    exchange.memory.start_step(SHARES)
    exchange.memory.publish(rank, 0, gradients)
    finish(exchange)


def summary(amount: Amount, found: Found) -> dict[str, Any]:
    """Summarize one amount: microseconds, and speed relative to gloo."""
    times_us = found.times_us
    return {
        "amount": amount.title,
        "iterations": amount.iterations,
        "microseconds": {name: spread(times) for name, times in times_us.items()},
        "times_as_fast_as_gloo": {
            name: ratio(times_us[GLOO], times) for name, times in times_us.items() if name != GLOO
        },
        "others_cores": found.others_cores,
    }


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print a table for each amount."""
    for one in results:
        faster = one["times_as_fast_as_gloo"]
        rows = [
            [name, time_us.text(1), faster[name].text(2) if name in faster else ""]
            for name, time_us in one["microseconds"].items()
        ]
        columns = ["exchange", "microseconds", "times as fast as gloo"]
        print_table(f"Exchange of {one['amount']}: median (least-greatest)", columns, rows)
    for one in results:
        print_disturbance(one["others_cores"], f"the exchange of {one['amount']}")


if __name__ == "__main__":
    main()
