"""Random runs beside the loop that everybody writes: ``python -m tests.fuzz --plain --cases 500``.

From a seed are drawn a small model, an expression of the losses of `onefold.losses` with any of
their options, an optimizer, perhaps with hooks of its step, a `step` or a method of its own, and
batches of several sizes. The script of a case is written once, for `onefold.losses` and
`torch.nn.functional` alike. With one shard, losses and parameters must have the bits of the plain
loop; with more, in float64, they must be its own to 1e-9.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import onefold
from tests.fuzz.optimizers import OPTIMIZERS

__all__ = ["PlainCase", "draw_plain", "wrong_in"]

CLASSES, FEATURES = 6, 5
Kit = Any
"""`onefold.losses`, or `torch.nn.functional`."""
Batch = dict[str, torch.Tensor]
Term = Callable[[Kit, torch.Tensor, Batch], Any]

_UNSTABLE = {"muon", "rprop", "lion", "sgd-foreach"}
"""What rounding is made large by: signs, and an iteration in bfloat16. Compared with one shard."""


@dataclass(frozen=True, kw_only=True)
class PlainCase:
    """One run, and how it is cut."""

    seed: int
    dtype: torch.dtype
    shards: int
    devices: int
    model: str
    optimizer: str
    groups: int
    hooks: tuple[str, ...]
    own: str | None
    """A `step` or a method that the optimizer's class has of its own."""
    clip_norm: float | None
    schedule: bool
    sizes: tuple[int, ...]

    def describe(self) -> str:
        """In one line, with the expression of losses."""
        return f"{self} {_expression(self)[0]}"


def draw_plain(seed: int) -> PlainCase:
    """The case of a seed."""
    rng = random.Random(f"plain {seed}")
    shards = rng.choice((1, 1, 1, 2, 3, 5, 8))
    names = [n for n in OPTIMIZERS if shards == 1 or n not in _UNSTABLE]
    own = rng.choice((None, None, None, "step", "method"))
    return PlainCase(
        seed=seed,
        dtype=torch.float64 if shards > 1 else rng.choice((torch.float32, torch.float64)),
        shards=shards,
        devices=rng.randint(1, shards),
        model=rng.choice(list(MODELS)),
        optimizer="sgd-momentum" if own else rng.choice(names),
        groups=rng.choice((1, 1, 2)),
        hooks=tuple(name for name in HOOKS if rng.random() < 0.15),
        own=own,
        clip_norm=rng.choice((0.05, 1.0)) if rng.random() < 0.25 else None,
        schedule=rng.random() < 0.3,
        sizes=tuple(rng.choice((1, 2, 7, 12, 16)) for _ in range(rng.randint(2, 4))),
    )


