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


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return None if index in BAD else X[index]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return iter([None if index in BAD else X[index] for index in range(SAMPLES)])


def collate(samples: list[torch.Tensor | None]) -> torch.Tensor:
    kept = [sample for sample in samples if sample is not None]
    return torch.stack(kept) if kept else X[:0]


def fields(samples: list[torch.Tensor | None]) -> dict[str, Any]:
    x = collate(samples)
    return {"x": x, "texts": ["text"] * len(x)}


def tensor_of(batch: Any) -> torch.Tensor:
    return batch["x"] if isinstance(batch, dict) else batch  # type: ignore[no-any-return]


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(tensor_of(batch)).square().flatten()  # type: ignore[no-any-return]


LOSSES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "a scalar": lambda m, b: squares(m, b).mean(),
    "a scalar beside a value": lambda m, b: (squares(m, b).mean(), {"mse": squares(m, b).mean()}),
    "one a sample": squares,
    "a mean": lambda m, b: onefold.Mean(squares(m, b).sum(), len(tensor_of(b))),
    "ready": lambda m, b: onefold.losses.l1_loss(squares(m, b), 0 * squares(m, b)),
}


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(4, 1).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def plain() -> tuple[nn.Module, list[float]]:
    model, optimizer = made()
    values = []
    for start in range(0, SAMPLES, BATCH):
        kept = [i for i in range(start, start + BATCH) if i not in BAD]
        optimizer.zero_grad()
        loss = squares(model, X[kept]).mean()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return model, values


@for_each("loss", LOSSES.values(), ids=LOSSES.keys())
@for_each("shards", [1, 3, 4])
def test_shards_count_what_is_left(shards: int, loss: Callable[[nn.Module, Any], Any]) -> None:
    model, optimizer = made()
    trainer = onefold.Trainer(model, optimizer, loss, shards=shards)
    steps = [
        trainer.step(batch) for batch in trainer.loader(Data(), batch_size=BATCH, collate=collate)
    ]
    expected, values = plain()
    assert [float(step.loss) for step in steps] == pytest.approx(values, rel=1e-12)
    if steps[0].values:
        assert [float(s.values["mse"]) for s in steps] == pytest.approx(values, rel=1e-12)
    torch.testing.assert_close(model.weight, expected.weight, rtol=1e-12, atol=1e-14)


@for_each(
    ("data", "settings"),
    [
        (Data(), {"devices": ["cpu"] * 3}),
        (Data(), {"microbatch": 1}),
        (Stream(), {}),
        (Data(), {"workers": 1}),
    ],
    ids=["devices", "pieces", "a stream", "workers"],
)
def test_they_do_so_however_they_are_read_and_run(data: Any, settings: dict[str, Any]) -> None:
    workers = settings.pop("workers", 0)
    model, optimizer = made()
    trainer = onefold.Trainer(model, optimizer, LOSSES["a scalar"], shards=4, **settings)
    for batch in trainer.loader(data, batch_size=BATCH, collate=fields, workers=workers):
        assert trainer.step(batch).samples == BATCH
    torch.testing.assert_close(model.weight, plain()[0].weight, rtol=1e-12, atol=1e-14)


@for_each("devices", [1, 3])
def test_averages_of_buffers_count_what_is_left(devices: int) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
            self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x):
                self.mean.copy_(x.mean(0))
            return x * self.scale

    model = Norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = onefold.Trainer(
        model, optimizer, lambda m, b: m(b).mean(), shards=4, devices=["cpu"] * devices
    )
    for number, batch in enumerate(trainer.loader(Data(), batch_size=BATCH, collate=collate)):
        trainer.step(batch)
        kept = [i for i in range(number * BATCH, (number + 1) * BATCH) if i not in BAD]
        torch.testing.assert_close(model.mean, X[kept].mean(0), rtol=1e-12, atol=1e-14)


def test_scores_count_what_is_left_and_predictions_are_refused() -> None:
    model, optimizer = made()
    trainer = onefold.Trainer(model, optimizer, squares, shards=4)
    settings: dict[str, Any] = {"batch_size": BATCH, "collate": collate}
    scores = trainer.evaluate(
        lambda m, b: {"scalar": squares(m, b).mean(), "each": squares(m, b)}, Data(), **settings
    )
    kept = [i for i in range(SAMPLES) if i not in BAD]
    expected = squares(model, X[kept]).mean().item()
    assert scores == pytest.approx({"scalar": expected, "each": expected}, rel=1e-12)
    with pytest.raises(LossError, match=r"1 rows for 2 samples.*torch\.utils\.data\.Subset"):
        trainer.predict(lambda m, b: {"out": m(b)}, Data(), **settings)


def test_a_batch_of_which_nothing_is_left_is_skipped() -> None:
    model, optimizer = made()
    trainer = onefold.Trainer(model, optimizer, LOSSES["a scalar"], shards=3)
    (batch,) = trainer.loader([1, 2, 3, 4], batch_size=4, collate=lambda samples: X[:0])
    assert trainer.step(batch).skipped


def test_what_cannot_be_seen_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def pair(samples: list[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor]:
        return collate(samples), torch.zeros(100, dtype=torch.float64)

    model, optimizer = made()
    trainer = onefold.Trainer(model, optimizer, lambda m, b: squares(m, b[0]).mean(), shards=3)
    for batch in trainer.loader(Data(), batch_size=BATCH, collate=pair):
        trainer.step(batch)
    said = [text for text in caplog.messages if "collate leaves out samples" in text]
    assert len(said) == 1
    assert "onefold.Mean(losses.sum(), len(losses))" in said[0]


def test_the_refusal_of_too_few_values_names_filtering() -> None:
    model, optimizer = made()
    trainer = onefold.Trainer(model, optimizer, lambda m, b: squares(m, b)[1:], shards=2)
    with pytest.raises(LossError, match=r"collate leaves out .* onefold\.Mean\(losses\.sum\(\)"):
        trainer.step(X)


def test_time_first_is_no_filter() -> None:
    """Time first, and of that fewer rows than samples."""
    found = []
    for turn in (False, True):
        model, optimizer = made()

        def loss(m: nn.Module, b: torch.Tensor, turn: bool = turn) -> torch.Tensor:
            out: torch.Tensor = m(b.transpose(0, 1) if turn else b)
            return (out - 1).square().mean()

        def turned(samples: list[torch.Tensor], turn: bool = turn) -> torch.Tensor:
            x = torch.stack(samples).view(len(samples), 1, 4).expand(-1, 2, -1)
            return x.transpose(0, 1) if turn else x

        trainer = onefold.Trainer(model, optimizer, loss, shards=3)
        for batch in trainer.loader(X, batch_size=BATCH, collate=turned):
            trainer.step(batch)
        found.append(model.weight.detach().clone())
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)
