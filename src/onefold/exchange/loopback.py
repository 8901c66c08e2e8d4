"""Keeps a process group of one host on that host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from onefold.core.world import World

__all__ = ["gloo_on_loopback"]

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@contextmanager
def gloo_on_loopback(world: World) -> Iterator[None]:
    """Where all processes are on one host, gloo opens no port in here that other hosts could reach.

    What the user has said about it stands.
    """
    if not world.one_host or _GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[_GLOO_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]
