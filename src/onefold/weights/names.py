"""Matches the names of a file with those of a model, whatever words wrappers have put into them.

Note: names
-----------
Wrappers put words into a name: DataParallel and DDP ``module.``, torch.compile ``_orig_mod.``, in
front or, where only a part of a model was wrapped, further in. Either side may be wrapped, the file
or the model. ``_orig_mod`` is nobody's own word, and is left out on both sides. ``module`` may be a
name of the model's own. So it is first removed from the front of all names of the file together, as
often as turns most of them into names of the model; and a name that is still not the model's is
compared without ``module`` anywhere. If that leaves a choice, nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from onefold.core.names import own_name
from onefold.errors import CheckpointError

__all__ = ["match_names"]


def match_names(found: Collection[str], own: Collection[str]) -> dict[str, str]:
    """Map each name of the file to one of the model; names without a counterpart are left out.

    Raises:
        CheckpointError: a name of the file could be several of the model, or two could be one.
    """
    by_plain, by_bare = _grouped(own, own_name), _grouped(own, _bare)
    matched: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name, plain in _peeled(found, by_plain).items():
        # An exact name takes precedence: only the others are compared without ``module``.
        options = by_plain.get(plain) or by_bare.get(_bare(plain), [])
        if len(options) > 1:
            raise CheckpointError(f"{name} of the file may be {' or '.join(options)} of the model")
        for target in options:
            if target in taken:
                raise CheckpointError(f"{taken[target]} and {name} of the file are both {target}")
            taken[target] = name
            matched[name] = target
    return matched


def _peeled(found: Collection[str], own: Collection[str]) -> dict[str, str]:
    """Remove the ``module.`` that all names begin with, as often as helps most.

    Returns:
        What is left of each of the file's names, by the name as the file has it.
    """
    peeled = {name: own_name(name) for name in found}
    best = peeled
    while peeled and all(name.startswith("module.") for name in peeled.values()):
        peeled = {name: rest.removeprefix("module.") for name, rest in peeled.items()}
        # Strictly more: of two that fit equally well, the one nearer to the file is taken.
        if _known(peeled, own) > _known(best, own):
            best = peeled
    return best


def _known(peeled: Mapping[str, str], own: Collection[str]) -> int:
    return sum(name in own for name in peeled.values())


def _grouped(names: Collection[str], form: Callable[[str], str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(form(name), []).append(name)
    return groups


def _bare(name: str) -> str:
    """Leave out the words of wrappers anywhere in a name."""
    # Except at the end: there it would be the name of a parameter, and not of a module.
    *path, last = own_name(name).split(".")
    return ".".join([*(word for word in path if word != "module"), last])
