"""What is not finite is found before it takes the place of what is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from onefold.checkpoint.folder import try_directory
from onefold.core.finite import all_finite, first_not_finite, names_with_nan
from onefold.errors import LossError, StateError
from tests.checkpoint.folders import full_disk, names_in, steps_in
from tests.small import line, make_trainer, points, square
from tests.tables import for_each

SCRIPT = Path(__file__).parent.parent / "scripts" / "poisoned.py"
BAD = [float("nan"), float("inf"), float("-inf")]
TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", TYPES)
@given(place=st.integers(0, 4999), bad=st.sampled_from(BAD))
def test_one_bad_value_is_found_wherever_it_is(dtype: torch.dtype, place: int, bad: float) -> None:
    values = torch.full((5000,), -0.5, dtype=dtype)
    assert all_finite(values)
    values[place] = bad
    assert not all_finite(values)


@for_each("dtype", TYPES[:4])
def test_a_sum_that_overflows_is_no_alarm(dtype: torch.dtype) -> None:
    assert all_finite(torch.full((5000,), torch.finfo(dtype).max, dtype=dtype))


def test_infinities_of_either_sign_do_not_hide_each_other() -> None:
    assert not all_finite(torch.tensor([float("inf"), float("-inf"), 1.0]))


def test_whole_numbers_and_nothing_are_finite() -> None:
    assert all_finite(torch.arange(5))
    assert all_finite(torch.empty(0))
    assert all_finite(torch.ones(4).to(torch.float8_e4m3fn))
    assert not all_finite(torch.full((4,), float("nan")).to(torch.float8_e4m3fn))


def test_the_first_one_is_named() -> None:
    tensors = {"one": torch.ones(3), "two": torch.full((3,), float("inf")), "three": torch.ones(3)}
    assert first_not_finite(tensors.values(), tensors) == "two"
    tensors["two"] = torch.ones(3)
    assert first_not_finite(tensors.values(), tensors) is None


def test_a_mask_of_infinities_has_no_nan() -> None:
    mask = torch.full((3,), float("-inf"))
    assert names_with_nan({"mask": mask, "spoilt": torch.tensor([float("nan")])}) == {"spoilt"}


class Poisoning(torch.optim.SGD):
    """Makes something that is not finite of a gradient that is, while it is on."""

    on = False

    def step(self, closure: object = None) -> None:
        super().step()
        for weight in self.param_groups[0]["params"] if self.on else ():
            weight.data.fill_(float("nan"))


@for_each("devices", [1, 2])
@for_each("wait", [True, False])
def test_a_poisoned_step_does_not_replace_a_good_one(
    tmp_path: Path, devices: int, wait: bool
) -> None:
    model = line()
    optimizer = Poisoning(model.parameters(), lr=0.1)
    trainer = make_trainer(model, optimizer=optimizer, devices=devices)
    trainer.step(points(8))
    trainer.save(tmp_path, keep=1, wait=wait)
    good = trainer.fingerprint()
    optimizer.on = True
    trainer.step(points(8))
    message = "parameter weight is not finite after step 2: no checkpoint is written"
    with pytest.raises(StateError, match=message):
        trainer.save(tmp_path, keep=1, wait=wait)
    assert steps_in(tmp_path) == [1]
    trainer.load(tmp_path)
    assert trainer.fingerprint() == good
    optimizer.on = False
    trainer.step(points(8))
    assert trainer.save(tmp_path, keep=1).name == "step-00000002"


def test_large_parameters_are_saved(tmp_path: Path) -> None:
    model = line(4000)
    with torch.no_grad():
        model.weight.fill_(3e38)
    make_trainer(model).save(tmp_path)
    assert steps_in(tmp_path) == [0]


def with_buffers() -> nn.Module:
    """A mask, a value that is not known yet, and a mean."""
    model = line()
    model.register_buffer("mask", torch.full((3,), float("-inf")))
    model.register_buffer("best", torch.tensor(float("nan")))
    model.register_buffer("mean", torch.zeros(3))
    return model


def test_a_buffer_may_be_as_it_was_but_not_become_nan(tmp_path: Path) -> None:
    trainer = make_trainer(with_buffers())
    trainer.save(tmp_path)
    trainer.step(points(8))
    trainer.model.mean.fill_(float("inf"))
    trainer.save(tmp_path)
    trainer.model.mean[1] = float("nan")
    with pytest.raises(StateError, match="buffer mean is not finite after step 1"):
        trainer.save(tmp_path)
    trainer.load(tmp_path)
    trainer.step(points(8))
    trainer.save(tmp_path)


class Breaking(torch.optim.SGD):
    """Breaks off in the middle of an update, once."""

    broken = True

    def step(self, closure: object = None) -> None:
        super().step()
        if self.broken:
            self.broken = False
            raise KeyboardInterrupt


def test_a_step_that_broke_off_in_its_update_is_not_saved(tmp_path: Path) -> None:
    model = line()
    optimizer = Breaking(model.parameters(), lr=0.1)
    trainer = make_trainer(model, optimizer=optimizer)
    trainer.save(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trainer.step(points(8))
    for _ in range(2):
        with pytest.raises(StateError, match=r"the step after step \d broke off while"):
            trainer.save(tmp_path)
        trainer.step(points(8))
    assert steps_in(tmp_path) == [0]
    trainer.load(tmp_path)
    trainer.step(points(8))
    trainer.save(tmp_path)
    assert steps_in(tmp_path) == [0, 1]


def test_a_step_that_was_refused_and_survived_can_be_saved(tmp_path: Path) -> None:
    trainer = make_trainer(loss=lambda m, b: square(m, b) * (1 if trainer.steps else nan))
    nan = float("nan")
    with pytest.raises(LossError, match="is nan"):
        trainer.step(points(8))
    nan = 1.0
    trainer.step(points(8))
    trainer.save(tmp_path)
    assert steps_in(tmp_path) == [1]


# In launched runs.


def run(folder: Path, kind: str, times: int, *options: str) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    (folder / "happened").mkdir()
    command = [sys.executable, "-m", "onefold", "run", "--checkpoint", str(folder / "kept")]
    done = subprocess.run(
        [*command, *options, str(SCRIPT), kind, str(folder / "happened"), str(times)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    return done.returncode, done.stdout, done.stderr


launched = pytest.mark.parametrize(
    ("devices", "exchange"),
    [
        ("cpu:1", "auto"),
        pytest.param("cpu:2", "shared", marks=pytest.mark.full),
        pytest.param("cpu:2", "collective", marks=pytest.mark.full),
    ],
)


@pytest.mark.processes
@launched
def test_a_run_goes_on_from_before_a_poisoned_step(
    tmp_path: Path, devices: str, exchange: str
) -> None:
    options = "--every", "1", "--keep-last", "1", "--devices", devices, "--exchange", exchange
    code, output, errors = run(tmp_path, "update", 1, *options, "--restarts", "2")
    assert code == 0, errors
    assert output.splitlines()[-1].startswith("end 8 ")
    assert "StateError: parameter weight is not finite after step 6" in errors
    assert "going on after step 5" in errors
    assert steps_in(tmp_path / "kept") == [8]


@pytest.mark.processes
@launched
def test_what_fails_in_one_step_again_goes_back_further(
    tmp_path: Path, devices: str, exchange: str
) -> None:
    options = "--every", "1", "--keep-last", "3", "--devices", devices, "--exchange", exchange
    code, _, errors = run(tmp_path, "update", 9, *options, "--restarts", "3")
    assert code == 1
    assert re.findall(r"going on after step (\d+)", errors) == ["5", "4", "3"]
    assert "starting again (1 of 3)\n" in errors
    back = "one checkpoint further back than the newest: it failed in step 7 2 times in a row"
    assert f"starting again (2 of 3), {back}" in errors
    assert "starting again (3 of 3), 2 checkpoints further back than the newest" in errors
    assert 5 in steps_in(tmp_path / "kept")
    assert 6 not in steps_in(tmp_path / "kept")


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(("kind", "last"), [("survived", 7), ("handled", 4), ("closed", 4)])
def test_the_end_of_a_run_that_survived_an_error_is_saved(
    tmp_path: Path, kind: str, last: int
) -> None:
    code, output, errors = run(tmp_path, kind, 0, "--every", "1000", "--devices", "cpu:1")
    assert (code, errors) == (0, "")
    assert output.startswith(f"end {last} ")
    assert steps_in(tmp_path / "kept") == [last]


@pytest.mark.full
@pytest.mark.processes
def test_several_devices_that_close_while_they_handle_an_error_are_saved(tmp_path: Path) -> None:
    code, _, errors = run(tmp_path, "closed", 0, "--every", "1000", "--devices", "cpu:2")
    assert (code, errors) == (0, "")
    assert steps_in(tmp_path / "kept") == [4]


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_a_directory_that_cannot_be_written_to_is_refused_at_the_start(
    tmp_path: Path, devices: str
) -> None:
    """One in which not even root can make a file."""
    options = "--checkpoint", "/proc/tty", "--every", "1000", "--devices", devices
    code, output, errors = run(tmp_path, "survived", 0, *options)
    assert (code, output) == (1, "")
    assert "/proc/tty: expected a directory that checkpoints can be written to, got" in errors
    assert "in step 0 (before the first step)" in errors
    assert names_in(tmp_path / "happened") == set()


@for_each("below", ["", "deeper/still"])
def test_a_file_in_place_of_the_directory_is_told(tmp_path: Path, below: str) -> None:
    (tmp_path / "kept").write_text("mine")
    message = "kept.*: expected a directory that checkpoints can be written to, got"
    with pytest.raises(OSError, match=message):
        try_directory(tmp_path / "kept" / below)
    assert (tmp_path / "kept").read_text() == "mine"


def test_a_directory_without_room_for_a_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="written to, got File too large"), full_disk(64):
        try_directory(tmp_path / "kept")
    try_directory(tmp_path / "kept")
    assert names_in(tmp_path / "kept") == set()
