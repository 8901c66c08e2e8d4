"""Fetches data sets of known content over the network, once, into a folder that is kept.

What a file must hold is known beforehand by its SHA-256, so it does not matter where it comes from
or who put it there.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onefold.errors import DataError

__all__ = ["SETS", "RemoteSet", "fetch_dataset"]

_CHUNK_BYTES = 1 << 20
_LARGEST_BYTES = 1 << 30
_LONGEST_SILENCE_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteSet:
    """Files that lie under the same names at several addresses."""

    mirrors: tuple[str, ...]
    """Addresses of folders, each with a slash at its end, in the order in which they are tried."""
    sums: Mapping[str, str]
    """SHA-256 of each file, by its name."""


SETS: Mapping[str, RemoteSet] = {
    "mnist": RemoteSet(
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        sums={
            "train-images-idx3-ubyte.gz": (
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
            ),
            "train-labels-idx1-ubyte.gz": (
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
            ),
            "t10k-images-idx3-ubyte.gz": (
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
            ),
            "t10k-labels-idx1-ubyte.gz": (
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
            ),
        },
    ),
    "fashion-mnist": RemoteSet(
        mirrors=(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            # This one has no HTTPS; the sums below make up for it.
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
        sums={
            "train-images-idx3-ubyte.gz": (
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"
            ),
            "train-labels-idx1-ubyte.gz": (
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"
            ),
            "t10k-images-idx3-ubyte.gz": (
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"
            ),
            "t10k-labels-idx1-ubyte.gz": (
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"
            ),
        },
    ),
}
"""The data sets that can be fetched, by name."""


def fetch_dataset(
    name: str, cache: Path, *, sets: Mapping[str, RemoteSet] = SETS, timeout_s: float = 600.0
) -> Path:
    """The folder of a data set, with all its files; those that are not there yet are fetched.

    Processes that do so at the same time do no harm to each other.

    Args:
        name: of the data set, ``"mnist"`` or ``"fashion-mnist"``.
        cache: holds one folder for each data set; made if it is missing.
        sets: the data sets that are known.
        timeout_s: the longest time for one file from one address.

    Returns:
        ``cache/name``, where every file has the right SHA-256.

    Raises:
        ValueError: there is no data set of that name.
        DataError: a file that is there has another SHA-256, and is left as it is; or no address
            gave one that is missing.
        OSError: the folder cannot be written.
    """
    if name not in sets:
        raise ValueError(f"expected a data set of {', '.join(sets)}, got {name!r}")
    folder, wanted = cache / name, sets[name]
    folder.mkdir(parents=True, exist_ok=True)
    missing = [file for file in wanted.sums if not _is_there(folder / file, wanted.sums[file])]
    for file in missing:
        _write_whole(folder / file, _fetch(file, wanted, folder, timeout_s))
    return folder


def _is_there(path: Path, expected: str) -> bool:
    """Whether the file lies there; one that does must be the right one."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != expected:
        raise DataError(
            f"{path}: expected a file with SHA-256 {expected}, got {got}; "
            f"remove it and it is fetched again"
        )
    return True


def _fetch(file: str, wanted: RemoteSet, folder: Path, timeout_s: float) -> bytes:
    """The file's right content, from the first address that gives it."""
    failures = []
    for mirror in wanted.mirrors:
        try:
            content = _download(mirror + file, timeout_s)
            _check_sum(content, wanted.sums[file])
            return content
        except (OSError, http.client.HTTPException, ValueError) as failure:
            failures.append(f"  {mirror}{file}: {_told(failure)}")
    tried = "\n".join(failures)
    raise DataError(
        f"{file} could not be fetched:\n{tried}\n"
        f"check the network, or put the files by hand in {folder}: {', '.join(wanted.sums)}"
    )


def _download(address: str, timeout_s: float) -> bytes:
    """What the address answers, whole, within the time."""
    limit = time.monotonic() + timeout_s
    content = bytearray()
    with urllib.request.urlopen(address, timeout=min(timeout_s, _LONGEST_SILENCE_S)) as answer:
        # One wait on the socket for each piece: a slow answer cannot stretch its time.
        while piece := answer.read1(_CHUNK_BYTES):
            content += piece
            if time.monotonic() > limit:
                raise TimeoutError(
                    f"expected the whole file within {timeout_s:g} s, got {len(content)} bytes"
                )
            if len(content) > _LARGEST_BYTES:
                raise ValueError(f"expected at most {_LARGEST_BYTES} bytes, got more")
        promised = answer.headers.get("Content-Length")
    if promised is not None and promised != str(len(content)):
        raise ValueError(f"expected {promised} bytes as announced, got {len(content)}")
    return bytes(content)


def _check_sum(content: bytes, expected: str) -> None:
    got = hashlib.sha256(content).hexdigest()
    if got != expected:
        raise ValueError(f"expected SHA-256 {expected}, got {got} of {len(content)} bytes")


def _told(failure: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(failure, urllib.error.HTTPError):
        failure.close()
        return f"HTTP {failure.code} {failure.reason}"
    if isinstance(failure, urllib.error.URLError):
        return str(failure.reason)
    return str(failure) or type(failure).__name__


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file aside under a name of its own, and rename it when it is on the disk."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with aside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
