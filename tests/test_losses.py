"""Every loss against the function of PyTorch that it is named after, on a batch that is cut up."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import onefold
from onefold import losses
from onefold.core.mean import weigh
from tests.tables import for_each

SAMPLES = 11
UNEQUAL = (5, 1, 2, 3)
CUTS = ((11,), (3, 8), UNEQUAL, (1,) * 11)
COMPUTED = ("input", "anchor", "positive", "negative", "log_probs", "var")
"""How names of arguments begin that a model might have computed."""


@dataclass
class Case:
    """A call of a loss; its tensors are those of a whole batch."""

    name: str
    cut: dict[str, torch.Tensor]
    """Arguments with one row a sample."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """All others, the same for every shard."""

    @property
    def means(self) -> list[str]:
        return ["mean", "batchmean"] if self.name == "kl_div" else ["mean"]

    def theirs(self, reduction: str, **tensors: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "reduction: 'mean' divides the total loss")
            function = getattr(F, self.name)
            return function(**{**self.cut, **tensors}, **self.fixed, reduction=reduction)

    def ours(self, reduction: str, **tensors: torch.Tensor) -> Any:
        arguments = {**self.cut, **tensors, "reduction": reduction, **self.fixed}
        return getattr(losses, self.name)(**arguments)

    def leaves(self) -> dict[str, torch.Tensor]:
        """Copies of what a model might have computed."""
        return {
            name: tensor.clone().requires_grad_()
            for name, tensor in self.cut.items()
            if name.startswith(COMPUTED) and tensor.is_floating_point()
        }

    def shards(
        self, sizes: tuple[int, ...], leaves: dict[str, torch.Tensor]
    ) -> Iterator[dict[str, torch.Tensor]]:
        pieces = {
            name: tensor.split(list(sizes), dim=int(name == "log_probs"))
            for name, tensor in {**self.cut, **leaves}.items()
        }
        for number in range(len(sizes)):
            yield {name: piece[number] for name, piece in pieces.items()}

    def to(self, dtype: torch.dtype) -> Case:
        def narrow(value: Any) -> Any:
            return value.to(dtype) if getattr(value, "dtype", 0) == torch.float64 else value

        return Case(
            self.name, *({n: narrow(v) for n, v in d.items()} for d in (self.cut, self.fixed))
        )


def make_cases() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(3)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)

    def unit(*shape: int) -> torch.Tensor:
        return torch.rand(SAMPLES, *shape, generator=generator, dtype=torch.float64) * 0.98 + 0.01

    def whole(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, (SAMPLES, *shape), generator=generator)

    def signs(*shape: int) -> torch.Tensor:
        return whole(2, *shape) * 2 - 1

    weights = torch.tensor([0.5, 3.0, 0.0, 1.25, 0.1], dtype=torch.float64)
    both = (False, True)
    choices = itertools.product([(), (2, 3)], [weights, None], [-100, 1], [0.2, 0.0])
    for shape, weight, index, smoothing in choices:
        fixed = {"weight": weight, "ignore_index": index}
        smooth = fixed | {"label_smoothing": smoothing}
        target = whole(5, *shape)
        if index < 0:
            target[whole(3, *shape) == 0] = index
        yield Case("cross_entropy", {"input": real(5, *shape), "target": target}, smooth)
        if index < 0:  # PyTorch refuses to ignore a probability
            likely = {"input": real(5, *shape), "target": real(5, *shape).softmax(1)}
            yield Case("cross_entropy", likely, smooth)
        if not smoothing:
            logs = {"input": real(5, *shape).log_softmax(1), "target": target}
            yield Case("nll_loss", logs, fixed)
    for shape in ((), (3,), (3, 2)):
        pair = {"input": real(*shape), "target": real(*shape)}
        likely = {"input": unit(*shape), "target": whole(2, *shape).double()}
        logits = likely | {"input": real(*shape)}
        more: dict[str, Any] = {"pos_weight": torch.full(shape[-1:], 2.5, dtype=torch.float64)}
        for each in ({}, {"weight": unit(*shape) * 3}):
            yield Case("binary_cross_entropy", likely | each)
            for fixed in ({}, more):
                yield Case("binary_cross_entropy_with_logits", logits | each, fixed)
            for name in ("mse_loss", "l1_loss", "huber_loss"):
                yield Case(name, pair | each)
            yield Case("huber_loss", pair | each, {"delta": 0.3})
        for beta in (0.0, 0.3, 1.0):
            yield Case("smooth_l1_loss", pair, {"beta": beta})
        for full, log_input in itertools.product(both, both):
            counts = {"input": unit(*shape), "target": whole(6, *shape).double()}
            options = {"full": full, "log_input": log_input, "eps": 1e-4}
            yield Case("poisson_nll_loss", counts, options)
        yield Case("soft_margin_loss", {"input": real(*shape), "target": signs(*shape)})
        two = {"input1": real(*shape), "input2": real(*shape), "target": signs(*shape)}
        yield Case("margin_ranking_loss", two, {"margin": 0.2})
        likes = {"input": unit(*shape), "target": signs(*shape)}
        yield Case("hinge_embedding_loss", likes, {"margin": 0.7})
    pair = {"input": real(3), "target": real(3)}
    yield Case("gaussian_nll_loss", pair, {"var": 0.5})
    for shape, spread in (((3,), (3,)), ((3,), (1,)), ((3, 2), (3,))):
        normal = {"input": real(*shape), "target": real(*shape), "var": unit(*spread)}
        yield Case("gaussian_nll_loss", normal)
        yield Case("gaussian_nll_loss", normal, {"full": True, "eps": 0.3})
    for shape in ((5,), (3, 5)):
        rates = {"input": real(*shape).log_softmax(-1), "target": real(*shape).softmax(-1)}
        yield Case("kl_div", rates)
        yield Case("kl_div", rates | {"target": rates["target"].log()}, {"log_target": True})
        several = {"input": real(*shape), "target": whole(2, *shape).double()}
        yield Case("multilabel_soft_margin_loss", several)
        yield Case("multilabel_soft_margin_loss", several, {"weight": weights})
    for p, weight in itertools.product((1, 2), (None, weights)):
        classes = {"input": real(5), "target": whole(5)}
        yield Case("multi_margin_loss", classes, {"p": p, "margin": 0.8, "weight": weight})
    lists = torch.tensor([[0, 3, -1, 1, 2], [4, -1, 0, 0, 0], [1, 2, 3, 4, 0]])[whole(3)]
    yield Case("multilabel_margin_loss", {"input": real(5), "target": lists})
    two = {"input1": real(5), "input2": real(5), "target": signs()}
    yield Case("cosine_embedding_loss", two, {"margin": 0.1})
    for shape, swap in (((5,), False), ((5,), True), ((3, 5), True)):
        three = {name: real(*shape) for name in ("anchor", "positive", "negative")}
        yield Case("triplet_margin_loss", three, {"margin": 2.0, "p": 3, "swap": swap})
    sequences = {
        "log_probs": real(9, 6).log_softmax(2).transpose(0, 1),
        "targets": whole(4, 3) + 1,
        "input_lengths": whole(3) + 7,
        "target_lengths": whole(4),  # empty ones as well
    }
    yield Case("ctc_loss", sequences)
    yield Case("ctc_loss", sequences | {"targets": sequences["targets"] - 1}, {"blank": 5})


CASES = list(make_cases())


@for_each("case", CASES)
def test_a_batch_that_is_cut_has_pytorchs_loss_of_the_whole(case: Case) -> None:
    for reduction, sizes in itertools.product(case.means, CUTS):
        assert_same(case, reduction, sizes)
    assert_same(case, "sum", UNEQUAL)
    assert_same(case.to(torch.float32), "mean", UNEQUAL, rtol=1e-5, atol=1e-6)
    assert torch.equal(case.ours("none"), case.theirs("none"))


def assert_same(
    case: Case, reduction: str, sizes: tuple[int, ...], rtol: float = 1e-12, atol: float = 1e-14
) -> None:
    ours, theirs = case.leaves(), case.leaves()
    assert ours
    expected = case.theirs(reduction, **theirs)
    assert expected.isfinite()
    expected.backward()
    parts = [case.ours(reduction, **shard) for shard in case.shards(sizes, ours)]
    kinds = {weigh(part, 1, "the loss").kind for part in parts}
    assert kinds == {"sum" if reduction == "sum" else "mean"}
    weight = 1 if reduction == "sum" else sum(part.weight for part in parts)
    value = sum(part.total for part in parts) / weight
    value.backward()
    torch.testing.assert_close(value, expected, rtol=rtol, atol=atol)
    for name, leaf in ours.items():
        torch.testing.assert_close(leaf.grad, theirs[name].grad, rtol=rtol, atol=atol)


@for_each("name", losses.__all__)
def test_a_loss_is_called_as_pytorchs_is(name: str) -> None:
    theirs = inspect.signature(getattr(F, name)).parameters
    expected = [(n, p.default) for n, p in theirs.items() if n not in ("size_average", "reduce")]
    ours = inspect.signature(getattr(losses, name)).parameters
    assert expected == [(n, p.default) for n, p in ours.items()]
    case = next(case for case in CASES if case.name == name)
    with pytest.raises(ValueError, match=r"reduction must be 'mean', .* but got 'average'"):
        case.ours("average")


@settings(max_examples=60)
@given(
    data=st.data(),
    # Divided by weights of 1e-300, PyTorch's own losses overflow.
    weights=st.none() | st.lists(st.just(0.0) | st.floats(1e-6, 10), min_size=4, max_size=4),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    index=st.sampled_from([-100, -1, 0, 3]),
)
def test_any_targets_cut_anywhere(
    data: st.DataObject, weights: list[float] | None, smoothing: float, index: int
) -> None:
    """Shards of ignored targets only among them."""
    classes = st.sampled_from([index, 0, 1, 2, 3])
    targets = torch.tensor(data.draw(st.lists(classes, min_size=1, max_size=12)))
    count = len(targets)
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    sizes = tuple(b - a for a, b in itertools.pairwise([0, *cuts, count]))
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    fixed = {"weight": weight, "ignore_index": index, "label_smoothing": smoothing}
    logits = torch.linspace(-3, 3, count * 4, dtype=torch.float64).view(4, count).t()
    case = Case("cross_entropy", {"input": logits, "target": targets}, fixed)
    if case.theirs("mean").isfinite():
        assert_same(case, "mean", sizes)
    else:
        parts = [case.ours("mean", **shard) for shard in case.shards(sizes, {})]
        assert sum(part.weight for part in parts) == 0
        # With smoothing, a target of no weight has a part in classes of some: that is x / 0.
        assert smoothing or sum(part.total for part in parts) == 0


@for_each("dtype", [torch.float16, torch.bfloat16])
def test_totals_of_half_precision_are_neither_rounded_nor_infinite(dtype: torch.dtype) -> None:
    values = torch.full((3000, 100), 1.5).to(dtype).requires_grad_()
    mean = losses.mse_loss(values, torch.zeros_like(values))
    assert mean.total.item() == 3000 * 100 * 2.25  # beyond what float16 can hold
    classes = torch.zeros(3000, dtype=torch.int64)
    assert losses.cross_entropy(values, classes).total.dtype == torch.float32
    weights = torch.full((100,), 0.1).to(dtype)
    weight = losses.cross_entropy(values, classes, weights).weight
    assert float(weight) == pytest.approx(3000 * weights[0].item(), rel=1e-5)


PAIRS = ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss"]


@for_each("shapes", [((5, 1), (5,)), ((5,), (5, 1)), ((5, 3), (5, 5, 3)), ((), (5,))])
@for_each("name", [*PAIRS, "soft_margin_loss", "hinge_embedding_loss"])
def test_shapes_that_compare_samples_with_each_other_are_refused(name: str, shapes: Any) -> None:
    with pytest.raises(ValueError, match=r"tensors must have the same shape, but got \(.*squeeze"):
        getattr(losses, name)(*map(torch.ones, shapes))


RATES = torch.linspace(-2, 1, 30).view(6, 5).log_softmax(1)


@for_each(
    ("name", "arguments", "options"),
    [
        ("cross_entropy", (RATES[0], torch.tensor(2), torch.arange(5.0)), {}),
        ("nll_loss", (RATES[0], torch.tensor(3), torch.arange(5.0)), {}),
        ("mse_loss", (torch.tensor(2.0), torch.tensor(5.0)), {}),
        ("ctc_loss", (RATES, torch.tensor([1, 2]), (6,), (2,)), {}),
        ("kl_div", (RATES, torch.full((5,), 0.2)), {"reduction": "batchmean"}),
    ],
)
def test_a_sample_without_a_batch_and_a_target_for_all_are_taken(
    name: str, arguments: Any, options: Any
) -> None:
    mean = getattr(losses, name)(*arguments, **options)
    expected = getattr(F, name)(*arguments, **options)
    torch.testing.assert_close(mean.total / mean.weight, expected)


# One shard


class Held(torch.nn.Module):
    """What a model might have computed, as parameters."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        super().__init__()
        for name, leaf in case.leaves().items():
            self.register_parameter(f"of_{name}", torch.nn.Parameter(leaf.detach()))
        self.scale = torch.nn.Parameter(torch.tensor(0.7, dtype=dtype))

    def leaves(self) -> dict[str, torch.Tensor]:
        return {n.removeprefix("of_"): p for n, p in self.named_parameters() if n != "scale"}


