from __future__ import annotations

import pytest

from onefold.errors import CheckpointError
from onefold.weights.load import match_names
from tests.tables import for_each


@for_each(
    ("found", "own"),
    [
        ("conv.weight", "conv.weight"),
        ("module.conv.weight", "conv.weight"),
        ("module.module.conv.weight", "conv.weight"),
        ("_orig_mod.conv.weight", "conv.weight"),
        ("module._orig_mod.conv.weight", "conv.weight"),
        ("_orig_mod.module.conv.weight", "conv.weight"),
        ("encoder._orig_mod.layer.weight", "encoder.layer.weight"),
        ("features.module.0.weight", "features.0.weight"),
        ("conv.weight", "_orig_mod.conv.weight"),
        ("module.conv.weight", "_orig_mod.conv.weight"),
        ("conv.weight", "module.conv.weight"),
        ("_orig_mod.conv.weight", "module.conv.weight"),
        ("encoder.layer.weight", "encoder._orig_mod.layer.weight"),
        ("module.module", "module"),
    ],
)
def test_words_of_wrappers_are_left_out_on_either_side(found: str, own: str) -> None:
    assert match_names([found], [own, "other.weight"]) == {found: own}


@for_each(
    ("found", "own"),
    [
        ("conv.weight", "conv.bias"),
        ("modules.conv.weight", "conv.weight"),
        ("conv.module", "conv"),
        ("module", "weight"),
    ],
)
def test_other_names_have_no_counterpart(found: str, own: str) -> None:
    assert match_names([found], [own]) == {}


@for_each("front", ["", "module.", "_orig_mod.", "module._orig_mod.module."])
@for_each("wrapped", ["", "_orig_mod."])
def test_a_model_with_a_part_called_module_keeps_its_names(front: str, wrapped: str) -> None:
    names = ["weight", "module.weight", "module.module.bias"]
    matched = match_names([front + name for name in names], [wrapped + name for name in names])
    assert matched == {front + name: wrapped + name for name in names}


def test_a_name_that_is_the_models_is_taken_as_it_is() -> None:
    assert match_names(["module.a", "module.b"], ["a", "module.a"]) == {"module.a": "module.a"}


def test_one_name_that_is_not_wrapped_does_not_hinder_the_others() -> None:
    matched = match_names(["averaged", "module.weight", "module.bias"], ["weight", "bias"])
    assert matched == {"module.weight": "weight", "module.bias": "bias"}


@for_each(
    "found", [["conv.weight", "module.conv.weight"], ["_orig_mod.conv.weight", "conv.weight"]]
)
def test_two_names_for_one_are_refused(found: list[str]) -> None:
    first, second = found
    with pytest.raises(CheckpointError, match=f"{first} and {second} of the file are both conv"):
        match_names(found, ["conv.weight"])


def test_a_name_for_two_is_refused() -> None:
    found = ["a.module.x.weight", "b.weight"]
    with pytest.raises(CheckpointError, match=r"may be module\.a\.x\.weight or a\.x\.module\.w"):
        match_names(found, ["module.a.x.weight", "a.x.module.weight", "b.weight"])
