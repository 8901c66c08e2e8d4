from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from onefold import models
from onefold.errors import LaunchError
from onefold.models import MODELS, build_model, head_name, head_of
from tests.tables import for_each

HEADS = {
    "lenet": "classifier.5",
    "mnist-cnn": "classifier.4",
    "resnet18": "fc",
    "resnet34": "fc",
    "resnet50": "fc",
    "resnet101": "fc",
}


def build(name: str, *, image_size: int = 32, small_images: bool | None = None) -> nn.Module:
    """A model without storage, for its shapes."""
    with torch.device("meta"):
        return build_model(
            name, num_classes=7, in_channels=3, image_size=image_size, small_images=small_images
        )


class TimmModel(nn.Module):
    """What a timm model looks like from outside."""

    def __init__(self, num_classes: int, in_chans: int, heads: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_chans, 4, 3)
        self.head = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "fc": nn.Linear(4, num_classes)})
        self.classifiers = (self.head["fc"], nn.Linear(4, num_classes))[:heads]

    def get_classifier(self) -> Any:
        return self.classifiers if len(self.classifiers) > 1 else self.classifiers[0]


@pytest.fixture
def timm_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The calls of ``create_model`` of a stand-in for the timm library."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def create_model(name: str, **arguments: Any) -> nn.Module:
        calls.append((name, arguments))
        return TimmModel(arguments["num_classes"], arguments["in_chans"])

    timm = ModuleType("timm")
    timm.create_model = create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)
    return calls


def test_the_names_of_the_catalog() -> None:
    assert list(MODELS) == list(HEADS)


@for_each("name", MODELS)
def test_models_take_the_images_and_give_the_classes_they_are_built_for(name: str) -> None:
    model = build(name)
    logits = model(torch.zeros(2, 3, 32, 32, device="meta"))
    assert logits.shape == (2, 7)


@for_each("name", MODELS)
def test_the_last_layer_is_known_by_name(name: str) -> None:
    model = build(name)
    assert head_name(model) == HEADS[name]
    assert head_of(model) is dict(model.named_modules())[HEADS[name]]
    assert list(model.state_dict())[-2:] == [f"{HEADS[name]}.weight", f"{HEADS[name]}.bias"]


@for_each("name", ["lenet", "resnet18"])
def test_fresh_weights_come_from_the_global_generator(name: str) -> None:
    weights = []
    for _ in range(2):
        torch.manual_seed(3)
        model = build_model(name, num_classes=7, in_channels=1, image_size=28)
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(*weights)


@for_each(
    ("image_size", "small_images", "kernel"),
    [(64, None, 3), (65, None, 7), (224, None, 7), (224, True, 3), (32, False, 7)],
)
def test_the_stem_follows_the_image_size_unless_it_is_chosen(
    image_size: int, small_images: bool | None, kernel: int
) -> None:
    model = build("resnet50", image_size=image_size, small_images=small_images)
    assert model.get_submodule("conv1").kernel_size == (kernel, kernel)


@for_each("name", ["lenet", "timm:resnet10t"])
def test_a_stem_is_chosen_for_resnets_only(name: str) -> None:
    with pytest.raises(ValueError, match=f"for ResNets only, got False for '{name}'"):
        build(name, small_images=False)


@for_each("name", ["resnet19", "", "timm", "timm:", "LeNet"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"one of lenet, .*resnet101 or timm:NAME, got '{name}'"):
        build(name)


@for_each("wrong", ["num_classes", "in_channels", "image_size"])
def test_a_number_below_one_is_refused(wrong: str) -> None:
    numbers = {"num_classes": 7, "in_channels": 3, "image_size": 32} | {wrong: 0}
    with pytest.raises(ValueError, match=f"{wrong} must be positive, got 0"):
        build_model("resnet18", **numbers)


def test_a_timm_model_is_asked_for_without_weights(
    timm_calls: list[tuple[str, dict[str, Any]]],
) -> None:
    model = build("timm:resnet10t")
    asked = {"pretrained": False, "num_classes": 7, "in_chans": 3}
    assert timm_calls == [("resnet10t", asked)]
    assert head_name(model) == "head.fc"
    assert head_of(model) is model.get_classifier()  # type: ignore[operator]


def test_without_timm_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(LaunchError, match=r"timm:resnet10t needs .* pip install timm"):
        build("timm:resnet10t")


@for_each(
    "failure",
    ["ImportError('no torchvision')", "RuntimeError('operator torchvision::nms does not exist')"],
)
def test_a_timm_that_cannot_be_imported_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    (tmp_path / "timm.py").write_text(f"raise {failure}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(LaunchError, match=r"timm:resnet10t needs .* imported \(.*torchvision"):
        build("timm:resnet10t")


def test_two_last_layers_have_no_one_name() -> None:
    with pytest.raises(ValueError, match="TimmModel must have one last layer"):
        head_name(TimmModel(num_classes=7, in_chans=3, heads=2))


def test_the_last_layer_of_a_u_net_is_its_head() -> None:
    with torch.device("meta"):
        model = models.UNet()
    assert head_name(model) == "head"
    assert list(model.state_dict())[-2:] == ["head.weight", "head.bias"]


def test_a_model_without_last_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="ResNet was made without a classification layer"):
        head_name(models.resnet18(None, width=4))


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"known for LeNet, .*, not for Linear"):
        head_name(nn.Linear(2, 2))
