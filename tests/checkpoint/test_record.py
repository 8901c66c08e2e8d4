"""What a checkpoint says of itself is looked at, key by key, before anything of it is used."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.checkpoint.record import TENSOR_FILES, check_run, check_stored
from tests.small import line, make_trainer, points
from tests.tables import for_each

Record = dict[str, Any]
Change = Callable[[Any], object]
SEAL = {"size": 10, "sha256": "0" * 64}


def record() -> Record:
    """The least that a run goes on from."""
    return {
        "step": 3,
        "run": "abc",
        "keep": None,
        "best": None,
        "scores": {},
        "files": {"model.safetensors": dict(SEAL), "optimizer.safetensors": dict(SEAL)},
        "epoch": 1,
        "seed": 0,
        "shards": 4,
        "clip_norm": None,
        "loss_scale": 1.0,
        "fingerprint": "0123",
        "threads": 1,
        "device": "cpu",
        "libraries": {"torch": "2.9"},
        "schedule": None,
        "optimizer": {
            "class": "SGD",
            "parameters": [["weight"], ["bias"]],
            "settings": [{"lr": 0.1}, {"lr": 0.2}],
            "settings_at_start": [{}, {}],
            "tensors": {"weight": ["momentum_buffer"]},
            "other_state": {"weight": {"step": 3}},
        },
        "position": [
            {
                "made_in_epoch": 0,
                "number": 0,
                "samples": 8,
                "batch_size": 4,
                "drop_last": False,
                "shuffle": True,
                "first_pass": 0,
                "empty_passes": 0,
                "passes": [[0, 4]],
            }
        ],
        "extra": None,
    }


def checked(changed: Any) -> None:
    check_stored(changed)
    check_run(changed)


def put(value: object, *names: str | int) -> Change:
    def change(found: Any) -> None:
        for name in names[:-1]:
            found = found[name]
        found[names[-1]] = value

    return change


def out(*names: str | int) -> Change:
    def change(found: Any) -> None:
        for name in names[:-1]:
            found = found[name]
        del found[names[-1]]

    return change


def refusal(change: Change) -> str:
    """In words; the record itself is only looked at."""
    changed = record()
    change(changed)
    before = copy.deepcopy(changed)
    with pytest.raises(ValueError, match=r".") as caught:
        checked(changed)
    assert changed == before
    return str(caught.value)


# What is right.


def test_the_least_is_enough() -> None:
    checked(record())


GOOD: dict[str, Change] = {
    "the best": put("highest accuracy of all", "best"),
    "a number kept": put(3, "keep"),
    "a serial": put(9, "serial"),
    "scores": put({"loss": 0.5, "n": 3}, "scores"),
    "a score that is no number": put(
        {"loss": {"kind of value": "float", "items": "nan"}}, "scores"
    ),
    "buffers": put(dict(SEAL), "files", "buffers.safetensors"),
    "a negative seed": put(-(2**63), "seed"),
    "a large seed": put(2**64 - 1, "seed"),
    "a whole clip_norm": put(1, "clip_norm"),
    "a schedule": put({"class": "StepLR", "state": {}}, "schedule"),
    "a schedule of an epoch": put(
        {"class": "StepLR", "state": {}, "every": "epoch", "open": 3}, "schedule"
    ),
    "a loader of no epoch": put(None, "position", 0, "made_in_epoch"),
    "lengths": put("digest", "position", 0, "lengths"),
    "a numbered loader": put(1, "position", 0, "loader"),
    "a loader of a kind": put("samples by list", "position", 0, "kind"),
    "an order": put({"3": "digest"}, "position", 0, "orders"),
    "a stream": put({"3": {}}, "position", 0, "streams"),
    "no loaders": put([], "position"),
    "values of the user's": put({"mine": {"kind of value": "tuple", "items": [1]}}, "extra"),
    "more than is known": put("of a later version", "later"),
}


@for_each("name", GOOD)
def test_what_may_be_is_not_refused(name: str) -> None:
    changed = record()
    GOOD[name](changed)
    checked(changed)


@for_each("kind", ["sgd", "adam"])
def test_what_a_trainer_writes_is_right(tmp_path: Path, kind: str) -> None:
    model = line()
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[kind]
    optimizer = make(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    trainer = make_trainer(model, optimizer=optimizer, schedule=schedule, clip_norm=1.0)
    data = torch.utils.data.TensorDataset(*points(8))
    trainer.step(next(iter(trainer.loader(data, batch_size=4))))
    folder = trainer.save(tmp_path, scores={"loss": 0.5}, extra={"mine": (1, 2)})
    checked(json.loads((folder / "run.json").read_text()))


# What is not.

TOP = sorted(record().keys() - {"extra"})


@for_each("name", [*TOP, "extra"])
def test_what_is_missing_is_named(name: str) -> None:
    assert refusal(out(name)) == f"{name} is missing"


@for_each("name", TOP)
@for_each("value", [[["x"]], {1: 2, "y": "z"}, True], ids=["list", "dict", "truth"])
def test_what_is_of_another_kind_is_named(name: str, value: object) -> None:
    if isinstance(value, dict) and isinstance(record()[name], dict):
        value = "text"
    assert name in refusal(put(value, name))


BAD: dict[str, tuple[Change, str]] = {
    "a step below 0": (put(-1, "step"), "expected step to be a number of steps, got -1"),
    "a step beyond": (
        put(1 << 62, "step"),
        f"expected step to be a number of steps, got a number beyond {1 << 62}",
    ),
    "a step of many digits": (put(10**5000, "step"), "got a number beyond"),
    "a keep of 0": (put(0, "keep"), "expected keep to be a number of 1 or more, or null, got 0"),
    "a rule without a name": (put("highest", "best"), 'expected best to be "highest NAME"'),
    "a rule that is none": (put("fastest loss", "best"), "expected best to be"),
    "a file of its own": (
        put(dict(SEAL), "files", "../../mine"),
        "it names '../../mine' as one of its files: expected model.safetensors,",
    ),
    "a long name": (put(dict(SEAL), "files", "x" * 500), "…"),
    "a seal without a digest": (
        out("files", "model.safetensors", "sha256"),
        "expected size and sha256 of model.safetensors, got {'size': 10}",
    ),
    "a short digest": (put("00", "files", "model.safetensors", "sha256"), "expected size and sha"),
    "a size below 0": (put(-1, "files", "model.safetensors", "size"), "expected size and sha256"),
    "more in a seal": (put(1, "files", "model.safetensors", "path"), "expected size and sha256"),
    "scores of text": (put({"loss": "low"}, "scores"), "expected scores to be numbers by name"),
    "truths for scores": (put({"loss": True}, "scores"), "expected scores to be numbers by name"),
    "no model": (out("files", "model.safetensors"), "it names no model.safetensors among its fil"),
    "no files": (
        put({}, "files"),
        "it names no model.safetensors and no optimizer.safetensors among its files",
    ),
    "no torch": (put({}, "libraries"), "expected libraries to say which torch, it does not"),
    "no shards": (put(0, "shards"), "expected shards to be a number of 1 or more, got 0"),
    "a seed beyond": (put(1 << 64, "seed"), "expected seed to be a whole number"),
    "no class": (out("optimizer", "class"), "optimizer.class is missing"),
    "groups of text": (
        put(["weight"], "optimizer", "parameters"),
        "expected optimizer.parameters to be names for each group, got ['weight']",
    ),
    "parameters as settings": (
        put([{"params": []}], "optimizer", "settings"),
        "expected optimizer.settings to be settings for each group",
    ),
    "names as settings": (
        put([{"param_names": []}], "optimizer", "settings"),
        "expected optimizer.settings to be settings for each group",
    ),
    "settings of an unknown kind": (
        put([{"lr": {"kind of value": "code"}}], "optimizer", "settings"),
        "a value is not as a checkpoint has it: there is no kind of value 'code'",
    ),
    "a key that is no text": (
        put({"weight": [3]}, "optimizer", "tensors"),
        "expected optimizer.tensors to be lists of keys by name",
    ),
    "state in a list": (
        put({"weight": []}, "optimizer", "other_state"),
        "expected optimizer.other_state to be values by name",
    ),
    "a schedule of no class": (put({"state": {}}, "schedule"), "schedule.class is missing"),
    "a schedule of no state": (put({"class": "StepLR"}, "schedule"), "schedule.state is missing"),
    "a schedule of no known pace": (
        put({"class": "StepLR", "state": {}, "every": "week"}, "schedule"),
        "schedule.every to be step, epoch or script, got 'week'",
    ),
    "a schedule that waits for no epoch": (
        put({"class": "StepLR", "state": {}, "every": "epoch", "open": -1}, "schedule"),
        "schedule.open to be an epoch or null, got -1",
    ),
    "no batch size": (
        put(0, "position", 0, "batch_size"),
        "expected position[0].batch_size to be a number of 1 or more, got 0",
    ),
    "a pass of one number": (
        put([[1]], "position", 0, "passes"),
        "expected position[0].passes to be pairs of a pass and its samples used, got [[1]]",
    ),
    "a pass below 0": (put([[0, -1]], "position", 0, "passes"), "expected position[0].passes"),
    "an order of no pass": (
        put({"x": "digest"}, "position", 0, "orders"),
        "expected position[0].orders to be a text for each pass, got {'x': 'digest'}",
    ),
    "a stream of no values": (
        put({"0": 3}, "position", 0, "streams"),
        "expected position[0].streams to be values for each pass, got {'0': 3}",
    ),
    "a number for a truth": (
        put(1, "position", 0, "shuffle"),
        "expected position[0].shuffle to be true or false, got 1",
    ),
    "a ragged tensor": (
        put({"kind of value": "tensor", "dtype": "int64", "items": [[1], []]}, "extra"),
        "a value is not as a checkpoint has it: ",
    ),
}


@for_each("name", BAD)
def test_what_is_wrong_is_put_into_words(name: str) -> None:
    change, words = BAD[name]
    said = refusal(change)
    assert words in said
    assert len(said) < 250


LOADER = list(record()["position"][0])


@for_each("name", LOADER)
def test_what_a_loader_lacks_is_named_with_its_place(name: str) -> None:
    def change(found: Record) -> None:
        found["position"] = [copy.deepcopy(found["position"][0]) for _ in range(2)]
        del found["position"][1][name]

    assert refusal(change) == f"position[1].{name} is missing"


@for_each("whole", [None, [], "text", 3])
def test_the_whole_must_be_values_by_name(whole: object) -> None:
    with pytest.raises(ValueError, match=r"^expected the whole to be values by name, got "):
        check_stored(whole)


def test_what_lies_beside_no_run_is_still_a_checkpoint() -> None:
    """Its place in a directory is known, and it is tidied up."""
    stored = {k: v for k, v in record().items() if k in ("step", "run", "keep", "best", "scores")}
    check_stored({**stored, "files": {}})
    with pytest.raises(ValueError, match=r"^epoch is missing"):
        check_run({**stored, "files": {}})


def test_files_of_tensors_have_four_names() -> None:
    names = ("model", "optimizer", "buffers", "training")
    assert tuple(f"{name}.safetensors" for name in names) == TENSOR_FILES
