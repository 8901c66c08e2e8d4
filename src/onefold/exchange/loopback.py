"""Keeps the connections of a single-host process group on that host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from onefold.core.world import World

__all__ = ["gloo_on_loopback"]

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@contextmanager
def gloo_on_loopback(world: World) -> Iterator[None]:
    """Keep gloo from opening ports that other hosts can reach, if all processes are on one host.

    A choice that the user has made in the environment takes precedence.
    """
    if not world.one_host or _GLOO_INTERFACE in os.environ:
        yield
        return
    # gloo reads the variable while a group is made, and init_process_group has no argument for it.
    # It is removed again, as programs that the script starts may make groups of their own.
    os.environ[_GLOO_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]
