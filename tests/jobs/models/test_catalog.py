from typing import Any

import pytest
import torch
from torch import nn

from onefold_jobs.models import MODELS, build_model, head_name, head_of
from tests.tables import for_each

HEADS = {"lenet": "classifier.5", "mnist-cnn": "classifier.4"}
HEADS |= dict.fromkeys(("resnet18", "resnet34", "resnet50", "resnet101"), "fc")


def build(name: str, **sizes: Any) -> nn.Module:
    """A model without storage, for its shapes."""
    with torch.device("meta"):
        return build_model(name, **{"num_classes": 7, "in_channels": 3, "image_size": 32, **sizes})


def test_a_model_of_the_catalog_has_its_shape_and_last_layer() -> None:
    assert list(MODELS) == list(HEADS)
    for name, head in HEADS.items():
        model = build(name)
        assert model(torch.zeros(2, 3, 32, 32, device="meta")).shape == (2, 7)
        assert head_name(model) == head
        assert head_of(model) is dict(model.named_modules())[head]
        assert list(model.state_dict())[-2:] == [f"{head}.weight", f"{head}.bias"]


SIZES = ("num_classes", "in_channels", "image_size")
WRONG: list[tuple[str, dict[str, Any], str]] = [
    *((n, {"small_images": False}, "for ResNets only") for n in ("lenet", "timm:resnet10t")),
    *((n, {}, f"or timm:NAME, got '{n}'") for n in ("resnet19", "", "timm", "timm:", "LeNet")),
    *(("resnet18", {wrong: 0}, f"{wrong} must be positive, got 0") for wrong in SIZES),
]


@for_each(("name", "sizes", "words"), WRONG)
def test_what_cannot_be_built_is_refused(name: str, sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(name, **sizes)
