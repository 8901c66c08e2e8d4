"""Scores of a data set, and what a model says of each sample, in any shards, on any device."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from onefold.errors import DisagreementError, LossError, SampleError
from tests import simulated
from tests.small import Batch, bits, line, make_trainer, points, square
from tests.tables import for_each

Scores = dict[str, Any]

both = for_each("devices", [1, 3])


def loss_of(model: nn.Module, batch: Batch) -> Scores:
    return {"loss": square(model, batch)}


def data(samples: int = 8) -> TensorDataset:
    return TensorDataset(*points(samples))


class Mixture(nn.Module):
    """Has all that depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), line())
        self.frozen = nn.BatchNorm1d(3).eval()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.parts(self.frozen(inputs))


@settings(max_examples=30)
@given(
    weights=st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any),
    batch_size=st.integers(1, 45),
    shards=st.integers(1, 6),
    drawn=st.data(),
)
def test_every_sample_is_scored_once_and_a_mean_is_a_ratio_of_sums(
    weights: list[int], batch_size: int, shards: int, drawn: st.DataObject
) -> None:
    devices = drawn.draw(st.integers(1, shards))
    values = [float(3 * i % 7) for i in range(len(weights))]
    seen: list[int] = []

    def score(model: nn.Module, batch: Any) -> Scores:
        number, value, weight = batch
        seen.extend(number.tolist())
        by_weight = onefold.Mean((value * weight).sum(), weight.sum())
        return {"number": number.double(), "by weight": by_weight}

    samples = list(zip(range(len(weights)), values, weights, strict=True))
    trainer = make_trainer(shards=shards, devices=devices)
    scores = trainer.evaluate(score, samples, batch_size=batch_size)
    assert sorted(seen) == list(range(len(weights)))
    expected = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    assert scores == {
        "number": pytest.approx((len(weights) - 1) / 2),
        "by weight": pytest.approx(expected),
    }


@both
def test_the_scores_are_those_of_a_plain_loop(devices: int) -> None:
    model, (inputs, targets) = line(), points(23)

    def score(model: nn.Module, batch: Batch) -> Scores:
        return {
            "é loss": square(model, batch),
            "mean": square(model, batch).mean(),
            "accuracy": ((model(batch[0]) > 0) == (batch[1] > 0)).squeeze(1),
            "nothing": onefold.Mean(torch.tensor(0.0), 0),
        }

    trainer = make_trainer(model, devices=devices)
    scores = trainer.evaluate(score, data(23), batch_size=5)
    assert list(scores) == ["é loss", "mean", "accuracy", "nothing"]
    with torch.no_grad():
        loss = square(model, (inputs, targets)).double().mean().item()
        right = ((model(inputs) > 0) == (targets > 0)).sum().item()
    assert scores["é loss"] == pytest.approx(loss, rel=1e-6)
    assert scores["mean"] == pytest.approx(loss, rel=1e-6)
    assert scores["accuracy"] == right / 23
    assert math.isnan(scores["nothing"])


@for_each("samples", [1, 2, 5, 23])
def test_the_bits_do_not_depend_on_the_devices(samples: int) -> None:
    def score(model: nn.Module, batch: Batch) -> Scores:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return {"noisy": square(model, batch) * noise}

    alone = make_trainer().evaluate(score, data(samples), batch_size=7)
    for shares in ((0, 4), (3, 1), (1, 1, 1, 1)):
        several = make_trainer(devices=len(shares), shares=shares)
        for _ in range(2):
            assert several.evaluate(score, data(samples), batch_size=7) == alone


def numbers() -> tuple[float, ...]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


@both
@for_each("call", ["evaluate", "predict"])
def test_evaluation_mode_changes_nothing_of_the_run(call: str, devices: int) -> None:
    modes: set[bool] = set()

    def score(model: nn.Module, batch: Batch) -> Scores:
        modes.update(part.training for part in model.modules())
        loss = square(model, batch)
        modes.update((loss.requires_grad, torch.is_grad_enabled()))
        numbers()
        return {"loss": loss}

    prints, drawn = [], []
    for evaluates in (True, False):
        trainer = make_trainer(Mixture(), devices=devices)
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        for _ in range(3):
            trainer.step(points(9))
            if evaluates:
                before = bits(trainer.model)
                getattr(trainer, call)(score, data(9), batch_size=4)
                assert bits(trainer.model) == before
        names = {name for name, part in trainer.model.named_modules() if not part.training}
        assert (names, torch.is_grad_enabled()) == ({"frozen"}, True)
        prints.append(trainer.fingerprint())
        drawn.append(numbers())
    assert modes == {False}
    assert prints[0] == prints[1]
    assert drawn[0] == drawn[1]


