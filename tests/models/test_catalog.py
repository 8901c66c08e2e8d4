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

HEADS = {"lenet": "classifier.5", "mnist-cnn": "classifier.4"}
HEADS |= dict.fromkeys(("resnet18", "resnet34", "resnet50", "resnet101"), "fc")


def build(name: str, **sizes: Any) -> nn.Module:
    """A model without storage, for its shapes."""
    with torch.device("meta"):
        return build_model(name, **{"num_classes": 7, "in_channels": 3, "image_size": 32, **sizes})


class TimmModel(nn.Module):
    """What a timm model looks like from outside."""

    def __init__(self, num_classes: int, in_chans: int, heads: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_chans, 4, 3)
        self.head = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "fc": nn.Linear(4, num_classes)})
        self.classifiers = (self.head["fc"], nn.Linear(4, num_classes))[:heads]

    def get_classifier(self) -> Any:
        return self.classifiers if len(self.classifiers) > 1 else self.classifiers[0]


def test_a_model_of_the_catalog_has_its_shape_and_last_layer() -> None:
    assert list(MODELS) == list(HEADS)
    for name, head in HEADS.items():
        model = build(name)
        assert model(torch.zeros(2, 3, 32, 32, device="meta")).shape == (2, 7)
        assert head_name(model) == head
        assert head_of(model) is dict(model.named_modules())[head]
        assert list(model.state_dict())[-2:] == [f"{head}.weight", f"{head}.bias"]


@for_each(
    ("name", "sizes", "words"),
    [
        *(
            (name, {"small_images": False}, f"for ResNets only, got False for '{name}'")
            for name in ("lenet", "timm:resnet10t")
        ),
        *(
            (name, {}, f"one of lenet, .*resnet101 or timm:NAME, got '{name}'")
            for name in ("resnet19", "", "timm", "timm:", "LeNet")
        ),
        *(
            ("resnet18", {wrong: 0}, f"{wrong} must be positive, got 0")
            for wrong in ("num_classes", "in_channels", "image_size")
        ),
    ],
)
def test_what_cannot_be_built_is_refused(name: str, sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(name, **sizes)


def test_a_timm_model_is_asked_for_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def create_model(name: str, **arguments: Any) -> nn.Module:
        calls.append((name, arguments))
        return TimmModel(arguments["num_classes"], arguments["in_chans"])

    timm = ModuleType("timm")
    timm.create_model = create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)
    model = build("timm:resnet10t")
    assert calls == [("resnet10t", {"pretrained": False, "num_classes": 7, "in_chans": 3})]
    assert head_name(model) == "head.fc"
    assert head_of(model) is model.get_classifier()  # type: ignore[operator]


@for_each("failure", [None, "ImportError('no torchvision')", "RuntimeError('torchvision::nms')"])
def test_a_timm_that_cannot_be_imported_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str | None
) -> None:
    if failure is None:
        monkeypatch.setitem(sys.modules, "timm", None)
    else:
        (tmp_path / "timm.py").write_text(f"raise {failure}")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "timm", raising=False)
    words = r"imported \(.*torchvision" if failure else "pip install timm"
    with pytest.raises(LaunchError, match=rf"timm:resnet10t needs .* {words}"):
        build("timm:resnet10t")


def test_the_last_layer_of_others_is_known_or_refused() -> None:
    with torch.device("meta"):
        model = models.UNet()
    assert head_name(model) == "head"
    assert list(model.state_dict())[-2:] == ["head.weight", "head.bias"]
    for other, words in (
        (TimmModel(num_classes=7, in_chans=3, heads=2), "TimmModel must have one last layer"),
        (models.resnet18(None, width=4), "ResNet was made without a classification layer"),
        (nn.Linear(2, 2), r"known for LeNet, .*, not for Linear"),
    ):
        with pytest.raises(ValueError, match=words):
            head_name(other)
