"""Runs the devices of a simulated run in threads, one at a time.

Note: process-wide state
------------------------
Generators, kernel settings, hooks on all modules and the list of open Trainers exist once per
process, but each device needs its own. `Surroundings` saves them when a device yields, and restores
those of the next device. PyTorch's modes (no_grad, autocast, function modes) belong to a thread
anyway. The weights that autocast has converted cannot be saved: a device that leaves autocast
clears the cache of all devices.

Note: time
----------
There is no clock. A waiting device resumes when its condition holds. If no device can run, the one
that has waited longest gives up, as if its timeout had passed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.random import mtrand

from onefold.core.gatherer import GATHERER
from onefold.core.mean import PASS
from onefold.core.randomness import COMMON, GeneratorStates, forget_numpy
from onefold.launcher import membership
from onefold.system.internals import KernelSettings, ProcessHooks

__all__ = ["Fault", "Killed", "Scheduler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of a simulated device; see `outcomes`.

    Args:
        device: number of the device.
        call: number of the transport call that triggers it, counted from 1 for each device.
        kind: ``kill`` ends the device without notice. ``stop`` suspends it forever, like a process
            stopped by SIGSTOP. ``delay`` lets it run only when no other device can. ``cut`` breaks
            its connections.
    """

    device: int
    call: int
    kind: Literal["kill", "stop", "delay", "cut"] = "kill"


_PAUSES = 0.1
"""Probability that a device yields at a call without having to wait."""


class Killed(BaseException):
    """Raised in a simulated device that is killed."""


class Surroundings:
    """The present process-wide state.

    Args:
        owned: NumPy's generator at the start of the simulation.
    """

    def __init__(self, owned: Any) -> None:
        self._owned = owned
        # Inside a step, another generator replaces NumPy's own, whose state is saved, too.
        self._generator, self._own_numpy = mtrand.get_bit_generator(), owned.state
        self._states = GeneratorStates()
        self._dtype = torch.get_default_dtype()
        self._products = torch.get_float32_matmul_precision()
        self._kernels = KernelSettings()
        self._hooks = ProcessHooks()
        self._members = membership.members
        self._places = [vars(place).copy() for place in (COMMON, GATHERER, PASS)]

    def put_back(self) -> None:
        """Restore this state."""
        self._owned.state = self._own_numpy
        mtrand.set_bit_generator(self._generator)
        self._states.restore()
        torch.set_default_dtype(self._dtype)
        # Setting the precision, even to the same value, changes what newer backend settings return.
        if torch.get_float32_matmul_precision() != self._products:
            torch.set_float32_matmul_precision(self._products)
        self._kernels.put_back()
        self._hooks.put_back()
        membership.members = self._members
        for place, values in zip((COMMON, GATHERER, PASS), self._places, strict=True):
            vars(place).clear()
            vars(place).update(values)


@dataclass(slots=True)
class DeviceState:
    """State of one device."""

    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] | None = None
    """Returns whether the device's wait is over; None if it does not wait."""
    since: int = 0
    """Start of the wait, as a number of switches."""
    calls: int = 0
    """Number of transport calls so far."""
    is_over: bool = False
    """Whether the device has ended, for any reason."""
    is_stopped: bool = False
    """Whether the device is suspended forever."""
    is_late: bool = False
    is_killed: bool = False
    gives_up: bool = False


