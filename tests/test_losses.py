"""Every loss against the function of PyTorch that it is named after, on a batch that is cut up."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
CUTS = {
    "one part": (11,),
    "two parts": (3, 8),
    "unequal parts": (5, 1, 2, 3),
    "samples": (1,) * 11,
}


@dataclass
class Case:
    """A call of a loss; its tensors are those of a whole batch."""

    name: str
    cut: dict[str, torch.Tensor]
    """Arguments with one row a sample."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """All others, the same for every shard."""
    rows: dict[str, int] = field(default_factory=dict)
    """The dimension of the samples, where it is not the first."""

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
            if name.startswith(("input", "anchor", "positive", "negative", "log_probs", "var"))
            and tensor.is_floating_point()
        }

    def shards(
        self, sizes: tuple[int, ...], leaves: dict[str, torch.Tensor]
    ) -> Iterator[dict[str, torch.Tensor]]:
        pieces = {
            name: tensor.split(list(sizes), dim=self.rows.get(name, 0))
            for name, tensor in {**self.cut, **leaves}.items()
        }
        for number in range(len(sizes)):
            yield {name: piece[number] for name, piece in pieces.items()}


def make_cases(seed: int = 3) -> dict[str, Case]:
    generator = torch.Generator().manual_seed(seed)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)

    def unit(*shape: int) -> torch.Tensor:
        return torch.rand(SAMPLES, *shape, generator=generator, dtype=torch.float64) * 0.98 + 0.01

    def whole(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, (SAMPLES, *shape), generator=generator)

    def signs(*shape: int) -> torch.Tensor:
        return whole(2, *shape) * 2 - 1

    weights = torch.tensor([0.5, 3.0, 0.0, 1.25, 0.1], dtype=torch.float64)
    cases: dict[str, Case] = {}
    for (shape, weight, index, smoothing), kind in itertools.product(
        itertools.product([(), (4,), (2, 3)], [None, weights], [-100, 1], [0.0, 0.2]),
        ["classes", "probabilities"],
    ):
        fixed = {"weight": weight, "ignore_index": index, "label_smoothing": smoothing}
        about = (
            f"{kind} {(5, *shape)} {'weights' if weight is not None else ''} {index} {smoothing}"
        )
        if kind == "classes":
            target = whole(5, *shape)
            if index < 0:
                target[whole(3, *shape) == 0] = index
        elif index >= 0:
            continue  # PyTorch refuses to ignore a probability
        else:
            target = real(5, *shape).softmax(1)
        cut = {"input": real(5, *shape), "target": target}
        cases[f"cross_entropy {about}"] = Case("cross_entropy", cut, fixed)
        if kind == "classes" and not smoothing:
            cut = {"input": real(5, *shape).log_softmax(1), "target": target}
            fixed = {"weight": weight, "ignore_index": index}
            cases[f"nll_loss {about}"] = Case("nll_loss", cut, fixed)

    def add(name: str, about: str, cut: dict[str, torch.Tensor], **fixed: Any) -> None:
        rows = {"log_probs": 1} if name == "ctc_loss" else {}
        cases[f"{name} {about}"] = Case(name, cut, fixed, rows)

    for shape in ((), (3,), (3, 2)):
        pair = {"input": real(*shape), "target": real(*shape)}
        likely = {"input": unit(*shape), "target": whole(2, *shape).double()}
        each = {"weight": unit(*shape) * 3}
        add("binary_cross_entropy", f"{shape}", likely)
        add("binary_cross_entropy", f"{shape} weights", likely | each)
        logits = likely | {"input": real(*shape)}
        add("binary_cross_entropy_with_logits", f"{shape}", logits)
        add("binary_cross_entropy_with_logits", f"{shape} weights", logits | each)
        more = torch.full(shape[-1:], 2.5, dtype=torch.float64)
        add("binary_cross_entropy_with_logits", f"{shape} positive", logits, pos_weight=more)
        add("binary_cross_entropy_with_logits", f"{shape} both", logits | each, pos_weight=more)
        for name in ("mse_loss", "l1_loss", "huber_loss"):
            add(name, f"{shape}", pair)
            add(name, f"{shape} weights", pair | each)
        add("huber_loss", f"{shape} delta", pair, delta=0.3)
        add("huber_loss", f"{shape} delta weights", pair | each, delta=0.3)
        for beta in (0.0, 0.3, 1.0):
            add("smooth_l1_loss", f"{shape} {beta}", pair, beta=beta)
        for full, log_input in itertools.product((False, True), repeat=2):
            counts = {"input": unit(*shape), "target": whole(6, *shape).double()}
            options = {"full": full, "log_input": log_input, "eps": 1e-4}
            add("poisson_nll_loss", f"{shape} {full} {log_input}", counts, **options)
        add("soft_margin_loss", f"{shape}", {"input": real(*shape), "target": signs(*shape)})
        two = {"input1": real(*shape), "input2": real(*shape), "target": signs(*shape)}
        add("margin_ranking_loss", f"{shape}", two, margin=0.2)
        likes = {"input": unit(*shape), "target": signs(*shape)}
        add("hinge_embedding_loss", f"{shape}", likes, margin=0.7)
    for shape, spread in (((3,), (3,)), ((3,), (1,)), ((3, 2), (3,))):
        likely = {"input": real(*shape), "target": real(*shape), "var": unit(*spread)}
        add("gaussian_nll_loss", f"{shape} {spread}", likely)
        add("gaussian_nll_loss", f"{shape} {spread} full", likely, full=True, eps=0.3)
    likely = {"input": real(3), "target": real(3)}
    add("gaussian_nll_loss", "one variance", likely, var=0.5)
    for shape in ((5,), (3, 5)):
        rates = {"input": real(*shape).log_softmax(-1), "target": real(*shape).softmax(-1)}
        add("kl_div", f"{shape}", rates)
        logs = rates | {"target": rates["target"].log()}
        add("kl_div", f"{shape} log", logs, log_target=True)
        several = {"input": real(*shape), "target": whole(2, *shape).double()}
        add("multilabel_soft_margin_loss", f"{shape}", several)
        add("multilabel_soft_margin_loss", f"{shape} weights", several, weight=weights)
    for p, weight in itertools.product((1, 2), (None, weights)):
        classes = {"input": real(5), "target": whole(5)}
        about = f"{p} {'weights' if weight is not None else ''}"
        add("multi_margin_loss", about, classes, p=p, margin=0.8, weight=weight)
    lists = torch.tensor([[0, 3, -1, 1, 2], [4, -1, 0, 0, 0], [1, 2, 3, 4, 0]])[whole(3)]
    add("multilabel_margin_loss", "", {"input": real(5), "target": lists})
    two = {"input1": real(5), "input2": real(5), "target": signs()}
    add("cosine_embedding_loss", "", two, margin=0.1)
    for shape, swap in (((5,), False), ((5,), True), ((3, 5), True)):
        three = {name: real(*shape) for name in ("anchor", "positive", "negative")}
        add("triplet_margin_loss", f"{shape} {swap}", three, margin=2.0, p=3, swap=swap)
    sequences = {
        "log_probs": real(9, 6).log_softmax(2).transpose(0, 1),
        "targets": whole(4, 3) + 1,
        "input_lengths": whole(3) + 7,
        "target_lengths": whole(4),  # empty ones as well
    }
    add("ctc_loss", "", sequences)
    add("ctc_loss", "blank", sequences | {"targets": sequences["targets"] - 1}, blank=5)
    return cases


CASES = make_cases()


@for_each("sizes", CUTS.values(), ids=CUTS.keys())
@for_each("case", CASES.values(), ids=CASES.keys())
def test_totals_over_weights_are_pytorchs_loss_of_the_whole_batch(
    case: Case, sizes: tuple[int, ...]
) -> None:
    assert_same(case, "mean", sizes)


@for_each("case", CASES.values(), ids=CASES.keys())
def test_sums_are_those_of_pytorch(case: Case) -> None:
    assert_same(case, "sum", CUTS["unequal parts"])


@for_each("case", CASES.values(), ids=CASES.keys())
def test_without_a_reduction_it_is_pytorchs_own_tensor(case: Case) -> None:
    assert torch.equal(case.ours("none"), case.theirs("none"))


@for_each("case", [c for n, c in CASES.items() if n.startswith("kl_div")])
def test_a_mean_over_the_first_dimension(case: Case) -> None:
    assert_same(case, "batchmean", CUTS["unequal parts"])


def assert_same(case: Case, reduction: str, sizes: tuple[int, ...]) -> None:
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
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
    for name, leaf in ours.items():
        torch.testing.assert_close(leaf.grad, theirs[name].grad, rtol=1e-12, atol=1e-14)


def test_every_loss_is_compared_and_every_reduction_too() -> None:
    assert {case.name for case in CASES.values()} == set(losses.__all__)


@for_each("name", losses.__all__)
def test_arguments_have_pytorchs_names_order_and_defaults(name: str) -> None:
    left_out = {"size_average", "reduce"}
    theirs = inspect.signature(getattr(F, name)).parameters
    ours = inspect.signature(getattr(losses, name)).parameters
    expected = {n: p.default for n, p in theirs.items() if n not in left_out}
    assert list(expected) == list(ours)
    assert expected == {n: p.default for n, p in ours.items()}


@for_each("name", losses.__all__)
def test_an_unknown_reduction_is_refused(name: str) -> None:
    case = next(case for case in CASES.values() if case.name == name)
    with pytest.raises(ValueError, match=r"expected reduction to be 'mean', .* got 'average'"):
        case.ours("average")


@for_each("name", losses.__all__)
def test_one_part_in_float32_is_pytorchs_value_to_a_rounding(name: str) -> None:
    for case in (case for case in CASES.values() if case.name == name):
        narrow = {
            name: value.float() if value.dtype == torch.float64 else value
            for name, value in case.cut.items()
        }
        fixed = {
            name: v.float() if isinstance(v, torch.Tensor) else v for name, v in case.fixed.items()
        }
        shrunk = Case(case.name, narrow, fixed)
        mean = shrunk.ours("mean")
        torch.testing.assert_close(
            mean.total / mean.weight, shrunk.theirs("mean"), rtol=2e-6, atol=1e-7
        )


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
        assert sum(p.weight for p in map_shards(case, sizes)) == 0
        # With smoothing, a target of no weight has a part in classes of some: that is x / 0.
        if not smoothing:
            assert sum(p.total for p in map_shards(case, sizes)) == 0


def map_shards(case: Case, sizes: tuple[int, ...]) -> list[onefold.Mean]:
    return [case.ours("mean", **shard) for shard in case.shards(sizes, {})]


@for_each("smoothing", [0.0, 0.1])
@for_each("weight", [None, torch.ones(3)], ids=["", "weights"])
@for_each("shape", [(), (4,)])
def test_ignored_targets_only_are_a_zero_that_backward_can_begin_at(
    shape: tuple[int, ...], weight: torch.Tensor | None, smoothing: float
) -> None:
    logits = torch.randn(5, 3, *shape, requires_grad=True)
    targets = torch.full((5, *shape), -100)
    mean = losses.cross_entropy(logits, targets, weight, label_smoothing=smoothing)
    part = weigh(mean, 5, "the loss")
    assert (part.weight, part.total().item()) == (0.0, 0.0)
    part.backward(7.0)  # of the other shards
    assert logits.grad is not None
    assert not logits.grad.any()


@for_each("dtype", [torch.float16, torch.bfloat16])
def test_totals_of_half_precision_are_neither_rounded_nor_infinite(dtype: torch.dtype) -> None:
    values = torch.full((3000, 100), 1.5).to(dtype).requires_grad_()
    mean = losses.mse_loss(values, torch.zeros_like(values))
    assert mean.total.item() == 3000 * 100 * 2.25  # beyond what float16 can hold
    part = weigh(mean, 3000, "the loss")
    part.backward(part.weight)
    assert values.grad is not None
    assert values.grad.dtype == dtype
    classes = torch.zeros(3000, dtype=torch.int64)
    assert losses.cross_entropy(values, classes).total.dtype == torch.float32
    weights = torch.full((100,), 0.1).to(dtype)
    weight = losses.cross_entropy(values, classes, weights).weight
    assert float(weight) == pytest.approx(3000 * weights[0].item(), rel=1e-5)


SHAPES = [((5, 1), (5,)), ((5,), (5, 1)), ((5, 3), (5, 5, 3)), ((), (5,))]
PAIRS = ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss"]


@for_each("shapes", SHAPES, ids=str)
@for_each("name", [*PAIRS, "soft_margin_loss", "hinge_embedding_loss"])
def test_shapes_that_compare_samples_with_each_other_are_refused(
    name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    a, b = map(torch.ones, shapes)
    with pytest.raises(ValueError, match=r"expected tensors of one shape, got \(.*squeeze"):
        getattr(losses, name)(a, b)


def test_a_target_that_is_the_same_for_every_sample_is_not_refused() -> None:
    rates = torch.randn(6, 4).log_softmax(1)
    mean = losses.kl_div(rates, torch.full((4,), 0.25), reduction="batchmean")
    expected = F.kl_div(rates, torch.full((4,), 0.25), reduction="batchmean")
    torch.testing.assert_close(mean.total / mean.weight, expected)


@for_each("name", ["cross_entropy", "nll_loss", "mse_loss", "ctc_loss"])
def test_one_sample_without_a_batch(name: str) -> None:
    logits = torch.randn(5).log_softmax(0)
    arguments: dict[str, tuple[Any, ...]] = {
        "cross_entropy": (logits, torch.tensor(2), torch.arange(5.0)),
        "nll_loss": (logits, torch.tensor(3), torch.arange(5.0)),
        "mse_loss": (torch.tensor(2.0), torch.tensor(5.0)),
        "ctc_loss": (torch.randn(6, 5).log_softmax(1), torch.tensor([1, 2]), (6,), (2,)),
    }
    mean = getattr(losses, name)(*arguments[name])
    expected = getattr(F, name)(*arguments[name])
    torch.testing.assert_close(mean.total / mean.weight, expected)


@for_each("shards", [1, 3, 8])
def test_a_trainer_has_the_plain_loops_gradient(shards: int) -> None:
    """With class weights and ignored targets, of which some shards have nothing else."""
    ours, theirs = (torch.nn.Linear(4, 3, dtype=torch.float64) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(16, 4, dtype=torch.float64)
    y = torch.tensor([-100] * 6 + [0, 1, 2, 2, 2, -100, 1, 1, 0, 0])
    weight = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> onefold.Mean:
        return losses.cross_entropy(model(batch[0]), batch[1], weight)

    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, theirs))
    trainer = onefold.Trainer(ours, optimizer, loss, shards=shards)
    step = trainer.step((x, y))
    expected = F.cross_entropy(theirs(x), y, weight)
    expected.backward()
    plain.step()
    assert float(step.loss) == pytest.approx(expected.item(), rel=1e-12)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


@for_each("shards", [2, 5])
def test_tokens_of_sequences_of_unequal_length_count_alike(shards: int) -> None:
    """A scalar mean of each shard, weighed by samples, would not be the plain loop's."""
    lengths = torch.tensor([9, 1, 2, 9, 3, 1, 1, 4, 9, 2])
    tokens = torch.randint(0, 5, (10, 9), generator=torch.Generator().manual_seed(2))
    targets = tokens.where(torch.arange(9) < lengths.unsqueeze(1), -100)
    model = torch.nn.Embedding(5, 5, dtype=torch.float64)

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> onefold.Mean:
        return losses.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])

    expected = F.cross_entropy(model(tokens).transpose(1, 2), targets).item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = onefold.Trainer(model, optimizer, loss, shards=shards).step((tokens, targets))
    assert float(step.loss) == pytest.approx(expected, rel=1e-12)


