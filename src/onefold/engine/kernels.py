"""Kernels that repeat their bits, whatever this process has computed before.

Note: compilers
---------------
What a compiler makes of a model may depend on the shapes that it has met: after the second shape,
``torch.compile`` makes code for shapes that vary, and TorchScript's executor specialises on what it
sees. Which shapes a process meets depends on the number of devices and on where a run was stopped.
So inside a call shapes are taken as fixed, each with code of its own, and TorchScript runs as it is
written. A model that was compiled with ``dynamic=True`` asks for the opposite and is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["Compilers", "repeatable_kernels"]

# PyTorch's public functions for these settings take as long as a small layer does, and that for
# deterministic algorithms would load the compiler, for a second or two, to tell it as well.
_C: Any = torch._C

_NOTHING = nullcontext()

_SHAPES = 1024
"""Shapes for which code may be made: there are two sizes of shards, and those of a last batch."""


class Compilers:
    """What of a model is compiled, and the settings under which it repeats its bits.

    Args:
        module: the user's own.
        function: its loss.

    Raises:
        ValueError: a part is compiled for shapes that vary.
    """

    def __init__(self, module: torch.nn.Module, function: Callable[..., object]) -> None:
        compiled = list(_compiled_parts(module, function))
        for name, part in compiled:
            if _is_dynamic(part):
                raise ValueError(
                    f"{name} is compiled with dynamic=True: its bits would depend on the shapes "
                    f"that a device has met, and so on the number of devices. Compile it without, "
                    f"or with dynamic=False"
                )
        self.compiled = bool(compiled)
        """Whether ``torch.compile`` has a part in the model or its loss."""
        self._scripted = any(isinstance(m, torch.jit.ScriptModule) for m in module.modules())

    def settled(self) -> AbstractContextManager[None]:
        """Shapes are fixed in here; a limit that is hit is an error, not other code."""
        return self._settled() if self.compiled or self._scripted else _NOTHING

    @contextmanager
    def _settled(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._scripted:
                stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
            if self.compiled:
                from torch._dynamo import config

                settings: dict[str, Any] = {
                    "automatic_dynamic_shapes": False,
                    "assume_static_by_default": True,
                    "recompile_limit": _SHAPES,
                    "accumulated_recompile_limit": _SHAPES,
                    "fail_on_recompile_limit_hit": True,
                }
                stack.enter_context(config.patch(**settings))
            yield


@contextmanager
def repeatable_kernels(*, deterministic: bool, may_compile: bool = True) -> Iterator[None]:
    """Kernels that repeat their bits, where asked for; the caller's settings again afterwards.

    Args:
        deterministic: whether it is asked for.
        may_compile: whether something may begin to be compiled in here, though nothing has been in
            this process so far.
    """
    if not deterministic:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = _C._get_deterministic_fill_uninitialized_memory()
    benchmark = _C._get_cudnn_benchmark()
    compiler: Any = None
    if may_compile or "torch._inductor.compile_fx" in sys.modules:
        compiler = sys.modules.get("torch._inductor.config")
    compiled_before = compiler is not None and compiler.deterministic
    _C._set_deterministic_algorithms(True, warn_only=False)
    if compiler is not None:
        compiler.deterministic = True
    _C._set_deterministic_fill_uninitialized_memory(False)
    _C._set_cudnn_benchmark(False)
    try:
        yield
    finally:
        _C._set_deterministic_algorithms(before, warn_only=warn_only)
        if compiler is not None:
            compiler.deterministic = compiled_before
        _C._set_deterministic_fill_uninitialized_memory(fill)
        _C._set_cudnn_benchmark(benchmark)


_COMPILED = "_torchdynamo_orig_callable"


def _compiled_parts(
    module: torch.nn.Module, function: Callable[..., object]
) -> Iterator[tuple[str, Any]]:
    """What of the model or its loss went through ``torch.compile``, with a name for it."""
    for name, part in module.named_modules():
        called = part.__dict__.get("_compiled_call_impl")
        if called is not None:
            yield f"module {name or 'model'}", called
        if hasattr(part, _COMPILED):
            yield f"module {name or 'model'}", part
        for attribute, value in vars(part).items():
            if callable(value) and attribute != "_compiled_call_impl" and _has_mark(value):
                yield f"{name or 'model'}.{attribute}", value
    if _has_mark(function):
        yield "the loss", function
    for cell in getattr(function, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if _has_mark(value):
            yield "what the loss calls", value


def _has_mark(value: object) -> bool:
    return not isinstance(value, torch.nn.Module) and hasattr(value, _COMPILED)


def _is_dynamic(part: Any) -> bool:
    """Whether a compiled part was asked to handle shapes that vary."""
    context = getattr(part, "dynamo_ctx", None)
    if context is None:  # a function: its context is among what it closes over
        cells = getattr(part, "__closure__", None) or ()
        held = [cell.cell_contents for cell in cells]
        context = next((each for each in held if hasattr(each, "_dynamic")), None)
    return getattr(context, "_dynamic", None) is True
