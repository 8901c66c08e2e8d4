"""Exceptions of onefold.

::

    OnefoldError
    ├── LaunchError            a run that cannot start: no such script, no such device
    ├── RunFailed              a launched run that failed
    ├── DisagreementError      devices of one run that differ where they must agree
    ├── LossError              a loss of the wrong type or shape, or one that is not finite
    ├── GradientError          a gradient that cannot be folded (sparse, another dtype)
    ├── StateError             state that cannot be folded, or that must not be saved
    ├── PrecisionError         an operation that a device cannot compute in the run's precision
    ├── PipelineError          a model that a pipeline cannot compute (--placement pipeline)
    ├── SampleError            a data set item that could not be read
    ├── DataError              files of a data set that cannot be used, found before training
    ├── CheckpointError        a checkpoint or file of weights that is damaged, or does not fit
    ├── RecordError            a record of a run that is damaged, or does not fit
    ├── AuditError             a device that computed wrong bits (onefold run --audit)
    └── PeerError              another device failed, not this one
        ├── PeerLost           it was killed, was stopped, or left the run
        ├── PeerFailed         it raised an exception; the message carries it
        └── PeerTimeout        it did not arrive within the limit

Invalid arguments raise plain ``ValueError`` and ``TypeError``, before anything changes.
"""

from __future__ import annotations

__all__ = [
    "AuditError",
    "CheckpointError",
    "DataError",
    "DisagreementError",
    "GradientError",
    "LaunchError",
    "LossError",
    "OnefoldError",
    "PeerError",
    "PeerFailed",
    "PeerLost",
    "PeerTimeout",
    "PipelineError",
    "PrecisionError",
    "RecordError",
    "RunFailed",
    "SampleError",
    "StateError",
]


class OnefoldError(Exception):
    """Base class of all exceptions that onefold defines."""


class LaunchError(OnefoldError):
    """A run could not start."""


class RunFailed(OnefoldError):
    """A launched run failed; ``exit_code`` is the exit code of its command line."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def _render_traceback_(self) -> list[str]:
        # IPython calls this: in a notebook, the frames of the launcher would hide the message.
        return [f"{type(self).__name__}: {self}"]


class DisagreementError(OnefoldError):
    """Devices of one run differ where they must agree; the message names device and difference."""


class LossError(OnefoldError, ValueError):
    """A loss that has the wrong shape or type, or is not finite."""


class GradientError(OnefoldError, ValueError):
    """A gradient that cannot be summed in dense buffers."""


class StateError(OnefoldError, ValueError):
    """State that a shard changes without a rule for it, or that is not finite."""


class PrecisionError(OnefoldError, RuntimeError):
    """An operation without a kernel for the run's precision on a device; names the layer."""


class PipelineError(OnefoldError, ValueError):
    """A model that a pipeline cannot compute as one device does; the message names the place."""

    @classmethod
    def outside_of_stage(cls, parameter: str, stage: str, device: int) -> PipelineError:
        """Return the error for a parameter of another device's stage."""
        return cls(
            f"parameter {parameter} of stage {stage} is used on device {device}, outside of its "
            f"stage, which another device computes: perhaps in a part of the stage that is called "
            f"separately, or in a penalty on all parameters. Name that part as a stage "
            f"(Trainer(stages=[...])), or use --placement partition"
        )


class SampleError(OnefoldError):
    """A sample of a data set that could not be read; names it. Or workers returned none in time."""


class DataError(OnefoldError, ValueError):
    """Files of a data set that cannot be used; the message names each file and line."""


class CheckpointError(OnefoldError):
    """A checkpoint or file of weights that cannot be read, or does not fit."""


class RecordError(OnefoldError):
    """The record of a run is damaged, has another format, or has no such step."""


class AuditError(OnefoldError):
    """A device computed wrong bits, and the run must stop: ``onefold run --audit``."""


class PeerError(OnefoldError):
    """Another device failed: ``device`` is its number, ``step`` the step of this device's wait."""

    def __init__(self, message: str, *, device: int = -1, step: int = -1) -> None:
        super().__init__(message)
        self.device = device
        self.step = step


class PeerLost(PeerError):
    """A device's process was killed, was stopped, or ended before the others."""

    @classmethod
    def before_start(cls, device: int) -> PeerLost:
        """Return the error for a device that ended while others wait to start."""
        return cls(
            f"device {device} reached the end of its script without creating this Trainer, for "
            f"which the others wait. Run the same script on every device",
            device=device,
            step=0,
        )

    @classmethod
    def stopped(cls, device: int, pid: int, *, waiting: int, step: int) -> PeerLost:
        """Return the error for a stopped process for which device ``waiting`` waits."""
        what = f"(process {pid}) is suspended (by SIGSTOP or a debugger) and does not respond"
        return cls.in_step(device, what, waiting=waiting, step=step)

    @classmethod
    def in_step(cls, device: int, what: str, *, waiting: int, step: int) -> PeerLost:
        """Return the error for a step; ``what`` describes what happened to the device."""
        return cls(
            f"device {device} {what}; device {waiting} waits for it in step {step}",
            device=device,
            step=step,
        )


class PeerFailed(PeerError):
    """A device raised an exception, and reported it before it left."""


class PeerTimeout(PeerError):
    """A device did not arrive within the limit."""

    @classmethod
    def in_step(
        cls, who: str, *, device: int, timeout_s: float, waiting: int, step: int
    ) -> PeerTimeout:
        """Return the error for a step; ``who`` names all late devices, ``device`` the first one."""
        return cls(
            f"{who} did not arrive within {timeout_s:g} s in step {step}, where device {waiting} "
            f"waits. If this is not a hang, raise the limit: timeout_s of Trainer, or onefold run "
            f"--timeout",
            device=device,
            step=step,
        )
