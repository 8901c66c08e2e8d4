"""Texts of other people's files: no command lets the terminal obey them, or rich style them."""

import json
import logging
import shutil
import subprocess
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.main import get_command

import onefold
from onefold.cli.main import app, main
from onefold.cli.replay import StepReplay
from onefold.record import FILE
from onefold.record.entries import (
    BlockEntry,
    Entry,
    FailureEntry,
    FrameWriter,
    Result,
    SavedEntry,
    StartEntry,
    StepEntry,
    encode,
)
from onefold.record.findings import Findings, LayerFinding, SampleFinding, ShardFinding
from onefold.shard.operations import ShardOperation
from onefold.system.words import in_shell
from tests.jobs.tiny import direct, run_here, write_pictures
from tests.masked import on_cpu
from tests.tables import for_each

EVIL = "\x1b]0;t\x07\x9b31m\x7f\u202e\u2066\u2028\r[bold red]x[/] :warning:"
SHOWN = r"\x1b]0;t\x07\u009b31m\x7f\u202e\u2066\u2028\r[bold red]x[/] :warning:"
LINES = f"{EVIL}\nonefold: forged"
USES_OF_A_RUN = {"evaluate", "predict", "export", "report", "train"}
READ_NOTHING = {"devices", "demo", "init", "plan", "verify", "run"}
"""Commands that read no record, run folder or configuration of somebody else's."""


def is_harmless(text: str) -> bool:
    kinds = {unicodedata.category(each) for each in text if each != "\n"}
    return not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"} and "⚠" not in text


Say = Callable[..., str]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Say:
    """What a command shows on both streams, which is checked."""
    monkeypatch.setenv("COLUMNS", "2000")

    def said(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["onefold", *words])
        with pytest.raises(SystemExit):
            main()
        shown = capfd.readouterr()
        assert is_harmless(shown.out + shown.err), ascii(shown)
        assert "Traceback" not in shown.err
        return shown.out + shown.err

    return said


def entries() -> list[Entry]:
    """Of a run, with hostile texts wherever there can be one."""
    numbers = bytes(16)
    begun = StartEntry(
        run=LINES, step=0, time=LINES, command=[LINES, LINES], folder=LINES, python=LINES,
        module=LINES, script="", script_digest=LINES, flags={LINES: LINES, "OMP_PLACES": LINES},
        libraries={LINES: LINES}, devices=[LINES], description={LINES: LINES},
    )  # fmt: skip
    step = StepEntry(
        step=1, epoch=0, samples=4, loss=1.0, weight=1.0, norm=1.0, rates=[0.1], totals=numbers,
        weights=numbers, name=LINES, skipped=LINES, values={LINES: 1.0}, outputs=[LINES],
    )  # fmt: skip
    return [
        begun,
        step,
        Result(step=1, call=LINES, line=LINES, value=None, digest=LINES),
        BlockEntry(step=1, line=LINES, digest=1),
        SavedEntry(step=1, folder=LINES, line=LINES),
        FailureEntry(step=1, line=LINES, error=LINES, text=LINES),
    ]


def recorded(folder: Path, kind: type[Entry] = StepEntry, **changed: Any) -> Path:
    folder.mkdir()
    writer = FrameWriter(folder / FILE)
    for each in entries():
        writer.append(encode(replace(each, **changed) if isinstance(each, kind) else each))
    writer.close()
    return folder


