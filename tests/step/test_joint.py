"""What shards know of each other before backward: the divisors of several terms, and gathered rows.
They are those of the fold, whoever has which shard."""

from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.errors import LossError
from tests.small import Batch, line, make_trainer
from tests.tables import for_each

SHARES_OF_DEVICES = [(4,), (2, 2), (1, 3), (4, 0), (0, 2, 2), (1, 1, 1, 1)]
TINY = 2.0**-53


def of_numbers(loss: Any, *steps: list[float], shares: tuple[int, ...] | None = None) -> float:
    """The loss of the last step, of a model whose samples have these numbers."""
    settings: dict[str, Any] = {} if shares is None else {"devices": len(shares), "shares": shares}
    trainer = make_trainer(line().double(), loss, **{"devices": None, **settings})
    for numbers in steps:
        inputs = torch.zeros(len(numbers), 3, dtype=torch.float64)
        step = trainer.step((inputs, torch.tensor(numbers, dtype=torch.float64)))
    trainer.close()
    return float(step.loss)


def by_weight(model: nn.Module, batch: Batch) -> onefold.LossTerms:
    """The number of shards that have samples, over the sum of the numbers, and nothing."""
    total = model(batch[0]).sum() * 0
    return onefold.Mean(total + 1.0, batch[1].sum()) + onefold.Sum(total)


@for_each("shares", SHARES_OF_DEVICES)
def test_weights_are_added_in_the_folds_order_and_in_float64(shares: tuple[int, ...]) -> None:
    folded = (1.0 + TINY) + (TINY + TINY)
    assert folded != ((1.0 + TINY) + TINY) + TINY
    found = of_numbers(by_weight, [1.0, TINY, TINY, TINY], shares=shares)
    assert found == 4.0 * (1.0 / folded) != 4.0
    # The last shard is empty.
    assert of_numbers(by_weight, [2.0, 1.0, 3.0], shares=shares) == 3.0 / 6.0


@for_each("shares", SHARES_OF_DEVICES)
def test_shards_of_other_numbers_of_terms_are_named(shares: tuple[int, ...]) -> None:
    def loss(model: nn.Module, batch: Batch) -> Any:
        terms = by_weight(model, batch)
        return terms if float(batch[1][0]) < 3 else terms + onefold.Sum(model(batch[0]).sum())

    with pytest.raises(LossError, match="different kinds of losses: a sum of 2 terms, a sum of 3"):
        of_numbers(loss, [1.0, 2.0, 3.0, 4.0], shares=shares)
    with pytest.raises(LossError, match=r"shard 0 has 2 terms, but another shard has 3\. Return"):
        of_numbers(loss, [1.0] * 4, [1.0, 2.0, 3.0, 1.0], shares=shares)


@for_each("shares", SHARES_OF_DEVICES)
def test_gradients_of_rows_are_added_in_the_folds_order(shares: tuple[int, ...]) -> None:
    tiny = 2.0**-24
    factors = torch.tensor([1.0, tiny, tiny, tiny])
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    trainer = make_trainer(
        model,
        lambda m, b: onefold.Sum((onefold.gather(m(b[0])) * b[1]).sum() / 4),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        devices=len(shares),
        shares=shares,
    )
    trainer.step((torch.tensor([[4.0], [0.0], [0.0], [0.0]]), factors[:, None]))
    assert model.weight.item() == -2 * tiny  # and not 0, as in another order
