"""State that a shard carries from step to step, such as the hidden state of a recurrent model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.small import Batch, make_trainer, sgd
from tests.tables import for_each

ROWS, SHARDS, WIDTH = 12, 4, 5
SIZE = ROWS // SHARDS


class Recurrent(nn.Module):
    """Goes on where it was; a row that begins a text goes on from zeros."""

    hidden: torch.Tensor

    def __init__(self, rows: int = SIZE, *, assigns: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 20)
        self.register_buffer("hidden", torch.zeros(rows, WIDTH))
        self._assigns = assigns
        self.double()

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


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, begins = batch
    found = model(tokens[:, :-1], begins).transpose(1, 2)
    return F.cross_entropy(found, tokens[:, 1:], reduction="none").mean(dim=1)


def batch_of(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 20, (ROWS, 5), generator=generator)
    return tokens, torch.full((ROWS,), step % 4 == 0)  # a text has four batches


def trainer_of(devices: int = 1, model: Any = None, **choices: Any) -> Any:
    settings = {"shards": SHARDS, "buffers": {"hidden": "per_shard"}, **choices}
    return make_trainer(model or Recurrent(), loss, devices=devices, **settings)


def train(trainer: Any, first: int, last: int) -> str:
    for number in range(first, last + 1):
        trainer.step(batch_of(number))
    return str(trainer.fingerprint())


@for_each("assigns", [False, True])
def test_a_plain_loop_over_whole_batches_comes_to_the_same(assigns: bool) -> None:
    optimizer = sgd(plain := Recurrent(ROWS))
    trainers = [trainer_of(devices, Recurrent(assigns=assigns)) for devices in (1, 2, 3)]
    for number in range(6):
        optimizer.zero_grad()
        expected = loss(plain, batch_of(number)).mean()
        expected.backward()
        optimizer.step()
        for trainer in trainers:
            found = float(trainer.step(batch_of(number)).loss)
            assert found == pytest.approx(float(expected.detach()), rel=1e-10)
    assert len({trainer.fingerprint() for trainer in trainers}) == 1
    for mine, other in zip(trainers[1].model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


@for_each("devices", [(1, 3, 2), (2, 1, 3)])
def test_a_stopped_run_goes_on_with_what_shards_have_left(
    devices: tuple[int, int, int], tmp_path: Path
) -> None:
    whole, stopped, going_on = map(trainer_of, devices)
    train(stopped, 1, 2)
    stopped.save(tmp_path)
    train(going_on, 5, 6)  # of another place
    going_on.load(tmp_path)
    assert train(going_on, 3, 7) == train(whole, 1, 7)
    begun_anew = trainer_of()
    begun_anew.load(tmp_path, allow_changed=["shards"])
    assert train(begun_anew, 3, 7) != whole.fingerprint()


def test_what_a_script_writes_has_all_shards_begin_anew(tmp_path: Path) -> None:
    """By another value: one that it has already changes nothing."""
    trainers = [trainer_of(devices) for devices in (1, 3)]
    for trainer in trainers:
        train(trainer, 1, 2)
        with trainer.modifying():
            trainer.model.hidden.fill_(0.25)
    going_on, fresh = trainer_of(2), Recurrent(ROWS)
    trainers[1].save(tmp_path)
    going_on.load(tmp_path)
    values = trainers[0].model.state_dict() | {"hidden": torch.full((ROWS, WIDTH), 0.25)}
    fresh.load_state_dict(values)
    expected = float(loss(fresh, batch_of(3)).mean().detach())
    for trainer in (*trainers, going_on):
        assert float(trainer.step(batch_of(3)).loss) == pytest.approx(expected, rel=1e-12)
    assert len({trainer.fingerprint() for trainer in (*trainers, going_on)}) == 1


def test_microbatches_of_a_shard_are_refused() -> None:
    with pytest.raises(
        ValueError, match="microbatch cannot be combined with a buffer whose rule is"
    ):
        trainer_of(microbatch=2)
