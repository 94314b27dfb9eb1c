"""Two streams of one device: compute, and communication that was started early.

Early steps run one after another in the order in which they were started, beside compute. While one
runs, compute goes on at the rate 1 − s, where s is the profile's `overlap_slowdown`: a hidden
second of communication costs compute s seconds. A step that compute waits for where it is issued
stops both streams: it takes the link from the early ones, which go on after it. So a phase with C
seconds of compute, P of early and K of other communication takes at least max(C + s·P, P) + K, and
C + P + K with s = 1. For any λ in [0, 1] that is at least λ(C + s·P) + (1 − λ)P + K, a sum over all
pieces of work (`Load`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

PHASES = ("forward", "backward")
Balance = tuple[float, float]  # λ of forward and of backward
ON_COMPUTE: Balance = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Load:
    """Seconds of a step's work, per device.

    Attributes:
        serial_s: all of it, one piece after the other. compute_s, early_s: in forward and in
            backward what of it is compute, beside which communication may run, and what is early
            communication.
    """

    serial_s: float = 0.0
    compute_s: tuple[float, float] = (0.0, 0.0)
    early_s: tuple[float, float] = (0.0, 0.0)

    def __add__(self, other: Load) -> Load:
        (a, b), (c, d) = self.compute_s, other.compute_s
        (e, f), (g, h) = self.early_s, other.early_s
        return Load(self.serial_s + other.serial_s, (a + c, b + d), (e + g, f + h))

    def scaled(self, factor: float) -> Load:
        """So much of it; a negative factor takes it away from another load."""
        (a, b), (c, d) = self.compute_s, self.early_s
        return Load(factor * self.serial_s, (factor * a, factor * b), (factor * c, factor * d))

    def saved_s(self, slowdown: float) -> float:
        """C + P − max(C + s·P, P), summed over both phases: the most that is hidden."""
        return sum(
            min((1.0 - slowdown) * p, c) for c, p in zip(self.compute_s, self.early_s, strict=True)
        )

    def least_s(self, slowdown: float) -> float:
        """The step takes no less: max(C + s·P, P) + K per phase, and what belongs to neither."""
        return self.serial_s - self.saved_s(slowdown)

    def priced_s(self, slowdown: float, balance: Balance) -> float:
        """λ(C + s·P) + (1 − λ)P + K: no more than `least_s`, and a sum over all pieces of work."""
        phases = zip(self.compute_s, self.early_s, balance, strict=True)
        return self.serial_s - sum(
            share * (1.0 - slowdown) * p + (1.0 - share) * c for c, p, share in phases
        )

    def unbalanced(self, slowdown: float) -> tuple[bool, bool]:
        """Whether a phase has more early communication than its compute can hide."""
        forward, backward = (
            (1.0 - slowdown) * p > c for c, p in zip(self.compute_s, self.early_s, strict=True)
        )
        return forward, backward


def work(phase: str, time_s: float, *, compute: bool = False, early: bool = False) -> Load:
    """The load of one piece of work."""
    at = PHASES.index(phase)

    def here(counts: bool) -> tuple[float, float]:
        return (0.0 if at or not counts else time_s, time_s if at and counts else 0.0)

    return Load(time_s, here(compute), here(early))


@dataclass
class Streams:
    """The clock of both streams.

    Attributes:
        slowdown: s. now_s: the time. hidden_s: how long both streams ran so far. waited_s: how long
            compute waited for early steps.
        done_s: early step → when it was done. ran: early steps and from when to when each ran,
            piece by piece.
    """

    slowdown: float
    now_s: float = 0.0
    hidden_s: float = 0.0
    waited_s: float = 0.0
    done_s: dict[Hashable, float] = field(default_factory=dict)
    ran: list[tuple[Hashable, float, float]] = field(default_factory=list)
    _queue: deque[tuple[Hashable, float]] = field(
        default_factory=deque
    )  # step, seconds that are left of it

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
