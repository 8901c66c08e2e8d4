"""Every private name of PyTorch that onefold uses all the same, in one place.

Any of them may disappear with the next release of PyTorch. ``tests/system/test_compat.py`` says for
each of them what would break, and is the first to fail.
"""

from __future__ import annotations

import operator
import os
import re
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
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
    "Groups",
    "KernelSettings",
    "TorchDispatchMode",
    "add_each",
    "address_of",
    "buffers_of",
    "code_compiler",
    "compiled_call_of",
    "compiler_config",
    "copy_each",
    "count_hooks",
    "has_backward_hooks",
    "hide_backward_hooks",
    "is_compiled",
    "is_in_function",
    "is_transformed",
    "load_compiler",
    "multiply_each",
    "parameters_of",
    "steps_a_schedule",
    "version_of",
    "watch_differentiation",
    "wrap_clipping",
]

_C: Any = torch._C
_AUTOGRAD: Any = torch.autograd
_OPTIMIZER: Any = sys.modules["torch.optim.optimizer"]  # torch.optim does not show it
_COMPILED = "_torchdynamo_orig_callable"
_CLIP = "_clip_grads_with_norm_"

version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""The number of times that a tensor was written to in place."""


address_of: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""A number that is another one for every storage that there is, also on the meta device."""


is_transformed: Callable[[torch.Tensor], bool] = _C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to a call of torch.vmap, or of a function of torch.func."""


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The table in which a module holds its own parameters."""
    # `named_parameters()` walks the whole tree, skips None, and leaves out the second name of a
    # tied parameter; whoever replaces parameters needs every place.
    return module._parameters


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The table in which a module holds its own buffers."""
    return module._buffers


def count_hooks(holder: torch.Tensor | torch.nn.Module | torch.optim.Optimizer) -> int:
    """How many hooks there are on a parameter's accumulated gradient, a module's call or a step.

    Those on the steps of all optimizers are counted with each.
    """
    if isinstance(holder, torch.Tensor):
        return len(holder._post_accumulate_grad_hooks or ())
    if isinstance(holder, torch.nn.Module):
        forward = len(holder._forward_hooks) + len(holder._forward_pre_hooks)
        return forward + len(holder._backward_hooks) + len(holder._backward_pre_hooks)
    of_all = _OPTIMIZER._global_optimizer_pre_hooks, _OPTIMIZER._global_optimizer_post_hooks
    own = holder._optimizer_step_pre_hooks, holder._optimizer_step_post_hooks
    return sum(len(hooks) for hooks in (*of_all, *own))


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has hooks that backward calls."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


@contextmanager
def hide_backward_hooks(module: torch.nn.Module) -> Iterator[None]:
    """A block in which calls of a module do not see its backward hooks."""
    names = ("_backward_hooks", "_backward_pre_hooks")
    held = {name: vars(module)[name] for name in names}
    vars(module).update({name: OrderedDict() for name in names})
    try:
        yield
    finally:
        vars(module).update(held)


@contextmanager
def watch_differentiation(look: Callable[[Sequence[Any], Sequence[Any]], None]) -> Iterator[None]:
    """A block in which something is called with what is differentiated, and with what by.

    That is with the outputs, and the inputs or nothing if those are all leaves.
    """
    # Both torch.autograd.grad and backward call it by this name, wherever they are imported to.
    inner = _AUTOGRAD._engine_run_backward

    def watched(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        look(outputs, args[3])
        return inner(outputs, *args, **kwargs)

    _AUTOGRAD._engine_run_backward = watched
    try:
        yield
    finally:
        _AUTOGRAD._engine_run_backward = inner


def steps_a_schedule(step: Callable[..., object]) -> bool:
    """Whether a learning-rate schedule has wrapped an optimizer's step method."""
    return hasattr(step, "_wrapped_by_lr_sched")


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target, in as few kernels as possible."""
    torch._foreach_copy_(targets, sources)


def add_each(targets: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Add each tensor to its target in place, in as few kernels as possible."""
    torch._foreach_add_(targets, others)


