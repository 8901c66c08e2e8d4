"""A resumed script is answered from the record: what it knows is what the whole run knew."""

import copy
import errno
import math
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

import onefold
from onefold.errors import CheckpointError, LossError, RecordError, StateError
from onefold.record import FILE
from onefold.record.entries import FrameWriter
from tests.checkpoint.inprocess import Life, Runs, Script
from tests.small import points, sgd
from tests.tables import some

LOSS = torch.nn.functional.mse_loss
EPOCHS = 3


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path / "run", monkeypatch)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))


def loss(net: torch.nn.Module, batch: Any) -> Any:
    errors = LOSS(net(batch[0]), batch[1], reduction="none")
    return errors, {"size": errors.abs()}


def data(samples: int = 24) -> TensorDataset:
    return TensorDataset(*points(samples))


def score(net: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"loss": LOSS(net(batch[0]), batch[1], reduction="none")[:, 0]}


def history(life: Life) -> str:
    """Lists of losses, values and scores, a best score, and an early stop that depends on it."""
    trainer = life.trainer(model(), loss, shards=2)
    loader = trainer.loader(data(), batch_size=6, shuffle=True)
    kept: list[object] = []
    best, worse = float("inf"), 0
    for _ in range(4):
        for batch in loader:
            life.tick()
            step = trainer.step(batch)
            kept += [float(step.loss), float(step.values["size"]), step.grad_norm, step.number]
        now = trainer.evaluate(score, data(), batch_size=8)["loss"]
        best, worse = min(best, now), worse + (now > 0.9 * best)
        life.tick()
        kept += [now, trainer.gather({"now": now})[0], trainer.broadcast(best)]
        if worse > 1:
            break
    return f"{trainer.fingerprint()} {kept}"


def chosen(life: Life) -> str:
    """Samples that a prediction chooses, and layers that thaw in one epoch alone."""
    net = model()
    optimizer = sgd(net)
    trainer = life.trainer(net, loss, optimizer=optimizer, shards=2)
    net[0].requires_grad_(False)
    wanted = list(range(6))
    for epoch in trainer.epochs(EPOCHS):
        for batch in trainer.loader(Subset(data(), wanted), batch_size=4, shuffle=True):
            life.tick()
            trainer.step(batch)
        if epoch == 1:
            net[0].requires_grad_(True)
        said = trainer.predict(lambda m, b: {"out": m(b[0])[:, 0]}, data(), batch_size=8)["out"]
        life.tick()
        wanted = sorted({*wanted, *said.abs().topk(6 + epoch).indices.tolist()})
    return f"{trainer.fingerprint()} {wanted}"


def plateau(life: Life) -> str:
    """A scheduler that the script steps by a loss, and a value that it keeps itself."""
    net = model()
    optimizer = sgd(net)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)
    trainer = life.trainer(
        net, loss, optimizer=optimizer, scheduler=scheduler, scheduler_every="script", shards=2
    )
    rates = []
    for _ in trainer.epochs(EPOCHS):
        for batch in trainer.loader(data(), batch_size=6):
            life.tick()
            last = trainer.step(batch).loss
        with trainer.modifying(), torch.no_grad():
            net[2].get_parameter("bias").mul_(0.5)
        scheduler.step(trainer.state("last", float(last)))
        life.tick()
        rates.append(optimizer.param_groups[0]["lr"])
    return f"{trainer.fingerprint()} {rates}"


def own_batches(life: Life) -> str:
    """Batches that the script makes itself, with random numbers of its own."""
    trainer = life.trainer(model(), loss, shards=2)
    kept = []
    for _ in range(7):
        life.tick()
        inputs = torch.randn(6, 3)
        kept.append(float(trainer.step((inputs, inputs.sum(1, keepdim=True))).loss))
    return f"{trainer.fingerprint()} {kept}"


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Any:
        for number in range(11):
            value = torch.tensor([number / 7.0]) + 0.01 * torch.rand(1)
            yield value.expand(3), value


def several(life: Life) -> str:
    """Two loaders side by side, one of them a stream; batches used twice, and left out."""
    trainer = life.trainer(model(), loss, shards=2)
    stream, loader = trainer.loader(Numbers(), batch_size=4), trainer.loader(data(), batch_size=4)
    for _ in trainer.epochs(EPOCHS):
        for number, (one, other) in enumerate(zip(stream, loader, strict=False)):
            life.tick()
            if number == 1:
                continue
            trainer.step(one)
            trainer.step(other)
            life.tick()
            trainer.step(other)
    return trainer.fingerprint()


