"""Passes tensors between processes of a host, in files without a name."""

from __future__ import annotations

import os

from onefold.errors import PeerTimeout
from onefold.exchange.commonfile import new_file, take_file
from onefold.exchange.mailbox import Mailbox
from onefold.exchange.relay import Message, Relay, read_message, room_of, write_message

__all__ = ["HostRelay"]


class HostRelay(Relay):
    """The relay of one process of several on a host.

    Args:
        mailbox: connects the processes.
        line: how many devices a line has.
    """

    def __init__(self, mailbox: Mailbox, line: int) -> None:
        self._mailbox = mailbox
        self._line = line

    def send(self, device: int, target: int, message: Message) -> None:
        head, nbytes = room_of(message)
        descriptor, room = new_file(nbytes)
        # Closed at once: what was sent holds the file until the other device has received it.
        try:
            write_message(message, room)
            self._mailbox.send_note(target, head)
            self._mailbox.send_file(target, descriptor)
        finally:
            os.close(descriptor)

    def receive(self, device: int, source: int) -> Message:
        try:
            head = self._mailbox.receive_note(source)
            return read_message(head, take_file(self._mailbox, source))
        except PeerTimeout as error:
            beyond = source + (source - device)
            if beyond // self._line != source // self._line:
                raise
            # It does not say for whom it waits itself.
            raise PeerTimeout(
                f"{error}. In a line, device {source} may itself have waited for device {beyond}",
                device=error.device,
                step=error.step,
            ) from None

    def finish(self) -> None:
        pass  # what was sent lies in files

    def clear(self) -> None:
        pass  # a step that fails here ends the run for all processes
