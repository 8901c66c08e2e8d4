"""Makes models that lie in a file from the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from onefold.run.world import current_world
from onefold.system.heap import DiskHeap

__all__ = ["build"]

Given = ParamSpec("Given")
Model = TypeVar("Model")


def build(make: Callable[Given, Model], *args: Given.args, **kwargs: Given.kwargs) -> Model:
    """Make a model without having all of it in memory, where devices keep less than all of it.

    Under ``--keep span`` and ``--keep host`` each parameter on the processor moves to a file as
    soon as a module has it, so that its first values are drawn there; the system keeps as much of
    the file in memory as there is room. The bits are those of ``make(*args, **kwargs)``, which this
    is with ``--keep all``.

    Args:
        make: the class of a model, or a function that makes one.
        args: its arguments.
        kwargs: its arguments with names.

    Raises:
        OSError: there is no room for the file; ``--home`` names the folder in which it is.

    >>> onefold.build(torch.nn.Linear, 3, 2).weight.shape
    torch.Size([2, 3])
    """
    options = current_world().options
    if options.keep == "all":
        return make(*args, **kwargs)
    heap = DiskHeap.at(options.home)

    def move(_: torch.nn.Module, __: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            # Through .data: whoever holds this very parameter, tied to it perhaps, follows.
            parameter.data = heap.kept(parameter.data)

    handle = register_module_parameter_registration_hook(move)
    try:
        made = make(*args, **kwargs)
    finally:
        handle.remove()
    for parameter in made.parameters() if isinstance(made, torch.nn.Module) else ():
        # Once more, for what to() and its like have put in its place since.
        parameter.data = heap.kept(parameter.data)
    return made
