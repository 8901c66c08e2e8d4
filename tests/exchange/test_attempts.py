"""One name for all processes of an attempt, though the launcher's store keeps earlier attempts."""

from dataclasses import replace

import pytest
from torch.distributed import HashStore, TCPStore

from onefold.core.options import LaunchContext
from onefold.errors import PeerTimeout
from onefold.exchange import group
from onefold.exchange.attempts import agree_on_attempt
from onefold.exchange.group import Rendezvous
from onefold.launcher.environment import read_context
from tests.exchange.together import together
from tests.launcher.test_environment import TORCHRUN


def context(rank: int, size: int) -> LaunchContext:
    return LaunchContext(rank=rank, size=size, launcher="torch", agent_store=True, one_host=False)


def test_each_attempt_has_a_name_of_its_own() -> None:
    store = HashStore()
    names = []
    for size in (3, 3, 2, 4):

        def agreed(rank: int, size: int = size) -> str:
            return agree_on_attempt(store, context(rank, size), size, 20)

        found = together(size, agreed)
        assert len({*found}) == 1
        names.append(found[0])
    assert len({*names}) == 4


def test_a_process_of_an_earlier_attempt_does_not_count() -> None:
    store = HashStore()
    together(2, lambda rank: agree_on_attempt(store, context(rank, 2), 2, 20))
    with pytest.raises(PeerTimeout, match="device 1"):
        agree_on_attempt(store, context(0, 2), 2, 0.3)


@pytest.mark.parametrize("secret", ["", "0" * 32])
def test_hosts_that_count_restarts_differently_meet(secret: str) -> None:
    """torchrun counts a restart on the host that failed, and not on the others."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    hosts = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "ONEFOLD_SECRET": secret}
    hosts |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    hosts |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}
    for counts in (("0", "0"), ("1", "0")):

        def gather(rank: int, counts: tuple[str, str] = counts) -> list[str]:
            place = {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": counts[rank]}
            found = read_context({**hosts, **place})
            # A process of its own, which has no store yet.
            meeting = Rendezvous(replace(found, directory=str(counts)), 2, 20)
            # Python 3.11 computes a cached property in one thread at a time.
            vars(meeting)["store"] = Rendezvous.store.func(meeting)  # type: ignore[attr-defined]
            return meeting.all_gather("counts", counts[rank])

        assert together(2, gather) == [[*counts]] * 2
    group._stores.clear()