def multiply_each(targets: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply all targets by one number in place, in as few kernels as possible."""
    torch._foreach_mul_(targets, factor)


class Groups:
    """What torch.distributed keeps to itself about process groups."""

    @staticmethod
    def default_store() -> Any:
        """The `torch.distributed.Store` behind the process group that a script has formed."""
        return torch.distributed.distributed_c10d._get_default_store()

    @staticmethod
    def set_limit(group: torch.distributed.ProcessGroup, limit: timedelta) -> None:
        """Change how long whatever begins from now on may wait for other processes."""
        torch.distributed.distributed_c10d._set_pg_timeout(limit, group)


class KernelSettings:
    """The settings that decide which kernels are chosen, as they are now, to be restored later.

    PyTorch's public functions for these settings take as long as a small layer does, and the one
    for deterministic algorithms would load the compiler, for a second or two, to inform it as well.
    """

    def __init__(self) -> None:
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self._fill = _C._get_deterministic_fill_uninitialized_memory()
        self._benchmark = _C._get_cudnn_benchmark()

    @staticmethod
    def repeat_bits() -> None:
        """Choose kernels that repeat their bits, and refuse all others."""
        _C._set_deterministic_algorithms(True, warn_only=False)
        # PyTorch would fill the result of every `torch.empty` with NaN, which helps to find reads
        # of uninitialised memory and costs a pass over each tensor.
        _C._set_deterministic_fill_uninitialized_memory(False)
        # cuDNN would pick the fastest algorithm by timing, so another one in each process.
        _C._set_cudnn_benchmark(False)

    def put_back(self) -> None:
        """Restore the settings as they were."""
        _C._set_deterministic_algorithms(self._deterministic, warn_only=self._warn_only)
        _C._set_deterministic_fill_uninitialized_memory(self._fill)
        _C._set_cudnn_benchmark(self._benchmark)


def load_compiler() -> Any:
    """Load the compiler, which takes a second or two, and return its settings."""
    # Inside the function: whoever does not compile should not pay for the import.
    from torch._dynamo import config

    return config


def compiler_config(*, may_load: bool) -> Any:
    """The settings of the compiler's code generator, if it is loaded; otherwise None.

    Args:
        may_load: whether something may be compiled from now on, though nothing has been so far.
    """
    # The settings may be loaded without the compiler itself; then they matter to nobody yet.
    if may_load or "torch._inductor.compile_fx" in sys.modules:
        return sys.modules.get("torch._inductor.config")
    return None


def code_compiler(device: torch.device) -> str:
    """Name what turns generated code into kernels for a device, with its version.

    Raises:
        RuntimeError: it is not there; says what is missing.
    """
    if load_compiler().disable:
        raise RuntimeError("TORCH_COMPILE_DISABLE is set, which leaves everything as it is written")
    if device.type == "cuda":
        return f"Triton {_triton_version()}"
    # Loads the code generator, for a second or two: it would be loaded in the first step.
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    # Raises a RuntimeError itself where there is none.
    compiler = get_cpp_compiler()
    headers = sysconfig.get_paths()["include"]
    if not os.path.exists(os.path.join(headers, "Python.h")):
        raise RuntimeError(f"Python.h, which kernels are built with, is not in {headers}")
    found = re.search(r"version [\w.]+", get_compiler_version_info(compiler))
    return f"{compiler} {found[0] if found else 'of an unknown version'}"


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        raise RuntimeError("the package triton is not installed") from None


def compiled_call_of(module: torch.nn.Module) -> object | None:
    """The call that ``module.compile()`` has put in place of the module's own, if it has."""
    return module.__dict__.get("_compiled_call_impl")


def is_compiled(value: Any, *, dynamic: bool = False) -> bool:
    """Whether a module or function went through ``torch.compile``.

    Args:
        value: the module or function, or the call that ``module.compile()`` has made.
        dynamic: whether only one counts that was requested to handle varying shapes.
    """
    return _is_dynamic(value) if dynamic else hasattr(value, _COMPILED)


def _is_dynamic(part: Any) -> bool:
    context = getattr(part, "dynamo_ctx", None)
    # A module holds its context as an attribute; a function merely closes over it.
    if context is None:
        cells = getattr(part, "__closure__", None) or ()
        held = [cell.cell_contents for cell in cells]
        context = next((each for each in held if hasattr(each, "_dynamic")), None)
    return getattr(context, "_dynamic", None) is True


def is_in_function() -> bool:
    """Whether the caller is called by the forward of a torch.autograd.Function."""
    # Such a forward has forward-mode derivatives switched off, as torch.no_grad has not.
    return not _C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def wrap_clipping(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the function that ``clip_grad_norm_`` calls; only once, however often this is called."""
    inner: Callable[..., Any] | None = getattr(clip_grad, _CLIP, None)
    if inner is None or hasattr(inner, "__onefold__"):
        return
    wrapped = wrap(inner)
    wrapped.__onefold__ = True  # type: ignore[attr-defined]
    setattr(clip_grad, _CLIP, wrapped)
