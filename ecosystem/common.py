"""Data, model, digest and interruption that all scripts of this folder share."""

import hashlib
import os
import signal
import time
from pathlib import Path

import torch

SHARDS = int(os.environ.get("ECOSYSTEM_SHARDS", "1"))
SAMPLES, BATCH, EPOCHS = 120, 12, 3


def points():
    """Points (n, 8) float32 and their class (n,) int64."""
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] * x[:, 1] > 0).long()


def network():
    """A small classifier of the points, with the same weights in every process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


def report(model, others=()):
    """Print a digest of all parameters and buffers, and of other tensors or numbers."""
    named = [*model.state_dict().items(), *enumerate(map(torch.as_tensor, others))]
    digest = hashlib.sha256()
    for name, value in named:
        digest.update(f"{name}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    print("sha256", digest.hexdigest())


def killed_after(step, saved, folder):
    """Kill every process of a run after a step, once the checkpoint of an earlier step is whole.

    Args:
        step: number of the last step.
        saved: number of the step whose checkpoint must exist.
        folder: the folder of checkpoints.
    """
    import onefold

    make = onefold.Trainer.step

    def watched(*arguments, **named):
        done = make(*arguments, **named)
        if done.number == step:
            deadline = time.monotonic() + 60
            while not [*Path(folder).glob(f"step-*{saved}/run.json")]:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no checkpoint of step {saved} in {folder} after 60 s")
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    onefold.Trainer.step = watched


if "ECOSYSTEM_KILL" in os.environ:
    step, saved, folder = os.environ["ECOSYSTEM_KILL"].split(" ", 2)
    killed_after(int(step), int(saved), folder)
