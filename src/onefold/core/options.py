"""The options that a run is launched with, and the place of a process in the run.

`RunOptions` goes from the command line to every worker, as a part of its `LaunchContext`, which
`onefold.launcher.environment` reads from the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

from onefold.core.numbers import check_choice, check_seconds, check_whole
from onefold.core.placements import PLACEMENTS, PlacementKind, described, kind_of

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
"""The name of the record in the folder of a run."""
DEFAULT_GRACE_PERIOD_S = 60.0
DEFAULT_PLACEMENT = next(iter(PLACEMENTS))

ExchangeName = Literal["auto", "shared", "collective"]

RestartDevices = Literal["same", "fewer"]
OnCorruption = Literal["heal", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a launcher decides for a run; the same record reaches every worker.

    Raises:
        ValueError: an option is out of range, not one of its choices, or lacks another one.

    >>> RunOptions(placement="partition", checkpoint="runs/mine", save_every=500).timeout_s
    600.0
    """

    exchange: ExchangeName = "auto"
    """Which exchange to use between processes."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """The longest that one device waits for another."""
    record: str = ""
    """Existing folder in which the record of the run is written; empty for that of checkpoints."""
    profile: str = ""
    """Existing folder in which the timeline is written; empty for none."""
    checkpoint: str = ""
    """Directory of checkpoints: the run continues from the newest, and writes new ones there."""
    save_every: int = 200
    """Number of steps from one checkpoint to the next; 0 if time alone decides."""
    save_every_s: float = 0.0
    """Seconds from one checkpoint to the next; 0 if steps alone decide."""
    placement: str = field(
        default=DEFAULT_PLACEMENT, metadata={"help": f"Parameter placement: {described()}."}
    )
    """Which parameters, gradients and optimizer state each device keeps: one of the forms in
    `onefold.core.placements`."""
    offload_dir: str = ""
    """Folder of the file that has the model if devices do not keep all of it; empty for that of
    temporary files."""
    keep_last: int = 3
    """How many of the newest checkpoints are kept."""
    allow_changed: tuple[str, ...] = ()
    """What may differ from the run that wrote the checkpoints."""
    saves: bool = False
    """Whether workers that are asked to stop save themselves, as they do with ``checkpoint``."""
    stop_signals: tuple[str, ...] = ()
    """Signals by which another launcher than onefold's asks a process to stop, such as USR1."""
    audit: float = 0.0
    """How large a share of all shards is computed once more, on another device, and compared."""
    on_corruption: OnCorruption = "heal"
    """What a run does after a wrong result: continue with the right one, if any, or stop."""
    program: tuple[str, ...] = ()
    """The program that has launched a function, with its arguments; empty of scripts."""
    stops_after: int = 0
    """The step after which the run stops, as if it were asked to by a signal; 0 for none."""
    grace_period_s: float = DEFAULT_GRACE_PERIOD_S
    """How long a run that is asked to stop may take to save itself."""
    max_restarts: int = 0
    """How many times in a row the workers are restarted from the last checkpoint after a failure:
    a newer checkpoint makes the count begin anew."""
    restart_devices: RestartDevices = "same"
    """Whether restarts leave out a device that was lost; see `Outcome.lost`."""
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    """Options of tools that only a command of onefold uses, by the tool: see
    `onefold.tools.registry`."""
    logs: str = ""
    """Folder in which the output of the devices other than the lead is kept."""
    quiet: bool = False
    """Whether the lead's output goes to a log file as well."""

    def __post_init__(self) -> None:
        # Checked where the record is made, in the launcher, so before any worker is started.
        check_seconds("the timeout", self.timeout_s)
        check_seconds("the grace period", self.grace_period_s)
        check_whole("save_every", self.save_every, least=0 if self.save_every_s else 1)
        check_whole("keep_last", self.keep_last, least=1)
        check_whole("max_restarts", self.max_restarts, least=0)
        if not 0.0 <= self.audit <= 1.0:
            raise ValueError(f"expected audit to be a share from 0 to 1, got {self.audit!r}")
        if self.max_restarts and not self.checkpoint:
            raise ValueError("restarts go on from the last checkpoint: name a directory for them")
        check_choice("restart_devices", self.restart_devices, RestartDevices)
        check_choice("on_corruption", self.on_corruption, OnCorruption)
        kind_of(self.placement)
        self.check_combination(audit=self.audit)
        check_choice("the exchange", self.exchange, ExchangeName)

    @property
    def recorded_in(self) -> str:
        """The folder of the run's record; empty for none."""
        return self.record or self.checkpoint

    @property
    def placement_kind(self) -> PlacementKind:
        """What the launcher knows of the placement."""
        return kind_of(self.placement)

    def check_combination(self, **chosen: object) -> None:
        """Refuse options and settings that this placement cannot have.

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
                    f"{reason}. Leave out {name}, or use placement {' or '.join(others)}"
                )

    def pipeline_of(self, devices: int) -> int:
        """How many devices compute a shard together if a run has so many; 1 without a
        pipeline.

        Raises:
            ValueError: the devices do not make whole pipelines.

        >>> RunOptions(placement="pipeline:2").pipeline_of(4)
        2
        """
        if not self.placement_kind.has_pipelines:
            return 1
        pipeline = int(self.placement.partition(":")[2] or devices)
        if devices % pipeline:
            raise ValueError(
                f"expected a number of devices that is a multiple of {pipeline} with --placement "
                f"{self.placement}, which makes pipelines of {pipeline} devices, got {devices}"
            )
        return pipeline

    @property
    def may_stop(self) -> bool:
        """Whether the run saves itself when it is asked to stop."""
        return self.saves or bool(self.checkpoint) or bool(self.stop_signals)


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
