"""The commands of ``onefold train``: what they show, take and refuse. Nothing is trained here."""

from __future__ import annotations

import dataclasses
import errno
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from onefold.cli import train
from onefold.cli.main import main
from onefold.jobs.catalog import JOBS
from onefold.jobs.options import TrainOptions, write_config
from onefold.jobs.run import Job
from onefold.jobs.text import TextOptions
from tests.tables import for_each

each_job = for_each("job", [pytest.param(job, id=job.name) for job in JOBS])

RESULT: dict[str, Any] = {
    "folder": "runs/one",
    "best": {"score": "accuracy", "value": 0.9876, "epoch": 4, "checkpoint": "checkpoints/step-9"},
    "fingerprint": "0123456789abcdef",
    "report": None,
    "is_lead": True,
}

Train = Callable[..., Any]


def invoke(*arguments: str) -> Result:
    app = typer.Typer()
    train.add_jobs(app)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Train:
    """The options that a command line comes to, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    taken: list[Any] = []

    def take(job: Job, options: TrainOptions) -> dict[str, Any]:
        taken.append(options)
        return RESULT

    def ask(job: str, *arguments: str) -> Any:
        result = invoke(job, *arguments)
        assert result.exception is None, result.output
        return taken[-1]

    monkeypatch.setattr(train, "run_job", take)
    return ask


@pytest.fixture
def end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
    """What a command line that is refused says, with exit code 2."""
    monkeypatch.chdir(tmp_path)

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
    """Without the frames of a screen and the white space."""
    return " ".join(text.replace("│", " ").split())


@for_each(
    ("option", "value"),
    [
        ("--lr", "inf"),
        ("--weight-decay", "nan"),
        ("--epochs", "0"),
        ("--batch-size", "-1"),
        ("--workers", "1000000"),
        ("--seed", "9" * 4000),
    ],
)
def test_numbers_that_make_no_sense_are_one_line(
    option: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Of one job: `tests/jobs/test_options.py` has the ranges of all."""
    monkeypatch.setattr(sys, "argv", ["onefold", "train", "text", "--data", "gone", option, value])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"onefold: {option} ")
    assert ": expected " in told


@each_job
def test_the_help_shows_every_option_with_its_help_and_default(job: Job) -> None:
    result = invoke(job.name, "--help")
    assert result.exit_code == 0
    shown = told(result.output)
    assert job.help in shown
    assert "\\" not in shown
    for field in dataclasses.fields(job.options):
        assert f" --{field.name.replace('_', '-')} " in shown
        default = field.metadata["shown"]
        if default is None:
            words = {bool: ("no", "yes")}.get(type(field.default))
            default = words[field.default] if words else str(field.default)
        assert f"{field.metadata['help']} [default: {default}]" in shown


@each_job
def test_options_of_the_job_and_of_all_jobs_are_apart(job: Job) -> None:
    first, _, rest = invoke(job.name, "--help").output.partition("Options of all jobs")
    common = {field.name for field in dataclasses.fields(TrainOptions)}
    for field in dataclasses.fields(job.options):
        shown = f"│ --{field.name.replace('_', '-')} "
        assert (shown in first, shown in rest) == (field.name not in common, field.name in common)


def test_all_jobs_are_listed() -> None:
    shown = told(invoke("--help").output)
    assert all(f"{job.name} {job.help}" in shown for job in JOBS)


