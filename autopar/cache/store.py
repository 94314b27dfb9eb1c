"""Files of the cache on disk. Each entry is one text file, in a folder that only the current user
can write to.

An entry is written to a temporary file, which is then renamed. Readers therefore see a complete
entry or none. If several processes write the same entry, the last one is kept. The last line of a
file is a hash of the preceding content. A file that is damaged, or that another user may have
written, is reported once, removed and written again.

The folder contains at most `MAX_BYTES`. The least recently used entries are removed first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autopar.core.private_folder import (
    cache_home,
    find_foreign,
    is_cache_on,
    private_folder,
    warn_once,
)

MAX_BYTES = 512 * 2**20
_SUFFIX, _PART = ".json", ".part"
_PART_AGE_S = 3600.0  # an older temporary file was left by a process that was killed
_NAME_ANOTHER = "set AUTOPAR_CACHE_DIR=FOLDER to use another folder"


@dataclass(frozen=True, slots=True)
class EntryFile:
    """A file of the cache.

    Attributes:
        path: the file.
        num_bytes: its size in bytes.
        used_s: the time at which it was last used, in seconds since the epoch.
    """

    path: Path
    num_bytes: int
    used_s: float


def entry_folder() -> Path:
    """Return the folder of the entries, which may not exist."""
    return cache_home() / "entries"


def _own_folder() -> Path | None:
    """Return the folder of the entries. Create it if it does not exist. Return None if the cache is
    disabled or the folder cannot be created."""
    if not is_cache_on("plans"):
        return None
    try:
        return private_folder(entry_folder(), "cached plans and captures", _NAME_ANOTHER)
    except OSError as error:
        warn_once(f"cache not used: {error}; {_NAME_ANOTHER}")
        return None


def read_entry(key: str) -> str | None:
    """Return the text of an entry; None if there is no entry. A file that cannot be trusted is
    removed.

    Args:
        key: the key of the entry, as hexadecimal digits.
    """
    folder = _own_folder()
    if folder is None:
        return None
    path = folder / f"{key}{_SUFFIX}"
    try:
        reason = find_foreign(path)
        data = b"" if reason else path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        reason, data = str(error), b""
    body, _, digest = data.rpartition(b"\n")
    if not reason and digest.decode("ascii", "replace") != _digest(body):
        reason = f"{path} is damaged"
    if reason:
        report_damaged(key, reason)
        return None
    with contextlib.suppress(OSError):  # removed by another process
        os.utime(path)
    return body.decode("utf-8")


def report_damaged(key: str, reason: str) -> None:
    """Warn that an entry cannot be used, and remove it.

    Args:
        key: the key of the entry.
        reason: the reason.
    """
    warn_once(f"a cache entry is not used and will be replaced: {reason}")
    remove_entry(key)


def remove_entry(key: str) -> None:
    """Remove an entry if it exists and can be removed."""
    folder = _own_folder()
    if folder is not None:
        with contextlib.suppress(OSError):  # it does not exist, or the folder is not writable
            (folder / f"{key}{_SUFFIX}").unlink()


def write_entry(key: str, text: str) -> bool:
    """Write an entry. Remove the least recently used entries if there are more than `MAX_BYTES`.

    Args:
        key: the key of the entry, as hexadecimal digits.
        text: the text of the entry.

    Returns:
        Whether the entry was written. If not, the reason is logged once.
    """
    folder = _own_folder()
    if folder is None:
        return False
    body = text.encode("utf-8")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, suffix=_PART, delete=False) as part:
            part.write(body + b"\n" + _digest(body).encode())
        os.replace(part.name, folder / f"{key}{_SUFFIX}")
    except OSError as error:
        warn_once(f"cannot write a cache entry: {error}; {_NAME_ANOTHER}")
        return False
    _evict(folder)
    return True


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def entries(folder: Path | None = None) -> tuple[EntryFile, ...]:
    """Return the files of the cache, the most recently used first.

    Args:
        folder: the folder; by default, `entry_folder()`.
    """
    return tuple(
        sorted(_files(folder or entry_folder(), _SUFFIX), key=lambda e: (-e.used_s, e.path.name))
    )


def _files(folder: Path, suffix: str) -> Iterator[EntryFile]:
    try:
        paths = [path for path in folder.iterdir() if path.suffix == suffix]
    except OSError:  # it does not exist
        return
    for path in paths:
        with contextlib.suppress(OSError):  # removed by another process
            status = path.lstat()
            yield EntryFile(path, status.st_size, status.st_mtime)


def _evict(folder: Path) -> None:
    num_bytes = 0
    for entry in entries(folder):
        num_bytes += entry.num_bytes
        if num_bytes > MAX_BYTES:
            with contextlib.suppress(OSError):  # removed by another process
                entry.path.unlink()
    for part in _files(folder, _PART):
        if time.time() - part.used_s > _PART_AGE_S:
            with contextlib.suppress(OSError):
                part.path.unlink()


def clear() -> tuple[int, int]:
    """Remove all entries.

    Returns:
        The number of removed entries, and the number of removed bytes.

    Raises:
        OSError: if an entry cannot be removed.
    """
    removed = [0, 0]
    for entry in (*entries(), *_files(entry_folder(), _PART)):
        entry.path.unlink(missing_ok=True)
        removed[0] += entry.path.suffix == _SUFFIX
        removed[1] += entry.num_bytes
    return removed[0], removed[1]
