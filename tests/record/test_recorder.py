"""What is written down of a run: the same for any number of devices, through kills."""

import itertools
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch.utils.data import TensorDataset

import onefold
from onefold.cli.records import first_difference, show_record
from onefold.core.options import RunOptions
from onefold.errors import RecordError
from onefold.record import FILE, Record
from onefold.record.entries import BlockEntry, Result, StartEntry, StepEntry, read_frames
from onefold.testing import simulate
from tests.checkpoint.inprocess import Life, Runs
from tests.small import points, sgd
from tests.tables import some

SHARDS, EPOCHS = 4, 2
LOSS = torch.nn.functional.mse_loss


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 60), torch.nn.Tanh(), torch.nn.Linear(60, 1))


def loss(net: torch.nn.Module, batch: Any) -> Any:
    errors = LOSS(net(batch[0]), batch[1], reduction="none")
    return errors, {"size": errors.abs()}


def work(trainer: onefold.Trainer, tick: Any = lambda: None) -> str:
    data = TensorDataset(*points(18))
    loader = trainer.loader(data, batch_size=6, shuffle=True)
    for _ in trainer.epochs(EPOCHS):
        for batch in loader:
            tick()
            trainer.step(batch)
        tick()
        with trainer.modifying(), torch.no_grad():
            next(trainer.model.parameters()).mul_(0.9)
        trainer.evaluate(lambda net, batch: {"mean": net(batch[0])}, data, batch_size=9)
        trainer.predict(lambda net, batch: {"out": net(batch[0])}, data, batch_size=9)
        tick()
    return trainer.fingerprint()


def script(life: Life) -> str:
    return work(life.trainer(model(), loss, shards=SHARDS), life.tick)


def new_trainer(**settings: Any) -> onefold.Trainer:
    net = model()
    return onefold.Trainer(net, sgd(net), loss, shards=SHARDS, **settings)


def record_of(main: Any, folder: Path, devices: int = 2, placement: str = "replicate") -> Record:
    """The record of a script on so many devices."""
    folder.mkdir(exist_ok=True)
    simulate(main, devices, options=RunOptions(placement=placement, record=str(folder)))
    return Record(folder)


def recorded(folder: Path, devices: int = 1, placement: str = "replicate") -> Record:
    return record_of(lambda: work(new_trainer()), folder, devices, placement)


def numbers(record: Record) -> list[Any]:
    return [entry for entry in record.entries if not isinstance(entry, StartEntry)]


def test_it_has_every_step_shard_and_result(tmp_path: Path) -> None:
    record = recorded(tmp_path / "one")
    steps, shards = record.steps, record.shards
    assert steps["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert steps["epoch"].tolist() == [0, 0, 0, 1, 1, 1]
    assert steps["rate.0"].tolist() == [0.1] * 6
    assert np.isfinite(steps["value.size"]).all()
    assert (steps["norm"] > 0).all()
    assert shards["shard"].tolist() == list(range(SHARDS)) * 6
    assert shards["weight"].reshape(6, SHARDS).sum(1).tolist() == [6.0] * 6
    assert (shards["digest"] != 0).all()
    assert len(set(shards["digest"])) == 6 * SHARDS
    totals = shards["total"].reshape(6, SHARDS)
    assert np.allclose(totals.sum(1) / 6, steps["loss"], rtol=1e-12)
    assert record.step(3).place == [(0, 0, 18, 6)]
    calls = [each["call"] for each in record.results]
    assert calls == [*["trainer.evaluate", "trainer.predict"] * EPOCHS, "trainer.fingerprint"]
    results: Any = record.results
    assert results[1]["value"]["out"].shape == (18, 1)
    assert results[0]["line"].startswith(__file__)
    assert record.blocks["step"].tolist() == [3, 6]
    begun: Any
    (begun,) = record.begins
    assert begun["description"]["shards"] == str(SHARDS)
    with pytest.raises(RecordError, match="has steps 1 to 6, but not the requested step 7"):
        record.step(7)


def test_json_has_what_calls_have_returned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = recorded(tmp_path / "one")
    show_record(record.path, as_json=True, step=None)
    lines = list(map(json.loads, capsys.readouterr().out.splitlines()))
    evaluated, predicted, *_, fingerprint = [e for e in lines if e["kind"] == "result"]
    assert evaluated["value"] == record.results[0]["value"]
    assert predicted["value"] == {"out": {"dtype": "torch.float32", "shape": [18, 1]}}
    assert fingerprint["value"] == record.results[-1]["value"]
    show_record(record.path, as_json=True, step=2)
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["loss"], line["time"]) == tuple(record.steps[n][1] for n in ("loss", "time"))


@pytest.mark.parametrize("placement", ["replicate", "partition", "pipeline"])
def test_the_same_is_written_for_any_number_of_devices(tmp_path: Path, placement: str) -> None:
    one = numbers(recorded(tmp_path / "one"))
    devices = [2] if placement == "pipeline" else [2, 3]
    for number in devices:
        assert numbers(recorded(tmp_path / str(number), number, placement)) == one


def test_a_run_that_dies_anywhere_leaves_the_record_of_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Runs(tmp_path / "whole", monkeypatch)
    fingerprint, ticks = whole.start(script), 10
    expected = [e for e in Record(whole.folder).entries if isinstance(e, StepEntry)]
    for dies in some(range(1, ticks + 1), 4):
        runs = whole.below(dies)
        assert runs.start(script, dies=dies) is None
        assert runs.start(script, devices=2) == fingerprint
        record = Record(runs.folder)
        assert [e for e in record.entries if isinstance(e, StepEntry)] == expected
        assert len(record.begins) <= 2
        assert (runs.folder / FILE).stat().st_size < 40_000


