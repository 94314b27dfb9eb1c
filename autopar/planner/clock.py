"""How long the phases of planning took."""

from __future__ import annotations

import time
from collections.abc import Callable

Progress = Callable[[str], None]


class Clock:
    """Seconds by phase; tells `progress` what is going on."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._name = ""
        self._start = 0.0

    def phase(self, name: str) -> Clock:
        """Name the phase that the next `with` block measures; blocks of one name add up."""
        self._name = name
        return self

    def __enter__(self) -> None:
        self._progress(self._name)
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self._name] = (
            self.seconds.get(self._name, 0.0) + time.perf_counter() - self._start
        )
