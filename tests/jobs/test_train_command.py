"""The commands of ``onefold train``: what they show, take and refuse. Nothing is trained here."""

import dataclasses
import errno
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from onefold.cli.main import app, main
from onefold.system.words import listed
from onefold_jobs.catalog import JOBS
from onefold_jobs.cli import train
from onefold_jobs.job import Job
from onefold_jobs.predict import Evaluation, Prediction
from onefold_jobs.scores import ClassScores, class_baseline
from tests.tables import for_each, some

each_job = for_each("job", JOBS)

RESULT: dict[str, Any] = {
    "folder": "runs/one",
    "best": {"score": "accuracy", "value": 0.9876, "epoch": 5, "checkpoint": "checkpoints/step-9"},
    "fingerprint": "0123456789abcdef",
    "report": None,
    "score": "highest accuracy",
    "confusion": None,
    "labels": None,
    "ious": None,
    "baseline": None,
    "is_lead": True,
    "steps": 500,
}

Train = Callable[..., Any]
End = Callable[..., str]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", *arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Train:
    """The options that a command line comes to, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    taken: list[Any] = []

    def run(job: object, options: object) -> Any:
        taken.append(options)
        return RESULT

    monkeypatch.setattr(train, "run_job", run)

    def ask(job: str, *arguments: str) -> Any:
        result = invoke(job, *arguments)
        assert result.exception is None, result.output
        return taken[-1]

    return ask


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> End:
    """What a command line says that is refused with exit code 2, before the data are read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["onefold", "train", *arguments])
        with pytest.raises(SystemExit, match=r"^2$"):
            main()
        said = capsys.readouterr()
        assert said.out == ""
        assert "Traceback" not in said.err
        assert not (tmp_path / "runs").exists()
        return said.err

    return run


def told(text: str) -> str:
    """Without line breaks and other white space."""
    return " ".join(text.replace("-\n", "-").split())


@each_job
def test_the_help_shows_every_option_under_its_heading(job: Job) -> None:
    assert told(f"{job.name} {job.help}") in told(invoke("--help").output)
    result = invoke(job.name, "--help")
    assert result.exit_code == 0
    groups = dict(re.findall(r"^(\w+):\n((?:  .*\n|\n)+)", result.output, re.MULTILINE))
    # Most fill a terminal of 80 columns; each option has a line of its own.
    assert len(result.output.splitlines()) <= 80
    assert [*groups][-1] == "Run"
    for field in dataclasses.fields(job.options):
        heading = next(name for name, options in train.GROUPS.items() if field.name in options)
        default = field.metadata["shown"]
        if default is None:
            default = "" if field.default is False else str(field.default)
        assert len(field.metadata["help"]) <= 60
        words = re.escape(field.metadata["help"].removesuffix("."))
        note = re.escape(f" [{default}]") if default else ""
        (line,) = re.findall(rf"^  --{field.name.replace('_', '-')} .*", groups[heading], re.M)
        assert re.fullmatch(rf"  --[\w-]+(?: [A-Z]+)? +{words}(?:: [\w, -]+)?\.{note}", line)


def test_the_end_of_a_run_is_told(asked: Train) -> None:
    assert invoke("text", "--data", "x").output.splitlines() == [
        "Best: accuracy 98.8% after epoch 5, saved in runs/one/checkpoints/step-9",
        "Fingerprint: 0123456789abcdef",
        "Report: none without matplotlib; later, run onefold report runs/one",
    ]


COUNTS = [[0, 19], [0, 81]]


def test_a_model_that_says_one_thing_has_a_warning(asked: Train, monkeypatch: Any) -> None:
    baseline = {"answer": "dog", "scores": {"accuracy": 0.81}}
    best = {**RESULT["best"], "value": 0.81}
    result = {**RESULT, "best": best, "baseline": baseline, "classes": ["cat", "dog"]}
    result |= {"confusion": COUNTS, "shrunk": True}
    monkeypatch.setattr(train, "run_job", lambda *_: result)
    output = invoke("text", "--data", "x").output
    assert ". More --epochs, a larger --image-size, another --lr, --class-weights" in output
    assert "Best: accuracy 81.0% after epoch 5" in output
    warning = "Warning: This run learned nothing. This model is no better than the baseline"
    assert output.startswith(f"{warning}, which predicts 'dog'")
    assert "cat         0.0%    0.0%   0.0%       19" in output


