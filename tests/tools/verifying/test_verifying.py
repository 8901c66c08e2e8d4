"""A Trainer's part in a comparison: checkpoints, and when the script has done enough."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.core.options import LaunchContext, RunOptions
from onefold.data_order.reader import digest_samples
from onefold.system.safe_files import read_record
from tests.inside import session_in
from tests.small import line, points, square
from tests.tables import for_each
from tests.tools.verifying.compared import Compared, compared

__all__ = ["compared"]

DATA = torch.utils.data.TensorDataset(*points(10))


class Counted:
    """The loss, and how often it was computed."""

    calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> object:
        self.calls += 1
        return square(model, batch)

    def computed(self, call: Callable[[], object]) -> bool:
        before = self.calls
        call()
        return self.calls > before


def steps(trainer: onefold.Trainer, count: int) -> None:
    for _ in range(count):
        trainer.step(points(6))


def score(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"error": square(model, batch)}


def update(trainer: onefold.Trainer, batch: Any) -> None:
    """As scripts do that update by themselves."""
    with trainer.modifying():
        trainer.gradient(batch)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None


def test_checkpoints_are_written_aside(compared: Compared, tmp_path: Path) -> None:
    trainer = compared.trainer(line(), square)
    trainer.step(points(6))
    folder = trainer.save(tmp_path / "kept")
    assert folder.is_relative_to(compared.run)
    assert not (tmp_path / "kept").exists()
    for place in (tmp_path / "kept", folder, tmp_path / "kept" / folder.name):
        assert trainer.load(place).folder == folder


def test_what_a_real_run_left_is_read_where_needed(compared: Compared, tmp_path: Path) -> None:
    comparison, compared.context = compared.context, LaunchContext()
    real = compared.trainer(line().double(), square)
    for _ in range(2):
        real.step(tuple(part.double() for part in points(6)))
    real.save(tmp_path / "left")
    compared.context = comparison
    trainer = compared.trainer(line(), square)
    assert trainer.load(tmp_path / "left", if_any=True) is None
    assert trainer.steps == 0
    assert trainer.load(tmp_path / "left").step == 2
    trainer.step(points(6))
    trainer.save(tmp_path / "left")
    assert trainer.load(tmp_path / "left").step == 3
    assert [path.name for path in (tmp_path / "left").iterdir()] == ["step-00000002"]


def test_past_the_steps_of_all_trainers_nothing_is_computed(compared: Compared) -> None:
    loss = Counted()
    first, second = (compared.trainer(line(), loss) for _ in range(2))
    seen: list[int] = []
    first.on_step(lambda step: seen.append(step.number))
    for number in range(1, 9):
        # The second one begins late, and the first one goes on with it.
        assert loss.computed(lambda: first.step(points(6))) is (number <= 5)
        if number > 2:
            assert loss.computed(lambda: second.step(points(6))) is (number <= 5)
    assert (first.steps, second.steps, seen) == (8, 6, [*range(1, 9)])
    assert [len(compared.lines(trainer)) - 1 for trainer in (first, second)] == [3, 3]
    last = second.step(points(6))
    assert (last.number, float(last.loss)) == (7, float(second.step(points(6)).loss))
    third = compared.trainer(line(), loss)
    made = [loss.computed(lambda: third.step(points(6))) for _ in range(5)]
    assert made == [True] * 3 + [False] * 2


def test_a_trainer_that_makes_no_step_is_not_waited_for(compared: Compared) -> None:
    loss = Counted()
    first, second = (compared.trainer(line(), loss) for _ in range(2))
    made = [loss.computed(lambda: first.step(points(6))) for _ in range(40)]
    assert made == [True] * 30 + [False] * 10
    assert loss.computed(lambda: second.step(points(6)))


def test_gradients_count_as_steps_and_are_not_computed_either(compared: Compared) -> None:
    loss = Counted()
    trainer = compared.trainer(line(), loss)
    made = [loss.computed(lambda: update(trainer, points(6))) for _ in range(5)]
    assert made == [True] * 3 + [False] * 2
    assert trainer.steps == 5
    for batch in trainer.loader(DATA, batch_size=4):
        update(trainer, batch)
    assert trainer.steps == 8


def test_loaders_and_evaluations_go_on_unread(compared: Compared) -> None:
    class Reading(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    read: list[int] = []
    trainer = compared.trainer(line(), square)
    data = Reading([(torch.ones(3), torch.ones(1))] * 10)
    loader = trainer.loader(data, batch_size=4, shuffle=True)
    lengths = [[trainer.step(batch).samples for batch in loader] for _ in trainer.epochs(4)]
    assert lengths == [[4, 4, 2], [2] * 3, [2] * 3, [2] * 3]
    # Those of the digest, and of the first shard, which is made twice.
    of_digest, shard = len(digest_samples(len(data))), 1
    assert (trainer.steps, len(read)) == (12, 10 + of_digest + shard)
    error = trainer.evaluate(score, data, batch_size=4)["error"]
    assert trainer.evaluate(score, data, batch_size=4)["error"] == error
    assert len(read) == 2 * (10 + of_digest + shard)
    with trainer.modifying(), torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    assert trainer.evaluate(score, data, batch_size=4)["error"] == 1 != error


def test_results_are_kept_by_call_and_model(compared: Compared) -> None:
    """Calls of one function are told apart, and averages are another model, also where their block
    fails."""
    trainer = compared.trainer(line(), square)
    trainer.average(decay=0.5)
    steps(trainer, 4)

    def values(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"y": model(batch[0])[:, 0]}

    def mean() -> float:
        return trainer.evaluate(values, DATA, batch_size=4)["y"]

    def fail_in_averages() -> None:
        with trainer.averaged():
            assert mean() != trained
            raise ArithmeticError

    trained = mean()
    assert trainer.predict(values, DATA, batch_size=4)["y"].shape == (10,)
    with pytest.raises(ArithmeticError):
        fail_in_averages()
    assert mean() == trained


def test_a_script_that_waits_is_ended(compared: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onefold.tools.verifying._LONGEST", 10)
    trainer = compared.trainer(line(), square)
    steps(trainer, 10)
    with pytest.raises(SystemExit, match="0"):
        trainer.step(points(6))
    said = (compared.folder / "0-cut").read_text()
    assert "more steps, which compute nothing, with one Trainer" in said


def test_so_many_trainers_are_compared(compared: Compared) -> None:
    options = RunOptions(tools={"verify": compared.options(trainers=2)})
    compared.context = replace(compared.context, options=options)
    first, second = (compared.trainer(line(), square) for _ in range(2))
    steps(first, 5)
    steps(second, 2)
    with pytest.raises(SystemExit, match="0"):
        second.step(points(6))


@for_each(("limit", "made", "noted"), [(1_000, [40, 40], [40, 40]), (3, [40_000], [])])
def test_a_stream_is_read_on_to_its_end(
    limit: int,
    made: list[int],
    noted: list[int],
    compared: Compared,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a split by the number of devices shows; but not for ever."""

    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.ones(40, 2))

    monkeypatch.setattr("onefold.tools.verifying._READ_ON", limit)
    options = RunOptions(tools={"verify": compared.options(mathematics="")})
    compared.context = replace(compared.context, options=options)
    trainer = compared.trainer(nn.Linear(2, 1), lambda model, batch: model(batch).square().mean(1))
    loader = trainer.loader(Stream(), batch_size=4)
    assert [sum(trainer.step(batch).samples for batch in loader) for _ in made] == made
    lines = read_record(compared.folder, f"0-{session_in(trainer).devices.trainer}-passes")
    assert [line["samples"] for line in lines] == noted
