"""A process of one side of `large_models.py`: a text model too large to keep several copies of.

It connects to its driver before it has a model, so that the driver can measure a process that has
only imported PyTorch; the first request creates model and optimizer. Each side is written as its
documentation recommends for little memory: no process has the whole model if a part is enough.
Libraries that only one side needs are imported only by its processes.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from _side import serve
from loops import DDP_SETTINGS, Loop, leave_group, onefold_step, part, plain_step

__all__ = ["GPT", "LOOPS", "Size", "main"]

HEAD_WIDTH = 64
"""Maximum width of an attention head."""
CPU = (torch.device("cpu"),)
ZERO_LIMITS = (
    *("reduce_bucket_size", "stage3_prefetch_bucket_size"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance"),
)
"""Size of the largest layer here: the defaults are for billions of parameters, and keep all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of the model and its training data."""

    width: int = 768
    layers: int = 8
    vocabulary: int = 10_752
    length: int = 64
    """Tokens per sequence."""
    batch_size: int = 8
    """Sequences per global batch."""
    shards: int = 8
    """Shards per batch, for onefold."""
    parts: int = 1
    """Parts of the vocabulary, for onefold: see `docs/do/split-a-layer.md`."""


class Block(nn.Module):
    """Causal attention and an MLP, each with a preceding norm and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.mixing = nn.Linear(width, width, bias=False)
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return states (n, t, width) float32 after this block."""
        apart = self.attention(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = apart.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixing(seen.transpose(1, 2).flatten(2))
        wide: torch.Tensor = self.wide(self.norms[1](x))
        y: torch.Tensor = x + self.narrow(F.gelu(wide))
        return y


class GPT(nn.Module):
    """A causal language model without dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (n, vocabulary, t) float32 of the next token for ``tokens`` (n, t)
        int64."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits.transpose(1, 2)


