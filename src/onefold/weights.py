"""Reads weights that other programs saved, and loads them into a model completely or not at all.

`onefold.load_weights` is enough for most programs. The other public names are its parts, for
programs that name layers or choose checkpoints themselves. No code of a file is ever run, and files
of a checkpoint are read only if every byte of the checkpoint is as it was written.

Example:
    >>> import pathlib, tempfile, torch
    >>> from onefold import weights
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "weights.pth"
    >>> torch.save({"model": torch.nn.Linear(2, 1).state_dict()}, file)
    >>> sorted(weights.state_under(weights.read_weights(file), "model", file))
    ['bias', 'weight']

Note: completely or not at all
------------------------------
A model that is half loaded trains without an error. So everything that can be refused is refused
before the first value is copied: names, shapes, dtypes, and memory that cannot be written to. Only
then does the model's own ``load_state_dict`` copy, because modules may have hooks in it.

Note: names
-----------
Wrappers add words to a name: DataParallel and DDP ``module.``, torch.compile ``_orig_mod.``, at the
start or, if only a part of a model was wrapped, further in. The file or the model may be wrapped.
No model uses ``_orig_mod`` itself, so it is removed on both sides. ``module`` may be a name of the
model's own. So it is first removed from the start of all names of the file together, as often as
turns most of them into names of the model; a name that is still not the model's is then compared
without ``module`` anywhere. If that leaves a choice, nothing is guessed.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn.parameter import is_lazy

from onefold.checkpoint.folder import is_checkpoint, open_checkpoint, readable_records
from onefold.checkpoint.manifest import TENSOR_FILES, best_of
from onefold.core.flat import first_not_finite, names_with_nan, own_name, same_bits
from onefold.errors import CheckpointError
from onefold.system.safe_files import open_plain
from onefold.system.words import listed, message_of

__all__ = [
    "Loaded",
    "bare_name",
    "best_scored",
    "check_finite",
    "check_weights",
    "read_weights",
    "state_under",
]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Names that `load_weights` did not use."""

    missing: tuple[str, ...]
    """Names of the model that kept their values."""
    unexpected: tuple[str, ...]
    """Names of the file that were not used."""