class Broken(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        raise KeyError("an item")


@for_each(
    ("score", "samples", "words"),
    [
        (lambda model, batch: dict[str, Any]()["a label"], data(), "a label"),
        (loss_of, Broken(*points(8)), "reading sample 0 in epoch 0 failed: KeyError: 'an item'"),
    ],
)
def test_a_run_goes_on(score: Any, samples: TensorDataset, words: str) -> None:
    with_failure, without = (make_trainer(Mixture(), devices=2) for _ in range(2))
    for trainer in (with_failure, without):
        trainer.step(points(8))
    with pytest.raises((KeyError, SampleError), match=words):
        with_failure.evaluate(score, samples, batch_size=4)
    modes = {name for name, part in with_failure.model.named_modules() if not part.training}
    assert (modes, torch.is_grad_enabled()) == ({"frozen"}, True)
    for trainer in (with_failure, without):
        trainer.step(points(11))
    assert with_failure.fingerprint() == without.fingerprint()


@for_each(
    ("result", "words"),
    [
        (torch.ones(2), "the function must return a dict .* but got Tensor"),
        (None, "a dict of values by name, .* got NoneType"),
        ({}, "the function must return a dict of values by name"),
        ({"accuracy": 0.5}, "^the value 'accuracy' of batch 0 .*, shard 0: .* got float"),
        ({"accuracy": torch.ones(2, 3)}, r"^the value 'accuracy' of .* got shape \(2, 3\)"),
        ({0: torch.ones(2)}, "value names must be single lines"),
    ],
)
def test_a_score_of_another_kind_is_refused(result: object, words: str) -> None:
    with pytest.raises(LossError, match=words):
        make_trainer().evaluate(lambda model, batch: result, data(), batch_size=8)


Two = Callable[[torch.Tensor, torch.Tensor], Any]


def total(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(x, y, reduction="sum")


@for_each("batch_size", [3, 6])
@for_each(
    "form",
    [
        total,
        lambda x, y: nn.MSELoss(size_average=False)(x, y),
        lambda x, y: -F.huber_loss(x, y, reduction="sum").detach().double(),
        lambda x, y: total(x, y).view(1).reshape(()),
        lambda x, y: total(x, y) + F.l1_loss(x, y, reduction="sum"),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average")
def test_a_sum_is_not_read_as_a_mean(form: Two, batch_size: int) -> None:
    """Of one sample a shard, or of two."""
    with pytest.raises(LossError, match=r"'a' of batch 0 .*is a sum over the shard \(reduction"):
        make_trainer(shards=3).evaluate(
            lambda m, b: {"a": form(m(b[0]), b[1])}, data(6), batch_size=batch_size
        )


@for_each(
    "form",
    [
        lambda x, y: total(x, y).div_(len(x)),
        lambda x, y: onefold.Mean(total(x, y), len(x)),
        lambda x, y: onefold.losses.mse_loss(x, y, reduction="sum") / 6,
    ],
)
def test_what_is_divided_is_no_sum(form: Two) -> None:
    model, (inputs, targets) = line(), points(6)
    expected = F.mse_loss(model(inputs), targets).item()
    scores = make_trainer(model, shards=3).evaluate(
        lambda m, b: {"a": form(m(b[0]), b[1])}, data(6), batch_size=3
    )
    assert scores["a"] == pytest.approx(expected)


def test_looking_for_sums_does_not_choose_kernels() -> None:
    """PyTorch computes transformers in evaluation another way where it sees a function mode."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    tokens = TensorDataset(torch.randn(4, 5, 8))
    seen: list[torch.Tensor] = []

    def score(model: nn.Module, batch: list[torch.Tensor]) -> Scores:
        seen.append(model(batch[0]))
        return {"a": seen[-1].mean()}

    make_trainer(layer, shards=2).evaluate(score, tokens, batch_size=4)
    with torch.no_grad():
        assert torch.equal(layer.eval()(tokens[:2][0]), seen[0])


Agreed = dict[str, Any]

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
)  # fmt: skip


def any_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every pattern of bits may come, so every kind of NaN as well."""
    generator = torch.Generator().manual_seed(7)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    size = math.prod(shape) * dtype.itemsize
    return (
        torch.randint(256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)
    )


def raw(value: Any) -> Any:
    """Of tensors in any containers: shape, dtype and bits."""
    if isinstance(value, dict):
        return [(key, raw(each)) for key, each in value.items()]
    if isinstance(value, list):
        return [raw(each) for each in value]
    data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tuple(value.shape), str(value.dtype), str(value.device), data


def predict(values: torch.Tensor, function: Callable[..., Agreed], **settings: Any) -> Agreed:
    batch_size = settings.pop("batch_size", 7)
    trainer = make_trainer(**settings)
    return trainer.predict(function, TensorDataset(values), batch_size=batch_size)


@st.composite
def shares(draw: st.DrawFn) -> tuple[int, ...]:
    counts = st.lists(st.integers(0, 4), min_size=1, max_size=5)
    return tuple(draw(counts.filter(lambda counts: sum(counts) >= len(counts))))


@settings(max_examples=25)
@given(samples=st.integers(1, 40), batch_size=st.integers(1, 45), shares=shares())
def test_values_come_in_their_order(samples: int, batch_size: int, shares: tuple[int, ...]) -> None:
    def say(model: nn.Module, batch: Sequence[torch.Tensor]) -> Agreed:
        return {"number": batch[0], "half": batch[0].double() / 2, "odd": batch[0] % 2 == 1}

    values = torch.arange(samples)
    chosen = {"shares": shares, "shards": sum(shares), "devices": len(shares)}
    said = predict(values, say, batch_size=batch_size, **chosen)
    assert raw(said) == raw(say(nn.Identity(), [values]))


@both
def test_every_dtype_and_shape_keeps_its_bits(devices: int) -> None:
    shapes = [(), (1,), (5,), (2, 3, 4), (0,), (2, 0)]
    columns = [any_bits(dtype, 11, *shapes[n % 6]) for n, dtype in enumerate(DTYPES)]
    columns += [any_bits(dtype, 11, 4, 3) for dtype in (torch.bool, torch.float32)]

    def say(model: nn.Module, batch: Sequence[torch.Tensor]) -> Agreed:
        named: Agreed = {f"é {number}": value for number, value in enumerate(batch)}
        return named | {"turned": batch[-1].mT, "flat": batch[-1][:, :1, 0].expand(-1, 2)}

    trainer = make_trainer(devices=devices)
    said = trainer.predict(say, TensorDataset(*columns), batch_size=6)
    assert raw(said) == raw(say(trainer.model, columns))


def sizes(inputs: torch.Tensor) -> list[int]:
    return [int(row.abs().sum() * 10) % 4 for row in inputs]


def boxes(model: nn.Module, batch: Sequence[torch.Tensor]) -> Agreed:
    """Detections; a list of tensors, of masks of any size, and a row a sample."""
    inputs = batch[0]
    scores = model(inputs)[:, 0]
    noise = torch.rand(()) + random.random() + np.random.rand()
    found = [
        {"boxes": row[:2].repeat(n, 2) + noise, "scores": score.repeat(n), "id": torch.arange(n)}
        for row, score, n in zip(inputs, scores, sizes(inputs), strict=True)
    ]
    masks = [torch.ones(n, n + 1, dtype=torch.bool) for n in sizes(inputs)]
    return {"found": found, "masks": masks, "mean": scores, "whole": [s.sum() for s in scores]}


def said_of_boxes(devices: int | None = 1, samples: int = 23, **settings: Any) -> Agreed:
    return predict(points(samples)[0], boxes, devices=devices, **settings)


def test_every_sample_has_its_own_in_the_order_of_the_data() -> None:
    said = said_of_boxes()
    inputs = points(23)[0]
    assert list(said) == ["found", "masks", "mean", "whole"]
    assert [len(each["boxes"]) for each in said["found"]] == sizes(inputs)
    assert [list(each) for each in said["found"]] == [["boxes", "scores", "id"]] * 23
    assert [tuple(mask.shape) for mask in said["masks"]] == [(n, n + 1) for n in sizes(inputs)]
    assert torch.equal(torch.stack(said["whole"]), said["mean"])
    for each, row in zip(said["found"], inputs, strict=True):
        assert each["boxes"].shape[1] == 4
        if len(each["boxes"]):
            torch.testing.assert_close(each["boxes"][0, 1] - each["boxes"][0, 0], row[1] - row[0])


@for_each("samples", [1, 3, 23])
def test_the_bits_of_predictions_do_not_depend_on_the_devices(samples: int) -> None:
    alone = raw(said_of_boxes(samples=samples))
    for shares in ((2, 2), (0, 4), (1, 0, 3), (1, 1, 1, 1)):
        assert raw(said_of_boxes(len(shares), samples, shares=shares)) == alone
    for exchange in ("shared", "collective"):
        found = simulated.launch(
            said_of_boxes, devices="cpu:3", args=(None, samples), exchange=exchange
        )
        assert raw(found) == alone


@for_each(
    ("entry", "words"),
    [
        (lambda row, n: row[:n] if n else torch.zeros(0, 4), r"same dtype and number of dim"),
        (lambda row, n: row.double() if n % 2 else row, "float32 .* and float64 .* for sample"),
        (lambda row, n: {"a": row} if n % 2 else {"b": row}, "dicts of 'value' must have the same"),
        (lambda row, n: row if n % 2 else {"a": row}, "or a list with one tensor or dict of"),
        (lambda row, n: {"a": 1}, "or a list with one tensor or dict"),
    ],
)
def test_entries_of_other_kinds_are_refused(entry: Callable[..., object], words: str) -> None:
    def function(model: nn.Module, batch: Sequence[torch.Tensor]) -> Agreed:
        return {"value": [entry(row, n) for n, row in enumerate(batch[0])]}

    with pytest.raises(LossError, match=words):
        predict(points(23)[0], function, batch_size=23)


OTHERS: list[Callable[[torch.Tensor], Agreed]] = [
    lambda value: {"other": value},
    lambda value: {"value": value, "more": value},
    lambda value: {"value": value.double()},
    lambda value: {"value": value[:, None]},
    lambda value: {"value": list(value)},
]


@for_each(
    ("call", "other"),
    [("predict", other) for other in OTHERS] + [("evaluate", other) for other in OTHERS[:2]],
)
@for_each("shares", [(4,), (1, 3), (1, 1, 1, 1)])
def test_what_differs_between_shards_or_batches_is_refused(
    call: str, other: Callable[[torch.Tensor], Agreed], shares: tuple[int, ...]
) -> None:
    def say(model: nn.Module, batch: Sequence[torch.Tensor]) -> Agreed:
        return {"value": batch[0]} if batch[0][0] == 0 else other(batch[0])

    trainer = make_trainer(devices=len(shares), shares=shares)
    for batch_size in (8, 2):
        with pytest.raises(DisagreementError, match=r"must (return|have) the same names"):
            getattr(trainer, call)(say, TensorDataset(torch.arange(8.0)), batch_size=batch_size)


@for_each(
    ("value", "came"),
    [
        (torch.tensor(1.0), r"got \(\)"),
        (torch.ones(1, 2), r"got \(1, 2\)"),
        (torch.ones(0), r"got \(0,\)"),
        (0.5, r"got 0\.5"),
        (np.ones(2), r"got array"),
    ],
)
@both
def test_what_has_not_one_row_a_sample_is_refused(value: object, came: str, devices: int) -> None:
    words = rf"^batch 0 of a prediction, shard \d: 'value' must be a .* 2 samples, but {came}"
    with pytest.raises(LossError, match=words):
        predict(
            torch.arange(8.0), lambda model, batch: {"value": value}, batch_size=8, devices=devices
        )


def test_names_of_numbers_have_one_line() -> None:
    with pytest.raises(ValueError, match="names of numbers must be single lines"):
        make_trainer().gather({"two\nlines": 1.0})


def among_batch(model: nn.Module, batch: Batch) -> Scores:
    """A rank within the batch, and a mean of samples."""
    errors = square(model, batch)
    return {"rank": (errors > errors[0]).sum().float(), "error": errors}


@for_each("placement", ["replicate", "partition"])
def test_a_score_may_receive_whole_batches(placement: str) -> None:
    def scored() -> Scores:
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = onefold.Trainer(model, optimizer, square, shards=4, threads=1)
        return trainer.evaluate(among_batch, data(10), batch_size=6, whole_batches=True)

    found = [
        simulated.launch(scored, devices=f"cpu:{n}", placement=placement, exchange="collective")
        for n in (1, 2, 3)
    ]
    model = line()
    batches = [points(10)[0][:6], points(10)[0][6:]], [points(10)[1][:6], points(10)[1][6:]]
    with torch.no_grad():
        ranks = [float(among_batch(model, batch)["rank"]) for batch in zip(*batches, strict=True)]
    assert found[0]["rank"] == (6 * ranks[0] + 4 * ranks[1]) / 10
    assert found[0] == found[1] == found[2]
