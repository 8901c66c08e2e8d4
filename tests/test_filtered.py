"""A collate function that leaves out samples: shards count what it has left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.errors import LossError
from tests.tables import for_each

SAMPLES, BATCH = 24, 8
BAD = {1, 9, 10, 16, 17, 20}
"""With 4 shards, the shard of 16 and 17 has no sample left."""
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = [None if index in BAD else X[index] for index in range(SAMPLES)]
KEPT = [[i for i in range(start, start + BATCH) if i not in BAD] for start in (0, 8, 16)]
Sample = torch.Tensor | None


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Sample]:
        return iter(DATA)


def collate(samples: list[Sample]) -> torch.Tensor:
    kept = [sample for sample in samples if sample is not None]
    return torch.stack(kept) if kept else X[:0]


def fields(samples: list[Sample]) -> dict[str, Any]:
    x = collate(samples)
    return {"x": x, "texts": ["text"] * len(x)}


def tensor_of(batch: Any) -> torch.Tensor:
    return batch["x"] if isinstance(batch, dict) else batch  # type: ignore[no-any-return]


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(tensor_of(batch)).square().flatten()  # type: ignore[no-any-return]


class Model(nn.Linear):
    """With a buffer that is averaged over shards."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(4, 1, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) and self.training:
            self.mean.copy_(x.mean(0))
        return super().forward(x)


LOSSES: list[Callable[[nn.Module, Any], Any]] = [
    lambda m, b: squares(m, b).mean(),
    lambda m, b: (squares(m, b).mean(), {"mse": squares(m, b).mean()}),
    squares,
    lambda m, b: onefold.Mean(squares(m, b).sum(), len(tensor_of(b))),
    lambda m, b: onefold.losses.l1_loss(squares(m, b), 0 * squares(m, b)),
]


def trainer_of(loss: Any = LOSSES[0], shards: int = 4, **settings: Any) -> onefold.Trainer:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return onefold.Trainer(model, optimizer, loss, shards=shards, **settings)


@for_each(
    ("loss", "shards", "data", "settings"),
    [
        *((loss, shards, DATA, {}) for loss in LOSSES for shards in (1, 3, 4)),
        (LOSSES[0], 4, DATA, {"devices": ["cpu"] * 3}),
        (LOSSES[0], 4, DATA, {"microbatch": 1}),
        (LOSSES[0], 4, DATA, {"workers": 1}),
        (LOSSES[0], 4, Stream(), {}),
    ],
)
def test_shards_count_what_is_left(
    loss: Any, shards: int, data: Any, settings: dict[str, Any]
) -> None:
    plain, given = Model(), dict(settings)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    workers = given.pop("workers", 0)
    trainer = trainer_of(loss, shards, **given)
    batches = trainer.loader(data, batch_size=BATCH, collate=fields, workers=workers)
    for batch, kept in zip(batches, KEPT, strict=True):
        step = trainer.step(batch)
        optimizer.zero_grad()
        expected = squares(plain, X[kept]).mean()
        expected.backward()
        optimizer.step()
        assert step.samples == BATCH
        for value in (step.loss, *step.values.values()):
            assert float(value) == pytest.approx(expected.item(), rel=1e-12)
        if "microbatch" not in settings:
            mean = trainer.model.get_buffer("mean")
            torch.testing.assert_close(mean, X[kept].mean(0), rtol=1e-12, atol=1e-14)
    found = trainer.model.get_parameter("weight")
    torch.testing.assert_close(found, plain.weight, rtol=1e-12, atol=1e-14)


def test_scores_count_what_is_left_and_predictions_are_refused() -> None:
    trainer = trainer_of(squares)
    settings: dict[str, Any] = {"batch_size": BATCH, "collate": collate}
    scores = trainer.evaluate(
        lambda m, b: {"scalar": squares(m, b).mean(), "each": squares(m, b)}, DATA, **settings
    )
    expected = squares(Model(), X[[*KEPT[0], *KEPT[1], *KEPT[2]]]).mean().item()
    assert scores == pytest.approx({"scalar": expected, "each": expected}, rel=1e-12)
    with pytest.raises(LossError, match=r"1 rows for 2 samples.*torch\.utils\.data\.Subset"):
        trainer.predict(lambda m, b: {"out": m(b)}, DATA, **settings)


def test_a_batch_of_which_nothing_is_left_is_skipped() -> None:
    trainer = trainer_of(shards=3)
    (batch,) = trainer.loader([1, 2, 3, 4], batch_size=4, collate=lambda samples: X[:0])
    assert trainer.step(batch).skipped


def test_what_cannot_be_seen_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def pair(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        return collate(samples), torch.zeros(100, dtype=torch.float64)

    trainer = trainer_of(lambda m, b: squares(m, b[0]).mean(), shards=3)
    for batch in trainer.loader(DATA, batch_size=BATCH, collate=pair):
        trainer.step(batch)
    (said,) = [text for text in caplog.messages if "collate leaves out samples" in text]
    assert "onefold.Mean(losses.sum(), len(losses))" in said
    with pytest.raises(LossError, match=r"collate leaves out .* onefold\.Mean\(losses\.sum\(\)"):
        trainer_of(lambda m, b: squares(m, b)[1:], shards=2).step(X)
