"""Builds image models by name, and finds a model's last layer.

A name is one of `MODELS`, or ``timm:NAME`` for a model of timm. A U-Net is named after its encoder:
one of `ENCODERS`, or ``smp:NAME`` for one of segmentation-models-pytorch. Both libraries are
imported only on use. All models are initialized from PyTorch's global generator.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from onefold.errors import LaunchError
from onefold_jobs.models.lenet import DenseCNN, LeNet
from onefold_jobs.models.resnet import ResNet, resnet18, resnet34, resnet50, resnet101
from onefold_jobs.models.unet import UNet

__all__ = ["FIXED", "MODELS", "RESNETS", "build_model", "build_unet", "head_name", "head_of"]

TIMM_PREFIX, SMP_PREFIX = "timm:", "smp:"
LARGEST_SMALL_IMAGE = 64
"""Image side, in pixels, up to which a ResNet gets the stem for small images by default."""


FIXED: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {"lenet": LeNet, "mnist-cnn": DenseCNN}
)
"""Builders of models for a fixed image size, ``image_size``."""
RESNETS: Mapping[str, Callable[..., ResNet]] = MappingProxyType(
    {"resnet18": resnet18, "resnet34": resnet34, "resnet50": resnet50, "resnet101": resnet101}
)
"""Builders of models for any image size; ``small_images`` chooses the stem."""
MODELS = (*FIXED, *RESNETS)
"""Names of the models that this package builds."""

_SMP_HEAD = "segmentation_head"
# Numbers are positions in a Sequential, and change with its layers.
HEADS: Mapping[type[nn.Module], str] = MappingProxyType(
    {LeNet: "classifier.5", DenseCNN: "classifier.4", ResNet: "fc", UNet: "head"}
)


def build_model(
    name: str,
    *,
    num_classes: int,
    in_channels: int,
    image_size: int,
    small_images: bool | None = None,
) -> nn.Module:
    """Build a model by its name, initialized from PyTorch's global generator.

    Args:
        name: one of `MODELS`, or ``timm:NAME``.
        num_classes: number of logits per image.
        in_channels: number of image channels.
        image_size: height and width of the images in pixels. A timm model uses the size that timm
            defines for it instead.
        small_images: for ResNets only: whether to use the stem for small images, see `ResNet`; None
            uses it up to 64 pixels.

    Returns:
        A model that maps images (n, in_channels, image_size, image_size) float32 to logits
        (n, num_classes) float32.

    Raises:
        ValueError: the name is unknown, a number is not positive or does not suit the model, or
            ``small_images`` is given for a model without a choice of stem.
        LaunchError: a timm model is requested, but timm cannot be imported.

    Example:
        >>> model = build_model("lenet", num_classes=10, in_channels=3, image_size=32)
        >>> head_name(model), head_of(model)
        ('classifier.5', Linear(in_features=84, out_features=10, bias=True))
    """
    given = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
    for argument, number in given.items():
        if number < 1:
            raise ValueError(f"{argument} must be positive, got {number}")
    # Rejected instead of ignored, because the caller expects it to have an effect.
    if small_images is not None and name not in RESNETS:
        raise ValueError(f"small_images is for ResNets only, got {small_images} for {name!r}")
    if name in RESNETS:
        small = image_size <= LARGEST_SMALL_IMAGE if small_images is None else small_images
        return RESNETS[name](num_classes, in_channels, small_images=small)
    if name in FIXED:
        sizes = {"in_channels": in_channels, "image_size": image_size}
        return FIXED[name](num_classes=num_classes, **sizes)
    return timm_model(name, num_classes=num_classes, in_channels=in_channels)


def timm_model(name: str, *, num_classes: int, in_channels: int) -> nn.Module:
    """Build the timm model named after ``timm:``; timm reports unknown names itself."""
    timm_name = name.removeprefix(TIMM_PREFIX)
    if timm_name in ("", name):
        known = ", ".join(MODELS)
        raise ValueError(f"the model must be one of {known} or {TIMM_PREFIX}NAME, got {name!r}")
    # Do not load pretrained weights here, because every process of the run would download them.
    model: nn.Module = import_library("timm", name).create_model(
        timm_name, pretrained=False, num_classes=num_classes, in_chans=in_channels
    )
    return model


def build_unet(encoder: str, *, out_channels: int = 1, width: int = 64) -> Any:
    """Build a U-Net for color images by the name of its encoder.

    Args:
        encoder: one of `ENCODERS`, or ``smp:NAME``.
        out_channels: number of logits per pixel.
        width: channels of the first layer, for `ENCODERS` only.

    Returns:
        A model with the attributes ``encoder`` and ``stride`` of a `UNet`.

    Raises:
        ValueError: the encoder is unknown, or the width does not suit it.
        LaunchError: segmentation-models-pytorch cannot be imported.
    """
    if not encoder.startswith(SMP_PREFIX):
        return UNet(encoder, out_channels=out_channels, width=width)
    library = import_library("segmentation_models_pytorch", encoder)
    name = encoder.removeprefix(SMP_PREFIX)
    try:
        # Without weights, because every process of the run would download them.
        model = library.Unet(name, encoder_weights=None, in_channels=3, classes=out_channels)
    except KeyError as error:
        raise ValueError(f"{encoder}: expected smp: and an encoder of it: {error}") from error
    model.stride = model.encoder.output_stride
    return model


def import_library(library: str, name: str) -> Any:
    """Import a model library that the model ``name`` requires.

    Raises:
        LaunchError: the library cannot be imported. The message gives the install command.
    """
    try:
        return importlib.import_module(library)
    # Any exception: the library may be installed but fail on its own imports. A torchvision that
    # does not match torch raises RuntimeError.
    except Exception as error:
        package = library.replace("_", "-")
        raise LaunchError(
            f"{name} requires the {package} library, which cannot be imported ({error}); install "
            f"it, and a torchvision that matches torch, with: pip install {package}"
        ) from error


def head_name(model: nn.Module) -> str:
    """Return the dotted name of a model's last layer, whose outputs are the logits.

    Args:
        model: a model of this package, of timm, or from `build_unet`.

    Returns:
        Its name in ``model.named_modules()``, such as "fc".

    Raises:
        ValueError: the model is of another kind, or does not have exactly one last layer.
    """
    known = (name for kind, name in HEADS.items() if isinstance(model, kind))
    name = next(known, None)
    if name is None:
        name = _SMP_HEAD if hasattr(model, _SMP_HEAD) else timm_head_name(model)
    # A ResNet without classes, used as an encoder, keeps the attribute with an Identity.
    if isinstance(model.get_submodule(name), nn.Identity):
        raise ValueError(f"this {type(model).__name__} has no classification layer")
    return name


def timm_head_name(model: nn.Module) -> str:
    """Return the name of the layer that a timm model calls its classifier."""
    # Check the method instead of the class, because timm's models have no common base class.
    get_classifier = getattr(model, "get_classifier", None)
    if get_classifier is None:
        known = ", ".join(kind.__name__ for kind in HEADS)
        raise ValueError(
            f"the last layer is known for {known} and timm's models, not for {type(model).__name__}"
        )
    head: object = get_classifier()
    # timm returns the module instead of its name, and for distilled models a tuple of two modules,
    # which no single name describes.
    names: list[str] = [name for name, module in model.named_modules() if module is head]
    if not names:
        raise ValueError(
            f"{type(model).__name__} must have one last layer, but get_classifier() returned {head}"
        )
    return names[0]


def head_of(model: nn.Module) -> nn.Module:
    """Return the layer that `head_name` finds; raises the same errors."""
    return model.get_submodule(head_name(model))