class Words(nn.Module):
    """A part of the vocabulary: its rows of the embedding, or its logits."""

    def __init__(self, words: range, width: int) -> None:
        super().__init__()
        self.words = words
        self.weight = nn.Parameter(torch.empty(len(words), width))

    def rows(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether this part contains each token, and the token's row."""
        inside = (tokens >= self.words.start) & (tokens < self.words.stop)
        return inside, (tokens - self.words.start).clamp(0, len(self.words) - 1)


class Embedded(Words):
    """Adds the embedding rows of its part."""

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inside, rows = self.rows(tokens)
        return tokens, x + F.embedding(rows, self.weight) * inside[..., None]


class Logits(Words):
    """Adds its part to the softmax, and selects the logit of the target."""

    def forward(
        self, x: torch.Tensor, tokens: torch.Tensor, log_sum: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        inside, rows = self.rows(tokens)
        logits = F.linear(x, self.weight)
        mine = logits.gather(-1, rows[..., None])[..., 0]
        log_sum = torch.logaddexp(log_sum, logits.logsumexp(-1))
        return x, tokens, log_sum, torch.where(inside, mine, chosen)


class SplitGPT(GPT):
    """The same model, with a vocabulary split into parts that are stages; computes the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__(replace(size, vocabulary=1))
        bounds = [size.vocabulary * n // size.parts for n in range(size.parts + 1)]
        each = [range(*pair) for pair in pairwise(bounds)]
        self.tokens = nn.ModuleList(Embedded(words, size.width) for words in each)
        self.head = nn.ModuleList(Logits(words, size.width) for words in each)

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Return the loss (n, t) float32 of the next token for ``tokens`` (n, t) int64."""
        x = torch.zeros(*tokens.shape, self.places.embedding_dim)
        for words in self.tokens:
            tokens, x = words(tokens, x)
        x = x + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        chosen = torch.zeros(following.shape)
        log_sum = torch.full(following.shape, -torch.inf)
        for words in self.head:
            x, following, log_sum, chosen = words(x, following, log_sum, chosen)
        return log_sum - chosen


def first_values(number: int, shape: torch.Size) -> torch.Tensor:
    """Return the initial values of a parameter by its number, so that every side can draw any
    one."""
    if len(shape) == 1:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(number)
    return torch.empty(shape).normal_(std=0.02, generator=generator)


@torch.no_grad()
def filled(model: GPT) -> GPT:
    """Return the model with its initial values."""
    for number, parameter in enumerate(model.parameters()):
        parameter.copy_(first_values(number, parameter.shape))
    return model.train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every side."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def batch_of(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and next tokens: the global batch of every step."""
    torch.manual_seed(0)
    tokens = torch.randint(size.vocabulary, (size.batch_size, size.length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def nothing(size: Size) -> Loop:
    """Train nothing: measures a process at its start."""
    return Loop(step=lambda _: float, batches=[], devices=())


def onefolded(size: Size) -> Loop:
    """Train with onefold, as its launcher configures it."""
    import onefold

    model = onefold.build(lambda: filled(SplitGPT(size) if size.parts > 1 else GPT(size)))
    loss = split_losses if size.parts > 1 else losses
    trainer = onefold.Trainer(model, adamw(model), loss, shards=size.shards, threads=1)
    return Loop(step=onefold_step(trainer), batches=[batch_of(size)], devices=CPU)


def losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the loss of every sequence of a shard."""
    tokens, following = batch
    return F.cross_entropy(model(tokens), following, reduction="none").mean(dim=1)


def split_losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The same for a split vocabulary."""
    values: torch.Tensor = model(*batch)
    return values.mean(dim=1)


def ddp(size: Size) -> Loop:
    """Train with DistributedDataParallel: everything on every process."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(filled(GPT(size)), **DDP_SETTINGS)
    return peer_loop(size, model, adamw(model))


def fsdp2(size: Size) -> Loop:
    """Train with fully_shard on every block and on the whole, from a model on the meta device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = GPT(size)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    model.to_empty(device="cpu")
    fill_parts(model)
    return peer_loop(size, model.train(), adamw(model))


@torch.no_grad()
def fill_parts(model: nn.Module) -> None:
    """Set this process's part of each parameter to its initial values."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for number, parameter in enumerate(model.parameters()):
        if not isinstance(parameter, DTensor):
            raise TypeError(f"expected sharded parameters, but got {type(parameter)}")
        values = first_values(number, parameter.shape)
        mesh, places = parameter.device_mesh, parameter.placements
        cut = distribute_tensor(values, mesh, places, src_data_rank=None)
        parameter.to_local().copy_(cut.to_local())


def accelerate_fsdp(size: Size) -> Loop:
    """Train with Accelerate's FSDP plugin, if it has any effect."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[Block.__name__],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if accelerator.distributed_type != DistributedType.FSDP:
        raise RuntimeError(f"its FSDP plugin has no effect on CPUs: {accelerator.distributed_type}")
    model = filled(GPT(size))
    model, optimizer = accelerator.prepare(model, adamw(model))
    return peer_loop(size, model, optimizer, accelerator.backward)


def zero3(size: Size) -> Loop:
    """Train with DeepSpeed's ZeRO, stage 3: each parameter is sharded as soon as it is drawn."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    largest = max(12 * size.width, size.vocabulary) * size.width
    config = {
        "train_micro_batch_size_per_gpu": size.batch_size // dist.get_world_size(),
        "gradient_clipping": 0.0,  # the default is 1
        "zero_optimization": {"stage": 3, **dict.fromkeys(ZERO_LIMITS, largest)},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = GPT(size)
    for number, parameter in enumerate(model.parameters()):
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
            if dist.get_rank() == 0:
                parameter.copy_(first_values(number, parameter.shape))
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    engine.zero_grad = lambda: None  # step() did this already
    return peer_loop(size, engine, engine, engine.backward)


LOOPS: dict[str, Callable[[Size], Loop]] = {
    "nothing": nothing,
    "onefold": onefolded,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "accelerate-fsdp": accelerate_fsdp,
    "zero3": zero3,
}
"""Loops by the name in a `SideSpec`."""


def peer_loop(
    size: Size,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
) -> Loop:
    """Return the loop of a process that takes its rank's part of the batch."""
    mine = part(batch_of(size), dist.get_rank(), dist.get_world_size())
    step = plain_step(model, optimizer, backward)
    return Loop(step=step, batches=[mine], devices=CPU, end=leave_group)


def main() -> None:
    """Run the side named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("size", help="fields of a Size, as JSON")
    parser.add_argument("socket", type=Path, help="socket of the driver")
    args = parser.parse_args()
    torch.set_num_threads(1)
    loop = functools.cache(functools.partial(LOOPS[args.loop], Size(**json.loads(args.size))))
    serve(args.socket, loop)
    loop().end()


if __name__ == "__main__":
    main()
