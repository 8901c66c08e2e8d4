"""A process's place in a run, as a record; `onefold.run.world` reads it from the environment."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

from onefold.core.options import RunOptions

__all__ = ["World"]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process's place in the run."""

    rank: int = 0
    """Number of this process's device."""
    size: int = 1
    """Number of processes, of one device each."""
    run_id: str = ""
    """Differs from that of every other run on this machine."""
    one_host: bool = True
    """All processes are on this machine."""
    launcher: Literal["none", "onefold", "torch"] = "none"
    """What started this process."""
    devices: tuple[str, ...] = ()
    """The device of every process, where the launcher chose them."""
    may_leave: bool = False
    """Devices beyond the number of shards leave in peace rather than fail."""
    directory: str = ""
    """Private folder of the run, where onefold launched it."""
    options: RunOptions = RunOptions()
    """What was settled when it was launched."""
    leave_out: int = 0
    """How many of the newest checkpoints are passed over, after failures in one step."""
    timeline_parts: str = ""
    """Folder of the parts of the timeline."""
    progress_descriptor: int = -1
    """Inherited from onefold's launcher: the table of steps; -1 without one."""
    report_descriptor: int = -1
    """Likewise: where this process leaves word if it fails."""
    store_descriptor: int = -1
    """Likewise: the file through which a process group is formed."""
    safe_path: bool = False
    """Neither the script's folder nor the current one goes on ``sys.path`` (``python -P``)."""
    local_rank: int = 0
    """Number of this process on its host."""
    local_size: int = 1
    """Number of processes on this host."""
    secret: str = field(default="", repr=False)
    """What the user has given to every process of the run, by which they know each other."""
    agent_store: bool = False
    """PyTorch's launcher holds the store itself, so that it outlives any process of the run."""

    @property
    def launched(self) -> bool:
        """Whether a launcher has chosen the devices."""
        return self.launcher != "none"

    @property
    def proof(self) -> bytes:
        """What a process must know to take part; empty where there is no secret.

        The run's number is one where onefold's launcher has drawn it: it is told to nobody else.
        """
        return (self.secret or (self.run_id if self.launcher == "onefold" else "")).encode()

    def to_json(self) -> str:
        """For the environment of a worker."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> World:
        """What `to_json` wrote."""
        fields = json.loads(text)
        options = fields.pop("options")
        return cls(
            **{**fields, "devices": tuple(fields["devices"])},
            options=RunOptions(**{**options, "changed": tuple(options["changed"])}),
        )
