"""A short name for the exact bits of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from onefold.core.names import own_name

__all__ = ["fingerprint_of", "named_tensors", "tensor_digests"]


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer under its own name, in the module's order; tied ones once."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {own_name(name): tensor for name, tensor in tensors.items()}


def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """One digest for every tensor."""
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def fingerprint_of(digests: Mapping[str, str]) -> str:
    """16 hexadecimal digits over all names and digests."""
    lines = "".join(f"{name} {digest}\n" for name, digest in digests.items())
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    text = hashlib.blake2b(f"{dense.dtype} {tuple(dense.shape)}".encode(), digest_size=16)
    if dense.numel():
        text.update(dense.reshape(-1).view(torch.uint8).numpy().data)
    return text.hexdigest()
