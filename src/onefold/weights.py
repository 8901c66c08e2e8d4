"""Reads weights that others have saved, and loads them into a model as a whole or not at all.

`onefold.load_weights` is enough for most programs. The public names here are its parts, for
programs that name layers or choose checkpoints themselves. No code of a file is ever run, and what
belongs to a checkpoint is read only if every byte of that checkpoint is as it was written.

Example:
    >>> import pathlib, tempfile, torch
    >>> from onefold import weights
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "weights.pth"
    >>> torch.save({"model": torch.nn.Linear(2, 1).state_dict()}, file)
    >>> sorted(weights.state_under(weights.read_weights(file), "model", file))
    ['bias', 'weight']

Note: whole or not at all
-------------------------
A model that is half loaded trains without an error. So everything that can be refused is refused
before the first value is copied: names, shapes, dtypes, and memory that cannot be written to. Only
then does the model's own ``load_state_dict`` copy, since modules may have hooks of their own in it.
It is called with ``strict=False``: what strict means is decided here, where tied parameters and the
words of wrappers are known.

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

from onefold.checkpoint.folder import best_of, is_checkpoint, open_checkpoint, readable_records
from onefold.checkpoint.manifest import TENSOR_FILES
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
    """What `load_weights` left out."""

    missing: tuple[str, ...]
    """The model's names that kept their values."""
    unexpected: tuple[str, ...]
    """The file's names that were not used."""


def load_weights(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    strict: bool = True,
) -> Loaded:
    """Copy a file's values into a model's parameters and buffers, in place.

    They keep their identity, memory, strides, dtype and device, so it may be called before
    ``Trainer`` is made or between steps, then by every process of the run. The optimizer's state is
    left as it is. Names may have the ``module.`` of DataParallel and DDP or the ``_orig_mod.`` of
    torch.compile, or lack that of a model that is wrapped itself. All is checked before anything is
    changed, and the model's own ``load_state_dict`` does the copying. Only tensors and plain values
    are read from a file, never code.

    Args:
        model: any module whose parameters have values.
        path: a file of safetensors or of ``torch.save``, from whatever device and with whatever
            ending; or the folder of a checkpoint that ``Trainer.save`` has written.
        key: where the file keeps the ``state_dict`` in a dict, such as ``"model"``.
        strict: refuse a file that lacks a name of the model, has another one, or has a tensor of
            another shape. Otherwise what fits in name and shape is loaded, and a tensor of another
            shape is both missing and unexpected. Tied parameters need one of their names; a
            ``num_batches_tracked`` that the file lacks is no reason to refuse.

    Returns:
        The names of either side that were left out.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a parameter or buffer has no memory of its own to copy to.
        FileNotFoundError: there is no such file.
        CheckpointError: the file cannot be read, or does not fit: in names or shapes; in numbers
            that the model's dtype has no room for, as fractions in an integer buffer; in two names
            for one tensor of the model. Also where nothing fits at all.

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
        raise TypeError(f"expected model to be a torch.nn.Module, got {type(model).__name__}")
    path = Path(path)
    # keep_vars: the tensors themselves. Without it each name gets a new detached one, and tied
    # parameters could not be recognized by identity.
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
        # Of several names of one tensor, one is enough.
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
    # From here on the model changes: see the note on whole or not at all.
    model.load_state_dict(_state(found, taken), strict=False)
    return Loaded(missing, tuple(name for name in found if name not in taken))


def _left_out(
    misfits: Mapping[str, str], lacking: list[str], strange: list[str], *, strict_alone: bool
) -> str:
    """Say what does not fit; with the advice for where it is refused by ``strict`` alone."""
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
    """Refuse values that the model's dtypes have no room for, and two values for one tensor.

    Args:
        own: the model's names and tensors; tied names share one tensor.
        found: the file's names and tensors.
        taken: the model's name for each of the file's names that is loaded.
    """
    first: dict[object, str] = {}
    for name, target in taken.items():
        # copy_ converts anything to anything: it would cut off fractions and drop imaginary parts.
        value, tensor = found[name], own[target]
        if not _is_extra(target) and _kind(value.dtype) > _kind(tensor.dtype):
            raise CheckpointError(
                f"{target} is {tensor.dtype} in the model and {value.dtype} in the file: expected "
                f"numbers that it has room for"
            )
        other = first.setdefault(_identity(target, tensor), name)
        # As they would be copied: a file may hold one in half precision and one in full. If they
        # had two values, whichever is copied last would win.
        if other != name and not same_bits(found[other].to(tensor.dtype), value.to(tensor.dtype)):
            raise CheckpointError(
                f"{other} and {name} differ in the file, and are one tensor in the model"
            )


def _state(found: Mapping[str, Any], taken: Mapping[str, str]) -> Mapping[str, object]:
    """The values under the model's names, as its ``load_state_dict`` takes them."""
    state: OrderedDict[str, Any] = OrderedDict((to, found[name]) for name, to in taken.items())
    versions = getattr(found, "_metadata", None)
    # The versions of the modules that wrote the file: modules that have changed since, such as
    # batch norm, look at theirs to read older values.
    if isinstance(versions, Mapping):
        state._metadata = {  # type: ignore[attr-defined]
            _owner(to): versions.get(_owner(name), {}) for name, to in taken.items()
        }
    return state


