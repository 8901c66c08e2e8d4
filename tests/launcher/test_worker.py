"""What a worker's script finds, and what becomes of the processes that it makes."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import onefold
from onefold.core.options import LaunchContext
from onefold.launcher.environment import current_context, take_context
from tests.small import make_trainer, points
from tests.tables import some

fresh = pytest.mark.fresh  # how a process starts is what is tested

SOURCE = str(Path(onefold.__file__).parent.parent)
COMMAND = "from onefold.cli.main import main\nmain()\n"
"""As pip installs it: without the current folder on the path."""


def run(
    folder: Path, *words: str, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """``onefold run``, with its temporary files in a folder of their own, empty at the end."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "onefold").write_text(COMMAND)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    clean["TORCHINDUCTOR_CACHE_DIR"] = str(folder)  # or PyTorch makes one among temporary files
    # Not in the test's own folder: its path may be too long for the sockets of a loader's workers.
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        done = subprocess.run(
            [sys.executable, str(folder / "bin" / "onefold"), "run", *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            cwd=cwd or folder,
            env={**clean, "PYTHONPATH": SOURCE, "TMPDIR": temporary, **variables},
        )
        assert list(Path(temporary).iterdir()) == []
    return done


def said_by_child(call: object) -> str:
    """What a call says in a forked child, or the exception that it raises there."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(call())  # type: ignore[operator]
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


def test_the_record_of_a_worker_is_taken_out_of_the_environment() -> None:
    mine = LaunchContext(rank=1, size=2, launcher="onefold")
    environment = {"ONEFOLD_CONTEXT": mine.to_json(), "RANK": "1", "HOME": "/home"}
    assert take_context(environment) == mine
    assert environment == {"RANK": "1", "HOME": "/home"}
    assert not take_context(environment).launched


def said_by_children_of_a_device() -> list[str]:
    calls = (
        lambda: make_trainer(devices=None, shards=1),
        lambda: onefold.launch(len, devices="cpu:1"),
        lambda: current_context().launched,
    )
    return [str(os.getpid()), *(said_by_child(call) for call in calls)]


@pytest.mark.processes
def test_a_forked_child_of_a_device_is_not_the_device() -> None:
    parent, *said = onefold.launch(said_by_children_of_a_device, devices="cpu:1")
    for words in said:
        assert words.startswith("LaunchError: process ")
        assert f"was forked from process {parent}, which is device 0 of a run" in words
        assert "and is not part of the run itself" in words
    assert said_by_child(lambda: current_context().launched) == "False", "of no run"


def test_a_trainer_is_of_no_use_in_a_forked_child(tmp_path: Path) -> None:
    mine = make_trainer()
    mine.step(points(8))
    for call in (
        lambda: mine.step(points(8)),
        lambda: mine.save(tmp_path),
        lambda: mine.load(tmp_path, if_any=True),
        lambda: mine.gather({}),
        mine.barrier,
        mine.close,
    ):
        words = said_by_child(call)
        assert words.startswith(f"RuntimeError: this Trainer was created in process {os.getpid()}")
    assert list(tmp_path.iterdir()) == []
    assert mine.step(points(8)).number == 2


SHADOWS = ("pickle", "json", "typing_extensions", "sympy", "numpy", "cloudpickle")
PATH = "import json, sys\nimport helper\nprint(json.dumps(sys.path))\n"


@fresh
@pytest.mark.processes
@pytest.mark.parametrize(
    "how", ["link", *(pytest.param(how, marks=pytest.mark.full) for how in ("module", "safe"))]
)
def test_the_current_folder_is_no_place_of_libraries(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "everybodys"
    folder.mkdir()
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'shown')!r}, 'a').write('run')")
    (folder / "helper.py").touch()
    (folder / "train.py").write_text(PATH if how != "safe" else PATH.replace("import helper", ""))
    (tmp_path / "link.py").symlink_to(folder / "train.py")
    words = {"module": ["-m", "train"], "link": [str(tmp_path / "link.py")]}.get(how, ["train.py"])
    variables = {"PYTHONSAFEPATH": "1"} if how == "safe" else {}
    done = run(tmp_path, "--devices=cpu:1", *words, cwd=folder, **variables)
    assert done.returncode == 0, done.stderr
    path = json.loads(done.stdout)
    assert not (tmp_path / "shown").exists()
    assert (str(folder) in path) == (how != "safe")
    assert path[how != "safe"] == SOURCE, "an entry of somebody else was overwritten"


def clean_up_and_return() -> int:
    """As a cleaner of temporary files does meanwhile."""
    for each in Path(tempfile.gettempdir()).iterdir():
        shutil.rmtree(each, ignore_errors=True)
    return os.getpid()


@pytest.mark.processes
def test_a_call_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert onefold.launch(clean_up_and_return, devices="cpu:1") != os.getpid()
    assert [each for each in tmp_path.iterdir() if not each.name.startswith("torch")] == []


RAISES = """
import torch, onefold
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = onefold.Trainer(model, optimizer, lambda m, b: m(b).mean(1) * {factor}, shards={shards})
trainer.step(torch.ones(4, 2))
"""


CAUSED = """
import torch, onefold
open("model.safetensors", "wb").write((8).to_bytes(8, "little") + b"{{broken}}")
try:
    onefold.load_weights(torch.nn.Linear(2, 1), "model.safetensors")
except onefold.errors.OnefoldError as error:
    raise {error}
"""


@pytest.mark.parametrize("error", some(["", "RuntimeError() from error", "RuntimeError()"], 2))
def test_causes_of_our_errors_come_without_frames_of_ours(tmp_path: Path, error: str) -> None:
    (tmp_path / "train.py").write_text(CAUSED.format(error=error))
    done = run(tmp_path, "--devices", "cpu:1", "train.py")
    trace = done.stderr[done.stderr.index("Traceback") : done.stderr.index("\nonefold: device 0")]
    assert trace.count("Traceback") == 2 + bool(error), trace
    assert trace.count('train.py", line') == 1 + bool(error), trace
    assert f'File "{SOURCE}/onefold/' not in trace, trace


@pytest.mark.parametrize(
    ("factor", "shards", "error", "ours"),
    some(
        [
            ('float("nan")', 2, "onefold.errors.LossError: ", 0),
            ("1.0", 0, "ValueError: ", 0),
            ("1.0", '"x"', "TypeError: ", 0),
            ("b.lost", 2, "AttributeError: ", 1),
        ],
        3,
    ),
)
def test_errors_of_ours_come_without_frames_of_ours(
    tmp_path: Path, factor: str, shards: object, error: str, ours: int
) -> None:
    """Also where an argument is refused. Others keep them: they may be a mistake in onefold."""
    (tmp_path / "train.py").write_text(RAISES.format(factor=factor, shards=shards))
    done = run(tmp_path, "--devices", "cpu:1", "train.py")
    trace = done.stderr[done.stderr.index("Traceback") : done.stderr.index("\nonefold: device 0")]
    assert f"\n{error}" in trace
    assert trace.count('train.py", line') == 1 + ours
    assert (f'File "{SOURCE}/onefold/' in trace) == bool(ours), trace
