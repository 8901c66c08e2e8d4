"""Python in a container that refuses system calls: ``refusing.py ERRNO ARGUMENT ...``.

As a seccomp filter does; what is refused is inherited by all processes below.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys

_NUMBERS = {
    "x86_64": {"memfd_create": 319, "pidfd_send_signal": 424, "pidfd_open": 434},
    "aarch64": {"memfd_create": 279, "pidfd_send_signal": 424, "pidfd_open": 434},
}
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_SET_SECCOMP, _FILTER, _NO_NEW_PRIVILEGES = 22, 2, 38


def refuse(number: int) -> None:
    """Have the system calls fail with an error number from here on."""
    calls = _NUMBERS[platform.machine()].values()
    lines = [struct.pack("HBBI", _LOAD, 0, 0, 0)]
    lines += [struct.pack("HBBI", _IF_EQUAL, len(calls) - n, 0, c) for n, c in enumerate(calls)]
    lines += [struct.pack("HBBI", _RETURN, 0, 0, _ALLOW)]
    lines += [struct.pack("HBBI", _RETURN, 0, 0, _ERRNO | number)]
    text = ctypes.create_string_buffer(b"".join(lines))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(lines), ctypes.addressof(text))
    )
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or library.prctl(
        _SET_SECCOMP, _FILTER, program, 0, 0
    ):
        raise OSError(ctypes.get_errno(), "expected to be able to set a filter")


if __name__ == "__main__":
    refuse(int(sys.argv[1]))
    with contextlib.suppress(OSError):
        os.pidfd_open(os.getpid())
        raise AssertionError("it is not refused")
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
