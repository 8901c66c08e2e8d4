"""Reads the tensors of a file that anybody may have written, without running any code of it.

It knows nothing of models: `onefold.weights.load` decides what fits where. What belongs to a
checkpoint is read only if every byte of that checkpoint is as it was written.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from onefold.checkpoint.folder import (
    best_of,
    is_checkpoint,
    open_checkpoint,
    readable_records,
)
from onefold.checkpoint.manifest import TENSOR_FILES
from onefold.errors import CheckpointError
from onefold.system.safe_files import open_plain
from onefold.system.words import message_of

__all__ = ["best_scored", "check_weights", "keys_of_states", "read_weights", "state_under"]

_MODEL = "model.safetensors"
_ZIP = b"PK\x03\x04"
# What torch.save wrote before PyTorch 1.6 begins with a magic number, as a pickle of its own.
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_PICKLE = b"\x80"
_HEAD_BYTES = 16


def read_weights(path: Path) -> Mapping[Any, object]:
    """Read what a file holds, with its tensors on the CPU; its content tells which kind it is.

    Args:
        path: a file of safetensors or ``torch.save``, or a folder with ``model.safetensors``.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file is of another kind, is broken, or cannot be read without running
            code; or the checkpoint that it belongs to is damaged.
    """
    check_weights(path)
    file = path / _MODEL if path.is_dir() else path
    # By content: endings such as .pt, .pth and .bin are used for each of these formats.
    with open_plain(file, follow=True) as stream:
        head = stream.read(_HEAD_BYTES)
    if head.startswith(_ZIP):
        _check_zip(file)
        return _read_torch(file)
    if head.startswith(_LEGACY):
        return _read_torch(file)
    # Safetensors has eight bytes for the length of its header, which is JSON. Before the pickle: of
    # every 32 lengths one begins with the byte of a pickle. Its high bytes are never all zero.
    if head[8:9] == b"{" and (head[5:8] == bytes(3) or not head.startswith(_PICKLE)):
        return _read_safetensors(file)
    if head.startswith(_PICKLE):
        raise _needs_code(file, "a pickle that is not of torch.save's usual form")
    raise CheckpointError(
        f"{file} is empty"
        if not head
        else f"{file} is no file of weights: expected safetensors or what torch.save writes, and "
        f"it begins with {head!r}. A download that failed leaves such files"
    )


def check_weights(path: Path) -> None:
    """Refuse a folder without weights, and a checkpoint that is not exactly as it was written.

    Raises:
        CheckpointError: the path is such a folder, or belongs to such a checkpoint.
    """
    # A user may also name the file inside of a checkpoint, whose digests then hold as well.
    folder = path if path.is_dir() else path.parent
    if (path.is_dir() or path.name in TENSOR_FILES) and is_checkpoint(folder):
        stored = open_checkpoint(folder)
        wanted = _MODEL if path.is_dir() else path.name
        if path.exists() and stored.path(wanted) is None:
            raise CheckpointError(f"{folder} is a checkpoint without {wanted}")
    elif path.is_dir() and not (path / _MODEL).exists():
        raise CheckpointError(
            f"{path} is a folder without {_MODEL}: expected a file of weights, or the folder of "
            f"one checkpoint, such as {path / 'step-00000100'}"
        )


def state_under(content: Mapping[Any, object], key: str | None, path: Path) -> Mapping[str, object]:
    """Find the names and tensors of a file: all that it holds, or what it holds under a key.

    Raises:
        CheckpointError: the file, or what it holds under the key, is not a dict of names.
    """
    state = content if key is None else content.get(key)
    if isinstance(state, Mapping) and all(isinstance(name, str) for name in state):
        return state
    if key is None:
        raise CheckpointError(
            f"{path} holds a dict whose keys are not names: expected a state_dict"
        )
    known = keys_of_states(content)
    raise CheckpointError(
        f"{path} holds no dict of tensors under key={key!r}; "
        + (f"such keys are {', '.join(map(repr, known))}" if known else "it has no such key")
    )


def keys_of_states(content: Mapping[Any, object]) -> list[str]:
    """List the keys under which a file holds dicts of names and tensors."""
    # One tensor will do: a state dict also holds what get_extra_state returned, of any kind.
    return [
        key
        for key, value in content.items()
        if isinstance(key, str)
        and isinstance(value, Mapping)
        and any(isinstance(tensor, torch.Tensor) for tensor in value.values())
        and all(isinstance(name, str) for name in value)
    ]


def _read_safetensors(file: Path) -> Mapping[Any, object]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is a broken safetensors file: {error}") from error


def _check_zip(file: Path) -> None:
    # Looked at before torch.load, whose own error for a TorchScript archive advises to switch
    # weights_only off.
    with _telling_of(file), zipfile.ZipFile(file) as archive:
        members = {name.rpartition("/")[2] for name in archive.namelist()}
    if "constants.pkl" in members:
        raise _needs_code(file, "a TorchScript program")
    if "data.pkl" not in members:
        raise CheckpointError(
            f"{file} is a zip file that torch.save did not write: expected safetensors or what "
            f"torch.save writes. If it holds a file of weights, unpack it first"
        )


def _read_torch(file: Path) -> Mapping[Any, object]:
    # As a stream: given a path, torch.load judges the kind of the file by its ending. And with
    # weights_only, or unpickling would run whatever code the file asks for.
    with _telling_of(file), file.open("rb") as stream:
        content = torch.load(stream, map_location="cpu", weights_only=True)
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{file} holds a {type(content).__name__}: expected a state_dict, or a dict that has "
            f"one under a key"
        )
    return content


@contextmanager
def _telling_of(file: Path) -> Iterator[None]:
    """Turn whatever reading a file of torch.save raises into an error that names the file.

    Raises:
        CheckpointError: the file is broken, or cannot be read without running code.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        raise _needs_code(file, "more than tensors and plain values") from error
    # These are of the machine and not of the file.
    except (OSError, MemoryError):
        raise
    # Where bytes are wrong, unpickling may raise anything.
    except Exception as error:
        reason = (message_of(error) or type(error).__name__).partition("\n")[0]
        raise CheckpointError(f"{file} is a broken file of torch.save: {reason}") from error


def _needs_code(file: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file} holds {what}, and to read that can run any code that somebody put into the file: "
        f"expected a state_dict. If you trust it, load it in a program of its own and save the "
        f"model's state_dict() with torch.save or safetensors"
    )


def best_scored(folder: Path, rule: str) -> Path | None:
    """Find the checkpoint that stays where those of a folder are deleted but for the best.

    Args:
        folder: a directory of checkpoints.
        rule: as ``Trainer.save`` takes it, such as ``"highest accuracy"``.

    Returns:
        The folder of the checkpoint; None if none has that score.

    Raises:
        ValueError: there is no such rule.
    """
    return next(iter(best_of(readable_records(folder), rule)), None)
