"""Opens files that other users may have placed, reads them with limits, and writes them atomically.

A folder of data or of a run may be writable by other users. A name in it may stand for a link, a
FIFO or a device, JSON may be nested without end, and two programs may write at once. Programs that
are built on onefold read and write such files as onefold does.

Example:
    >>> import pathlib, tempfile
    >>> from onefold import files
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "facts.json"
    >>> files.write_whole(path, b'{"epochs": 3}')  # a reader finds the old file or the new one
    >>> files.parse_json(files.read_plain(path).decode())  # a regular file, up to 64 MiB
    {'epochs': 3}
"""

from onefold.system.folder_lock import FolderLock
from onefold.system.safe_files import (
    PrivateFolder,
    json_text,
    local_path,
    nested_too_deeply,
    open_plain,
    parse_json,
    read_plain,
)
from onefold.system.whole_files import aside_of, open_folder, write_whole

__all__ = [
    "FolderLock",
    "PrivateFolder",
    "aside_of",
    "json_text",
    "local_path",
    "nested_too_deeply",
    "open_folder",
    "open_plain",
    "parse_json",
    "read_plain",
    "write_whole",
]
