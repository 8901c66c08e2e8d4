from __future__ import annotations

import hashlib
import http.server
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from onefold.data.fetch import SETS, RemoteSet, fetch_dataset
from onefold.errors import DataError

FILES = {"images.gz": b"images" * 1000, "labels.gz": b"labels"}
SUMS = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


def send(content: bytes, *, length_bytes: int | None = None, status: int = 200) -> Answer:
    """Answer with this content, announced with another length if one is given."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(length_bytes or len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def drip(handler: http.server.BaseHTTPRequestHandler) -> None:
    """Answer byte after byte, for longer than the test waits."""
    handler.send_response(200)
    handler.end_headers()
    end = time.monotonic() + 2
    while time.monotonic() < end:
        try:
            handler.wfile.write(b".")
        except OSError:  # nobody listens any more
            return
        time.sleep(0.05)


def drip_headers(handler: http.server.BaseHTTPRequestHandler) -> None:
    """Answer with headers, byte after byte, each of which ends the wait of a socket."""
    end = time.monotonic() + 2
    with suppress(OSError):  # nobody listens any more
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while time.monotonic() < end:
            handler.wfile.write(b".")
            time.sleep(0.05)
        handler.wfile.write(b"\r\n\r\n")


def lead_to(address: str) -> Answer:
    """Answer that what is asked for lies elsewhere."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", address)
        handler.end_headers()

    return answer


def hang_up(handler: http.server.BaseHTTPRequestHandler) -> None:
    """Answer nothing at all."""
    handler.connection.shutdown(socket.SHUT_RDWR)


