"""What every exchange must do, called on each device of a run; used by test_contract.py."""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, permutations

import torch

from onefold.core.assignment import Assignment
from onefold.core.flat import FlatTensors, lay_out
from onefold.core.fold import Block, blocks_of, fold, fold_shards
from onefold.core.results import Gradients
from onefold.core.settings import added_up_in
from onefold.core.shard import Shares
from onefold.core.stages import Stages
from onefold.core.storage import Storage, cut_segments
from onefold.errors import DisagreementError
from onefold.exchange.collective import CollectiveTransport
from onefold.exchange.exchange import Exchange, exchange_over
from onefold.exchange.group import Rendezvous, join_group
from onefold.exchange.mailbox import Mailbox, connected
from onefold.exchange.memory import Start, write_first
from onefold.exchange.reduction import GradientSend, StageReduction
from onefold.exchange.shared import SharedTransport
from onefold.exchange.transport import Transport
from onefold.launcher.environment import current_context
from onefold.system.allocator import DEFAULT_ALLOCATOR, TensorAllocator
from onefold.system.file_memory import MmapAllocator

SHARDS = 7
BUFFERS = {
    "mean": torch.float32,
    "count": torch.int64,
    "short": torch.int16,
    "unsigned": torch.uint16,
    "eighth": torch.float8_e4m3fn,
    "truth": torch.bool,
}
"""Some of them of types that backends do not know."""
CPU = torch.device("cpu")
LIMIT_S = 30.0


def tensors() -> dict[str, torch.Tensor]:
    return {
        "small": torch.zeros(5, 3),
        "segments": torch.zeros(50_001),
        "large": torch.zeros(300_001),
        "turned": torch.zeros(300, 400),
        "half": torch.zeros(33, 7, dtype=torch.bfloat16),
        "last": torch.zeros(2, 2),
    }


STAGES = Stages(("rest", "first", "second", "empty"), (1, 2, 0, 2, 1, 2))
"""Neighbors in memory are in different stages, and one stage has nothing."""


def storage(devices: int, *, staged: bool = False) -> Storage:
    trained = lay_out(tensors())
    return Storage(
        parameters=trained,
        other=lay_out({"frozen": torch.zeros(4)}),
        buffers=lay_out({name: torch.zeros(3).to(dtype) for name, dtype in BUFFERS.items()}),
        segments=cut_segments(trained, by_element=True),
        shards=SHARDS,
        devices=devices,
        stages=STAGES if staged else None,
    )


def start(rank: int, sizes: Storage) -> Start:
    """Values that tell from which device they are."""
    buffers = FlatTensors(sizes.buffers)
    buffers.write([torch.full((3,), rank % 2).to(dtype) for dtype in BUFFERS.values()])
    trained = [torch.full_like(t, rank + 1.0) for t in tensors().values()]
    return Start(trained, [torch.full((4,), rank + 5.0)], buffers)


def gradients(step: int, shard: int) -> Gradients:
    """Of one shard; one tensor gets none from some shards."""
    generator = torch.Generator().manual_seed(100 * step + shard)
    result: list[torch.Tensor | None] = []
    for tensor in tensors().values():
        dtype = added_up_in(tensor.dtype)
        result.append(torch.randn(tensor.shape, generator=generator).to(dtype))
    if shard % 2:
        result[3] = torch.randn(400, 300, generator=generator).t()  # strides of its own
    if shard % 3 == 0:
        result[2] = result[5] = None
    return result


def add(left: Sequence[torch.Tensor | None], right: Sequence[torch.Tensor | None]) -> Gradients:
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


def assignment(sizes: Storage) -> Assignment:
    """In stages as a run begins; else with nearly all for the first device, and none for others."""
    shares = Shares.even(shards=SHARDS, devices=sizes.devices)
    devices = (CPU,) * sizes.devices
    if sizes.stages is not None:
        return Assignment.first(
            devices, shares=shares, segments=sizes.segments, stages=sizes.stages
        )
    segments = len(sizes.segments)
    cuts = [0, *([segments - 2] * (sizes.devices - 1)), segments]
    partitions = tuple(range(start, stop) for start, stop in pairwise(cuts))
    return Assignment(devices=devices, shares=shares, partitions=partitions)