def load_weights(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    strict: bool = True,
) -> Loaded:
    """Copy a file's values into a model's parameters and buffers, in place.

    They keep their identity, memory, strides, dtype and device, so call it before ``Trainer`` is
    created, or between steps, and then in every process of the run. The optimizer's state is not
    changed. Names may have the ``module.`` of DataParallel and DDP or the ``_orig_mod.`` of
    torch.compile, or lack it if the model is wrapped. Everything is checked before anything is
    changed, and the model's own ``load_state_dict`` copies. Only tensors and plain values are read
    from a file, never code.

    Args:
        model: any module whose parameters have values.
        path: a file of safetensors or of ``torch.save``, from any device and with any extension; or
            the folder of a checkpoint that ``Trainer.save`` wrote.
        key: the key of the ``state_dict``, if the file keeps it in a dict, such as ``"model"``.
        strict: whether to refuse a file that lacks a name of the model, has another one, or has a
            tensor of another shape. Otherwise everything that fits in name and shape is loaded, and
            a tensor of another shape is both missing and unexpected. Tied parameters need one of
            their names; a missing ``num_batches_tracked`` is not refused.

    Returns:
        The names of both sides that were not used.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a parameter or buffer has no memory of its own to copy to.
        FileNotFoundError: the file does not exist.
        CheckpointError: the file cannot be read, or does not fit: its names or shapes differ; the
            model's dtype cannot hold its numbers, such as fractions in an integer buffer; two of
            its names stand for one tensor of the model; or nothing fits.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "weights.pth"
        >>> trained, model = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> torch.save({"epoch": 3, "model": trained.state_dict()}, file)
        >>> load_weights(model, file, key="model")
        Loaded(missing=(), unexpected=())
        >>> torch.equal(model.weight, trained.weight)
        True
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, but got {type(model).__name__}")
    path = Path(path)
    # keep_vars returns the tensors themselves. Otherwise each name gets a new detached tensor, and
    # tied parameters could not be recognized by identity.
    own = model.state_dict(keep_vars=True)
    _check_memory(own)
    content = read_weights(path)
    found = state_under(content, key, path)
    try:
        matched = match_names(found, own)
        if not matched:
            raise CheckpointError(_none_of(found, own, keys_of_states(content)))
        wrong = {name: _misfit(to, own[to], found[name]) for name, to in matched.items()}
        taken = {name: to for name, to in matched.items() if wrong[name] is None}
        # A tensor with several names needs only one of them.
        given = {_identity(to, own[to]) for to in taken.values()}
        missing = tuple(name for name in own if _identity(name, own[name]) not in given)
        misfits = {matched[name]: why for name, why in wrong.items() if why is not None}
        lacking = [name for name in missing if not _may_lack(name) and name not in misfits]
        strange = [name for name in found if name not in matched]
        if not taken or (strict and (lacking or strange or misfits)):
            raise CheckpointError(_left_out(misfits, lacking, strange, strict_alone=bool(taken)))
        _check_values(own, found, taken)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} does not fit the model, which is unchanged: {error}"
        ) from None
    # Nothing has been changed until here. strict=False, because the checks above have decided
    # already: they know tied parameters and the words of wrappers.
    model.load_state_dict(_state(found, taken), strict=False)
    return Loaded(missing, tuple(name for name in found if name not in taken))


def _left_out(
    misfits: Mapping[str, str], lacking: list[str], strange: list[str], *, strict_alone: bool
) -> str:
    """Describe what does not fit, with advice if only ``strict`` refuses it."""
    parts = [
        f"{len(names)} {what}: {listed(names)}"
        for what, names in (
            ("of another shape", [f"{name} ({why})" for name, why in misfits.items()]),
            ("missing in the file", lacking),
            ("unexpected in it", strange),
        )
        if names
    ]
    return "; ".join(parts) + ("; strict=False loads what fits" if strict_alone else "")


def _check_values(
    own: Mapping[str, Any], found: Mapping[str, Any], taken: Mapping[str, str]
) -> None:
    """Refuse values that the model's dtypes cannot hold, and two values for one tensor.

    Args:
        own: the model's names and tensors; tied names share one tensor.
        found: the file's names and tensors.
        taken: the model's name for each name of the file that is loaded.
    """
    first: dict[object, str] = {}
    for name, target in taken.items():
        # copy_ converts between all dtypes: it would truncate fractions and drop imaginary parts.
        value, tensor = found[name], own[target]
        if not _is_extra(target) and _kind(value.dtype) > _kind(tensor.dtype):
            raise CheckpointError(
                f"{target} is {tensor.dtype} in the model, but {value.dtype} in the file, whose "
                f"numbers the model cannot hold"
            )
        other = first.setdefault(_identity(target, tensor), name)
        # Compare them as they would be copied, because a file may hold one in half precision and
        # one in full. If they differed, the one copied last would win.
        if other != name and not same_bits(found[other].to(tensor.dtype), value.to(tensor.dtype)):
            raise CheckpointError(
                f"{other} and {name} differ in the file, but are one tensor in the model"
            )


def _state(found: Mapping[str, Any], taken: Mapping[str, str]) -> Mapping[str, object]:
    """Return the values under the model's names, as its ``load_state_dict`` takes them."""
    state: OrderedDict[str, Any] = OrderedDict((to, found[name]) for name, to in taken.items())
    versions = getattr(found, "_metadata", None)
    # Pass on the versions of the modules that wrote the file: modules that have changed since then,
    # such as batch norm, use them to read older values.
    if isinstance(versions, Mapping):
        state._metadata = {  # type: ignore[attr-defined]
            _owner(to): versions.get(_owner(name), {}) for name, to in taken.items()
        }
    return state


def _owner(name: str) -> str:
    """Return the name of the module that a parameter or buffer belongs to."""
    return name.rpartition(".")[0]


def _identity(name: str, value: object) -> object:
    """Return a value that is equal for two names only if they stand for one tensor."""
    return id(value) if isinstance(value, torch.Tensor) else name


def _may_lack(name: str) -> bool:
    """Whether a file may lack a name: batch norm's counter, which few other libraries save."""
    # It is used only if the momentum is None, for a cumulative mean.
    return name.rpartition(".")[2] == "num_batches_tracked"


def _is_extra(name: str) -> bool:
    """Whether a name stands for a result of ``get_extra_state``, which may be anything."""
    return name.rpartition(".")[2] == "_extra_state"


def _misfit(name: str, own: Any, value: object) -> str | None:
    """Return why a value cannot be copied to a tensor of the model; None if it can."""
    if _is_extra(name):
        return None
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} in the file, not a tensor"
    if (kind := _kind_of(value)) != (ours := _kind_of(own)):
        return f"{ours} in the model, {kind} in the file"
    # load_state_dict finds this too, but only after it has copied the tensors that fit.
    if value.shape != own.shape:
        return f"{tuple(own.shape)} in the model, {tuple(value.shape)} in the file"
    return None


def _kind_of(tensor: torch.Tensor) -> str:
    """Return the sort of a tensor; tensors of different sorts cannot be copied to each other."""
    # Check these first, because such a tensor has no shape to compare, or no values.
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return f"quantized ({tensor.qscheme()})"
    # The model may be on any device; tensors of the file are on the CPU, or have no memory.
    if tensor.device.type == "meta":
        return "a tensor without values (on the meta device)"
    # Nothing but the subclass knows its meaning, and how it handles a copy.
    if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}"
    return str(tensor.layout)


