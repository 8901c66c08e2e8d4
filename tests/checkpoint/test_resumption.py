"""What scripts do to the model around the loop acts once, wherever the run was stopped."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import onefold
from onefold.checkpoint.runstate import RunState
from onefold.errors import CheckpointError
from tests.checkpoint.inprocess import Life, Runs, Script
from tests.inside import engine_in
from tests.small import points, square

EPOCHS = 3


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path / "run", monkeypatch)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def data() -> TensorDataset:
    return TensorDataset(*points(24))


def result(trainer: onefold.Trainer, *more: object) -> str:
    """All that a run leaves, buffers and settings included; read from the model itself."""
    values = [v.double().sum().item().hex() for v in trainer.model.state_dict().values()]
    settings = engine_in(trainer).update.optimizer.param_groups[0]["lr"]
    return f"{trainer.fingerprint()} {trainer.steps} {settings} {more} {values}"


def change(trainer: onefold.Trainer, by: float = 0.5) -> None:
    with trainer.changing(), torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(by)


def made(life: Life, model: nn.Module | None = None) -> onefold.Trainer:
    model = model or network()
    return life.trainer(model, square, optimizer=adam(model))


def zeroed_head(life: Life) -> str:
    trainer = made(life)
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    with trainer.changing():
        nn.init.zeros_(trainer.model[3].weight)  # type: ignore[index]
    for _ in trainer.epochs(EPOCHS):
        for batch in loader:
            life.tick()
            trainer.step(batch)
            life.tick()
    return result(trainer)


def changed_at_each_epoch(life: Life) -> str:
    """At its top, in the middle of a pass, at its end, and when all is done; a rate by hand."""
    trainer = made(life)
    optimizer = engine_in(trainer).update.optimizer
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    for epoch in trainer.epochs(EPOCHS):
        life.tick()
        change(trainer)
        optimizer.param_groups[0]["lr"] *= 0.9
        life.tick()
        for batch in loader:
            trainer.step(batch)
            life.tick()
        change(trainer, 2.0 + epoch)
        life.tick()
    change(trainer, 3.0)
    return result(trainer)


def target_network(life: Life) -> str:
    model = nn.ModuleDict({"online": network(), "target": network()})
    model["target"].requires_grad_(False)

    def loss(models: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        wanted = targets + 0.5 * models["target"](inputs).detach()  # type: ignore[operator]
        return (models["online"](inputs) - wanted).square().mean(dim=1)  # type: ignore[operator]

    optimizer = torch.optim.Adam(model["online"].parameters(), lr=0.01)
    trainer = life.trainer(model, loss, optimizer=optimizer)
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    for _ in trainer.epochs(EPOCHS):
        for batch in loader:
            step = trainer.step(batch)
            life.tick()
            if step.number % 2 == 0:
                with trainer.changing():
                    model["target"].load_state_dict(model["online"].state_dict())
                life.tick()
    return result(trainer)


def counted_steps(life: Life) -> str:
    trainer = made(life)
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    change(trainer)
    while trainer.steps < 8:
        change(trainer, 1.5)
        for batch in loader:
            if trainer.steps == 8:
                break
            life.tick()
            trainer.step(batch)
            life.tick()
            if trainer.steps % 4 == 0:
                change(trainer, 1.25)
                life.tick()
    change(trainer)
    return result(trainer)


def plain_range(life: Life) -> str:
    """The epochs that are done are gone through again, and pruned again."""
    trainer = made(life)
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    for epoch in range(EPOCHS):
        change(trainer, 1.5)
        for batch in loader:
            trainer.step(batch)
            life.tick()
        trainer.evaluate(lambda m, b: {"loss": square(m, b)}, data(), batch_size=8)
        change(trainer, 0.5 + epoch)
        life.tick()
    return result(trainer)


def two_phases(life: Life) -> str:
    trainer = made(life)
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    for last in (1, EPOCHS):
        for _ in trainer.epochs(last):
            for batch in loader:
                trainer.step(batch)
                life.tick()
        change(trainer, 0.5 + last)
        life.tick()
    return result(trainer)


def updates_of_its_own(life: Life) -> str:
    trainer = made(life)
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    change(trainer)
    for _ in trainer.epochs(EPOCHS):
        for batch in loader:
            with trainer.changing():
                for parameter in trainer.model.parameters():
                    parameter.data.mul_(0.99)
                trainer.gradient(batch)
                life.tick()
                for parameter in trainer.model.parameters():
                    parameter.data.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
            life.tick()
    return result(trainer)


def averages_and_schedule(life: Life) -> str:
    """The schedule is stepped where an epoch begins, by a score; the average begins with one."""
    model = network()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    trainer = life.trainer(
        model, square, optimizer=optimizer, schedule=schedule, schedule_every="script"
    )
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    for epoch in trainer.epochs(EPOCHS):
        if epoch == 1:
            trainer.average(decay=0.9)
        if epoch > 0:
            schedule.step()
        for batch in loader:
            trainer.step(batch)
            life.tick()
    with trainer.averaged():
        averaged = trainer.fingerprint()
    return result(trainer, averaged)


SCRIPTS = (
    *(zeroed_head, changed_at_each_epoch, target_network, counted_steps, plain_range, two_phases),
    *(updates_of_its_own, averages_and_schedule),
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_goes_on_wherever_it_died(runs: Runs, script: Script) -> None:
    """Killed between any two lines, often twice, on other numbers of devices; then run again."""
    whole = runs.whole(script)
    for dies, devices in zip(range(1, runs.ticks + 1), _devices(), strict=False):
        runs.folder = runs.folder.with_name(f"run{dies}")
        assert runs.start(script, devices[0], dies=dies, every=1 + dies % 2) is None
        if dies % 2:
            assert runs.start(script, devices[1], dies=3) in (None, whole)
        assert runs.start(script, devices[2]) == whole
        if dies % 3 == 0:
            assert runs.start(script, devices[0]) == whole, "all is done"


def _devices() -> Iterator[tuple[int, int, int]]:
    while True:
        yield from ((1, 2, 3), (2, 1, 1), (3, 3, 2))


def score(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"loss": square(model, batch)}


def line_of(function: object, text: str) -> str:
    """Where a line of a function of this file stands."""
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    (number,) = (n for n, each in enumerate(lines, first) if text in each)
    return f"{__file__}:{number}"


def scored(life: Life) -> str:
    trainer = made(life)
    before = trainer.evaluate(score, data(), batch_size=8)
    anchor = [float(p.detach().sum()) for p in trainer.model.parameters()]
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    for _ in trainer.epochs(EPOCHS):
        trainer.evaluate(score, data(), batch_size=8)  # at the top
        trainer.predict(score, data(), batch_size=8)
        for batch in loader:
            trainer.step(batch)
            life.tick()
        trainer.evaluate(score, data(), batch_size=8)
    after = trainer.evaluate(score, data(), batch_size=8)
    return result(trainer, before, anchor, after)


@pytest.mark.parametrize("dies", [2, 4])
def test_scores_of_the_part_that_is_done_are_mentioned_once(
    runs: Runs, caplog: pytest.LogCaptureFixture, dies: int
) -> None:
    """What stands before the loop is what it was, and so is what stands behind the place."""
    whole = runs.whole(scored)
    runs.start(scored, dies=dies)
    caplog.clear()
    assert runs.start(scored, 2) == whole
    (text,) = (r.getMessage() for r in caplog.records if "may not be what it was" in r.getMessage())
    assert text.startswith(f"trainer.evaluate at {line_of(scored, '# at the top')} comes before")
    assert f"after step {dies - 1} from {runs.folder}" in text


def test_a_copy_at_the_beginning_of_an_epoch_is_what_it_was(runs: Runs) -> None:
    """Where the run goes on with the epoch's first step, and the copy is used in all of it."""

    def script(life: Life) -> str:
        model = network()
        copies: list[list[torch.Tensor]] = []

        def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            pairs = zip(model.parameters(), copies[-1], strict=True)
            return square(model, batch) + sum((p - c).square().sum() for p, c in pairs)

        trainer = life.trainer(model, loss, optimizer=adam(model), shards=2)
        loader = trainer.loader(data(), batch_size=8, shuffle=True)
        for _ in trainer.epochs(EPOCHS):
            copies.append([p.detach().clone() for p in model.parameters()])
            for batch in loader:
                trainer.step(batch)
                life.tick()
        return result(trainer)

    whole = runs.whole(script)
    runs.start(script, 2, dies=4)
    assert runs.start(script, 1) == whole


