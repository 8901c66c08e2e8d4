"""The driver's end of a side: starts its processes, requests training, and waits for the times.

A side is one or more processes of `_side.py`. Each connects to a socket of its own driver; a
measurement sends a number of steps to each of them and ends with the last answer.
"""

import json
import math
import os
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from measure import machine_busy_s

__all__ = ["Measurement", "Side", "SideError"]

START_LIMIT_S = 120.0
"""Time limit for starting the processes of a side and building the model, in seconds."""
STEPS_LIMIT_S = 600.0
"""Time limit of a measurement, in seconds."""
END_LIMIT_S = 30.0
"""Time limit for a side to end by itself, in seconds."""
POLL_S = 0.5
TAIL_CHARACTERS = 4000
PEER = struct.Struct("3i")
"""Process, user and group at the other end of a local socket, in Linux's format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Result of a training request."""

    seconds: float
    """Seconds from the start to the end of the slowest process."""
    others_cores: float
    """Number of cores that other programs used: near 0 on an idle machine."""
    peak_bytes: float = 0.0
    """Sum of the processes' peak memory so far; 0 if they do not report it."""
    cpu_s: float = 0.0
    """Sum of the processes' CPU seconds."""
    loss: float = 0.0
    """Loss of the last step, averaged over the processes."""
    phases_s: Sequence[Mapping[str, float]] = field(default_factory=list)
    """Seconds in each phase, for each process that was asked and knows them."""


class SideError(RuntimeError):
    """A side did not start, died, or measured something that cannot be right."""


class Side:
    """The processes of one side, from start to end; a context manager.

    Args:
        name: name in messages and results.
        command: command that starts all processes of the side; the path of the driver's socket is
            added.
        processes: number of processes.
        folder: folder for the socket and the side's output.
        environment: environment variables of its processes in addition to the driver's own.

    Raises:
        SideError: a process dies, hangs, or its loss is not finite.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        processes: int,
        folder: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self._command = command
        self._processes = processes
        self._environment = {**os.environ, **environment}
        self._socket = folder / f"{name}.sock"
        self._output = folder / f"{name}.txt"
        self._links: list[TextIO] = []
        self.pids: list[int] = []
        """IDs of its processes, in the order in which they connected."""

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            listener = undo.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(self._socket))
            listener.listen(self._processes)
            listener.settimeout(POLL_S)
            with self._output.open("w", encoding="utf-8") as output:
                self._launcher = subprocess.Popen(
                    [*self._command, str(self._socket)],
                    stdout=output,
                    stderr=output,
                    env=self._environment,
                )
            undo.callback(self._end)
            self._accept_all(listener)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    def train(self, steps: int, *, by_phase: bool = False) -> Measurement:
        """Let every process of the side run `steps` steps, and wait for the slowest."""
        busy_before_s = machine_busy_s()
        for link in self._links:
            link.write(f"{steps} phases\n" if by_phase else f"{steps}\n")
            link.flush()
        answers = [self._answer(link) for link in self._links]
        busy = machine_busy_s() - busy_before_s
        seconds = max(answer["seconds"] for answer in answers)
        cpu_s = sum(answer["cpu_seconds"] for answer in answers)
        return Measurement(
            seconds=seconds,
            others_cores=max(0.0, (busy - cpu_s) / seconds),
            peak_bytes=sum(answer.get("peak_bytes", 0.0) for answer in answers),
            cpu_s=cpu_s,
            loss=sum(answer["loss"] for answer in answers) / len(answers),
            phases_s=[answer["phases_s"] for answer in answers if answer.get("phases_s")],
        )

    def _answer(self, link: TextIO) -> dict[str, Any]:
        try:
            answer = link.readline()
        except TimeoutError:
            raise self._failure(f"no answer within {STEPS_LIMIT_S:.0f} s") from None
        if not answer:
            # The launcher reports the reason once all of its processes have ended.
            with suppress(subprocess.TimeoutExpired):
                self._launcher.wait(timeout=END_LIMIT_S)
            raise self._failure("a process ended early")
        done: dict[str, Any] = json.loads(answer)
        if not math.isfinite(done["loss"]):
            raise self._failure(f"the loss is {done['loss']}")
        return done

    def _accept_all(self, listener: socket.socket) -> None:
        limit_s = time.monotonic() + START_LIMIT_S
        while len(self._links) < self._processes:
            try:
                link, _ = listener.accept()
            except TimeoutError:
                self._check_start(limit_s)
                continue
            link.settimeout(STEPS_LIMIT_S)
            peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
            self.pids.append(PEER.unpack(peer)[0])
            self._links.append(link.makefile("rw", encoding="utf-8"))
            link.close()

    def _check_start(self, limit_s: float) -> None:
        if self._launcher.poll() is not None:
            raise self._failure(f"ended at the start with code {self._launcher.returncode}")
        if time.monotonic() > limit_s:
            raise self._failure(f"did not start within {START_LIMIT_S:.0f} s")

    def _failure(self, what: str) -> SideError:
        tail = self._output.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARACTERS:]
        return SideError(f"{self.name}: {what}; the end of its output:\n{tail}")

    def _end(self) -> None:
        for link in self._links:
            link.close()
        try:
            self._launcher.wait(timeout=END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._launcher.terminate()
            self._launcher.wait(timeout=END_LIMIT_S)