def _owner(name: str) -> str:
    """Name the module that a parameter or buffer belongs to."""
    return name.rpartition(".")[0]


def _identity(name: str, value: object) -> object:
    """Return what is equal for two names only if they stand for one tensor."""
    return id(value) if isinstance(value, torch.Tensor) else name


def _may_lack(name: str) -> bool:
    """Whether a model may do without a name: batch norm's count, which little else saves."""
    # It is only read where the momentum is None, for a cumulative mean.
    return name.rpartition(".")[2] == "num_batches_tracked"


def _is_extra(name: str) -> bool:
    """Whether a name stands for what ``get_extra_state`` returned, which may be anything."""
    return name.rpartition(".")[2] == "_extra_state"


def _misfit(name: str, own: Any, value: object) -> str | None:
    """Say why a value cannot be copied to a tensor of the model; None if it can."""
    if _is_extra(name):
        return None
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} in the file, and no tensor"
    if (kind := _kind_of(value)) != (ours := _kind_of(own)):
        return f"{ours} in the model, {kind} in the file"
    # load_state_dict finds this too, but only after it has copied the tensors that do fit.
    if value.shape != own.shape:
        return f"{tuple(own.shape)} in the model, {tuple(value.shape)} in the file"
    return None


def _kind_of(tensor: torch.Tensor) -> str:
    """What sort of tensor it is, of which one cannot be copied to another."""
    # Before all else: such a tensor has no shape to compare, or no values.
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return f"quantized ({tensor.qscheme()})"
    # A model may lie on a device; what a file has is on the host, or nowhere.
    if tensor.device.type == "meta":
        return "a tensor without values (on the meta device)"
    # What a subclass does with a copy, and to what it stands for, only it knows.
    if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}"
    return str(tensor.layout)


def _kind(dtype: torch.dtype) -> int:
    """Rank a dtype: whole numbers 0, real 1, complex 2; each has room for those below it."""
    return 2 if dtype.is_complex else 1 if dtype.is_floating_point else 0


def _check_memory(own: Mapping[str, object]) -> None:
    for name, tensor in own.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        # Loading would give it the file's shape, and nothing could be compared before.
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet: run one forward pass of the lazy module first"
            )
        # copy_ to a meta tensor does nothing, without an error.
        if tensor.device.type == "meta":
            raise ValueError(
                f"{name} is on the meta device: give the model memory first, by "
                f"model.to_empty(device=...)"
            )
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in pairs):
            raise ValueError(
                f"{name} is expanded, so that its elements share memory: register a .clone() of it"
            )


def _none_of(found: Collection[str], own: Collection[str], keys: Collection[str]) -> str:
    if keys:
        options = " or ".join(f"key={key!r}" for key in keys)
        return f"the file keeps its tensors in dicts of their own. Pass {options}"
    have = [listed(names) or "none" for names in (found, own)]
    return f"no name of it is the model's. The file has {have[0]}; the model {have[1]}"


def check_finite(model: torch.nn.Module, weights: Path) -> None:
    """Refuse a model whose values are not finite, and which could only predict NaN.

    Args:
        model: the model, with its weights loaded.
        weights: where they were loaded from, for the error.

    Raises:
        CheckpointError: a parameter has a NaN or an infinity, or a buffer has a NaN.
    """
    # Infinities in buffers are legitimate: attention masks are made of them.
    parameters = dict(model.named_parameters())
    spoilt = first_not_finite(parameters.values(), parameters)
    spoilt = spoilt or min(names_with_nan(dict(model.named_buffers())), default=None)
    if spoilt is not None:
        raise CheckpointError(
            f"{weights}: {spoilt} has values that are NaN or infinite: expected finite ones. The "
            f"run that saved them went wrong before; use an earlier checkpoint of it"
        )


def match_names(found: Collection[str], own: Collection[str]) -> dict[str, str]:
    """Map each name of the file to one of the model; names without a counterpart are left out.

    Raises:
        CheckpointError: a name of the file could be several of the model, or two could be one.
    """
    by_plain, by_bare = _grouped(own, own_name), _grouped(own, bare_name)
    matched: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name, plain in _peeled(found, by_plain).items():
        # An exact name takes precedence: only the others are compared without ``module``.
        options = by_plain.get(plain) or by_bare.get(bare_name(plain), [])
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
    peeled = [{name: own_name(name) for name in found}]
    while found and all(name.startswith("module.") for name in peeled[-1].values()):
        peeled.append({name: rest.removeprefix("module.") for name, rest in peeled[-1].items()})
    # Of two that fit equally well, max takes the first: the one nearer to the file.
    return max(peeled, key=lambda names: sum(name in own for name in names.values()))


def _grouped(names: Collection[str], form: Callable[[str], str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(form(name), []).append(name)
    return groups


def bare_name(name: str) -> str:
    """Leave out the words of wrappers anywhere in a name."""
    # Except at the end: there it would be the name of a parameter, and not of a module.
    *path, last = own_name(name).split(".")
    return ".".join([*(word for word in path if word != "module"), last])


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
