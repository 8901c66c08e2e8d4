"""Trains for 15 steps and prints the fingerprint. FATE is "RANK STEP SIGNAL", or empty.

After that step, the process of that rank gets the signal, or each process exits with a number in
its place; HOST kills the launcher of its host as well. With NOTICE, the process writes the file
NOTICE and waits until it is found by onefold, or by the pretended metadata server at METADATA. The
script knows nothing of checkpoints.
"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch

import onefold
from onefold.launcher.environment import current_context
from onefold.tools import stops

rank, step, number = (os.environ.get("FATE") or "-1 -1 TERM").split()
mine = current_context().rank == int(rank)
if "METADATA" in os.environ:
    stops.notice_of = partial(stops.notice_of, address=os.environ["METADATA"])  # type: ignore[assignment]


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean(dim=1)


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
stops.PAUSE_S = 0.05
trainer = onefold.Trainer(model, optimizer, loss, shards=4, seed=0, threads=1)
loader = trainer.loader(torch.randn(40, 4), batch_size=8, shuffle=True)
for _ in trainer.epochs(3):
    for batch in loader:
        trainer.step(batch)
        if number.isdecimal() and trainer.steps == int(step):
            sys.exit(int(number))
        if not mine or trainer.steps != int(step) or trainer.replaying:
            continue
        if number == "NOTICE":
            Path(os.environ["NOTICE"]).write_text("now")
            time.sleep(1.0)
            continue
        if number == "HOST":
            os.kill(os.getppid(), signal.SIGKILL)
        name = "KILL" if number == "HOST" else number
        os.kill(os.getpid(), signal.Signals[f"SIG{name}"])
print("end", trainer.fingerprint())
