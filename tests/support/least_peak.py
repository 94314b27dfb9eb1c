"""The peak memory of a step on processes, without temporary memory of the transport."""

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
    """Return the minimum over several runs of the peak of live bytes during `step`, including its
    result. `before` runs before each run.

    The thread of gloo may hold an operand for a moment after the wait, which only adds to the peak.

    Args:
        tensors: tensors that exist before the step and count.
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
