"""PyTorch's private names about modules, optimizers, their hooks, kernels and the compiler.

As for ``compat.py``, ``tests/system/test_compat.py`` shows for each name what would break.
"""

from __future__ import annotations

import functools
import operator
import os
import re
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.utils import clip_grad

from onefold.system.process import Replaced

__all__ = [
    "KernelSettings",
    "ProcessHooks",
    "buffers_of",
    "children_of",
    "code_compiler",
    "compiled_call_of",
    "compiler_config",
    "complete_hooks",
    "has_backward_hooks",
    "has_own_step",
    "hide_backward_hooks",
    "hook_owners",
    "hooked",
    "is_compiled",
    "keep_code_in",
    "load_compiler",
    "parameters_of",
    "steps_a_scheduler",
    "watch_clipping",
    "watch_differentiation",
]

_AUTOGRAD: Any = torch.autograd
_CHECKPOINT: Any = torch.utils.checkpoint
_OPTIMIZER: Any = sys.modules["torch.optim.optimizer"]  # not accessible through torch.optim
_CLIP = "_clip_grads_with_norm_"
_NOT_A_SCRIPTS = ("onefold.", "torch.")
"""Modules whose hooks only observe: onefold's, and those of PyTorch's profiler."""


# `named_parameters()` walks the whole tree, skips None, and omits the second name of a tied
# parameter, but replacing parameters requires every place.
parameters_of: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]]
parameters_of = operator.attrgetter("_parameters")
"""A module's table of its own parameters, without those of its children."""


children_of: Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]]
children_of = operator.attrgetter("_modules")
"""A module's table of its children."""


buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]]
buffers_of = operator.attrgetter("_buffers")
"""A module's table of its own buffers, without those of its children."""


def steps_a_scheduler(step: Callable[..., object]) -> bool:
    """Whether a learning rate scheduler has wrapped an optimizer's step method."""
    return hasattr(step, "_wrapped_by_lr_sched")


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a script has added a hook or a wrapper to an optimizer's ``step()``."""
    of_all = _OPTIMIZER._global_optimizer_pre_hooks, _OPTIMIZER._global_optimizer_post_hooks
    own = (vars(optimizer).get(f"_optimizer_step_{w}_hooks", {}) for w in ("pre", "post"))
    hooks = (hook for table in (*of_all, *own) for hook in table.values())
    if any(not (getattr(h, "__module__", None) or "").startswith(_NOT_A_SCRIPTS) for h in hooks):
        return True
    step = vars(optimizer).get("step")
    # A scheduler wraps the existing step in a function that only counts the calls.
    noted = step is not None and steps_a_scheduler(step)
    return step is not None and not (noted and step.__wrapped__ is type(optimizer).step)


def watch_clipping(check: Callable[[list[torch.Tensor], bool], None]) -> None:
    """Make ``clip_grad_norm_`` call a check first. Repeated calls have no effect.

    Args:
        check: is called with the parameters, and with whether they were passed as a collection, of
            whatever length, instead of as a single tensor.
    """
    inner: Callable[..., Any] | None = getattr(clip_grad, _CLIP, None)
    if inner is None or hasattr(inner, "__onefold__"):
        return

    @functools.wraps(inner)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        # A list, because a generator of parameters can be consumed only once.
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        check(listed, "is_generator" in sys._getframe(1).f_locals)
        return inner(listed, *args, **kwargs)

    clip.__onefold__ = True  # type: ignore[attr-defined]
    setattr(clip_grad, _CLIP, clip)


_OF_ALL_MODULES: list[dict[int, Any]] = [
    table
    for name, table in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(table, dict)
]


class ProcessHooks:
    """The current global hooks of modules, and the current function that runs backward passes.

    Also whether a checkpointed layer is recomputed only as far as it is needed.
    """

    def __init__(self) -> None:
        self._of_modules = [table.copy() for table in _OF_ALL_MODULES]
        self._backward = _AUTOGRAD._engine_run_backward
        self._stops_early = _CHECKPOINT._enable_checkpoint_early_stop

    def put_back(self) -> None:
        """Restore the saved state."""
        for table, kept in zip(_OF_ALL_MODULES, self._of_modules, strict=True):
            table.clear()
            table.update(kept)
        _AUTOGRAD._engine_run_backward = self._backward
        _CHECKPOINT._enable_checkpoint_early_stop = self._stops_early


def complete_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Add the tables of hooks that an optimizer's class did not create.

    Optimizers that wrap another one (Lookahead) may not call ``Optimizer.__init__``.
    """
    # Do not use Optimizer.__setstate__, which would also wrap the step method of the class. Other
    # instances, which lack the tables, could then no longer step.
    names = (each for each in torch.optim.Optimizer.__annotations__ if each.endswith("_hooks"))
    vars(optimizer).update({name: OrderedDict() for name in names} | vars(optimizer))


def hooked(parameters: Iterable[torch.Tensor]) -> list[int]:
    """Return the indices of the parameters with a hook on their accumulated gradient."""
    # A comprehension without calls: this runs in every step, and a model may have thousands.
    return [n for n, each in enumerate(parameters) if each._post_accumulate_grad_hooks]


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has hooks that the backward pass calls."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def hook_owners(module: torch.nn.Module) -> list[Any]:
    """Return the objects whose methods are hooks of a module."""
    forward = (module._forward_hooks, module._forward_pre_hooks)
    backward = (module._backward_hooks, module._backward_pre_hooks)
    hooks = [hook for table in (*forward, *backward) for hook in table.values()]
    return [owner for hook in hooks if (owner := getattr(hook, "__self__", None)) is not None]


def hide_backward_hooks(module: torch.nn.Module) -> Replaced:
    """Hide a module's backward hooks from its calls inside a block."""
    return Replaced(module, _backward_hooks=OrderedDict(), _backward_pre_hooks=OrderedDict())


