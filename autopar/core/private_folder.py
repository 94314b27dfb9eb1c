"""Folders and files of caches that only the current user can have written.

A cache holds code that is loaded, or facts that are believed. A folder is trusted only if nobody
else could have put something there: the current user owns it, nobody else may write to it, and
nobody else may replace it by way of a folder above it. A folder that is not trusted is left alone,
and this process works in a new folder of its own.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

log = logging.getLogger("autopar")
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_home() -> Path:
    """Return the folder of autopar's caches: ``$AUTOPAR_CACHE_DIR``, else
    ``$XDG_CACHE_HOME/autopar``, else ``~/.cache/autopar``. It may not exist."""
    if named := os.environ.get("AUTOPAR_CACHE_DIR"):
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "autopar"


def is_cache_on(what: str) -> bool:
    """Whether a cache is in use.

    Args:
        what: its name in ``$AUTOPAR_CACHE``, which lists the caches to use, separated by commas;
            ``0`` for none. All are used if it is not set.
    """
    listed = os.environ.get("AUTOPAR_CACHE", "")
    return not listed or what in listed.split(",")


def private_folder(wanted: Path, purpose: str, remedy: str) -> Path:
    """Make a folder that only the current user can write to, or find it.

    Args:
        wanted: the folder. It is made, with the folders above it, with mode 0700 if it does not
            exist.
        purpose: what it holds, for the log.
        remedy: how another folder is chosen, for the log.

    Returns:
        `wanted` without symbolic links; or a new folder, which is removed when this process ends,
        if another user could have written to `wanted`. The log says so once.

    Raises:
        OSError: if a folder cannot be made.
    """
    _make(wanted)
    resolved = wanted.resolve()
    reason = find_sharing(resolved)
    return (
        _new_folder(
            wanted,
            purpose,
            f"{reason}; {remedy}, or remove write permission for others (chmod go-w)",
        )
        if reason
        else resolved
    )


def find_sharing(folder: Path) -> str:
    """Say how another user could have written into a folder.

    Args:
        folder: its path, without symbolic links.

    Returns:
        The reason not to trust it; empty if there is none.
    """
    here = folder.lstat()
    if not hasattr(os, "getuid"):  # a system without owners of files
        return ""
    if not stat.S_ISDIR(here.st_mode):
        return f"{folder} is not a folder"
    replacing = filter(None, map(_find_replacing, folder.parents))
    return _find_other_writer(folder, here) or next(replacing, "")


def find_foreign(file: Path) -> str:
    """Say how another user could have written a file that lies in a private folder.

    Args:
        file: its path.

    Returns:
        The reason not to trust it; empty if there is none.

    Raises:
        OSError: if it is not there.
    """
    here = file.lstat()
    if not hasattr(os, "getuid"):
        return ""
    if not stat.S_ISREG(here.st_mode):
        return f"{file} is not a plain file"
    return _find_other_writer(file, here)


def _find_other_writer(path: Path, here: os.stat_result) -> str:
    """Say how another user could write to a file or folder; empty if none can."""
    if not _is_own(here):
        return f"{path} belongs to user {here.st_uid}"
    if here.st_mode & _OTHERS:
        return f"other users can write to {path} (mode {stat.S_IMODE(here.st_mode):o})"
    return ""


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning the first time it is given in this process.

    Args:
        message: the warning.
    """
    log.warning("%s", message)


def _make(folder: Path) -> None:
    """Make a folder and those above it; `Path.mkdir` gives the mode to the last of them alone."""
    for parent in (*reversed(folder.parents), folder):
        if not parent.exists():
            parent.mkdir(mode=0o700, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() == os.getuid()


def _find_replacing(above: Path) -> str:
    """Say how another user could replace what lies in a folder above the cache; empty if nobody
    can.

    In a folder with the sticky bit, such as /tmp, only owners rename what they own.
    """
    here = above.lstat()
    if here.st_uid != 0 and not _is_own(here):
        return f"{above}, a parent folder, belongs to user {here.st_uid}"
    others = here.st_mode & _OTHERS
    if others == stat.S_IWGRP and _is_group_of_one(here.st_gid):
        others = 0
    if others and not here.st_mode & stat.S_ISVTX:
        return f"other users can rename entries of {above} (mode {stat.S_IMODE(here.st_mode):o})"
    return ""


def _is_group_of_one(gid: int) -> bool:
    """Whether a group is the user's own, as many systems give one to each user."""
    import grp  # not on every system
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return (
        gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    )


@functools.cache
def _new_folder(wanted: Path, purpose: str, reason: str) -> Path:
    """Make a folder for this process, once for each folder that is not trusted."""
    folder = Path(tempfile.mkdtemp(prefix="autopar-")).resolve()
    atexit.register(_remove_own, folder, os.getpid())
    warn_once(
        f"{wanted} is not used for {purpose}: {reason}. This process uses a new folder, {folder}"
    )
    return folder


def _remove_own(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked process
        shutil.rmtree(folder, ignore_errors=True)