class Held(torch.nn.Module):
    """What a model might have computed, as parameters."""

    def __init__(self, leaves: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        for name, leaf in leaves.items():
            self.register_parameter(f"of_{name}", torch.nn.Parameter(leaf.detach().to(dtype)))
        self.scale = torch.nn.Parameter(torch.tensor(0.7, dtype=dtype))

    def leaves(self) -> dict[str, torch.Tensor]:
        return {n.removeprefix("of_"): p for n, p in self.named_parameters() if n != "scale"}


def of_dtype(value: Any, dtype: torch.dtype) -> Any:
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floats else value


def assert_bits_of_plain_loop(
    case: Case, dtype: torch.dtype, ours: Any, theirs: Any, steps: int = 3
) -> None:
    """Train twice: with a loss of onefold in one shard, and with PyTorch's own in a plain loop."""
    cut = {name: of_dtype(value, dtype) for name, value in case.cut.items()}
    fixed = {name: of_dtype(value, dtype) for name, value in case.fixed.items()}
    here = Case(case.name, cut, fixed)
    model, plain = Held(here.leaves(), dtype), Held(here.leaves(), dtype)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=1e-4) for m in (model, plain))
    trainer = onefold.Trainer(model, optimizer, lambda m, _: ours(here, m), shards=1, threads=1)
    torch.set_num_threads(1)
    for _ in range(steps):
        step = trainer.step(torch.zeros(SAMPLES))
        other.zero_grad()
        expected = theirs(here, plain)
        expected.backward()
        other.step()
        assert step.loss.to(dtype).item() == expected.item()
        for mine, their in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, their)
    trainer.close()


