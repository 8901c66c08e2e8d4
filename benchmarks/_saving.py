"""One device of `checkpoint.py`: trains blocks of steps with and without checkpoints, and times
both.

A block with a checkpoint starts with a background save, and ends when its steps are done and the
checkpoint is on disk, so it includes both the slowdown of training and the remaining wait. Each
call is also timed separately after the blocks.
"""

import argparse
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Collection
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

import onefold
from loops import losses, plain_step
from measure import in_turn, machine_busy_s
from onefold.launcher.environment import current_context
from workloads import WORKLOADS, Workload

__all__ = ["DCP", "KEEP", "LOAD", "SAVE", "TORCH_SAVE", "WITH", "WITHOUT", "Training", "main"]

WITH, WITHOUT = "with", "without"
"""Blocks with and without a checkpoint at their start."""
SAVE, LOAD = "trainer.save", "trainer.load"
TORCH_SAVE, DCP = "torch.save, fsync", "torch's async_save"
"""Separately timed calls; the last one is from torch.distributed.checkpoint."""

KEEP = 2
WARM_UP_STEPS = 2
WARM_UP_SAVES = KEEP + 1
"""The last of them also deletes a checkpoint, as in a long run."""

Times = dict[str, float]


class Writing:
    """The background work of a call, and when it ends.

    Args:
        threads: threads that the call started.
        start_s: start time of the call.
    """

    def __init__(self, threads: Collection[threading.Thread], start_s: float) -> None:
        self._threads = threads
        self._start_s = start_s
        self._done_s = 0.0
        self._watch = threading.Thread(target=self._note_end)
        self._watch.start()

    def wait(self) -> float:
        """Wait for the end; return the seconds since the call."""
        self._watch.join()
        return self._done_s

    def _note_end(self) -> None:
        for thread in self._threads:
            thread.join()
        self._done_s = time.perf_counter() - self._start_s


class Training:
    """One process's part of a workload with onefold, and its checkpoints.

    Args:
        workload: workload to train.
        shards: shards per batch.
        directory: folder of the checkpoints.
    """

    def __init__(self, workload: Workload, shards: int, directory: Path) -> None:
        model, optimizer = workload.build()
        self.trainer = onefold.Trainer(model, optimizer, losses, shards=shards, threads=1)
        self._batches = cycle(workload.batches())
        self._directory = directory

    def warm_up(self) -> None:
        """Train and save until everything has happened at least once."""
        self.train(WARM_UP_STEPS)
        for _ in range(WARM_UP_SAVES):
            self.save(wait=True)
            self.train(1)

    def train(self, steps: int) -> None:
        """Run `steps` steps; return when the last one is done."""
        for _ in range(steps):
            done = self.trainer.step(next(self._batches))
        done.loss.item()

    def save(self, *, wait: bool) -> Path:
        """Write a checkpoint; return its folder."""
        return self.trainer.save(self._directory, keep=KEEP, wait=wait)

    def block(self, steps: int, *, save: bool) -> Times:
        """Run a block; return its times and the machine's load."""
        busy_before_s, cpu_before_s = machine_busy_s(), time.process_time()
        start_s = time.perf_counter()
        saved = self._begin_saving() if save else None
        self.train(steps)
        trained_s = time.perf_counter()
        written_s = saved[1].wait() if saved else 0.0
        end_s = time.perf_counter()
        return {
            "seconds": end_s - start_s,
            "cpu_seconds": time.process_time() - cpu_before_s,
            "busy_seconds": machine_busy_s() - busy_before_s,
            "call_s": saved[0] if saved else 0.0,
            "written_s": written_s,
            "waited_s": end_s - trained_s if saved else 0.0,
        }

    def _begin_saving(self) -> tuple[float, Writing]:
        """Save in the background; return how long the call blocked, and the remaining work."""
        before, start_s = set(threading.enumerate()), time.perf_counter()
        self.save(wait=False)
        call_s = time.perf_counter() - start_s
        return call_s, Writing(set(threading.enumerate()) - before, start_s)

    def timed_save(self) -> Times:
        """Time a save that returns when everything is on disk."""
        self.train(1)  # synchronizes the devices, and changes what to save
        start_s = time.perf_counter()
        folder = self.save(wait=True)
        seconds = time.perf_counter() - start_s
        return {"call_s": seconds, "done_s": seconds, "bytes": self._bytes_of(folder)}

    def timed_load(self) -> Times:
        """Time a load of the last save, which is in the page cache."""
        self.train(1)
        start_s = time.perf_counter()
        found = self.trainer.load(self._directory)
        seconds = time.perf_counter() - start_s
        return {"call_s": seconds, "done_s": seconds, "bytes": self._bytes_of(found.folder)}

    def _bytes_of(self, folder: Path) -> int:
        return bytes_of(folder) if self.trainer.is_lead else 0  # the lead may already delete it


