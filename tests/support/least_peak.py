"""What a step on processes holds at most, without what its transport holds by chance."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

from autopar.program.abstract_executor import LiveBytes


def least_peak(
    tensors: Iterable[Any],
    step: Callable[[], Any],
    *,
    before: Callable[[], Any] = lambda: None,
    times: int = 10,
) -> int:
    """Live bytes at their most during `step`, its result included: the least of so many runs, each
    after `before`.

    gloo's thread may hold an operand for a moment after the wait, which only ever adds.

    Args:
        tensors: that live before the step, and count.
    """
    tensors, peaks = list(tensors), []
    for _ in range(times):
        before()
        gc.collect()
        with LiveBytes() as live:
            live.register(tensors)
            live.reset_peak()
            result = step()
            peaks.append(live.peak_bytes)
            del result
    return min(peaks)
