"""Garbage collection while many long-lived objects are made.

A plan's problem, and the programs that are tried for it, are millions of small objects that stay
alive. Python collects the young generation after every 700 of them and finds almost no garbage,
which takes a fifth of the time of planning. A collection per some hundred thousand objects bounds
the growth of memory well enough.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_YOUNG, _OLDER = (
    200_000,
    20,
)  # objects per collection of the youngest generation; such collections per one of the next


@contextlib.contextmanager
def collected_seldom() -> Iterator[None]:
    """Collect garbage less often in this context, unless the thresholds outside are higher already.
    It can be nested, and can decorate a function."""
    before = gc.get_threshold()
    if before[0]:  # at 0 it is off
        gc.set_threshold(max(before[0], _YOUNG), max(before[1], _OLDER), *before[2:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
