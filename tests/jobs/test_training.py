"""What a training leaves in its folder, and how it goes on."""

import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

import onefold
from onefold.cli.verify import verify_script
from onefold.core.options import RunOptions
from onefold.errors import CheckpointError, DataError, LaunchError
from onefold.testing import simulate
from onefold.watch.timing import PhaseTime
from onefold_jobs.catalog import JOBS
from onefold_jobs.finetune import best_checkpoint
from onefold_jobs.progress import TimeLimit
from onefold_jobs.reading import Workers
from onefold_jobs.report import build_report
from onefold_jobs.report.folder import read_reported
from onefold_jobs.run import read_options, run_job
from onefold_jobs.training import Task, begin_training, read_saved
from tests.capabilities import needs_text
from tests.jobs import tiny
from tests.jobs.tiny import SMALL, WRITERS, job_of, run_here, write_pictures, write_texts
from tests.small import bits
from tests.tables import for_each, some

needs_text()


BAD: dict[str, Callable[[Path], object]] = {
    "classify": lambda data: (data / "train" / "pear" / "3.png").write_bytes(b"no image"),
    "segment": lambda data: (data / "train" / "masks" / "2.png").unlink(),
    "text": lambda data: (data / "dev.tsv").write_text(f"no tab\n{(data / 'dev.tsv').read_text()}"),
}
"""Ways to make one sample of a data set useless."""

all_jobs = pytest.mark.parametrize("job", [job.name for job in JOBS])


def examples_of(folder: Path) -> Any:
    return json.loads((folder / "examples.json").read_text())


@all_jobs
def test_a_run_leaves_everything_in_its_folder_without_bad_data(job: str, tmp_path: Path) -> None:
    data = WRITERS[job](tmp_path / "data")
    BAD[job](data)
    with pytest.raises(DataError, match=r"train/pear/3\.png|2\.png|dev\.tsv, line 1"):
        run_here(job, data, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    folder, said = run_here(job, data, tmp_path / "runs", epochs=2, skip_bad=True)
    assert folder == tmp_path / "runs" / f"{job}-1"
    assert len(said["left_out"]) == 1
    kept = json.loads((folder / "run.json").read_text())
    assert said["fingerprint"] == kept["fingerprint"]
    assert len(said["fingerprint"]) == 16
    run = read_reported(folder)
    assert [line.epoch for line in run.epochs] == [1, 2]
    assert all(line.devices[0]["forward"] > 0 for line in run.epochs)
    assert all(line.train_s > 0 and line.evaluate_s > 0 for line in run.epochs)
    assert {"loss"} < set(run.epochs[0].scores)
    assert [line.step for line in run.steps] == list(range(1, run.epochs[-1].step + 1))
    assert run.steps[1].samples_per_s > 0
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert best_checkpoint(folder).name in checkpoints
    assert checkpoints[-1] == f"step-{run.epochs[-1].step:08d}"
    examples = examples_of(folder)
    assert examples["kind"] == job
    named = [value for each in examples["samples"] for value in each.values()]
    assert all((folder / name).is_file() for name in named if str(name).startswith("pictures/"))


def test_a_finished_run_is_left_alone_or_given_more_epochs(tmp_path: Path) -> None:
    data, runs = write_pictures(tmp_path / "data"), tmp_path / "runs"
    shutil.copy(data / "train/plum/0.png", data / "test/plum/9.png")
    small = {"model": "lenet", "augment": "none"}
    folder, said = run_here("classify", data, runs, name="it", **small)
    assert len(said["notes"]) == 1
    assert json.loads((folder / "run.json").read_text())["notes"] == said["notes"]
    before = {path: path.read_bytes() for path in folder.glob("*.*")}
    again = read_options(
        job_of("classify"), {"runs": str(runs), "name": "it", "resume": True}, None
    )
    with pytest.raises(
        LaunchError, match="the run has finished 1 epoch; continue it with --resume"
    ):
        run_job(job_of("classify"), again)
    assert {path: path.read_bytes() for path in folder.glob("*.*")} == before
    run_here("classify", data, runs, name="it", resume=True, epochs=2)
    run = read_reported(folder)
    assert [line.epoch for line in run.epochs] == [1, 2]
    assert [line.step for line in run.steps] == list(range(1, run.epochs[-1].step + 1))
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "finished": None}))
    before = {path: path.read_bytes() for path in folder.glob("*.*")}
    with pytest.raises(
        LaunchError, match=r"--epochs 1: the run it has already made .* Give more --epochs"
    ):
        run_here("classify", data, runs, name="it", resume=True, epochs=1)
    assert {path: path.read_bytes() for path in folder.glob("*.*")} == before


