"""In IPython: results are tables, an interrupt is one line, and messages name what works there."""

import ast
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from IPython.core.formatters import DisplayFormatter

import onefold
import onefold_jobs
from onefold.checkpoint.folder import Checkpoint
from onefold.integrations import ipython
from onefold.launcher.devices import DeviceInfo, Selection
from onefold.launcher.workers import Outcome
from onefold.session.data_calls import Results
from onefold.watch.timing import PhaseTime
from onefold_jobs.catalog import JobResult, LoadedRun
from tests.cli.test_hostile_text import EVIL, is_harmless, recorded
from tests.small import Batch, make_trainer, points, square
from tests.warm import SCRIPTS

SOURCES = [Path(each.__path__[0]) for each in (onefold, onefold_jobs)]


@pytest.fixture
def shell() -> Any:
    """What this module uses of IPython's shell; a real one would replace ``__main__``."""
    made: Any = SimpleNamespace(
        display_formatter=DisplayFormatter(), custom_exceptions=(), shown=[]
    )

    def set_custom_exc(kinds: Any, handler: Any) -> None:
        made.custom_exceptions, made.handler = kinds, handler

    def showtraceback(exc: Any, tb_offset: int | None) -> None:
        made.shown.append(getattr(exc[1], "_render_traceback_", lambda: ["a traceback"])())

    made.set_custom_exc, made.showtraceback = set_custom_exc, showtraceback
    ipython.load_ipython_extension(made)
    return made


def html(shell: Any, value: object) -> str:
    shown: dict[str, str] = shell.display_formatter.format(value)[0]
    assert shown["text/plain"]
    return shown.get("text/html", "")


def results(tmp_path: Path) -> Iterator[object]:
    """An object of each class that has a table, with hostile texts wherever there can be one."""
    trainer = make_trainer()
    step = trainer.step(points(8))
    yield step
    yield step.seconds
    yield trainer.evaluate(lambda m, x: {f"<b>{EVIL}": m(x)}, torch.ones(8, 3), batch_size=4)
    yield trainer.predict(lambda m, x: {"<b>": m(x)}, torch.ones(8, 3), batch_size=4)
    yield onefold.Record(recorded(tmp_path / "run", name=EVIL + "<b>"))
    path = Path(f"<b>{EVIL}")
    yield Checkpoint(folder=path, step=1, epoch=0, scores={f"<b>{EVIL}": 1.0}, extra=path)
    yield DeviceInfo(index=0, kind="cuda", name=f"<b>{EVIL}", total_bytes=1, free_bytes=1)
    yield Selection(devices=(f"<b>{EVIL}",))
    yield Outcome(exit_code=1, message=f"<b>{EVIL}")
    yield JobResult(folder=path, epoch=3, scores={f"<b>{EVIL}": 0.9}, report=path)
    yield LoadedRun(
        job="text", module=torch.nn.Linear(1, 1), preprocess=lambda _: {}, classes=(f"<b>{EVIL}",),
        weights=path, description={},
    )  # fmt: skip


def test_every_result_is_a_table_of_harmless_text(shell: Any, tmp_path: Path) -> None:
    seen = set()
    for value in results(tmp_path):
        shown = html(shell, value)
        assert shown.startswith("<table>"), value
        assert is_harmless(shown), ascii(shown)
        assert "<b>" not in shown
        seen.add((type(value).__module__, type(value).__qualname__))
    assert seen == ipython.TABLES.keys()
    assert isinstance(Results(a=1.0), dict)
    assert repr(Results(a=1.0)) == "{'a': 1.0}"
    assert html(shell, {"a": 1.0}) == ""  # not a result


def test_tables_show_numbers_and_shapes(shell: Any) -> None:
    step = make_trainer().step(points(8))
    assert f"<td>loss</td><td>{float(step.loss):.6g}</td>" in html(shell, step)
    assert "skipped" not in html(shell, step)
    assert "Tensor (8, 2), torch.float32" in html(shell, Results(logits=torch.ones(8, 2)))
    seconds = PhaseTime(data=0.5, forward=0.25, backward=0.1, exchange=0.0, update=0.05)
    assert "limited by data" in html(shell, seconds)


def interrupted(run: Any) -> tuple[type[BaseException], BaseException, Any]:
    with pytest.raises(KeyboardInterrupt) as caught:
        run()
    return caught.type, caught.value, caught.tb


def test_an_interrupt_shows_the_line_of_the_script(shell: Any) -> None:
    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        if not came:
            came.append(1)
            signal.raise_signal(signal.SIGINT)
        return square(model, batch)

    came: list[int] = []
    trainer = make_trainer(loss=loss)

    def step() -> None:
        trainer.step(points(8))

    kind, error, trace = interrupted(step)
    shell.handler(shell, kind, error, trace)
    line = step.__code__.co_firstlineno + 1
    words = f"stopped in line {line}, trainer.step(points(8)); %tb shows the traceback"
    assert shell.shown == [[f"KeyboardInterrupt: {words}"]]
    assert trainer.steps == 1  # it ended first
    assert not vars(error)  # %tb shows the frames

    def other() -> None:
        raise KeyboardInterrupt

    shell.handler(shell, *interrupted(other))
    assert shell.shown[1:] == [["a traceback"]]


@pytest.mark.processes
@pytest.mark.fresh
def test_a_real_kernel_goes_on_after_an_interrupt() -> None:
    script = [sys.executable, str(SCRIPTS / "interrupted_kernel.py")]
    done = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    shown = json.loads(done.stdout.splitlines()[-1])
    (error,) = (content["traceback"] for content in shown if "traceback" in content)
    words = "KeyboardInterrupt: stopped in line 7, trainer.step(torch.ones(8, 3))"
    assert error == [f"{words}; %tb shows the traceback"]
    (result,) = (content["data"]["text/plain"] for content in shown if "data" in content)
    assert result.startswith("(True, Step(number=")


def test_the_handler_of_another_program_stays(shell: Any) -> None:
    shell.set_custom_exc((ValueError,), "theirs")
    ipython.load_ipython_extension(shell)
    assert (shell.custom_exceptions, shell.handler) == ((ValueError,), "theirs")


def test_without_a_shell_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    ipython.load()  # IPython is imported here, but does not run
    monkeypatch.delitem(sys.modules, "IPython")
    ipython.load()


# Messages


def test_only_one_function_reads_the_program_for_messages() -> None:
    """Elsewhere a notebook's kernel would be named as the script."""
    reads = {
        path.relative_to(source).as_posix()
        for source in SOURCES
        for path in source.rglob("*.py")
        if "sys.argv" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.argv"
    }
    # The others are programs of the launcher, and read or set their own arguments.
    assert reads == {"system/words.py", "worker.py", "launcher/part.py"}


def test_nothing_names_the_kernel_of_a_notebook(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr("sys.argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    monkeypatch.setattr("onefold.session.forming.cores", lambda: 16)
    caplog.set_level(logging.DEBUG)
    trainer = make_trainer()
    trainer.record(tmp_path)
    trainer.step(points(8))
    assert onefold.Record(tmp_path).begins[0]["command"] == []
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert b"ipykernel_launcher" not in b"".join(files)
    assert "ipykernel" not in caplog.text
