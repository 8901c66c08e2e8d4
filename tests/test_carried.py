"""State that a shard carries from step to step, such as the hidden state of a recurrent model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onefold
from tests.tables import for_each

ROWS, SHARDS, WIDTH, STEPS = 12, 4, 5, 6
RULES: dict[str, Any] = {"hidden": "shard"}


class Recurrent(nn.Module):
    """Goes on where it was; a row that begins a text goes on from zeros."""

    def __init__(self, rows: int, *, assigns: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 20)
        self.register_buffer("hidden", torch.zeros(rows, WIDTH))
        self._assigns = assigns

    def forward(self, tokens: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden * ~begins[:, None]
        found = []
        for column in tokens.unbind(dim=1):
            hidden = self.cell(self.embed(column), hidden)
            found.append(self.out(hidden))
        if self._assigns:
            self.hidden = hidden.detach()
        else:
            self.hidden.copy_(hidden.detach())
        return torch.stack(found, dim=1)


Batch = tuple[torch.Tensor, torch.Tensor]


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, begins = batch
    found = model(tokens[:, :-1], begins).transpose(1, 2)
    return F.cross_entropy(found, tokens[:, 1:], reduction="none").mean(dim=1)


def batch_of(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 20, (ROWS, 8), generator=generator)
    return tokens, torch.full((ROWS,), step % 4 == 0)  # a text has four batches


def made(rows: int = ROWS // SHARDS, **choices: Any) -> nn.Module:
    torch.manual_seed(0)
    return Recurrent(rows, **choices).double()


def trainer_of(model: nn.Module, devices: int = 1, **choices: Any) -> onefold.Trainer:
    return onefold.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        loss,
        shards=SHARDS,
        devices=["cpu"] * devices,
        threads=1,
        buffers=RULES,
        **choices,
    )


def train(trainer: onefold.Trainer, first: int, last: int) -> onefold.Trainer:
    for number in range(first, last + 1):
        trainer.step(batch_of(number))
    return trainer


@for_each("assigns", [False, True])
def test_a_plain_loop_over_whole_batches_comes_to_the_same(assigns: bool) -> None:
    plain, ours = made(ROWS), made(assigns=assigns)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    trainer = trainer_of(ours, 2)
    for number in range(STEPS):
        optimizer.zero_grad()
        expected = loss(plain, batch_of(number)).mean()
        expected.backward()
        optimizer.step()
        assert float(trainer.step(batch_of(number)).loss) == pytest.approx(
            float(expected.detach()), rel=1e-12
        )
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_the_bits_do_not_depend_on_who_runs_a_shard() -> None:
    whole = train(trainer_of(made()), 0, STEPS).fingerprint()
    for devices in (2, 3):
        assert train(trainer_of(made(), devices), 0, STEPS).fingerprint() == whole
    moved = trainer_of(made(), 3, plan=(0, 3, 1))
    for number in range(STEPS + 1):
        moved.step(batch_of(number))
        moved.plan = [(2, 1, 1), (0, 0, 4), (1, 3, 0)][number % 3]
    assert moved.fingerprint() == whole


@for_each("devices", [(1, 3, 2), (2, 1, 3)])
def test_a_stopped_run_goes_on_with_what_shards_have_left(
    devices: tuple[int, int, int], tmp_path: Path
) -> None:
    whole, stopped, going_on = (trainer_of(made(), count) for count in devices)
    train(whole, 1, 7)
    train(stopped, 1, 2).save(tmp_path)
    train(going_on, 5, 6)  # of another place
    going_on.load(tmp_path)
    assert train(going_on, 3, 7).fingerprint() == whole.fingerprint()
    begun_anew = trainer_of(made())
    begun_anew.load(tmp_path, changed=["shards"])
    assert train(begun_anew, 3, 7).fingerprint() != whole.fingerprint()


def test_the_module_keeps_the_value_that_all_begin_with() -> None:
    model = made()
    trainer = trainer_of(model, 2)
    train(trainer, 1, 3)
    assert not model.hidden.any()
    seen = trainer.evaluate(
        lambda m, batch: {"h": m.hidden.abs().sum()}, torch.ones(8, 2), batch_size=4
    )
    assert seen == {"h": 0.0}


def test_what_a_script_writes_has_all_shards_begin_anew() -> None:
    """By another value: one that it has already changes nothing."""
    trainers = [trainer_of(made(), devices) for devices in (1, 3)]
    for trainer in trainers:
        train(trainer, 1, 2)
        with trainer.changing():
            trainer.model.hidden.fill_(0.25)  # type: ignore[operator,union-attr]
    fresh = made()
    fresh.load_state_dict(trainers[0].model.state_dict())
    first = float(trainers[0].step(batch_of(3)).loss)
    assert first == pytest.approx(float(loss_of_all(fresh, batch_of(3)).detach()), rel=1e-12)
    assert first == float(trainers[1].step(batch_of(3)).loss)


def loss_of_all(model: nn.Module, batch: Batch) -> torch.Tensor:
    """With the same beginning for the rows of each shard."""
    size = ROWS // SHARDS
    parts = []
    for start in range(0, ROWS, size):
        model.hidden.fill_(0.25)  # type: ignore[operator,union-attr]
        parts.append(loss(model, (batch[0][start : start + size], batch[1][start : start + size])))
    return torch.cat(parts).mean()


def test_a_step_that_is_skipped_leaves_them_alone() -> None:
    trainer, other = trainer_of(made(), 2, on_nonfinite="skip"), trainer_of(made())
    for each in (trainer, other):
        train(each, 1, 2)
    spoilt = trainer.model.out.bias  # type: ignore[union-attr]
    before = spoilt.detach().clone()  # type: ignore[operator,union-attr]
    with trainer.changing(), torch.no_grad():
        spoilt.fill_(float("nan"))  # type: ignore[operator,union-attr]
    assert trainer.step(batch_of(7)).skipped
    with trainer.changing(), torch.no_grad():
        spoilt.copy_(before)  # type: ignore[operator,union-attr]
    assert train(trainer, 3, 3).fingerprint() == train(other, 3, 3).fingerprint()


def test_pieces_of_a_shard_are_refused() -> None:
    with pytest.raises(ValueError, match="as large as a shard, and microbatch runs a shard in pie"):
        trainer_of(made(), microbatch=2)


class Synced(Recurrent):
    """A batch norm over the whole batch stops each shard in the middle."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows, assigns=True)
        self.norm = onefold.SyncBatchNorm(WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, tokens: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        rows = self.embed(tokens[:, 0]) * self.scale  # which backward will need
        self.scale = 0.5 * self.scale + 1.0
        hidden = self.cell(self.norm(rows), self.hidden * ~begins[:, None])
        self.hidden = hidden.detach()
        return self.out(hidden)[:, None].expand(-1, tokens.shape[1], -1)


def synced(rows: int = ROWS // SHARDS) -> nn.Module:
    torch.manual_seed(0)
    return Synced(rows).double()


def test_a_replaced_buffer_is_the_shards_own_where_shards_take_turns() -> None:
    plain = synced(ROWS)
    plain.norm = nn.BatchNorm1d(WIDTH).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    trainers = [trainer_of(synced(), devices) for devices in (1, 2, 3)]
    for number in range(4):
        optimizer.zero_grad()
        expected = loss(plain, batch_of(number)).mean()
        expected.backward()
        optimizer.step()
        for trainer in trainers:
            found = float(trainer.step(batch_of(number)).loss)
            assert found == pytest.approx(float(expected.detach()), rel=1e-10)
    assert len({trainer.fingerprint() for trainer in trainers}) == 1


def test_a_run_that_begins_anew_and_is_saved_goes_on_anew(tmp_path: Path) -> None:
    trainer = train(trainer_of(made(), 2), 1, 2)
    with trainer.changing():
        trainer.model.hidden.fill_(5.0)  # type: ignore[operator,union-attr]
    trainer.save(tmp_path)
    going_on = trainer_of(made())
    going_on.load(tmp_path)
    assert train(trainer, 3, 3).fingerprint() == train(going_on, 3, 3).fingerprint()


def test_an_evaluation_of_averages_leaves_them_alone() -> None:
    found = []
    for looks in (False, True):
        trainer = trainer_of(made())
        trainer.average(decay=0.9)
        with trainer.changing():
            trainer.model.hidden.fill_(5.0)  # type: ignore[operator,union-attr]
        train(trainer, 1, 2)
        if looks:
            with trainer.averaged():
                trainer.evaluate(lambda m, x: {"x": x.mean(1)}, torch.ones(6, 2), batch_size=6)
        found.append(train(trainer, 3, 4).fingerprint())
    assert found[0] == found[1]
