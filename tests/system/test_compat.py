"""The names that PyTorch keeps to itself: each is still there, and does what onefold needs of it.

Where one of these fails with a newer PyTorch, its message says what would break.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import torch

import onefold
from onefold.system import compilers, hooks

SOURCE = Path(onefold.__file__).parent
TABLES = {"_parameters", "_buffers", "_modules", "_version", "_post_accumulate_grad_hooks"}
"""Attributes of PyTorch's modules and tensors, whatever they are called upon."""


def private_names(text: str) -> set[str]:
    """What a module's text uses of PyTorch's or NumPy's own names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            parts = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            if parts[0] in ("torch", "numpy"):
                found |= {part for part in parts if re.match(r"_[^_]", part)}
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            owner = ast.unparse(node.value)
            of_library = re.match(r"(torch|np|numpy|dist)\b", owner) is not None
            if of_library or (node.attr in TABLES and owner not in ("self", "self.parts")):
                found.add(node.attr)
    return found


def test_private_names_are_used_in_one_place_and_those_about_kernels_next_to_it() -> None:
    used = {
        path.relative_to(SOURCE).as_posix(): names
        for path in SOURCE.rglob("*.py")
        if (names := private_names(path.read_text()))
    }
    rooms = ("compat", "compilers", "hooks", "tables")
    assert set(used) == {f"system/{name}.py" for name in rooms}


def test_differentiation_is_seen() -> None:
    """Or a loss that differentiates past a cut of a line of devices would have other gradients."""
    seen: list[tuple[int, int]] = []
    x = torch.ones(2, requires_grad=True)
    with hooks.watch_differentiation(lambda outputs, by: seen.append((len(outputs), len(by)))):
        torch.autograd.grad(x.sum(), x)
        x.sum().backward()
    x.sum().backward()
    assert seen == [(1, 1), (1, 0)]


def test_kernels_that_repeat_their_bits_can_be_chosen_and_put_back() -> None:
    """Or bits would depend on which algorithm was the fastest at the moment."""
    before = compilers.KernelSettings()
    assert not torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    compilers.KernelSettings.repeat_bits()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.backends.cudnn.benchmark
    before.put_back()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == fill