DTYPES = (torch.float32, torch.float64)


@for_each("dtype", DTYPES, ids=str)
@for_each("name", losses.__all__)
def test_one_shard_has_the_bits_of_pytorchs_loss(name: str, dtype: torch.dtype) -> None:
    """Of every loss, with every option: the value and the weights."""
    for case in (case for case in CASES.values() if case.name == name):
        kinds = ["mean", "batchmean"] if name == "kl_div" else ["mean"]
        for kind in [*kinds, "sum"]:
            assert_bits_of_plain_loop(
                case,
                dtype,
                lambda here, m, kind=kind: here.ours(kind, **m.leaves()),
                lambda here, m, kind=kind: here.theirs(kind, **m.leaves()),
            )


def penalty(m: Any) -> torch.Tensor:
    return m.scale.square() * 3 + m.scale


COMBINED: dict[str, tuple[Any, Any]] = {
    "scaled": (lambda a, b, m: 0.3 * a, lambda a, b, m: 0.3 * a),
    "divided": (lambda a, b, m: a / 3, lambda a, b, m: a / 3),
    "learned": (lambda a, b, m: a * m.scale, lambda a, b, m: a * m.scale),
    "added": (lambda a, b, m: a + 0.3 * b, lambda a, b, m: a + 0.3 * b),
    "subtracted": (lambda a, b, m: 2 * a - b / 7, lambda a, b, m: 2 * a - b / 7),
    "summed": (lambda a, b, m: sum([a, b, a]), lambda a, b, m: sum([a, b, a])),
    "scaled together": (lambda a, b, m: (a + 0.3 * b) / 3, lambda a, b, m: (a + 0.3 * b) / 3),
    "in brackets": (lambda a, b, m: a + (b + 0.7 * a), lambda a, b, m: a + (b + 0.7 * a)),
    "a penalty": (
        lambda a, b, m: a + 0.01 * onefold.Mean(penalty(m), 1),
        lambda a, b, m: a + 0.01 * penalty(m),
    ),
    "a sum": (
        lambda a, b, m: 0.1 * (onefold.Sum(penalty(m)) - a),
        lambda a, b, m: 0.1 * (penalty(m) - a),
    ),
    "one of its own": (
        lambda a, b, m: 0.1 * (onefold.Mean(penalty(m), 7) + b),
        lambda a, b, m: 0.1 * (penalty(m) / 7 + b),
    ),
}


