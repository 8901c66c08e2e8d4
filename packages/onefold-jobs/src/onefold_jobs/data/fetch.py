"""Downloads datasets of known content once, into a cache folder.

The SHA-256 of every file is known beforehand, so it does not matter where a file comes from or who
put it there. `pooch` downloads the file, and a complete file is moved into place.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from onefold.errors import DataError
from onefold.files import aside_of, open_plain
from onefold_jobs import require

__all__ = ["cause_of", "fetch_dataset", "fetch_file", "is_there"]

LARGEST_BYTES = 1 << 28
"""Maximum size of a file: an endless response must not fill the disk before its digest is
checked."""
_CHUNK_BYTES = 1 << 14
_LONGEST_SILENCE_S = 30.0
"""Timeout of a silent server; then the next mirror is tried."""
_MNIST_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteSet:
    """Files that are available under the same names at several addresses."""

    mirrors: tuple[str, ...]
    """Addresses of folders, each with a trailing slash, in the order in which they are tried."""
    sums: Mapping[str, str]
    """SHA-256 of each file, by its name."""


def _like_mnist(mirrors: tuple[str, ...], *sums: str) -> RemoteSet:
    return RemoteSet(mirrors=mirrors, sums=dict(zip(_MNIST_FILES, sums, strict=True)))


SETS: Mapping[str, RemoteSet] = {
    "mnist": _like_mnist(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    "fashion-mnist": _like_mnist(
        (
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            # This one has no HTTPS; the digests compensate for that.
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
}
"""The datasets that can be downloaded, by name."""


def fetch_dataset(
    name: str, cache: Path, *, sets: Mapping[str, RemoteSet] = SETS, timeout_s: float = 600.0
) -> Path:
    """Download the missing files of a dataset, and return its folder.

    Several processes may call this at the same time: each writes a temporary file and renames it.

    Args:
        name: name of the dataset, ``"mnist"`` or ``"fashion-mnist"``.
        cache: folder with one folder per dataset; created if it is missing.
        sets: known datasets.
        timeout_s: maximum time for one file from one address, checked whenever data arrive; a
            silent server times out after at most 30 s.

    Returns:
        ``cache/name``, in which every file has the right SHA-256.

    Raises:
        ValueError: no dataset has this name.
        DataError: an existing file has another SHA-256, and is left unchanged; or a missing file
            could not be downloaded from any address.
        LaunchError: a file is missing, and pooch is not installed.
        OSError: the folder cannot be created, or a file in it cannot be read.
    """
    if name not in sets:
        raise ValueError(f"expected a dataset of {', '.join(sets)}, got {name!r}")
    folder, wanted = cache / name, sets[name]
    folder.mkdir(parents=True, exist_ok=True)
    # Check all files before downloading any, so that a wrong file fails early.
    missing = [file for file in wanted.sums if not is_there(folder / file, wanted.sums[file])]
    for file in missing:
        addresses = [mirror + file for mirror in wanted.mirrors]
        try:
            fetch_file(addresses, folder / file, sha256=wanted.sums[file], timeout_s=timeout_s)
        except DataError as error:
            raise DataError(f"{error}; required files: {', '.join(wanted.sums)}") from error
    return folder


def is_there(path: Path, sha256: str) -> bool:
    """Return whether a file with the expected digest exists.

    Args:
        path: path of the file.
        sha256: expected SHA-256, or its first digits.

    Raises:
        DataError: the file exists, but has another SHA-256.
    """
    if not path.exists():
        return False
    with open_plain(path, follow=True) as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    # Never replace it silently, because it may be the user's own file with the same name.
    if not got.startswith(sha256):
        raise DataError(
            f"{path}: expected a file whose SHA-256 begins with {sha256}, got {got}; remove it "
            f"to download it again"
        )
    return True


def fetch_file(
    addresses: Sequence[str],
    path: Path,
    *,
    sha256: str,
    most_bytes: int | None = None,
    timeout_s: float = 3600.0,
) -> None:
    """Download a file from the first address with the right content.

    Args:
        addresses: addresses of the file.
        path: path of the complete file; its folder is created if it is missing.
        sha256: expected SHA-256, or its first digits.
        most_bytes: maximum size; None for `LARGEST_BYTES`.
        timeout_s: see `fetch_dataset`.

    Raises:
        DataError: no address has the file. The message names the place to put it by hand.
        LaunchError: pooch is not installed.
    """
    download = _downloader(timeout_s)
    path.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    for address in addresses:
        try:
            with aside_of(path) as file:
                bounded = _Bounded(file, timeout_s, most_bytes or LARGEST_BYTES)
                download(address, bounded, None)
                got = bounded.digest.hexdigest()
                if not got.startswith(sha256):
                    raise ValueError(f"expected a SHA-256 that begins with {sha256}, got {got}")
                file.flush()
                # A rename may reach the disk before the content does.
                os.fsync(file.fileno())
            return
        except (OSError, ValueError) as failure:  # requests raises OSErrors
            failures.append(f"  {address}: {cause_of(failure)}")
    tried = "\n".join(failures)
    raise DataError(
        f"could not download {path.name}:\n{tried}\nCheck the network, or put the file at {path}"
    )


def _downloader(timeout_s: float) -> Callable[..., None]:
    require("downloading data", "images", "pooch")
    import pooch  # type: ignore[import-untyped]

    # The digest is of the stored file, not of a compressed response.
    plain = {"Accept-Encoding": "identity"}
    downloader: Callable[..., None] = pooch.HTTPDownloader(
        timeout=min(timeout_s, _LONGEST_SILENCE_S), headers=plain, chunk_size=_CHUNK_BYTES
    )
    return downloader


class _Bounded:
    """A file with a maximum size and a deadline."""

    def __init__(self, file: BinaryIO, timeout_s: float, most_bytes: int) -> None:
        self._file, self._timeout_s, self._most_bytes = file, timeout_s, most_bytes
        self.digest = hashlib.sha256()
        self._end_s = time.monotonic() + timeout_s
        self.flush = file.flush

    def write(self, piece: bytes) -> None:
        self._file.write(piece)
        self.digest.update(piece)
        got = self._file.tell()
        if got > self._most_bytes:
            raise ValueError(f"expected at most {self._most_bytes:,} bytes, got more")
        if time.monotonic() > self._end_s:
            raise ValueError(
                f"expected the whole file within {self._timeout_s:g} s, got {got} bytes"
            )


def cause_of(error: BaseException) -> str:
    """Return the original error of the network or the disk, without the wrapping of libraries.

    >>> cause_of(ValueError("no room"))
    'no room'
    """
    innermost, each = error, error.__cause__ or error.__context__
    while each is not None:
        innermost = each if isinstance(each, OSError) else innermost
        each = each.__cause__ or each.__context__
    return str(innermost).partition("\n")[0]
