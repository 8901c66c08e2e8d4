"""Downloads data sets of known content, once, into a folder that is kept.

The SHA-256 of every file is known beforehand, so it does not matter where a file comes from or who
put it there. `pooch` downloads it, and it is moved into place once it is whole.
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
"""Of one file: a server that never stops must not fill the disk before its digest is compared."""
_CHUNK_BYTES = 1 << 14
_LONGEST_SILENCE_S = 30.0
"""A server that sends nothing for so long is given up, and the next mirror is tried."""
_MNIST_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteSet:
    """Files that lie under the same names at several addresses."""

    mirrors: tuple[str, ...]
    """Addresses of folders, each with a slash at its end, in the order in which they are tried."""
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
            # This one has no HTTPS; the digests make up for it.
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
}
"""The data sets that can be fetched, by name."""


def fetch_dataset(
    name: str, cache: Path, *, sets: Mapping[str, RemoteSet] = SETS, timeout_s: float = 600.0
) -> Path:
    """Download the missing files of a data set, and return its folder.

    Several processes may do so at the same time: each writes aside and renames a whole file.

    Args:
        name: name of the data set, ``"mnist"`` or ``"fashion-mnist"``.
        cache: holds one folder for each data set; made if it is missing.
        sets: the data sets that are known.
        timeout_s: the longest time for one file from one address. It is compared whenever data
            arrive; a server that sends nothing is given up after 30 s, or earlier.

    Returns:
        ``cache/name``, where every file has the right SHA-256.

    Raises:
        ValueError: no data set has that name.
        DataError: an existing file has another SHA-256, and is left as it is; or a missing file
            could not be downloaded from any address.
        LaunchError: a file is missing, and so is pooch.
        OSError: the folder cannot be made, or a file in it cannot be read.
    """
    if name not in sets:
        raise ValueError(f"expected a data set of {', '.join(sets)}, got {name!r}")
    folder, wanted = cache / name, sets[name]
    folder.mkdir(parents=True, exist_ok=True)
    # All are checked before the first is fetched: a wrong file ends this without a download.
    missing = [file for file in wanted.sums if not is_there(folder / file, wanted.sums[file])]
    for file in missing:
        addresses = [mirror + file for mirror in wanted.mirrors]
        try:
            fetch_file(addresses, folder / file, sha256=wanted.sums[file], timeout_s=timeout_s)
        except DataError as error:
            raise DataError(f"{error}; needed are {', '.join(wanted.sums)}") from error
    return folder


def is_there(path: Path, sha256: str) -> bool:
    """Return whether a file exists.

    Args:
        path: path of the file.
        sha256: the SHA-256 that it must have, or the first digits of it.

    Raises:
        DataError: the file exists, and has another SHA-256.
    """
    if not path.exists():
        return False
    with open_plain(path, follow=True) as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    # Never replaced without a word: it may be somebody's own file under the same name.
    if not got.startswith(sha256):
        raise DataError(
            f"{path}: expected a file whose SHA-256 begins with {sha256}, got {got}; remove it "
            f"and it is fetched again"
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
    """Download a file from the first address that has the right content.

    Args:
        addresses: of the file.
        path: where it is put once it is whole; the folder is made if it is missing.
        sha256: its SHA-256, or the first digits of it.
        most_bytes: what it may have at most; None for `LARGEST_BYTES`.
        timeout_s: as for `fetch_dataset`.

    Raises:
        DataError: no address has it; the message says where it may be put by hand.
        LaunchError: pooch is missing.
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
                # A rename may reach the disk before the bytes do.
                os.fsync(file.fileno())
            return
        except (OSError, ValueError) as failure:  # requests raises OSErrors
            failures.append(f"  {address}: {cause_of(failure)}")
    tried = "\n".join(failures)
    raise DataError(
        f"{path.name} could not be fetched:\n{tried}\n"
        f"check the network, or put the file by hand at {path}"
    )


def _downloader(timeout_s: float) -> Callable[..., None]:
    require("downloading data", "images", "pooch")
    import pooch  # type: ignore[import-untyped]

    # The digest is that of the file as it is stored, not as a server may pack it.
    plain = {"Accept-Encoding": "identity"}
    downloader: Callable[..., None] = pooch.HTTPDownloader(
        timeout=min(timeout_s, _LONGEST_SILENCE_S), headers=plain, chunk_size=_CHUNK_BYTES
    )
    return downloader


class _Bounded:
    """A file that takes neither more than it should, nor anything after the time is up."""

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
    """The answer of the network or the disk, below the words that libraries put around it.

    >>> cause_of(ValueError("no room"))
    'no room'
    """
    innermost, each = error, error.__cause__ or error.__context__
    while each is not None:
        innermost = each if isinstance(each, OSError) else innermost
        each = each.__cause__ or each.__context__
    return str(innermost).partition("\n")[0]