def ahead(life: Life) -> str:
    """The next batch is fetched before the step with the one at hand."""
    trainer = life.trainer(model(), loss, shards=2)
    for _ in trainer.epochs(EPOCHS):
        batches = iter(trainer.loader(data(), batch_size=6, shuffle=True))
        batch = next(batches)
        for coming in batches:
            life.tick()
            trainer.step(batch)
            batch = coming
        life.tick()
        trainer.step(batch)
    return trainer.fingerprint()


def saving(life: Life) -> str:
    """Checkpoints of the script's own, and a value from the folder's name."""
    trainer = life.trainer(model(), loss, shards=2)
    names = []
    for epoch in trainer.epochs(EPOCHS):
        for batch in trainer.loader(data(), batch_size=6):
            life.tick()
            trainer.step(batch)
        folder = trainer.save(tempfile.mkdtemp(), scores={"epoch": epoch})
        names.append(folder.name)
        life.tick()
    return f"{trainer.fingerprint()} {names}"


def averaged(life: Life) -> str:
    """Scores of averages, and steps that raise an error."""
    trainer = life.trainer(model(), loss, shards=2)
    trainer.average(decay=0.5)
    kept: list[float] = []
    for _ in trainer.epochs(EPOCHS):
        for number, batch in enumerate(trainer.loader(data(), batch_size=6)):
            life.tick()
            with suppress(LossError):
                inputs = torch.full((6, 3), math.nan)
                kept.append(trainer.step((inputs, inputs[:, :1]) if number == 2 else batch).number)
        with trainer.averaged():
            kept.append(trainer.evaluate(score, data(), batch_size=8)["loss"])
        life.tick()
    with trainer.averaged():
        return f"{trainer.fingerprint()} {kept}"


def statistics(life: Life) -> str:
    """Averages with statistics of their own; a value that was given another kind; weights."""
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), *model())
    trainer = life.trainer(net, loss, shards=2)
    trainer.average(mean=True)
    kept: list[object] = []
    for epoch in trainer.epochs(EPOCHS):
        for batch in trainer.loader(data(), batch_size=6):
            life.tick()
            trainer.step(batch)
        with trainer.averaged(update_bn=data(), batch_size=8):
            kept.append(trainer.evaluate(score, data(), batch_size=8)["loss"])
        state = trainer.state("state", OrderedDict[str, Any](epoch=torch.ones(2, 3).t(), kept=kept))
        state["kept"].append(float(epoch))
        kept.append(f"{type(state).__name__} {state['epoch'].stride()} {len(kept)}")
        life.tick()
    return f"{trainer.fingerprint()} {kept} {float(net.state_dict()['1.weight'].sum())}"


SCRIPTS = [
    (averaged, 1),
    (statistics, 2),
    (history, 1),
    (history, 3),
    (chosen, 1),
    (plateau, 2),
    (own_batches, 2),
    (several, 1),
    (ahead, 1),
    (saving, 2),
]


@pytest.mark.parametrize(("script", "every"), SCRIPTS)
def test_a_script_knows_what_it_would_have_known(runs: Runs, script: Script, every: int) -> None:
    expected = runs.whole(script)
    for dies in some(range(1, runs.ticks + 1), 3):
        again = runs.below(dies)
        assert again.start(script, dies=dies, every=every) is None
        assert again.start(script, devices=2, every=every) == expected, dies
        assert again.start(script, every=every) == expected  # from its end


def refused(runs: Runs, before: Script, after: Script, words: str) -> None:
    assert runs.start(before, dies=4) is None
    with pytest.raises((RecordError, StateError), match=words) as caught:
        runs.start(after)
    assert f"{__file__}:" in str(caught.value)


def steps(life: Life, *, between: Any = None) -> str:
    trainer = life.trainer(model(), loss, shards=2)
    for batch in trainer.loader(data(), batch_size=6):
        life.tick()
        step = trainer.step(batch)
        if between is not None:
            between(trainer, step)
    return trainer.fingerprint()


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (
            lambda trainer, _: trainer.model(torch.ones(1, 3)),
            "calls the model itself during replay",
        ),
        (lambda trainer, _: trainer.model[0](torch.ones(1, 3)), "calls the model itself during"),
        (
            lambda trainer, _: trainer.gather(1),
            "reaches trainer.gather, but the recorded run had step 2",
        ),
        (
            lambda trainer, _: trainer.save(tempfile.mkdtemp()),
            "reaches trainer.save, but the recorded run had step 2",
        ),
        (
            lambda trainer, _: change(trainer),
            "reaches a block of trainer.modifying, but the recorded run had step 2",
        ),
    ],
)
def test_a_script_that_asks_for_something_else_is_told_where(
    runs: Runs, between: Any, words: str
) -> None:
    refused(runs, steps, partial(steps, between=between), words)


