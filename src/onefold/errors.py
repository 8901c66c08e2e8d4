"""Every exception of onefold.

::

    OnefoldError
    ├── LaunchError            a run that cannot begin: no such script, no such device
    ├── RunFailed              a run that ended badly, as its launcher saw it
    ├── DisagreementError      the devices of one run do not run the same program
    ├── LossError              a loss of the wrong kind or shape, or one that is not finite
    ├── GradientError          a gradient that cannot be folded (sparse, another dtype)
    ├── StateError             state that cannot be folded, or that must not be saved
    ├── PrecisionError         an operation that a device cannot compute in the run's precision
    ├── PipelineError              a model that a pipeline cannot compute (--placement pipeline)
    ├── SampleError            a data set item that could not be read
    ├── DataError              files of a data set that cannot be used, found before training
    ├── CheckpointError        a checkpoint or file of weights that is damaged, or does not fit
    ├── RecordError            a record of a run that is damaged, or does not fit
    ├── AuditError             a device that computed wrong bits (onefold run --audit)
    └── PeerError              this device is sound, another one is not
        ├── PeerLost           it was killed, was stopped, or left the run
        ├── PeerFailed         it raised an exception; the message carries it
        └── PeerTimeout        it did not arrive within the limit

Bad arguments are plain ``ValueError`` and ``TypeError``, raised before any work begins.
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
    """Base of all exceptions that onefold raises on its own account."""


class LaunchError(OnefoldError):
    """A run could not begin."""


class RunFailed(OnefoldError):
    """A launched run ended badly; ``exit_code`` is what its command line would return."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class DisagreementError(OnefoldError):
    """Devices of one run differ in what must be alike; the message names who and in what."""


class LossError(OnefoldError, ValueError):
    """A loss that is of the wrong shape or type, or is not finite."""


class GradientError(OnefoldError, ValueError):
    """A gradient that cannot be added up in dense buffers."""


class StateError(OnefoldError, ValueError):
    """State that a shard changes outside the fold or as no rule covers, or that is not finite."""


class PrecisionError(OnefoldError, RuntimeError):
    """An operation for which a device has no kernel in the run's precision; names the layer."""


class PipelineError(OnefoldError, ValueError):
    """A model that a pipeline cannot compute as one device does; the message says where."""

    @classmethod
    def outside_of_stage(cls, parameter: str, stage: str, device: int) -> PipelineError:
        """The error where a device computes with a parameter whose stage another device has."""
        return cls(
            f"parameter {parameter} of stage {stage} is used on device {device}, outside of its "
            f"stage, which another device computes: in a part of it that is called alone, perhaps, "
            f"or in a penalty on all parameters. Name that part as a stage "
            f"(Trainer(stages=[...])), or use --placement partition"
        )


class SampleError(OnefoldError):
    """Reading a sample of a data set raised, and is named; or workers gave none in time."""


class DataError(OnefoldError, ValueError):
    """Files of a data set that cannot be used; the message names each file, and line."""


class CheckpointError(OnefoldError):
    """A checkpoint or file of weights that cannot be read, or does not fit."""


class RecordError(OnefoldError):
    """The record of a run is damaged, is of another kind, or has no such step."""


class AuditError(OnefoldError):
    """A device has computed wrong bits, and the run is not to go on: ``onefold run --audit``."""


class PeerError(OnefoldError):
    """Another device of the run failed; ``device`` is its number, ``step`` the step waited in."""

    def __init__(self, message: str, *, device: int = -1, step: int = -1) -> None:
        super().__init__(message)
        self.device = device
        self.step = step


class PeerLost(PeerError):
    """A device's process was killed, was stopped, or ended before the others."""

    @classmethod
    def before_start(cls, device: int) -> PeerLost:
        """The error where others wait to begin."""
        return cls(
            f"device {device} came to the end of its script without making this Trainer, for which "
            f"the others wait: every device must run the same script",
            device=device,
            step=0,
        )

    @classmethod
    def stopped(cls, device: int, pid: int, *, waiting: int, step: int) -> PeerLost:
        """The error where a device's process is stopped, and device ``waiting`` waits for it."""
        what = f"(process {pid}) is stopped (by SIGSTOP or a debugger) and does not respond"
        return cls.in_step(device, what, waiting=waiting, step=step)

    @classmethod
    def in_step(cls, device: int, what: str, *, waiting: int, step: int) -> PeerLost:
        """The error in a step; ``what`` has become of a device for which ``waiting`` waits."""
        return cls(
            f"device {device} {what}; device {waiting} waits for it in step {step}",
            device=device,
            step=step,
        )


class PeerFailed(PeerError):
    """A device raised an exception and said so before it left."""


class PeerTimeout(PeerError):
    """A device did not arrive within the limit."""

    @classmethod
    def in_step(
        cls, who: str, *, device: int, timeout_s: float, waiting: int, step: int
    ) -> PeerTimeout:
        """The error in a step; ``who`` names all that are late, ``device`` is the first of them."""
        return cls(
            f"{who} did not arrive within {timeout_s:g} s in step {step}, where device {waiting} "
            f"waits. If that much time is needed, raise the limit: timeout_s of Trainer, or "
            f"onefold run --timeout",
            device=device,
            step=step,
        )
