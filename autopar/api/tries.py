"""How many microbatches are tried along an axis, one number after another as those before turned out, and what a plan says of that.

A step of M microbatches in P stages, of t(M) each through all of them, takes (M + P − 1) · t(M) / P: more of them wait for less, and each
has its launches, latencies and gathers for itself, M · t(M) rising with M. So the step falls with M, and then rises. Some of the largest
numbers come first, the smallest of these ahead; where that is the fastest, fewer, while these are faster. Where its bound rules it out
against what was found before, fewer, which wait for more, are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.planning import Planned, TooSlow
from autopar.units import microbatches, seconds

_FIRST = 3  # of the largest numbers
MOST_ROUNDS = 8  # microbatches per stage: beyond, the pipeline waits for less than an eighth of its time


def numbers_of(divisors: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Of the numbers that divide a batch those that may be tried, rising: one, and what fills the stages, each some times."""
    filling = [n for n in divisors if num_stages <= n <= MOST_ROUNDS * num_stages] or list(divisors[-1:])
    return tuple(dict.fromkeys((*[n for n in divisors if n == 1], *filling)))


def first_of(numbers: Sequence[int]) -> tuple[int, ...]:
    """The numbers that are tried however these turn out, but for what bounds rule out."""
    return tuple(numbers[max(len(numbers) - _FIRST, 1 if numbers[0] == 1 and len(numbers) > 1 else 0) :])


def walk(numbers: Sequence[int], found_s: Mapping[int, float]) -> Iterator[int]:
    """The numbers to try.

    Args:
        found_s: the step of each that was tried; infinite where there is no plan, or none fast enough. To be kept up while this runs.
    """
    first = first_of(numbers)
    yield from first
    higher = first[0] if first else 0
    for num in reversed(numbers[: len(numbers) - len(first)]):
        least_s = min(found_s.values(), default=math.inf)
        if found_s.get(higher, math.inf) > least_s or math.isinf(least_s):
            return
        yield num
        higher = num


@dataclass
class Tries:
    """What was tried, in words, and the fastest plan."""

    best: Planned | None = None
    told: list[str] = field(default_factory=list)

    def add(self, axis: str, num: int, found: Planned) -> float:
        """A plan; the seconds of its step."""
        step_s, pipeline = found.plan.prediction.step_s, found.plan.pipeline
        per_device = pipeline.num_chunks if pipeline else 1
        self.told.append(f"{_named(axis, num, per_device)} ({seconds(step_s)})")
        if self.best is None or step_s < self.best.plan.prediction.step_s:
            self.best = found
        return step_s

    def join(self, others: Tries, saved: float) -> None:
        """Add what was tried elsewhere, whose fastest is taken where it saves such a share of the step."""
        self.told += others.told
        if others.best is not None and others.best.plan.prediction.step_s <= (1.0 - saved) * self.best_s:
            self.best = others.best
        elif others.best_s < self.best_s:
            self.told.append(f"stages that save less than {100 * saved:g} % are not taken where none are asked for")

    @property
    def best_s(self) -> float:
        """Infinite where there is no plan."""
        return math.inf if self.best is None else self.best.plan.prediction.step_s

    def too_slow(self, axis: str, num: int, error: TooSlow) -> float:
        """What is no faster, by what bounds it; that bound."""
        self.told.append(f"{_named(axis, num)} (at least {seconds(error.args[0])})")
        return float(error.args[0])

    def refused(self, axis: str, num: int) -> float:
        """What has no plan."""
        self.told.append(f"{_named(axis, num)} (none)")
        return math.inf

    def fastest(self) -> Planned:
        """The fastest plan, which says what it was chosen from."""
        assert self.best is not None, "a plan was found"
        if len(self.told) < 2:
            return self.best
        line = f"this number of microbatches and these stages alone; tried, with the step found for each: {'; '.join(self.told)}"
        return covering(self.best, line)


def covering(found: Planned, line: str) -> Planned:
    """The plan with a further line of what its proof is about."""
    plan = replace(found.plan, proof=replace(found.plan.proof, covers=(*found.plan.proof.covers, line)))
    return replace(found, plan=plan, program=replace(found.program, plan_hash=plan.hash))


def _named(axis: str, num: int, per_device: int = 1) -> str:
    if not num:
        return "no microbatches"
    parts = microbatches(num)
    stages = f" in stages along {axis}" if axis else " one after another"
    return parts + stages + (f", {per_device} a device" if per_device > 1 else "")
