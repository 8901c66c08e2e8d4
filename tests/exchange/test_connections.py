"""Who proves that it belongs to a run, what a stranger writes there, and what is cut at its end."""

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest
from torch.distributed import HashStore, PrefixStore

from onefold.errors import DisagreementError
from onefold.exchange.connections import (
    Connections,
    SealedStore,
    noted_connections,
    prove,
    refuse_sealed,
)
from tests.exchange.together import LIMIT_S, endings
from tests.tables import for_each, some


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket, Connections]]:
    """Two ends of a TCP connection, of which the first is noted."""
    held = Connections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = socket.create_connection(server.getsockname())
        server.accept()[0].close()
        with noted_connections(held):
            one = socket.create_connection(server.getsockname())
        with before, one, server.accept()[0] as other:
            yield one, other, held


Pair = tuple[socket.socket, socket.socket, Connections]


def test_who_waits_at_either_end_hears_of_a_cut(pair: Pair) -> None:
    one, other, held = pair
    assert list(held.sockets) == [one.fileno()]
    held.cut()
    assert one.recv(1) == b""
    assert other.recv(1) == b""


def test_a_number_of_somebody_else_is_let_be(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _, held = pair
    noted, dup = dict(held.sockets), os.dup
    stranger, end = socket.socketpair()
    with stranger, end:

        def take_its_place(descriptor: int) -> int:
            os.dup2(stranger.fileno(), descriptor)
            return dup(descriptor)

        def close_first(descriptor: int) -> int:
            one.close()
            return dup(descriptor)

        for meanwhile in (take_its_place, close_first):
            held.sockets = dict(noted)
            monkeypatch.setattr(os, "dup", meanwhile)
            held.cut()
            assert held.sockets == {}
            stranger.sendall(b"still open")
            assert end.recv(16) == b"still open"


SLOW = """
import sys, threading, time
from torch.distributed import TCPStore
from onefold.exchange.connections import Connections, LateWatch, PeerWatch

class Slow(LateWatch):
    def answer_peers(self):
        inside.set()
        limit = time.monotonic() + 1
        while time.monotonic() < limit:
            store.check(["key"])

inside = threading.Event()
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
watch = PeerWatch({}, Connections(), Slow(store, 0, 1))
inside.wait()
if "close" in sys.argv:
    watch.close()
if "fail" in sys.argv:
    raise SystemExit(3)
"""
"""The thread comes and goes between Python and PyTorch when the script ends."""


@pytest.mark.parametrize(("how", "code"), some([("leave open", 0), ("close", 0), ("fail", 3)], 2))
def test_a_watch_does_not_abort_a_process_that_ends(how: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", SLOW, how], capture_output=True, text=True)
    assert done.returncode == code, done.stderr


SECRET = b"long enough that nobody guesses it"
Trade = Callable[[bytes], Sequence[bytes]]


class Wire:
    """What devices that are threads give to each other, and all that went over it."""

    def __init__(self, size: int) -> None:
        self.seen: list[list[bytes]] = []
        self._barrier = Barrier(size, timeout=LIMIT_S, action=self._note)
        self._given = [b""] * size

    def trade(self, rank: int) -> Trade:
        def give(word: bytes) -> Sequence[bytes]:
            self._given[rank] = word
            self._barrier.wait()
            return self.seen[-1]

        return give

    def _note(self) -> None:
        self.seen.append(list(self._given))


def prove_all(secrets: Sequence[bytes], wire: Wire) -> list[str]:
    """How each device ends: in words, or in peace."""
    errors = endings(len(secrets), lambda rank: prove(secrets[rank], rank, wire.trade(rank)))
    assert all(error is None or type(error) is DisagreementError for error in errors)
    return ["" if error is None else str(error) for error in errors]


@for_each("size", [1, 2, 5])
@for_each("secret", [SECRET, b""])
def test_those_who_know_the_secret_belong_together(size: int, secret: bytes) -> None:
    assert prove_all([secret] * size, Wire(size)) == [""] * size


@for_each("theirs", [b"", SECRET + b".", SECRET[:-1], SECRET.upper()])
def test_who_does_not_know_it_is_named(theirs: bytes) -> None:
    said = prove_all([SECRET, SECRET, theirs], Wire(3))
    for rank, other in ((0, 2), (1, 2), (2, 0)):
        assert said[rank].startswith(
            f"device {other} did not authenticate to device {rank}. Set the same"
        )
        assert "ONEFOLD_SECRET" in said[rank]


def answered(answers: Iterator[bytes], word: bytes) -> list[bytes]:
    return [word, next(answers)]


def refused(trade: Trade) -> None:
    with pytest.raises(DisagreementError, match=r"^device 1 did not authenticate"):
        prove(SECRET, 0, trade)


def test_the_secret_is_not_sent_and_what_was_heard_is_of_no_use() -> None:
    first, second = Wire(2), Wire(2)
    for wire in (first, second):
        prove_all([SECRET, SECRET], wire)
    given = [word for wire in (first, second) for words in wire.seen for word in words]
    assert len(set(given)) == len(given) == 8, "nothing is given twice"
    for word in given:
        assert len(word) == 32
        assert word != hashlib.sha256(SECRET).digest()
    heard = iter(words[1] for words in first.seen)
    refused(lambda word: [word, next(heard)])
    refused(lambda word: [word, word])
    for answer in (b"", b"\0" * 32, b"x" * 64):
        refused(partial(answered, iter([b"\0" * 32, answer])))


HERE = [("10.0.0.1:7", "10.0.0.2:7")]
"""The connection of device 0, as it sees it itself."""


@for_each(
    ("secret", "theirs", "alike"),
    [
        (SECRET, [("10.0.0.2:7", "10.0.0.1:7")], True),
        (SECRET, [("10.0.0.9:1", "10.0.0.8:1"), ("10.0.0.2:7", "10.0.0.1:7")], True),
        (SECRET, [], False),
        (SECRET, [("10.0.0.2:7", "10.0.0.1:8")], False),  # a relay on the same host
        (SECRET, [("10.0.0.2:7", "192.168.0.1:7")], False),  # addresses are translated
        (SECRET, HERE, False),  # the list of device 0, said again
        (b"", [], True),  # nothing is bound
    ],
)
def test_both_see_one_connection(secret: bytes, theirs: list[tuple[str, str]], alike: bool) -> None:
    wire, seen = Wire(2), [HERE, theirs]
    errors = endings(2, lambda rank: prove(secret, rank, wire.trade(rank), seen[rank]))
    assert [error is None for error in errors] == [alike] * 2
    for rank, error in enumerate(errors):
        words = f"device {rank} and device {1 - rank} know the secret of the run, but are not"
        assert alike or (str(error).startswith(words) and "(NAT)" in str(error))


SCRIPT = Path(__file__).parents[1] / "scripts" / "relayed.py"
WITHOUT = "has a value under .*key that was written without the secret of this run"


def sealed(inner: HashStore, secret: bytes = SECRET, run: str = "run") -> SealedStore:
    return SealedStore(inner, secret, run)


@for_each("value", ["", "text", "\0\n", "é"])
def test_processes_with_the_secret_understand_each_other(value: str) -> None:
    inner = HashStore()
    one, other = sealed(inner), sealed(inner)
    PrefixStore("a", one).set("key", value)
    assert PrefixStore("a", other).get("key") == value.encode()
    assert not value or value.encode() not in inner.get("a/key")
    assert one.add("n", 2) == 2
    assert other.check(["n", "a/key"])
    with pytest.raises(RuntimeError):
        one.wait(["never"], timedelta(milliseconds=10))


def rewritten(change: Callable[[str], str]) -> Callable[[HashStore], None]:
    def write(inner: HashStore) -> None:
        sealed(inner).set("key", "x")
        inner.set("key", change(inner.get("key").decode()))

    return write


def of_another_key(inner: HashStore) -> None:
    sealed(inner).set("old", "x")
    inner.set("key", inner.get("old").decode())


WRITES: list[Callable[[HashStore], None]] = [
    lambda inner: inner.set("key", "10.0.0.9:1234"),
    lambda inner: sealed(inner, SECRET + b".").set("key", "x"),
    lambda inner: sealed(inner, run="run2").set("key", "x"),
    of_another_key,
    rewritten(lambda text: text + "00"),
    rewritten(lambda text: text[:-1]),
]


@for_each("write", WRITES)
def test_a_value_of_a_stranger_is_refused(write: Callable[[HashStore], None]) -> None:
    inner = HashStore()
    write(inner)
    with pytest.raises(DisagreementError, match=WITHOUT):
        sealed(inner).get("key")


def test_a_process_without_the_secret_says_so() -> None:
    inner = HashStore()
    sealed(inner).set("key", "x")
    assert refuse_sealed("key", b"plain") == b"plain"
    with pytest.raises(DisagreementError, match=r"ONEFOLD_SECRET, but this one does not \(key\)"):
        refuse_sealed("key", inner.get("key"))


IN_BETWEEN = {
    # That the relay passes everything on is what makes the others worth something.
    "plain address": "joined",
    "nothing": "joined",
    "kind": "under onefold/run/kind/1 that was written without the secret",
    "address": "that was written without the secret of this run",
    "unsealed": "are not connected with each other",
}
"""What is replaced in the store of a run, which has a secret but for the first, and what comes."""
QUICK = ("nothing", "unsealed")


@pytest.mark.processes
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in QUICK else pytest.mark.full) for k in IN_BETWEEN]
)
def test_who_stands_in_between_keeps_devices_from_joining(tmp_path: Path, kind: str) -> None:
    secret, said = "" if kind == "plain address" else SECRET.decode(), IN_BETWEEN[kind]
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), secret, kind.removeprefix("plain ")],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    came = [process.communicate(timeout=600)[0] for process in processes]
    assert all(("joined" in each) == (said == "joined") for each in came), came
    assert any(said in each for each in came), came