def test_a_record_that_was_cut_anywhere_is_read_up_to_there_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = Runs(tmp_path / "run", monkeypatch)
    fingerprint = runs.whole(script)
    assert runs.start(script, dies=7, every=2) is None
    data = (runs.folder / FILE).read_bytes()
    entries = Record(runs.folder).entries
    (saved,) = runs.folder.glob("step-*/run.json")
    kept = json.loads(saved.read_text())["recorded"]["entries"]
    for number, length in enumerate(range(0, len(data), len(data) // 9)):
        cut = Runs(tmp_path / str(number), monkeypatch)
        shutil.copytree(runs.folder, cut.folder, dirs_exist_ok=True)
        (cut.folder / FILE).write_bytes(data[:length])
        caplog.clear()
        read = Record(cut.folder).entries
        assert read == entries[: len(read)]
        tail = read_frames(cut.folder / FILE)[1]  # none where a frame happens to end there
        assert ("bytes, which are not a complete frame" in caplog.text) == (tail > 0)
        if len(read) < kept:
            with pytest.raises(RecordError, match=f"got a record of {len(read)} entries"):
                cut.start(script, every=2)
            (cut.folder / FILE).unlink()
        assert cut.start(script, devices=1 + number % 2, every=2) == fingerprint
        assert ("does not exist, although" in caplog.text) == (len(read) < kept)


def test_what_comes_after_a_place_that_a_script_goes_back_to_does_not_count(
    tmp_path: Path,
) -> None:
    losses = []

    def main() -> None:
        trainer = new_trainer()
        inputs, targets = points(8)
        trainer.step((inputs, targets))
        folder = trainer.save(tmp_path / "saved")
        trainer.step((inputs, targets))
        trainer.step((inputs, targets))
        trainer.load(folder)
        losses.append(float(trainer.step((inputs * 2, targets)).loss))

    record = record_of(main, tmp_path)
    assert record.steps["step"].tolist() == [1, 2]
    assert record.steps["loss"][1] == losses[0]
    assert [begun["step"] for begun in record.begins] == [0, 1]
    assert record.checkpoints["folder"].tolist() == ["step-00000001"]


def test_a_script_may_go_back_to_its_best_and_forward_again_to_its_end(tmp_path: Path) -> None:
    """As to evaluate the best model, before it goes on from the last."""

    def main() -> list[float]:
        trainer = new_trainer()
        folders, losses = [], []
        for _ in range(3):
            losses.append(float(trainer.step(points(8)).loss))
            folders.append(trainer.save(tmp_path / "saved", keep=3))
        trainer.load(folders[0])
        for _ in range(5):
            trainer.gather(0)
        trainer.load(folders[2])
        return [*losses, float(trainer.step(points(8)).loss)]

    for _ in range(2):  # as a run anew in the same folder, which begins with nothing
        losses = simulate(main, 2, options=RunOptions(record=str(tmp_path)))[0]
        record = Record(tmp_path)
        assert record.steps["loss"].tolist() == losses
        assert record.results == []
        assert [begun["step"] for begun in record.begins] == [0, 3]
        assert len(record.checkpoints["step"]) == 3


def test_what_devices_tell_of_themselves_is_no_difference(tmp_path: Path) -> None:
    def main() -> None:
        trainer = new_trainer()
        trainer.step(points(8))
        trainer.gather({"seconds": time.time()})
        trainer.broadcast("the same")

    one, two = (record_of(main, tmp_path / str(number), number) for number in (1, 2))
    assert one.results[0] != two.results[0]
    assert first_difference(one, two) is None


def test_steps_have_their_times_by_which_they_do_not_differ(tmp_path: Path) -> None:
    before = time.time()
    one, two = (recorded(tmp_path / name) for name in ("one", "two"))
    times = [before, *one.steps["time"], *two.steps["time"], time.time()]
    assert times == sorted(times)
    first, second = one.step(2), two.step(2)
    assert first == second
    assert first.time != second.time
    assert first != structs.replace(first, loss=0.0)
    assert first != 3


def test_a_step_that_is_skipped_and_one_without_weight(tmp_path: Path) -> None:
    def main() -> None:
        trainer = new_trainer(on_nonfinite="skip")
        inputs, targets = points(8)
        trainer.step((inputs, targets * math.inf))
        trainer.step((inputs, targets))

    steps = record_of(main, tmp_path).steps
    assert "loss" in steps["skipped"][0]
    assert steps["skipped"][1] == ""
    assert math.isinf(steps["loss"][0])
    assert math.isnan(steps["norm"][0])


def test_entries_are_in_the_order_of_the_script_and_large_results_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onefold.record.recorder.LARGEST_BYTES", 60)
    record = recorded(tmp_path / "one")
    kinds = itertools.groupby(type(entry) for entry in numbers(record))
    assert [kind for kind, _ in kinds] == [StepEntry, BlockEntry, Result] * EPOCHS
    assert [each["kept"] for each in record.results] == [*[True, False] * EPOCHS, True]
    assert record.results[1]["value"] is None
    assert record.results[1]["digest"]