def _kind(dtype: torch.dtype) -> int:
    """Rank a dtype: integers 0, real 1, complex 2; each can hold those below it."""
    return 2 if dtype.is_complex else 1 if dtype.is_floating_point else 0


def _check_memory(own: Mapping[str, object]) -> None:
    for name, tensor in own.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        # Loading would give it the file's shape, so nothing could be compared before.
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet. Run one forward pass of the lazy module first"
            )
        # copy_ to a meta tensor does nothing, and raises no error.
        if tensor.device.type == "meta":
            raise ValueError(
                f"{name} is on the meta device. Allocate the model's memory first, with "
                f"model.to_empty(device=...)"
            )
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in pairs):
            raise ValueError(
                f"{name} is expanded, so its elements share memory. Register a .clone() of it"
            )


def _none_of(found: Collection[str], own: Collection[str], keys: Collection[str]) -> str:
    if keys:
        options = " or ".join(f"key={key!r}" for key in keys)
        return f"the file keeps its tensors in separate dicts. Pass {options}"
    have = [listed(names) or "none" for names in (found, own)]
    return f"none of its names is in the model. The file has {have[0]}; the model {have[1]}"


def check_finite(model: torch.nn.Module, weights: Path) -> None:
    """Refuse a model whose values are not finite, because it could only predict NaN.

    Args:
        model: the model, with its weights loaded.
        weights: the source of the weights, for the error.

    Raises:
        CheckpointError: a parameter has a NaN or an infinity, or a buffer has a NaN.
    """
    # Infinities in buffers are legitimate, for instance in attention masks.
    parameters = dict(model.named_parameters())
    spoilt = first_not_finite(parameters.values(), parameters)
    spoilt = spoilt or min(names_with_nan(dict(model.named_buffers())), default=None)
    if spoilt is not None:
        raise CheckpointError(
            f"{weights}: {spoilt} has values that are NaN or infinite. The run that saved them had "
            f"already failed; use an earlier checkpoint"
        )


def match_names(found: Collection[str], own: Collection[str]) -> dict[str, str]:
    """Map each name of the file to a name of the model; names without a counterpart are omitted.

    Raises:
        CheckpointError: a name of the file fits several of the model, or two names fit one.
    """
    by_plain, by_bare = _grouped(own, own_name), _grouped(own, bare_name)
    matched: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name, plain in _peeled(found, by_plain).items():
        # An exact name takes precedence; only other names are compared without ``module``.
        options = by_plain.get(plain) or by_bare.get(bare_name(plain), [])
        if len(options) > 1:
            raise CheckpointError(f"{name} in the file may be {' or '.join(options)} in the model")
        for target in options:
            if target in taken:
                raise CheckpointError(f"{taken[target]} and {name} in the file both fit {target}")
            taken[target] = name
            matched[name] = target
    return matched


def _peeled(found: Collection[str], own: Collection[str]) -> dict[str, str]:
    """Remove the ``module.`` that all names start with, as often as most names then fit.

    Returns:
        For each name of the file, the rest of it.
    """
    peeled = [{name: own_name(name) for name in found}]
    while found and all(name.startswith("module.") for name in peeled[-1].values()):
        peeled.append({name: rest.removeprefix("module.") for name, rest in peeled[-1].items()})
    # If two fit equally well, max returns the first: the one nearest to the file.
    return max(peeled, key=lambda names: sum(name in own for name in names.values()))


