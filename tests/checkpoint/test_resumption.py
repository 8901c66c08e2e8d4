"""What scripts do to the model around the loop acts once, wherever the run was stopped."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import Subset, TensorDataset

import onefold
from onefold.checkpoint.run_state import RunState
from onefold.core.options import RunOptions
from onefold.errors import CheckpointError, LossError, RecordError
from onefold.integrations.loggers import log_steps
from onefold.launcher.environment import current_context
from onefold.record import FILE
from onefold.testing import simulate
from onefold.tools import autosaving
from tests.checkpoint.folders import full_disk, names_in, steps_in
from tests.checkpoint.inprocess import Died, Life, Runs, Script
from tests.inside import engine_in
from tests.small import points, square
from tests.tables import for_each, some

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
    settings = engine_in(trainer).context.update.optimizer.param_groups[0]["lr"]
    return f"{trainer.fingerprint()} {trainer.steps} {settings} {more} {values}"


def change(trainer: onefold.Trainer, by: float = 0.5) -> None:
    with trainer.modifying(), torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(by)


def score(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"loss": square(model, batch)}


def begun(
    life: Life, model: nn.Module | None = None, **choices: Any
) -> tuple[onefold.Trainer, onefold.Loader]:
    model = model or network()
    trainer = life.trainer(model, square, **{"optimizer": adam(model), **choices})
    return trainer, trainer.loader(data(), batch_size=8, shuffle=True)


def through(life: Life, trainer: onefold.Trainer, loader: onefold.Loader) -> None:
    for batch in loader:
        trainer.step(batch)
        life.tick()


def changed_at_each_epoch(life: Life) -> str:
    """Before all, at its top, in the middle of a pass, at its end, and when all is done."""
    trainer, loader = begun(life)
    optimizer = engine_in(trainer).context.update.optimizer
    with trainer.modifying():
        nn.init.zeros_(trainer.model[3].weight)  # type: ignore[index]
    for epoch in trainer.epochs(EPOCHS):
        life.tick()
        change(trainer)
        optimizer.param_groups[0]["lr"] *= 0.9
        life.tick()
        through(life, trainer, loader)
        change(trainer, 2.0 + epoch)
        life.tick()
    change(trainer, 3.0)
    return result(trainer)


def counted_steps(life: Life) -> str:
    trainer, loader = begun(life)
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
    trainer, loader = begun(life)
    for epoch in range(EPOCHS):
        change(trainer, 1.5)
        through(life, trainer, loader)
        trainer.evaluate(score, data(), batch_size=8)
        change(trainer, 0.5 + epoch)
        life.tick()
    return result(trainer)


def updates_of_its_own(life: Life) -> str:
    """The gradient is asked for within the block of changes, or before it."""
    trainer, loader = begun(life)
    for epoch in trainer.epochs(EPOCHS):
        for batch in loader:
            if epoch == 1:
                trainer.gradient(batch)
            with trainer.modifying():
                for parameter in trainer.model.parameters():
                    parameter.data.mul_(0.99)
                if epoch != 1:
                    trainer.gradient(batch)
                    life.tick()
                for parameter in trainer.model.parameters():
                    parameter.data.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
            life.tick()
    return result(trainer)


def scheduled(life: Life, kind: Any, *given: Any, **more: Any) -> tuple[Any, Any, Any]:
    """A trainer, its loader, and a scheduler that the script steps."""
    model = network()
    optimizer = adam(model)
    scheduler = kind(optimizer, *given, **more)
    choices = {"optimizer": optimizer, "scheduler": scheduler, "scheduler_every": "script"}
    return *begun(life, model, **choices), scheduler


def averages_and_scheduler(life: Life) -> str:
    """From the second epoch on: averages, a scheduler, and a layer that was frozen before."""
    trainer, loader, scheduler = scheduled(life, ExponentialLR, 0.7)
    trainer.model[0].requires_grad_(False)
    for epoch in trainer.epochs(EPOCHS):
        trainer.model[0].requires_grad_(epoch > 0)
        if epoch == 1:
            trainer.average(decay=0.9)
        if epoch > 0:
            scheduler.step()
        through(life, trainer, loader)
    with trainer.averaged():
        averaged = trainer.fingerprint()
    return result(trainer, averaged)


def plateau_and_batches_used_twice(life: Life) -> str:
    """A scheduler that follows a score, or each batch; some batches are used for two steps."""
    trainer, loader, scheduler = scheduled(life, ReduceLROnPlateau, patience=0, threshold=0.9)
    for epoch in trainer.epochs(EPOCHS):
        for batch in loader:
            for _ in range(1 + epoch % 2):
                trainer.step(batch)
                life.tick()
            if epoch == 2:
                scheduler.step(1.0)
                life.tick()
        scheduler.step(trainer.evaluate(score, data(), batch_size=8)["loss"])
        life.tick()
    return result(trainer)


def side_by_side(life: Life) -> str:
    """No checkpoint is made between the two steps of a pair of batches."""
    trainer, loader = begun(life)
    other = trainer.loader(TensorDataset(*points(40)), batch_size=8, shuffle=True)
    for _ in trainer.epochs(EPOCHS):
        for batch, beside in zip(loader, other, strict=False):
            trainer.step(batch)
            life.tick()
            trainer.step(beside)
            life.tick()
    return result(trainer)


SCRIPTS = (
    *(changed_at_each_epoch, counted_steps, plain_range, updates_of_its_own),
    *(averages_and_scheduler, plateau_and_batches_used_twice, side_by_side),
)


def test_scores_done_before_are_mentioned(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    """Where no record has them."""
    whole = runs.whole(plain_range)
    runs.start(plain_range, dies=6)
    (runs.folder / FILE).unlink()
    caplog.clear()
    assert runs.start(plain_range, 2) == whole
    (text,) = (
        message
        for message in caplog.messages
        if "its result may differ from the original one" in message
    )
    assert text.startswith(f"trainer.evaluate at {__file__}:")
    assert f"after step 4 from {runs.folder}" in text


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_goes_on_wherever_it_died(runs: Runs, script: Script) -> None:
    """Killed between any two lines, often twice, on other numbers of devices; then run again."""
    whole = runs.whole(script)
    for number, dies in enumerate(some(range(1, runs.ticks + 1), 5)):
        devices = ((1, 2, 3), (2, 1, 1), (3, 3, 2))[number % 3]
        runs.folder = runs.folder.with_name(f"run{dies}")
        assert runs.start(script, devices[0], dies=dies, every=1 + dies % 2) is None
        if number % 2:
            assert runs.start(script, devices[1], dies=3) in (None, whole)
        assert runs.start(script, devices[2]) == whole
        if number % 3 == 0:
            assert runs.start(script, devices[0]) == whole, "all is done"


def for_longer(epochs: int, *, counted: bool = False) -> Script:
    def script(life: Life) -> str:
        trainer, loader = begun(life)
        change(trainer)
        for _ in range(epochs) if counted else trainer.epochs(epochs):
            change(trainer, 1.5)
            through(life, trainer, loader)
        return result(trainer)

    return script


def test_a_run_that_ended_goes_on_for_longer(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    """The block at the beginning of the next epoch was not done before."""
    whole = runs.whole(for_longer(4))
    assert runs.start(for_longer(2), 2) == runs.whole(for_longer(2))
    assert runs.start(for_longer(4), 3) == whole
    assert "had no effect" not in caplog.text


def test_a_run_goes_on_for_longer_again_and_again(runs: Runs) -> None:
    """What its script asked for in the end counts no more, each time."""

    def tested(epochs: int) -> Script:
        def script(life: Life) -> str:
            trainer, loader = begun(life)
            scores = []
            for _ in trainer.epochs(epochs):
                through(life, trainer, loader)
                scores.append(trainer.evaluate(score, data(), batch_size=8))
            scores.append(trainer.evaluate(score, data(), batch_size=4))
            return f"{result(trainer)} {scores}"

        return script

    for epochs, devices in ((2, 1), (3, 2), (4, 1), (5, 3), (5, 2)):
        assert runs.start(tested(epochs), devices) == runs.whole(tested(epochs))


def test_a_run_that_ended_with_a_change_does_not_go_on(runs: Runs) -> None:
    """Its checkpoint has the change, which the longer run does not make there."""

    def changed(epochs: int) -> Script:
        def script(life: Life) -> str:
            trainer, loader = begun(life)
            for _ in trainer.epochs(epochs):
                through(life, trainer, loader)
            trainer.evaluate(score, data(), batch_size=4)
            change(trainer)
            return result(trainer)

        return script

    assert runs.start(changed(2), 1) == runs.start(changed(2), 2) == runs.whole(changed(2))
    with pytest.raises(RecordError, match=r"in trainer\.modifying \(.*test_resumption"):
        runs.start(changed(3), 1)


@pytest.mark.parametrize("counted", [False, True])
def test_an_earlier_end_says_so(
    runs: Runs, caplog: pytest.LogCaptureFixture, counted: bool
) -> None:
    runs.start(for_longer(3), 2, dies=8)
    (runs.folder / FILE).unlink()

    def shorter(life: Life) -> str:
        trainer, _ = begun(life)
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
    words = "the values that the script gave it" if counted else "had no effect"
    assert words in caplog.text


def test_samples_that_were_chosen_otherwise_are_refused(runs: Runs) -> None:
    """By predictions at the beginning of each epoch, which differ where that is half done."""

    def script(life: Life) -> str:
        trainer, _ = begun(life)
        for _ in trainer.epochs(EPOCHS):
            said = trainer.predict(score, data(), batch_size=8)["loss"]
            chosen = Subset(data(), said.argsort()[:16].tolist())
            for batch in trainer.loader(chosen, batch_size=8, shuffle=True):
                trainer.step(batch)
                life.tick()
                change(trainer, -1.0)
        return result(trainer)

    whole = runs.whole(script)
    runs.start(script, 2, dies=4)
    record = (runs.folder / FILE).read_bytes()
    (runs.folder / FILE).unlink()
    with pytest.raises(CheckpointError, match="a subset of samples, as a digest"):
        runs.start(script, 1)
    (runs.folder / FILE).write_bytes(record)
    assert runs.start(script, 1) == whole


@pytest.mark.parametrize("stop", [1, 3, 5, 6])
def test_a_stopped_run_goes_on(runs: Runs, stop: int, caplog: pytest.LogCaptureFixture) -> None:
    """Also where there was no time for the end of the epoch: it is gone through as it was."""

    def script(life: Life) -> str:
        trainer, loader = begun(life)
        scores = []
        for _ in trainer.epochs(EPOCHS):
            for batch in loader:
                if trainer.steps + 1 == stop and not trainer.replaying:
                    life.ask_to_stop()
                trainer.step(batch)
                if trainer.asked_to_stop:  # as it stands there for launchers that save nothing
                    trainer.save(runs.folder)
                    raise Died
            scores.append(trainer.evaluate(score, data(), batch_size=8))
            if stop % 3 == 0 and trainer.steps == stop:
                life.tick()
        return result(trainer, scores[-1])

    whole = runs.whole(script)
    caplog.clear()
    assert runs.start(script, 2, dies=1, every=100) is None
    assert runs.start(script, 1, every=100) == whole
    assert "may differ from the original" not in caplog.text


def test_checkpoints_that_say_no_place_go_on(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    record: Any = RunState.record

    def without(*given: object) -> dict[str, object]:
        return {**record(*given), "place": None}

    whole = runs.whole(for_longer(3))
    monkeypatch.setattr(RunState, "record", without)
    for dies in (3, 5, 8):
        runs.folder = runs.folder.with_name(f"run{dies}")
        runs.start(for_longer(3), 2, dies=dies)
        assert [runs.start(for_longer(3), devices) for devices in (1, 3)] == [whole] * 2


@for_each(
    ("script", "every", "keep_last", "steps"),
    [
        (for_longer(3), 2, 4, [4, 6, 8, 9]),
        (for_longer(3), 9, 9, [9]),
        # Steps 4 and 5, 6 and 7, 8 and 9 are those of one batch each.
        (plateau_and_batches_used_twice, 4, 20, [5, 9, 12]),
        (plateau_and_batches_used_twice, 5, 20, [5, 10, 12]),
    ],
)
def test_checkpoints_come_every_so_many_steps_and_at_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: Script,
    every: int,
    keep_last: int,
    steps: list[int],
) -> None:
    assert Runs(tmp_path, monkeypatch).start(script, 2, every=every, keep_last=keep_last)
    assert steps_in(tmp_path) == steps


@pytest.mark.parametrize("closes", [False, True])
def test_the_end_of_a_run_that_survived_an_error_is_saved(runs: Runs, closes: bool) -> None:
    def script(life: Life) -> str:
        factors = {0: 1.0 if closes else float("nan")}
        trainer = life.trainer(network(), lambda m, b: square(m, b) * factors.get(0, 1.0))
        for batch in trainer.loader(data(), batch_size=8):
            with suppress(LossError):
                trainer.step(batch)
            factors.clear()
            if closes:
                trainer.close()
                break
        return "well"

    assert runs.start(script, 1, every=1000) == "well"
    assert steps_in(runs.folder) == [1 if closes else 2]


@for_each("every_s", [0.0, 3.0])
def test_by_time_all_save_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_s: float
) -> None:
    """The lead's clock decides; its step takes a second, and one of the others much longer."""
    now = [50.0, 0.0]
    clock = SimpleNamespace(monotonic=lambda: now[current_context().rank])
    monkeypatch.setattr(autosaving, "time", clock)

    def script() -> str:
        trainer = onefold.Trainer(model := network(), adam(model), square, shards=2, threads=1)
        loader = trainer.loader(data(), batch_size=4)
        for _ in trainer.epochs(2):
            for batch in loader:
                trainer.step(batch)
                now[current_context().rank] += (1.0, 100.0)[current_context().rank]
        return trainer.fingerprint()

    every = RunOptions(save_every=0 if every_s else 1000, save_every_s=every_s, keep_last=100)
    whole = simulate(script, 2)
    assert simulate(script, 2, options=replace(every, checkpoint=str(tmp_path))) == whole
    assert steps_in(tmp_path) == ([4, 8, 12] if every_s else [12])


