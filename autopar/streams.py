"""Two streams of one device: compute, and communication that was started early.

Early steps run one after another in the order in which they were started, beside compute. While one runs, compute goes on at the
rate 1 − s, where s is the profile's `overlap_slowdown`: a hidden second of communication costs compute s seconds. A step that
compute waits for where it is issued stops both streams: it takes the link from the early ones, which go on after it. So a phase
with C seconds of compute, P of early and K of other communication takes at least max(C + s·P, P) + K, and C + P + K with s = 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class Streams:
    """The clock of both streams.

    Attributes:
        slowdown: s. now_s: the time. hidden_s: how long both streams ran so far. waited_s: how long compute waited for early steps.
        done_s: early step → when it was done. ran: early steps and from when to when each ran, piece by piece.
    """

    slowdown: float
    now_s: float = 0.0
    hidden_s: float = 0.0
    waited_s: float = 0.0
    done_s: dict[Hashable, float] = field(default_factory=dict)
    ran: list[tuple[Hashable, float, float]] = field(default_factory=list)
    _queue: deque[tuple[Hashable, float]] = field(default_factory=deque)  # step, seconds that are left of it

    @property
    def backlog_s(self) -> float:
        """Seconds of early communication that are left."""
        return sum(left for _, left in self._queue)

    def start(self, step: Hashable, time_s: float) -> None:
        """Start an early step."""
        self._queue.append((step, time_s))

    def compute(self, time_s: float) -> None:
        """Compute for so long, as it takes alone."""
        while self._queue and time_s > 0.0:
            step, left = self._queue[0]
            goes_on = time_s < left * (1.0 - self.slowdown)
            both_s = time_s / (1.0 - self.slowdown) if goes_on else left
            time_s = 0.0 if goes_on else time_s - left * (1.0 - self.slowdown)
            self.hidden_s += both_s
            self._advance(step, left, both_s)
        self.now_s += time_s

    def block(self, time_s: float) -> None:
        """Communicate for so long while compute waits."""
        self.now_s += time_s

    def finish(self, step: Hashable) -> None:
        """Wait until an early step is done."""
        while step not in self.done_s:
            first, left = self._queue[0]
            self.waited_s += left
            self._advance(first, left, left)

    def _advance(self, step: Hashable, left_s: float, time_s: float) -> None:
        """The first early step runs for so long of what is left of it."""
        self.ran.append((step, self.now_s, self.now_s + time_s))
        self.now_s += time_s
        if time_s < left_s:
            self._queue[0] = (step, left_s - time_s)
        else:
            self._queue.popleft()
            self.done_s[step] = self.now_s
