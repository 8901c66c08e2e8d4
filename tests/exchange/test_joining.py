"""Which memory and transport a run gets, and what is compared before anything is shared."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from onefold.core.assignment import Devices
from onefold.core.options import LaunchContext, RunOptions
from onefold.errors import DisagreementError, PeerFailed
from onefold.exchange import others
from onefold.exchange.exchange import Exchange, join
from onefold.exchange.mailbox import connected
from onefold.exchange.shared import SharedMemory, SharedTransport
from onefold.system import accelerator
from tests.exchange.contract import assignment, start, storage
from tests.exchange.together import CPU, LIMIT_S, endings, together, worlds
from tests.tables import for_each

CUDA = torch.device("cuda", 0)


def joined(
    context: LaunchContext,
    compare: Callable[[Sequence[bytes]], None] = lambda _: None,
    device: torch.device = CPU,
) -> Exchange:
    sizes = storage(context.size)
    devices = (device,) * context.size
    return join(
        sizes,
        start(context.rank, sizes),
        assignment(sizes),
        Devices(all=devices, own=(context.rank,), context=context, trainer=0),
        description=bytes([65 + context.rank]) * (1 + 50_000 * context.rank),
        compare=compare,
        timeout_s=LIMIT_S,
    )


@for_each(("asked", "launcher"), [("auto", "onefold"), ("shared", "onefold"), ("auto", "torch")])
def test_one_host_shares_memory(asked: Any, launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[str] = []
    connect = connected

    def noted(address: str, *options: Any) -> object:
        addresses.append(address)
        return connect(address, *options)

    monkeypatch.setattr(others, "connected", noted)
    seen: dict[int, list[int]] = {}
    with worlds(2, options=RunOptions(exchange=asked)) as made:
        made = [replace(context, launcher=launcher) for context in made]
        for exchange in together(
            2, lambda r: joined(made[r], lambda all_of: seen.update({r: [len(d) for d in all_of]}))
        ):
            assert (type(exchange.memory), type(exchange.transport)) == (
                SharedMemory,
                SharedTransport,
            )
            exchange.close()
    assert seen == {0: [1, 50_001], 1: [1, 50_001]}
    one, other = addresses
    assert one == other
    # The number of a run of torchrun is known to all on the host: a name is drawn instead.
    assert launcher == "onefold" or (made[0].run_id not in one and len(one) >= 32)


def refuse_memory(*_: object) -> None:
    raise OSError(12, "expected some bytes of memory")


@for_each(
    ("error", "theirs", "words"),
    [
        (DisagreementError("device 1 has another model"), DisagreementError, "^device 1 has an"),
        (MemoryError("no room"), PeerFailed, "^device 0 failed in step 1: MemoryError: no room$"),
        (None, PeerFailed, "^device 0 failed in step 1: OSError: .* expected some bytes"),
    ],
)
def test_what_the_lead_finds_or_lacks_ends_all(
    error: Exception | None, theirs: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if error is None:
        monkeypatch.setattr("onefold.exchange.shared.new_file", refuse_memory)

    def refuse(descriptions: Sequence[bytes]) -> None:
        if error is not None:
            raise error

    before = len(os.listdir("/proc/self/fd"))
    with worlds(2) as made:
        first, second = endings(
            2, lambda rank: joined(made[rank], refuse if rank == 0 else lambda _: None)
        )
    assert first is error or isinstance(first, OSError)
    with pytest.raises(theirs, match=words):
        raise second or AssertionError("it has not ended")
    assert len(os.listdir("/proc/self/fd")) <= before


@for_each(("device", "one_host"), [(CUDA, True), (CPU, False), (CUDA, False)])
def test_memory_that_cannot_be_shared_is_refused(
    device: torch.device, one_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(others, "agree_on_devices", lambda *_: None)
    monkeypatch.setattr(accelerator, "card_of", lambda device: "")
    context = LaunchContext(
        size=2, local_size=2, one_host=one_host, options=RunOptions(exchange="shared")
    )
    words = "the shared exchange is for CPU processes of one host; use --exchange collective"
    with pytest.raises(ValueError, match=words):
        joined(context, device=device)
