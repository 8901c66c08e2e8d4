"""What PyTorch keeps to itself about modules, optimizers, their hooks, kernels and its compiler.

As for ``compat.py``, ``tests/system/test_compat.py`` says for each name what would break.
"""

from __future__ import annotations

import functools
import operator
import os
import re
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.utils import clip_grad

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
_OPTIMIZER: Any = sys.modules["torch.optim.optimizer"]  # torch.optim does not show it
_CLIP = "_clip_grads_with_norm_"
_NOT_A_SCRIPTS = ("onefold.", "torch.")
"""Where hooks are from that only look, ours and those of PyTorch's profiler."""


# `named_parameters()` walks the whole tree, skips None, and leaves out the second name of a tied
# parameter; whoever replaces parameters needs every place.
parameters_of: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]]
parameters_of = operator.attrgetter("_parameters")
"""The table in which a module holds its own parameters."""


children_of: Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]]
children_of = operator.attrgetter("_modules")
"""The table in which a module holds the modules that are its own."""


buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]]
buffers_of = operator.attrgetter("_buffers")
"""The table in which a module holds its own buffers."""


def steps_a_scheduler(step: Callable[..., object]) -> bool:
    """Whether a learning rate scheduler has wrapped an optimizer's step method."""
    return hasattr(step, "_wrapped_by_lr_sched")


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a script has put code around an optimizer's ``step()``: a hook, or a wrapper."""
    of_all = _OPTIMIZER._global_optimizer_pre_hooks, _OPTIMIZER._global_optimizer_post_hooks
    own = (vars(optimizer).get(f"_optimizer_step_{w}_hooks", {}) for w in ("pre", "post"))
    hooks = (hook for table in (*of_all, *own) for hook in table.values())
    if any(not (getattr(h, "__module__", None) or "").startswith(_NOT_A_SCRIPTS) for h in hooks):
        return True
    step = vars(optimizer).get("step")
    # A scheduler puts a function there that only notes the call, around what it found.
    noted = step is not None and steps_a_scheduler(step)
    return step is not None and not (noted and step.__wrapped__ is type(optimizer).step)


def watch_clipping(check: Callable[[list[torch.Tensor], bool], None]) -> None:
    """Have ``clip_grad_norm_`` call a check first; only once, however often this is called.

    Args:
        check: is given the parameters, and whether there were several. They count as several if
            they came in a list, however many there are in it.
    """
    inner: Callable[..., Any] | None = getattr(clip_grad, _CLIP, None)
    if inner is None or hasattr(inner, "__onefold__"):
        return

    @functools.wraps(inner)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        # A list, as parameters may come as a generator, which can be gone through only once.
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
    """The hooks on all modules, and what looks at backward passes, as they are now.

    Also whether a layer that is checkpointed is computed again only as far as it is needed.
    """

    def __init__(self) -> None:
        self._of_modules = [table.copy() for table in _OF_ALL_MODULES]
        self._backward = _AUTOGRAD._engine_run_backward
        self._stops_early = _CHECKPOINT._enable_checkpoint_early_stop

    def put_back(self) -> None:
        """Make them these again."""
        for table, kept in zip(_OF_ALL_MODULES, self._of_modules, strict=True):
            table.clear()
            table.update(kept)
        _AUTOGRAD._engine_run_backward = self._backward
        _CHECKPOINT._enable_checkpoint_early_stop = self._stops_early