@each_job
def test_without_options_all_have_their_defaults(asked: Train, job: Job) -> None:
    assert asked(job.name, "--data", "x") == job.options(data="x", name=f"{job.name}-1")


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--batch-size", "32"], "batch_size", 32),
        (["--lr", "1"], "lr", 1.0),
        (["--lr", "3e-5"], "lr", 3e-5),
        (["--seed", "-4"], "seed", -4),
        (["--workers", "0"], "workers", 0),
        (["--optimizer", "adam"], "optimizer", "adam"),
        (["--skip-bad"], "skip_bad", True),
        (["--no-skip-bad"], "skip_bad", False),
        (["--freeze", "a,b.c"], "freeze", ("a", "b.c")),
        (["--freeze", "a", "--freeze", "b,,c,"], "freeze", ("a", "b", "c")),
        (["--freeze-until", "layer2"], "freeze_until", "layer2"),
        (["--name", "é 1"], "name", "é 1"),
    ],
)
@each_job
def test_the_command_line_sets_options(
    asked: Train, job: Job, arguments: Sequence[str], name: str, value: object
) -> None:
    found = getattr(asked(job.name, "--data", "x", *arguments), name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"lr": 0.5, "freeze": ("a", "b"), "skip_bad": True, "workers": 3}),
        (["--lr", "0.25"], {"lr": 0.25, "freeze": ("a", "b"), "skip_bad": True, "workers": 3}),
        (["--freeze", "c"], {"lr": 0.5, "freeze": ("c",), "skip_bad": True, "workers": 3}),
        (["--no-skip-bad"], {"lr": 0.5, "freeze": ("a", "b"), "skip_bad": False, "workers": 3}),
        (["--workers", "0"], {"lr": 0.5, "freeze": ("a", "b"), "skip_bad": True, "workers": 0}),
    ],
)
@each_job
def test_the_command_line_goes_before_the_file(
    asked: Train, job: Job, arguments: Sequence[str], expected: dict[str, object]
) -> None:
    lines = ['data = "x"', "lr = 0.5", 'freeze = ["a", "b"]', "skip_bad = true", "workers = 3"]
    Path("c.toml").write_text("\n".join(lines), encoding="utf-8")
    options = asked(job.name, "--config", "c.toml", *arguments)
    assert {name: getattr(options, name) for name in expected} == expected
    assert options.data == "x"


