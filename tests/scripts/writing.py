"""Writes checkpoints in children of its own, which are killed at it.

For each line ``DIRECTORY NUMBER CHANGES`` of its input a child writes checkpoints one after the
other, the first of this number. It kills itself just before so many files or folders have been
opened, made, renamed and deleted, if it has not written two until then; with 0 it goes on until it
is killed. The output tells ``child PID``, ``begun NUMBER`` and ``written NUMBER`` for each, and
``ended``.
"""

import os
import signal
import sys
from itertools import count, islice
from pathlib import Path

import torch

from onefold.checkpoint.folder import folder_of, prune, write_checkpoint
from onefold.system.tensor_file import TensorParts

NUMEL = 20_000
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def step_of(number: int) -> int:
    """Two checkpoints of each step: one is replaced by the other."""
    return number // 2


def write(directory: Path, number: int) -> None:
    """A checkpoint that is full of its number, and room for it."""
    step = step_of(number)
    values = torch.full((NUMEL,), float(number), dtype=torch.float64)
    data = values.view(torch.uint8).numpy()
    parts = [TensorParts("values", values.dtype, (NUMEL,), (1,), [data])]
    files = {"model.safetensors": parts, "optimizer.safetensors": parts}
    keeping = {"scores": {}, "keep": 2, "best": None}
    run = {"format": 1, "run": "one", "step": step, "number": number, **keeping}
    write_checkpoint(folder_of(directory, step), files, run, lambda _: None)
    prune(directory, run="one", keep=2)


def kill_before(changes: int) -> None:
    """Kill this process when it is about to make so many changes on the disk."""
    left = [changes]

    def look(event: str, _: object) -> None:
        if event in CHANGES:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def tell(*words: object) -> None:
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def write_on(directory: Path, first: int, changes: int) -> None:
    """Until killed."""
    tell("child", os.getpid())
    if changes:
        kill_before(changes)
    for number in islice(count(first), 2 if changes else None):
        tell("begun", number)
        write(directory, number)
        tell("written", number)


def main() -> None:
    for line in sys.stdin:
        directory, first, changes = line.split()
        if not (child := os.fork()):
            write_on(Path(directory), int(first), int(changes))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL), status
        tell("ended")


if __name__ == "__main__":
    main()
