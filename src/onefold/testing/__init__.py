"""Simulated devices: runs of several devices in one process, repeatable to the last call.

`simulate` runs a script's function on N devices that are threads of this process, of which one at a
time goes on. They hand over to each other where a run's devices wait for each other or tell each
other something, and nowhere else, in an order that is drawn from a seed. All of onefold works as in
a run of N processes, down to the bytes that are sent; processes, sockets and clocks are what is
missing. So a run takes milliseconds, and what fails fails again with the same seed.

`outcomes` also says how each device ended, for runs in which one is killed, stopped, late or cut
off at a call of your choice (`Fault`).
"""

from onefold.testing.scheduler import Fault
from onefold.testing.simulation import Ended, outcomes, simulate

__all__ = ["Ended", "Fault", "outcomes", "simulate"]
