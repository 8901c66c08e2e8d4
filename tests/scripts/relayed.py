"""One of two devices between which somebody stands: ``relayed.py RANK SECRET KIND``.

He has the store, and replaces what is read from it: with KIND ``address`` the address of the other
device by that of a relay, with ``kind`` a device's kind of device, with ``nothing`` nothing. With
``unsealed`` he knows how to seal an address, so only the proof is left. ``relayed.py PORT`` is the
relay.
"""

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

LOCALHOST = socket.inet_aton("127.0.0.1")
Change = Callable[[bytes], bytes]


def same(data: bytes) -> bytes:
    return data


def carry(one: socket.socket, other: socket.socket, change: Change) -> None:
    with suppress(OSError):
        while data := one.recv(65536):
            other.sendall(change(data))
        other.shutdown(socket.SHUT_WR)


def pass_on(
    listener: socket.socket, place: tuple[str, int], forth: Change = same, back: Change = same
) -> None:
    """Pass on what comes at a listener to a place, and back what that says; for ever."""
    while True:
        here, _ = listener.accept()
        there = socket.create_connection(place)
        for ends in ((here, there, forth), (there, here, back)):
            threading.Thread(target=carry, args=ends, daemon=True).start()


def channel(port: int) -> None:
    """Pass on, in both directions, what comes on a port of its own, which is printed."""
    # The end with the smaller address waits for the other one: so it must stay the smaller one.
    near = port + 1
    while True:
        try:
            listener = socket.create_server(("127.0.0.1", near))
            break
        except OSError:  # it is taken
            near += 1
    print(near, flush=True)
    sys.stdin.close()
    pass_on(listener, ("127.0.0.1", port))


def main(rank: int, secret: str, kind: str) -> None:
    import torch.distributed as dist

    from onefold.core.options import LaunchContext
    from onefold.errors import DisagreementError
    from onefold.exchange import group

    relays: list[subprocess.Popen[str]] = []

    def replaced(key: str, value: bytes) -> bytes:
        if kind == "kind" and key.endswith("kind/1"):
            return b"cpu"
        sealed = value.startswith(b"onefold-sealed:")
        text = bytes.fromhex(value[15 + 64 :].decode()) if sealed else value
        # gloo's address: family, port, host.
        at = text.find(LOCALHOST)
        if kind in ("address", "unsealed") and at >= 4 and text[at - 4 : at - 2] == b"\x02\0":
            (port,) = struct.unpack(">H", text[at - 2 : at])
            command = [sys.executable, __file__, str(port)]
            relays.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert relays[-1].stdout
            new = struct.pack(">H", int(relays[-1].stdout.readline()))
            return text[: at - 2] + new + text[at:]
        return value

    class Taken(dist.Store):
        """A store that another one has taken over."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def get(self, key: str) -> bytes:
            return replaced(key, self.inner.get(key))

        def set(self, key: str, value: str) -> None:
            self.inner.set(key, value)

        def add(self, key: str, amount: int) -> int:
            return int(self.inner.add(key, amount))

        def check(self, keys: list[str]) -> bool:
            return bool(self.inner.check(keys))

        def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=20)) -> None:
            self.inner.wait(keys, timeout)

    taken = Taken(dist.FileStore("store", 2))
    group.reach_store = lambda *_: taken  # type: ignore[assignment]
    if kind == "unsealed":
        group.SealedStore = lambda store, *_: store  # type: ignore[misc, assignment]
    context = LaunchContext(
        run_id="run",
        launcher="torch",
        rank=rank,
        size=2,
        secret=secret,
        one_host=False,
        address="127.0.0.1:29500",
    )
    try:
        meeting = group.Rendezvous(context, 2, 20)
        group.agree_on_devices(meeting, "cpu")
        joined = group.join_group(meeting, "cpu", trainer=0)
        print("joined", group.all_gather_objects(joined.group, str(rank).encode()), flush=True)
    except (RuntimeError, DisagreementError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    for each in relays:
        each.kill()
        each.wait()
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        channel(int(sys.argv[1]))
    else:
        main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
