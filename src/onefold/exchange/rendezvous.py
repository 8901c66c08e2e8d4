"""Makes the store through which processes of another launcher find each other.

A name may not resolve, or a port refuse, only because the lead's machine is not up yet. So neither
ends the wait, but both are named while it lasts.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # it is exported

from onefold.core.world import World
from onefold.errors import LaunchError, PeerTimeout
from onefold.exchange.waiting import FIRST_S, Waiting

__all__ = ["reach_store"]

_TRY_S, _STORE_S = 5.0, 30.0
_PAUSE_S = 0.1


def reach_store(world: World, timeout_s: float, *, first_s: float = FIRST_S) -> Store:
    """Serve the store, if this is the lead and its launcher does not, or connect to it.

    Raises:
        LaunchError: the port is taken, or the host has an impossible name.
        PeerTimeout: nobody serves the store at its address.
    """
    host, _, port = world.address.rpartition(":")
    place = (host.strip("[]"), int(port))
    if world.rank == 0 and not world.agent_store:
        return _serve(world, place, timeout_s)
    waiting = Waiting(world.rank, first_s=first_s, host_has_others=world.local_rank > 0)
    limit = time.monotonic() + timeout_s
    while isinstance(found := _connected(place, timeout_s), str):
        if time.monotonic() > limit:
            raise PeerTimeout(
                f"device {world.rank} did not reach device 0 at {world.address} within "
                f"{timeout_s:g} s: {found}. Expected MASTER_ADDR to be the machine of device 0, by "
                f"a name or address that every machine knows, and MASTER_PORT to be open there",
                device=0,
                step=0,
            )
        words = f"device 0 cannot be reached at {world.address}, as {found}"
        waiting.look(lambda words=words: words)  # type: ignore[misc]
        time.sleep(_PAUSE_S)
    return found


def _connected(place: tuple[str, int], timeout_s: float) -> Store | str:
    """The store that is served at an address, or why it cannot be had."""
    try:
        # PyTorch says nothing until its own limit, so Python tries first.
        with socket.create_connection(place, timeout=_TRY_S):
            pass
    except UnicodeError:
        raise LaunchError(
            f"expected the name of a machine in MASTER_ADDR, got {place[0]}"
        ) from None
    except socket.gaierror as error:
        return f"the name {place[0]} does not resolve on {socket.gethostname()} ({error.strerror})"
    except ConnectionRefusedError:
        return "nobody listens at this port yet"
    except OSError as error:
        return f"nobody answers ({error.strerror or error}; is there a firewall?)"
    made: list[Store] = []

    def make() -> None:
        limit = timedelta(seconds=timeout_s)
        with suppress(RuntimeError):
            made.append(TCPStore(*place, timeout=limit, wait_for_workers=False))

    # A thread, as PyTorch waits without a limit for the answer of a stranger at the port.
    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(min(_STORE_S, timeout_s))
    return made[0] if made else "what listens there is no store of PyTorch"


def _serve(world: World, place: tuple[str, int], timeout_s: float) -> Store:
    host, port = place
    try:
        with socket.create_server((host, 0)):
            pass
    except OSError:
        host = "127.0.0.1"  # the others' address is none of this machine, but a service's, say
    try:
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # who is missing is seen by what they write
            multi_tenant=True,  # the script may have made a store there
        )
    except RuntimeError as error:
        raise LaunchError(
            f"device 0 cannot let the others join at {world.address}: {error}. Expected "
            f"MASTER_PORT to be a port that is free on its machine"
        ) from None
