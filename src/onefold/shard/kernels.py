"""Selects kernels that give the same bits whatever this process has computed before.

Note: compilers
---------------
Compiled code may depend on the shapes seen before: after the second shape ``torch.compile``
generates code for dynamic shapes, and TorchScript's executor specializes on its inputs. The shapes
that a process sees depend on the number of devices and on where a run was interrupted. During a
call shapes are therefore static, with separate code for each, and TorchScript runs without
optimization. A model compiled with ``dynamic=True`` requests the opposite and is refused.

Note: settings of the whole process
-----------------------------------
All of these settings are global. They are set for the duration of a call and then restored, so that
the script's own computations between steps use the script's settings.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from onefold.errors import PrecisionError
from onefold.shard.model_parts import closed_over
from onefold.system.accelerator import name_of
from onefold.system.internals import (
    KernelSettings,
    compiled_call_of,
    compiler_config,
    is_compiled,
    load_compiler,
)

__all__ = ["Compilers", "calls_compiled", "computing_in", "repeatable_kernels", "thread_modes"]

_NOTHING = nullcontext()

_SHAPES = 1024
"""Limit of compiled shapes: shards have two sizes, and those of the last batch differ."""


class Compilers:
    """Detects whether a model is compiled, and makes compiled code repeat its bits.

    Args:
        module: the user's model.
        functions: its loss functions.
        compiles: whether Trainer compiles both.

    Raises:
        ValueError: the model or a loss is compiled for dynamic shapes.
    """

    def __init__(
        self, module: torch.nn.Module, *functions: Callable[..., object], compiles: bool = False
    ) -> None:
        compiled = list(_compiled_parts(module, functions))
        for name, part in compiled:
            if is_compiled(part, dynamic=True):
                raise ValueError(
                    f"{name} is compiled with dynamic=True, so its bits depend on the shapes that "
                    f"a device has seen, and therefore on the number of devices. Compile it with "
                    f"dynamic=False, or omit dynamic"
                )
        self.by_user = bool(compiled)
        """Whether the script itself compiled a part of the model or its loss."""
        self.compiled = compiles or self.by_user
        """Whether ``torch.compile`` compiled any part of the model or its loss."""
        self._scripted = any(isinstance(m, torch.jit.ScriptModule) for m in module.modules())

    def settled(self) -> AbstractContextManager[None]:
        """Make compilers treat shapes as static inside this context."""
        return self._settled() if self.compiled or self._scripted else _NOTHING

    @contextmanager
    def _settled(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._scripted:
                stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
            if self.compiled:
                # Beyond its limit the compiler would fall back to eager kernels, whose bits differ,
                # with a log line at most. Raise instead.
                settings: dict[str, Any] = {
                    "automatic_dynamic_shapes": False,
                    "assume_static_by_default": True,
                    "recompile_limit": _SHAPES,
                    "accumulated_recompile_limit": _SHAPES,
                    "fail_on_recompile_limit_hit": True,
                    # The compiler's own errors would cause the same fallback.
                    "suppress_errors": False,
                    # Without these guards, hooks added or removed between steps have no effect.
                    "skip_nnmodule_hook_guards": False,
                }
                stack.enter_context(load_compiler().patch(**settings))
            yield


def repeatable_kernels(*, wanted: bool, may_compile: bool = True) -> AbstractContextManager[None]:
    """Make PyTorch choose kernels that repeat their bits; restore the settings afterwards.

    Args:
        wanted: whether to do so; if False, this context changes nothing.
        may_compile: whether this block may compile something for the first time in this process.
    """
    return _Repeatable(may_compile) if wanted else _NOTHING


def thread_modes(kind: str) -> Callable[[], None]:
    """Read the thread's gradient mode and autocast; return the function that restores them.

    An exception from a signal handler may cut short even the ``__exit__`` of PyTorch's contexts.
    """
    grad, enabled = torch.is_grad_enabled(), torch.is_autocast_enabled(kind)
    dtype, caches = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    # Autocast drops its copies of weights at the end of the outermost block only.
    depth, _ = torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()

    def put_back() -> None:
        torch.set_grad_enabled(grad)
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(caches)
        torch.clear_autocast_cache()
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting() >= depth:
            pass

    return put_back


class _Repeatable(AbstractContextManager[None]):
    def __init__(self, may_compile: bool) -> None:
        self._before = KernelSettings()
        # The compiler has its own switch. Do not load the compiler for it, which takes a second or
        # two, unless something may be compiled.
        self._compiler = compiler_config(may_load=may_compile)
        self._compiled = self._compiler is not None and self._compiler.deterministic

    def __enter__(self) -> None:
        self._before.repeat_bits()
        if self._compiler is not None:
            self._compiler.deterministic = True

    def __exit__(self, *_: object) -> None:
        self._before.put_back()
        if self._compiler is not None:
            self._compiler.deterministic = self._compiled


def calls_compiled(module: torch.nn.Module, *functions: object) -> bool:
    """Whether any part of a module, or of its functions, was compiled by ``torch.compile``."""
    return any(True for _ in _compiled_parts(module, functions))


def _compiled_parts(
    module: torch.nn.Module, functions: Sequence[object]
) -> Iterator[tuple[str, Any]]:
    """Yield the compiled parts of the model and its loss, with a name for each."""
    # There are three cases: module.compile() keeps the compiled call in the module; torch.compile
    # wraps a module, or marks a function, which may be a method that the script replaced.
    for name, part in module.named_modules():
        called = compiled_call_of(part)
        if called is not None:
            yield f"module {name or 'model'}", called
        if is_compiled(part):
            yield f"module {name or 'model'}", part
        for attribute, value in vars(part).items():
            if callable(value) and value is not called and _has_mark(value):
                yield f"{name or 'model'}.{attribute}", value
    for function in functions:
        if _has_mark(function):
            yield "the loss", function
        yield from (("what the loss calls", v) for v in closed_over(function) if _has_mark(v))


def _has_mark(value: object) -> bool:
    # Compiled modules are found above; a wrapped module would be listed twice here.
    return not isinstance(value, torch.nn.Module) and is_compiled(value)


_NO_KERNEL = (
    "could not create a primitive",
    "not implemented for 'BFloat16'",
    "not implemented for 'Half'",
    "must have the same dtype",
    "to have the same dtype",
    "expected scalar type",
)
"""Fragments of the errors that kernels raise if a dtype is unsupported or dtypes are mixed."""


@contextmanager
def computing_in(
    dtype: torch.dtype, device: torch.device, module: torch.nn.Module
) -> Iterator[None]:
    """Run autocast in a lower precision, and explain the error if the device lacks a kernel.

    Args:
        dtype: the dtype of autocast.
        device: the device that computes.
        module: the model, whose layers the error names.

    Raises:
        PrecisionError: an operation has no kernel for this dtype on the device.
    """
    try:
        with torch.autocast(device.type, dtype=dtype):
            yield
    except RuntimeError as error:
        if isinstance(error, PrecisionError) or not any(e in str(error) for e in _NO_KERNEL):
            raise
        layer = _layer_of(error.__traceback__, module)
        name = str(dtype).removeprefix("torch.")
        short = "bf16" if dtype is torch.bfloat16 else "fp16"
        said = str(error).strip().splitlines()[0].rstrip(".")
        raise PrecisionError(
            f"{layer} cannot be computed in {name} on {_processor(device)}: PyTorch raised "
            f'"{said}". Use Trainer(precision="fp32"), or compute this layer in float32, inside '
            f'torch.autocast("{device.type}", enabled=False), with inputs converted by .float(). '
            f'With precision="{short}-params", first try "{short}", which keeps weights in float32'
        ) from error


def _layer_of(traceback: TracebackType | None, module: torch.nn.Module) -> str:
    """Name the innermost layer of the model whose method is in a traceback."""
    names = {id(layer): name for name, layer in module.named_modules()}
    # Traceback entries go from the outermost to the innermost frame, so the last match wins.
    found = "an operation of the loss function"
    while traceback is not None:
        layer = traceback.tb_frame.f_locals.get("self")
        if isinstance(layer, torch.nn.Module) and id(layer) in names:
            name = names[id(layer)]
            kind = type(layer).__name__
            found = f"layer {name} ({kind})" if name else f"an operation of the model ({kind})"
        traceback = traceback.tb_next
    return found


def _processor(device: torch.device) -> str:
    if device.type != "cpu":
        return name_of(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = next(iter(models), platform.machine())
    return f"this processor ({model}, kernels for {torch.backends.cpu.get_cpu_capability()})"
