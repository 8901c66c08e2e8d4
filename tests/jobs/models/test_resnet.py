import torch

from onefold_jobs.models import ResNet, resnet18, resnet34, resnet50, resnet101
from tests.tables import for_each

DOWNSAMPLE = ["downsample.0.weight", "downsample.1.weight", "downsample.1.bias"]
DEPTHS = {
    resnet18: ((2, 2, 2, 2), 2, 11_689_512),
    resnet34: ((3, 4, 6, 3), 2, 21_797_672),
    resnet50: ((3, 4, 6, 3), 3, 25_557_032),
    resnet101: ((3, 4, 23, 3), 3, 44_549_160),
}
"""Blocks, convolutions of a block, and the published number of parameters."""


def torchvision_names(blocks: tuple[int, ...], convolutions: int) -> list[str]:
    """The parameters of torchvision's ResNet, in its order."""
    names = ["conv1.weight", "bn1.weight", "bn1.bias"]
    rows = ("conv{}.weight", "bn{}.weight", "bn{}.bias")
    for layer, count in enumerate(blocks, start=1):
        widens = layer > 1 or convolutions == 3
        for block in range(count):
            inner = [row.format(n) for n in range(1, convolutions + 1) for row in rows]
            inner += DOWNSAMPLE if widens and block == 0 else []
            names += [f"layer{layer}.{block}.{name}" for name in inner]
    return [*names, "fc.weight", "fc.bias"]


@for_each("build", DEPTHS)
def test_parameters_and_buffers_are_those_of_torchvision(build: type[ResNet]) -> None:
    blocks, convolutions, numbers = DEPTHS[build]
    with torch.device("meta"):
        model = build(num_classes=1000, small_images=False)
    names = torchvision_names(blocks, convolutions)
    assert [name for name, _ in model.named_parameters()] == names
    norms = [name.removesuffix("bias") for name in names if name.endswith(".bias")][:-1]
    rows = ("running_mean", "running_var", "num_batches_tracked")
    assert [name for name, _ in model.named_buffers()] == [n + row for n in norms for row in rows]
    assert sum(parameter.numel() for parameter in model.parameters()) == numbers
    assert model.conv1.weight.shape == (64, 3, 7, 7)