def test_new_calls_are_made_as_the_error_says(runs: Runs) -> None:
    """Also when the run is resumed once more."""

    def script(life: Life, *, after: float) -> str:
        trainer = life.trainer(model(), loss, shards=2)
        loader = trainer.loader(data(), batch_size=6)
        for _ in trainer.epochs(2):
            for batch in loader:
                life.tick()
                trainer.step(batch)
                if trainer.steps > after:
                    trainer.evaluate(score, data(), batch_size=8)
        return trainer.fingerprint()

    before = partial(script, after=math.inf)
    assert runs.start(before, dies=4) is None
    with pytest.raises(RecordError, match=r"new ones under `if trainer.steps > 2:`") as caught:
        runs.start(partial(script, after=0))
    assert "--allow-changed" not in str(caught.value)
    assert runs.start(partial(script, after=2), dies=7) is None
    assert runs.start(partial(script, after=2), devices=2) == runs.whole(before)


def loaded(life: Life, *, samples: int = 24, first: int = 0, **options: Any) -> str:
    trainer = life.trainer(model(), loss, shards=2)
    inner = Subset(data(samples + 1), range(first, samples + first))
    whole: ConcatDataset[Any] = ConcatDataset([Subset(inner, range(samples))])
    loader = trainer.loader(whole, **{"batch_size": 6, **options})
    for _ in trainer.epochs(2):
        for batch in loader:
            life.tick()
            trainer.step(batch)
    return trainer.fingerprint()


@pytest.mark.parametrize("dies", [4, 6, None])
@pytest.mark.parametrize(
    ("options", "words", "changed"),
    [
        ({"batch_size": 4}, "batch_size 6, but this run has 4", "batch_size"),
        ({"drop_last": True}, "drop_last False, but this run has True", "batch_size"),
        ({"shuffle": True}, "shuffle False, but this run has True", "dataset"),
        ({"samples": 30}, "a data set of length 24, but this run has 30", "dataset"),
        ({"first": 1}, "a subset of samples, as a digest, ", "dataset"),
    ],
)
def test_another_loader_is_refused_by_name_and_taken_on_request(
    runs: Runs, dies: int | None, options: dict[str, Any], words: str, changed: str
) -> None:
    """In the middle of a pass, at its end, and where the run has ended."""
    assert (runs.start(loaded, dies=dies) is None) == (dies is not None)
    other = partial(loaded, **options)
    with pytest.raises(CheckpointError, match=rf"saved with {words}.*onefold run --allow-changed"):
        runs.start(other)
    assert runs.start(other, allow_changed=(changed,)) is not None


def best(file: Path, life: Life, *, in_memory: bool = False) -> str:
    """The best weights of all epochs, in a file or in memory, and their score at the end."""
    net = model()
    trainer = life.trainer(net, loss, shards=2)
    least, kept = math.inf, net.state_dict()
    for _ in trainer.epochs(EPOCHS):
        for batch in trainer.loader(data(), batch_size=6):
            life.tick()
            trainer.step(batch)
        with trainer.modifying(), torch.no_grad():  # worse with every epoch
            net[2].get_parameter("bias").add_(2.0**trainer.steps)
        now = trainer.evaluate(score, data(), batch_size=8)["loss"]
        if now < least:
            least, kept = now, copy.deepcopy(net.state_dict())
            torch.save(kept, file)
    with trainer.modifying():
        net.load_state_dict(kept if in_memory else torch.load(file))
    last = trainer.evaluate(score, data(), batch_size=8)["loss"]
    torch.save(net.state_dict(), file.with_name("last.pt"))
    torch.save(net, file.with_name("whole.pt"))
    return f"{least} {last} {trainer.fingerprint()}"


@pytest.mark.parametrize("dies", [8, 10, None])
def test_a_file_of_the_best_weights_is_left_as_it_is(
    runs: Runs, tmp_path: Path, dies: int | None
) -> None:
    file = tmp_path / "best.pt"
    whole = runs.whole(partial(best, file))
    weights, before = file.read_bytes(), (torch.save, torch.Tensor.clone)
    runs.start(partial(best, file), dies=dies)
    (tmp_path / "last.pt").unlink(missing_ok=True)
    assert runs.start(partial(best, file)) == whole
    assert (file.read_bytes(), torch.save, torch.Tensor.clone) == (weights, *before)
    assert (tmp_path / "last.pt").exists()