def watch_differentiation(inspect: Callable[[Sequence[Any], Sequence[Any]], None]) -> Replaced:
    """Call a function before each differentiation inside a block.

    Its arguments are the outputs, and the inputs, which are empty if they are all leaves.
    """
    # torch.autograd.grad and backward both look up this name, wherever they were imported to.
    inner = _AUTOGRAD._engine_run_backward

    def watched(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        inspect(outputs, args[3])
        return inner(outputs, *args, **kwargs)

    return Replaced(_AUTOGRAD, _engine_run_backward=watched)


_C: Any = torch._C
_COMPILED = "_torchdynamo_orig_callable"


class KernelSettings:
    """The current settings that affect the choice of kernels, to be restored later.

    PyTorch's public functions for these settings take as long as a small layer, and the one for
    deterministic algorithms would load the compiler, which takes a second or two.
    """

    def __init__(self) -> None:
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self._fill = _C._get_deterministic_fill_uninitialized_memory()
        self._benchmark = _C._get_cudnn_benchmark()

    @staticmethod
    def repeat_bits() -> None:
        """Select deterministic kernels; operations without one raise an error."""
        _C._set_deterministic_algorithms(True, warn_only=False)
        # Otherwise PyTorch fills the result of every `torch.empty` with NaN, to expose reads of
        # uninitialized memory, at the cost of a pass over each tensor.
        _C._set_deterministic_fill_uninitialized_memory(False)
        # Otherwise cuDNN times its algorithms, and may pick a different one in each process.
        _C._set_cudnn_benchmark(False)

    def put_back(self) -> None:
        """Restore the saved settings."""
        _C._set_deterministic_algorithms(self._deterministic, warn_only=self._warn_only)
        _C._set_deterministic_fill_uninitialized_memory(self._fill)
        _C._set_cudnn_benchmark(self._benchmark)


def load_compiler() -> Any:
    """Load the compiler, which takes a second or two, and return its settings."""
    # Import here, so that runs without compilation do not pay for it.
    from torch._dynamo import config

    return config


def compiler_config(*, may_load: bool) -> Any:
    """Return the settings of the compiler's code generator if it is loaded, otherwise None.

    Args:
        may_load: whether code may be compiled from now on, although none has been so far.
    """
    # The settings may be loaded without the compiler itself; then nothing has used them yet.
    if may_load or "torch._inductor.compile_fx" in sys.modules:
        return sys.modules.get("torch._inductor.config")
    return None


def code_compiler(device: torch.device) -> str:
    """Return the name and version of the tool that compiles generated code for a device.

    Raises:
        RuntimeError: the tool or one of its files is missing; the message names it.
    """
    if load_compiler().disable:
        raise RuntimeError("TORCH_COMPILE_DISABLE is set, which disables compilation")
    if device.type == "cuda":
        try:
            return f"Triton {version('triton')}"
        except PackageNotFoundError:
            raise RuntimeError("the package triton is not installed") from None
    # Loads the code generator, which takes a second or two; the first step would do so anyway.
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    # Raises a RuntimeError if there is no compiler.
    compiler = get_cpp_compiler()
    headers = sysconfig.get_paths()["include"]
    if not os.path.exists(os.path.join(headers, "Python.h")):
        raise RuntimeError(f"Python.h, which is required to build kernels, is not in {headers}")
    found = re.search(r"version [\w.]+", get_compiler_version_info(compiler))
    return f"{compiler} {found[0] if found else 'of an unknown version'}"


def keep_code_in(folder: str) -> None:
    """Keep all files of the compiler in a folder, which its variable must name as well.

    A few caches (precompiled headers, memoized values) ignore the variable.
    """
    from torch._inductor.runtime import cache_dir_utils

    cache_dir_utils.default_cache_dir = lambda: folder
    # Update modules that imported the function, or computed paths from it, when they were loaded.
    for name in ("torch._inductor.runtime.runtime_utils", "torch._inductor.codecache"):
        if name in sys.modules:
            sys.modules[name].default_cache_dir = cache_dir_utils.default_cache_dir  # type: ignore[attr-defined]
    if "torch._inductor.codecache" in sys.modules:
        code: Any = sys.modules["torch._inductor.codecache"]
        code._HEADER_DIR = os.path.join(folder, "precompiled_headers")
        code._HEADER_LOCK_DIR = os.path.join(folder, "precompiled_headers", "locks")


def compiled_call_of(module: torch.nn.Module) -> object | None:
    """Return the call that ``module.compile()`` installed on a module, if any."""
    return module.__dict__.get("_compiled_call_impl")


def is_compiled(value: Any, *, dynamic: bool = False) -> bool:
    """Whether a module or function went through ``torch.compile``.

    Args:
        value: the module or function, or the call that ``module.compile()`` created.
        dynamic: whether to count only compilation that was requested for varying shapes.
    """
    if not dynamic:
        return hasattr(value, _COMPILED)
    context = getattr(value, "dynamo_ctx", None)
    # A module stores its context as an attribute; a function only closes over it.
    if context is None:
        cells = getattr(value, "__closure__", None) or ()
        held = [cell.cell_contents for cell in cells]
        context = next((each for each in held if hasattr(each, "_dynamic")), None)
    return getattr(context, "_dynamic", None) is True
