"""One layer in several parts, for a layer that is itself too large.

Note: part of the result
------------------------
A sum over all inputs of a layer has other bits than the sum of its parts, and a matrix product may
have other ones for fewer rows. So the number of slices changes the result, as the number of shards
does, and the number of devices still does not. The parts are a module list, so each is a stage of
its own; their results are put together from the first to the last.

Cutting the outputs of one layer and the inputs of the next, or the heads of attention, is from
Shoeybi et al., Megatron-LM (2019).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from onefold.core.shard import cut_bounds
from onefold.system.hooks import count_hooks

__all__ = ["Sliced"]

OUTPUTS, INPUTS = 0, 1


class Sliced(nn.Module):
    """A linear layer, or attention, in slices that are computed one after the other.

    It has the values of the layer that it is made from, and takes and gives what that does, but for
    rounding. They are copied, so a weight that is tied to another one is not any more. Attention is
    cut by heads, and must be called with ``need_weights=False``.

    Args:
        layer: an ``nn.Linear`` or an ``nn.MultiheadAttention``.
        slices: how many; part of the result, like the number of shards.
        dim: of the weight of a linear layer, the dimension that is cut: 0, its outputs, so that the
            results of the slices stand side by side; or 1, its inputs, so that they are added.
            Attention has none.

    Raises:
        TypeError: the layer is of another class, or something changes its weight.
        ValueError: there are fewer outputs, inputs or heads than slices, or ``dim`` is another.

    >>> layer = torch.nn.Linear(6, 4)
    >>> inputs = torch.randn(2, 6)
    >>> sliced = onefold.Sliced(layer, 2, dim=1)
    >>> torch.allclose(sliced(inputs), layer(inputs), atol=1e-6)
    True
    """

    added: nn.Parameter | None
    """The bias, where results are added."""

    def __init__(self, layer: nn.Module, slices: int, dim: int | None = None) -> None:
        super().__init__()
        _check_layer(layer)
        if isinstance(layer, nn.MultiheadAttention):
            if dim is not None:
                raise ValueError(f"expected no dim for attention, which is cut by heads, got {dim}")
            sizes = _sizes(layer.num_heads, slices, "heads")
            self.dim, parts = INPUTS, _slices_of_heads(layer, sizes)
            bias = layer.out_proj.bias
        else:
            assert isinstance(layer, nn.Linear)
            if dim not in (None, OUTPUTS, INPUTS):
                raise ValueError(f"expected dim 0, the outputs, or 1, the inputs, got {dim!r}")
            self.dim = dim or OUTPUTS
            name = ("outputs", "inputs")[self.dim]
            sizes = _sizes(layer.weight.shape[self.dim], slices, name)
            parts, bias = _slices_of_linear(layer, sizes, self.dim), layer.bias
        self._copy_numbers(layer)
        self.sizes = sizes
        self.slices = nn.ModuleList(parts)
        # Where results are added, it is added once, to their sum: no slice has it.
        own = None
        if self.dim == INPUTS and bias is not None:
            own = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        self.register_parameter("added", own)
        self.train(layer.training)

    def _copy_numbers(self, layer: nn.Module) -> None:
        """What other code reads of such layers."""
        if isinstance(layer, nn.Linear):
            self.in_features, self.out_features = layer.in_features, layer.out_features
        elif isinstance(layer, nn.MultiheadAttention):
            self.embed_dim, self.kdim, self.vdim = layer.embed_dim, layer.kdim, layer.vdim
            self.num_heads, self.head_dim = layer.num_heads, layer.head_dim
            self.batch_first, self.dropout = layer.batch_first, layer.dropout
            # PyTorch's layers of transformers read these two to see whether they may compute all
            # by one kernel of their own, with the weights of a whole layer: not with these.
            self._qkv_same_embed_dim, self.in_proj_bias = False, None

    @property
    def weight(self) -> torch.Tensor:
        """(outputs, inputs) a copy of the weight of a linear layer, put together."""
        return torch.cat([part.weight for part in self._layers("weight")], dim=self.dim)

    @property
    def bias(self) -> torch.Tensor | None:
        """(outputs,) the bias of a linear layer, put together; None if it has none."""
        layers = self._layers("bias")
        if self.dim == INPUTS or layers[0].bias is None:
            return self.added
        return torch.cat([part.bias for part in layers])

    @property
    def in_proj_weight(self) -> torch.Tensor:
        # No AttributeError, for which nn.Module would tell words of its own.
        raise TypeError(
            "attention in slices has no in_proj_weight, for which an nn.TransformerEncoder looks "
            "that was made with whole layers: make it with enable_nested_tensor=False, or of "
            "layers that are cut already"
        )

    def _layers(self, name: str) -> list[nn.Linear]:
        layers = [part for part in self.slices if isinstance(part, nn.Linear)]
        if not layers:
            raise AttributeError(f"attention in slices has no {name} of its own")
        return layers

    def forward(self, *inputs: Any, **more: Any) -> Any:
        if isinstance(self.slices[0], _Heads):
            return self._attend(*inputs, **more)
        (given,) = inputs
        if self.dim == OUTPUTS:
            return torch.cat([part(given) for part in self.slices], dim=-1)
        cut = given.split(self.sizes, dim=-1)
        return self._summed(part(each) for part, each in zip(self.slices, cut, strict=True))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """The arguments are those of ``nn.MultiheadAttention``, in their order."""
        if need_weights:
            raise ValueError(
                "attention in slices gives no weights of attention: expected need_weights=False"
            )
        if is_causal and attn_mask is None:
            raise ValueError("expected attn_mask with is_causal=True, which only says what it is")
        given = (query, key, value, key_padding_mask, attn_mask)
        return self._summed(part(*given) for part in self.slices), None

    def extra_repr(self) -> str:
        return f"slices={len(self.slices)}, dim={self.dim}"

    def _summed(self, results: Iterator[torch.Tensor]) -> torch.Tensor:
        total = reduce(torch.add, results)
        # In the dtype of the products, which under autocast is not the bias's own.
        return total if self.added is None else total + self.added.to(total.dtype)


class _Heads(nn.Module):
    """Some heads of attention, from their projections to their part of the output.

    Args:
        layer: the attention.
        first: number of the first of them.
        count: how many there are.
    """

    def __init__(self, layer: nn.MultiheadAttention, first: int, count: int) -> None:
        super().__init__()
        self.first, self.count = first, count
        self.dropout, self.batch_first = layer.dropout, layer.batch_first
        packed = layer.in_proj_weight
        separate = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        weights = separate if packed is None else packed.chunk(3)
        bias = layer.in_proj_bias
        biases = (None, None, None) if bias is None else bias.chunk(3)
        rows = slice(first * layer.head_dim, (first + count) * layer.head_dim)
        self.query, self.key, self.value = (
            _linear(
                weight[rows],
                None if each is None else each[rows],
                trains=(weight if packed is None else packed).requires_grad,
                bias_trains=bias is not None and bias.requires_grad,
            )
            for weight, each in zip(weights, biases, strict=True)
        )
        last = layer.out_proj.weight
        self.out = _linear(last[:, rows], None, trains=last.requires_grad)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        alone = query.dim() == 2
        given = [each.unsqueeze(0) if alone else each for each in (query, key, value)]
        if not (alone or self.batch_first):
            given = [each.transpose(0, 1) for each in given]
        queries, keys, values = (
            part(each).unflatten(-1, (self.count, -1)).transpose(1, 2)
            for part, each in zip((self.query, self.key, self.value), given, strict=True)
        )
        mask = self._mask(keys, key_padding_mask, attn_mask)
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, mask, self.dropout if self.training else 0.0
        )
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        if alone:
            return result.squeeze(0)
        return result if self.batch_first else result.transpose(0, 1)

    def _mask(
        self,
        keys: torch.Tensor,
        padding: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """What is added to the products of queries and keys; None for nothing."""
        samples, _, count, _ = keys.shape
        found: torch.Tensor | None = None
        if mask is not None:
            found = _added(mask, keys.dtype)
            if mask.dim() == 3:  # one for each sample and head
                every = found.reshape(samples, -1, *mask.shape[1:])
                found = every[:, self.first : self.first + self.count]
        if padding is not None:
            columns = _added(padding, keys.dtype).reshape(samples, 1, 1, count)
            found = columns if found is None else found + columns
        return found


def _check_layer(layer: nn.Module) -> None:
    """Refuse what computes otherwise than these two classes do."""
    if type(layer) not in (nn.Linear, nn.MultiheadAttention):
        raise TypeError(
            f"expected an nn.Linear or an nn.MultiheadAttention to cut, got "
            f"{type(layer).__name__}: cut the layers that it is made of"
        )
    linear = {"weight", "bias"}
    projections = {"q_proj_weight", "k_proj_weight", "v_proj_weight"}
    attention = {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    known = linear if isinstance(layer, nn.Linear) else attention | projections
    other = {name for name, _ in layer.named_parameters()} - known
    if other:
        raise TypeError(
            f"expected a layer of {', '.join(sorted(known))}, this one has "
            f"{', '.join(sorted(other))} besides, so it computes with other values: cut it before "
            f"that is added"
        )
    if count_hooks(layer):
        raise TypeError(
            "expected a layer without hooks, which its slices would not call: register them on "
            "what is made from it"
        )
    if isinstance(layer, nn.MultiheadAttention) and layer.add_zero_attn:
        raise TypeError("expected attention without add_zero_attn, which no slice can add alone")


def _sizes(size: int, slices: int, name: str) -> list[int]:
    """Cut a size into near-equal ones, the larger ones first."""
    if isinstance(slices, bool) or not isinstance(slices, int) or not 1 <= slices <= size:
        raise ValueError(
            f"expected 1 to {size} slices, as the layer has {size} {name}, got {slices!r}"
        )
    return [stop - start for start, stop in cut_bounds(size, slices)]


def _slices_of_linear(layer: nn.Linear, sizes: Sequence[int], dim: int) -> list[nn.Module]:
    parts: list[nn.Module] = []
    for first, size in zip(_firsts(sizes), sizes, strict=True):
        bias = None
        if layer.bias is not None and dim == OUTPUTS:
            bias = layer.bias.narrow(0, first, size)
        part = _linear(
            layer.weight.narrow(dim, first, size),
            bias,
            trains=layer.weight.requires_grad,
            bias_trains=bias is not None and layer.bias.requires_grad,
        )
        parts.append(part)
    return parts


def _slices_of_heads(layer: nn.MultiheadAttention, sizes: Sequence[int]) -> list[nn.Module]:
    pairs = zip(_firsts(sizes), sizes, strict=True)
    return [_Heads(layer, first, size) for first, size in pairs]


def _firsts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:number]) for number in range(len(sizes))]


def _linear(
    weight: torch.Tensor, bias: torch.Tensor | None, *, trains: bool, bias_trains: bool = False
) -> nn.Linear:
    """A linear layer with copies of these values."""
    outputs, inputs = weight.shape
    # Without values of its own: drawing them would move the generators.
    made = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    copied = weight.detach().clone(memory_format=torch.contiguous_format)
    made.weight = nn.Parameter(copied, requires_grad=trains)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias_trains)
    return made


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as it is added: of a bool one, what is True is left out.

    Raises:
        TypeError: it is neither bool nor of floating-point numbers.
    """
    if mask.is_floating_point():
        return mask.to(dtype)
    if mask.dtype != torch.bool:
        raise TypeError(f"expected a mask of bool or of floating-point numbers, got {mask.dtype}")
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
