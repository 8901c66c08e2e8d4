"""The placements that a run can choose, and what is known of each before PyTorch is loaded.

`PLACEMENTS` is the only list of them: options, commands, help texts, memory estimates and tests
read it. A row names the class that implements a placement, and `implementation_of` imports that
class when it is needed, so that a run loads only the placement that it uses.
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
    """What a launcher knows of a placement; its class knows the rest, see `Placement`."""

    implementation: str
    """Module and name of the class, a `Placement`."""
    forms: Mapping[str, str]
    """How ``--placement`` names it, the plain name first, with a few words where the name does not
    say it all. N is a number of devices, 2 or more, which compute each shard together; the plain
    name then is for all of them."""
    keeps_whole: bool = False
    """Whether each device keeps the whole model, so that no file has it."""
    returns_memory: bool = False
    """Whether freed memory goes back to the system at once, as the model is larger than it."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Options and settings that it cannot have, alone or as ``name=value``, and why."""

    @property
    def has_pipelines(self) -> bool:
        """Whether several devices compute a shard together."""
        return any(form.endswith(":N") for form in self.forms)

    def takes(self, text: str) -> bool:
        """Whether a text is one of the forms."""
        return any(re.fullmatch(form.replace("N", _NUMBER), text) for form in self.forms)

    def reason_against(self, name: str, value: object) -> str:
        """Why an option or setting cannot have a value with this placement; empty if it can."""
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
"""By name, in the order in which they are listed; the first is the default."""


def described() -> str:
    """List all forms of all placements, for help texts and errors."""
    forms = {form: words for kind in PLACEMENTS.values() for form, words in kind.forms.items()}
    return ", ".join(f"{form} ({words})" if words else form for form, words in forms.items())


def kind_of(placement: str) -> PlacementKind:
    """Return what is known of a placement.

    Args:
        placement: in one of its forms.

    Raises:
        ValueError: no placement has this form.
    """
    kind = PLACEMENTS.get(str(placement).partition(":")[0])
    if kind is None or not kind.takes(placement):
        raise ValueError(f"expected placement to be one of {described()}, got {placement!r}")
    return kind


def implementation_of(name: str) -> Any:
    """Import the class that implements a placement.

    Args:
        name: the placement, in one of its forms.

    Returns:
        A type of `Placement`, which this room does not know.
    """
    module, _, found = kind_of(name).implementation.partition(":")
    return getattr(import_module(module), found)