def _grouped(names: Collection[str], form: Callable[[str], str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(form(name), []).append(name)
    return groups


def bare_name(name: str) -> str:
    """Remove the words of wrappers anywhere in a name."""
    # Keep the last word: there ``module`` would be the name of a parameter, not of a module.
    *path, last = own_name(name).split(".")
    return ".".join([*(word for word in path if word != "module"), last])


_MODEL = "model.safetensors"
_ZIP = b"PK\x03\x04"
# torch.save before PyTorch 1.6 wrote a magic number first, in a separate pickle.
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_PICKLE = b"\x80"
_HEAD_BYTES = 16


def read_weights(path: Path) -> Mapping[object, object]:
    """Read a file with its tensors on the CPU; its content determines its format.

    Args:
        path: a file of safetensors or ``torch.save``, or a folder with ``model.safetensors``.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file has another format, is broken, or cannot be read without running
            code; or the checkpoint that it belongs to is damaged.
    """
    check_weights(path)
    file = path / _MODEL if path.is_dir() else path
    # Decide by content: extensions such as .pt, .pth and .bin are used for all of these formats.
    with open_plain(file, follow=True) as stream:
        head = stream.read(_HEAD_BYTES)
    if head.startswith(_ZIP):
        _check_zip(file)
        return _read_torch(file)
    if head.startswith(_LEGACY):
        return _read_torch(file)
    # Safetensors starts with eight bytes for the length of its header, and the header is JSON.
    # Check it before the pickle: one in 32 lengths begins with a pickle's first byte. A pickle's
    # high bytes are never all zero.
    if head[8:9] == b"{" and (head[5:8] == bytes(3) or not head.startswith(_PICKLE)):
        return _read_safetensors(file)
    if head.startswith(_PICKLE):
        raise _needs_code(file, "a pickle in an unusual form for torch.save")
    raise CheckpointError(
        f"{file} is empty"
        if not head
        else f"{file} is not a file of weights (safetensors or torch.save): it starts with "
        f"{head!r}. A failed download leaves such files"
    )


def check_weights(path: Path) -> None:
    """Refuse a folder without weights, and a checkpoint that is not exactly as it was written.

    Raises:
        CheckpointError: the path is such a folder, or belongs to such a checkpoint.
    """
    # The user may also name a file inside a checkpoint; its digests are checked as well.
    folder = path if path.is_dir() else path.parent
    if (path.is_dir() or path.name in TENSOR_FILES) and is_checkpoint(folder):
        stored = open_checkpoint(folder)
        wanted = _MODEL if path.is_dir() else path.name
        if path.exists() and stored.path(wanted) is None:
            raise CheckpointError(f"{folder} is a checkpoint without {wanted}")
    elif path.is_dir() and not (path / _MODEL).exists():
        raise CheckpointError(
            f"{path} is a folder without {_MODEL}. Pass a file of weights, or the folder of one "
            f"checkpoint, such as {path / 'step-00000100'}"
        )


def state_under(content: Mapping[Any, object], key: str | None, path: Path) -> Mapping[str, object]:
    """Return the names and tensors of a file, or of the dict under a key of it.

    Raises:
        CheckpointError: the file, or its value under the key, is not a dict of names.
    """
    state = content if key is None else content.get(key)
    if isinstance(state, Mapping) and all(isinstance(name, str) for name in state):
        return state
    if key is None:
        raise CheckpointError(
            f"{path} contains a dict whose keys are not names. Pass a file with a state_dict"
        )
    known = keys_of_states(content)
    raise CheckpointError(
        f"{path} has no dict of tensors under key={key!r}; "
        + (f"such keys are {', '.join(map(repr, known))}" if known else "it has no such key")
    )


def keys_of_states(content: Mapping[Any, object]) -> list[str]:
    """List the keys under which a file holds dicts of names and tensors."""
    # A single tensor is enough: a state dict also holds results of get_extra_state, of any type.
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
    # Check before torch.load, whose own error for a TorchScript archive suggests turning
    # weights_only off.
    with _telling_of(file), zipfile.ZipFile(file) as archive:
        members = {name.rpartition("/")[2] for name in archive.namelist()}
    if "constants.pkl" in members:
        raise _needs_code(file, "a TorchScript program")
    if "data.pkl" not in members:
        raise CheckpointError(
            f"{file} is a zip file that torch.save did not write. Pass a file of safetensors or "
            f"torch.save; if the zip file contains one, unpack it first"
        )


def _read_torch(file: Path) -> Mapping[Any, object]:
    # Pass a stream: given a path, torch.load judges the format by the extension. And use
    # weights_only, or unpickling would run any code in the file.
    with _telling_of(file), file.open("rb") as stream:
        content = torch.load(stream, map_location="cpu", weights_only=True)
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{file} contains a {type(content).__name__}. Pass a file with a state_dict, or with a "
            f"dict that has one under a key"
        )
    return content


@contextmanager
def _telling_of(file: Path) -> Iterator[None]:
    """Replace errors of reading a torch.save file by an error that names the file.

    Raises:
        CheckpointError: the file is broken, or cannot be read without running code.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        raise _needs_code(file, "more than tensors and plain values") from error
    # These errors come from the machine, not from the file.
    except (OSError, MemoryError):
        raise
    # On damaged bytes, unpickling may raise any exception.
    except Exception as error:
        reason = (message_of(error) or type(error).__name__).partition("\n")[0]
        raise CheckpointError(f"{file} is a broken file of torch.save: {reason}") from error


def _needs_code(file: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file} contains {what}, and reading it can run any code that its author put into it. "
        f"Pass a file with a state_dict. If you trust this one, load it in a separate program and "
        f"save the model's state_dict() with torch.save or safetensors"
    )


def best_scored(folder: Path, rule: str) -> Path | None:
    """Find the checkpoint that ``Trainer.save`` would keep as the best of a folder.

    Args:
        folder: a directory of checkpoints.
        rule: the rule, as ``Trainer.save`` takes it, such as ``"highest accuracy"``.

    Returns:
        The folder of the checkpoint; None if none has that metric.

    Raises:
        ValueError: the rule is invalid.
    """
    return next(iter(best_of(readable_records(folder), rule)), None)
