"""Reads in one worker, made as ``reads.py fork|forkserver|spawn`` says, what this process would.

New tensors are of the dtype that the script has chosen, in a worker too.
"""

import multiprocessing
import sys

import torch

from onefold.core.shard import Shares
from onefold.data_order.loader import Loader


class Noise:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3) + index


def read(workers: int) -> list[dict[int, list[float]]]:
    choices = {"first_epoch": 0, "pin_memory": False, "timeout_s": 300}
    loader = Loader(
        Noise(),
        batch_size=2,
        workers=workers,
        seed=0,
        shares=lambda: Shares((2,)),
        own=lambda: [0],
        **choices,
    )
    return [{n: part.tolist() for n, part in batch.shards.items()} for batch in loader]


if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1], force=True)
    torch.set_default_dtype(torch.float64)
    print(read(1) == read(0))
