"""Processes that know each other by PyTorch's variables: ``apart.py KIND``.

``train``: four steps, and the fingerprint. ``listen``: which ports are open. ``fork``: a child that
ends at once is forked before there is a Trainer.
"""

import os
import sys
from contextlib import suppress

import torch
from torch import nn

import onefold
from onefold.launcher.environment import current_context


def listening() -> list[str]:
    """Addresses at which this process listens, in hexadecimal as the kernel shows them."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{name}"))
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(table) as file:
            rows = [line.split() for line in file.readlines()[1:]]
        found += [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return found


def main(kind: str) -> None:
    rank = int(os.environ["RANK"])
    if kind == "fork":
        current_context()
        if (child := os.fork()) == 0:
            return
        os.waitpid(child, 0)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean(dim=1)

    trainer = onefold.Trainer(model, optimizer, loss, shards=2, timeout_s=600)
    for number in range(1, 5):
        trainer.step(torch.full((4, 3), float(number)))
    if kind == "listen":
        print(f"{rank} {' '.join(listening())}", flush=True)
    print(trainer.fingerprint(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
