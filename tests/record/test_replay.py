"""A resumed script is answered from the record: what it knows is what the whole run knew."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset, Subset, TensorDataset

from tests.checkpoint.inprocess import Life, Runs, Script
from tests.small import points, sgd

LOSS = torch.nn.functional.mse_loss
EPOCHS = 3


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    folder = tmp_path / "run"
    folder.mkdir()
    return Runs(folder, monkeypatch)


def model() -> torch.nn.Module:
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
    for _ in range(6):
        for batch in loader:
            life.tick()
            step = trainer.step(batch)
            kept += [float(step.loss), float(step.values["size"]), step.grad_norm, step.number]
        now = trainer.evaluate(score, data(), batch_size=8)["loss"]
        best, worse = min(best, now), worse + (now > 0.9 * best)
        life.tick()
        kept += [now, trainer.gather({"now": now})[0], trainer.broadcast(best)]
        if worse > 2:
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
    """A schedule that the script steps by a loss, and a value that it keeps itself."""
    net = model()
    optimizer = sgd(net)
    schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)
    trainer = life.trainer(
        net, loss, optimizer=optimizer, schedule=schedule, schedule_every="script", shards=2
    )
    rates = []
    for _ in trainer.epochs(EPOCHS):
        for batch in trainer.loader(data(), batch_size=6):
            life.tick()
            last = trainer.step(batch).loss
        with trainer.modifying(), torch.no_grad():
            net[2].bias.mul_(0.5)
        schedule.step(trainer.state("last", float(last)))
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


SCRIPTS = [
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
    for dies in range(1, runs.ticks + 1):
        again = Runs(runs.folder / str(dies), runs._patch)
        again.folder.mkdir()
        assert again.start(script, dies=dies, every=every) is None
        assert again.start(script, devices=2, every=every) == expected, dies
        assert again.start(script, every=every) == expected  # from its end