class Residual(nn.Module):
    """With a normalisation of each sample, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.LayerNorm(FEATURES)
        self.out = nn.Linear(FEATURES, CLASSES)
        self.again = nn.Linear(FEATURES, FEATURES)
        self.again.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x + self.inner(x).tanh())
        return self.out(self.again(h).tanh())  # type: ignore[no-any-return]


class Convolved(nn.Module):
    """Along the features."""

    def __init__(self) -> None:
        super().__init__()
        self.along, self.out = nn.Conv1d(1, 3, 3), nn.Linear(9, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.along(x.unsqueeze(1)).relu().flatten(1))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(FEATURES, CLASSES),
    "deep": lambda: nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES)),
    "wide": lambda: nn.Sequential(nn.Linear(FEATURES, 3500), nn.Tanh(), nn.Linear(3500, CLASSES)),
    "residual": Residual,
    "convolved": Convolved,
}


def batches(case: PlainCase) -> Iterator[Batch]:
    """What the losses may ask for."""
    generator = torch.Generator().manual_seed(case.seed)
    for n in case.sizes:
        real = torch.randn(n, 3, CLASSES, generator=generator, dtype=torch.float64).to(case.dtype)
        whole = torch.randint(0, CLASSES, (n, CLASSES), generator=generator)
        holes = whole[:, 0].where(whole[:, 1] > 1, -100)
        holes[0] = 3  # in a plain loop a batch of nothing gives NaN
        lists = torch.tensor([[0, 3, -1, 1, 2, 2], [4, -1, 0, 0, 0, 5], [1, 2, 3, 4, 0, -1]])
        yield {
            "x": torch.randn(n, FEATURES, generator=generator, dtype=torch.float64).to(case.dtype),
            "target": real[:, 0],
            "likely": real[:, 1].softmax(1),
            "unit": real[:, 2].sigmoid(),
            "y": whole[:, 2],
            "holes": holes,
            "counts": whole.to(case.dtype),
            "signs": (whole % 2 * 2 - 1).to(case.dtype),
            "lists": lists[whole[:, 3] % 3],
            "long": torch.full((n,), 3),
            "short": whole[:, 4] % 2,
        }


def _term(rng: random.Random, dtype: torch.dtype) -> tuple[str, Term]:
    """A loss with options, in words and to be called."""
    name = rng.choice(onefold.losses.__all__)
    numbers = [round(rng.uniform(0.1, 3), 3) for _ in range(CLASSES)]
    weight = torch.tensor(numbers, dtype=dtype) if rng.random() < 0.5 else None
    kinds = ("mean", "mean", "mean", "sum") + (("batchmean",) * 3 if name == "kl_div" else ())
    options: dict[str, Any] = {"reduction": rng.choice(kinds)}
    which, flag, other = rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.5
    if name in ("cross_entropy", "nll_loss", "multi_margin_loss", "multilabel_soft_margin_loss"):
        options["weight"] = weight
    options |= {
        "cross_entropy": {"label_smoothing": rng.choice((0.0, 0.1))},
        "multi_margin_loss": {"p": rng.choice((1, 2)), "margin": 0.8},
        "binary_cross_entropy_with_logits": {"pos_weight": weight},
        "smooth_l1_loss": {"beta": rng.choice((0.0, 0.3, 1.0))},
        "huber_loss": {"delta": rng.choice((0.3, 1.0))},
        "kl_div": {"log_target": flag},
        "poisson_nll_loss": {"log_input": flag, "full": other, "eps": 1e-4},
        "gaussian_nll_loss": {"full": flag, "eps": 1e-3},
        "margin_ranking_loss": {"margin": 0.2},
        "hinge_embedding_loss": {"margin": 0.7},
        "cosine_embedding_loss": {"margin": 0.1},
        "triplet_margin_loss": {"margin": 2.0, "p": rng.choice((2, 3)), "swap": flag},
        "ctc_loss": {"zero_infinity": flag},
    }.get(name, {})
    if name in ("cross_entropy", "nll_loss") and flag and (name == "nll_loss" or not other):
        options["ignore_index"] = -100
    each = name in ("mse_loss", "l1_loss", "huber_loss") or name.startswith("binary_cross")

    def call(kit: Kit, out: torch.Tensor, b: Batch) -> Any:
        more = {"weight": 3 * b["unit"]} if each and which else {}
        arguments = _arguments(name, options, out, b, soft=other)
        return getattr(kit, name)(*arguments, **options, **more)

    shown = {k: "..." if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return f"{name}({shown}{', weight' if each and which else ''}{', soft' if other else ''})", call


def _arguments(
    name: str, options: dict[str, Any], out: torch.Tensor, b: Batch, *, soft: bool
) -> tuple[Any, ...]:
    """What a loss takes by place."""
    if name in ("cross_entropy", "nll_loss"):
        if name == "cross_entropy" and soft and "ignore_index" not in options:
            return out, b["likely"]
        logits = out if name == "cross_entropy" else out.log_softmax(1)
        return logits, b["holes"] if "ignore_index" in options else b["y"]
    if name == "gaussian_nll_loss":
        return out, b["target"], b["unit"][:, :1] if soft else b["unit"]
    if name == "ctc_loss":
        log_probs = out.view(-1, 3, 2).log_softmax(2).transpose(0, 1)
        return log_probs, torch.ones_like(b["y"]).unsqueeze(1), b["long"], b["short"]
    if name == "triplet_margin_loss":
        return out[:, :2], out[:, 2:4], out[:, 4:]
    if name == "margin_ranking_loss":
        return out[:, :3], out[:, 3:], b["signs"][:, :3]
    if name == "cosine_embedding_loss":
        return out[:, :3], out[:, 3:], b["signs"][:, 0]
    if name == "kl_div":
        return out.log_softmax(1), b["likely"].log() if options["log_target"] else b["likely"]
    two: dict[str, tuple[Any, ...]] = {
        "binary_cross_entropy": (out.sigmoid(), b["unit"]),
        "binary_cross_entropy_with_logits": (out, b["unit"]),
        "hinge_embedding_loss": (out, b["signs"]),
        "multi_margin_loss": (out, b["y"]),
        "multilabel_margin_loss": (out, b["lists"]),
        "multilabel_soft_margin_loss": (out, (b["signs"] + 1) / 2),
        "poisson_nll_loss": (out if options.get("log_input") else out.sigmoid(), b["counts"]),
        "soft_margin_loss": (out, b["signs"]),
    }
    return two.get(name, (out, b["target"]))


def _expression(case: PlainCase) -> tuple[str, Callable[[Kit, nn.Module, Batch], Any]]:
    """One loss or several, scaled and added up, perhaps with a penalty on the parameters."""
    rng = random.Random(f"loss {case.seed}")
    (one, first), (two, second) = (_term(rng, case.dtype) for _ in range(2))
    factor, divisor = round(rng.uniform(0.05, 2), 2), rng.choice((2, 3, 7))
    words, combine = rng.choice(
        [
            ("a", lambda a, b, p: a()),
            ("a", lambda a, b, p: a()),
            ("f * a", lambda a, b, p: factor * a()),
            ("a + f * b", lambda a, b, p: a() + factor * b()),
            ("(a - f * b) / d", lambda a, b, p: (a() - factor * b()) / divisor),
            ("sum([a, b])", lambda a, b, p: sum([a(), b()])),
            ("a + f * penalty", lambda a, b, p: a() + factor * p()),
            ("f * (penalty + a / d)", lambda a, b, p: factor * (p() + a() / divisor)),
        ]
    )

    def loss(kit: Kit, model: nn.Module, b: Batch) -> Any:
        out = model(b["x"])

        def penalty() -> Any:
            squares = [p.square().sum() for p in model.parameters()]
            value = 1e-3 * torch.stack(squares).sum()
            return onefold.Mean(value, 1) if kit is onefold.losses else value

        return combine(lambda: first(kit, out, b), lambda: second(kit, out, b), penalty)

    return f"f={factor} d={divisor}: {words}, a={one}, b={two}", loss


class OwnStep(torch.optim.SGD):
    """Normalises each gradient before it is used."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                p.grad.div_(p.grad.norm() + 1e-3)
        super().step()