@for_each("dtype", [*DTYPES, torch.bfloat16], ids=str)
@for_each("kind", ["mean", "sum"])
@for_each("name", COMBINED)
def test_one_shard_has_the_bits_of_an_expression_of_losses(
    name: str, kind: str, dtype: torch.dtype
) -> None:
    ours, theirs = COMBINED[name]
    logits = CASES["cross_entropy classes (5, 4) weights -100 0.2"]

    def expression(combine: Any, of: str, kit: Any) -> Any:
        def loss(here: Case, m: Any) -> Any:
            x = m.leaves()["input"]
            return combine(getattr(here, of)(kind, input=x), kit.mse_loss(x, x * m.scale), m)

        return loss

    one, other = expression(ours, "ours", losses), expression(theirs, "theirs", F)
    assert_bits_of_plain_loop(logits, dtype, one, other)


@for_each("change", ["written to", "replaced", "made anew"])
def test_a_total_that_the_script_changes_is_the_one_that_counts(change: str) -> None:
    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> onefold.Mean:
        mean = losses.mse_loss(model(batch[0]), batch[1])
        if change == "written to":
            mean.total.mul_(2)
            return mean
        if change == "replaced":
            return replace(mean, total=mean.total * 2)
        return onefold.Mean(mean.total * 2, mean.weight)

    model = torch.nn.Linear(3, 2)
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    expected = 2 * F.mse_loss(model(x), y).item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = onefold.Trainer(model, optimizer, loss, shards=1).step((x, y))
    assert float(step.loss) == pytest.approx(expected, rel=1e-6)


@for_each("empty", [False, True], ids=["ignored", "empty"])
@for_each("beside", [False, True], ids=["alone", "beside another"])
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
