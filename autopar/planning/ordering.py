"""The order of an emitted program's communications: which share buckets, and what is on its way beside compute.

Both are chosen behind the search, by the simulated step. What is offered is simulated with all of the budget as room for early steps, and
the shortest is taken; where its peak is over the budget, early steps get less room, and it has to be the shortest still.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autopar.cost.priced import Priced
from autopar.emit import WaitingError, bucketed, least_overlap, overlapped
from autopar.planning.bucketing import WORTH, Groups, offered
from autopar.planning.clock import Clock
from autopar.planning.timeline import simulated_s
from autopar.planning.tried import Tried
from autopar.plans import Bucket, Overlap
from autopar.run.program import Program

_SHARE, _NUM_SHARES = 0.75, 12  # of what early steps would hold with all room: what is tried, down to a twentieth, and nothing


@dataclass(frozen=True, slots=True)
class Ordering:
    """Within a budget.

    Attributes:
        peak_bytes: of what a program holds.
    """

    priced: Priced
    budget: int
    peak_bytes: Callable[[Program], int]
    clock: Clock

    def fastest(self, tried: Tried) -> Tried:
        """The plan in the order in which its simulated step is the shortest; as it is, it fits."""
        with self.clock.phase("buckets"):
            plans = [tried, *self._in_buckets(tried)]
        if len(plans) == 1 and self.priced.problem.overlap_slowdown >= 1.0:
            return tried
        with self.clock.phase("overlap"):
            roomy = [_beside(plain, self._all_room(plain)) for plain in plans]
            shortest_first = sorted(zip(map(_seconds, roomy), plans, roomy, strict=True), key=lambda each: each[0])
        best, least_s = tried, math.inf
        for roomy_s, plain, ordered in shortest_first:
            if roomy_s >= least_s:
                break
            found = self._within_budget(plain, ordered)
            if found is not None and _seconds(found) < least_s:
                best, least_s = found, _seconds(found)
        return best

    def _in_buckets(self, tried: Tried) -> Iterator[Tried]:
        """The plan with buckets, and its program, in the order of its ops."""
        programs: dict[tuple[Bucket, ...], Program] = {}

        def fits_together(buckets: tuple[Bucket, ...]) -> bool:
            try:
                programs[buckets] = bucketed(tried.program, replace(tried.plan, buckets=buckets))
            except WaitingError:  # groups over several axes, each in order, may not be so together
                return False
            return True

        groups = Groups.of(tried.plan, self.priced.profile, self.priced.moves.num_microbatches)
        for buckets in dict.fromkeys(offered(groups, tried.program, tried.plan.prediction.serial_s, fits_together)):
            if buckets:
                yield replace(tried, plan=replace(tried.plan, buckets=buckets), program=programs[buckets])

    def _all_room(self, plain: Tried) -> Overlap:
        slowdown = self.priced.problem.overlap_slowdown
        return Overlap(slowdown, self.budget, self.budget) if slowdown < 1.0 else plain.plan.overlap

    def _within_budget(self, plain: Tried, roomy: Tried) -> Tried | None:
        """With as much beside compute as the budget allows; None where the plan is over it with nothing."""
        tried: dict[Overlap, Tried] = {}

        def fits(allowed: Overlap) -> bool:
            with self.clock.phase("overlap"):
                ordered = tried.get(allowed) or (_beside(plain, allowed) if tried else roomy)
            with self.clock.phase("memory"):
                peak = ordered.peak_bytes if allowed in tried else self.peak_bytes(ordered.program) + plain.plan.prediction.beside_bytes
            tried[allowed] = replace(ordered, peak_bytes=peak)
            return peak <= self.budget

        allowed = self._all_room(plain)
        if not fits(allowed):
            allowed = roomy.plan.overlap
            # what early steps of forward hold is gone when backward begins: each phase has a limit of its own
            forward = _most(allowed.forward_bytes, lambda n: fits(replace(allowed, forward_bytes=n, backward_bytes=0)))
            if forward is None:
                return None
            backward = _most(allowed.backward_bytes, lambda n: fits(replace(allowed, forward_bytes=forward, backward_bytes=n)))
            allowed = replace(allowed, forward_bytes=forward, backward_bytes=backward or 0)
        with self.clock.phase("overlap"):
            least = least_overlap(plain.program, replace(plain.plan, overlap=allowed))
        return replace(tried[allowed], plan=replace(plain.plan, overlap=least))


def _most(size: int, fits: Callable[[int], bool]) -> int | None:
    """Of some shares of a size the largest that fits, by bisection: where one fits, so does less. None where nothing does."""
    shares = [*dict.fromkeys(int(size * _SHARE**n) for n in range(_NUM_SHARES)), 0]
    place = 0 if fits(size) else bisect_left(shares, True, key=fits)
    return shares[place] if place < len(shares) else None


def _beside(plain: Tried, allowed: Overlap) -> Tried:
    program, held = overlapped(plain.program, replace(plain.plan, overlap=allowed))
    return replace(plain, plan=replace(plain.plan, overlap=held), program=program)


def _seconds(tried: Tried) -> float:
    """Of a simulated step; a little more where there are buckets, which have to be worth their place in the plan."""
    return simulated_s(tried.program, tried.plan) * (1.0 + WORTH * bool(tried.plan.buckets))
