"""What the graph of a loss gives away, and what it must not be blamed for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import onefold
from onefold import losses
from onefold.engine.losscheck import LossFinding, inspect_loss
from tests.tables import for_each

Values = dict[str, torch.Tensor]
Loss = Callable[[Values], object]

SAMPLES, CLASSES, LENGTH = 6, 3, 4


@pytest.fixture
def values() -> Values:
    generator = torch.Generator().manual_seed(1)
    shape = (SAMPLES, CLASSES)
    tokens = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
    ragged = torch.arange(LENGTH) < torch.tensor([4, 1, 2, 4, 3, 1]).unsqueeze(1)
    return {
        "x": torch.randn(shape, generator=generator, requires_grad=True),
        "y": torch.tensor([0, 1, 2, 2, 1, 0]),
        "holes": torch.tensor([0, -100, 2, 2, -100, 0]),
        "soft": torch.rand(shape, generator=generator),
        "w": torch.tensor([1.0, 4.0, 0.5]),
        "each": torch.rand(shape, generator=generator),
        "seq": torch.randn(SAMPLES, CLASSES, LENGTH, generator=generator, requires_grad=True),
        "tokens": tokens,
        "padded": tokens.where(ragged, -100),
        "mask": ragged,
        "parameter": torch.ones(5, requires_grad=True),
    }


def squares(v: Values) -> torch.Tensor:
    return (v["x"] - v["soft"]).square()


def token_losses(v: Values) -> torch.Tensor:
    """(samples, length)"""
    return F.cross_entropy(v["seq"], v["tokens"], reduction="none")


FOUND: dict[str, tuple[str, Loss]] = {
    "cross entropy, sum": ("sum", lambda v: F.cross_entropy(v["x"], v["y"], reduction="sum")),
    "mse, sum": ("sum", lambda v: F.mse_loss(v["x"], v["soft"], reduction="sum")),
    "huber, sum": ("sum", lambda v: F.huber_loss(v["x"], v["soft"], reduction="sum")),
    "smooth l1, sum": ("sum", lambda v: F.smooth_l1_loss(v["x"], v["soft"], reduction="sum")),
    "bce, sum": (
        "sum",
        lambda v: F.binary_cross_entropy(v["x"].sigmoid(), v["soft"], reduction="sum"),
    ),
    "bce with logits, sum": (
        "sum",
        lambda v: F.binary_cross_entropy_with_logits(v["x"], v["soft"], reduction="sum"),
    ),
    "soft margin, sum": ("sum", lambda v: F.soft_margin_loss(v["x"], v["each"], reduction="sum")),
    "multi margin, sum": ("sum", lambda v: F.multi_margin_loss(v["x"], v["y"], reduction="sum")),
    "multilabel margin, sum": (
        "sum",
        lambda v: F.multilabel_margin_loss(
            v["x"], v["y"].view(-1, 1) - 1 + 0 * v["x"].long(), reduction="sum"
        ),
    ),
    "nll, sum": (
        "sum",
        lambda v: F.nll_loss(v["x"].log_softmax(1), v["y"], v["w"], reduction="sum"),
    ),
    "sum, halved": ("sum", lambda v: 0.5 * F.mse_loss(v["x"], v["soft"], reduction="sum")),
    "sum, doubled": ("sum", lambda v: F.mse_loss(v["x"], v["soft"], reduction="sum") * 2),
    "sum, in float64": ("sum", lambda v: F.mse_loss(v["x"], v["soft"], reduction="sum").double()),
    "sum, a column": (
        "sum",
        lambda v: F.mse_loss(v["x"], v["soft"], reduction="sum").view(1).squeeze(0),
    ),
    "sum, of smoothed targets": (
        "sum",
        lambda v: F.cross_entropy(v["x"], v["y"], reduction="sum", label_smoothing=0.1),
    ),
    "two sums, as of a variational autoencoder": (
        "sum",
        lambda v: (
            F.binary_cross_entropy_with_logits(v["x"], v["soft"], reduction="sum")
            - 0.5 * v["x"].exp().sum()
        ),
    ),
    "a sum, its mean taken": (
        "sum",
        lambda v: F.mse_loss(v["x"], v["soft"], reduction="sum").mean(),
    ),
    "a sum by hand, its mean taken": ("maybe-sum", lambda v: squares(v).sum().mean()),
    "a sum beside a mean, stacked": (
        "maybe-sum",
        lambda v: torch.stack(
            [v["x"].mean(), F.mse_loss(v["x"], v["soft"], reduction="sum")]
        ).mean(),
    ),
    "samples one by one, stacked": (
        "maybe-sum",
        lambda v: torch.stack([row.square().mean() for row in v["x"]]).sum(),
    ),
    "l1, sum": ("maybe-sum", lambda v: F.l1_loss(v["x"], v["soft"], reduction="sum")),
    "a sum by hand": ("maybe-sum", lambda v: squares(v).sum()),
    "a sum by hand, halved": ("maybe-sum", lambda v: 0.5 * squares(v).sum()),
    "a sum of samples": ("maybe-sum", lambda v: squares(v).mean(1).sum(0)),
    "probabilities, sum": (
        "maybe-sum",
        lambda v: F.cross_entropy(v["x"], v["each"].softmax(1), reduction="sum"),
    ),
    "class weights": ("weights", lambda v: F.cross_entropy(v["x"], v["y"], v["w"])),
    "class weights, smoothed": (
        "weights",
        lambda v: F.cross_entropy(v["x"], v["y"], v["w"], label_smoothing=0.2),
    ),
    "class weights of tokens": (
        "weights",
        lambda v: F.cross_entropy(v["seq"], v["tokens"], v["w"]),
    ),
    "class weights beside a penalty": (
        "weights",
        lambda v: v["parameter"].square().sum() * 1e-4 + F.cross_entropy(v["x"], v["y"], v["w"]),
    ),
    "ignored targets": ("ignored", lambda v: F.cross_entropy(v["x"], v["holes"])),
    "ignored class": ("ignored", lambda v: F.cross_entropy(v["x"], v["y"], ignore_index=2)),
    "ignored tokens": ("ignored", lambda v: F.cross_entropy(v["seq"], v["padded"])),
    "ignored targets only": (
        "ignored",
        lambda v: F.nll_loss(v["x"].log_softmax(1), torch.full((SAMPLES,), -100)),
    ),
    "tokens, chosen": (
        "tokens",
        lambda v: F.cross_entropy(v["seq"].transpose(1, 2)[v["mask"]], v["tokens"][v["mask"]][:]),
    ),
    "tokens, mean of those chosen": ("tokens", lambda v: token_losses(v)[v["mask"][:]].mean()),
    "tokens, sum over count": (
        "tokens",
        lambda v: (token_losses(v) * v["mask"]).sum() / v["mask"].sum(),
    ),
    "tokens, sum over number": (
        "tokens",
        lambda v: F.cross_entropy(v["seq"], v["padded"], reduction="sum") / 15,
    ),
    "mse by weights": (
        "tokens",
        lambda v: F.mse_loss(v["x"], v["soft"], weight=v["each"]),
    ),
    "class weights, values": (
        "weights-none",
        lambda v: F.cross_entropy(v["x"], v["y"], v["w"], reduction="none"),
    ),
    "class weights, smoothed values": (
        "weights-none",
        lambda v: F.cross_entropy(v["x"], v["y"], v["w"], reduction="none", label_smoothing=0.1),
    ),
    "class weights, column": (
        "weights-none",
        lambda v: F.cross_entropy(v["x"], v["y"], v["w"], reduction="none").unsqueeze(1),
    ),
    "ignored targets, values": (
        "ignored-none",
        lambda v: 2 * F.cross_entropy(v["x"], v["holes"], reduction="none"),
    ),
    "ignored class, values": (
        "ignored-none",
        lambda v: F.nll_loss(v["x"].log_softmax(1), v["y"], ignore_index=0, reduction="none"),
    ),
    "ignored tokens, mean of each sample": (
        "ignored-none",
        lambda v: F.cross_entropy(v["seq"], v["padded"], reduction="none").mean(1),
    ),
}

NOT_FOUND: dict[str, Loss] = {
    "a mean": lambda v: F.cross_entropy(v["x"], v["y"]),
    "a mean of tokens, all of one length": lambda v: F.cross_entropy(v["seq"], v["tokens"]),
    "a smoothed mean": lambda v: F.cross_entropy(v["x"], v["y"], label_smoothing=0.1),
    "a mean of probabilities": lambda v: F.cross_entropy(v["x"], v["each"].softmax(1), v["w"]),
    "mse": lambda v: F.mse_loss(v["x"], v["soft"]),
    "l1": lambda v: F.l1_loss(v["x"], v["soft"]),
    "bce with weights of both kinds": lambda v: F.binary_cross_entropy_with_logits(
        v["x"], v["soft"], v["each"], pos_weight=v["w"]
    ),
    "multi margin with weights": lambda v: F.multi_margin_loss(v["x"], v["y"], weight=v["w"]),
    "values": lambda v: F.cross_entropy(v["x"], v["y"], reduction="none"),
    "values of probabilities": lambda v: F.cross_entropy(
        v["x"], v["each"].softmax(1), v["w"], reduction="none"
    ),
    "values, added up to a mean": lambda v: F.cross_entropy(
        v["x"], v["holes"], v["w"], reduction="none"
    ).mean(),
    "a sum over the samples": lambda v: F.mse_loss(v["x"], v["soft"], reduction="sum") / SAMPLES,
    "a sum times one over the samples": lambda v: squares(v).sum() * (1.0 / SAMPLES),
    "a sum over the elements": lambda v: squares(v).sum() / v["x"].numel(),
    "half a sum over the samples": lambda v: -0.5 * squares(v).sum() / SAMPLES,
    "a sum over twice the samples": lambda v: squares(v).sum() / (2 * SAMPLES),
    "a sum of each sample": lambda v: squares(v).sum(1),
    "a mean of each sample's own tokens": lambda v: (
        (token_losses(v) * v["mask"]).sum(1) / v["mask"].sum(1)
    ),
    "a penalty beside a mean": lambda v: squares(v).mean() + 0.1 * v["parameter"].square().sum(),
    "a mean of means": lambda v: squares(v).mean(1).mean(),
    "a mean of one mean": lambda v: squares(v).mean().mean(),
    "means of several heads, stacked": lambda v: torch.stack([v["x"].mean(), v["x"].mean()]).sum(),
    "a mean of heads": lambda v: torch.stack([v["x"].mean(), squares(v).mean()]).mean(),
    "samples one by one, their mean": lambda v: torch.stack([r.sum() for r in v["x"]]).mean(),
    "a learned factor": lambda v: squares(v).sum() * v["parameter"][0],
    "a learned divisor": lambda v: squares(v).sum() / v["parameter"][0],
    "nothing times a sum": lambda v: squares(v).sum() * 0.0,
    "one number of the model": lambda v: v["x"][0, 0],
    "a maximum": lambda v: v["x"].max(),
    "no graph": lambda v: v["y"].float().sum(),
    "a leaf": lambda v: v["x"],
    "a mean with its weight": lambda v: losses.cross_entropy(v["x"], v["holes"], v["w"]),
    "a sum that says so": lambda v: onefold.Sum(squares(v).sum()),
    "several terms": lambda v: onefold.Sum(squares(v).sum()) + onefold.Mean(v["x"].sum(), 3),
    "no tensor": lambda v: 0.5,
    "nothing": lambda v: None,
}


@for_each(("kind", "loss"), FOUND.values(), ids=FOUND.keys())
def test_what_onefold_would_misread_is_found(values: Values, kind: str, loss: Loss) -> None:
    finding = inspect_loss(loss(values), SAMPLES)
    assert finding is not None
    assert finding.kind == kind


@for_each("loss", NOT_FOUND.values(), ids=NOT_FOUND.keys())
def test_what_is_read_as_it_was_meant_is_not_blamed(values: Values, loss: Loss) -> None:
    assert inspect_loss(loss(values), SAMPLES) is None


WORDS = {
    "mse, sum": ("mse_loss with reduction='sum'", "6 samples", "onefold.Sum(total)"),
    "bce with logits, sum": ("losses.binary_cross_entropy_with_logits(..., reduction='sum')",),
    "nll, sum": ("cross_entropy or nll_loss with reduction", "losses.cross_entropy(..., "),
    "a sum by hand": ("added up and not divided", "as many times too small", "onefold.Sum("),
    "class weights": (
        "cross_entropy or nll_loss with weight=",
        "onefold.losses.cross_entropy(...)",
    ),
    "ignored targets": ("of which 2 are ignored", "onefold.losses.cross_entropy(...)"),
    "ignored targets only": ("of which 6 are ignored", "onefold.losses.cross_entropy(...)"),
    "ignored tokens": ("of which 9 are ignored", "onefold.losses.cross_entropy(...)"),
    "tokens, chosen": ("a mean over 15 targets", "6 samples", "losses.cross_entropy(...) or"),
    "tokens, sum over count": ("divided by 15,", "6 samples", "Return onefold.Mean(total, weight)"),
    "class weights, values": ("not by the sum of their weights", "without reduction='none'"),
    "ignored class, values": ("not by those that are not ignored", "losses.cross_entropy(...)"),
}


@for_each(("name", "words"), WORDS.items())
def test_a_finding_says_what_it_is_and_what_to_write(
    values: Values, name: str, words: tuple[str, ...]
) -> None:
    finding = inspect_loss(FOUND[name][1](values), SAMPLES)
    assert finding is not None
    assert [word for word in words if word not in finding.text] == []


def test_a_sum_that_would_be_eight_times_too_small_is_refused() -> None:
    """The engine reads a scalar as a mean; with one shard, that is what it is."""
    x, y = torch.randn(16, 3, dtype=torch.float64), torch.randn(16, 1, dtype=torch.float64)

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum")

    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    whole = loss(model, (x, y))
    trainer = onefold.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), loss, shards=8)
    with pytest.raises(onefold.errors.LossError, match="step 1, shard 0 is a sum over the shard"):
        trainer.step((x, y))
    other = torch.nn.Linear(3, 1, dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    alone = onefold.Trainer(other, torch.optim.SGD(other.parameters(), lr=0.0), loss, shards=1)
    assert float(alone.step((x, y)).loss) == pytest.approx(whole.item(), rel=1e-12)
    finding = inspect_loss(loss(model, (x[:2], y[:2])), 2)
    assert isinstance(finding, LossFinding)
    assert "as many times too small as the batch has shards" in finding.reading


def one(v: Values) -> Values:
    """The first sample alone."""
    return {n: t[:1] if len(t) == SAMPLES else t for n, t in v.items()}


OF_ONE_SAMPLE: dict[str, tuple[str | None, Loss]] = {
    "one value, added up": ("maybe-sum", lambda v: squares(v)[:, :1].sum()),
    "one value, taken": (None, lambda v: squares(v)[0, 0]),
    "one loss, taken out of its row": (
        None,
        lambda v: F.cross_entropy(v["x"], v["y"], reduction="none").squeeze(),
    ),
    "losses, added up": (
        "maybe-sum",
        lambda v: F.cross_entropy(v["x"], v["y"], reduction="none").sum(),
    ),
    "a sum of the sample's values, their mean": (None, lambda v: squares(v).sum(1).mean()),
    "a sum of the sample's values, a mean by hand": (
        None,
        lambda v: squares(v).sum(1).sum() / len(v["x"]),
    ),
    "a sum over the elements": (None, lambda v: squares(v).sum() / v["x"].numel()),
    "a sum over the samples": (
        None,
        lambda v: F.mse_loss(v["x"], v["soft"], reduction="sum") / len(v["x"]),
    ),
    "a sum over the samples, halved": (
        None,
        lambda v: 0.5 * F.mse_loss(v["x"], v["soft"], reduction="sum") / len(v["x"]),
    ),
    "a sum over the samples as a tensor": (
        None,
        lambda v: F.mse_loss(v["x"], v["soft"], reduction="sum") / torch.tensor(len(v["x"])),
    ),
    "a sum times one, a scale or a count": (
        "maybe-sum",
        lambda v: 1.0 * F.mse_loss(v["x"], v["soft"], reduction="sum"),
    ),
    "batchmean": (
        None,
        lambda v: F.kl_div(v["x"].log_softmax(1), v["soft"], reduction="batchmean"),
    ),
    "a sum of two means": (None, lambda v: squares(v).mean() + v["x"].square().mean()),
    "a mean beside a penalty": (
        None,
        lambda v: squares(v).mean() + 0.1 * v["parameter"].square().sum(),
    ),
    "the mean of one mean": (None, lambda v: squares(v).mean().mean()),
    "the sum of one mean": (None, lambda v: squares(v).mean().sum()),
}
# Apart from counts: of one sample, any number of tokens is a multiple.
LIKE_SEVERAL = {
    name: loss for name, (kind, loss) in FOUND.items() if kind in ("sum", "maybe-sum")
} | {name: loss for name, loss in NOT_FOUND.items() if "a sum times one over" not in name}


@for_each(("kind", "loss"), OF_ONE_SAMPLE.values(), ids=OF_ONE_SAMPLE.keys())
def test_one_sample_is_no_excuse(values: Values, kind: str | None, loss: Loss) -> None:
    finding = inspect_loss(loss(one(values)), 1)
    assert (finding and finding.kind) == kind


@for_each("name", LIKE_SEVERAL)
def test_a_loss_of_one_sample_is_what_it_is_of_several(values: Values, name: str) -> None:
    loss = LIKE_SEVERAL[name]
    of_several, of_one = inspect_loss(loss(values), SAMPLES), inspect_loss(loss(one(values)), 1)
    assert (of_one and of_one.kind) == (of_several and of_several.kind)


@for_each("microbatch", [None, 1], ids=["shards of one", "pieces of one"])
@for_each("kind", ["mean", "sum", "sum, divided", "each, added up"])
def test_shards_of_one_sample_are_the_plain_loop_or_refused(
    kind: str, microbatch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out, y = model(batch[0]), batch[1]
        if kind == "each, added up":
            return F.mse_loss(out, y, reduction="none").sum()
        total = F.mse_loss(out, y, reduction=kind.partition(",")[0])
        return total / len(y) if "divided" in kind else total

    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    expected = loss(model, (x, y)).item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    shards = 4 if microbatch is None else 1
    trainer = onefold.Trainer(model, optimizer, loss, shards=shards, microbatch=microbatch)
    if kind == "sum":
        with pytest.raises(onefold.errors.LossError, match="is a sum over the shard"):
            trainer.step((x, y))
        return
    assert (float(trainer.step((x, y)).loss) == pytest.approx(expected)) is (kind[0] != "e")
    said = [text for text in caplog.messages if "a scalar that was added up" in text]
    assert len(said) == (kind[0] == "e")


@for_each(
    ("samples", "loss"),
    [
        (SAMPLES, lambda x, y: F.mse_loss(x, y, reduction="sum") * (0.3 / len(x))),
        (
            SAMPLES,
            lambda x, y: F.mse_loss(x, y) + 1e-4 * F.mse_loss(x[0], y[0] * 0, reduction="sum"),
        ),
    ],
    ids=["a scale over a count", "a penalty beside a mean"],
)
def test_what_may_be_right_is_not_called_a_sum(values: Values, samples: int, loss: Loss) -> None:
    value = loss(values["x"], values["soft"])
    finding = inspect_loss(value, samples)
    assert finding is None or finding.kind == "maybe-sum"


def test_many_targets_in_sixteen_bits_are_counted_exactly() -> None:
    logits = torch.zeros(301, 3, dtype=torch.bfloat16, requires_grad=True)
    loss = F.cross_entropy(logits, torch.zeros(301, dtype=torch.int64))
    assert inspect_loss(loss, 301) is None


def test_a_graph_that_backward_has_been_through_tells_nothing(values: Values) -> None:
    for loss in (F.cross_entropy(values["x"], values["holes"]), squares(values).sum() / 15):
        loss.backward()
        assert inspect_loss(loss, SAMPLES) is None


def test_a_long_graph_is_not_walked_to_its_end() -> None:
    value = F.mse_loss(torch.ones(2, requires_grad=True), torch.ones(2), reduction="sum")
    for _ in range(200):
        value = value * 1.5
    assert inspect_loss(value, 2) is None


def test_the_graph_is_left_as_it_was(values: Values) -> None:
    loss = F.cross_entropy(values["x"], values["holes"])
    expected = torch.autograd.grad(loss, values["x"], retain_graph=True)
    inspect_loss(loss, SAMPLES)
    assert torch.equal(torch.autograd.grad(loss, values["x"])[0], expected[0])


NODES = {
    "NllLossBackward0": {"reduction", "weight", "target", "ignore_index", "total_weight"},
    "NllLoss2DBackward0": {"reduction", "weight", "target", "ignore_index", "total_weight"},
    "MseLossBackward0": {"reduction"},
    "SumBackward0": {"self_sym_sizes"},
    "MeanBackward0": {"self_sym_sizes"},
    "DivBackward0": {"other", "self"},
    "MulBackward0": {"other", "self"},
}


@for_each(("name", "attributes"), NODES.items())
def test_nodes_still_keep_what_is_read_of_them(
    values: Values, name: str, attributes: set[str]
) -> None:
    """PyTorch promises none of these: where one goes, the findings that need it are no more."""
    made = {
        "NllLossBackward0": F.cross_entropy(values["x"], values["y"]),
        "NllLoss2DBackward0": F.cross_entropy(values["seq"], values["tokens"]),
        "MseLossBackward0": F.mse_loss(values["x"], values["soft"]),
        "SumBackward0": values["x"].sum(),
        "MeanBackward0": values["x"].mean(),
        "DivBackward0": values["x"].sum() / 3,
        "MulBackward0": values["x"].sum() * 3,
    }
    node = made[name].grad_fn
    assert node is not None
    assert node.name() == name
    assert [a for a in sorted(attributes) if not hasattr(node, f"_saved_{a}")] == []
