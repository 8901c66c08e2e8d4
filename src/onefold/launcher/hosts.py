"""Starts a run on several hosts, from the first host.

A command such as ``ssh {host}`` starts `onefold.launcher.part` on each other host; this process
starts it on the first one. Each part starts the workers of its host, watches them as a run on one
host does, and reports its `Outcome`.

Note: what this process and a part send each other
--------------------------------------------------
One line of JSON per message. A part first lists its devices, and this process then sends each part
its ranks. Afterwards this process passes signals on, and the part sends its outcome. A part also
sends an empty line every ``_ALIVE_S`` seconds. If nothing arrives for ``_SILENT_S`` seconds, its
host counts as lost.

Note: how the parts end
-----------------------
A part that finds its input closed ends its workers at once, as at a second signal. So it is enough
to close the pipes, and the parts end even if this process is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing import connection
from typing import Any

from onefold.core.options import LaunchContext, RunOptions
from onefold.errors import LaunchError
from onefold.launcher.environment import kernel_flags
from onefold.launcher.workers import Outcome
from onefold.system.process import LOOK_S, STOPPED_CODE
from onefold.system.safe_files import write_all
from onefold.system.stop_signals import StopSignals
from onefold.system.words import tell

__all__ = ["Channel", "HostsRun"]

_ALIVE_S, _SILENT_S = 2.0, 30.0
"""Interval between signs of life, and the silence that counts as a loss, in seconds."""
_TELL_AFTER_S = 10.0
"""Seconds after which a wait for a host is reported."""
_REPORT_S, _END_S = 8.0, 40.0
"""Seconds that the other parts have after a failure, and that each has to end its workers."""
_ENDED_S = 1.0
"""Seconds in which a command ends whose part has ended."""
_LONGEST = 1 << 24


class Channel:
    """Messages from one process, and to it.

    Args:
        source: descriptor to read.
        sink: descriptor to write.
    """

    def __init__(self, source: int, sink: int) -> None:
        self.source, self._sink = source, sink
        self._text, self.heard_s, self.is_over = bytearray(), time.monotonic(), False
        self.messages: deque[dict[str, Any]] = deque()
        """Messages that have arrived, and that no caller has taken."""
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, object] | None = None) -> None:
        """Send a message; without one, a sign of life. Ignores a reader that has ended."""
        line = b"" if message is None else json.dumps(message).encode()
        with self._lock, contextlib.suppress(BrokenPipeError):
            write_all(self._sink, line + b"\n")

    def keep_alive(self) -> None:
        """Send signs of life from now on."""

        def live() -> None:
            while True:
                time.sleep(_ALIVE_S)
                self.send()

        threading.Thread(target=live, name="onefold alive", daemon=True).start()

    def receive(self) -> None:
        """Read what has arrived, into `messages`; waits until the source is readable.

        Raises:
            ValueError: a line is not a message.
        """
        text = os.read(self.source, 1 << 16)
        self._text += text
        self.heard_s, self.is_over = time.monotonic(), not text
        if len(self._text) > _LONGEST:
            raise ValueError(f"a line of {len(self._text)} bytes")
        *lines, rest = bytes(self._text).split(b"\n")
        self._text = bytearray(rest)
        for line in filter(None, lines):
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError(f"the line {line[:80]!r}")
            self.messages.append(message)

    @property
    def is_silent(self) -> bool:
        """Whether nothing has arrived for so long that the other side counts as lost."""
        return time.monotonic() - self.heard_s > _SILENT_S

    def close(self) -> None:
        """Close the sink, which ends the other side."""
        os.close(self._sink)


class _Part:
    """The part of a run on one host, as the first host sees it."""

    def __init__(self, host: str, command: Sequence[str], *, is_here: bool) -> None:
        self.host, self.command = host, command
        self.devices: tuple[str, ...] = ()
        self.outcome: Outcome | None = None
        receive, answer = os.pipe()
        # Device 0 writes to this process's stdout, so answers of its host use another descriptor.
        words = [*command, str(answer)] if is_here else [*command]
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=None if is_here else answer,
                pass_fds=(answer,) if is_here else (),
                # Ctrl-C in the terminal reaches only this process, which passes it on in order.
                start_new_session=True,
            )
        except OSError as error:
            os.close(receive)
            raise LaunchError(f"{host}: {words[0]} could not be started: {error}") from None
        finally:
            os.close(answer)
        assert self._process.stdin is not None
        self.channel = Channel(receive, os.dup(self._process.stdin.fileno()))
        self._process.stdin.close()

    def take(self, message: Mapping[str, Any]) -> None:
        """Take a message of the part.

        Raises:
            LaunchError: the host cannot take part in the run.
        """
        if "refused" in message:
            raise LaunchError(f"{self.host}: {message['refused']}")
        if "onefold" in message:
            if message["onefold"] != version("onefold"):
                raise LaunchError(
                    f"{self.host} has onefold {message['onefold']}, but this host has "
                    f"{version('onefold')}. Install the same version on all hosts"
                )
            self.devices = tuple(message["devices"])
        if "outcome" in message:
            words = message["outcome"]
            by = words["stopped_by"] and signal.Signals(words["stopped_by"])
            self.outcome = Outcome(**{**words, "stopped_by": by})

    def lost(self) -> Outcome:
        """Return the outcome of a host whose part ended, or does not answer."""
        if self.channel.is_over:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDED_S)
            code = self._process.poll()
            text = f"the connection ended (`{shlex.join(self.command)}`: exit code {code})"
            if not self.devices:
                text += f". It needs a login without a password, and onefold in {sys.executable}"
        else:
            text = f"nothing has arrived for {_SILENT_S:g} s: the host or its network failed"
        return Outcome(1, text, failed=True)

    def end(self) -> None:
        """Wait until the part has ended its workers, once its channel is closed."""
        try:
            # Without an answer there are no workers, and ssh may try to connect for minutes.
            answers = self.devices and not self.channel.is_silent
            self._process.wait(_END_S if answers else 0)
        except subprocess.TimeoutExpired:
            if self.devices:
                tell(f"{self.host}: no answer, so processes of the run may be left there; end them")
            # Kill its children, too: it leads a session.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self.channel.source)


@dataclass(frozen=True, slots=True)
class HostsRun:
    """A run on several hosts, which may be attempted several times.

    Args:
        command: arguments of each worker.
        devices: value of ``--devices`` for each host.
        options: options of the run.
        signals: signals that this process received.
    """

    command: Sequence[str]
    devices: str
    options: RunOptions
    signals: StopSignals

    def attempt(self, leave_out: int) -> Outcome:
        """Start all parts, and return when all of them have ended.

        Args:
            leave_out: number of newest checkpoints to skip.

        Raises:
            LaunchError: a host cannot be reached, or cannot take part.
        """
        address = _free_address(self.options.hosts[0])
        parts: list[_Part] = []
        try:
            for host in self.options.hosts:
                parts.append(_Part(host, self._start(host), is_here=not parts))
            if not self._meet(parts):
                by = self.signals.came[0]
                name = "Ctrl-C" if by == signal.SIGINT else by.name
                text = f"stopped by {name} before all hosts had answered"
                code = STOPPED_CODE if self.options.checkpoint else 128 + by
                return Outcome(code, text, final=True, stopped_by=by)
            self._send_places(parts, address, leave_out)
            self._watch(parts)
        finally:
            for part in parts:
                part.channel.close()
            for part in parts:
                part.end()
        outcome = _outcome(parts)
        return replace(outcome, final=outcome.final or bool(self.signals.came))

    def _start(self, host: str) -> list[str]:
        words = [sys.executable, "-P", "-m", "onefold.launcher.part", self.devices]
        if host == self.options.hosts[0]:
            return words
        try:
            via = [word.replace("{host}", host) for word in shlex.split(self.options.via)]
        except ValueError:
            via = []
        if not via or "{host}" not in self.options.via:
            raise LaunchError(
                f'--via must be a command with {{host}}, such as "ssh {{host}}", but got '
                f"{self.options.via!r}"
            )
        # ssh joins its arguments and passes them to a shell.
        return [*via, *map(shlex.quote, words)]

    def _meet(self, parts: Sequence[_Part]) -> bool:
        """Wait until each host has listed its devices; return False if a signal came first.

        Raises:
            LaunchError: a host cannot be reached, or cannot take part.
        """
        limit_s, report_s = (
            time.monotonic() + each for each in (self.options.timeout_s, _TELL_AFTER_S)
        )
        while missing := [part for part in parts if not part.devices]:
            self._receive(missing)
            for part in missing:
                if not part.devices and part.channel.is_over:
                    raise LaunchError(f"{part.host}: {part.lost().message}")
            if self.signals.came:
                return False
            names = ", ".join(part.host for part in missing)
            if time.monotonic() > limit_s:
                raise LaunchError(
                    f"no answer within {self.options.timeout_s:g} s from {names}. Check that "
                    f"`{self.options.via} true` works without a password"
                )
            if time.monotonic() > report_s:
                report_s = limit_s
                tell(f"waiting for an answer from {names}")
        return True

    def _send_places(self, parts: Sequence[_Part], address: str, leave_out: int) -> None:
        devices = tuple(device for part in parts for device in part.devices)
        if len(kinds := {device.partition(":")[0] for device in devices}) > 1:
            each = "; ".join(f"{part.host}: {', '.join(part.devices)}" for part in parts)
            raise LaunchError(
                f"the devices of a run must be of one type, but the hosts have "
                f"{' and '.join(sorted(kinds))} ({each}). Pass --devices, such as cpu:2"
            )
        try:
            self.options.pipeline_of(len(devices))
        except ValueError as error:
            raise LaunchError(str(error)) from None
        run_id, secret, rank = uuid.uuid4().hex, secrets.token_hex(16), 0
        for part in parts:
            place = LaunchContext(
                rank=rank,
                size=len(devices),
                local_size=len(part.devices),
                devices=devices,
                may_leave=self.devices.strip() == "auto",
                run_id=run_id,
                secret=secret,
                address=address,
                one_host=len(parts) == 1,
                launcher="onefold",
                leave_out=leave_out,
                # This process handles restarts and the hosts.
                options=replace(self.options, max_restarts=0, hosts=()),
            )
            part.channel.send(
                {
                    "place": place.to_json(),
                    "command": [*self.command],
                    "folder": os.getcwd(),
                    # They change the bits, so they must be the same on all hosts.
                    "kernel_flags": kernel_flags(),
                }
            )
            rank += len(part.devices)

    def _watch(self, parts: Sequence[_Part]) -> None:
        """Pass signals on until all parts have ended, or one failed and the others had time."""
        passed, limit_s = 0, float("inf")
        while running := [part for part in parts if part.outcome is None]:
            self._receive(running)
            for part in running:
                if part.outcome is None and (part.channel.is_over or part.channel.is_silent):
                    part.outcome = part.lost()
            self.signals.drain()
            for number in self.signals.came[passed:]:
                for part in running:
                    if part.outcome is None:
                        part.channel.send({"signal": number.name})
            passed = len(self.signals.came)
            if any(part.outcome and part.outcome.failed for part in parts):
                limit_s = min(limit_s, time.monotonic() + _REPORT_S)
            if time.monotonic() > limit_s:
                return

    def _receive(self, parts: Sequence[_Part]) -> None:
        """Wait a moment for messages, and take them."""
        ready = connection.wait(
            [*(part.channel.source for part in parts), self.signals.descriptor], LOOK_S
        )
        for part in parts:
            if part.channel.source in ready:
                try:
                    part.channel.receive()
                    while part.channel.messages:
                        part.take(part.channel.messages.popleft())
                except (ValueError, KeyError, TypeError) as error:
                    raise LaunchError(
                        f"{part.host}: `{shlex.join(part.command)}` printed a line that is not "
                        f"from onefold: {error}. Its shell must print nothing to stdout"
                    ) from None


def _outcome(parts: Sequence[_Part]) -> Outcome:
    """Return the first failure that no other host caused, or how the run ended."""
    ended = [(part.host, part.outcome) for part in parts if part.outcome is not None]
    failures = [(host, each) for host, each in ended if each.exit_code not in (0, STOPPED_CODE)]
    devices = tuple(device for part in parts for device in part.devices)
    logs = "; ".join(f"{host}: {each.logs}" for host, each in ended if each.logs)
    if failures:
        host, first = min(failures, key=lambda failure: failure[1].caused_by_peer)
        words = f"{host}: {first.message}" if first.failed else first.message
        # The step of the lead; it is unknown if the first host is lost.
        step = parts[0].outcome.step if parts[0].outcome else -1
        return replace(first, message=words, logs=logs, step=step, devices=devices)
    stopped = [each for _, each in ended if each.exit_code == STOPPED_CODE]
    return replace(stopped[0] if stopped else ended[0][1], logs=logs, devices=devices)


def _free_address(host: str) -> str:
    """Return an address with a free port of this machine, at which the devices meet.

    Raises:
        LaunchError: the first host is another machine.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0]) as probe:
            probe.bind(found[4])
            port = probe.getsockname()[1]
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            f"the first of --hosts must be this machine ({socket.gethostname()}), by a name or an "
            f"address at which the other hosts reach it, but got {host}: "
            f"{getattr(error, 'strerror', None) or error}. Start the run on {host}, list this "
            f"machine first, or pass a file with the names"
        ) from None
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
