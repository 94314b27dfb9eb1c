"""Times of the phases of planning."""

from __future__ import annotations

import time
from collections.abc import Callable

Progress = Callable[[str], None]


class Clock:
    """Measures the seconds of each phase and reports the phases to `progress`."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._name = ""
        self._start = 0.0

    def phase(self, name: str) -> Clock:
        """Name the phase that the next `with` block measures. Blocks of the same name add up."""
        self._name = name
        return self

    def __enter__(self) -> None:
        self._progress(self._name)
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self._name] = (
            self.seconds.get(self._name, 0.0) + time.perf_counter() - self._start
        )
