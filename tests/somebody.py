"""Another user of this host, who tries things; and a process that only the test's user could be."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextmanager
def somebody_else(call: Callable[..., object], path: Path, *arguments: Any) -> Iterator[None]:
    """While it lasts, a process of another user that has made a call; of this one where not root.

    Args:
        call: what it does first; it keeps what that has opened.
        path: its first argument; all folders above are opened for others to pass.
        arguments: more of them.
    """
    if os.geteuid() == 0:
        for folder in path.parents[:-2]:
            folder.chmod(folder.stat().st_mode | 0o011)
    ready, said = os.pipe()
    child = os.fork()
    if not child:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            call(path, *arguments)
            os.write(said, b"1")
            signal.pause()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(said)
    try:
        assert os.read(ready, 1), "it has failed, see above"
        yield
    finally:
        os.close(ready)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
