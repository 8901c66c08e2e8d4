"""A pretended accelerator: what is only true of a GPU is tested where there is none.

It is a device of PyTorch by the documented way for devices of other parties, made of a C++
extension in ``source``, which `tests.pretended.build` compiles when it is first needed.

    from tests.pretended import device

    device.start(devices=2)
    torch.ones(3, device="pretend:1")

It computes with the processor's kernels, in memory of its own, and takes every liberty that a GPU
has: see `tests.pretended.device`. What it cannot show is other bits than the processor's, and how
long something takes.
"""
