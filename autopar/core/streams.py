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
OverlapWeights = tuple[float, float]  # λ of forward and of backward
COMPUTE_BOUND: OverlapWeights = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Load:
    """Seconds of a step's work, per device.

    Attributes:
        serial_s: all work, one piece after the other.
        compute_s: compute of forward and of backward, with which communication may overlap.
        early_s: early communication of forward and of backward.
    """

    serial_s: float = 0.0
    compute_s: tuple[float, float] = (0.0, 0.0)
    early_s: tuple[float, float] = (0.0, 0.0)

    def __add__(self, other: Load) -> Load:
        (a, b), (c, d) = self.compute_s, other.compute_s
        (e, f), (g, h) = self.early_s, other.early_s
        return Load(self.serial_s + other.serial_s, (a + c, b + d), (e + g, f + h))

    def scale(self, factor: float) -> Load:
        """Return the load times `factor`; adding a load scaled by −1 subtracts it."""
        (a, b), (c, d) = self.compute_s, self.early_s
        return Load(factor * self.serial_s, (factor * a, factor * b), (factor * c, factor * d))

    def saved_s(self, slowdown: float) -> float:
        """Return the most seconds that overlap can hide: C + P − max(C + s·P, P), summed over both
        phases."""
        return sum(
            min((1.0 - slowdown) * p, c) for c, p in zip(self.compute_s, self.early_s, strict=True)
        )

    def least_s(self, slowdown: float) -> float:
        """Return the least seconds that the step takes: max(C + s·P, P) + K per phase, and the
        work that belongs to neither phase."""
        return self.serial_s - self.saved_s(slowdown)

    def priced_s(self, slowdown: float, balance: OverlapWeights) -> float:
        """Return λ(C + s·P) + (1 − λ)P + K seconds, a lower bound of `least_s` that is a sum over
        all pieces of work."""
        phases = zip(self.compute_s, self.early_s, balance, strict=True)
        return self.serial_s - sum(
            share * (1.0 - slowdown) * p + (1.0 - share) * c for c, p, share in phases
        )

    def outlasts_compute(self, slowdown: float) -> tuple[bool, bool]:
        """Return, for forward and for backward, whether the phase has more early communication than
        its compute can hide."""
        forward, backward = (
            (1.0 - slowdown) * p > c for c, p in zip(self.compute_s, self.early_s, strict=True)
        )
        return forward, backward


def work(phase: str, time_s: float, *, compute: bool = False, early: bool = False) -> Load:
    """Return the load of one piece of work.

    Args:
        phase: one of `PHASES`.
        time_s: its seconds.
        compute: whether it is compute, with which communication may overlap.
        early: whether it is early communication.
    """
    at, neither = PHASES.index(phase), (0.0, 0.0)
    load = (0.0, time_s) if at else (time_s, 0.0)
    return Load(time_s, load if compute else neither, load if early else neither)


@dataclass
class Streams:
    """The clock of both streams.

    Attributes:
        slowdown: s.
        now_s: the current time.
        hidden_s: seconds for which both streams ran so far.
        waited_s: seconds for which compute waited for early steps.
        done_s: early step → the time at which it was done.
        ran: (early step, begin, end) of each uninterrupted piece.
    """

    slowdown: float
    now_s: float = 0.0
    hidden_s: float = 0.0
    waited_s: float = 0.0
    done_s: dict[Hashable, float] = field(default_factory=dict)
    ran: list[tuple[Hashable, float, float]] = field(default_factory=list)
    _queue: deque[tuple[Hashable, float]] = field(
        default_factory=deque
    )  # step, its remaining seconds

    @property
    def backlog_s(self) -> float:
        """Remaining seconds of early communication."""
        return sum(left for _, left in self._queue)

    def start(self, step: Hashable, time_s: float) -> None:
        """Start an early step that takes `time_s` seconds."""
        self._queue.append((step, time_s))

    def compute(self, time_s: float) -> None:
        """Run compute that takes `time_s` seconds if nothing overlaps with it."""
        while self._queue and time_s > 0.0:
            step, remaining_s = self._queue[0]
            goes_on = time_s < remaining_s * (1.0 - self.slowdown)
            both_s = time_s / (1.0 - self.slowdown) if goes_on else remaining_s
            time_s = 0.0 if goes_on else time_s - remaining_s * (1.0 - self.slowdown)
            self.hidden_s += both_s
            self._advance(step, remaining_s, both_s)
        self.now_s += time_s

    def block(self, time_s: float) -> None:
        """Communicate for `time_s` seconds while compute waits."""
        self.now_s += time_s

    def finish(self, step: Hashable) -> None:
        """Wait until an early step is done."""
        while step not in self.done_s:
            first, remaining_s = self._queue[0]
            self.waited_s += remaining_s
            self._advance(first, remaining_s, remaining_s)

    def _advance(self, step: Hashable, left_s: float, time_s: float) -> None:
        """Run the first early step for `time_s` of its `left_s` remaining seconds."""
        self.ran.append((step, self.now_s, self.now_s + time_s))
        self.now_s += time_s
        if time_s < left_s:
            self._queue[0] = (step, left_s - time_s)
        else:
            self._queue.popleft()
            self.done_s[step] = self.now_s
