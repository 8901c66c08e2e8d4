"""The names that the user's own code gives to parameters and buffers."""

from __future__ import annotations

__all__ = ["own_name"]

_COMPILED = "_orig_mod"
"""The name under which torch.compile holds the module that it wraps."""


def own_name(name: str) -> str:
    """The name that a parameter or buffer would have if nothing were compiled.

    >>> own_name("_orig_mod.encoder._orig_mod.weight")
    'encoder.weight'
    """
    # The last word is the tensor's own name, which a user is free to choose: only modules are
    # wrapped.
    *path, last = name.split(".")
    return ".".join([*(word for word in path if word != _COMPILED), last])
