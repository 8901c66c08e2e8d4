import hashlib
import http.server
import re
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("pooch", reason='needs pip install "onefold-jobs[images]"')

from onefold.errors import DataError, LaunchError
from onefold_jobs.data.fetch import RemoteSet, fetch_dataset
from tests.jobs.server import Answer, Server, send, serving

FILES = {"images.gz": b"images" * 1000, "labels.gz": b"labels"}
SUMS = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}


def drip(piece: bytes) -> Answer:
    """Answer with this piece over and over, each of which ends the wait of a socket."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        end = time.monotonic() + 2
        with suppress(OSError):  # nobody listens any more
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while time.monotonic() < end:
                handler.wfile.write(piece)
                time.sleep(0.05)

    return answer


def say_nothing(handler: http.server.BaseHTTPRequestHandler) -> None:
    time.sleep(0.6)  # longer than the limit of the test


def lead_to(address: str) -> Answer:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", address)
        handler.end_headers()

    return answer


@pytest.fixture(autouse=True)
def _without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[Server]:
    with serving({f"/{name}": content for name, content in FILES.items()}) as made:
        yield made


mirror = server
"""A second one."""


@pytest.fixture
def nobody() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/"


def fetch(cache: Path, *mirrors: str, timeout_s: float = 10) -> Path:
    sets = {"small": RemoteSet(mirrors=mirrors, sums=SUMS)}
    return fetch_dataset("small", cache, sets=sets, timeout_s=timeout_s)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_missing_is_fetched(tmp_path: Path, server: Server) -> None:
    cache = tmp_path / "made" / "cache"
    folder = fetch(cache, server.address)
    assert folder == cache / "small"
    assert contents(folder) == FILES
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}
    (folder / "labels.gz").unlink()
    assert fetch(cache, server.address) == fetch(cache, server.address) == folder
    assert server.asked == ["/images.gz", "/labels.gz", "/labels.gz"]


def test_files_put_there_by_hand_need_no_network(tmp_path: Path, nobody: str) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    assert fetch(tmp_path, nobody) == folder
    path = folder / "labels.gz"
    path.write_bytes(b"mine")
    complaint = f"{path}: expected a file whose SHA-256 begins with {SUMS['labels.gz']}, got "
    with pytest.raises(DataError, match=re.escape(complaint)):
        fetch(tmp_path, nobody)
    assert path.read_bytes() == b"mine"


FAULTS = {
    "missing": (send(b"", status=404), "404 Client Error: Not Found"),
    "cut short": (
        send(b"half", length_bytes=8),
        "IncompleteRead|expected a SHA-256 that begins with",
    ),
    "something else": (
        send(b"<html>log in</html>"),
        f"that begins with {SUMS['images.gz']}, got [0-9a-f]{{64}}",
    ),
    "silent": (say_nothing, "timed out"),
    "too slow": (drip(bytes(1 << 14)), r"expected the whole file within 0\.5 s, got \d+ bytes"),
    "too long": (send(bytes(1 << 17)), "expected at most 65,536 bytes, got more"),
    "to a file": (lead_to("file:///etc/passwd"), "No connection adapters .* 'file:///etc/passwd'"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_mirror_that_fails_is_named_and_the_next_one_tried(
    tmp_path: Path,
    server: Server,
    mirror: Server,
    nobody: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault, complaint = FAULTS[kind]
    if kind == "too long":
        monkeypatch.setattr("onefold_jobs.data.fetch.LARGEST_BYTES", 1 << 16)
    server.answers["/images.gz"] = fault
    with pytest.raises(DataError, match=complaint) as error:
        fetch(tmp_path, nobody, server.address, timeout_s=0.5)
    first, refused, failed, advice = str(error.value).splitlines()
    assert first == "could not download images.gz:"
    assert re.fullmatch(rf"  {nobody}images\.gz: .*Connection refused.*", refused)
    assert failed.startswith(f"  {server.address}images.gz: ")
    folder = tmp_path / "small"
    assert advice.endswith(f"{folder / 'images.gz'}; required files: images.gz, labels.gz")
    assert contents(folder) == {}
    server.asked.clear()
    assert contents(fetch(tmp_path, server.address, mirror.address, timeout_s=0.5)) == FILES
    assert (server.asked, mirror.asked) == (["/images.gz", "/labels.gz"], ["/images.gz"])


def test_without_pooch_the_error_says_what_to_install(
    tmp_path: Path, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(LaunchError, match=re.escape('pip install "onefold-jobs[images]"')):
        fetch(tmp_path, nobody)


def test_what_is_no_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images.gz").write_bytes(FILES["images.gz"])
    with pytest.raises(DataError, match="No connection adapters"):
        fetch(tmp_path / "cache", f"file://{tmp_path}/")
    words = "expected a dataset of mnist, fashion-mnist, got 'mnits'"
    with pytest.raises(ValueError, match=words):
        fetch_dataset("mnits", tmp_path / "new")
    assert not (tmp_path / "new").exists()