class Scheduler:
    """Runs functions in threads, one at a time.

    Args:
        seed: seed of the order of the devices.
        faults: faults of the devices.
        cut: called with the number of a device whose connections break.
    """

    def __init__(
        self, devices: int, seed: int, faults: Sequence[Fault], cut: Callable[[int], None]
    ) -> None:
        for fault in faults:
            if not 0 <= fault.device < devices or fault.call < 1:
                raise ValueError(
                    f"expected a device below {devices} and a call from 1, but got {fault}"
                )
        self.states = [DeviceState() for _ in range(devices)]
        """State of each device."""
        self._faults, self._cut = faults, cut
        self._order = random.Random(seed)
        self._handovers = 0
        self._owned = mtrand.get_bit_generator()
        self._all_over = threading.Semaphore(0)
        self._begins = seed

    def run(self, live: Callable[[int], None]) -> None:
        """Call ``live`` with each device's number in its thread; wait until all have ended."""
        self._before = Surroundings(self._owned)
        threads = [
            threading.Thread(target=self._run_one, args=(live, number), name=f"device {number}")
            for number in range(len(self.states))
        ]
        for thread in threads:
            thread.start()
        try:
            self._give(self._next())
            self._all_over.acquire()
        finally:
            for state in self.states:
                # Only if this thread was interrupted, some device has not ended yet.
                state.is_killed = True
                state.turn.release()
            for thread in threads:
                thread.join()
            self._before.put_back()

    def late(self) -> list[int]:
        """Return the devices that neither wait nor have ended."""
        return [n for n, s in enumerate(self.states) if s.ready is None and not s.is_over]

    def begin_call(self, number: int) -> None:
        """Count a device's transport call and apply its faults; another device may run first."""
        state = self.states[number]
        state.calls += 1
        for fault in self._faults:
            if (fault.device, fault.call) == (number, state.calls):
                if fault.kind in ("kill", "cut"):
                    self._cut(number)
                state.is_killed |= fault.kind == "kill"
                state.is_stopped |= fault.kind == "stop"
                state.is_late |= fault.kind == "delay"
        # Yield only sometimes: saving and restoring state is most of the cost of a switch.
        pauses = state.is_late or state.is_stopped or self._order.random() < _PAUSES
        if pauses and not state.is_killed:
            self._hand_over(number)
        if state.is_killed:
            raise Killed

    def wait(self, number: int, ready: Callable[[], bool]) -> bool:
        """Run other devices until a condition holds; return False if it never will.

        Args:
            number: number of the waiting device.
            ready: the condition; has no side effects.
        """
        state = self.states[number]
        if state.is_killed:
            raise Killed
        if ready():
            return True
        state.ready, state.since = ready, self._handovers
        self._hand_over(number)
        state.ready = None
        state.gives_up, gave_up = False, state.gives_up
        return not gave_up

    def _run_one(self, live: Callable[[int], None], number: int) -> None:
        state = self.states[number]
        state.turn.acquire()
        if not state.is_killed:
            self._reset_device(number)
            live(number)
        state.is_over = True
        chosen = self._next()
        if chosen is None:
            self._all_over.release()
        else:
            self._give(chosen)

    def _reset_device(self, number: int) -> None:
        """Give a device the state of a new process."""
        # Another device may be in the middle of a step, so restore the initial state first.
        self._before.put_back()
        torch.default_generator.manual_seed(torch.Generator().initial_seed())
        # In separate processes, the operating system seeds these, so they differ.
        random.seed(f"{self._begins} {number}")
        mtrand.set_bit_generator(self._owned)
        np.random.seed((self._begins * 1009 + number) & 0xFFFFFFFF)
        forget_numpy()
        membership.members = membership.Members()

    def _hand_over(self, number: int) -> None:
        chosen = self._next()
        state = self.states[number]
        if chosen != number:
            own = Surroundings(self._owned)
            self._give(chosen)
            state.turn.acquire()
            own.put_back()
        if state.is_killed:
            self._cut(number)
            raise Killed

    def _give(self, number: int | None) -> None:
        assert number is not None  # a device that hands over is not over itself
        self._handovers += 1
        self.states[number].turn.release()

    def _next(self) -> int | None:
        """Choose the next device to run; None if all have ended."""
        there = {n: s for n, s in enumerate(self.states) if not s.is_over}
        able = {n: s for n, s in there.items() if not s.is_stopped and (not s.ready or s.ready())}
        prompt = [n for n, s in able.items() if not s.is_late]
        if able:
            chosen = self._order.choice(prompt or list(able))
            able[chosen].is_late = False
            return chosen
        waiting = [n for n, s in there.items() if not s.is_stopped]
        if waiting:
            chosen = min(waiting, key=lambda n: self.states[n].since)
            self.states[chosen].gives_up = True
            return chosen
        # Only stopped devices are left: kill them, so that their threads end.
        for number, state in there.items():
            state.is_killed = True
            return number
        return None