def test_a_very_short_run_is_told_to_train_longer(asked: Train, monkeypatch: Any) -> None:
    baseline = {"answer": "dog", "scores": {"accuracy": 0.81}}
    best = {**RESULT["best"], "value": 0.81}
    result = {**RESULT, "best": best, "baseline": baseline, "steps": 21}
    monkeypatch.setattr(train, "run_job", lambda *_: result)
    output = invoke("text", "--data", "x").output
    assert "81.0%. The run made only 21 steps: use more --epochs\n" in output
    assert "--lr" not in output


def test_a_warning_names_only_options_of_its_task(asked: Train, monkeypatch: Any) -> None:
    baseline = {"answer": "44.5", "scores": {"rmse": 23.6}}
    best = {**RESULT["best"], "score": "rmse", "value": 24.0}
    result = {**RESULT, "best": best, "baseline": baseline, "score": "lowest rmse"}
    monkeypatch.setattr(train, "run_job", lambda *_: result)
    output = invoke("text", "--data", "x").output
    assert output.count("More --epochs, another --lr or --batch-size may help") == 1
    assert "--class-weights" not in output
    ious = [{"class": "sky", "color": "#000000", "iou": 0.25, "share": math.nan}]
    told_of = {**result, "score": "lowest rmse", "ious": ious}
    monkeypatch.setattr(train, "run_job", lambda *_: told_of)
    output = invoke("segment", "--data", "x").output
    assert "another --lr or --class-weights auto may help" in output
    assert "sky    25.0%                -" in output


def test_an_option_of_other_jobs_names_these(end: End) -> None:
    """For each option that a job does not have."""
    names = {job.name: {each.name for each in dataclasses.fields(job.options)} for job in JOBS}
    for job, own in names.items():
        for name in some(sorted(set().union(*names.values()) - own), 6):
            having = [f"onefold train {other}" for other in names if name in names[other]]
            option = f"--{name.replace('_', '-')}"
            words = f"{option} in onefold train {job}: it is one of {listed(having)}"
            for given in ([option, "1"], [f"{option}=1"]):
                assert words in end(job, "--data", "x", *given)
    assert "it is one of" not in end("text", "--data", "x", "--patince", "3")


def test_an_evaluation_is_told_or_printed_as_json(tmp_path: Path, monkeypatch: Any) -> None:
    scores = ClassScores(np.array(COUNTS))
    found = Evaluation(
        run=tmp_path / "run",
        data=tmp_path / "photos",
        weights=tmp_path / "run/step-9",
        prediction=Prediction([{"file": "1.png"}] * 100, []),
        scores={"loss": 0.5, **scores.overall},
        by_class=[*scores.rows(["cat", "dog"])],
        confusion=COUNTS,
        baseline=class_baseline([1, 2], [19, 81], ["cat", "dog"]),
        warning="no better",
    )
    monkeypatch.setattr(train, "evaluate_run", lambda run, data, options: found)
    plain, data = (
        CliRunner().invoke(app, ["evaluate", "run", "photos", *more]) for more in ([], ["--json"])
    )
    lines = [" ".join(line.split()) for line in plain.output.splitlines()]
    assert lines[0] == f"{tmp_path}/run/step-9 on 100 samples of {tmp_path}/photos"
    assert "accuracy: 81.0% (baseline 81.0%)" in lines
    assert "The baseline predicts 'dog' for every sample." in lines
    assert "dog 81.0% 100.0% 89.5% 81" in lines
    assert lines[-1] == "Warning: no better"
    assert json.loads(data.output) == json.loads(json.dumps(found.as_dict()))
    # Every sample goes to a file whose ending says how, whatever is printed.
    table = tmp_path / "all.csv"
    CliRunner().invoke(app, ["evaluate", "run", "photos", "--json", "--output", str(table)])
    assert table.read_text().splitlines()[:2] == ["file", "1.png"]


