"""Makes models whose values are drawn where they are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from onefold.run.recording import Recording
from onefold.run.world import current_world
from onefold.system.bare import BareMemory
from onefold.system.heap import home_of

__all__ = ["build"]

Given = ParamSpec("Given")
Model = TypeVar("Model")

_LEAST_BYTES = 4096
"""Smaller tensors have their values at once."""


def build(make: Callable[Given, Model], *args: Given.args, **kwargs: Given.kwargs) -> Model:
    """Make a model without its values, where devices keep less than all of them.

    With ``--keep span``, ``host`` and ``stages`` PyTorch's functions that make and fill tensors
    (``empty``, ``randn``, ``normal_``, those of ``torch.nn.init`` and the like) note what they
    would do, and the Trainer has it done where each value is kept, a parameter at a time. What
    computes with a parameter before that, also after this call, gets its values: then it lies in a
    file, of which the system keeps in memory what there is room for. The bits are those of
    ``make(*args, **kwargs)``, which this is with ``--keep all``, and random numbers go on as they
    do after that. `onefold plan` needs no values at all.

    Args:
        make: the class of a model, or a function that makes one, several in a list or a dict, or a
            model and what belongs to it.
        args: its arguments.
        kwargs: its arguments with names.

    Raises:
        OSError: there is no room for the file; ``--home`` names the folder in which it is.

    >>> onefold.build(torch.nn.Linear, 3, 2).weight.shape
    torch.Size([2, 3])
    """
    options = current_world().options
    # A plan looks at sizes alone, perhaps at those of a model that fits nowhere.
    if options.keep == "all" and not options.plan:
        return make(*args, **kwargs)
    recording = Recording(BareMemory(home_of(options.home)), _LEAST_BYTES)
    try:
        with recording.noting():
            made = make(*args, **kwargs)
    except BaseException:
        # A script may have kept some of it.
        recording.draw_all()
        raise
    recording.finish(made)
    return made
