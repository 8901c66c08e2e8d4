"""A process's place in a run; `onefold.launcher.environment` reads it from the environment."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

from onefold.core.options import RunOptions

__all__ = ["LaunchContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """This process's place in the run."""

    rank: int = 0
    """Number of this process's device."""
    size: int = 1
    """Number of processes, which have one device each."""
    run_id: str = ""
    """Identifies the run; different from that of every other run on this machine."""
    one_host: bool = True
    """Whether all processes are on this machine."""
    launcher: Literal["none", "onefold", "torch"] = "none"
    """What started this process."""
    devices: tuple[str, ...] = ()
    """The device of every process, if the launcher chose them."""
    may_leave: bool = False
    """Whether devices beyond the number of shards leave the run quietly rather than fail."""
    directory: str = ""
    """Private folder of the run, if onefold launched it."""
    options: RunOptions = RunOptions()
    """The options that the run was launched with."""
    leave_out: int = 0
    """How many of the newest checkpoints are skipped, after repeated failures in the same step."""
    timeline_parts: str = ""
    """Folder that holds the parts of the timeline."""
    progress_descriptor: int = -1
    """The table of steps, inherited from onefold's launcher; -1 if there is none."""
    report_descriptor: int = -1
    """Where this process reports a failure, inherited from onefold's launcher; -1 likewise."""
    stacks_descriptor: int = -1
    """Where this process writes its stacks when the launcher asks for them; -1 likewise."""
    store_descriptor: int = -1
    """The file through which a process group is formed, inherited as well; -1 likewise."""
    safe_path: bool = False
    """Whether the script's folder and the current one stay off ``sys.path`` (``python -P``)."""
    local_rank: int = 0
    """Number of this process on its host."""
    local_size: int = 1
    """Number of processes on this host."""
    secret: str = field(default="", repr=False)
    """What the user has given to every process of the run, and by which they know each other."""
    agent_store: bool = False
    """Whether PyTorch's launcher holds the store, which then outlives any process of the run."""
    address: str = ""
    """Where the processes find each other, as HOST:PORT; empty if onefold launched them."""
    others: str = ""
    """What another launcher says of processes that are no part of this run; empty if there are
    none."""
    refusal: str = ""
    """Why this process, which is alone, must not train; empty if it may."""
    network: Any = field(default=None, repr=False, compare=False)
    """What reaches the other devices, if they are simulated: `onefold.testing`."""

    @property
    def launched(self) -> bool:
        """Whether a launcher has chosen the devices."""
        return self.launcher != "none"

    @property
    def proof(self) -> bytes:
        """What a process must know to take part; empty if the run has no secret.

        The run's identifier serves as one if onefold's launcher drew it, which tells nobody else.
        """
        return (self.secret or (self.run_id if self.launcher == "onefold" else "")).encode()

    def to_json(self) -> str:
        """Write the record as JSON, for the environment of a worker."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LaunchContext:
        """Read the record that `to_json` wrote."""
        # Parsed by Python: a path may have lone surrogates, which msgspec's own parser refuses.
        return msgspec.convert(json.loads(text), cls)
