"""Backward hooks of a script on the modules of a model that a line of devices computes.

PyTorch puts such hooks into the graph of what a module is called with and of what it gives. What
is hollow has no graph, so on a device that computes a stage in shape alone they are hidden; a
module that more than one device has a part of cannot have any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from onefold.engine.hollow import Hollow, Reach, tensors_of
from onefold.errors import LineError
from onefold.system.hooks import has_backward_hooks, hide_backward_hooks

__all__ = ["hooks_in_place"]


@contextmanager
def hooks_in_place(
    model: torch.nn.Module, place_of: Mapping[torch.nn.Module, int], place: int, reach: Reach
) -> Iterator[None]:
    """Surround a loss, or a backward, of one shard on a device of a line.

    Args:
        model: the whole.
        place_of: the place in the line of each module that is a part of a stage.
        place: of the device.
        reach: how far the device has come.

    Raises:
        LineError: a module has hooks that no device alone could call.
    """
    with ExitStack() as put:
        for name, part in model.named_modules():
            if not has_backward_hooks(part):
                continue
            places = {place_of[inner] for inner in part.modules() if inner in place_of}
            if len(places) > 1:
                raise LineError(
                    f"{reach.where}: {name or 'the model'} has a backward hook, and stages on "
                    f"several devices of a line, none of which sees both ends of it: expected "
                    f"backward hooks on stages, or on parts of them. Use --keep span"
                )
            if places and min(places) < place:
                put.enter_context(hide_backward_hooks(part))
            elif part not in place_of:
                check = _refusing(name, reach)
                put.callback(part.register_forward_pre_hook(check, with_kwargs=True).remove)
        yield


def _refusing(name: str, reach: Reach) -> Callable[..., None]:
    def check(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if any(isinstance(tensor, Hollow) for tensor in tensors_of((args, kwargs))):
            raise LineError(
                f"{reach.where}: {name} has a backward hook and is no stage nor part of one, and "
                f"is called with what a stage on another device gives: expected backward hooks on "
                f"stages, or on parts of them. Name it as a stage (Trainer(stages=[...])), or use "
                f"--keep span"
            )

    return check