class OwnMethod(torch.optim.SGD):
    """Looks ahead: goes back half of the way to where it has been, from time to time."""

    @torch.no_grad()
    def look_back(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[p].setdefault("slow", p.detach().clone())
            slow.lerp_(p, 0.5)
            p.copy_(slow)


OWN: dict[str | None, type[torch.optim.Optimizer]] = {"step": OwnStep, "method": OwnMethod}


def _every(change: Callable[[Any], Any]) -> Callable[..., None]:
    """A hook that goes through the parameters."""

    @torch.no_grad()
    def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None:
                change(p)

    return hook


HOOKS: dict[str, tuple[str, Callable[..., None]]] = {
    "decayed": ("pre", _every(lambda p: p.grad.add_(p, alpha=1e-2))),
    "clipped": ("pre", _every(lambda p: p.grad.clamp_(-0.1, 0.1))),
    "normalised": ("pre", _every(lambda p: p.grad.div_(p.grad.norm() + 1e-3))),
    "centred": ("pre", _every(lambda p: p.grad.sub_(p.grad.mean()))),
    "bounded": ("post", _every(lambda p: p.clamp_(-0.9, 0.9))),
    "shrunk": ("post", _every(lambda p: p.mul_(0.99))),
}


class _Run:
    """The model, the optimizer and the schedule of a case."""

    def __init__(self, case: PlainCase) -> None:
        torch.manual_seed(case.seed)
        self.case = case
        self.model = MODELS[case.model]().to(case.dtype)
        parameters = [
            p for p in self.model.parameters() if case.optimizer != "muon" or p.dim() == 2
        ]
        cut = len(parameters) // 2 if case.groups > 1 else 0
        groups = [{"params": part} for part in (parameters[:cut], parameters[cut:]) if part]
        if case.own is not None:
            self.optimizer = OWN[case.own](groups, lr=0.05, momentum=0.9)  # type: ignore[call-arg]
        else:
            self.optimizer = OPTIMIZERS[case.optimizer](groups)
        for name in case.hooks:
            when, hook = HOOKS[name]
            getattr(self.optimizer, f"register_step_{when}_hook")(hook)
        self.schedule: Any = None
        if case.schedule and case.optimizer != "adam-tensor":
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)

    def look_back(self) -> None:
        if self.case.own == "method":
            self.optimizer.look_back()  # type: ignore[attr-defined]

    def plain_step(self, batch: Batch) -> torch.Tensor:
        self.optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "reduction: 'mean' divides the total loss")
            loss: torch.Tensor = _expression(self.case)[1](F, self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.case.clip_norm is not None:
            held = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(held, self.case.clip_norm)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        return loss.detach()

    def trainer(self) -> onefold.Trainer:
        loss = _expression(self.case)[1]
        return onefold.Trainer(
            self.model,
            self.optimizer,
            lambda model, batch: loss(onefold.losses, model, batch),
            shards=self.case.shards,
            devices=["cpu"] * self.case.devices,
            threads=1,
            clip_norm=self.case.clip_norm,
            schedule=self.schedule,
        )


def wrong_in(case: PlainCase) -> str:
    """Run a case beside a plain loop; empty if it ends as it must."""
    ours, plain = _Run(case), _Run(case)
    trainer = ours.trainer()
    try:
        for number, batch in enumerate(batches(case), 1):
            found, expected = trainer.step(batch).loss, plain.plain_step(batch)
            with trainer.changing():
                ours.look_back()
            plain.look_back()
            if not _same(case, found.to(case.dtype), expected):
                return (
                    f"step {number}: loss {float(found)!r}, and {float(expected)!r} in a plain loop"
                )
            pairs = zip(ours.model.named_parameters(), plain.model.parameters(), strict=True)
            off = [name for (name, mine), theirs in pairs if not _same(case, mine, theirs)]
            if off:
                return f"step {number}: other values in {', '.join(off)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.close()
    return ""


def _same(case: PlainCase, one: torch.Tensor, other: torch.Tensor) -> bool:
    if case.shards == 1:
        return torch.equal(one, other)
    size = max(float(other.detach().abs().max()), 1e-3)
    return float((one - other).detach().abs().max()) <= 1e-9 * size