class PlainSaving:
    """The same model and optimizer without onefold, saved in one process.

    Args:
        workload: workload to train, for one step.
        folder: folder to write to.
    """

    def __init__(self, workload: Workload, folder: Path) -> None:
        self._model, self._optimizer = workload.build()
        plain_step(self._model, self._optimizer)(workload.batches()[0])
        self._path = folder / "plain"

    def torch_save(self) -> Times:
        """Time `torch.save` of both, until everything is on disk."""
        start_s = time.perf_counter()
        with self._path.open("wb") as file:
            torch.save(self._state(), file)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start_s
        found = {"call_s": seconds, "done_s": seconds, "bytes": self._path.stat().st_size}
        self._path.unlink()
        return found

    def dcp_save(self) -> Times:
        """Time PyTorch's background checkpoint, without training in the meantime."""
        start_s = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writing = async_save(self._state(), checkpoint_id=self._path, no_dist=True)
        call_s = time.perf_counter() - start_s
        if isinstance(writing, AsyncSaveResponse):
            writing = writing.upload_completion
        writing.result()
        done_s = time.perf_counter() - start_s
        found = {"call_s": call_s, "done_s": done_s, "bytes": bytes_of(self._path)}
        shutil.rmtree(self._path)
        return found

    def _state(self) -> dict[str, dict[str, object]]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}


def bytes_of(folder: Path) -> int:
    """Return the total size of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def blocks(training: Training, *, steps: int, rounds: int) -> dict[str, list[Times]]:
    """Time blocks with and without a checkpoint, alternately."""
    return in_turn(
        {
            WITH: partial(training.block, steps, save=True),
            WITHOUT: partial(training.block, steps, save=False),
        },
        rounds=rounds,
    )


def calls(
    training: Training, workload: Workload, folder: Path, *, rounds: int
) -> dict[str, list[Times]]:
    """Time all separate calls, alternately, without the first round.

    Only the lead runs calls that do not need onefold; the others wait for it in their next step.
    """
    measurements: dict[str, Callable[[], Times]] = {
        SAVE: training.timed_save,
        LOAD: training.timed_load,
    }
    if training.trainer.is_lead:
        plain = PlainSaving(workload, folder)
        measurements |= {TORCH_SAVE: plain.torch_save, DCP: plain.dcp_save}
    taken = in_turn(measurements, rounds=rounds + 1)
    return {name: times[1:] for name, times in taken.items()}


def main() -> None:
    """Run as the command line says; write the times to the folder, by device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps per block")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("folder", type=Path, help="folder for checkpoints and times")
    args = parser.parse_args()
    torch.set_num_threads(1)
    workload = WORKLOADS[args.workload]
    training = Training(workload, args.shards, args.folder / "checkpoints")
    training.warm_up()
    found = {
        "blocks": blocks(training, steps=args.every, rounds=args.rounds),
        "calls": calls(training, workload, args.folder, rounds=args.rounds),
    }
    rank = current_context().rank
    (args.folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
