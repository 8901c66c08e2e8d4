"""Makes a model without its values, where devices keep less than all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from onefold.deferred.recording import Recording
from onefold.launcher.environment import current_context
from onefold.system.file_memory import SparseAllocator, home_of

__all__ = ["LEAST_BYTES", "build"]


Given = ParamSpec("Given")


Model = TypeVar("Model")


LEAST_BYTES = 4096
"""Smaller tensors have their values from the beginning."""


def build(make: Callable[Given, Model], *args: Given.args, **kwargs: Given.kwargs) -> Model:
    """Make a model without its values, where devices keep less than all of them.

    With ``--placement partition``, ``offload`` and ``pipeline``, operations that make and fill
    tensors (``empty``, ``randn``, ``normal_``, and with them ``torch.nn.init``) are recorded, and
    the Trainer repeats them where each value is kept, a parameter at a time. Code that computes
    with a parameter before that, also after this call, gets its values: they then lie in a file, of
    which the system keeps in memory what there is room for. The bits are those of
    ``make(*args, **kwargs)``, and random numbers go on as they do after that. With ``--placement
    replicate`` this is that call. `onefold plan` needs no values at all.

    Args:
        make: the class of a model, or a function that makes one, several in a list or a dict, or a
            model and what belongs to it.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        OSError: the file has no room; ``--offload-dir`` names its folder.

    >>> onefold.build(torch.nn.Linear, 3, 2).weight.shape
    torch.Size([2, 3])
    """
    options = current_context().options
    # A plan looks at sizes alone, perhaps at those of a model that fits nowhere.
    if options.placement_kind.keeps_whole and "plan" not in options.tools:
        return make(*args, **kwargs)
    recording = Recording(SparseAllocator(home_of(options.offload_dir)), LEAST_BYTES)
    try:
        with recording.active():
            made = make(*args, **kwargs)
    except BaseException:
        # A script may have kept some of it.
        recording.draw_all()
        raise
    recording.finish(made)
    return made