def assert_bits_of_plain_loop(case: Case, dtype: torch.dtype, ours: Any, theirs: Any) -> None:
    """Train twice: with a loss of onefold in one shard, and with PyTorch's own in a plain loop."""
    here = case.to(dtype)
    model, plain = Held(here, dtype), Held(here, dtype)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=1e-4) for m in (model, plain))
    trainer = onefold.Trainer(model, optimizer, lambda m, _: ours(here, m), shards=1, threads=1)
    for _ in range(2):
        step = trainer.step(torch.zeros(SAMPLES))
        other.zero_grad()
        expected = theirs(here, plain)
        expected.backward()
        other.step()
        assert step.loss.to(dtype).item() == expected.item()
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
    trainer.close()


@for_each("dtype", [torch.float32, torch.float64])
@for_each("case", CASES)
def test_one_shard_has_the_bits_of_pytorchs_loss(case: Case, dtype: torch.dtype) -> None:
    for kind in [*case.means, *(["sum"] if dtype == torch.float32 else [])]:
        ours = lambda here, m, kind=kind: here.ours(kind, **m.leaves())  # noqa: E731
        theirs = lambda here, m, kind=kind: here.theirs(kind, **m.leaves())  # noqa: E731
        assert_bits_of_plain_loop(case, dtype, ours, theirs)