def check_step(
    exchange: Exchange, sizes: Storage, own: range, step: int, shares: Shares, now: Assignment
) -> None:
    """Publish, collect, update and spread; compare with the fold done alone."""
    said = exchange.agree(step, bytes([own[0], step]))
    processes = [own[0]] if len(own) == shares.devices else range(shares.devices)
    assert list(said) == [bytes([d, step]) for d in processes]
    staged = isinstance(exchange.reduction, StageReduction)
    if isinstance(exchange.reduction, StageReduction):
        give_stages(exchange.reduction, own, step, shares)
    exchange.memory.start_step(shares)
    for device in own:
        run = shares.shards_of(device)
        exchange.table.clear_rows(device, run)
        for slot, block in enumerate(blocks_of(run, SHARDS) if not staged else ()):

            def leaf(node: Block) -> Gradients | None:
                return gradients(step, node.start) if node.stop - node.start == 1 else None

            exchange.memory.publish(device, slot, fold(leaf, block, add))
        for shard in run:
            exchange.table.weights[shard] = shard + 0.5
            exchange.table.totals[shard] = shard * 2.0
            exchange.table.changed[shard, 0] = shard % 2
            for view in exchange.table.buffer_rows[shard].views:
                view.copy_(row_of(shard, view.dtype))
        exchange.table.gave[device, 0] = len(run)
    exchange.collect(shares)
    table = exchange.table
    assert table.weights.tolist() == [shard + 0.5 for shard in range(SHARDS)]
    assert table.totals.tolist() == [shard * 2.0 for shard in range(SHARDS)]
    assert table.changed[:, 0].tolist() == [shard % 2 for shard in range(SHARDS)]
    assert table.gave[:, 0].tolist() == list(shares.counts)
    for shard in range(SHARDS):
        for view in table.buffer_rows[shard].views:
            assert view.view(torch.uint8).equal(row_of(shard, view.dtype).view(torch.uint8))
    expected = FlatTensors(sizes.gradients)
    missing = SHARDS - 1 if staged and step == 2 else SHARDS
    leaves: list[Gradients] = [
        [None] * len(tensors()) if shard == missing else gradients(step, shard)
        for shard in range(SHARDS)
    ]
    expected.write(fold_shards(leaves, add))
    for device in own:
        partition = [sizes.segments[i] for i in now.partitions[device]]
        for segment, total in zip(partition, exchange.totals(device), strict=True):
            wanted = expected.segment(segment)
            assert total is not None
            assert total.shape == wanted.shape
            assert total.stride() == wanted.stride()
            assert torch.equal(total + 0.0, wanted + 0.0)
            exchange.memory.trained[device].segment(segment).copy_(wanted)
    exchange.publish_parameters()
    for device in own:
        assert staged or list(exchange.totals(device)) == []
        for mine, wanted in zip(exchange.memory.trained[device].views, expected.views, strict=True):
            assert torch.equal(mine + 0.0, wanted.to(mine.dtype) + 0.0)