def for_longer(epochs: int, *, counted: bool = False) -> Script:
    def script(life: Life) -> str:
        trainer = made(life)
        loader = trainer.loader(data(), batch_size=8, shuffle=True)
        change(trainer)
        for _ in range(epochs) if counted else trainer.epochs(epochs):
            change(trainer, 1.5)
            for batch in loader:
                trainer.step(batch)
                life.tick()
        return result(trainer)

    return script


def test_a_run_that_has_ended_goes_on_for_longer(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    """The block at the beginning of the next epoch was not done before."""
    whole = runs.whole(for_longer(4))
    assert runs.start(for_longer(2), 2) == runs.whole(for_longer(2))
    assert runs.start(for_longer(4), 3) == whole
    assert "has changed nothing" not in caplog.text


def test_where_that_cannot_be_known_the_line_is_named(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    runs.start(for_longer(2, counted=True), 2)
    runs.start(for_longer(3, counted=True), 1)
    place = line_of(change, "with trainer.changing()")
    assert f"the block of trainer.changing at {place} was taken for one of the run" in caplog.text


@pytest.mark.parametrize("counted", [False, True])
def test_a_script_that_ends_before_the_place_says_so(
    runs: Runs, caplog: pytest.LogCaptureFixture, counted: bool
) -> None:
    runs.start(for_longer(3), 2, dies=8)

    def shorter(life: Life) -> str:
        trainer = made(life)
        saved = trainer.fingerprint()
        for _ in () if counted else trainer.epochs(1):
            raise AssertionError
        assert (trainer.fingerprint() == saved) == counted
        saved = trainer.fingerprint()
        change(trainer)
        assert (trainer.fingerprint() == saved) == (not counted)
        return result(trainer)

    runs.start(shorter, 1)
    assert f"after step 7 from {runs.folder}" in caplog.text
    words = "the values that the script gave it" if counted else "has changed nothing"
    assert words in caplog.text


def test_a_load_of_the_script_takes_precedence(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And is named, as the run then goes on from elsewhere."""
    other = made(Life(1, None))
    other.step(points(8))
    other.save(tmp_path / "other")
    other.close()
    runs.start(zeroed_head, 2, dies=9)

    def script(life: Life) -> str:
        trainer = made(life)
        assert trainer.load(tmp_path / "none", if_any=True) is None
        trainer.load(tmp_path / "other")
        assert trainer.fingerprint() == other.fingerprint()
        for batch in trainer.loader(data(), batch_size=8):
            trainer.step(batch)
            break
        return str(trainer.steps)

    assert runs.start(script, 1) == "2"
    place = line_of(script, 'trainer.load(tmp_path / "other")')
    assert f"trainer.load at {place} takes the place of onefold run --checkpoint" in caplog.text


def test_a_save_in_the_part_that_is_done_holds_the_checkpoint(runs: Runs, tmp_path: Path) -> None:
    def script(life: Life) -> str:
        trainer = made(life)
        loader = trainer.loader(data(), batch_size=8, shuffle=True)
        for epoch in trainer.epochs(EPOCHS):
            change(trainer)
            trainer.save(tmp_path / f"own{life.ticks}-{epoch}")
            for batch in loader:
                trainer.step(batch)
                life.tick()
        return result(trainer)

    whole = runs.whole(script)
    runs.start(script, 2, dies=6)
    kept = json.loads((runs.folder / "step-00000005" / "run.json").read_text())
    assert runs.start(script, 3) == whole
    (made_again,) = (tmp_path / "own0-1").iterdir()
    saved = json.loads((made_again / "run.json").read_text())
    assert (saved["step"], saved["fingerprint"]) == (5, kept["fingerprint"])


@pytest.mark.parametrize("dies", [4, 5])
def test_samples_that_were_chosen_otherwise_are_refused(runs: Runs, dies: int) -> None:
    """By predictions at the beginning of each epoch, which differ where that is half done."""

    def script(life: Life) -> str:
        trainer = made(life)
        for _ in trainer.epochs(EPOCHS):
            said = trainer.predict(score, data(), batch_size=8)["loss"]
            chosen = Subset(data(), said.argsort()[:16].tolist())
            for batch in trainer.loader(chosen, batch_size=8, shuffle=True):
                life.tick()
                trainer.step(batch)
                change(trainer, -1.0)
        return result(trainer)

    whole = runs.whole(script)
    runs.start(script, 2, dies=dies)
    if dies == 4:
        assert runs.start(script, 1) == whole
        return
    with pytest.raises(CheckpointError, match="a subset of samples, as a digest"):
        runs.start(script, 1)


@pytest.mark.parametrize("stop", range(1, 7))
def test_a_run_that_is_stopped_goes_on_behind_its_last_epoch(
    runs: Runs, stop: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where there was no time for the end of the epoch: it is gone through as it was."""

    def script(life: Life) -> str:
        trainer = made(life)
        loader = trainer.loader(data(), batch_size=8, shuffle=True)
        scores = []
        for _ in trainer.epochs(EPOCHS):
            for batch in loader:
                if trainer.steps + 1 == stop:
                    life.ask_to_stop()
                trainer.step(batch)
            scores.append(trainer.evaluate(score, data(), batch_size=8))
            if stop % 3 == 0 and trainer.steps == stop:
                life.tick()
        return result(trainer, scores[-1])

    whole = runs.whole(script)
    caplog.clear()
    assert runs.start(script, 2, dies=1, every=100) is None
    assert runs.start(script, 1, every=100) == whole
    assert "may not be" not in caplog.text


def unfreezing(exactly: bool) -> Script:
    """Frozen at first, and trained from the second epoch on."""

    def script(life: Life) -> str:
        trainer = made(life)
        trainer.model[0].requires_grad_(False)  # type: ignore[index, operator]
        loader = trainer.loader(data(), batch_size=8, shuffle=True)
        for epoch in trainer.epochs(EPOCHS):
            if epoch == 1 if exactly else epoch >= 1:
                trainer.model[0].requires_grad_(True)  # type: ignore[index, operator]
            for batch in loader:
                trainer.step(batch)
                life.tick()
        return result(trainer)

    return script


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("dies", range(2, 9))
def test_a_script_that_trains_other_parameters_is_told(
    runs: Runs, dies: int, exactly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    script = unfreezing(exactly)
    whole = runs.whole(script)
    runs.start(script, 2, dies=dies)
    came = runs.start(script, 1)
    texts = [r.getMessage() for r in caplog.records if "trains other param" in r.getMessage()]
    if exactly and dies > 6:
        (text,) = texts
        assert f"step {dies} trains other parameters" in text
        assert "0.weight, 0.bias (was trained there and frozen here)" in text
    else:
        assert (came, texts) == (whole, [])


def test_checkpoints_of_earlier_versions_go_on(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say neither where they were made, which was in a step, nor what was trained."""
    record = RunState.record

    def without(self: RunState, *given: object) -> dict[str, object]:
        kept = record(self, *given)  # type: ignore[arg-type]
        return {key: value for key, value in kept.items() if key not in ("place", "trained")}

    whole = runs.whole(zeroed_head)
    monkeypatch.setattr(RunState, "record", without)
    for dies in (4, 8, 13):
        runs.folder = runs.folder.with_name(f"run{dies}")
        runs.start(zeroed_head, 2, dies=dies)
        assert runs.start(zeroed_head, 1) == whole
        assert runs.start(zeroed_head, 3) == whole
