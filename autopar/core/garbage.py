"""Garbage collection while many lasting objects are made.

A plan's problem, and the programs that are tried for it, are millions of small objects that stay.
Python looks through the young ones after every 700, and finds next to nothing: a fifth of the time
in which a plan is made. Once in some hundred thousand is soon enough for what the memory of a
process grows by in between.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_YOUNG, _OLDER = (
    200_000,
    20,
)  # objects before the young are looked through; how often that before those that outlived it are


@contextlib.contextmanager
def collected_seldom() -> Iterator[None]:
    """Collect garbage seldom in here, or as seldom as it was asked for outside; may stand within
    itself, and decorate a function."""
    before = gc.get_threshold()
    if before[0]:  # at 0 it is off
        gc.set_threshold(max(before[0], _YOUNG), max(before[1], _OLDER), *before[2:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
