"""Who calls a job as a function reads of keyword arguments, and in a notebook sees a bar."""

import ast
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import onefold
import onefold_jobs
from onefold.errors import RunFailed
from onefold_jobs.audience import Audience, audience, speaking_to, spelled, tell
from onefold_jobs.catalog import JOBS
from onefold_jobs.options import TrainOptions
from onefold_jobs.progress import TrainingBar, reading_bar
from onefold_jobs.runfolder import CONFIG
from tests.capabilities import needs_text
from tests.jobs.tiny import SMALL, direct, job_of, write_texts
from tests.tables import for_each

SOURCE = Path(onefold_jobs.__path__[0])
FOR_COMMANDS = ("cli", "commands.py", "search.py", "audience.py")
"""What only commands show."""
COMMAND = re.compile(r"onefold [a-z]+(?: [a-z]+)?:?(?: --[^;:,]*)+")


@for_each(
    ("text", "spelling"),
    [
        ("use --resume and a larger --patience", "use resume=True and a larger patience="),
        ("--lr auto: 2 steps", 'lr="auto": 2 steps'),
        ("--data photos/a: expected", 'data="photos/a": expected'),
        ("--data 'my photos': expected", "data='my photos': expected"),
        ("--placement pipeline: 3 devices", 'placement="pipeline": 3 devices'),
        ("use --optimizer sgd or more --epochs.", 'use optimizer="sgd" or more epochs=.'),
        ("--devices 4: 4 (--batch-size 8, 9)", "devices=4: 4 (batch_size=8, 9)"),
        ("continue it with onefold report runs/a", "continue it with onefold report runs/a"),
        ("onefold train text --epochs 2 --resume", "onefold train text --epochs 2 --resume"),
        ("(onefold train: --workers)", "(onefold train: --workers)"),
        ("pass --other 3 or --", "pass --other 3 or --"),
    ],
)
def test_options_are_keyword_arguments(text: str, spelling: str) -> None:
    assert spelled(text) == text
    with speaking_to(Audience(options=TrainOptions)):
        assert spelled(text) == spelling
        assert spelled(spelling) == spelling
    assert audience().options is None


def messages() -> Iterator[str]:
    """All texts of the jobs but docstrings, with X for their values."""
    for path in sorted(SOURCE.rglob("*.py")):
        if path.relative_to(SOURCE).parts[0] in FOR_COMMANDS:
            continue
        tree = ast.parse(path.read_text())
        documented = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        inside = {
            id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in n.values
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = (str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
                yield "".join(parts)
            elif isinstance(node, ast.Constant) and id(node) not in documented | inside:
                yield str(node.value)


def test_no_message_tells_a_function_of_an_option_of_the_command() -> None:
    options = {name: job.options for job in JOBS for name in typing.get_type_hints(job.options)}
    seen = 0
    for text in messages():
        for name in {each.replace("-", "_") for each in re.findall(r"--([a-z][a-z-]*)", text)}:
            if name in options:
                with speaking_to(Audience(options=options[name])):
                    shown = COMMAND.sub("", spelled(text))
                seen += 1
                assert not re.search(rf"--{name.replace('_', '-')}(?![\w-])", shown), text
    assert seen > 100


def test_a_function_raises_errors_of_keyword_arguments(tmp_path: Path) -> None:
    with pytest.raises(onefold.errors.DataError, match=f'^data="{tmp_path}/no": expected'):
        onefold_jobs.text(data=tmp_path / "no")
    with pytest.raises(ValueError, match=r"(?s)^((?!--).)*$"):
        onefold_jobs.text(data=tmp_path, resume=True)


def test_a_stopped_function_names_the_call_that_resumes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_text()
    data, runs = write_texts(tmp_path / "it's data"), tmp_path / "my runs"
    how: dict[str, Any] = {"data": data, "runs": runs, "devices": "cpu:1", "epochs": 2}
    code = 75

    def stopped(main: Any, *, args: Any, **_: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(onefold.Trainer, "asked_to_stop", property(lambda it: it.steps == 3))
            with pytest.raises(SystemExit):
                main(*args)
        raise RunFailed("stopped by SIGINT after step 3 and saved", code)

    with monkeypatch.context() as patch:
        patch.setattr(onefold, "launch", stopped)
        with pytest.raises(RunFailed) as caught:
            onefold_jobs.text(**how, **SMALL["text"])
    words = str(caught.value)
    assert "--" not in words
    call = re.fullmatch(r"stopped .* saved: (onefold_jobs\.text\(.*\)) continues from there", words)
    assert call
    monkeypatch.setattr(onefold, "launch", direct)
    result = eval(call[1], {"onefold_jobs": onefold_jobs})
    assert result.folder == runs / "text-1"
    assert result.epoch in (1, 2)
    assert (result.folder / CONFIG).is_file()
    assert "resumes after step 3" in capsys.readouterr().out
    assert job_of("text").options is JOBS[2].options


def final(text: str) -> list[str]:
    """The lines as a notebook shows them: a carriage return goes back to the beginning."""
    lines = []
    for line in text.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def test_a_notebook_shows_a_bar_below_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    trainer: Any = SimpleNamespace(is_lead=True, devices=("cpu", "cpu"))
    step: Any = SimpleNamespace(epoch=0, samples=10)
    with (
        speaking_to(Audience(options=TrainOptions, notebook=True)),
        TrainingBar(trainer, samples=20, epochs=1) as bar,
    ):
        bar.say("begun \x1b[2J")
        bar.advance(step, mean_loss=0.5)
        bar.advance(step, mean_loss=0.25)
        bar.say("use more --epochs")
    text = capsys.readouterr().out
    first, second, last, end = final(text)
    assert (first, second, end) == (r"begun \x1b[2J", "use more epochs=", "")
    assert re.fullmatch(r"2 devices  epoch 1/1  loss 0.250  100%\|█+\| .*, 00:00 left", last)
    assert "\x1b" not in text
    trainer.is_lead = False
    with speaking_to(Audience(notebook=True)), TrainingBar(trainer, samples=20, epochs=1) as bar:
        bar.advance(step, mean_loss=0.5)
        bar.say("no")
    assert capsys.readouterr().out == ""


def test_reading_files_shows_a_bar_in_a_notebook_and_a_line_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with speaking_to(Audience(notebook=True)), reading_bar() as watch:
        watch(1, 2)
        watch(2, 2)
    assert "reading files:   0%" in capsys.readouterr().err
    with reading_bar() as watch:
        watch(1, 2)
        watch(2, 2)
    assert capsys.readouterr().err == "onefold: reading 2 files\n"
    with reading_bar():
        pass
    tell("--lr")
    assert capsys.readouterr().err == "onefold: --lr\n"
