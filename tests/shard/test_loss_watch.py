"""What the graph of a loss gives away, what it must not be blamed for, and what is said of it."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import onefold
from onefold import losses
from onefold.errors import LossError
from onefold.shard.loss_watch import LossWatch, inspect_loss
from tests.small import Batch, line, make_trainer, points
from tests.tables import for_each

Values = Any
"""Tensors, by name."""
Loss = Callable[[Values], object]

SAMPLES, CLASSES, LENGTH = 6, 3, 4
WHOLE = 4 * SAMPLES


@pytest.fixture
def values() -> Values:
    return values_of()


def values_of() -> Values:
    generator = torch.Generator().manual_seed(1)
    shape = (SAMPLES, CLASSES)
    tokens = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
    ragged = torch.arange(LENGTH) < torch.tensor([4, 1, 2, 4, 3, 1]).unsqueeze(1)
    return SimpleNamespace(
        x=torch.randn(shape, generator=generator, requires_grad=True),
        y=torch.tensor([0, 1, 2, 2, 1, 0]),
        holes=torch.tensor([0, -100, 2, 2, -100, 0]),
        soft=torch.rand(shape, generator=generator),
        w=torch.tensor([1.0, 4.0, 0.5]),
        each=torch.rand(shape, generator=generator),
        seq=torch.randn(SAMPLES, CLASSES, LENGTH, generator=generator, requires_grad=True),
        tokens=tokens,
        padded=tokens.where(ragged, -100),
        mask=ragged,
        parameter=torch.ones(5, requires_grad=True),
    )


def squares(v: Values) -> torch.Tensor:
    return (v.x - v.soft).square()


def mse_sum(v: Values) -> torch.Tensor:
    return F.mse_loss(v.x, v.soft, reduction="sum")


def ce_values(v: Values) -> torch.Tensor:
    return F.cross_entropy(v.x, v.y, reduction="none")


def token_losses(v: Values) -> torch.Tensor:
    """(samples, length)"""
    return F.cross_entropy(v.seq, v.tokens, reduction="none")


def penalty(v: Values) -> torch.Tensor:
    return 1e-4 * v.parameter.square().sum()


FOUND: dict[str, dict[str, Loss]] = {
    "sum": {
        "cross entropy": lambda v: F.cross_entropy(v.x, v.y, reduction="sum"),
        "nll": lambda v: F.nll_loss(v.x.log_softmax(1), v.y, v.w, reduction="sum"),
        "mse": mse_sum,
        "huber": lambda v: F.huber_loss(v.x, v.soft, reduction="sum"),
        "bce with logits": lambda v: F.binary_cross_entropy_with_logits(
            v.x, v.soft, reduction="sum"
        ),
        "halved": lambda v: 0.5 * mse_sum(v),
        "its mean": lambda v: mse_sum(v).mean(),
        "of a variational autoencoder": lambda v: mse_sum(v) - 0.5 * v.x.exp().sum(),
    },
    "maybe-sum": {
        "beside a mean, stacked": lambda v: torch.stack([v.x.mean(), mse_sum(v)]).mean(),
        "l1": lambda v: F.l1_loss(v.x, v.soft, reduction="sum"),
        "by hand": lambda v: squares(v).sum(),
        "of samples": lambda v: squares(v).mean(1).sum(0),
    },
    "maybe-whole": {
        "by hand": lambda v: squares(v).sum() / WHOLE,
        "a method": lambda v: squares(v).sum().div(WHOLE),
        "half": lambda v: 0.5 * squares(v).sum() / WHOLE,
        "a factor": lambda v: squares(v).sum() * (1 / WHOLE),
        "mse": lambda v: mse_sum(v) / WHOLE,
        "cross entropy": lambda v: F.cross_entropy(v.x, v.y, reduction="sum") / WHOLE,
        "tokens": lambda v: token_losses(v).sum() / (WHOLE * LENGTH),
        "all values": lambda v: squares(v).sum() / (WHOLE * CLASSES),
        "of a variational autoencoder": lambda v: (mse_sum(v) + v.x.exp().sum()) / WHOLE,
        "beside a penalty": lambda v: mse_sum(v) / WHOLE + penalty(v),
    },
    "weights": {
        "of classes": lambda v: F.cross_entropy(v.x, v.y, v.w),
        "of tokens": lambda v: F.cross_entropy(v.seq, v.tokens, v.w),
        "beside a penalty": lambda v: penalty(v) + F.cross_entropy(v.x, v.y, v.w),
    },
    "ignored": {
        "targets": lambda v: F.cross_entropy(v.x, v.holes),
        "tokens": lambda v: F.cross_entropy(v.seq, v.padded),
        "all": lambda v: F.nll_loss(v.x.log_softmax(1), torch.full((SAMPLES,), -100)),
    },
    "tokens": {
        "chosen": lambda v: F.cross_entropy(v.seq.transpose(1, 2)[v.mask], v.tokens[v.mask]),
        "sum over a count of one": lambda v: mse_sum(v) / v.mask[1].sum(),
        "sum over count": lambda v: (token_losses(v) * v.mask).sum() / v.mask.sum(),
        "mse by weights": lambda v: F.mse_loss(v.x, v.soft, weight=v.each),  # type: ignore[call-arg]
    },
    "weights-none": {
        "values": lambda v: F.cross_entropy(v.x, v.y, v.w, reduction="none"),
        "column": lambda v: F.cross_entropy(v.x, v.y, v.w, reduction="none")[:, None],
    },
    "ignored-none": {
        "targets": lambda v: 2 * F.cross_entropy(v.x, v.holes, reduction="none"),
        "a class": lambda v: F.nll_loss(v.x.log_softmax(1), v.y, ignore_index=0, reduction="none"),
    },
}

NOT_FOUND: dict[str, Loss] = {
    "a mean": lambda v: F.cross_entropy(v.x, v.y),
    "l1": lambda v: F.l1_loss(v.x, v.soft),
    "bce with weights of both kinds": lambda v: F.binary_cross_entropy_with_logits(
        v.x, v.soft, v.each, pos_weight=v.w
    ),
    "values": ce_values,
    "a sum over the samples": lambda v: mse_sum(v) / len(v.x),
    "a sum over all values": lambda v: squares(v).sum() / v.x.numel(),
    "a sum of tokens over all of them": lambda v: token_losses(v).sum() / v.mask.numel(),
    "a sum times one over the samples": lambda v: squares(v).sum() * (1.0 / SAMPLES),
    "a sum of each sample": lambda v: squares(v).sum(1),
    "a mean of each sample's own tokens": lambda v: (
        (token_losses(v) * v.mask).sum(1) / v.mask.sum(1)
    ),
    "half a mean": lambda v: squares(v).sum() / (2 * len(v.x)),
    "a mean over as many steps as shards": lambda v: squares(v).sum() / len(v.x) / 4,
    "what makes up for the shards": lambda v: squares(v).sum() / WHOLE * 4,
    "that, first": lambda v: 4 * squares(v).sum() / WHOLE,
    "a penalty of many rows": lambda v: squares(v).mean() + v.seq.square().sum() / WHOLE,
    "a penalty by the batch": lambda v: squares(v).mean() + penalty(v) / WHOLE,
    "a penalty beside a mean": lambda v: squares(v).mean() + penalty(v),
    "a learned factor": lambda v: squares(v).sum() * v.parameter[0],
    "no graph": lambda v: v.y.float().sum(),
    "a mean with its weight": lambda v: losses.cross_entropy(v.x, v.holes, v.w),
    "a sum that says so": lambda v: onefold.Sum(squares(v).sum()),
    "several terms": lambda v: onefold.Sum(squares(v).sum()) + onefold.Mean(v.x.sum(), 3),
    "no tensor": lambda v: 0.5,
}


def kind_of(loss: object, samples: int = SAMPLES) -> object:
    finding = inspect_loss(loss, samples, WHOLE)
    return finding and finding.kind


@for_each(("kind", "losses_"), FOUND.items())
def test_what_would_be_misread_is_found(values: Values, kind: str, losses_: Any) -> None:
    found = {name: kind_of(loss(values)) for name, loss in losses_.items()}
    assert found == dict.fromkeys(losses_, kind)


def test_what_is_read_as_it_was_meant_is_not_blamed(values: Values) -> None:
    found = {name: kind_of(loss(values)) for name, loss in NOT_FOUND.items()}
    assert found == dict.fromkeys(NOT_FOUND)


@for_each(
    ("kind", "name", "words"),
    [
        ("sum", "mse", ("mse_loss with reduction='sum'", "6 samples", "onefold.Sum(total)")),
        ("sum", "nll", ("cross_entropy or nll_loss with reduction", "losses.cross_entropy(..., ")),
        ("maybe-sum", "by hand", ("summed but not", "too small by a factor", "onefold.Sum(")),
        (
            "maybe-whole",
            "mse",
            ("divided by 24; the", "if 24 is a count of", "return onefold.Sum("),
        ),
        ("weights", "of classes", ("nll_loss with weight=", "onefold.losses.cross_entropy(...)")),
        ("ignored", "targets", ("2 of which are ignored", "onefold.losses.cross_entropy(...)")),
        ("tokens", "chosen", ("a mean over 15 targets", "6 samples", "losses.cross_entropy(...)")),
        ("tokens", "sum over count", ("divided by 15,", "Return onefold.Mean(total, weight)")),
        (
            "ignored-none",
            "a class",
            ("not by the number of targets that are not ignored", "losses.cross_entropy"),
        ),
    ],
)
def test_a_finding_says_what_to_write(values: Values, kind: str, name: str, words: Any) -> None:
    finding = inspect_loss(FOUND[kind][name](values), SAMPLES, WHOLE)
    assert finding is not None
    assert [word for word in words if word not in finding.text] == []


def one(v: Values) -> Values:
    tensors = vars(v).items()
    return SimpleNamespace(**{n: t[:1] if len(t) == SAMPLES else t for n, t in tensors})


OF_ONE_SAMPLE: list[tuple[str | None, Loss]] = [
    ("maybe-sum", lambda v: squares(v)[:, :1].sum()),
    ("maybe-sum", lambda v: ce_values(v).sum()),
    ("maybe-sum", lambda v: 1.0 * mse_sum(v)),  # by a scale or a count
    (None, lambda v: squares(v)[0, 0]),
    (None, lambda v: squares(v).sum(1).sum() / len(v.x)),
    (None, lambda v: 0.5 * mse_sum(v) / len(v.x)),
    (None, lambda v: mse_sum(v) / torch.tensor(len(v.x))),
    (None, lambda v: F.kl_div(v.x.log_softmax(1), v.soft, reduction="batchmean")),
    (None, lambda v: squares(v).mean().sum()),
]
# Apart from counts: of one sample, any number of tokens is a multiple.
LIKE_SEVERAL = [*FOUND["sum"].values(), *FOUND["maybe-sum"].values()] + [
    loss for name, loss in NOT_FOUND.items() if "a sum times one over" not in name
]


def test_one_sample_is_no_excuse(values: Values) -> None:
    """A loss of one sample is what it is of several."""
    for kind, loss in OF_ONE_SAMPLE:
        assert kind_of(loss(one(values)), 1) == kind
    for loss in LIKE_SEVERAL:
        assert kind_of(loss(one(values)), 1) == kind_of(loss(values))


@for_each(("shards", "microbatch"), [(4, None), (1, 1), (2, None), (1, None)])
@for_each("kind", ["mean", "sum", "sum, divided", "each, added up", "each, by the batch"])
def test_a_step_is_that_of_the_plain_loop_or_the_loss_is_refused_or_mentioned(
    kind: str, shards: int, microbatch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """With one shard all are what they look like."""

    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        out, y = model(batch[0]), batch[1]
        if kind[0] == "e":
            total = F.mse_loss(out, y, reduction="none").sum()
            return total / 4 if "batch" in kind else total
        total = F.mse_loss(out, y, reduction=kind.partition(",")[0])
        return total / len(y) if "divided" in kind else total

    model = line().double()
    inputs, targets = points(4)
    batch = inputs.double(), targets.double()
    expected = loss(model, batch).item()
    trainer = make_trainer(model, loss, shards=shards, microbatch=microbatch)
    alone = shards == 1 and microbatch is None
    if kind == "sum" and not alone:
        with pytest.raises(LossError, match="step 1, shard 0 is a sum over the shard"):
            trainer.step(batch)
        return
    misread = kind[0] == "e" and not alone
    assert (float(trainer.step(batch).loss) == pytest.approx(expected)) is not misread
    words = "a sum divided by 4; the batch has 4" if "batch" in kind else "a scalar that is summed"
    said = [text for text in caplog.messages if words in text]
    assert len(said) == misread


def test_the_graph_is_left_as_it_was_and_not_walked_to_its_end(values: Values) -> None:
    loss = F.cross_entropy(values.x, values.holes)
    expected = torch.autograd.grad(loss, values.x, retain_graph=True)
    inspect_loss(loss, SAMPLES)
    assert torch.equal(torch.autograd.grad(loss, values.x)[0], expected[0])
    assert kind_of(loss) is None  # what backward has been through tells nothing
    long = mse_sum(values)
    for _ in range(200):
        long = long * 1.5
    assert kind_of(long) is None


CERTAIN = ("sum", "weights", "ignored")
MAYBE = ("maybe-sum", "weights-none", "ignored-none")


def look(
    watch: LossWatch,
    v: Values,
    kind: str,
    *,
    run_checks: bool = True,
    where: str = "step 2, shard 1",
) -> None:
    loss = next(iter(FOUND[kind].values()))(v)
    watch.inspect(loss, samples=SAMPLES, batch_samples=WHOLE, run_checks=run_checks, where=where)


@for_each("kind", [*CERTAIN, *MAYBE])
def test_what_is_surely_wrong_is_refused(values: Values, kind: str, caplog: Any) -> None:
    """In every step; `onefold verify` does not refuse: it compares. Others are mentioned once."""
    for run_checks in (True, False) if kind in CERTAIN else ():
        watch = LossWatch()
        with pytest.raises(LossError, match=r"^the loss of step 2, shard 1 is .*onefold\."):
            look(watch, values, kind, run_checks=run_checks)
        assert not watch.findings
    watch = LossWatch()
    watch.refuses = kind in MAYBE
    for where in ("step 1, shard 0", "step 1, shard 1", "step 2, shard 0"):
        look(watch, values, kind, where=where)
    assert watch.findings == [kind]
    (message,) = caplog.messages
    assert message.startswith("the loss of step 1, shard 0 is ")
    assert message.endswith("To check whether this is intended, run onefold verify")


@for_each(
    ("total", "weight", "found"),
    [
        (lambda v: F.cross_entropy(v.x, v.y), len, True),
        (lambda v: F.cross_entropy(v.x, v.holes), lambda x: torch.tensor(4), True),
        (lambda v: -(F.mse_loss(v.x, v.soft).view(())), len, True),
        (lambda v: 0.5 * F.mse_loss(v.x, v.soft), len, True),
        (lambda v: F.cross_entropy(v.x, v.y) * len(v.x), len, False),
        (lambda v: F.cross_entropy(v.x, v.holes) * torch.tensor(4), lambda x: 4, False),
        (lambda v: F.cross_entropy(v.x, v.holes, reduction="sum") / 1, lambda x: 4, False),
        (lambda v: F.mse_loss(v.x, v.soft), lambda x: 1, False),
        (lambda v: ce_values(v).sum(), len, False),
        (lambda v: ce_values(v).mean() + v.parameter.sum(), len, False),
    ],
)
def test_a_total_that_is_a_mean_is_refused(total: Loss, weight: Any, found: bool) -> None:
    values = values_of()
    mean = onefold.Mean(total(values), weight(values.x))  # type: ignore[arg-type]
    for loss in (mean, mean + onefold.Sum(values.x.sum())):
        watch = LossWatch()
        given: dict[str, Any] = {
            "samples": SAMPLES,
            "batch_samples": WHOLE,
            "where": "step 1, shard 0",
        }
        watch.inspect(loss, run_checks=False, **given)
        words = r"shard 0 is onefold.Mean\(total, weight\) whose total is already a mean"
        with pytest.raises(LossError, match=words) if found else nullcontext():
            watch.inspect(loss, run_checks=True, **given)


def test_the_first_of_each_kind_is_kept(values: Values, caplog: pytest.LogCaptureFixture) -> None:
    watch = LossWatch()
    for kind in ("weights-none", "ignored-none"):
        look(watch, values, kind, run_checks=False)
    assert not watch.findings
    for kind in ("maybe-sum", "weights-none", "maybe-sum"):
        look(watch, values, kind)
    assert watch.findings == ["maybe-sum", "weights-none"]
    assert len(caplog.messages) == 2
