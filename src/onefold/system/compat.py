"""Every name that PyTorch keeps to itself and onefold uses all the same, in one place.

Each of them may go in the next release of PyTorch. ``tests/system/test_compat.py`` says of each
what would break, and fails first.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as DropoutNd
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE_KEY_SUFFIX
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "EXTRA_STATE_KEY_SUFFIX",
    "BatchNorm",
    "DropoutNd",
    "KernelSettings",
    "TorchDispatchMode",
    "add_each",
    "buffers_of",
    "compiled_call_of",
    "compiler_config",
    "copy_each",
    "default_store",
    "has_accumulate_hooks",
    "is_compiled",
    "is_dynamic",
    "load_compiler",
    "multiply_each",
    "parameters_of",
    "steps_a_schedule",
    "version_of",
    "wrap_clipping",
]

_C: Any = torch._C
_COMPILED = "_torchdynamo_orig_callable"
_CLIP = "_clip_grads_with_norm_"

version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How many times a tensor was written to in place."""


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The table in which a module holds its own parameters."""
    return module._parameters


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The table in which a module holds its own buffers."""
    return module._buffers


def has_accumulate_hooks(parameter: torch.Tensor) -> bool:
    """Whether hooks look at a parameter's gradient once it has been added up."""
    return bool(parameter._post_accumulate_grad_hooks)


def steps_a_schedule(step: Callable[..., object]) -> bool:
    """Whether a learning-rate schedule has put itself around an optimizer's step."""
    return hasattr(step, "_wrapped_by_lr_sched")


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target, in as few kernels as can be."""
    torch._foreach_copy_(targets, sources)


def add_each(targets: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Add each tensor to its target, likewise."""
    torch._foreach_add_(targets, others)


def multiply_each(targets: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply all targets by one number, likewise."""
    torch._foreach_mul_(targets, factor)


def default_store() -> Any:
    """The `torch.distributed.Store` behind the process group that a script has made."""
    return torch.distributed.distributed_c10d._get_default_store()


class KernelSettings:
    """Which kernels may be chosen; read now, and to be put back.

    PyTorch's public functions for these settings take as long as a small layer does, and that for
    deterministic algorithms would load the compiler, for a second or two, to tell it as well.
    """

    def __init__(self) -> None:
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self._fill = _C._get_deterministic_fill_uninitialized_memory()
        self._benchmark = _C._get_cudnn_benchmark()

    @staticmethod
    def repeat_bits() -> None:
        """Choose kernels that repeat their bits, and refuse others."""
        _C._set_deterministic_algorithms(True, warn_only=False)
        _C._set_deterministic_fill_uninitialized_memory(False)
        _C._set_cudnn_benchmark(False)

    def put_back(self) -> None:
        """The settings as they were."""
        _C._set_deterministic_algorithms(self._deterministic, warn_only=self._warn_only)
        _C._set_deterministic_fill_uninitialized_memory(self._fill)
        _C._set_cudnn_benchmark(self._benchmark)


def load_compiler() -> Any:
    """The compiler's settings; loads the compiler, which takes a second or two."""
    from torch._dynamo import config

    return config


def compiler_config(*, may_load: bool) -> Any:
    """The settings of the compiler's code generator, where it is loaded; else None.

    Args:
        may_load: whether something may begin to be compiled, though nothing has been so far.
    """
    if may_load or "torch._inductor.compile_fx" in sys.modules:
        return sys.modules.get("torch._inductor.config")
    return None


def compiled_call_of(module: torch.nn.Module) -> object | None:
    """What ``module.compile()`` has put in place of its call."""
    return module.__dict__.get("_compiled_call_impl")


def is_compiled(value: object) -> bool:
    """Whether a module or function went through ``torch.compile``."""
    return hasattr(value, _COMPILED)


def is_dynamic(part: Any) -> bool:
    """Whether a compiled part was asked to handle shapes that vary."""
    context = getattr(part, "dynamo_ctx", None)
    if context is None:  # a function: its context is among what it closes over
        cells = getattr(part, "__closure__", None) or ()
        held = [cell.cell_contents for cell in cells]
        context = next((each for each in held if hasattr(each, "_dynamic")), None)
    return getattr(context, "_dynamic", None) is True


def wrap_clipping(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put a function around what ``clip_grad_norm_`` calls; once, however often this is called."""
    inner: Callable[..., Any] | None = getattr(clip_grad, _CLIP, None)
    if inner is None or hasattr(inner, "__onefold__"):
        return
    wrapped = wrap(inner)
    wrapped.__onefold__ = True  # type: ignore[attr-defined]
    setattr(clip_grad, _CLIP, wrapped)
