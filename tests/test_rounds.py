"""Several Trainers of one model, one after the other: what lies between them counts once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onefold
from onefold.engine.assembly import digests_of_held
from tests import simulated
from tests.rounds import ENDS, WAYS, left_alone, run, run_all, written
from tests.small import line, make_trainer, points
from tests.tables import for_each


@for_each("ends", ENDS)
@for_each("name", WAYS)
def test_every_device_of_a_process_has_the_same_rounds(name: str, ends: str) -> None:
    assert run(name, ends, devices=2) == run(name, ends, devices=1)


@for_each(
    ("exchange", "keep"),
    [("shared", "all"), ("shared", "host"), ("collective", "all")],
)
def test_every_process_has_values_of_its_own_and_the_same(exchange: str, keep: str) -> None:
    found = simulated.launch(run_all, devices="cpu:2", exchange=exchange, keep=keep)
    assert found == {key: [run(*key, devices=1)] * 2 for key in found}
    assert len(found) == len(WAYS) * len(ENDS)


# The other one looks at the model while its Trainer is there, which is refused.
IN_PARTS = ("pruning", "folds")


def run_in_parts() -> tuple[str, ...]:
    return tuple(run(name, "close") for name in IN_PARTS)


@for_each(
    ("exchange", "keep"),
    [("shared", "span"), ("shared", "stages"), ("collective", "span"), ("collective", "stages")],
)
def test_devices_that_keep_parts_have_all_of_it_at_the_end(exchange: str, keep: str) -> None:
    found = simulated.launch(run_in_parts, devices="cpu:2", exchange=exchange, keep=keep)
    assert found == tuple(run(name, "close", devices=1) for name in IN_PARTS)


@for_each("exchange", ["shared", "collective"])
@for_each(
    ("where", "how", "name", "words"),
    [
        ("lead", "close", "1.weight", "parameter 1.weight has other values on device 1"),
        ("others", "close", "0.running_mean", "buffer 0.running_mean has other values on device 1"),
        ("everywhere", "close", "1.weight", ""),
        ("everywhere", "not", "1.weight", "parameter 1.weight changed since the call before"),
    ],
)
def test_what_devices_write_alone_is_refused_by_name(
    exchange: str, where: str, how: str, name: str, words: str
) -> None:
    try:
        said = simulated.launch(
            written, args=(where, how, name), devices="cpu:2", exchange=exchange
        )
    except onefold.errors.OnefoldError as error:
        said = str(error)
    assert words in said
    assert bool(words) == bool(said)


def raced() -> None:
    """The last thing that a script does to a model whose Trainer is still there."""
    trainer = make_trainer(model := line(), devices=None)
    trainer.step(points(8))
    with torch.no_grad():
        model.weight.mul_(0.5)


def test_what_is_left_to_chance_at_the_end_of_a_script_is_refused_by_name() -> None:
    with pytest.raises(onefold.errors.OnefoldError, match="weight was changed on device 1 after"):
        simulated.launch(raced, devices="cpu:2")


@for_each("how", ["close", "another takes it"])
def test_a_trainer_that_is_over_makes_no_step(how: str) -> None:
    said = left_alone(how)
    assert "; 0; trainer.step was called after trainer.close(), or after another Trainer" in said
    assert "SGD.step() was called by the script, after a Trainer had" in said


def test_a_refused_trainer_takes_nothing() -> None:
    trainer = make_trainer(model := line())
    with pytest.raises(ValueError, match="clip_norm"):
        make_trainer(model, clip_norm=-1.0)
    assert trainer.step(points(8)).number == 1


def test_the_first_trainer_may_be_given_what_was_drawn_anywhere() -> None:
    """The lead's values become everybody's: of parts that no Trainer has held."""
    model = nn.Sequential(line(), nn.Linear(1, 1))
    make_trainer(model[0]).close()
    assert list(digests_of_held(model)) == ["0.weight", "0.bias"]