def row_of(shard: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((3,), shard + 1).to(dtype)


def give_stages(fold_of_stages: StageReduction, own: range, step: int, shares: Shares) -> None:
    """Hand over all shards stage by stage: each in an order of its own, some in two segments."""
    empty = SHARDS - 1 if step == 2 else SHARDS
    fold_of_stages.start_step(shard for shard in range(SHARDS) if shard == empty)
    for row in shares.rounds():
        for shard in (row[device] for device in own if device in row and row[device] != empty):
            orders = list(permutations(range(len(STAGES.names))))
            for last in (False, True) if shard % 4 == 2 else (True,):
                # What comes before the last of a shard is zeros, which add nothing.
                found = [
                    None if gradient is None else gradient if last else torch.zeros_like(gradient)
                    for gradient in gradients(step, shard)
                ]
                for stage in orders[(5 * shard + step) % len(orders)]:
                    given = [found[number] for number in STAGES.entries[stage]]
                    fold_of_stages.give(GradientSend(shard, stage, last, given))
        fold_of_stages.end_round()


def check_exchange(exchange: Exchange, sizes: Storage, begun: Start, own: range) -> None:
    devices = sizes.devices
    for device in own:
        flat = exchange.memory.trained[device]
        assert flat.is_there != exchange.memory.is_partitioned
        if exchange.memory.is_partitioned:
            flat.get_back()
            write_first(flat, begun.trained)
            for section in flat.sections:
                exchange.memory.broadcast_tensor_from_lead(section)
        for view in flat.views:
            assert bool((view == 1).all()), "the lead's values become everybody's"
        assert exchange.memory.other[device].views[0].tolist() == [5.0] * 4
    for view in begun.buffers.views:
        assert view.tolist() == [0] * 3, "the lead's buffers become everybody's"
    first = begun.trained[0]
    assert isinstance(first, torch.Tensor)
    assert bool((first == own[0] + 1).all()), "those of the script are left alone"
    now = assignment(sizes)
    for step, shares in enumerate(uneven_shares(devices), start=1):
        if isinstance(exchange.reduction, StageReduction):
            shares = replace(shares, in_rounds=True)
        check_step(exchange, sizes, own, step, shares, now)
        odd = [step / 3, -0.0, torch.nan, torch.inf, 5e-324]
        rows = [torch.tensor([d, 9.0, *odd], dtype=torch.float64)[::2] for d in range(devices)]
        shared = exchange.transport.all_gather_rows({device: rows[device] for device in own})
        assert shared.view(torch.int64).equal(torch.stack(rows).view(torch.int64))
    long = {d: torch.full((300_000,), float(d), dtype=torch.float64) for d in own}
    assert exchange.transport.all_gather_rows(long).sum(dim=1).tolist() == [
        300_000.0 * d for d in range(devices)
    ]
    for longest in (0, 5, 70_000):
        texts = {d: bytes([65 + d]) * (longest * d // devices) for d in own}
        gathered = exchange.transport.all_gather_objects(texts)
        assert gathered == [bytes([65 + d]) * (longest * d // devices) for d in range(devices)]
    values = {d: (d, torch.full((d,), d / 3)) for d in own}
    found = exchange.transport.all_gather_values(values)
    assert [d for d, _ in found] == list(range(devices))
    assert all(tensor.equal(torch.full((d,), d / 3)) for d, tensor in found)
    check_bytes(exchange, begun, own)
    exchange.close()
    exchange.close()


def check_bytes(exchange: Exchange, begun: Start, own: range) -> None:
    """What lies between steps: the lead's values for all, bytes to the lead, and bytes from it."""
    processes = exchange.table.storage.devices // len(own)
    leads = 0 in own
    for turn, nbytes in enumerate((10, 70_000, 0, 3_000_000)):
        exchange.transport.all_gather_rows({d: torch.zeros(1, dtype=torch.float64) for d in own})
        exchange.transport.buffer(nbytes)[:nbytes] = own[0] + turn
        brought = exchange.transport.gather_to_lead()
        assert len(brought) == (processes if leads else 0)
        for number, memory in enumerate(brought):
            assert memory[:nbytes].tolist() == [number + turn] * nbytes
    for nbytes in (3, 100_000):

        def make(number: int, nbytes: int = nbytes) -> torch.Tensor:
            return torch.full((nbytes + number,), number + 7, dtype=torch.uint8)

        given = exchange.transport.scatter_from_lead(make if leads else None)
        assert torch.equal(given[: nbytes + own[0]], make(own[0]))
    for view in (*exchange.memory.trained[own[0]].views, *exchange.memory.other[own[0]].views):
        view.fill_(3.0 if leads else 4.0)
    exchange.transport.all_gather_rows({d: torch.zeros(1, dtype=torch.float64) for d in own})
    begun.buffers.views[0].fill_(3.0 if leads else 4.0)
    if leads:
        for view in (*exchange.memory.trained[0].views, *exchange.memory.other[0].views):
            view.fill_(3.0)
    exchange.memory.broadcast_from_lead(begun.buffers)
    for view in (*exchange.memory.trained[own[0]].views, *exchange.memory.other[own[0]].views):
        assert bool((view == 3).all())
    assert begun.buffers.views[0].tolist() == [3.0] * 3


def uneven_shares(devices: int) -> list[Shares]:
    """Shares for some steps, the first of which are even."""
    shares = [
        Shares.even(shards=SHARDS, devices=devices),
        Shares.even(shards=SHARDS, devices=devices),
    ]
    if devices > 1:
        counts = [1] * devices
        counts[0], counts[-1] = SHARDS - devices + 2, 0
        shares += [Shares(tuple(counts)), Shares(tuple(reversed(counts))), shares[0]]
    return shares


def check_launched(kinds: Sequence[str]) -> list[str]:
    """One process of several: the kinds that keep the contract, one after the other."""
    own = range(current_context().rank, current_context().rank + 1)
    for trainer, kind in enumerate(kinds):
        check_exchange(*made(kind, trainer), own)
    return list(kinds)


def shared(trainer: int, home: TensorAllocator) -> SharedTransport:
    context = current_context()
    if context.network:
        mailbox = context.network.mailbox(trainer)
    else:
        peers = connected(f"{context.run_id}-{trainer}", context.rank, context.size, LIMIT_S)
        mailbox = Mailbox(peers, rank=context.rank, timeout_s=LIMIT_S)
    return SharedTransport(mailbox, home)


def collective(trainer: int, home: TensorAllocator) -> Transport:
    context = current_context()
    joined = join_group(Rendezvous(context, context.size, LIMIT_S), "cpu", trainer)
    return CollectiveTransport(CPU, joined, LIMIT_S, home)


EXCHANGES = {"shared": shared, "collective": collective}
"""Makes the transport of a process, by the name of the exchange."""


def made(name: str, trainer: int) -> tuple[Exchange, Storage, Start]:
    """A kind of exchange, perhaps "in stages", and then perhaps "on a disk"."""
    kind, *how = name.split(", ")
    sizes = storage(current_context().size, staged="in stages" in how)
    home = MmapAllocator.at("") if "on a disk" in how else DEFAULT_ALLOCATOR
    begun = start(current_context().rank, sizes)
    transport = EXCHANGES[kind](trainer, home)
    return exchange_over(transport, sizes, begun, assignment(sizes)), sizes, begun


class Left(Exception):
    """Raised where a device leaves in order."""


def raising(kind: type[Exception], *words: str) -> Callable[[], None]:
    def fail() -> None:
        raise kind(*words)

    return fail


def cut_all() -> None:
    """Break all connections of this process."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)


FAULTS: dict[str, Callable[[], None]] = {
    "fails": raising(ArithmeticError, "over the top"),
    "disagrees": raising(DisagreementError, "device 1 has another model"),
    "leaves": raising(Left),
    "cut": cut_all,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "nothing": lambda: None,
}
"""What one device does in place of a call."""
SHARES = Shares((4, 3))


def collected(exchange: Exchange) -> None:
    exchange.memory.start_step(SHARES)
    exchange.collect(SHARES)


CALLS: dict[str, Callable[[Exchange, Start], object]] = {
    "agree": lambda exchange, begun: exchange.agree(2, b"x"),
    "collect": lambda exchange, begun: collected(exchange),
    "share": lambda exchange, begun: exchange.transport.all_gather_rows(
        {current_context().rank: torch.zeros(2, dtype=torch.float64)}
    ),
    "gather": lambda exchange, begun: exchange.transport.all_gather_objects(
        {current_context().rank: b"x"}
    ),
    "follow": lambda exchange, begun: exchange.memory.broadcast_from_lead(begun.buffers),
    "gather_to_lead": lambda exchange, begun: brought(exchange),
    "hand out": lambda exchange, begun: exchange.transport.scatter_from_lead(
        None if current_context().rank else lambda _: torch.ones(9, dtype=torch.uint8)
    ),
}


def brought(exchange: Exchange) -> None:
    exchange.transport.buffer(9)
    exchange.transport.gather_to_lead()


def fail_at(kind: str, call: str, device: int, fault: str, trainer: int = 0) -> None:
    """Make a call of an exchange, before which a fault comes to one of two devices."""
    exchange, _, begun = made(kind, trainer)
    try:
        exchange.agree(1, b"")
        if current_context().rank == device:
            FAULTS[fault]()
        CALLS[call](exchange, begun)
        exchange.agree(3, b"")
    except Left:
        exchange.close()
    except Exception as error:
        exchange.close(error)
        raise
    else:
        exchange.close()


Met = tuple[str, int | None]
"""The class of an error, and the number of the device that it names."""


def met(error: BaseException | None) -> Met:
    return type(error).__name__, getattr(error, "device", None)


def fail_in_turn(kind: str, rows: Sequence[tuple[str, int, str]], folder: str) -> None:
    """One process of two: several faults, each in an exchange of its own, and what comes of it."""
    for trainer, (call, device, fault) in enumerate(rows):
        try:
            fail_at(kind, call, device, fault, trainer)
            error: Exception | None = None
        except Exception as caught:
            error = caught
        with open(f"{folder}/{current_context().rank}", "a") as file:
            print(json.dumps(met(error)), file=file)
