"""Which name of a file is which of a model, where wrappers have put words into either.

Note: names
-----------
Wrappers put words into a name: DataParallel and DDP ``module.``, torch.compile ``_orig_mod.``, in
front or, where only a part of a model was wrapped, further in. Either may be on the file's side or
on the model's. ``_orig_mod`` is nobody's own word and is left out on both sides. ``module`` may be
the model's own. So it is first taken off in front of all names of the file together, as often as
makes most of them names of the model; and a name that still is not the model's is compared without
``module`` anywhere. Where that leaves a choice, nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from onefold.core.names import own_name
from onefold.errors import CheckpointError

__all__ = ["match_names"]


def match_names(found: Collection[str], own: Collection[str]) -> dict[str, str]:
    """Which name of the file is which of the model's; names without a counterpart are left out.

    Raises:
        CheckpointError: a name could be several of the model's, or two could be the same one.
    """
    by_plain, by_bare = _grouped(own, own_name), _grouped(own, _bare)
    matched: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name, plain in _peeled(found, by_plain).items():
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
    """The file's names without what they all have in front, if more of them are the model's so."""
    peeled = {name: own_name(name) for name in found}
    best = peeled
    while peeled and all(name.startswith("module.") for name in peeled.values()):
        peeled = {name: rest.removeprefix("module.") for name, rest in peeled.items()}
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
    *path, last = own_name(name).split(".")
    return ".".join([*(word for word in path if word != "module"), last])
