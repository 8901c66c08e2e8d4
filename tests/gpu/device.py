"""Where the tests of this folder compute, and the little that they need of a test library.

They run under pytest, and by `tests.gpu.plain` where there is none, on a machine that has PyTorch
and nothing else: so nothing here imports pytest. What differs between the two is done in
``conftest.py`` and in ``plain.py``.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import SkipTest

import torch

__all__ = [
    "DEVICE",
    "KIND",
    "ON_GPU",
    "cards",
    "cases_of",
    "each",
    "needs",
    "nobody_waits",
    "raises",
]

DEVICE = os.environ.get("ONEFOLD_GPU_TESTS_ON", "cuda:0")
"""One card, or ``cpu`` to try the tests themselves where there is none.

A pretended one is ``pretend:0``, in an environment of `tests.pretended.build`.
"""
KIND = torch.device(DEVICE).type
ON_GPU = KIND != "cpu"

F = TypeVar("F", bound=Callable[..., None])


def each(name: str, values: Sequence[object]) -> Callable[[F], F]:
    """Run a test with each of these values of one of its arguments."""

    def mark(test: F) -> F:
        test.__dict__.setdefault("cases", []).append((name, list(values)))
        return test

    return mark


def cases_of(test: Callable[..., None]) -> list[tuple[str, list[Any]]]:
    """The arguments that `each` gives to a test, and their values."""
    return list(test.__dict__.get("cases", ()))


def needs(condition: bool, what: str) -> None:
    """Skip a test on a machine that lacks something, and say what."""
    if not condition:
        raise SkipTest(f"needs {what}")


@contextmanager
def raises(kind: type[BaseException], words: str) -> Iterator[list[BaseException]]:
    """Expect an error whose message, with its notes, has these words; yields a list for it."""
    found: list[BaseException] = []
    try:
        yield found
    except kind as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        assert re.search(words, text), f"expected {words!r} in {text!r}"
        found.append(error)
    else:
        raise AssertionError(f"expected {kind.__name__} with {words!r}, and nothing was raised")


def cards() -> int:
    """How many GPUs PyTorch sees."""
    return torch.accelerator.device_count() if ON_GPU else 0


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Raise where the host would wait for the card, unless a script asks for it by name."""
    module: Any = torch.get_device_module(DEVICE)
    needs(hasattr(module, "set_sync_debug_mode"), "a way to notice that the host waits")
    torch.accelerator.synchronize()
    module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        module.set_sync_debug_mode("default")