@for_each("empty", [False, True])
@for_each("beside", [False, True])
def test_one_shard_in_which_a_mean_has_nothing_to_count(empty: bool, beside: bool) -> None:
    """PyTorch's mean is NaN there; as with several shards, the term counts for nothing."""

    def loss(model: torch.nn.Module, x: torch.Tensor) -> Any:
        out = model(x)
        targets = torch.full((len(x),), -100)
        nothing = losses.mse_loss(out[:0], out[:0]) if empty else losses.cross_entropy(out, targets)
        assert nothing.total.item() == 0
        return losses.l1_loss(out, out + 2) + nothing if beside else nothing

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = onefold.Trainer(model, optimizer, loss, shards=1).step(torch.randn(5, 3))
    assert bool(step.skipped) is not beside
    assert step.loss.isnan() if not beside else float(step.loss) == pytest.approx(2)


@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_shard_has_the_bits_of_an_expression_of_losses(dtype: Any) -> None:
    def of(kit: Any, method: str, here: Case, m: Any) -> Any:
        x = m.leaves()["input"]
        own, other = getattr(here, method)("mean", input=x), kit.mse_loss(x, x * m.scale)
        return 2 * (own + (other + 0.3 * own)) - other / 7

    ours, theirs = partial(of, losses, "ours"), partial(of, F, "theirs")
    assert_bits_of_plain_loop(CASES[0], dtype, ours, theirs)


@for_each("change", [lambda mean: mean.total.mul_(2), lambda mean: None])
def test_a_total_that_the_script_changes_is_the_one_that_counts(change: Any) -> None:
    def loss(model: torch.nn.Module, x: torch.Tensor) -> onefold.Mean:
        mean = losses.mse_loss(model(x), torch.zeros(5, 2))
        return mean if change(mean) is not None else replace(mean, total=mean.total * 2)

    model, x = torch.nn.Linear(3, 2), torch.randn(5, 3)
    expected = 2 * model(x).square().mean().item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = onefold.Trainer(model, optimizer, loss, shards=1).step(x)
    assert float(step.loss) == pytest.approx(expected, rel=1e-6)
