"""Runs tests with two pretended devices: ``python -m tests.pretended tests/gpu/test_bits.py``.

Arguments are those of pytest.
"""

import os
import sys

from tests.pretended import build

__all__ = ["main"]

SETTINGS = ("-p", "no:cacheprovider", "-o", "addopts=--strict-markers -q -m 'not full or gpu'")


def main() -> None:
    """Become a pytest that has the devices."""
    command = [sys.executable, "-m", "pytest", *SETTINGS, *sys.argv[1:]]
    # A Trainer would set the last one: what a test leaves in the environment is a leak.
    own = {"ONEFOLD_GPU_TESTS_ON": "pretend:0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment = {**build.environment(2), **own}
    os.chdir(build.ROOT)
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main()
