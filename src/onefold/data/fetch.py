"""Fetches data sets of known content over the network, once, into a folder that is kept.

The SHA-256 of every file is known beforehand, so it does not matter where a file comes from or who
put it there.

Note: a limit for the whole
---------------------------
The timeout of a socket holds for each wait alone, so a server that sends a byte now and then can
keep a client for ever: in the TLS handshake, in its headers, or in the content. So a clock runs
beside all of it, and cuts the connection when the time is up.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from onefold.data.files import open_regular
from onefold.errors import DataError
from onefold.system.ownfiles import write_whole

__all__ = ["fetch_dataset"]

_CHUNK_BYTES = 1 << 20
_LARGEST_BYTES = 1 << 28
"""Of one file: a server that never stops must not fill the memory before its sum is checked."""
_LONGEST_SILENCE_S = 30.0
"""A server that sends nothing for so long is given up, and the next mirror is tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteSet:
    """Files that lie under the same names at several addresses."""

    mirrors: tuple[str, ...]
    """Addresses of folders, each with a slash at its end, in the order in which they are tried."""
    sums: Mapping[str, str]
    """SHA-256 of each file, by its name."""


SETS: Mapping[str, RemoteSet] = {
    "mnist": RemoteSet(
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        sums={
            "train-images-idx3-ubyte.gz": (
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
            ),
            "train-labels-idx1-ubyte.gz": (
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
            ),
            "t10k-images-idx3-ubyte.gz": (
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
            ),
            "t10k-labels-idx1-ubyte.gz": (
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
            ),
        },
    ),
    "fashion-mnist": RemoteSet(
        mirrors=(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            # This one has no HTTPS; the sums below make up for it.
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
        sums={
            "train-images-idx3-ubyte.gz": (
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"
            ),
            "train-labels-idx1-ubyte.gz": (
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"
            ),
            "t10k-images-idx3-ubyte.gz": (
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"
            ),
            "t10k-labels-idx1-ubyte.gz": (
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"
            ),
        },
    ),
}
"""The data sets that can be fetched, by name."""


def fetch_dataset(
    name: str, cache: Path, *, sets: Mapping[str, RemoteSet] = SETS, timeout_s: float = 600.0
) -> Path:
    """Fetch the files of a data set that are not there yet, and return its folder.

    Several processes may do so at the same time: each writes aside and renames what it has.

    Args:
        name: name of the data set, ``"mnist"`` or ``"fashion-mnist"``.
        cache: holds one folder for each data set; made if it is missing.
        sets: the data sets that are known.
        timeout_s: the longest time for one file from one address, connecting included.

    Returns:
        ``cache/name``, where every file has the right SHA-256.

    Raises:
        ValueError: no data set has that name.
        DataError: a file that is there has another SHA-256, and is left as it is; or a missing
            file could not be fetched from any address.
        OSError: the folder cannot be written.
    """
    if name not in sets:
        raise ValueError(f"expected a data set of {', '.join(sets)}, got {name!r}")
    folder, wanted = cache / name, sets[name]
    folder.mkdir(parents=True, exist_ok=True)
    # All are checked before the first is fetched: a wrong file ends this without a download.
    missing = [file for file in wanted.sums if not _is_there(folder / file, wanted.sums[file])]
    for file in missing:
        write_whole(folder / file, _fetch(file, wanted, folder, timeout_s))
    return folder


def _is_there(path: Path, expected: str) -> bool:
    """Return whether a file is there.

    Raises:
        DataError: the file is there, and has another SHA-256.
    """
    if not path.exists():
        return False
    with open_regular(path) as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    # Not replaced without a word: it may be somebody's own data under the same name.
    if got != expected:
        raise DataError(
            f"{path}: expected a file with SHA-256 {expected}, got {got}; "
            f"remove it and it is fetched again"
        )
    return True


def _fetch(file: str, wanted: RemoteSet, folder: Path, timeout_s: float) -> bytes:
    """Return a file's content from the first address that has the right one."""
    failures = []
    for mirror in wanted.mirrors:
        try:
            content = _download(mirror + file, timeout_s)
            _check_sum(content, wanted.sums[file])
            return content
        except (OSError, http.client.HTTPException, ValueError) as failure:
            failures.append(f"  {mirror}{file}: {_told(failure)}")
    tried = "\n".join(failures)
    raise DataError(
        f"{file} could not be fetched:\n{tried}\n"
        f"check the network, or put the files by hand in {folder}: {', '.join(wanted.sums)}"
    )


def _download(address: str, timeout_s: float) -> bytes:
    """Return the whole answer of an address, if it comes within the time.

    Raises:
        TimeoutError: the answer takes longer.
        OSError, http.client.HTTPException: the connection fails.
        ValueError: the answer is too long, or not as long as announced.
    """
    content = bytearray()
    with _limited(timeout_s) as limit:
        try:
            _receive(address, limit, content)
        # Cutting the connection makes whoever reads from it raise, or see an early end: once the
        # time is up, that is the reason, and not what was raised.
        except (OSError, http.client.HTTPException, ValueError):
            if not limit.is_up:
                raise
        if limit.is_up:
            raise TimeoutError(
                f"expected the whole file within {timeout_s:g} s, got {len(content)} bytes"
            )
    return bytes(content)


def _receive(address: str, limit: _Limit, content: bytearray) -> None:
    with _opener(limit).open(address, timeout=limit.left_s) as answer:
        promised = answer.headers.get("Content-Length")
        # read1 returns what has come; read would wait until a whole chunk is there.
        while piece := answer.read1(_CHUNK_BYTES):
            content += piece
            if len(content) > _LARGEST_BYTES:
                raise ValueError(f"expected at most {_LARGEST_BYTES} bytes, got more")
    # http.client takes a connection that ends early for the end of the file, if read by read1.
    if promised is not None and promised != str(len(content)):
        raise ValueError(f"expected {promised} bytes as announced, got {len(content)}")


class _Limit:
    """Cuts the connections of a download when its time is up.

    `cut` may run in the clock's thread; everything else runs in the one that downloads.
    """

    def __init__(self, timeout_s: float) -> None:
        self.is_up = False
        self._end_s = time.monotonic() + timeout_s
        self._lines: list[socket.socket] = []
        self._changing = threading.Lock()

    @property
    def left_s(self) -> float:
        """How long a single wait may take.

        A second longer than the whole may, so that a late file is reported as such, and not as a
        silent socket.
        """
        return min(max(self._end_s - time.monotonic(), 0.0) + 1.0, _LONGEST_SILENCE_S)

    def watch(self, line: socket.socket) -> None:
        """Add a connection to those that are cut when the time is up."""
        with self._changing:
            # A descriptor of our own for the same connection: wrapping a socket for TLS detaches
            # it, and a number that was closed may stand for another file of the process by now.
            self._lines.append(socket.socket(fileno=os.dup(line.fileno())))
        # The clock may have gone off while this connected. As `cut` sets the flag before it takes
        # the lock, either it finds this line in the list, or the flag is seen here.
        if self.is_up:
            self.cut()

    def cut(self) -> None:
        """Wake up whoever waits for one of the connections."""
        # Set first: whoever wakes up looks at it at once.
        self.is_up = True
        with self._changing:
            for line in self._lines:
                # It may have ended by itself. Shut down and not closed: closing a descriptor does
                # not wake a thread that waits in recv, and TLS holds another one anyway.
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptors of all connections."""
        with self._changing:
            for line in self._lines:
                line.close()
            self._lines.clear()


@contextmanager
def _limited(timeout_s: float) -> Iterator[_Limit]:
    limit = _Limit(timeout_s)
    clock = threading.Timer(timeout_s, limit.cut)
    # A program that ends while another of its threads downloads must not wait for the clock.
    clock.daemon = True
    clock.start()
    try:
        yield limit
    finally:
        clock.cancel()
        # Before closing: a cut that has begun still uses the descriptors.
        clock.join()
        limit.close()


class _Connection(http.client.HTTPConnection):
    """A connection that is cut when the time is up."""

    limit: _Limit

    def connect(self) -> None:
        # Again for each connection: a redirection makes a new one, with less time left.
        self.timeout = self.limit.left_s
        super().connect()
        self.limit.watch(self.sock)


class _SecureConnection(http.client.HTTPSConnection, _Connection):
    """A connection with TLS that is cut when the time is up.

    The bases are in this order so that HTTPSConnection.connect calls `_Connection.connect` for the
    plain connection, which is therefore watched before the handshake begins.
    """


def _connect(kind: type[_Connection], limit: _Limit, /, *args: Any, **options: Any) -> _Connection:
    connection = kind(*args, **options)
    connection.limit = limit
    return connection


class _Limited:
    """A handler whose connections share one time limit."""

    def __init__(self, limit: _Limit) -> None:
        super().__init__()
        self._limit = limit


class _Handler(_Limited, urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(partial(_connect, _Connection, self._limit), request)


class _SecureHandler(_Limited, urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(partial(_connect, _SecureConnection, self._limit), request)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirection, unless it leads to something less safe."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        # From https to http, anybody on the way could read along; file: would be a local file.
        kind = urllib.parse.urlsplit(newurl).scheme
        if kind not in {"https", req.type}:
            raise ValueError(f"expected to be led on by {req.type}, got {newurl!r:.100}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener(limit: _Limit) -> urllib.request.OpenerDirector:
    """Make an opener of http and https addresses alone."""
    # Put together by hand: build_opener would add handlers for file:, ftp: and data:.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        _Handler(limit),
        _SecureHandler(limit),
        _Redirects(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _check_sum(content: bytes, expected: str) -> None:
    got = hashlib.sha256(content).hexdigest()
    if got != expected:
        raise ValueError(f"expected SHA-256 {expected}, got {got} of {len(content)} bytes")


def _told(failure: Exception) -> str:
    """Describe a failure in one line."""
    # It is a response as well as an exception, and its socket stays open until it is closed.
    if isinstance(failure, urllib.error.HTTPError):
        failure.close()
        return f"HTTP {failure.code} {failure.reason}"
    if isinstance(failure, urllib.error.URLError):
        return str(failure.reason)
    return str(failure) or type(failure).__name__
