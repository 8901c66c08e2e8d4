"""Chooses kernels that repeat their bits, whatever this process has computed before.

Note: compilers
---------------
What a compiler makes of a model may depend on the shapes that it has met: after the second shape,
``torch.compile`` makes code for shapes that vary, and TorchScript's executor specializes on what it
sees. Which shapes a process meets depends on the number of devices and on where a run was stopped.
So inside a call shapes are taken as fixed, each with code of its own, and TorchScript runs as it is
written. A model that was compiled with ``dynamic=True`` asks for the opposite and is refused.

Note: settings of the whole process
-----------------------------------
All of these settings are global. They are set for the length of a call and put back afterwards, so
that what the script computes between two steps is computed as the script chose.
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

__all__ = ["Compilers", "calls_compiled", "computing_in", "repeatable_kernels"]

_NOTHING = nullcontext()

_SHAPES = 1024
"""Shapes for which code may be made: there are two sizes of shards, and those of a last batch."""


class Compilers:
    """Knows whether a model is compiled, and the settings under which it then repeats its bits.

    Args:
        module: the model, made by the user.
        functions: its losses.
        compiles: whether the Trainer compiles both.

    Raises:
        ValueError: a part of either is compiled for shapes that vary.
    """

    def __init__(
        self, module: torch.nn.Module, *functions: Callable[..., object], compiles: bool = False
    ) -> None:
        compiled = list(_compiled_parts(module, functions))
        for name, part in compiled:
            if is_compiled(part, dynamic=True):
                raise ValueError(
                    f"{name} is compiled with dynamic=True: its bits would depend on the shapes "
                    f"that a device has met, and so on the number of devices. Compile it without, "
                    f"or with dynamic=False"
                )
        self.by_user = bool(compiled)
        """Whether the script itself has compiled a part of the model or its loss."""
        self.compiled = compiles or self.by_user
        """Whether ``torch.compile`` has a part in the model or its loss."""
        self._scripted = any(isinstance(m, torch.jit.ScriptModule) for m in module.modules())

    def settled(self) -> AbstractContextManager[None]:
        """Have compilers treat shapes as fixed inside this context."""
        return self._settled() if self.compiled or self._scripted else _NOTHING

    @contextmanager
    def _settled(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._scripted:
                stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
            if self.compiled:
                # Past its limit the compiler would go back to eager kernels, whose bits differ, and
                # say so in a log at most: an error is better.
                settings: dict[str, Any] = {
                    "automatic_dynamic_shapes": False,
                    "assume_static_by_default": True,
                    "recompile_limit": _SHAPES,
                    "accumulated_recompile_limit": _SHAPES,
                    "fail_on_recompile_limit_hit": True,
                    # The same for what cannot be compiled by an error of the compiler.
                    "suppress_errors": False,
                    # Hooks may come and go between steps, and would not be noticed.
                    "skip_nnmodule_hook_guards": False,
                }
                stack.enter_context(load_compiler().patch(**settings))
            yield


@contextmanager
def repeatable_kernels(*, deterministic: bool, may_compile: bool = True) -> Iterator[None]:
    """Have PyTorch choose kernels that repeat their bits; restore the caller's settings afterwards.

    Args:
        deterministic: whether to; if not, nothing is changed.
        may_compile: whether something may be compiled in here for the first time in this process.
    """
    if not deterministic:
        yield
        return
    before = KernelSettings()
    # The compiler has a switch of its own. It is touched only where the compiler is loaded, or may
    # be: loading takes a second or two.
    compiler = compiler_config(may_load=may_compile)
    compiled_before = compiler is not None and compiler.deterministic
    before.repeat_bits()
    if compiler is not None:
        compiler.deterministic = True
    try:
        yield
    finally:
        before.put_back()
        if compiler is not None:
            compiler.deterministic = compiled_before


def calls_compiled(module: torch.nn.Module, *functions: object) -> bool:
    """Whether something of a module, or of what functions call, went through ``torch.compile``."""
    return any(True for _ in _compiled_parts(module, functions))


def _compiled_parts(
    module: torch.nn.Module, functions: Sequence[object]
) -> Iterator[tuple[str, Any]]:
    """List what of the model or its loss went through ``torch.compile``, with a name for each."""
    # There are three ways: module.compile() keeps the compiled call in the module, torch.compile
    # wraps a module, or marks a function, which may be a method that the script has replaced.
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
    # Compiled modules are found as modules; here a wrapped one would be listed twice.
    return not isinstance(value, torch.nn.Module) and is_compiled(value)


_NO_KERNEL = (
    "could not create a primitive",
    "not implemented for 'BFloat16'",
    "not implemented for 'Half'",
    "must have the same dtype",
    "to have the same dtype",
    "expected scalar type",
)
"""Words of the errors of kernels that a device lacks in a dtype, or that refuse several dtypes."""


@contextmanager
def computing_in(
    dtype: torch.dtype, device: torch.device, module: torch.nn.Module
) -> Iterator[None]:
    """Have autocast compute in a lower precision, and say what a device cannot compute in it.

    Args:
        dtype: what autocast casts to.
        device: computes.
        module: the model, whose layers an error names.

    Raises:
        PrecisionError: an operation has no kernel for this dtype there.
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
            f'{layer} cannot be computed in {name} on {_processor(device)}: PyTorch says "{said}". '
            f'Use Trainer(precision="fp32"), or compute this layer in float32: call it in a block '
            f'of torch.autocast("{device.type}", enabled=False), with inputs that are .float(). '
            f'With precision="{short}-params", first choose "{short}": its weights are in float32'
        ) from error


def _layer_of(traceback: TracebackType | None, module: torch.nn.Module) -> str:
    """Name the innermost layer of a model whose method is in a traceback."""
    names = {id(layer): name for name, layer in module.named_modules()}
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
