"""Finds pretrained weights by name: in the cache of their library, or from its server, once.

``torchvision:NAME`` goes by torchvision's files, in whose names their digests begin, and needs no
torchvision. ``hf:ORG/NAME`` is a model of the Hugging Face hub, and ``timm:NAME`` the model of that
name in timm, whose weights lie on the same hub. A file of the hub's cache has its digest for a
name. Each file is compared with its digest, whoever put it there.
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
"""torchvision's default weights of the models that are built here."""
TORCHVISION_SERVER = "https://download.pytorch.org/models/"
HUB_PREFIX = "hf:"
_PREFIX = "torchvision:"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_DESCRIPTION = ("config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json")
_WEIGHTS = (("*.safetensors", "*.safetensors.index.json"), ("pytorch_model*",))
"""Patterns of files, in the order in which they are looked for."""
_LARGEST_BYTES = 1 << 30
_SHA256 = re.compile(r"[0-9a-f]{64}")


def find_weights(pretrained: str, *, whole: bool = False, server: str = TORCHVISION_SERVER) -> Path:
    """Find the file or folder of weights that ``--pretrained`` names, and fetch it if need be.

    Args:
        pretrained: a name with its prefix; anything else is a path, and returned as it is.
        whole: whether the folder of a model on the hub is wanted, rather than its file of weights.
        server: where torchvision's files are.

    Raises:
        CheckpointError: the name is not known, or its weights are not there and cannot be fetched;
            the message says from where and to where they may be put by hand.
        LaunchError: a library is missing.
    """
    if pretrained.startswith(_PREFIX):
        return _from_torchvision(pretrained.removeprefix(_PREFIX), server)
    if pretrained.startswith(TIMM_PREFIX):
        return _from_hub(timm_facts(pretrained).hf_hub_id, pretrained, whole=whole)
    if pretrained.startswith(HUB_PREFIX):
        return _from_hub(pretrained.removeprefix(HUB_PREFIX), pretrained, whole=whole)
    return Path(pretrained)


def model_named(pretrained: str | None) -> str | None:
    """The model that a name of weights is for, as ``--model`` has it; None if it does not say."""
    name = pretrained or ""
    return name if name.startswith(TIMM_PREFIX) else TORCHVISION_NAMES.get(name)


TORCHVISION_NAMES = MappingProxyType({f"{_PREFIX}{name}": name for name in TORCHVISION})


def timm_facts(pretrained: str) -> Any:
    """What timm knows of the weights ``timm:NAME``: their place on the hub, mean, std, input size.

    Raises:
        CheckpointError: timm has no such model, or no weights of it.
        LaunchError: timm cannot be imported.
    """
    library = import_library("timm", pretrained)
    facts = library.models.get_pretrained_cfg(pretrained.removeprefix(TIMM_PREFIX))
    if facts is None or not facts.hf_hub_id:
        raise CheckpointError(
            f"--pretrained {pretrained}: expected a model that timm has weights of, see "
            f"timm.list_pretrained()"
        )
    return facts


def _from_torchvision(name: str, server: str) -> Path:
    if name not in TORCHVISION:
        raise CheckpointError(
            f"--pretrained {_PREFIX}{name}: expected one of {', '.join(TORCHVISION)} there"
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
    """The folder of a model in the hub's cache, or its file of weights."""
    repository, _, revision = name.partition("@")
    if not _HUB_NAME.fullmatch(repository):
        raise CheckpointError(f"--pretrained {pretrained}: expected hf:ORG/NAME, as on the hub")
    require(f"--pretrained {pretrained}", "text", "huggingface_hub")
    from huggingface_hub import snapshot_download

    failure: Exception | None = None
    # What is in the cache is used as it is: asking for something newer would take a network, and
    # change a run that is begun again.
    for cached in (True, False):
        try:
            for weights in _WEIGHTS:
                # Some files of a model in the cache may be missing there.
                patterns = [*_DESCRIPTION, *weights]
                how = {"allow_patterns": patterns, "local_files_only": cached}
                folder = Path(snapshot_download(repository, revision=revision or None, **how))
                found = sorted(each for pattern in weights for each in folder.glob(pattern))
                if found:
                    _compare_all(found)
                    return folder if whole else found[0]
        except DataError as error:
            raise CheckpointError(f"--pretrained {pretrained}: {error}") from error
        # Any: the library raises those of the network, of its own and of the file system.
        except Exception as error:
            failure = error
    none = "it has no weights in safetensors or pytorch_model.bin"
    reason = cause_of(failure) if failure else none
    raise CheckpointError(
        f"--pretrained {pretrained}: https://huggingface.co/{repository} could not be fetched: "
        f"{reason}\ncheck the network, or fetch it elsewhere (hf download {repository} --local-dir "
        f"FOLDER), bring the folder here, and give --pretrained FOLDER"
    ) from failure


def _compare_all(files: list[Path]) -> None:
    """Compare files of the hub's cache, which are links to their digests, with these."""
    for each in files:
        digest = each.resolve().name
        if _SHA256.fullmatch(digest):
            is_there(each, digest)
