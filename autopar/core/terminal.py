"""Input and output of the command line: sizes as users write them, lines, tables and progress."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.errors import LiveError
from rich.text import Text

from autopar.core.text_files import why_unwritable
from autopar.errors import AutoparError

log = logging.getLogger("autopar")
out, err = Console(), Console(stderr=True)
_AFTER_S = 2.0  # until what a call does is shown
_EVERY_S = 5.0  # between two lines in the log
_EVERY_LINE_S = 10.0  # between two where no terminal shows one that changes
_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*((?:[kmgt]i?)?b?)\s*$", re.IGNORECASE)
PHASES = {
    "enumerate": "finding strategies",
    "price": "pricing",
    "cut": "cutting",
    "solve": "solving",
    "bound": "computing the bound over all cuts",
    "assemble": "writing the plan",
    "emit": "emitting",
    "least": "searching for the least memory",
    "conflict": "searching for the constraints that need too much",
    "memory": "computing the memory",
    "overlap": "overlapping communication with compute",
    "named plans": "comparing with named plans",
    "explain": "pricing runner-ups",
}
"""The planner's phases in words."""


def parse_size(text: str | None) -> int | None:
    """Read bytes from ``72GiB``, ``80 GB``, ``500MiB`` or a plain number; None stays None.

    Raises:
        AutoparError: if the text has none of these forms.
    """
    if text is None:
        return None
    match = _SIZE.match(text)
    if match is None:
        raise AutoparError(
            f"{text!r} is not a size", remedy="write for example 72GiB, 80GB or a number of bytes"
        )
    unit = match[2].lower().removesuffix("b")
    base = 1024 if unit.endswith("i") else 1000
    return int(float(match[1]) * base ** ("kmgt".index(unit[0]) + 1 if unit else 0))


def check_writable(path: Path | None) -> None:
    """Check that a file can be written, before its contents are computed.

    Args:
        path: the file; None if nothing is to be written.

    Raises:
        AutoparError: if its folder does not exist or cannot be written to, `path` is a folder, or
            no file can have this name.
    """
    if path is None:
        return
    if os.path.isdir(path):
        raise AutoparError(f"cannot write to {path}: it is a folder", remedy="name a file in it")
    if why := why_unwritable(path):
        raise AutoparError(
            f"cannot write to {path}: {why}",
            remedy="check the path, or create the folder",
        )


def say(line: str) -> None:
    """Write a line to standard output, wrapped if that is a terminal."""
    out.print(Text(line), soft_wrap=not out.is_terminal)


def complain(line: str) -> None:
    """Write a line to standard error, wrapped if that is a terminal."""
    err.print(Text(line), soft_wrap=not err.is_terminal)


def show(readable: Any) -> None:
    """Write a table or text to standard output, in the width of the terminal; for a file or pipe in
    a fixed width, so that tables are not wrapped."""
    if out.is_terminal:
        out.print(readable)
    else:
        out.file.write(f"{readable}\n")


@contextmanager
def progress_of_long(
    first: str, after_s: float | None = None, *, level: int = logging.INFO
) -> Iterator[Callable[[str], None]]:
    """Show progress as `progress` does, but only of work that takes longer than `after_s` seconds
    (by default 2). Without a terminal the progress is logged with level INFO.

    Args:
        first: what is done first.
        after_s: until the first line, in seconds.
        level: of the first line in the log.
    """
    after_s = _AFTER_S if after_s is None else after_s
    if not err.is_terminal:
        with _in_log(first, after_s, level) as tell:
            yield tell
        return
    status = err.status(f"{first} …")

    def start() -> None:
        """Show the status line."""
        with suppress(LiveError):  # the caller shows something of their own
            status.start()

    timer = threading.Timer(after_s, start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda what: status.update(f"{what} …")
    finally:
        timer.cancel()
        timer.join()
        status.stop()


@contextmanager
def _in_log(first: str, after_s: float, level: int) -> Iterator[Callable[[str], None]]:
    """Log the progress after `after_s` seconds, and then with level INFO at intervals."""
    if not log.isEnabledFor(level):
        yield lambda _: None
        return
    levels = chain((level,), repeat(logging.INFO))
    with _write_periodically(
        first, after_s, _EVERY_S, lambda line: log.log(next(levels), "%s", line)
    ) as tell:
        yield tell


@contextmanager
def _write_periodically(
    first: str, after_s: float, every_s: float, write: Callable[[str], None]
) -> Iterator[Callable[[str], None]]:
    """Write the progress after `after_s` seconds, and then every `every_s` seconds."""
    now, begin, finished = [first], time.monotonic(), threading.Event()

    def watch() -> None:
        """Write until the work is done."""
        wait_s = after_s
        while not finished.wait(wait_s):
            write(f"{now[0]} … ({time.monotonic() - begin:.0f} s elapsed)")
            wait_s = every_s

    thread = threading.Thread(target=watch, name="autopar progress", daemon=True)
    thread.start()
    try:
        yield lambda what: now.__setitem__(0, what)
    finally:
        finished.set()
        thread.join()


@contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """Show progress in a line of the terminal; in a file or pipe, write a line at intervals.

    Args:
        first: what is done first.

    Yields:
        A function that replaces the text.
    """
    if not err.is_terminal:
        with _write_periodically(first, _EVERY_LINE_S, _EVERY_LINE_S, complain) as tell:
            yield tell
        return
    with err.status(f"{first} …") as status:
        yield lambda what: status.update(f"{what} …")
