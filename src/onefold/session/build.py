"""Creates a model without parameter values if devices store only parts of them."""

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
"""Size in bytes below which tensors get their values immediately."""


def build(make: Callable[Given, Model], *args: Given.args, **kwargs: Given.kwargs) -> Model:
    """Create a model without parameter values if devices store only parts of them.

    With ``--placement partition``, ``offload`` and ``pipeline``, operations that create and fill
    tensors (``empty``, ``randn``, ``normal_``, and therefore ``torch.nn.init``) are recorded, and
    the Trainer repeats them where each value is stored, one parameter at a time. Code that computes
    with a parameter earlier, even after this call, gets its values: they are then in a file, which
    the operating system caches in memory as far as there is room. The bits equal those of
    ``make(*args, **kwargs)``, and the random state afterwards is the same. With ``--placement
    replicate`` this simply calls ``make``. `onefold plan` needs no values at all.

    Args:
        make: a model class, or a function that returns a model, several models in a list or dict,
            or a model and related objects.
        args: positional arguments of ``make``.
        kwargs: keyword arguments of ``make``.

    Raises:
        OSError: there is no space for the file; ``--offload-dir`` sets its directory.

    >>> onefold.build(torch.nn.Linear, 3, 2).weight.shape
    torch.Size([2, 3])
    """
    options = current_context().options
    # A plan needs only sizes, possibly of a model that fits nowhere.
    if options.placement_kind.keeps_whole and "plan" not in options.tools:
        return make(*args, **kwargs)
    recording = Recording(SparseAllocator(home_of(options.offload_dir)), LEAST_BYTES)
    try:
        with recording.active():
            made = make(*args, **kwargs)
    except BaseException:
        # The script may hold references to some of the tensors.
        recording.draw_all()
        raise
    recording.finish(made)
    return made
