"""Somebody in another network who stands between two devices: ``between.py HOST PORT LOW HIGH``.

HOST has the devices, PORT is that of the run's store. Device 1 takes him for the store, at HIGH: he
passes on what it says to the store and what that answers, but for addresses of the devices, in the
place of which he puts his own: LOW for device 0, HIGH for device 1, since the device with the
higher address calls the other one. There he passes on what they send each other, and says so.
"""

from __future__ import annotations

import functools
import re
import socket
import struct
import sys
import threading

from relayed import Change, pass_on

host, store_port, low, high = sys.argv[1:]
# Family, port and host, as gloo writes them; sealed values have them in hexadecimal.
PLAIN = re.compile(rb"\x02\x00(..)" + re.escape(socket.inet_aton(host)), re.DOTALL)
HEX = re.compile(rb"0200([0-9a-f]{4})" + socket.inet_aton(host).hex().encode())


def told(data: bytes) -> bytes:
    print("passed on", flush=True)
    return data


@functools.cache
def relay_at(own: str, port: int) -> bytes:
    """Family, port and host of a relay for one port of the devices."""
    listener = socket.create_server((own, 0))
    place = (host, port)
    threading.Thread(target=pass_on, args=(listener, place, told, told), daemon=True).start()
    return b"\2\0" + struct.pack(">H", listener.getsockname()[1]) + socket.inet_aton(own)


def replacing(own: str) -> Change:
    def replaced(found: re.Match[bytes]) -> bytes:
        hexadecimal = len(found[1]) == 4
        (port,) = struct.unpack(">H", bytes.fromhex(found[1].decode()) if hexadecimal else found[1])
        address = relay_at(own, port)
        print("replaced", flush=True)
        return address.hex().encode() if hexadecimal else address

    return lambda data: HEX.sub(replaced, PLAIN.sub(replaced, data))


with socket.create_server((high, int(store_port))) as server:
    print("ready", flush=True)
    pass_on(server, (host, int(store_port)), replacing(high), replacing(low))
