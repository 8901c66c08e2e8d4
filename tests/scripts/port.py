"""Runs one of ``examples/ports`` for a short time, and perhaps has it stop halfway.

    port.py PATH HOW STOP [NAME=VALUE ...]

HOW the run ends after step STOP: ``crash`` raises an exception on every device; ``signal`` sends
SIGTERM to the launcher, as a scheduler does; ``never`` lets it come to its end, and prints how many
steps it made and its fingerprint.
"""

import os
import runpy
import signal
import sys
import time
from typing import Any

import onefold
from onefold.launcher.environment import current_context

PATH, HOW, STOP = sys.argv[1], sys.argv[2], int(sys.argv[3])
CHOICES = dict(word.split("=") for word in sys.argv[4:])
CALLS = [name for name in ("step", "gradient") if hasattr(onefold.Trainer, name)]
seen = 0
"""The number of the last step."""


def watched(call: Any) -> Any:
    """The call of the trainer, and the end of the run where its time has come."""

    def made(*arguments: Any, **named: Any) -> Any:
        global seen
        step = call(*arguments, **named)
        seen = step.number
        if HOW == "crash" and seen > STOP:
            raise InterruptedError("the crash that was asked for")
        if HOW == "signal" and seen >= STOP:
            if seen == STOP and current_context().rank == 0:
                os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(0.1)  # or the run is over before the signal has come
        return step

    return made


def main() -> None:
    for name in CALLS:
        setattr(onefold.Trainer, name, watched(getattr(onefold.Trainer, name)))
    numbers = {name: int(text) if text.isdecimal() else text for name, text in CHOICES.items()}
    fingerprint = runpy.run_path(PATH)["main"](**numbers)
    print(f"ended after step {seen} with {fingerprint}")


if __name__ == "__main__":
    main()
