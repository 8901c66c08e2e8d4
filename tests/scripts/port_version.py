"""Runs one of the versions of ``examples/ports`` that onefold's lines are counted against.

    port_version.py PATH NAME=VALUE

It is one process of several, as ``torchrun`` starts them: their variables are set already.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch
import torch.distributed as dist


def end_together(group: object = None) -> None:
    """End the process where a version tears its group down, which is the last thing that it does.

    Each thread of gloo may wait for ever in its end, for a peer that has ended before.
    """
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    dist.destroy_process_group = end_together
    name, value = sys.argv[2].split("=")
    runpy.run_path(sys.argv[1])["main"](**{name: int(value)})


if __name__ == "__main__":
    main()