@each_job
def test_the_environment_decides_what_is_kept_where_the_command_does_not(
    asked: Train, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEFOLD_KEEP", "span")
    assert asked(job.name, "--data", "here").keep == "span"
    assert asked(job.name, "--data", "here", "--keep", "host").keep == "host"


@each_job
def test_the_options_of_a_run_can_be_given_again_as_a_file(asked: Train, job: Job) -> None:
    first = asked(job.name, "--data", "x", "--name", "one", "--freeze", "a,b", "--lr", "1e-4")
    write_config(first, job.name, Path("c.toml"))
    assert asked(job.name, "--config", "c.toml") == first
    assert asked(job.name, "--config", "c.toml", "--name", "two").name == "two"


def test_the_end_of_a_run_is_told(asked: Train) -> None:
    asked("text", "--data", "x")
    assert invoke("text", "--data", "x").output.splitlines() == [
        "Best: accuracy 0.9876 after epoch 5, kept in runs/one/checkpoints/step-9",
        "Fingerprint: 0123456789abcdef",
        "No report, without matplotlib; later: onefold report runs/one",
    ]


def test_the_end_of_a_run_that_has_no_best_epoch_is_told(
    asked: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RESULT, "best", None)
    monkeypatch.setitem(RESULT, "report", "runs/[one]/report.html")
    asked("text", "--data", "x")
    assert invoke("text", "--data", "x").output.splitlines() == [
        "Fingerprint: 0123456789abcdef",
        "Report: runs/[one]/report.html",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--data: expected where the data are"),
        (["--data", "x", "--epochs", "0"], "--epochs 0: expected 1 or more"),
        (["--data", "x", "--lr", "nan"], "--lr nan: expected a finite number"),
        (["--data", "x", "--name", "a/b"], "--name a/b: expected a name without slashes"),
        (["--resume"], "--resume: expected with --name, which run it is"),
        (
            ["--resume", "--name", "a"],
            "--resume: there is no run in runs/a; leave --resume out to begin one",
        ),
    ],
)
@each_job
def test_a_value_out_of_range_is_one_line(
    end: Callable[..., str], job: Job, arguments: Sequence[str], words: str
) -> None:
    assert end(job.name, *arguments) == f"onefold: {words}\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("speed = 1\n", "there is no option speed; known are "),
        ("lr = '1'\n", "lr: expected a number, got '1'"),
        ("job = 'poems'\n", "expected options of onefold train text, got those of poems"),
        ("lr: 1\n", "expected a TOML file: "),
        ("epochs = 0\n", "--epochs 0: expected 1 or more"),
    ],
)
def test_a_file_that_is_not_right_is_one_line(
    end: Callable[..., str], content: str, words: str
) -> None:
    Path("c.toml").write_text(content, encoding="utf-8")
    said = end("text", "--config", "c.toml", "--data", "x")
    assert said.startswith("onefold: ")
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epochs", "many"], "Invalid value for '--epochs'"),
        (["--lr", "fast"], "Invalid value for '--lr'"),
        (["--optimizer", "lion"], "'lion' is not one of 'sgd', 'adam', 'adamw'"),
        (["--speed", "3"], "No such option: --speed"),
        (["--config", "none.toml"], "file 'none.toml' does not exist"),
    ],
)
@each_job
def test_what_cannot_be_read_is_refused_with_the_option(
    end: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    job: Job,
    arguments: Sequence[str],
    words: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert words in told(end(job.name, "--data", "x", *arguments))


@pytest.mark.parametrize(
    ("job", "words", "shards"),
    [
        ("classify", ["--devices", "9"], 8),
        ("text", ["--devices", "cpu:9"], 8),
        ("segment", ["--devices", "cpu,cpu,cpu,cpu,cpu"], 4),
        ("classify", ["--devices", "cpu:3", "--shards", "2"], 2),
    ],
)
def test_more_devices_than_shards_are_refused_before_the_data_are_read(
    end: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    job: str,
    words: Sequence[str],
    shards: int,
) -> None:
    monkeypatch.setattr("onefold.run.devices._gpus", list)
    monkeypatch.setattr(train, "run_job", lambda *_: pytest.fail("the data would be read"))
    said = end(job, "--data", "x", *words)
    assert f"devices cannot share {shards} shards: a shard is never divided. Use --devices" in said
    assert said.count("\n") == 1


def test_devices_that_are_not_there_are_refused_before_the_data_are_read(
    end: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onefold.run.devices._gpus", list)
    monkeypatch.setattr(train, "run_job", lambda *_: pytest.fail("the data would be read"))
    said = end("classify", "--data", "x", "--devices", "cuda:0")
    assert said.startswith("onefold: cuda:0 is not there: this machine has no GPU")


def test_all_devices_may_be_more_than_the_shards(
    asked: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onefold.run.devices.cores", lambda: 64)
    assert asked("classify", "--data", "x", "--shards", "2").shards == 2


@pytest.mark.parametrize("job", ["classify", "segment"])
def test_a_file_is_not_called_a_missing_folder(end: Callable[..., str], job: str) -> None:
    Path("data.zip").touch()
    assert end(job, "--data", "data.zip").rstrip().endswith("; this is a file")
    assert "there is no such folder in " in end(job, "--data", "data")


def test_what_the_system_refuses_is_one_line(
    end: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_job(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "runs/one/report.html")

    monkeypatch.setattr(train, "run_job", run_job)
    assert end("text", "--data", "x") == "onefold: runs/one/report.html: Permission denied\n"


def test_a_job_that_there_is_not_is_refused(end: Callable[..., str]) -> None:
    assert "No such command 'poems'" in told(end("poems"))


def test_a_run_is_not_written_over(asked: Train) -> None:
    Path("runs/one").mkdir(parents=True)
    write_config(TextOptions(name="one"), "text", Path("runs/one/config.toml"))
    result = invoke("text", "--data", "x", "--name", "one")
    assert "runs/one is there already: --resume goes on with it" in str(result.exception)
