"""What a worker may send: each tensor takes a descriptor, and a process may have so many."""

import multiprocessing
import multiprocessing.context
import os
import resource
import signal
import subprocess
import sys
import types
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from onefold.core.shard import Shares
from onefold.data_order.reader import Answer, BadSample, Request
from onefold.data_order.worker_processes import Sending
from onefold.errors import SampleError
from tests.small import make_trainer
from tests.tables import for_each

REQUEST = Request(0, 2, 8, 24, Shares((1,)), (0,), 0, None, {0: [*range(8)]}, {}, -1)


@pytest.fixture
def _limits() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def limited(soft: int) -> None:
    """Allow as many open files, beside those that earlier tests have left this process with."""
    soft += max(0, len(os.listdir("/proc/self/fd")) - 24)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def answer_of(tensors: int) -> Answer:
    """They are found wherever they are."""
    first, second, *values = [torch.zeros(2) for _ in range(tensors)]
    sample = types.SimpleNamespace(boxes=deque([first]), names={"x"})
    return Answer(REQUEST, {0: {"images": [sample, (second, 3)], "boxes": values, "names": "x"}})


@pytest.mark.usefixtures("_limits")
def test_what_cannot_be_sent_is_said_with_the_limit() -> None:
    limited(256)
    sending = Sending()
    fits = answer_of(20)
    assert sending(fits) is fits
    found = sending(answer_of(200)).payloads
    assert isinstance(found, BadSample)
    assert (found.index, found.epoch, found.kind) == (24, 2, "OSError")
    assert "a worker process needs 416 more open files, but its limit is" in found.text
    assert f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} and it has" in found.text
    assert "each of the 200 tensors of a batch" in found.text


@for_each("limit", [64, 4000])
@pytest.mark.usefixtures("_limits")
def test_what_holds_no_tensors_passes(limit: int) -> None:
    limited(limit)
    own: list[object] = [[1, "x", None, 2.5]] * 1000
    own.append(own)
    for payloads in ({0: own}, BadSample(3, 0, "ValueError", "no", "")):
        answer = Answer(REQUEST, payloads)
        assert Sending()(answer) is answer


SCRIPT = """
import resource, torch, onefold
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = onefold.Trainer(
    model, optimizer, lambda m, b: m(b[0]).square().mean(1), shards=4, timeout_s=300
)
data = torch.utils.data.TensorDataset(*[torch.ones(64, 4) for _ in range(20)])
for batch in trainer.loader(data, batch_size=16, workers=2):
    step = trainer.step(batch)
print("trained", step.number)
"""


def run(script: Path, *, soft: int, hard: int) -> tuple[str, str]:
    script.write_text(SCRIPT.format(soft=soft, hard=hard))
    command = [sys.executable, "-m", "onefold", "run", "--devices", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return done.stdout, done.stderr


@pytest.mark.processes
def test_too_few_open_files_end_the_run_with_a_word(tmp_path: Path) -> None:
    assert run(tmp_path / "train.py", soft=100, hard=1000) == ("trained 4\n", "")
    _, errors = run(tmp_path / "train.py", soft=100, hard=100)
    assert "SampleError: sending the batch up to sample 16 in epoch 0 failed: OSError" in errors
    assert "(ulimit -n)" in errors


class Killed(multiprocessing.context.ForkProcess):
    """Is killed before PyTorch hears of it."""

    def start(self) -> None:
        super().start()
        os.kill(self.pid or 0, signal.SIGKILL)
        self.join()


class Killing(multiprocessing.context.ForkContext):
    Process = Killed


def test_a_worker_that_is_killed_as_it_starts_is_noticed_at_once() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, num_workers=2, multiprocessing_context=Killing()
    )
    batches = make_trainer(timeout_s=60.0).loader(loader)
    with pytest.raises(SampleError, match="started 2 worker processes of a loader, but one ended"):
        next(iter(batches))
