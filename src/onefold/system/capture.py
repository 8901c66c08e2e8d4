"""Captures the kernels that a block launches on an accelerator, to launch them again in one call.

One function covers `torch.cuda.CUDAGraph` and, for other accelerators, `torch.accelerator.Graph`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from onefold.system.accelerator import on_stream

__all__ = ["Graph", "captured"]


class Graph(Protocol):
    """A captured graph of kernels: `torch.cuda.CUDAGraph` or `torch.accelerator.Graph`."""

    def replay(self) -> None:
        """Launch all kernels on the current stream."""

    def pool(self) -> tuple[int, int]:
        """Return the memory pool of the graph."""


@contextmanager
def captured(
    device: torch.device, stream: torch.Stream, pool: tuple[int, int] | None
) -> Iterator[Graph]:
    """Capture what the block launches on a device, without running it.

    Args:
        device: the device.
        stream: a stream of the device that is not its default stream.
        pool: memory pool of earlier graphs; None for a new pool.
    """
    before = torch.accelerator.current_stream(device)
    stream.wait_stream(before)
    with on_stream(device, stream):
        graph = _begin_graph(device, pool)
        try:
            yield graph
        except BaseException:
            # The error has invalidated the capture, and then ending it raises, too.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    before.wait_stream(stream)


def _begin_graph(device: torch.device, pool: tuple[int, int] | None) -> Any:
    # Other threads copy batches and checkpoints during the capture; "thread_local" permits that.
    if device.type == "cuda":
        on_cuda: Any = torch.cuda.CUDAGraph()
        on_cuda.capture_begin(pool=pool, capture_error_mode="thread_local")
        return on_cuda
    graph = torch.accelerator.Graph(pool=pool, capture_error_mode="thread_local")
    graph.capture_begin()
    return graph
