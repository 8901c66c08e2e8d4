"""Gives onefold-jobs the metadata of onefold: the version of both is in one place."""

import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class SharedMetadata(MetadataHookInterface):
    """Not called in a source distribution, whose PKG-INFO has the values."""

    def update(self, metadata: dict[str, Any]) -> None:
        path = Path(self.root).parent.parent / "pyproject.toml"
        onefold = tomllib.loads(path.read_text())["project"]
        metadata["dependencies"] = [
            f"onefold=={onefold['version']}",
            *onefold["dependencies"],
            *self.config["dependencies"],
        ]
        for each in set(metadata["dynamic"]) - {"dependencies"}:
            metadata[each] = onefold[each]
