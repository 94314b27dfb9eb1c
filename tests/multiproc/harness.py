"""Run a function of a test file in gloo processes, and return its results or raise the first
exception.

`run_processes(4, __file__, "function", *args)` loads the file in each of 4 spawned processes,
joins them in one gloo group and calls ``function(rank, *args)``. The first failing rank stops the
others. The time limit also stops all ranks. It is meant for processes that wait for each other,
not for slow ones. Within a process captures are shared, as in the process of pytest."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import shared_captures

from autopar.errors import AutoparError
from benchmarks.ranks import run_ranks


def run_processes(
    num_processes: int, path: str, function: str, *args: Any, timeout_s: float = 900.0
) -> list[Any]:
    """Return the results of ``function(rank, *args)`` by rank. Arguments and results must be
    picklable.

        Raises:
            AssertionError: with the traceback of the first rank that failed, or on the time limit.
    """
    try:
        return run_ranks(num_processes, call_in_file, path, function, args, limit_s=timeout_s)
    except AutoparError as error:
        raise AssertionError(str(error)) from None


def call_in_file(
    rank: int, tell: Callable[[Any], None], path: str, function: str, args: tuple[Any, ...]
) -> Any:
    """Return the result of `function` of the file at `path` on this rank."""
    gc.set_threshold(
        10_000, 10, 10
    )  # graphs and plans are many small objects, and few of them are garbage
    shared_captures.share()
    spec = importlib.util.spec_from_file_location("multiproc_worker", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)(rank, *args)
