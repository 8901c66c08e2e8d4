"""Another user of this host, who tries things; and a process that only the test's user could be."""

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def fork(call: Callable[[], object]) -> int:
    """The id of a process of another user that makes a call; of this one where not root."""
    child = os.fork()
    if not child:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            call()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


@contextmanager
def somebody_trying(attack: Callable[[], Iterable[str]]) -> Iterator[list[str]]:
    """While it lasts, a process of another user that attacks again and again; needs root.

    Args:
        attack: tried many times; names what it has got hold of.

    Yields:
        A list that has, after the end, how often it was tried and all that it has got hold of.
    """
    reader, writer = os.pipe()

    def main() -> None:
        while True:
            for each in (*attack(), ""):  # the empty line counts
                os.write(writer, f"{each}\n".encode())
            time.sleep(0.01)

    child = fork(main)
    os.close(writer)
    said: list[str] = []
    lines: list[str] = []
    with os.fdopen(reader) as pipe:
        thread = threading.Thread(target=lambda: lines.extend(pipe))
        thread.start()
        try:
            yield said
        finally:
            ended, _ = os.waitpid(child, os.WNOHANG)
            assert not ended, "it has failed, see above"
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            thread.join()
    said += [str(lines.count("\n")), *sorted({line.strip() for line in lines} - {""})]