def complete_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the tables of hooks that its class has not made.

    Some that wrap another (Lookahead) never call ``Optimizer.__init__``.
    """
    # Not by Optimizer.__setstate__, which would also wrap the step of the class: other instances
    # of it, which lack the tables, could then no longer step.
    names = (each for each in torch.optim.Optimizer.__annotations__ if each.endswith("_hooks"))
    vars(optimizer).update({name: OrderedDict() for name in names} | vars(optimizer))


def hooked(parameters: Iterable[torch.Tensor]) -> list[int]:
    """The places of the parameters that have a hook on their accumulated gradient."""
    # No call for each of them: a step asks anew, and a model may have thousands.
    return [n for n, each in enumerate(parameters) if each._post_accumulate_grad_hooks]


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has hooks that backward calls."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def hook_owners(module: torch.nn.Module) -> list[Any]:
    """The objects of which methods are hooks of a module."""
    forward = (module._forward_hooks, module._forward_pre_hooks)
    backward = (module._backward_hooks, module._backward_pre_hooks)
    hooks = [hook for table in (*forward, *backward) for hook in table.values()]
    return [owner for hook in hooks if (owner := getattr(hook, "__self__", None)) is not None]


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
def watch_differentiation(
    inspect: Callable[[Sequence[Any], Sequence[Any]], None],
) -> Iterator[None]:
    """A block in which something is called with what is differentiated, and with what by.

    That is with the outputs, and the inputs or nothing if those are all leaves.
    """
    # Both torch.autograd.grad and backward call it by this name, wherever they are imported to.
    inner = _AUTOGRAD._engine_run_backward

    def watched(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        inspect(outputs, args[3])
        return inner(outputs, *args, **kwargs)

    _AUTOGRAD._engine_run_backward = watched
    try:
        yield
    finally:
        _AUTOGRAD._engine_run_backward = inner


_C: Any = torch._C
_COMPILED = "_torchdynamo_orig_callable"


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
        # of uninitialized memory and costs a pass over each tensor.
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
        try:
            return f"Triton {version('triton')}"
        except PackageNotFoundError:
            raise RuntimeError("the package triton is not installed") from None
    # Loads the code generator, for a second or two: it would be loaded in the first step.
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    # Raises a RuntimeError itself where there is none.
    compiler = get_cpp_compiler()
    headers = sysconfig.get_paths()["include"]
    if not os.path.exists(os.path.join(headers, "Python.h")):
        raise RuntimeError(f"Python.h, which kernels are built with, is not in {headers}")
    found = re.search(r"version [\w.]+", get_compiler_version_info(compiler))
    return f"{compiler} {found[0] if found else 'of an unknown version'}"


def keep_code_in(folder: str) -> None:
    """Have the compiler keep nothing outside a folder, which its variable must name as well.

    A few caches (headers that are compiled first, what was memoised) do not look at the variable.
    """
    from torch._inductor.runtime import cache_dir_utils

    cache_dir_utils.default_cache_dir = lambda: folder
    # Those that have taken the name, or the folder itself, when they were loaded.
    for name in ("torch._inductor.runtime.runtime_utils", "torch._inductor.codecache"):
        if name in sys.modules:
            sys.modules[name].default_cache_dir = cache_dir_utils.default_cache_dir  # type: ignore[attr-defined]
    if "torch._inductor.codecache" in sys.modules:
        code: Any = sys.modules["torch._inductor.codecache"]
        code._HEADER_DIR = os.path.join(folder, "precompiled_headers")
        code._HEADER_LOCK_DIR = os.path.join(folder, "precompiled_headers", "locks")


def compiled_call_of(module: torch.nn.Module) -> object | None:
    """The call that ``module.compile()`` has put in place of the module's own, if it has."""
    return module.__dict__.get("_compiled_call_impl")


def is_compiled(value: Any, *, dynamic: bool = False) -> bool:
    """Whether a module or function went through ``torch.compile``.

    Args:
        value: the module or function, or the call that ``module.compile()`` has made.
        dynamic: whether only one counts that was requested to handle varying shapes.
    """
    if not dynamic:
        return hasattr(value, _COMPILED)
    context = getattr(value, "dynamo_ctx", None)
    # A module holds its context as an attribute; a function merely closes over it.
    if context is None:
        cells = getattr(value, "__closure__", None) or ()
        held = [cell.cell_contents for cell in cells]
        context = next((each for each in held if hasattr(each, "_dynamic")), None)
    return getattr(context, "_dynamic", None) is True
