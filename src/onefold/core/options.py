"""The launch options of a run, and the position of a process in it.

`RunOptions` reaches every worker as part of its `LaunchContext`, which
`onefold.launcher.environment` reads from the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

from onefold.core.numbers import check_choice, check_seconds, check_whole
from onefold.core.placements import PLACEMENTS, PlacementKind, kind_of

__all__ = [
    "DEFAULT_GRACE_PERIOD_S",
    "DEFAULT_PLACEMENT",
    "DEFAULT_TIMEOUT_S",
    "RECORD_FILE",
    "ExchangeName",
    "LaunchContext",
    "RunOptions",
]

DEFAULT_TIMEOUT_S = 600.0
RECORD_FILE = "run.record"
"""File name of the record in the folder of a run."""
DEFAULT_GRACE_PERIOD_S = 60.0
DEFAULT_PLACEMENT = next(iter(PLACEMENTS))

ExchangeName = Literal["auto", "shared", "collective"]

RestartDevices = Literal["same", "fewer"]
OnCorruption = Literal["heal", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options that a launcher sets for a run; every worker receives the same record.

    Raises:
        ValueError: an option is out of range, not one of its choices, or requires another one.

    >>> RunOptions(placement="partition", checkpoint="runs/mine", save_every=500).timeout_s
    600.0
    """

    exchange: ExchangeName = "auto"
    """Exchange between processes."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Maximum wait of one device for another, in seconds."""
    record: str = ""
    """Existing folder for the record of the run; empty for the checkpoint directory."""
    profile: str = ""
    """Existing folder for the timeline; empty for none."""
    checkpoint: str = ""
    """Checkpoint directory: the run resumes from the newest checkpoint, and writes new ones."""
    remote: str = ""
    """URL of the checkpoints in object storage; ``checkpoint`` is then a copy on this machine."""
    save_every: int = 200
    """Steps between checkpoints; 0 to use only the time."""
    save_every_s: float = 0.0
    """Seconds between checkpoints; 0 to use only the steps."""
    placement: str = field(
        default=DEFAULT_PLACEMENT, metadata={"help": f"Placement: {', '.join(PLACEMENTS)}."}
    )
    """Parameters, gradients and optimizer state that each device keeps: one of the forms in
    `onefold.core.placements`."""
    offload_dir: str = ""
    """Folder for the file with the model if devices do not keep all of it; empty for the system's
    temporary folder."""
    keep_last: int = 3
    """Number of recent checkpoints to keep."""
    allow_changed: tuple[str, ...] = ()
    """Settings that may differ from those of the run that wrote the checkpoints."""
    saves: bool = False
    """Whether workers save themselves on a stop request, as they do with ``checkpoint``."""
    stop_signals: tuple[str, ...] = ()
    """Signals with which a launcher other than onefold's stops a process, such as USR1."""
    stop_notice: str = ""
    """File whose appearance stops the run, or the cloud whose notices do; empty for neither."""
    audit: float = 0.0
    """Fraction of shards to recompute on another device and compare."""
    on_corruption: OnCorruption = "heal"
    """Response to a wrong result: continue with the correct one, if there is one, or stop."""
    program: tuple[str, ...] = ()
    """Program that launched a function, with its arguments; empty for scripts."""
    stops_after: int = 0
    """Step after which the run stops as if a signal requested it; 0 for none."""
    grace_period_s: float = DEFAULT_GRACE_PERIOD_S
    """Seconds that a run may take to save itself after a stop request."""
    max_restarts: int = 0
    """Maximum consecutive restarts from the last checkpoint after failures; a newer checkpoint
    resets the count."""
    restart_devices: RestartDevices = "same"
    """Whether restarts omit a lost device; see `Outcome.lost`."""
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    """Options of tools that only a command of onefold uses, by tool: see
    `onefold.tools.registry`."""
    logs: str = ""
    """Folder for the output of devices other than the lead."""
    quiet: bool = False
    """Whether the lead's output also goes to a log file."""
    hosts: tuple[str, ...] = ()
    """Hosts of the run, of which the first is this machine; empty for this machine alone."""
    via: str = "ssh {host}"
    """Command that runs its further arguments on a host."""

    def __post_init__(self) -> None:
        # Check on creation in the launcher, before any worker starts.
        check_seconds("the timeout", self.timeout_s)
        check_seconds("the grace period", self.grace_period_s)
        check_whole("save_every", self.save_every, least=0 if self.save_every_s else 1)
        check_whole("keep_last", self.keep_last, least=1)
        check_whole("max_restarts", self.max_restarts, least=0)
        if not 0.0 <= self.audit <= 1.0:
            raise ValueError(f"audit must be a fraction from 0 to 1, but got {self.audit!r}")
        if self.max_restarts and not self.checkpoint:
            raise ValueError("restarts require --checkpoint DIR")
        check_choice("restart_devices", self.restart_devices, RestartDevices)
        check_choice("on_corruption", self.on_corruption, OnCorruption)
        kind_of(self.placement)
        self.check_combination(audit=self.audit)
        check_choice("the exchange", self.exchange, ExchangeName)

    @property
    def recorded_in(self) -> str:
        """Folder of the run's record; empty for none."""
        return self.record or self.checkpoint

    @property
    def placement_kind(self) -> PlacementKind:
        """Properties of the placement that the launcher needs."""
        return kind_of(self.placement)

    def check_combination(self, **chosen: object) -> None:
        """Check that this placement supports options and settings.

        Raises:
            ValueError: the placement does not work with one of them.

        >>> RunOptions(placement="pipeline").check_combination(compile=False, microbatch=4)
        """
        for name, value in chosen.items():
            if reason := self.placement_kind.reason_against(name, value):
                others = [
                    n for n, each in PLACEMENTS.items() if not each.reason_against(name, value)
                ]
                raise ValueError(
                    f"{name}={value!r} cannot be combined with placement {self.placement}, because "
                    f"{reason}. Omit {name}, or use placement {' or '.join(others)}"
                )

    def pipeline_of(self, devices: int) -> int:
        """Return the number of devices that compute a shard together; 1 without a pipeline.

        Raises:
            ValueError: ``devices`` is not a multiple of the pipeline's size.

        >>> RunOptions(placement="pipeline:2").pipeline_of(4)
        2
        """
        if not self.placement_kind.has_pipelines:
            return 1
        pipeline = int(self.placement.partition(":")[2] or devices)
        if devices % pipeline:
            raise ValueError(
                f"--placement {self.placement} makes pipelines of {pipeline} devices, so the "
                f"number of devices must be a multiple of {pipeline}, but got {devices}"
            )
        return pipeline

    @property
    def may_stop(self) -> bool:
        """Whether the run saves itself on a stop request."""
        return self.saves or bool(self.checkpoint or self.stop_signals or self.stop_notice)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """The position of this process in the run."""

    rank: int = 0
    """Number of this process's device."""
    size: int = 1
    """Number of processes, each with one device."""
    run_id: str = ""
    """Identifier of the run, unique among the runs on this machine."""
    one_host: bool = True
    """Whether all processes are on this machine."""
    launcher: Literal["none", "onefold", "torch"] = "none"
    """Launcher that started this process."""
    devices: tuple[str, ...] = ()
    """Device of every process, if the launcher chose them."""
    may_leave: bool = False
    """Whether devices beyond the number of shards leave the run without an error."""
    directory: str = ""
    """Private folder of the run, if onefold launched it."""
    options: RunOptions = RunOptions()
    """Options that the run was launched with."""
    leave_out: int = 0
    """Number of recent checkpoints to skip, after repeated failures in the same step."""
    timeline_parts: str = ""
    """Folder for the parts of the timeline."""
    progress_descriptor: int = -1
    """Descriptor of the table of steps, inherited from onefold's launcher; -1 for none."""
    report_descriptor: int = -1
    """Descriptor for failure reports, inherited from onefold's launcher; -1 for none."""
    stacks_descriptor: int = -1
    """Descriptor for stacks that the launcher requests; -1 for none."""
    store_descriptor: int = -1
    """Descriptor of the file through which a process group is formed, inherited; -1 for none."""
    screen_descriptor: int = -1
    """Descriptor of the launcher's stderr, for reports about the whole run; -1 for none."""
    safe_path: bool = False
    """Whether the script's folder and the current one stay off ``sys.path`` (``python -P``)."""
    local_rank: int = 0
    """Number of this process on its host."""
    local_size: int = 1
    """Number of processes on this host."""
    secret: str = field(default="", repr=False)
    """Secret that the user set for every process of the run, to authenticate each other."""
    agent_store: bool = False
    """Whether PyTorch's launcher hosts the store, which then outlives any process of the run."""
    address: str = ""
    """Rendezvous address of the processes, HOST:PORT; empty if onefold launched them."""
    others: str = ""
    """Hint in another launcher's environment that processes outside this run exist; empty if
    none."""
    refusal: str = ""
    """Reason why this process, which runs alone, must not train; empty if it may."""
    network: Any = field(default=None, repr=False, compare=False)
    """Connection to the other devices, if they are simulated: `onefold.testing`."""

    @property
    def launched(self) -> bool:
        """Whether a launcher chose the devices."""
        return self.launcher != "none"

    @property
    def proof(self) -> bytes:
        """Shared secret that authenticates processes of the run; empty if it has none.

        The run's identifier serves as a secret if onefold's launcher drew it, because it is not
        shared outside the run.
        """
        return (self.secret or (self.run_id if self.launcher == "onefold" else "")).encode()

    def to_json(self) -> str:
        """Return the record as JSON, for the environment of a worker."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LaunchContext:
        """Read the record that `to_json` wrote."""
        # Parse with Python: a path may have lone surrogates, which msgspec's own parser rejects.
        return msgspec.convert(json.loads(text), cls)