class Server:
    """An HTTP server on this machine that notes what it is asked for."""

    def __init__(self) -> None:
        self.answers = {f"/{name}": send(content) for name, content in FILES.items()}
        self.asked: list[str] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append(self.path)
                server.answers.get(self.path, send(b"", status=404))(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()
        self.address = f"http://127.0.0.1:{self.http.server_port}/"

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture(autouse=True)
def _without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def mirror() -> Iterator[Server]:
    """A second server."""
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def nobody() -> str:
    """An address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/"


def fetch(cache: Path, *mirrors: str, timeout_s: float = 10) -> Path:
    """Fetch the set of this test."""
    return fetch_dataset(
        "small",
        cache,
        sets={"small": RemoteSet(mirrors=mirrors, sums=SUMS)},
        timeout_s=timeout_s,
    )


def contents(folder: Path) -> dict[str, bytes]:
    """All that lies in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_missing_is_fetched(tmp_path: Path, server: Server) -> None:
    cache = tmp_path / "made" / "cache"
    folder = fetch(cache, server.address)
    assert folder == cache / "small"
    assert contents(folder) == FILES
    (folder / "labels.gz").unlink()
    assert fetch(cache, server.address) == fetch(cache, server.address) == folder
    assert server.asked == ["/images.gz", "/labels.gz", "/labels.gz"]


def test_files_put_there_by_hand_need_no_network(tmp_path: Path, nobody: str) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    assert fetch(tmp_path, nobody) == folder


FAULTS = {
    "not there": (send(b"", status=404), "HTTP 404 Not Found"),
    "busy": (send(b"busy", status=503), "HTTP 503 Service Unavailable"),
    "cut short": (send(b"half", length_bytes=8), "expected 8 bytes as announced, got 4|Incomplete"),
    "something else": (
        send(b"<html>log in</html>"),
        f"expected SHA-256 {SUMS['images.gz']}, got [0-9a-f]{{64}} of 19 bytes",
    ),
    "no answer": (hang_up, "closed connection|Connection reset"),
    "slow head": (drip_headers, r"expected the whole file within 0\.5 s, got 0 bytes"),
    "too slow": (drip, r"expected the whole file within 0\.5 s, got \d+ bytes"),
    "to a file": (lead_to("file:///etc/passwd"), "url 'file:///etc/passwd' is not allowed"),
    "to ftp": (lead_to("ftp://127.0.0.1/x"), "led on by http, got 'ftp://"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_mirror_that_fails_is_named_and_the_next_one_tried(
    tmp_path: Path, server: Server, mirror: Server, nobody: str, kind: str
) -> None:
    fault, complaint = FAULTS[kind]
    server.answers["/images.gz"] = fault
    with pytest.raises(DataError, match=complaint) as error:
        fetch(tmp_path, nobody, server.address, timeout_s=0.5)
    first, refused, failed, advice = str(error.value).splitlines()
    assert first == "images.gz could not be fetched:"
    assert re.fullmatch(rf"  {nobody}images\.gz: .*Connection refused", refused)
    assert failed.startswith(f"  {server.address}images.gz: ")
    folder = tmp_path / "small"
    assert advice.endswith(f"put the files by hand in {folder}: images.gz, labels.gz")
    assert contents(folder) == {}
    server.asked.clear()
    assert contents(fetch(tmp_path, server.address, mirror.address, timeout_s=0.5)) == FILES
    assert (server.asked, mirror.asked) == (["/images.gz", "/labels.gz"], ["/images.gz"])


def test_a_server_that_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(
            DataError, match=f"{address}images.gz: expected the whole file within 0.2 s"
        ):
            fetch(tmp_path, address, timeout_s=0.2)


def test_a_server_that_greets_without_end_is_not_waited_for(tmp_path: Path) -> None:
    def greet() -> None:
        line, _ = listening.accept()
        end = time.monotonic() + 5
        with line, suppress(OSError):  # nobody listens any more
            line.sendall(b"\x16\x03\x03\x40\x00")  # of TLS: a message of 16,384 bytes follows
            while time.monotonic() < end:
                line.sendall(b"\x02")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=greet)
        thread.start()
        address = f"https://127.0.0.1:{listening.getsockname()[1]}/"
        with pytest.raises(DataError, match=r"expected the whole file within 0\.5 s, got 0 bytes"):
            fetch(tmp_path, address, timeout_s=0.5)
        thread.join()


def test_an_address_of_a_file_is_none_to_fetch_from(tmp_path: Path) -> None:
    (tmp_path / "images.gz").write_bytes(FILES["images.gz"])
    with pytest.raises(DataError, match="unknown url type: file"):
        fetch(tmp_path / "cache", f"file://{tmp_path}/")


def test_a_pipe_in_the_cache_is_not_waited_for(tmp_path: Path, nobody: str) -> None:
    (tmp_path / "small").mkdir()
    os.mkfifo(tmp_path / "small" / "images.gz")
    with pytest.raises(OSError, match="expected a file, got a FIFO or a device"):
        fetch(tmp_path, nobody)


def test_another_file_that_is_there_is_refused_and_left(tmp_path: Path, server: Server) -> None:
    path = fetch(tmp_path, server.address) / "labels.gz"
    path.write_bytes(b"mine")
    got = hashlib.sha256(b"mine").hexdigest()
    complaint = f"{path}: expected a file with SHA-256 {SUMS['labels.gz']}, got {got}; remove it"
    with pytest.raises(DataError, match=re.escape(complaint)):
        fetch(tmp_path, server.address)
    assert path.read_bytes() == b"mine"
    assert len(server.asked) == 2


def test_a_set_of_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="expected a data set of mnist, fashion-mnist, got 'mnits'"
    ):
        fetch_dataset("mnits", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_known_sets_are_the_four_files_of_mnist_each() -> None:
    names = [f"{part}-idx3-ubyte.gz" for part in ("train-images", "t10k-images")]
    names += [f"{part}-idx1-ubyte.gz" for part in ("train-labels", "t10k-labels")]
    for known in SETS.values():
        assert set(known.sums) == set(names)
        assert all(re.fullmatch("https?://.*/", mirror) for mirror in known.mirrors)
    sums = {each for known in SETS.values() for each in known.sums.values()}
    assert len([each for each in sums if re.fullmatch("[0-9a-f]{64}", each)]) == 8
