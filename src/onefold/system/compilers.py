"""What PyTorch keeps to itself about how kernels are chosen and compiled.

As for ``compat.py``, ``tests/system/test_compat.py`` says for each name what would break.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

__all__ = [
    "KernelSettings",
    "code_compiler",
    "compiled_call_of",
    "compiler_config",
    "is_compiled",
    "keep_code_in",
    "load_compiler",
]

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
