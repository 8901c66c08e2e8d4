"""What stages give each other arrives as it was: one contract for all ways that it can go."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from onefold.core.flat import storage_order
from onefold.exchange.collective import CollectiveTransport
from onefold.exchange.shared import SharedTransport
from onefold.exchange.transport import LocalTransport, Message, Transport
from tests.exchange.together import CPU, LIMIT_S, joined, mailboxes, together
from tests.tables import for_each

WAYS = ["local", "host", "group"]
Ends = Sequence[Transport]


@contextmanager
def relays(way: str) -> Iterator[Ends]:
    """The relay of device 0 and of device 1; of one process they are the same."""
    if way == "local":
        yield [LocalTransport(CPU)] * 2
    elif way == "host":
        with mailboxes(2) as boxes:
            yield [SharedTransport(box) for box in boxes]
    else:
        with joined(2) as parts:
            transports = [CollectiveTransport(CPU, part, LIMIT_S) for part in parts]
            yield transports
            for transport in transports:
                transport.close()


def counted(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


TENSORS: dict[str, torch.Tensor] = {
    "plain": counted(3, 4),
    "single": torch.tensor(1.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "empty, of no size": torch.empty(2, 0, 5, dtype=torch.int64),
    "transposed": counted(3, 4).t(),
    "channels last": counted(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": counted(6, 7)[::2, 1::3],
    "from the midst": counted(9)[4:],
    "expanded": counted(3, 1).expand(3, 5),
    "expanded from one": torch.tensor(7).expand(4),
    "bfloat16": counted(5, dtype=torch.bfloat16),
    "float8": counted(5).to(torch.float8_e4m3fn),
    "bool": counted(3, 3) > 4,
    "bytes": counted(5, dtype=torch.uint8),
    "complex": torch.complex(counted(3), -counted(3)),
    "conjugate": torch.complex(counted(3), -counted(3)).conj(),
    "odd values": torch.tensor([-0.0, torch.nan, torch.inf, 1e-45]),
}


@for_each("way", WAYS)
def test_tensors_arrive_as_they_were(way: str) -> None:
    with relays(way) as ends:
        for name, sent in TENSORS.items():
            found = passed(ends, Message([name], [sent]))
            (tensor,) = found.tensors
            assert tensor is not None
            assert (found.head, tensor.shape, tensor.dtype) == ([name], sent.shape, sent.dtype)
            assert not sent.numel() or tensor.stride() == sent.stride()
            assert bits(tensor).equal(bits(sent)), name
            # Autograd would refuse to have a view written to.
            assert not tensor._is_view()
        several = [TENSORS["bool"], None, TENSORS["plain"], None, TENSORS["empty"]]
        found = passed(ends, Message({"step": 3, "left": [None, 1.5, "x"]}, several))
        assert found.head == {"step": 3, "left": [None, 1.5, "x"]}
        assert [None if t is None else t.tolist() for t in found.tensors] == [
            None if t is None else t.tolist() for t in several
        ]
        assert passed(ends, Message("alone")) == Message("alone", [])


@for_each("way", WAYS)
def test_what_arrived_is_the_receivers_own(way: str) -> None:
    with relays(way) as ends:
        sent = torch.zeros(1000)
        ends[0].send(0, 1, Message(1, [sent]))
        ends[0].send(0, 1, Message(2, [sent + 1]))
        sent.fill_(5)
        # Written to, and kept, while the next one arrives.
        first, second = (ends[1].receive(1, 0).tensors[0] for _ in range(2))
        assert first is not None
        assert second is not None
        first.add_(3)
        gc.collect()
        assert (first.unique().tolist(), second.unique().tolist()) == ([3.0], [1.0])
        assert storage_order(first).numel() == 1000


@for_each("way", WAYS[1:])
def test_nobody_waits_until_it_is_taken(way: str) -> None:
    """As many messages as a line can have under way, each larger than what a socket holds."""
    count, numel = 8, 300_000
    with relays(way) as ends:

        def both_ways(rank: int) -> list[float]:
            for number in range(count):
                message = Message(number, [torch.full((numel,), number + 10.0 * rank)])
                ends[rank].send(rank, 1 - rank, message)
            found = [ends[rank].receive(rank, 1 - rank) for _ in range(count)]
            assert [message.head for message in found] == list(range(count))
            ends[rank].finish_sending()
            return [float(t.max()) for message in found for t in message.tensors if t is not None]

        wanted = [[10.0 + n for n in range(count)], [1.0 * n for n in range(count)]]
        assert together(2, both_ways) == wanted


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().reshape(-1).contiguous().view(torch.uint8)


def passed(ends: Ends, message: Message) -> Message:
    ends[0].send(0, 1, message)
    found = ends[1].receive(1, 0)
    ends[0].finish_sending()
    return found
