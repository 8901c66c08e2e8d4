"""What a script prints is shown once, however often its run is stopped."""

import re
from pathlib import Path

import pytest

import onefold
from onefold.record import FILE

SCRIPT = """
import logging, os, subprocess, sys
import torch, onefold

logging.basicConfig(stream=sys.stdout, format="%(message)s")
log = logging.getLogger("mine")
print("begins")
log.warning("of a log that was made before")
if "fails" in sys.argv:
    raise ValueError("on purpose")
if "ends" in sys.argv:
    sys.exit()
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = onefold.Trainer(model, optimizer, lambda m, x: m(x).square().mean(1), shards=2)
print("has a Trainer")
for epoch in trainer.epochs(2):
    for batch in trainer.loader(torch.randn(12, 3), batch_size=4):
        log.warning("epoch %d, step %d: %r", epoch, (s := trainer.step(batch)).number, s.loss)
    print("epoch", epoch)
print("ends")
"""


class Runs:
    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self._folder, self._capfd = folder, capfd
        self._script = folder / "train.py"
        self._script.write_text(SCRIPT)

    def run(self, name: str, devices: int, *words: str, stops_after: int = 0) -> tuple[int, str]:
        """The exit code of a run, and what it printed."""
        saved = self._folder / name
        saved.mkdir(exist_ok=True)
        options = onefold.RunOptions(checkpoint=str(saved), save_every=100, stops_after=stops_after)
        chosen = onefold.select_devices(f"cpu:{devices}")
        code = onefold.supervise([str(self._script), *words], chosen, options).exit_code
        return code, self._capfd.readouterr().out


@pytest.fixture
def runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Runs:
    return Runs(tmp_path, capfd)


@pytest.mark.processes
def test_stopped_and_resumed_it_prints_what_it_prints_as_a_whole(runs: Runs) -> None:
    code, whole = runs.run("whole", 1)
    assert code == 0
    for step, devices in ((1, 1), (5, 2)):
        first = runs.run(f"at {step}", devices, stops_after=step)
        second = runs.run(f"at {step}", 3 - devices)
        assert (first[0], second[0]) == (75, 0)
        assert first[1] + second[1] == whole, step


@pytest.mark.processes
def test_without_an_answer_of_the_record_nothing_is_lost(runs: Runs, tmp_path: Path) -> None:
    begin = "begins\nof a log that was made before\n"
    assert runs.run("run", 1, stops_after=2)[0] == 75
    assert runs.run("run", 1, "ends") == (0, begin)
    assert runs.run("run", 1, "fails") == (1, begin)
    (tmp_path / "run" / FILE).unlink()
    code, shown = runs.run("run", 1)
    assert code == 0
    assert re.match(
        f"{begin}.* so the script is not replayed\\. .*\nhas a Trainer\nepoch 0, step 3", shown
    )
