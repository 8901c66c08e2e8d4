"""What a script prints is held until it is known whether it was shown before."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import pytest

from onefold.system.output import drop_output, hold_output, show_output


@contextmanager
def output() -> Iterator[io.BytesIO]:
    """What has come to standard output."""
    shown = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(shown, encoding="latin-1", errors="replace")):
        yield shown


def text(shown: io.BytesIO) -> str:
    sys.stdout.flush()
    return shown.getvalue().decode("latin-1")


@pytest.mark.parametrize("drops", [True, False])
def test_output_is_dropped_or_comes_in_its_order(*, drops: bool) -> None:
    with output() as shown:
        print("before")
        hold_output()
        print("held", "é☃")
        stream = sys.stdout
        assert isinstance(stream, io.TextIOWrapper)
        stream.buffer.write(b"bytes\n")
        stream.flush()
        assert text(shown) == "before\n"
        assert (stream.encoding, stream.errors) == ("latin-1", "replace")
        if drops:
            drop_output()
            print("dropped")
        stream.reconfigure(errors="backslashreplace")
        show_output()
        print("after ☃")
        print("by a handler that was made before", file=stream)
        print("the end")
        held = "" if drops else "held é?\nbytes\n"
        after = "after \\u2603\nby a handler that was made before\nthe end\n"
        assert text(shown) == f"before\n{held}{after}"


def test_a_stream_that_the_script_has_put_around_it_stays() -> None:
    with output() as shown:
        hold_output()
        held = sys.stdout
        with redirect_stdout(io.StringIO()) as around:
            show_output()
            assert sys.stdout is around
            print("x", file=held, flush=True)
        assert text(shown) == "x\n"


def test_a_forked_child_prints_as_ever() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        hold_output()
        print("held by the parent")
        if os.fork() == 0:
            print("of the child", flush=True)
            show_output()
            sys.stdout.flush()
            os._exit(0)
        os.wait()
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as file:
        assert file.read() == "of the child\n"


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_what_has_no_bytes_is_left_alone(
    stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    hold_output()
    drop_output()
    assert sys.stdout is stream
