"""What may be settled for a run at its launch: one record, from the command line to a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onefold.core.numbers import check_seconds

__all__ = ["DEFAULT_GRACE_S", "DEFAULT_TIMEOUT_S", "ExchangeName", "RunOptions"]

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_GRACE_S = 60.0

ExchangeName = Literal["auto", "shared", "collective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a launcher settles for a run; the same record reaches every worker."""

    exchange: ExchangeName = "auto"
    """Which exchange to use between processes."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """The longest that a device waits for another one."""
    trace: str = ""
    """File that takes one JSON line a step."""
    profile: str = ""
    """Folder that takes the timeline; it must be there."""
    checkpoint: str = ""
    """Directory of checkpoints: go on from the newest there, and write new ones."""
    every: int = 200
    """Steps from one checkpoint to the next."""
    keep: int = 3
    """How many of the newest checkpoints stay."""
    changed: tuple[str, ...] = ()
    """What may differ from the run whose checkpoints they are."""
    saves: bool = False
    """The workers save themselves when they are asked to stop, as they do with ``checkpoint``."""
    grace_s: float = DEFAULT_GRACE_S
    """How long a run that saves itself may take to do so when it is asked to stop."""
    restarts: int = 0
    """How many times the workers are started again after a failure, from the last checkpoint."""
    probe: str = ""
    """Folder for the comparison of runs."""
    probe_run: str = ""
    """Name of this run in it."""
    probe_steps: int = 0
    """Steps to compare."""
    probe_records: bool = False
    """Record what others are compared with, rather than compare."""
    probe_mathematics: str = ""
    """Compare V shards with one in this run, in ``float64`` or ``float32``."""
    logs: str = ""
    """Folder that keeps the output of the devices other than the lead."""
    quiet: bool = False
    """The lead's output goes to a log file as well."""

    def __post_init__(self) -> None:
        check_seconds("the timeout", self.timeout_s)
        check_seconds("the grace", self.grace_s)
        for name, value, least in (
            ("every", self.every, 1),
            ("keep", self.keep, 1),
            ("restarts", self.restarts, 0),
        ):
            if value < least:
                raise ValueError(f"expected {name} of at least {least}, got {value}")
        if self.restarts and not self.checkpoint:
            raise ValueError("restarts go on from the last checkpoint: name a directory for them")
        if self.exchange not in ("auto", "shared", "collective"):
            raise ValueError(
                f"expected the exchange to be auto, shared or collective, got {self.exchange!r}"
            )

    @property
    def may_stop(self) -> bool:
        """Whether a request to stop has the run save itself."""
        return self.saves or bool(self.checkpoint)