@pytest.mark.parametrize("dies", [8, 10, None])
def test_the_best_weights_are_kept_in_memory(runs: Runs, tmp_path: Path, dies: int | None) -> None:
    script = partial(best, tmp_path / "best.pt", in_memory=True)
    whole = runs.whole(script)
    runs.start(script, dies=dies)
    assert runs.start(script, 2) == whole


class Drawn:
    """A sampler whose order another start of the script does not give."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return iter([(self.start + 5 * number) % 24 for number in range(24)])


def test_another_order_is_refused_in_the_middle_of_a_pass(runs: Runs) -> None:
    assert runs.start(partial(loaded, sampler=Drawn(0)), dies=7) is None
    with pytest.raises(CheckpointError, match="the sampler's order in pass 1 differs"):
        runs.start(partial(loaded, sampler=Drawn(1)))
    assert runs.start(partial(loaded, sampler=Drawn(0))) is not None


def test_another_average_is_refused(runs: Runs) -> None:
    def kept(decay: float, life: Life) -> str:
        trainer = life.trainer(model(), loss, shards=2)
        trainer.average(decay=decay)
        for batch in trainer.loader(data(), batch_size=6):
            life.tick()
            trainer.step(batch)
        return trainer.fingerprint()

    assert runs.start(partial(kept, 0.9), dies=3) is None
    words = r"called, but the loaded checkpoint contains an average of decay=0.9, .*which continues"
    with pytest.raises(ValueError, match=words):
        runs.start(partial(kept, 0.5))
    assert runs.start(partial(kept, 0.5), allow_changed=("average",)) is not None


def test_another_batch_is_refused(runs: Runs) -> None:
    """One that the script makes itself."""

    def own(samples: int, life: Life) -> str:
        trainer = life.trainer(model(), loss, shards=2)
        for start in range(0, 24, samples):
            life.tick()
            trainer.step(tuple(part[start : start + samples] for part in data().tensors))
        return trainer.fingerprint()

    refused(
        runs,
        partial(own, 6),
        partial(own, 4),
        "has 4 samples, but the recorded step has 6: .*--allow-changed",
    )


def test_a_rate_is_changed_as_the_warning_says(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    def at(rate: float, life: Life) -> str:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        trainer = life.trainer(net, loss, optimizer=optimizer, shards=2)
        rates = []
        for batch in trainer.loader(data(), batch_size=6):
            life.tick()
            if not trainer.replaying and rate == 0.1:
                optimizer.param_groups[0]["lr"] = rate
            trainer.step(batch)
            rates.append(optimizer.param_groups[0]["lr"])
        return str(rates[-1])

    for rate, dies in ((0.01, 3), (0.02, 4)):
        assert runs.start(partial(at, rate), dies=dies) is None
    said = (
        "lr of the optimizer's group 0 was {} at the start of the run that saved the checkpoint "
        "and is {} in this script"
    )
    assert said.format(0.01, 0.02) in caplog.text
    assert "['lr'] in the loop, under `if not trainer.replaying:`" in caplog.text
    assert runs.start(partial(at, 0.1)) == "0.1"
    assert said.format(0.01, 0.1) in caplog.text  # the rate that the run has had so far


def test_a_longer_run_is_told_that_its_scheduler_is_not(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    def script(life: Life, *, epochs: int) -> str:
        optimizer = sgd(net := model())
        scheduler = CosineAnnealingLR(optimizer, 4 * epochs)
        trainer = life.trainer(net, loss, optimizer=optimizer, scheduler=scheduler, shards=2)
        for _ in trainer.epochs(epochs):
            for batch in trainer.loader(data(), batch_size=6):
                trainer.step(batch)
        return str(scheduler.T_max)

    said = (
        "scheduler.T_max was 4 at the start of the run that saved the checkpoint and is 8 in this "
        "script; the checkpoint's value is used. To change it, set scheduler.T_max in the loop, "
        "under `if not trainer.replaying:`, or restart the scheduler with the script's settings: "
        "onefold run --allow-changed scheduler"
    )
    assert runs.start(partial(script, epochs=1)) == "4"
    assert runs.start(partial(script, epochs=2)) == "4"
    assert caplog.text.count(said) == 1
    assert runs.start(partial(script, epochs=3), allow_changed=("scheduler",)) == "12"
    assert caplog.text.count("scheduler.T_max was") == 1


@pytest.mark.parametrize("every", ["step", "epoch", "script"])
def test_a_longer_run_shows_the_rates_that_it_had(runs: Runs, every: str) -> None:
    """With a scheduler and a rate that both depend on the number of epochs."""

    def script(epochs: int, life: Life) -> str:
        net, rates = model(), ""
        groups: list[Any] = [
            {"params": net[0].parameters()},
            {"params": net[2].parameters(), "lr": 0.1},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.3 / epochs)
        parts: list[Any] = [LinearLR(optimizer, 0.5, 1.0, 2)]
        parts.append(LinearLR(optimizer, 1.0, 0.1, 4 * epochs))
        choices = {"optimizer": optimizer, "scheduler_every": every, "shards": 2}
        scheduler = SequentialLR(optimizer, parts, [2])
        trainer = life.trainer(net, loss, scheduler=scheduler, **choices)
        for _ in trainer.epochs(epochs):
            for batch in trainer.loader(data(), batch_size=6):
                life.tick()
                trainer.step(batch)
                rates += f"{[group['lr'] for group in optimizer.param_groups]} "
            if every == "script":
                scheduler.step()
            rates += f"end {optimizer.param_groups[0]['lr']} {scheduler.get_last_lr()} "
        return rates

    seen = ""
    for epochs, dies in ((2, None), (3, 10), (3, None), (3, None), (5, None)):
        now = runs.start(partial(script, epochs), dies=dies)
        if now is not None:
            assert now.startswith(seen)
            seen = now
    assert seen.startswith(str(runs.below("whole").start(partial(script, 2))))
    assert seen.count("end") == 5


def change(trainer: onefold.Trainer) -> None:
    with trainer.modifying(), torch.no_grad():
        next(trainer.model.parameters()).mul_(0.5)


def with_outputs(net: torch.nn.Module, batch: Any) -> Any:
    errors = LOSS(net(batch[0]), batch[1], reduction="none")
    return errors, {}, {"errors": errors[:, 0]}


def test_one_of_several_models_cannot_be_called_either(runs: Runs) -> None:
    """A layer without values can."""

    def of_both(models: Any, batch: Any) -> torch.Tensor:
        return models["one"](batch[0]).square()[:, 0] + models["two"](batch[0]).square()[:, 0]

    def script(life: Life, *, calls: bool) -> str:
        models = {"one": model(), "two": model()}
        optimizer = sgd(torch.nn.ModuleDict(models))
        trainer = life.trainer(models, of_both, optimizer=optimizer, shards=2)
        for batch in trainer.loader(data(), batch_size=6):
            life.tick()
            (models["two"] if calls else models["two"][1])(torch.ones(1, 3))
            trainer.step(batch)
        return trainer.fingerprint()

    assert runs.start(partial(script, calls=False), dies=4) is None
    assert runs.start(partial(script, calls=False), devices=2) == runs.whole(
        partial(script, calls=False)
    )
    other = runs.below("other")
    calling = partial(script, calls=True)
    refused(other, calling, calling, "calls the model itself during replay")


def test_a_model_can_be_copied_in_the_part_that_is_done(runs: Runs) -> None:
    def script(life: Life, *, calls: bool = False) -> str:
        trainer = life.trainer(model(), loss, shards=2)
        for batch in trainer.loader(data(), batch_size=6):
            life.tick()
            trainer.step(batch)
            best = copy.deepcopy(trainer.model)
            if calls:
                best(torch.ones(1, 3))
        return trainer.fingerprint()

    assert runs.start(script, dies=4) is None
    assert runs.start(script, devices=2) == runs.whole(script)
    other = runs.below("other")
    calling = partial(script, calls=True)
    refused(other, calling, calling, "calls the model itself during replay")


def test_what_no_record_keeps_is_refused_where_it_is_read(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(life: Life, *, reads: bool = True) -> str:
        trainer = life.trainer(model(), with_outputs, shards=2)
        for batch in trainer.loader(data(), batch_size=6):
            life.tick()
            step = trainer.step(batch)
            if reads or not trainer.replaying:
                assert len(step.outputs["errors"]) == 6
        trainer.predict(lambda m, b: {"out": m(b[0])}, data(), batch_size=6)
        life.tick()
        return trainer.fingerprint()

    assert runs.start(script, dies=4) is None
    assert runs.start(script, devices=2) == runs.whole(script)
    monkeypatch.setattr("onefold.record.recorder.LARGEST_ROWS_BYTES", 10)
    runs = runs.below("large")
    refused(runs, script, script, "the outputs of a step, errors, were too large for the record")
    guarded = partial(script, reads=False)
    assert runs.start(guarded, devices=2) == runs.whole(guarded)
    other = runs.below("other")
    monkeypatch.setattr("onefold.record.recorder.LARGEST_BYTES", 10)
    assert other.start(guarded) is not None
    with pytest.raises(RecordError, match=r"the result of trainer\.predict after step 4 was too"):
        other.start(guarded)


def test_what_is_too_large_is_left_out_as_the_error_says(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(life: Life) -> str:
        trainer = life.trainer(model(), loss, shards=2)
        loader = trainer.loader(data(), batch_size=6)
        kept: list[object] = []
        for _ in trainer.epochs(EPOCHS):
            for batch in loader:
                life.tick()
                trainer.step(batch)
            if not trainer.replaying:
                said = trainer.predict(lambda m, b: {"out": m(b[0])}, data(), batch_size=8)["out"]
            kept.append(trainer.state("sum", None if trainer.replaying else float(said.sum())))
            if not trainer.replaying:
                trainer.predict(lambda m, b: {"out": m(b[0])}, data(), batch_size=8)
            life.tick()
        return f"{trainer.fingerprint()} {kept}"

    monkeypatch.setattr("onefold.record.recorder.LARGEST_BYTES", 64)
    expected = runs.whole(script)
    for dies in some(range(1, runs.ticks + 1), 3):
        again = runs.below(dies)
        assert again.start(script, dies=dies) is None
        assert again.start(script, devices=2) == expected, dies
        assert again.start(script) == expected


def test_what_was_printed_is_printed_once(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """By a run that is stopped four times, also as an epoch ends."""
    stops = (2, 5, 8, 11)

    def script(life: Life) -> str:
        trainer = life.trainer(model(), loss, shards=2)
        for epoch in trainer.epochs(EPOCHS):
            for batch in trainer.loader(data(), batch_size=6):
                if trainer.steps + 1 in stops and not trainer.replaying:
                    life.ask_to_stop()
                print(f"step {trainer.step(batch).number}")
            print(f"epoch {epoch}: {trainer.evaluate(score, data(), batch_size=8)['loss']}")
        print(f"end {trainer.fingerprint()}")
        return "well"

    runs.whole(script)
    whole = capsys.readouterr().out
    assert [bool(runs.start(script, devices)) for devices in (1, 2, 1, 2, 2)] == [False] * 4 + [
        True
    ]
    assert capsys.readouterr().out == whole
    assert runs.start(script)
    assert capsys.readouterr().out.startswith("end ")


def test_an_error_that_the_script_prints_is_shown(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runs.start(steps, dies=4) is None

    def script(life: Life) -> str:
        print("hidden" if life.made else "before")
        try:
            return steps(life, between=lambda trainer, _: trainer.gather(1))
        except RecordError as error:
            print(f"It failed: {error}")
            raise

    with pytest.raises(RecordError):
        runs.start(script)
    assert "It failed: " in capsys.readouterr().out


def test_gradients_and_a_missing_record_are_gone_on_with_as_before(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    def script(life: Life, *, gradient: bool) -> str:
        trainer = life.trainer(model(), loss, shards=2)
        seen = []
        for _ in trainer.epochs(EPOCHS):
            for batch in trainer.loader(data(), batch_size=6):
                life.tick()
                if gradient:
                    trainer.gradient(batch)
                    change(trainer)
                else:
                    seen.append(trainer.step(batch).number)
        return f"{trainer.fingerprint()} {len(seen)}"

    by_hand = partial(script, gradient=True)
    assert runs.start(by_hand, dies=8) is None
    assert runs.start(by_hand, devices=2) == runs.whole(by_hand)
    other = runs.below("other")
    plain = partial(script, gradient=False)
    assert other.start(plain, dies=8) is None
    (other.folder / FILE).unlink()
    fingerprint, _ = runs.whole(plain).split()
    assert other.start(plain, dies=2) is None  # from step 6, with a record from there on
    assert other.start(plain) == f"{fingerprint} 6"


def test_a_full_disk_ends_no_run(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrameWriter, "append", full)
        assert runs.start(steps, dies=3) is None
    assert "recording stopped: No space left on device" in caplog.text
    assert runs.start(steps, devices=2) == runs.whole(steps)


def full(writer: object, body: bytes) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
