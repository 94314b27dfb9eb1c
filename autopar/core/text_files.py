"""Files at paths of the user.

For some paths, `open` does not raise OSError: it raises ValueError for a null byte, and waits for
another process if the path is a named pipe. The functions of this module raise OSError with a
reason instead, or an `AutoparError` that contains the path.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from autopar.errors import AutoparError

AnyPath = str | os.PathLike[str]
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # do not wait for the other end of a named pipe
_NOT_REGULAR = "it is not a regular file"


def reason_of(error: OSError | ValueError) -> str:
    """Return the reason why a path cannot be used, without the path.

    Args:
        error: the error of a function that received the path, such as `open`.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return f"no file can have this name ({error})"


def open_text(path: AnyPath) -> TextIO:
    """Open a regular file as UTF-8 text.

    Raises:
        OSError: if the file cannot be opened, or is not a regular file.
    """
    try:
        return open(path, encoding="utf-8", opener=_open_regular)
    except ValueError as error:
        raise OSError(errno.EINVAL, reason_of(error), str(path)) from error


def read_text(path: AnyPath) -> str:
    """Return the text of a regular file in UTF-8.

    Raises:
        OSError: if the file cannot be read, or is not a regular text file.
    """
    try:
        with open_text(path) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, "it is not a text file", str(path)) from error


def _open_regular(path: str, flags: int) -> int:
    """Open a file for reading. The type is that of the open file, so that it cannot change after
    the check."""
    number = os.open(path, flags | _NO_WAIT)
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        return number
    os.close(number)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, _NOT_REGULAR, path)


def _open_for_writing(path: str, flags: int) -> int:
    """Open a file for writing, or a named pipe that another process reads."""
    try:
        number = os.open(path, flags | _NO_WAIT, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is a pipe that no process reads", path) from error
        raise
    os.set_blocking(number, True)
    return number


@contextmanager
def convert_write_errors(
    path: AnyPath, what: str, error: type[AutoparError] = AutoparError
) -> Iterator[None]:
    """A context in which a file is written. It converts errors of its path.

    Args:
        path: the file.
        what: the content, for the message, for example ``"the plan"``.
        error: the class of the error that is raised.

    Raises:
        AutoparError: of class `error`, if the body raises OSError or ValueError.
    """
    try:
        yield
    except (OSError, ValueError) as reason:
        raise error(
            f"cannot write {what}: {reason_of(reason)}", where=str(path), remedy="check the path"
        ) from reason


def write_file(
    path: AnyPath, content: str | bytes, what: str, error: type[AutoparError] = AutoparError
) -> None:
    """Write a file, or into a named pipe that another process reads.

    Args:
        path: the file. It is replaced if it exists.
        content: bytes, or a text that is written in UTF-8.
        what, error: see `convert_write_errors`.

    Raises:
        AutoparError: of class `error`, if the file cannot be written.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    with (
        convert_write_errors(path, what, error),
        open(path, "wb", opener=_open_for_writing) as file,
    ):
        file.write(data)


def why_unreadable(path: AnyPath) -> str:
    """Return the reason why a path is not a regular file that can be read; empty if it is one."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "the file does not exist"
    except (OSError, ValueError) as error:
        return reason_of(error)
    if stat.S_ISDIR(mode):
        return "it is a folder"
    if not stat.S_ISREG(mode):
        return _NOT_REGULAR
    return "" if os.access(path, os.R_OK) else os.strerror(errno.EACCES)


def why_unwritable(path: AnyPath) -> str:
    """Return the reason why a file cannot be written; empty if none is found. Nothing is created or
    opened."""
    try:
        is_writable = os.access(path, os.W_OK)
        os.stat(path)
    except FileNotFoundError:
        folder = Path(path).absolute().parent
        if os.access(folder, os.W_OK):
            return ""
        why = "it is not writable" if folder.is_dir() else "the folder does not exist"
        return f"{why}: {folder}"
    except (OSError, ValueError) as error:
        return reason_of(error)
    if os.path.isdir(path):
        return "it is a folder"
    return "" if is_writable else os.strerror(errno.EACCES)
