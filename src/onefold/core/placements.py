"""The placements that a run can choose, and their properties that do not require PyTorch.

`PLACEMENTS` is the only list of them: options, commands, help texts, memory estimates and tests
read it. A row names the class that implements a placement, and `implementation_of` imports that
class when needed, so that a run loads only the placement that it uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

__all__ = ["PLACEMENTS", "PlacementKind", "described", "implementation_of", "kind_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementKind:
    """Properties of a placement that a launcher needs; its class has the rest, see `Placement`."""

    implementation: str
    """Module and name of the `Placement` class."""
    forms: Mapping[str, str]
    """Values for ``--placement``, the plain name first, each with an explanation if it needs one. N
    is the number of devices that compute each shard together, 2 or more; with the plain name, all
    devices do."""
    keeps_whole: bool = False
    """Whether each device keeps the whole model, so that no file contains it."""
    returns_memory: bool = False
    """Whether freed memory is returned to the system at once, because the model exceeds memory."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Options and settings that it does not support, alone or as ``name=value``, and why."""

    @property
    def has_pipelines(self) -> bool:
        """Whether several devices compute a shard together."""
        return any(form.endswith(":N") for form in self.forms)

    def takes(self, text: str) -> bool:
        """Return whether a text is one of the forms."""
        return any(re.fullmatch(form.replace("N", _NUMBER), text) for form in self.forms)

    def reason_against(self, name: str, value: object) -> str:
        """Return why the placement does not support a value of an option; empty if it does."""
        if not value:
            return ""
        return self.refuses.get(name) or self.refuses.get(f"{name}={value}", "")


_NUMBER = "0*([2-9]|[1-9][0-9]+)"

PLACEMENTS: dict[str, PlacementKind] = {
    "replicate": PlacementKind(
        implementation="onefold.placement.replicated:Replicated",
        forms={"replicate": "", "replicate:state": "also replicates the optimizer state"},
        keeps_whole=True,
        refuses={"offload_dir": "every device keeps the whole model, and no file contains it"},
    ),
    "partition": PlacementKind(
        implementation="onefold.placement.partitioned:Partitioned", forms={"partition": ""}
    ),
    "pipeline": PlacementKind(
        implementation="onefold.placement.pipeline.placement:Pipelined",
        forms={"pipeline": "", "pipeline:N": "pipelines of N devices, 2 or more"},
        refuses={
            "audit": "audit computes a shard again on another device, and a pipeline computes a "
            "shard on several devices",
            "shares": "every shard goes through all devices of a pipeline",
            "compile": "a pipeline interrupts the loss, and compiled code cannot be interrupted",
            "microbatch=auto": "the search for a number computes whole shards on one device",
        },
    ),
    "offload": PlacementKind(
        implementation="onefold.placement.partitioned:Offloaded",
        forms={"offload": ""},
        returns_memory=True,
    ),
}
"""Placements by name, in display order; the first one is the default."""


def described() -> str:
    """List all forms of all placements, for help texts and errors."""
    forms = {form: words for kind in PLACEMENTS.values() for form, words in kind.forms.items()}
    return ", ".join(f"{form} ({words})" if words else form for form, words in forms.items())


def kind_of(placement: str) -> PlacementKind:
    """Return the properties of a placement.

    Args:
        placement: one of its forms.

    Raises:
        ValueError: no placement has this form.
    """
    kind = PLACEMENTS.get(str(placement).partition(":")[0])
    if kind is None or not kind.takes(placement):
        raise ValueError(f"placement must be one of {described()}, but got {placement!r}")
    return kind


def implementation_of(name: str) -> Any:
    """Import the class that implements a placement.

    Args:
        name: one of the forms of the placement.

    Returns:
        A subclass of `Placement`, which this package does not import.
    """
    module, _, found = kind_of(name).implementation.partition(":")
    return getattr(import_module(module), found)
