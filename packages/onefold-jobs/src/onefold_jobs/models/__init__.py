"""The models that the jobs and the examples train; plain `torch.nn.Module`s."""

from onefold_jobs.models.catalog import MODELS, build_model, head_name, head_of
from onefold_jobs.models.lenet import DenseCNN, LeNet
from onefold_jobs.models.resnet import ResNet, resnet18, resnet34, resnet50, resnet101
from onefold_jobs.models.unet import VGG, UNet, vgg16

__all__ = [
    "MODELS",
    "VGG",
    "DenseCNN",
    "LeNet",
    "ResNet",
    "UNet",
    "build_model",
    "head_name",
    "head_of",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "vgg16",
]
