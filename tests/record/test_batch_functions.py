"""Functions that make batches and keep state, and data sets that grow, in runs that are resumed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from onefold.errors import CheckpointError, SampleError
from onefold.record import FILE
from tests.checkpoint.inprocess import Life, Runs, Script
from tests.small import line, make_trainer, points, square
from tests.tables import some

X, Y = points(40)
Rule = Callable[[int, torch.Generator], Any]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path / "run", monkeypatch)


def drawing() -> Rule:
    """Draws from a generator of the script's own, as ports of GPT loops do."""
    generator = torch.Generator().manual_seed(1)

    def rule(number: int, _: torch.Generator) -> Any:
        rows = torch.randint(40, (8,), generator=generator)
        return X[rows], Y[rows]

    return rule


class Cursor:
    """Goes through the data and begins anew, as loaders of tokens do."""

    def __init__(self) -> None:
        self.place = 0

    def __call__(self, number: int, _: torch.Generator) -> Any:
        rows = [(self.place + n) % 40 for n in range(6)]
        self.place += 6
        return X[rows], Y[rows]


def pure(number: int, generator: torch.Generator) -> Any:
    rows = torch.randint(40, (8,), generator=generator)
    return X[rows] + torch.rand(1), Y[rows]


def by_rule(
    life: Life, make: Callable[[], Rule], *, in_epochs: bool = True, skips: int = 2, **choices: Any
) -> str:
    trainer = life.trainer(line(), shards=2)
    loader = trainer.batches(make(), per_epoch=4, **choices)
    kept = []
    for _ in trainer.epochs(2) if in_epochs else range(2):
        for number, batch in enumerate(loader):
            life.tick()
            if number == skips:
                continue  # left out, and made nevertheless
            kept.append(float(trainer.step(batch).loss))
    return f"{trainer.fingerprint()} {kept}"


