"""What a stranger writes into the store of a run is noticed, and so is who stands in between."""

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore

from onefold.errors import DisagreementError
from onefold.exchange.connections import SealedStore, refuse_sealed
from tests.tables import for_each

SCRIPT = Path(__file__).parents[1] / "scripts" / "relayed.py"
SECRET = b"long enough that nobody guesses it"
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
    with pytest.raises(DisagreementError, match=r"ONEFOLD_SECRET and this one has not \(key\)"):
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
