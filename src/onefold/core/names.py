"""The user's own names of parameters and buffers."""

from __future__ import annotations

__all__ = ["own_name"]

_COMPILED = "_orig_mod"
"""What torch.compile puts before the names of the module that it wraps: nobody's own word."""


def own_name(name: str) -> str:
    """A name as it is where the model, or a part of it, is not compiled.

    >>> own_name("_orig_mod.encoder._orig_mod.weight")
    'encoder.weight'
    """
    *path, last = name.split(".")
    return ".".join([*(word for word in path if word != _COMPILED), last])