FINDINGS = Findings(
    step=1, name=LINES, samples=4, begun=0, differs=[LINES], loss=1.0, norm=1.0, totals=[1.0],
    weights=[1.0], digests=[1], parameters={}, layers=[
        LayerFinding(name=LINES, norm=1.0, given=True, of_parameter=1.0)
    ],
    shards=[
        ShardFinding(
            shard=0, total=1.0, equal=False, norm=None, bad_gradients=[LINES], operations=[],
            samples=[SampleFinding(place=0, number=0, loss=1.0, finite=False, words=LINES)],
            first=ShardOperation(LINES, LINES, LINES, LINES, None, False, ""),
        )
    ],
)  # fmt: skip


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is computed again has hostile findings."""
    monkeypatch.setattr(StepReplay, "inspect_step", lambda self, step, **asked: FINDINGS)


def test_record_show(tmp_path: Path, say: Say) -> None:
    run = str(recorded(tmp_path / "run"))
    assert SHOWN in say("record", "show", run)
    assert SHOWN in say("record", "show", run, "--step", "1")
    for words in ([], ["--step", "1"]):
        for line in say("record", "show", run, "--json", *words).splitlines():
            assert EVIL in str(json.loads(line)).encode().decode("unicode_escape")


@pytest.mark.usefixtures("computed")
@for_each("command", [["replay", "--step", "1", "--shard", "0"], ["why"], ["why", "--step", "1"]])
def test_what_is_computed_again(tmp_path: Path, say: Say, command: list[str]) -> None:
    name, *words = command
    shown = say(name, str(recorded(tmp_path / "run")), *words)
    assert SHOWN in shown
    assert "\nonefold: forged" not in shown


@pytest.mark.usefixtures("computed")
@for_each(
    ("kind", "changes"),
    [
        (StepEntry, {"name": f"other {LINES}"}),
        (StepEntry, {"skipped": f"other {LINES}"}),
        (Result, {"digest": ""}),
        (StartEntry, {"description": {f"other {LINES}": LINES}, "command": [LINES]}),
    ],
)
def test_compare(tmp_path: Path, say: Say, kind: type[Entry], changes: dict[str, Any]) -> None:
    one = recorded(tmp_path / "one")
    shown = say("compare", str(one), str(recorded(tmp_path / "two", kind, **changes)))
    assert SHOWN in shown
    assert "\nonefold: forged" not in shown


@for_each("command", ["replay", "why"])
def test_what_is_to_be_confirmed_is_shown_as_it_is(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(onefold.Record, "is_foreign", True)
    shown = say(command, str(recorded(tmp_path / "run")), "--step", "1")
    assert "pass --yes" in shown
    assert f"in folder $'{SHOWN}\\nonefold: forged' with OMP_PLACES=$'" in shown
    assert "\nonefold: forged" not in shown


def test_the_words_of_a_shell(tmp_path: Path) -> None:
    name = "it's \\ \x1b\u202e\x9b"
    done = subprocess.run(["bash", "-c", f"printf %s {in_shell(name)}"], stdout=subprocess.PIPE)
    assert done.stdout.decode() == name


def test_messages_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("onefold", "onefold.waiting"):
        logging.getLogger(name).warning("%s: %d", LINES, 3)
    assert [each.getMessage() for each in caplog.records] == [f"{SHOWN}\nonefold: forged: 3"] * 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of a job, and its data."""
    pytest.importorskip("PIL.Image", reason='needs pip install "onefold-jobs[images]"')
    folder = tmp_path_factory.mktemp("trained")
    data = write_pictures(folder / "data")
    with on_cpu():
        run, _ = run_here("classify", data, folder, name="run", model="lenet", lr=0.02)
    return run, data


def changed(run: Path, folder: Path, text: str) -> Path:
    """A copy of a run in whose facts one text is hostile, wherever it stands."""
    copy = Path(shutil.copytree(run, folder / f"copy-{len(list(folder.iterdir()))}"))
    facts = (copy / "run.json").read_text()
    (copy / "run.json").write_text(facts.replace(f'"{text}"', json.dumps(f"{text} {LINES}\ud800")))
    assert (copy / "run.json").read_text() != facts
    return copy


@pytest.mark.full
def test_folders_of_runs(trained: tuple[Path, Path], tmp_path: Path, say: Say) -> None:
    run, data = trained
    picture, shown = str(next((data / "test" / "apple").iterdir())), {}
    with on_cpu() as patch:
        patch.setattr(onefold, "launch", direct)
        for place in ("classify", "apple", "accuracy"):
            copy = changed(run, tmp_path, place)
            given = ("--runs", str(tmp_path), "--name", copy.name, "--resume", "--epochs", "2")
            shown[place] = {
                "evaluate": say("evaluate", str(copy), str(data)),
                "predict": say("predict", str(copy), picture)
                + say("predict", str(copy), picture, "--json"),
                "export": say("export", str(copy), "--to", "safetensors"),
                "train": say("train", "classify", *given),
            }
    say("replay", str(changed(run, tmp_path, "classify")), "--step", "1")
    say("report", str(copy))
    assert all(SHOWN in text for text in shown["classify"].values())
    assert SHOWN in shown["apple"]["evaluate"]
    assert SHOWN in shown["apple"]["predict"]


@pytest.mark.full
def test_configurations(trained: tuple[Path, Path], tmp_path: Path, say: Say) -> None:
    run, data = trained
    words = "".join(f"\\u{ord(each):04x}" for each in LINES)
    for number, line in enumerate((f'model = "{words}"', f'"{words}" = 1')):
        config = tmp_path / f"{number}.toml"
        config.write_text(line)
        given = ("classify", "--data", str(data), "--config", str(config))
        assert SHOWN in say("train", *given)
        assert SHOWN in say("tune", *given, "--search", "lr=1e-3:1e-2")
        copy = Path(shutil.copytree(run, tmp_path / f"run-{number}"))
        (copy / "config.toml").write_text(line)
        say("train", "classify", "--runs", str(tmp_path), "--name", copy.name, "--resume")
        say("predict", str(copy), str(data))


def test_every_command_is_looked_at() -> None:
    looked_at = {"record", "replay", "why", "compare", "tune", *USES_OF_A_RUN}
    command: Any = get_command(app)
    assert looked_at | READ_NOTHING == set(command.list_commands(None))
