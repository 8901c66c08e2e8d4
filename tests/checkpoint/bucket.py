"""A bucket of a local S3 server, behind a connection that is slow, or gone for a while."""

import asyncio
import importlib.util
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec
import fsspec.asyn
import pytest

from tests.launcher.test_other_launchers import free_port

NEEDS = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("moto", "s3fs", "flask"))),
    reason="needs a local S3 server: the extra [s3-server]",
)
_CHUNK_BYTES = 1 << 14


class Line(socketserver.ThreadingTCPServer):
    """Connects clients with the server."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int) -> None:
        self.target = port
        self.gone = False
        """Whether connections are refused, and cut where they are open."""
        self.pause_s = 0.0
        """Pause after each chunk that a client sends."""
        self.sent_bytes = 0
        """What clients have sent so far."""
        super().__init__(("127.0.0.1", 0), _Connection)

    @contextmanager
    def cut(self, seconds: float) -> Iterator[None]:
        """Have the server gone for a while, from when the block begins."""
        self.gone = True

        def come_back() -> None:
            time.sleep(seconds)
            self.gone = False

        back = threading.Thread(target=come_back)
        back.start()
        yield
        back.join()


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        line = self.server
        assert isinstance(line, Line)
        if line.gone:
            return
        with socket.create_connection(("127.0.0.1", line.target)) as server:
            back = threading.Thread(target=self._answer, args=(server,), daemon=True)
            back.start()
            with suppress(OSError):
                while (data := self.request.recv(_CHUNK_BYTES)) and not line.gone:
                    server.sendall(data)
                    line.sent_bytes += len(data)
                    time.sleep(line.pause_s)
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            back.join(10)

    def _answer(self, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(_CHUNK_BYTES):
                self.request.sendall(data)
            self.request.shutdown(socket.SHUT_WR)


class Bucket:
    """The bucket that tests use.

    Args:
        line: the connection to its server.
    """

    def __init__(self, line: Line) -> None:
        self.line = line
        self.variables = {
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
            # A name, as real ones have: names are resolved by threads, which end early.
            "AWS_ENDPOINT_URL": f"http://localhost:{line.server_address[1]}",
        }

    def files(self) -> fsspec.AbstractFileSystem:
        """The file system of this process, with nothing remembered."""
        found = fsspec.filesystem("s3")
        found.invalidate_cache()
        return found

    def complete(self, run: str) -> dict[str, list[str]]:
        """The files of each checkpoint of a run that has a ``run.json``, by its name."""
        names = [each.removeprefix(f"bucket/{run}/") for each in self.files().find(f"bucket/{run}")]
        folders = {name.partition("/")[0] for name in names if name.endswith("/run.json")}
        return {each: [n for n in names if n.startswith(f"{each}/")] for each in folders}


@contextmanager
def served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A server with an empty bucket; its variables are set in this process."""
    port = free_port()
    with (folder / "server.txt").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log,
            stderr=log,
        )
    line = Line(port)
    threading.Thread(target=line.serve_forever, daemon=True).start()
    try:
        bucket = Bucket(line)
        for name, value in bucket.variables.items():
            monkeypatch.setenv(name, value)
        _wait_for(port)
        fsspec.filesystem("s3").mkdir("bucket")
        yield bucket
    finally:
        line.shutdown()
        line.server_close()
        server.kill()
        server.wait()
        _end_threads()


def _end_threads() -> None:
    """End connections and threads of fsspec, which otherwise last as long as the process."""
    loop, thread = fsspec.asyn.loop[0], fsspec.asyn.iothread[0]
    for files in fsspec.get_filesystem_class("s3")._cache.values():
        fsspec.asyn.sync(loop, files._s3creator.__aexit__, None, None, None, timeout=10)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    fsspec.asyn.loop[0] = fsspec.asyn.iothread[0] = None


def _wait_for(port: int) -> None:
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise TimeoutError(f"no S3 server at port {port}, process {os.getpid()}")
