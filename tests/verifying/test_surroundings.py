"""What surrounds a loss while it is compared: modes, buffers, and which dimension is the time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from onefold.verifying.surroundings import KeptBuffers, TimeFirst, norms_of_the_batch, quiet_modes
from tests.tables import for_each

TOLERANCE = 1e-9


# Modes.


def parts() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "norm": nn.BatchNorm1d(3),
            "drop": nn.Dropout(0.5),
            "line": nn.Linear(3, 3),
            "lstm": nn.LSTM(3, 3, num_layers=2, dropout=0.4),
        }
    )


@for_each(("narrow", "training"), [(False, set()), (True, {"", "line", "lstm"})])
def test_norms_and_dropouts_are_quiet_and_all_the_rest_if_asked_for(
    narrow: bool, training: set[str]
) -> None:
    model = parts()
    model["drop"].eval()
    with quiet_modes(model, narrow=narrow):
        assert {name for name, part in model.named_modules() if part.training} == training
        assert model["lstm"].dropout == 0.0
    assert {n for n, p in model.named_modules() if p.training} == {"", "norm", "line", "lstm"}
    assert model["lstm"].dropout == 0.4


def test_modes_are_put_back_after_a_failure() -> None:
    model = parts()
    with pytest.raises(ArithmeticError), quiet_modes(model, narrow=False):
        raise ArithmeticError
    assert all(part.training for part in model.modules())


def test_modules_beside_the_model_are_quiet_once_they_are_called() -> None:
    """A loss may drop out by itself."""
    beside, drawn = nn.Dropout(0.5), torch.ones(100)
    with quiet_modes(nn.Linear(1, 1), narrow=False):
        assert torch.equal(beside(drawn), drawn)
    assert beside.training
    assert not torch.equal(beside(drawn), drawn)


@for_each(
    ("model", "expected"),
    [
        (nn.Sequential(nn.BatchNorm1d(3)), []),
        (nn.BatchNorm2d(3, track_running_stats=False), ["model (BatchNorm2d)"]),
        (
            nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3)),
            ["0 (BatchNorm1d)"],
        ),
    ],
)
def test_norms_without_statistics_are_named(model: nn.Module, expected: list[str]) -> None:
    assert norms_of_the_batch(model) == expected


# Time.


def seen(model: nn.Module, whole: torch.Tensor, shard: torch.Tensor) -> list[str]:
    watch = TimeFirst(model)
    with watch.noting("whole"):
        model(whole)
    with watch.noting("shard"):
        model(shard)
    model(shard[:1])  # nobody looks any more
    return watch.cut_along_time()


def recurrent(*, batch_first: bool = False) -> nn.Module:
    return nn.Sequential(nn.GRU(2, 2, batch_first=batch_first))


WHOLE = torch.zeros(6, 4, 2)


@for_each(
    ("model", "shard", "expected"),
    [
        (recurrent(), WHOLE[:3], ["0 (GRU)"]),
        (recurrent(), WHOLE[:, :2], []),  # fewer samples and the same time: cut as it should be
        (recurrent(), WHOLE[:3, :2], []),
        (recurrent(batch_first=True), WHOLE[:3], []),
        (nn.Sequential(nn.Linear(2, 2)), WHOLE[:3], []),
    ],
)
def test_a_batch_that_was_cut_along_time_is_seen(
    model: nn.Module, shard: torch.Tensor, expected: list[str]
) -> None:
    assert seen(model, WHOLE, shard) == expected


def test_one_sequence_without_samples_is_not_looked_at() -> None:
    assert seen(recurrent(), WHOLE[:, 0], WHOLE[:3, 0]) == []


def test_modules_that_the_whole_batch_did_not_meet_are_not_compared() -> None:
    model = recurrent()
    watch = TimeFirst(model)
    with watch.noting("shard"):
        model(WHOLE[:3])
    assert watch.cut_along_time() == []


# Buffers.


def holding(**values: object) -> nn.Module:
    model = nn.Module()
    for name, value in values.items():
        model.register_buffer(name, None if value is None else torch.as_tensor(value))
    return model


def test_buffers_are_put_back_in_the_tensors_that_the_model_had() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.register_buffer("own", torch.zeros(2))
    model.register_buffer("none", None)
    kept = KeptBuffers(model)
    assert set(kept.values) == {"own", "0.running_mean", "0.running_var", "0.num_batches_tracked"}
    own = model.own
    model.own.fill_(3.0)
    model[0].running_mean = torch.full((2,), 5.0)
    model[0].num_batches_tracked.add_(7)
    kept.put_back()
    assert model.own is own
    assert own.tolist() == model[0].running_mean.tolist() == [0.0, 0.0]
    assert int(model[0].num_batches_tracked) == 0


def test_what_was_kept_does_not_follow_the_model() -> None:
    model = holding(own=torch.zeros(2))
    kept = KeptBuffers(model)
    model.own.fill_(1.0)
    assert kept.values["own"].tolist() == [0.0, 0.0]


SIZES = (3, 3, 2)


def compared(
    alone: object,
    folded: object,
    *,
    start: object = 0.0,
    shards: tuple[object, ...] = (),
    name: str = "it",
) -> dict[str, str]:
    """One buffer: what one shard made of it, what there is after the step, and the parts."""
    kept = [KeptBuffers(holding(**{name: value})) for value in (alone, folded, start)]
    parts = {number: KeptBuffers(holding(**{name: value})) for number, value in enumerate(shards)}
    return kept[0].compare(kept[1], kept[2], parts, SIZES, TOLERANCE)


@for_each(
    "value",
    [
        1.0,
        [1.0, 2.0],
        [],
        3,
        True,
        1 + 2j,
        [0.0, -math.inf],
        [math.nan, 1.0],
        [math.inf] * 3,
        torch.tensor([1.0, -math.inf], dtype=torch.bfloat16),
        torch.ones(2).to(torch.float8_e4m3fn),
    ],
    ids=repr,
)
def test_what_is_alike_does_not_differ(value: object) -> None:
    """Masks of infinities, and values that are not known yet, are like themselves."""
    assert compared(value, value) == {}


@for_each(
    ("alone", "folded"),
    [
        (1.0, 1.0 + 1e-6),
        ([1.0, 2.0], [2.0, 1.0]),
        ([1.0, -math.inf], [1.0 + 1e-6, -math.inf]),
        ([0.0, math.inf], [0.0, -math.inf]),
        ([0.0, math.inf], [0.0, 1.0]),
        ([0.0, 1.0], [0.0, math.inf]),
        ([0.0, math.nan], [0.0, 1.0]),
        ([0.0, 1.0], [0.0, math.nan]),
        (3, 4),
        (True, False),
        (1 + 2j, 1 + 3j),
        ([1.0], [1.0, 1.0]),
    ],
    ids=repr,
)
def test_what_differs_is_named(alone: object, folded: object) -> None:
    assert list(compared(alone, folded)) == ["it"]


def test_a_difference_is_measured_by_the_largest_value() -> None:
    assert compared([1e6, 1.0], [1e6, 1.0 + 1e-5]) == {}
    assert compared([1e6, 1.0, math.inf], [1e6, 1.0 + 1e-5, math.inf]) == {}
    assert compared([1.0, 1.0], [1.0, 1.0 + 1e-5])


@for_each(
    ("alone", "shards", "start", "rule"),
    [
        (11.0, (4.0, 5.0, 6.0), 2.0, "sum"),
        (4.875, (4.0, 5.0, 6.0), 0.5, "mean"),
        (6.0, (4.0, 6.0, 5.0), 0.5, "max"),
        (4.0, (4.0, 5.0, 6.0), 0.5, "first"),
        ([4.0, 1.0], ([4.0, 1.0], [5.0, 0.0], [6.0, 7.0]), [0.5, 0.5], "first"),
        (15, (4, 5, 6), 0, "sum"),
        (15 + 3j, (4 + 1j, 5 + 1j, 6 + 1j), 0j, "sum"),
    ],
)
def test_the_rule_that_would_give_what_one_shard_does_is_advised(
    alone: object, shards: tuple[object, ...], start: object, rule: str
) -> None:
    found = compared(alone, torch.zeros_like(torch.as_tensor(alone)), start=start, shards=shards)
    assert f'Trainer(buffers={{"it": "{rule}"}}) gives what one shard does' in found["it"]


def test_where_no_rule_gives_it_none_is_advised() -> None:
    found = compared(99.0, 5.0, shards=(4.0, 5.0, 6.0))["it"]
    assert found.startswith("5 with the shards, 99 with one; none of the rules of Trainer(buffers")
    assert "none of the rules" in compared(99.0, 5.0)["it"]


def test_many_values_are_shown_by_their_norm() -> None:
    words = compared([3.0, 4.0], [0.0, 0.0])["it"]
    assert words.startswith("values of norm 0 with the shards, values of norm 5 with one;")


def test_a_buffer_that_is_gone_is_not_compared() -> None:
    one, other = KeptBuffers(holding(it=1.0)), KeptBuffers(holding(it=None))
    assert one.compare(other, one, {}, SIZES, TOLERANCE) == {}
