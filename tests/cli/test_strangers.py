"""Records and bundles of other people: nothing of theirs runs unless the user agrees to it."""

import math
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from onefold.cli.main import main
from onefold.cli.replay import StepReplay
from onefold.record import FILE, Record
from onefold.record.entries import Entry, FrameWriter, StartEntry, StepEntry, encode, read_frames
from onefold.record.findings import Findings
from tests.cli.test_replaying import onefold
from tests.tables import for_each

NOBODY = 65534
SCRIPT = """
import pathlib, torch, onefold
pathlib.Path(__file__).with_name("ran").touch()
import helper
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
trainer = onefold.Trainer(model, optimizer, lambda m, b: m(b).square().mean(1), shards=2)
for _ in range(2):
    trainer.step(torch.ones(4, 2))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was begun in a folder beside that of its script."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "own").mkdir()
    (folder / "own" / "train.py").write_text(SCRIPT)
    (folder / "own" / "helper.py").touch()
    code, text = onefold(folder, "run", "--devices", "cpu:1", "--record", "own/run", "own/train.py")
    assert code == 0, text
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the run, whose record names the script where it was."""
    (made / "own" / "ran").unlink(missing_ok=True)
    return Path(shutil.copytree(made / "own" / "run", tmp_path / "run"))


def of_somebody_else(run: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(run / FILE, NOBODY, NOBODY)


def typed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command that ends with code 2 says, without a terminal."""
    monkeypatch.setattr("sys.argv", ["onefold", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    return capfd.readouterr().err


@pytest.mark.processes
def test_modules_where_a_run_was_started_are_not_imported(made: Path, run: Path) -> None:
    """Those beside the script are, as in the run itself."""
    shadow = f"open({str(made / 'shadow')!r}, 'w')\nraise SystemExit(3)\n"
    for name in ("typer", "torch", "msgspec", "encodings", "onefold"):
        (made / f"{name}.py").write_text(shadow)
    code, text = onefold(run.parent, "replay", "run", "--step", "2")
    assert code == 0, text
    assert "4 shards have the bits of the record" in text
    assert not (made / "shadow").exists()


@pytest.mark.parametrize("command", ["replay", "why", "compare"])
def test_a_record_of_another_user_is_shown_and_not_run(
    made: Path,
    run: Path,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    of_somebody_else(run)
    begun, words = started(run), ["--step", "2"]
    if command == "compare":
        words = [str(changed(run))]
    said = typed(monkeypatch, capfd, command, str(run), *words)
    assert "run.record belongs to another user, and has the command above" in said
    assert "pass --yes if you trust its author" in said
    assert f"{made / 'own' / 'train.py'}" in said
    assert f"in folder {begun.folder}" in said
    assert not (made / "own" / "ran").exists()


def started(run: Path) -> StartEntry:
    (begun,) = (each for each in Record(run).entries if isinstance(each, StartEntry))
    return begun


def changed(run: Path) -> Path:
    """A second run whose second step has another loss."""
    other = run.with_name("other")
    shutil.copytree(run, other)
    forge(other, StepEntry, totals=bytes(16))
    return other


def test_variables_that_run_code_are_never_taken_from_a_record(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    of_somebody_else(run)
    flags = {"OMP_NUM_THREADS": "3", "OMP_TOOL_LIBRARIES": "/tmp/evil.so", "LD_PRELOAD": "x"}
    forge(run, StartEntry, flags=flags)
    said = typed(monkeypatch, capfd, "replay", str(run), "--step", "2")
    assert "with OMP_NUM_THREADS=3" in said
    assert "without LD_PRELOAD, OMP_TOOL_LIBRARIES, which the run had set" in said
    assert "evil" not in said


def forge(run: Path, kind: type[Entry], **changes: object) -> None:
    """Write the record anew, with entries of a kind changed."""
    entries, path = Record(run).entries, run / FILE
    owner = path.stat().st_uid
    path.unlink()
    writer = FrameWriter(path)
    for each in entries:
        writer.append(encode(replace(each, **changes) if isinstance(each, kind) else each))
    writer.close()
    os.chown(path, owner, owner)


def test_a_bundle_runs_only_if_the_user_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.zip"
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr("about.json", "{}")
        bundle.writestr("step.pt", b"cos\nsystem\n(S'touch /tmp/ran'\ntR.")
    said = typed(monkeypatch, capfd, "replay", str(path))
    assert f"{path} is a bundle, which contains code." in said
    assert "pass --yes" in said


def test_a_record_of_any_number_of_differences_is_compared_in_few_lines(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    of_somebody_else(run)
    other = changed(run)
    forge(other, StartEntry, libraries={f"{n:05}": "1" for n in range(20_000)})
    forge(other, StepEntry, step=7)
    monkeypatch.setattr("sys.argv", ["onefold", "compare", str(run), str(other)])
    with pytest.raises(SystemExit):
        main()
    said = capfd.readouterr().out
    assert "more differences" in said
    assert said.count("\n") < 300


ABOUT = b'{"step": 1, "scale": 0.0, "description": {}}'
BUNDLES: dict[str, tuple[dict[str, bytes], int, str]] = {
    "nothing in it": ({}, 0, "no item named 'about.json'"),
    "no step": ({"about.json": ABOUT}, 0, "no item named 'step.pt'"),
    "fields missing": ({"about.json": b"{}"}, 0, "missing required field `step`"),
    "a list": ({"about.json": b"[]"}, 0, "Expected `object`"),
    "wrong fields": ({"about.json": ABOUT.replace(b"1", b'"x"')}, 0, "Expected `int`, got `str`"),
    "no step of a run": ({"about.json": ABOUT.replace(b"1", b"0")}, 0, "Expected `int` >= 1"),
    "wrong texts": ({"about.json": ABOUT.replace(b"{}", b'{"a": [1]}')}, 0, "Expected `str`"),
    "no JSON": ({"about.json": b"\xff\xfe"}, 0, "is malformed"),
    "nested": ({"about.json": b'{"a":' + b"[" * 100_000}, 0, "ecursion"),
    "compressed": ({"about.json": ABOUT + bytes(1 << 24)}, zipfile.ZIP_DEFLATED, "are compressed"),
    "large": ({"about.json": ABOUT + bytes(1 << 26)}, 0, "is too large"),
    "no entry": ({"about.json": ABOUT, "step.pt": b"", "entry": b"\x80"}, 0, "its entry"),
}


@for_each("kind", BUNDLES)
def test_bundles_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    parts, compression, words = BUNDLES[kind]
    path = tmp_path / "step.zip"
    with zipfile.ZipFile(path, "w", compression) as bundle:
        for name, content in parts.items():
            bundle.writestr(name, content)
    said = typed(monkeypatch, capfd, "replay", str(path), "--yes")
    assert f"{path} is not a bundle of onefold replay" in said
    assert words in said
    path.write_bytes(path.read_bytes().replace(b"about", b"ab\0ut"))
    assert "is not a bundle" in typed(monkeypatch, capfd, "replay", str(path), "--yes")


ODD: tuple[Any, ...] = (
    -1,
    1 << 63,
    None,
    "x",
    b"x",
    [],
    ["step-00000001/../.."],
    {},
    {"x": b"x"},
    math.nan,
)


@pytest.mark.full
def test_whatever_an_entry_says_there_is_no_traceback(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fields = [
        (number, name)
        for number, each in enumerate(Record(run).entries)
        for name in each.__struct_fields__
    ]
    frames, whole = [each.body for each in read_frames(run / FILE)[0]], str(run)
    edited, ended = run.with_name("edited"), 0
    edited.mkdir()
    bodies = [
        *((number, [body]) for number, body in enumerate(map(deep, frames))),
        *((n, [odd_body(frames[n], name, odd)]) for n, name in fields for odd in ODD),
    ]
    for number, (body,) in bodies:
        (edited / FILE).unlink(missing_ok=True)
        writer = FrameWriter(edited / FILE)
        for place, each in enumerate(frames):
            writer.append(body if place == number else each)
        writer.close()
        for words in (("record", "show"), ("why",), ("compare", whole)):
            with monkeypatch.context() as patch:
                patch.setattr("sys.argv", ["onefold", *words, str(edited)])
                patch.setattr(
                    StepReplay, "inspect_step", lambda self, step, **asked: Findings(step=1)
                )
                with pytest.raises(SystemExit) as end:
                    main()
            ended += end.value.code == 2
    assert ended > len(bodies)


def odd_body(body: bytes, name: str, value: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(body), name: value})


def deep(body: bytes) -> bytes:
    """With a field that later versions may have, nested without end."""
    return bytes([body[0] + 1]) + body[1:] + b"\xa1x" + b"\x91" * 100_000 + b"\xc0"


@pytest.mark.full
@pytest.mark.processes
def test_a_replay_leaves_no_log_behind(
    made: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = made / "own" / "train.py"
    script.write_text(SCRIPT + "print('a line of each device')\n")
    monkeypatch.setenv("TMPDIR", str(made / "own"))
    code, text = onefold(run.parent, "replay", str(run), "--step", "2", "--devices", "cpu:2")
    assert code == 0, text
    assert not list((made / "own").glob("onefold-*"))
