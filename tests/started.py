"""``onefold`` as a process of its own, which a test runs to its end, stops, kills or waits for."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def ended(
    *words: str, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``onefold`` to its end, with these variables of the environment in addition."""
    return subprocess.run(
        [sys.executable, "-m", "onefold", *words],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=cwd,
        env={**os.environ, **variables},
    )


class StartedRun:
    """``onefold run`` with some options, of a script and its arguments."""

    def __init__(self, folder: Path, options: Sequence[str], script: Sequence[str]) -> None:
        self.output, self.errors = folder / "stdout", folder / "stderr"
        with self.output.open("wb") as out, self.errors.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "onefold", "run", *options, *script],
                stdout=out,
                stderr=err,
                env={**os.environ, "TMPDIR": str(folder)},
                start_new_session=True,
                # A test run that was started in the background passes on that Ctrl-C is ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def wait_until_ready(self) -> None:
        while b"ready" not in self.output.read_bytes():
            assert self.process.poll() is None, self.errors.read_text()
            time.sleep(0.02)
