"""Runs one of the versions of ``examples/ports`` that onefold's lines are counted against.

    port_version.py PATH NAME=VALUE

It is one process of several, as ``torchrun`` starts them: their variables are set already.
"""

from __future__ import annotations

import runpy
import sys

import torch


def main() -> None:
    torch.set_num_threads(1)
    name, value = sys.argv[2].split("=")
    runpy.run_path(sys.argv[1])["main"](**{name: int(value)})


if __name__ == "__main__":
    main()