def test_predictions_are_json_where_that_is_asked_for(tmp_path: Path, monkeypatch: Any) -> None:
    rows = [{"file": "1.png", "class": "cat"}]
    monkeypatch.setattr(train, "predict_run", lambda run, paths, options: Prediction(rows, []))
    photo = tmp_path / "1.png"
    photo.touch()

    def printed(*given: str) -> str:
        return CliRunner().invoke(app, ["predict", "run", str(photo), *given]).output

    assert printed() == "file,class\n1.png,cat\n"
    assert json.loads(printed("--json")) == json.loads(printed("--format", "json")) == rows
    both = CliRunner().invoke(app, ["predict", "run", str(photo), "--json", "--format", "csv"])
    assert "--json: expected it without --format csv" in str(both.exception)


@for_each(
    ("arguments", "name", "value"),
    [
        ("--batch-size 32", "batch_size", 32),
        ("--lr 1", "lr", 1.0),
        ("--lr 3e-5", "lr", 3e-5),
        ("--seed -4", "seed", -4),
        ("--optimizer adam", "optimizer", "adam"),
        ("--skip-bad", "skip_bad", True),
        ("--no-skip-bad", "skip_bad", False),
        ("--freeze c", "freeze", ("c",)),
        ("--freeze a --freeze b,,c,", "freeze", ("a", "b", "c")),
        ("--freeze-until layer2", "freeze_until", "layer2"),
        ("--name é1", "name", "é1"),
    ],
)
def test_the_command_line_decides(asked: Train, arguments: str, name: str, value: object) -> None:
    lines = ['data = "x"', "lr = 0.5", 'freeze = ["a", "b"]', "skip_bad = true", "workers = 3"]
    Path("c.toml").write_text("\n".join(lines), encoding="utf-8")
    filed = {"data": "x", "lr": 0.5, "freeze": ("a", "b"), "skip_bad": True, "workers": "3"}
    for given, others in ((["--data", "x"], {}), (["--config", "c.toml"], filed)):
        options = asked("text", *given, *arguments.split())
        found = getattr(options, name)
        assert (found, type(found)) == (value, type(value))
        for other in set(others) - {name}:
            assert getattr(options, other) == filed[other]


SHARED = "devices cannot share {} shards, because a shard is never split. Use --devices {} or fewer"


@for_each(
    ("arguments", "words"),
    [
        ("text", "--data is missing: give the folder or file of the data"),
        ("text --data x --epochs 0", "--epochs 0: expected 1 or more"),
        (f"text --data x --seed {'9' * 4000}", "--seed "),
        ("text --resume --name a", "--resume: there is no run in runs/a; leave out --resume to"),
        ("classify --data x --devices 9", f"--devices 9: 9 {SHARED.format(8, 8)}"),
        ("segment --data x --devices cpu,cpu,cpu,cpu,cpu", SHARED.format(4, 4)),
        ("classify --data x --devices cpu:3 --shards 2", SHARED.format(2, 2)),
        ("text --data x --devices cuda:0", "cuda:0 does not exist: this machine has no GPU"),
        ("classify --data data.zip", ", but this is a file"),
        ("classify --data data", "there is no such folder in "),
        ("classify --data data.csv", "expected a folder, a table, or one of digits, mnist"),
        ("text --data data", "--data data: expected a folder with train.tsv and dev.tsv"),
    ],
)
def test_what_cannot_be_done_is_one_line(end: End, arguments: str, words: str) -> None:
    Path("data.zip").touch()
    said = end(*arguments.split())
    assert said.startswith("onefold: ")
    assert words in said
    assert said.count("\n") == 1


def test_what_the_system_refuses_is_one_line(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_job(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "runs/one/report.html")

    monkeypatch.setattr(train, "run_job", run_job)
    assert end("text", "--data", "x") == "onefold: runs/one/report.html: Permission denied\n"