def a_scheduler_of_the_scripts(life: Life) -> None:
    optimizer = adam(model := network())
    ExponentialLR(optimizer, 0.5)
    through(life, *begun(life, model, optimizer=optimizer))


def without_an_optimizer(life: Life) -> None:
    life.made = onefold.Trainer(network(), None, square, shards=4, threads=1, devices=["cpu"])
    life.made.gradient(next(iter(life.made.loader(data(), batch_size=8))))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            lambda life: begun(life)[0].gradient(points(8)),
            "cannot resume batches that the script makes itself",
        ),
        (lambda life: (begun(life), begun(life)), "onefold run --checkpoint supports one Trainer"),
        (a_scheduler_of_the_scripts, "cannot save the optimizer's learning rate scheduler"),
        (
            without_an_optimizer,
            "so the state of the script's own optimizer would be lost. Call trainer.save",
        ),
    ],
)
def test_what_could_not_go_on_is_refused(runs: Runs, script: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        runs.start(script)


def seeded(life: Life) -> str:
    return result(begun(life, seed=7)[0])


def test_a_directory_of_nothing_that_fits_is_refused(runs: Runs, tmp_path: Path) -> None:
    assert runs.start(for_longer(1), 2)
    directory = runs.folder
    runs.folder = directory / "step-00000003"
    words = "step-00000003 is the folder of one checkpoint. Pass the directory that"
    with pytest.raises(ValueError, match=words):
        runs.start(for_longer(1))
    runs.folder = directory
    with pytest.raises(CheckpointError, match="seed 0, but this run has 7"):
        runs.start(seeded)
    assert runs.start(seeded, allow_changed=("shards", "seed"))
    for path in directory.glob("*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*model\.safetensors has"):
        runs.start(for_longer(1))
    file = tmp_path / "file"
    file.write_text("mine")
    for place in (Path("/proc/tty"), file, file / "deeper"):
        runs.folder = place
        with pytest.raises(OSError, match="cannot write checkpoints to"):
            runs.start(for_longer(1))
    runs.folder = tmp_path / "full"
    with (
        pytest.raises(OSError, match=r"cannot write checkpoints to .*: File too large"),
        full_disk(1024),
    ):
        runs.start(for_longer(1))
    assert file.read_text() == "mine"
    assert names_in(tmp_path / "full") == set()


def set_at_the_boundary(epochs: int, where: str, *, counted: bool) -> Script:
    """Settings and a buffer that the script sets in its third epoch: at the top or at a step."""

    def script(life: Life) -> str:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer, loader = begun(life, model, optimizer=optimizer)
        (group,) = optimizer.param_groups

        def set_all() -> None:
            group["lr"], group["betas"] = group["lr"] * 0.1, (0.5, 0.9)
            group["weight_decay"] += 0.5
            model[1].reset_running_stats()  # type: ignore[operator]

        for epoch in range(epochs) if counted else trainer.epochs(epochs):
            if epoch == 2 and where == "top":
                set_all()
            for number, batch in enumerate(loader):
                if epoch == 2 and where == "step" and number == 0:
                    set_all()
                trainer.step(batch)
        return f"{result(trainer)} {group['betas']} {group['weight_decay']}"

    return script


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("where", ["top", "step"])
def test_what_is_set_where_a_run_had_ended_acts(runs: Runs, where: str, counted: bool) -> None:
    """As in the run that never ended; also when the longer run is resumed in its turn."""
    short, long = (set_at_the_boundary(n, where, counted=counted) for n in (2, 4))
    assert runs.start(short, 2) == runs.whole(short)
    assert runs.start(short) == runs.whole(short)
    assert runs.start(long, 3) == runs.whole(long)
    assert runs.start(long) == runs.whole(long)


def test_without_a_record_settings_at_the_boundary_are_reported(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    runs.start(set_at_the_boundary(2, "step", counted=True))
    (runs.folder / FILE).unlink()
    assert runs.start(set_at_the_boundary(4, "step", counted=True)) is not None
    assert "have no effect: this run resumes a finished one" in caplog.text


def taken_whole(life: Life) -> str:
    """All batches by `whole`, beside tensors of the script's own."""
    trainer = life.trainer(network(), square)
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    for _ in trainer.epochs(EPOCHS):
        for batch in loader:
            inputs, targets = batch.whole()
            life.tick()
            trainer.step((inputs + 1.0, targets))
            life.tick()
    return result(trainer)


@pytest.mark.parametrize("kept", [True, False])
def test_batches_that_are_taken_whole_count_as_used(
    runs: Runs, kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """So checkpoints come when they are due, and a run without a record goes on behind them."""
    whole = runs.whole(taken_whole)
    for dies in (7, 12, 17):
        again = runs.below(dies)
        assert again.start(taken_whole, 2, dies=dies, every=3) is None
        assert steps_in(again.folder) == [step for step in (3, 6) if step * 2 < dies - 1]
        if not kept:
            (again.folder / FILE).unlink()
        assert again.start(taken_whole, 3) == whole
    assert "between two loops" not in caplog.text


def test_a_checkpoint_that_is_put_off_is_reported(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    def script(life: Life) -> str:
        trainer, loader = begun(life)
        kept = iter(loader)
        next(kept)
        for _ in range(12):
            trainer.step(points(8))
        return result(trainer)

    runs.start(script, every=2)
    assert (
        caplog.text.count("the checkpoint that was due after step 2 is delayed, by up to 100") == 1
    )


def test_batches_of_the_scripts_own_are_resumed_without_a_warning(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint within their loop looked like one between two loops."""

    def script(life: Life) -> str:
        trainer = life.trainer(network(), square)
        torch.manual_seed(1)
        own = torch.utils.data.DataLoader(data(), batch_size=8, shuffle=True)
        for _ in trainer.epochs(EPOCHS):
            for batch in own:
                life.tick()
                trainer.step(tuple(batch))
        return result(trainer)

    whole = runs.whole(script)
    assert runs.start(script, dies=6, every=2) is None
    assert runs.start(script, 2, every=2) == whole
    assert "a run resumed from it starts with" not in caplog.text


class Relative(torch.optim.Optimizer):
    """As transformers' Adafactor with relative steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["n"] = state.get("n", 0) + 1
            parameter.sub_(parameter.grad / state["n"] ** 0.5, alpha=0.1)


def test_an_optimizer_that_has_no_rate_is_recorded_and_resumed(runs: Runs) -> None:
    def script(life: Life) -> str:
        model = network()
        optimizer = Relative(model.parameters())
        trainer, loader = begun(life, model, optimizer=optimizer)
        log_steps(trainer, lambda numbers, step: None, every=1, optimizer=optimizer)
        for _ in trainer.epochs(EPOCHS):
            through(life, trainer, loader)
        return result(trainer)

    whole = runs.whole(script)
    assert runs.start(script, dies=5) is None
    assert runs.start(script, 2) == whole


class Quantized(torch.Tensor):
    """As torchao's states of optimizers: its class says what the bytes mean."""


class Eight(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step()
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].as_subclass(Quantized)


def test_state_in_a_class_of_tensors_is_refused_in_the_first_step(runs: Runs) -> None:
    """Not at the first checkpoint, in the middle of a training."""

    def script(life: Life) -> str:
        model = network()
        optimizer = Eight(model.parameters(), lr=0.1, momentum=0.9)
        through(life, *begun(life, model, optimizer=optimizer))
        raise AssertionError

    words = "Eight keeps its momentum_buffer in a Quantized, a tensor subclass"
    with pytest.raises(TypeError, match=words):
        runs.start(script, every=1000)
    assert steps_in(runs.folder) == []