def test_epochs_count_from_one_everywhere(
    tmp_path: Path, chosen_scores: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """On the screen, in run.json, the examples, the record and the report."""
    pytest.importorskip("matplotlib", reason='needs pip install "onefold-jobs[report]"')
    chosen_scores[:] = (0.2, 0.9, 0.1)
    folder, said = run_here("text", write_texts(tmp_path / "data"), tmp_path / "runs", epochs=3)
    assert "epoch 3/3  loss" in capsys.readouterr().out
    run = read_reported(folder)
    best = json.loads((folder / "run.json").read_text())["best"]["epoch"]
    assert (best, said["best"]["epoch"], examples_of(folder)["epoch"], run.best) == (
        2,
        2,
        2,
        (2, 0.9),
    )
    assert [line.epoch for line in run.epochs] == [1, 2, 3]
    page = build_report(folder).read_text()
    assert "in epoch 2, chosen on this test set" in page
    assert "shows the model after epoch 2, the best one" in " ".join(page.split())


@pytest.mark.full
@all_jobs
@pytest.mark.processes
def test_every_job_has_the_same_bits_on_any_number_of_devices(job: str, tmp_path: Path) -> None:
    data = WRITERS[job](tmp_path / "data")
    BAD[job](data)
    changes: dict[str, dict[str, Any]]
    changes = {"segment": {"turns": "yes"}, "classify": {"mixup": 0.4, "cutmix": 1}}
    options = {"data": data, "runs": tmp_path / "runs", "workers": 1, "epochs": 2, **SMALL[job]}
    options |= changes.get(job, {})
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = ["-m", "onefold", "train", job, "--skip-bad", *words]
    assert (
        verify_script(
            command, "1,2,3", options=RunOptions(quiet=True, tools={"verify": {"steps": 4}})
        )
        == 0
    )


@pytest.mark.full
@pytest.mark.processes
def test_the_command_trains_and_predicts(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data")
    options = "--model resnet18 --epochs 2 --shards 2 --batch-size 8 --name first --devices 2"

    def onefold_(*words: str) -> str:
        command = [sys.executable, "-m", "onefold", *words]
        how: Any = {"capture_output": True, "text": True, "check": True}
        return subprocess.run(command, cwd=tmp_path, **how).stdout

    trained = onefold_("train", "classify", "--data", str(data), *options.split())
    assert "epoch 2/2  loss" in trained
    assert "Report: runs/first/report.html" in trained
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
    rows = onefold_("predict", "runs/first", str(data / "test"), "--devices", "2").splitlines()
    assert rows[0] == "file,label,class,confidence"
    assert len(rows) == 13


@pytest.fixture
def chosen_scores(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What evaluations return one after the other, so that a certain epoch is the best.

    A number for every score but the loss, or one for these and one for the loss.
    """
    values: list[Any] = []

    def chosen(options: Any, job: str, task: Task, data: Any) -> Any:
        def score(found: Any) -> dict[str, float]:
            scores, value = task.score(found), values.pop(0)
            value, lost = value if isinstance(value, tuple) else (value, scores["loss"])
            return {name: lost if name == "loss" else value for name in scores}

        return begin_training(options, job, replace(task, score=score), data)

    monkeypatch.setattr(tiny, "begin_training", chosen)
    return values


CHOSEN: list[tuple[str, Any, int, dict[str, Any]]] = [
    ("classify", (0.9, 0.2, 0.1), 0, {"model": "lenet", "augment": "none"}),
    ("segment", (0.1, 0.9, 0.2), 1, {}),
    ("text", (0.9, 0.2, 0.1), 0, {}),
    ("text", (0.1, 0.2, 0.9), 2, {}),
    ("text", (0.1, 0.9, 0.2), 1, {"ema": 0.5}),
]


@for_each(("job", "scores", "best", "small"), some(CHOSEN, 2))
def test_examples_are_of_the_best_model_and_the_last_one_stays(
    job: str,
    scores: Any,
    best: int,
    small: Any,
    tmp_path: Path,
    monkeypatch: Any,
    chosen_scores: list[float],
) -> None:
    chosen_scores[:] = scores
    shown: list[tuple[str, dict[str, bytes]]] = []
    predict = onefold.Trainer.predict

    def note(trainer: onefold.Trainer, *arguments: Any, **how: Any) -> Any:
        # Those before are the evaluations of the epochs.
        if not chosen_scores:
            shown.append((trainer.fingerprint(), bits(trainer.model)))
        return predict(trainer, *arguments, **how)

    monkeypatch.setattr(onefold.Trainer, "predict", note)
    data = WRITERS[job](tmp_path / "data")
    folder, said = run_here(job, data, tmp_path / "runs", epochs=3, **small)
    assert said["best"]["epoch"] == best + 1
    kept = load_file(folder / said["best"]["checkpoint"] / "model.safetensors")
    last = max((folder / "checkpoints").iterdir())
    for fingerprint, values in shown:
        assert values == {name: value.numpy().tobytes() for name, value in kept.items()}
        assert (fingerprint == said["fingerprint"]) == (best == 2)
    if "ema" not in small:  # of which that file has what is trained
        assert json.loads((last / "run.json").read_text())["fingerprint"] == said["fingerprint"]
    assert examples_of(folder)["epoch"] == best + 1
    assert [line.epoch for line in read_reported(folder).epochs] == [1, 2, 3]
    assert onefold.Record(folder).checkpoints["folder"][-1] == last.name


@for_each("damaged", ["best", "last"])
def test_a_training_that_is_over_ends_without_one_of_its_checkpoints(
    damaged: str, tmp_path: Path, monkeypatch: Any, caplog: Any, chosen_scores: list[float]
) -> None:
    """It is damaged while the examples of the best model are made."""
    real_load = onefold.Trainer.load
    chosen_scores[:] = (0.9, 0.2)

    def load(self: onefold.Trainer, path: Path, **options: Any) -> Any:
        if damaged == "best":
            shutil.rmtree(path)
        loaded = real_load(self, path, **options)
        (path.parent / "step-00000010" / "model.safetensors").write_bytes(b"damaged")
        return loaded

    monkeypatch.setattr(onefold.Trainer, "load", load)
    with caplog.at_level(logging.WARNING, "onefold"):
        folder, said = run_here("text", write_texts(tmp_path / "data"), tmp_path / "runs", epochs=2)
    assert said["finished"]
    assert said["best"]["epoch"] == 1
    assert examples_of(folder)["epoch"] == (2 if damaged == "best" else 1)
    if damaged == "last":
        told = caplog.records[-1].getMessage()
        assert told.startswith("cannot reload the last checkpoint: ")
        assert "step-00000010 is damaged" in told
        assert "\n" not in told


@for_each(
    ("scores", "ended", "best"),
    some(
        [
            (((0.5, 3.0), (0.5, 1.0), (0.5, 2.0), 0.5), 3, 1),
            ((0.5, 0.6, 0.6, 0.7), 4, 3),
            ((math.nan, (0.1, 1.0), (0.1, 1.0), (0.1, 1.0)), 4, 3),
            ((math.nan, math.nan, 0.1, 0.2), 2, 1),
            ((0.2, 0.1, 0.2, 0.3), 3, 0),
        ],
        3,
    ),
)
def test_patience_ends_a_run_that_gets_no_better(
    scores: Any, ended: int, best: int, tmp_path: Path, chosen_scores: list[float]
) -> None:
    chosen_scores[:] = scores
    data, runs = write_texts(tmp_path / "data"), tmp_path / "runs"
    folder, said = run_here("text", data, runs, name="it", epochs=4, patience=2)
    assert [line.epoch for line in read_reported(folder).epochs] == list(range(1, ended + 1))
    # Equal scores are no progress, but the loss and then the later epoch decides between them.
    assert said["best"]["epoch"] == best + 1
    assert (folder / said["best"]["checkpoint"]).is_dir()
    # After the last epoch nothing is left to end.
    assert said["ended"] == (None if ended == 4 else "patience")
    if ended < 4:
        again = {"runs": str(runs), "name": "it", "resume": True, "epochs": 9}
        with pytest.raises(LaunchError, match="ended by --patience 2; continue it with --resume"):
            run_job(job_of("text"), read_options(job_of("text"), again, None))
        run_here("text", data, runs, name="it", resume=True, patience=9)
        assert [line.epoch for line in read_reported(folder).epochs] == [1, 2, 3, 4]


@for_each("ended_at", some(["better", "worse"], 2))
def test_where_the_time_was_over_is_no_epoch_to_choose(
    ended_at: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chosen_scores: list[float],
) -> None:
    """A run that resumes chooses among the epochs of a run that never stopped."""
    data, runs = write_texts(tmp_path / "data"), tmp_path / "runs"
    chosen_scores[:] = (0.6, 0.5, 0.7)
    _, said = run_here("text", data, runs, name="whole", epochs=3)
    for step, before in some(((3, 0), (8, 1), (13, 2)), 2):
        name = f"ended-{step}"
        chosen_scores[:] = [*(0.6, 0.5, 0.7)[:before], 0.9 if ended_at == "better" else 0.1]
        with monkeypatch.context() as patch:
            patch.setattr(TimeLimit, "is_over", lambda limit, at=step: limit.trainer.steps >= at)
            folder, cut = run_here("text", data, runs, name=name, epochs=3, max_time="1h")
        # Until it resumes, the model where it ended is one of those to choose from.
        chosen = step if ended_at == "better" or not before else 5
        assert cut["best"]["checkpoint"] == f"checkpoints/step-{chosen:08d}"
        assert (folder / cut["best"]["checkpoint"]).is_dir()
        chosen_scores[:] = (0.6, 0.5, 0.7)[before:]
        _, resumed = run_here("text", data, runs, name=name, resume=True)
        assert (resumed["best"], resumed["fingerprint"]) == (said["best"], said["fingerprint"])
        assert (folder / resumed["best"]["checkpoint"]).is_dir()


def test_a_run_whose_time_is_over_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an epoch, at the end of one, and with an average of the weights."""
    data, runs, seen = write_texts(tmp_path / "data"), tmp_path / "runs", []
    options: dict[str, Any] = {"epochs": 2, "ema": 0.8, "max_time": "1h"}
    whole, said = run_here("text", data, runs, name="whole", **options)
    assert said["ended"] is None
    for step in some((3, 5), 2):
        name = f"ended {step}"
        with monkeypatch.context() as patch:
            patch.setattr(TimeLimit, "is_over", lambda limit, at=step: limit.trainer.steps >= at)
            folder, ended = run_here("text", data, runs, name=name, **options)
        assert ended["ended"] == "max-time"
        assert ended["best"]["checkpoint"] == f"checkpoints/step-{step:08d}"
        assert [line.step for line in read_reported(folder).epochs] == [step]
        assert examples_of(folder)["epoch"] == 1
        again = {"runs": str(runs), "name": name, "resume": True, "devices": "cpu:1"}
        resumed = run_job(job_of("text"), read_options(job_of("text"), again, None))
        seen.append((folder, resumed))
    for folder, resumed in seen:
        assert (resumed["fingerprint"], resumed["best"]) == (said["fingerprint"], said["best"])
        assert resumed["ended"] is None
        for one, two in zip(read_reported(whole).epochs, read_reported(folder).epochs, strict=True):
            assert (one.step, one.loss, one.scores) == (two.step, two.loss, two.scores)


BEST = {"epoch": 0, "score": "iou", "value": 0.5, "checkpoint": "checkpoints/step-00000003"}
SAVED = {"part": {"samples": 8.0, "total": math.inf}, "epochs_done": 1, "best": BEST}


STRANGE: list[Any] = [None, 3, {}, *({**SAVED, "part": each} for each in (3, {"samples": "x"}))]
STRANGE += [{**SAVED, "epochs_done": each} for each in ("x", -1, True)]
PLACES = ("../../other", "checkpoints/step-00000003\n")
BESTS = (3, {"epoch": 0}, *({**BEST, "checkpoint": each} for each in PLACES))


@for_each("extra", [*STRANGE, *({**SAVED, "best": each} for each in BESTS)])
def test_what_another_script_has_saved_is_refused(extra: Any, tmp_path: Path) -> None:
    assert read_saved(SAVED, tmp_path) == SAVED
    none: Any = {"part": {}, "epochs_done": 0, "best": None}
    assert read_saved(none, tmp_path) == none
    best = read_saved({**SAVED, "best": {**BEST, "value": math.nan}}, tmp_path)["best"]
    assert best is not None
    assert math.isnan(best["value"])
    with pytest.raises(CheckpointError, match="newest checkpoint was not saved by onefold train"):
        read_saved(extra, tmp_path)


@for_each(
    ("step_s", "limit_s", "over_at", "looks"),
    [
        (0.01, 5.0, (500, 505), 14),
        (0.25, 5.0, (20, 21), 20),
        (10.0, 25.0, (3, 3), 3),
        (100.0, 1.0, (1, 1), 1),
    ],
)
def test_the_lead_is_asked_about_once_a_second(
    step_s: float, limit_s: float, over_at: Any, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All devices ask it after the same steps, of which it says the next."""
    asked = []

    def broadcast(value: Any) -> Any:
        asked.append(lead.steps)
        return value

    lead: Any = SimpleNamespace(steps=7, broadcast=broadcast)
    monkeypatch.setattr(time, "perf_counter", lambda: step_s * lead.steps)
    limit = TimeLimit(lead, limit_s)
    assert not limit.is_over()
    while not limit.is_over():
        lead.steps += 1
    assert over_at[0] <= lead.steps - 7 <= over_at[1]
    assert len(asked) - 1 <= looks


class Timed:
    """Steps with these times, for `Workers`."""

    number = 12

    def __init__(self, data: float, rest: float) -> None:
        parts: dict[str, Any] = dict.fromkeys(("backward", "exchange", "update"), 0.0)
        self.seconds = PhaseTime(data=data, forward=rest, **parts)


@for_each(
    ("before", "after", "expected"),
    [
        # As many as can read a batch while another one is computed.
        ((0.3, 0.1), (0.0, 0.1), [0, 4, 4]),
        ((0.05, 0.1), (0.0, 0.1), [0, 2, 2]),
        ((9.0, 0.1), (0.5, 0.1), [0, 8, 8]),
        # No faster with them, too few to pay off, and not limited by data.
        ((0.3, 0.1), (0.0, 0.5), [0, 4, 0]),
        ((0.008, 0.01), (0.0, 0.01), [0, 0, 0]),
        ((0.02, 0.1), (0.0, 0.1), [0, 0, 0]),
    ],
)
def test_the_number_of_workers_follows_from_the_first_steps(
    before: Any, after: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    loader: Any = SimpleNamespace(workers=0)
    workers = Workers("auto", loader, steps=100, devices=2)
    numbers: list[int] = []
    remarks: list[str] = []
    for times, steps in ((before, 11), (before, 1), (after, 12)):
        remarks += filter(None, [workers.note(Timed(*times)) for _ in range(steps)])  # type: ignore[arg-type]
        numbers.append(workers.number)
    assert numbers == expected
    assert len(remarks) == len(set(expected)) - 1 + (expected[2] != expected[1])
    assert workers.was_chosen == (expected[1] > 0)
    assert Workers("3", loader, steps=100, devices=2).note(Timed(9, 1)) == ""  # type: ignore[arg-type]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs of 13 steps per epoch that start workers before the last one."""
    data = write_texts(tmp_path / "data", train=52)
    for name in ("watch.limits.DATA_SHARE", "watch.limits.LEAST_DATA_S"):
        monkeypatch.setattr(f"onefold.{name}", 0.0)
    monkeypatch.setattr("onefold_jobs.reading.LEAST_S", 0.0)

    def trained(name: str, *, devices: int = 1, **options: Any) -> Any:
        small = {} if options.get("resume") else {"batch_size": 4, "epochs": 1}
        main = lambda: run_here("text", data, tmp_path, name=name, **small, **options)  # noqa: E731
        return simulate(main, devices=devices)[0]

    return trained


@pytest.mark.processes
def test_measured_workers_change_no_bits(measured: Callable[..., Any]) -> None:
    plain, said = measured("plain", workers=0)
    for devices in (1, 2):
        folder, found = measured(f"on {devices}", devices=devices)
        assert found["fingerprint"] == said["fingerprint"]
        (line,), (other,) = (read_reported(each).epochs for each in (folder, plain))
        assert (line.loss, line.scores) == (other.loss, other.scores)
        assert [device["workers"] > 0 for device in line.devices] == [True] * devices
        remark = json.loads((folder / "run.json").read_text())["remarks"][1]
        assert re.match(
            r"--workers auto: \d process(es)? per device read ahead from step 13 on", remark
        )


@pytest.mark.full
@pytest.mark.processes
def test_a_run_with_measured_workers_resumes(
    measured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has workers, and with them; it measures again."""
    _, said = measured("plain", workers=0, ema=0.5)
    for step in (6, 12):
        with monkeypatch.context() as patch:
            patch.setattr(TimeLimit, "is_over", lambda limit, at=step: limit.trainer.steps >= at)
            measured(f"ended {step}", max_time="1h", ema=0.5)
        _, resumed = measured(f"ended {step}", resume=True, devices=2)
        assert resumed["fingerprint"] == said["fingerprint"]


def test_without_a_limit_nobody_is_asked() -> None:
    trainer: Any = SimpleNamespace(steps=0, broadcast=lambda _: pytest.fail("asked"))
    assert not TimeLimit(trainer, float("inf")).is_over()


@for_each("limited", [True, False])
def test_a_run_that_waits_for_its_data_says_so_once(
    limited: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("onefold.watch.limits.DATA_SHARE", 0.0 if limited else 1.1)
    monkeypatch.setattr("onefold.watch.limits.LEAST_DATA_S", 0.0)
    folder, _ = run_here("text", write_texts(tmp_path / "data"), tmp_path / "runs", epochs=2)
    words = "device 0 is limited by data: a step waits for its batch for "
    assert capsys.readouterr().out.count(words) == limited
    limits = [line.devices[0]["limit"] for line in read_reported(folder).epochs]
    assert [limit[:15] for limit in limits] == ["limited by data" if limited else ""] * 2
    # The default chooses the number of processes, so the user is not asked for one.
    assert [
        limit.endswith("--workers auto reads ahead if waiting takes 1 s of an epoch")
        for limit in limits
    ] == [limited] * 2