SCRIPTS: dict[str, Script] = {
    "generator": partial(by_rule, make=drawing),
    "generator, without epochs": partial(by_rule, make=drawing, in_epochs=False),
    "cursor": partial(by_rule, make=Cursor),
    "arguments alone": partial(by_rule, make=lambda: pure, stateless=True),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_function_that_keeps_state_goes_on_where_it_was(runs: Runs, name: str) -> None:
    script = SCRIPTS[name]
    expected = runs.whole(script)
    for dies in some(range(1, runs.ticks + 1), 3):
        again = runs.below(dies)
        assert again.start(script, dies=dies) is None
        assert again.start(script, devices=2) == expected, dies
        assert again.start(script) == expected  # from its end


def test_a_function_is_called_again_unless_it_depends_on_its_arguments_alone(runs: Runs) -> None:
    made: list[int] = []

    def noting(number: int, generator: torch.Generator) -> Any:
        made.append(number)
        return pure(number, generator)

    for stateless, again in ((False, [*range(8)]), (True, [4, 4, 5, 6, 7])):
        own = runs.below(stateless)
        script = partial(by_rule, make=lambda: noting, stateless=stateless)
        assert own.start(script, dies=6) is None
        made.clear()
        assert own.start(script) == runs.whole(partial(by_rule, make=lambda: pure))
        assert made == again


@pytest.mark.parametrize("dies", [3, 4, 6, 8])
def test_state_that_nothing_restores_is_refused(runs: Runs, dies: int) -> None:
    """Without a record, in the middle of an epoch or between two of them."""
    makes: dict[str, Callable[[], Any]] = {
        "drawing": drawing,
        "cursor": Cursor,
        "pure": lambda: pure,
    }
    for name, make in makes.items():
        own, script = runs.below(name), partial(by_rule, make=make, skips=-1)
        assert own.start(script, dies=dies) is None
        (own.folder / FILE).unlink()
        # Of a run with a single step the function is where it was, once it has made that batch.
        if name == "pure" or dies == 3:
            assert str(own.start(script)).split()[0] == runs.whole(script).split()[0]
            continue
        with pytest.raises(
            CheckpointError, match=r"returned a different batch \d than in the saved run"
        ):
            own.start(script)


def test_a_load_of_the_script_refuses_it_too(tmp_path: Path) -> None:
    def begun(rule: Rule) -> tuple[Any, Any]:
        trainer = make_trainer(line())
        return trainer, trainer.batches(rule, per_epoch=4)

    for rule in (pure, drawing()):
        trainer, loader = begun(rule)
        for number, batch in enumerate(loader):
            trainer.step(batch)
            if number == 1:
                trainer.save(tmp_path / "saved")
                break
    trainer, loader = begun(pure)
    trainer.load(tmp_path / "saved", allow_changed=["dataset"])
    assert len(list(loader)) == 2
    trainer, loader = begun(drawing())
    trainer.load(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"keeps state.*pass stateless=True"):
        next(iter(loader))


def test_a_function_that_wrongly_says_that_it_keeps_nothing_is_refused() -> None:
    for rule in (drawing(), Cursor()):
        loader = make_trainer(line()).batches(rule, per_epoch=4, stateless=True)
        with pytest.raises(SampleError, match="batches from a function returned different bytes"):
            next(iter(loader))


def test_a_function_that_calls_the_model_is_told_how_to_go_on(runs: Runs) -> None:
    def playing(life: Life, *, stateless: bool) -> str:
        model = line()

        def rule(number: int, generator: torch.Generator) -> Any:
            rows = X[torch.randint(40, (8,), generator=generator)]
            with torch.no_grad():
                return rows, model(rows) + 1

        trainer = life.trainer(model)
        for batch in trainer.batches(rule, per_epoch=5, stateless=stateless):
            life.tick()
            trainer.step(batch)
        return trainer.fingerprint()

    for stateless in (False, True):
        own, script = runs.below(stateless), partial(playing, stateless=stateless)
        assert own.start(script, dies=4) is None
        if stateless:
            assert own.start(script) == runs.whole(script)
        else:
            with pytest.raises(SampleError, match="with stateless=True it is not"):
                own.start(script)


class Growing(Dataset[Any]):
    """Has more samples, or fewer, before each epoch."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return X[index % 40], Y[index % 40]


def growing(life: Life, by: int = 4, *, at_top: bool = False, **choices: Any) -> str:
    trainer = life.trainer(line(), square, shards=2)
    data = Growing(14)
    loader = trainer.loader(data, batch_size=4, **choices)
    seen = []
    for epoch in trainer.epochs(3):
        if at_top:
            data.length = 14 + by * epoch
        samples = 0
        for batch in loader:
            life.tick()
            trainer.step(batch)
            samples += batch.samples
        seen.append((len(loader), samples, data.length))
        data.length += 0 if at_top else by
    return f"{trainer.fingerprint()} {seen}"


@pytest.mark.parametrize("by", [4, -4])
@pytest.mark.parametrize("choices", [{}, {"shuffle": True}, {"drop_last": True, "num_workers": 2}])
def test_a_data_set_grows_and_shrinks_between_passes(
    runs: Runs, by: int, choices: dict[str, Any]
) -> None:
    expected = runs.whole(partial(growing, by=by, **choices))
    lengths = [14, 14 + by, 14 + 2 * by]
    short = choices.get("drop_last", False)
    rows = [(n // 4 if short else -(-n // 4), n // 4 * 4 if short else n, n) for n in lengths]
    assert expected.endswith(str(rows))


@pytest.mark.parametrize("by", [4, -4])
def test_a_run_with_a_growing_data_set_is_resumed(runs: Runs, by: int) -> None:
    script = partial(growing, by=by, shuffle=True)
    expected = runs.whole(script)
    for dies in range(3, runs.ticks + 1, 3):
        again = runs.below(dies)
        assert again.start(script, dies=dies) is None
        assert again.start(script, devices=2) == expected, dies


@pytest.mark.parametrize("at_top", [False, True])
def test_without_a_record_the_length_is_that_of_then_or_refused(runs: Runs, at_top: bool) -> None:
    script = partial(growing, at_top=at_top, shuffle=True)
    expected = runs.whole(script).split()[0]
    found = []
    for dies in range(2, runs.ticks + 1, 3):
        again = runs.below(dies)
        assert again.start(script, dies=dies) is None
        (again.folder / FILE).unlink()
        # In the first epoch the data set has not grown yet.
        if at_top or dies <= 5:
            found.append(str(again.start(script)).split()[0] == expected)
            continue
        with pytest.raises(CheckpointError, match="bring the data set to its previous length"):
            again.start(script)
    assert set(found) == {True}


def test_a_length_for_each_sample_must_grow_too() -> None:
    data = Growing(8)
    loader = make_trainer(line()).loader(data, batch_size=4, shuffle=True, lengths=[1] * 8)
    assert len(list(loader)) == 2
    data.length = 12
    with pytest.raises(
        ValueError, match="one length for each of the 12 samples, but got 8 lengths"
    ):
        list(loader)
