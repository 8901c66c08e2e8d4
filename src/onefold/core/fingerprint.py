"""A short name for the exact bits of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from onefold.core.flat import bits_of
from onefold.core.names import own_name

__all__ = ["fingerprint_of", "named_tensors", "tensor_digests"]


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer under its own name, in the module's order; tied ones once."""
    # A compiled model has the same fingerprint as the plain one: `own_name` drops what the compiler
    # adds to the names.
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {own_name(name): tensor for name, tensor in tensors.items()}


def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Digest every tensor: 32 hexadecimal digits each, over dtype, shape and bits."""
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def fingerprint_of(digests: Mapping[str, str]) -> str:
    """Combine names and digests, in their order, into 16 hexadecimal digits."""
    lines = "".join(f"{name} {digest}\n" for name, digest in digests.items())
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    # Hashed as raw bytes: -0.0 and 0.0 differ, NaN equals itself, and dtypes that NumPy lacks work.
    text = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    text.update(bits_of(tensor.cpu()).numpy().data)
    return text.hexdigest()
