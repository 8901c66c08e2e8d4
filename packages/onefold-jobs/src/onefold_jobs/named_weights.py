"""Finds pretrained weights by name: in the cache of their library, or once from its server.

``torchvision:NAME`` uses torchvision's files, whose names contain the start of their digests, and
does not require torchvision. ``hf:ORG/NAME`` is a model of the Hugging Face hub, and ``timm:NAME``
is the timm model with that name, whose weights are on the same hub. Files in the hub's cache are
named by their digests. Each file is verified against its digest, whoever wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from onefold.errors import CheckpointError, DataError
from onefold_jobs import require
from onefold_jobs.data.fetch import cause_of, fetch_file, is_there
from onefold_jobs.models.catalog import TIMM_PREFIX, import_library

__all__ = ["TORCHVISION", "find_weights", "model_named", "timm_facts"]

TORCHVISION: Mapping[str, str] = MappingProxyType({
    "resnet18": "resnet18-f37072fd.pth",
    "resnet34": "resnet34-b627a593.pth",
    "resnet50": "resnet50-11ad3fa6.pth",
    "resnet101": "resnet101-cd907fc2.pth",
    "vgg16": "vgg16-397923af.pth",
})  # fmt: skip
"""torchvision's default weights of the models that this package builds."""
TORCHVISION_SERVER = "https://download.pytorch.org/models/"
HUB_PREFIX = "hf:"
_PREFIX = "torchvision:"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_DESCRIPTION = ("config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json")
_WEIGHTS = (("*.safetensors", "*.safetensors.index.json"), ("pytorch_model*",))
"""File patterns, in order of preference."""
_LARGEST_BYTES = 1 << 30
_SHA256 = re.compile(r"[0-9a-f]{64}")


def find_weights(pretrained: str, *, whole: bool = False, server: str = TORCHVISION_SERVER) -> Path:
    """Find the file or folder of weights that ``--pretrained`` names, and download it if needed.

    Args:
        pretrained: a name with its prefix; anything else is a path, and returned unchanged.
        whole: whether to return the model's folder instead of its weights file, for models on the
            hub.
        server: address of torchvision's files.

    Raises:
        CheckpointError: the name is unknown, or its weights are missing and cannot be downloaded.
            The message gives their address and the place to put them by hand.
        LaunchError: a library is not installed.
    """
    if pretrained.startswith(_PREFIX):
        return _from_torchvision(pretrained.removeprefix(_PREFIX), server)
    if pretrained.startswith(TIMM_PREFIX):
        return _from_hub(timm_facts(pretrained).hf_hub_id, pretrained, whole=whole)
    if pretrained.startswith(HUB_PREFIX):
        return _from_hub(pretrained.removeprefix(HUB_PREFIX), pretrained, whole=whole)
    return Path(pretrained)


def model_named(pretrained: str | None) -> str | None:
    """Return the model that named weights belong to, as in ``--model``; None if unknown."""
    name = pretrained or ""
    return name if name.startswith(TIMM_PREFIX) else TORCHVISION_NAMES.get(name)


TORCHVISION_NAMES = MappingProxyType({f"{_PREFIX}{name}": name for name in TORCHVISION})


def timm_facts(pretrained: str) -> Any:
    """Return timm's facts of the weights ``timm:NAME``: place on the hub, mean, std, input size.

    Raises:
        CheckpointError: timm has no such model, or no weights for it.
        LaunchError: timm cannot be imported.
    """
    library = import_library("timm", pretrained)
    facts = library.models.get_pretrained_cfg(pretrained.removeprefix(TIMM_PREFIX))
    if facts is None or not facts.hf_hub_id:
        raise CheckpointError(
            f"--pretrained {pretrained}: expected a model that timm has weights for; see "
            f"timm.list_pretrained()"
        )
    return facts


def _from_torchvision(name: str, server: str) -> Path:
    if name not in TORCHVISION:
        raise CheckpointError(
            f"--pretrained {_PREFIX}{name}: expected one of {', '.join(TORCHVISION)}"
        )
    file = TORCHVISION[name]
    path = Path(torch.hub.get_dir()) / "checkpoints" / file
    beginning = Path(file).stem.rpartition("-")[2]
    try:
        if not is_there(path, beginning):
            fetch_file([server + file], path, sha256=beginning, most_bytes=_LARGEST_BYTES)
    except DataError as error:
        raise CheckpointError(f"--pretrained {_PREFIX}{name}: {error}") from error
    return path


def _from_hub(name: str, pretrained: str, *, whole: bool) -> Path:
    """Return the folder of a model in the hub's cache, or its weights file."""
    repository, _, revision = name.partition("@")
    if not _HUB_NAME.fullmatch(repository):
        raise CheckpointError(f"--pretrained {pretrained}: expected hf:ORG/NAME, as on the hub")
    require(f"--pretrained {pretrained}", "text", "huggingface_hub")
    from huggingface_hub import snapshot_download

    failure: Exception | None = None
    # Cached files are used as they are: checking for newer ones would require a network, and change
    # a run that is started again.
    for cached in (True, False):
        try:
            for weights in _WEIGHTS:
                # The cache may lack some files of a model.
                patterns = [*_DESCRIPTION, *weights]
                how = {"allow_patterns": patterns, "local_files_only": cached}
                folder = Path(snapshot_download(repository, revision=revision or None, **how))
                found = sorted(each for pattern in weights for each in folder.glob(pattern))
                if found:
                    _compare_all(found)
                    return folder if whole else found[0]
        except DataError as error:
            raise CheckpointError(f"--pretrained {pretrained}: {error}") from error
        # The library raises errors of the network, of the file system and its own.
        except Exception as error:
            failure = error
    none = "it contains neither safetensors nor pytorch_model.bin"
    reason = cause_of(failure) if failure else none
    raise CheckpointError(
        f"--pretrained {pretrained}: could not download https://huggingface.co/{repository}: "
        f"{reason}\nCheck the network, or download it elsewhere (hf download {repository} "
        f"--local-dir FOLDER), copy the folder here, and give --pretrained FOLDER"
    ) from failure


def _compare_all(files: list[Path]) -> None:
    """Verify files of the hub's cache, which are links to files named by their digests."""
    for each in files:
        digest = each.resolve().name
        if _SHA256.fullmatch(digest):
            is_there(each, digest)
