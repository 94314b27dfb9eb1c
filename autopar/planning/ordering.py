"""The order of an emitted program's communications: which share buckets, and what is on its way beside compute.

Both are chosen behind the search, by the simulated step. What is offered is simulated with all of the budget as room for early steps, and
the shortest is taken; where its peak is over the budget, early steps get the room that the step leaves where they are on their way, and
it has to be the shortest still.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autopar.cost.priced import Priced
from autopar.emit import Orders, WaitingError, bucketed
from autopar.planning.bucketing import WORTH, Groups, offered
from autopar.planning.clock import Clock
from autopar.planning.rooms import rooms_left
from autopar.planning.timeline import simulated_s
from autopar.planning.tried import Candidate
from autopar.plans import Bucket, Overlap
from autopar.run.memory import NodePeak
from autopar.run.program import Program
from autopar.run.reordered import written

_TRIES = 6  # with ever less room for early steps, before there is none


@dataclass(frozen=True, slots=True)
class Ordering:
    """Within a budget.

    Attributes:
        peak_bytes: of what a program holds. by_node: of one microbatch, while each node runs.
        over: whether the first order that is found is to do.
    """

    priced: Priced
    budget: int
    peak_bytes: Callable[[Program], int]
    by_node: Callable[[Program], tuple[NodePeak, ...]]
    clock: Clock
    over: Callable[[], bool] = lambda: False

    def fastest(self, tried: Candidate) -> Candidate:
        """The plan in the order in which its simulated step is the shortest; as it is, it fits."""
        with self.clock.phase("buckets"):
            plans = [tried, *self._in_buckets(tried)]
        if len(plans) == 1 and self.priced.problem.overlap_slowdown >= 1.0:
            return tried
        with self.clock.phase("overlap"):
            every = [_Plain(plain, Orders(plain.program, plain.plan)) for plain in plans]
            roomy = [plain.beside(self._all_room(plain.tried)) for plain in every]
            shortest_first = sorted(zip(map(_seconds, roomy), every, roomy, strict=True), key=lambda each: each[0])
        found: tuple[Candidate, _Plain] | None = None  # the best plan so far, with communication beside compute and without
        least_s = math.inf
        for roomy_s, plain, ordered in shortest_first:
            if roomy_s >= least_s or (math.isfinite(least_s) and self.over()):
                break
            within = self._within_budget(plain, ordered)
            seconds = math.inf if within is None else _seconds(within)
            if within is not None and seconds < least_s:
                found, least_s = (within, plain), seconds
        return tried if found is None else self._in_little_room(*found)

    def _in_little_room(self, ordered: Candidate, plain: _Plain) -> Candidate:
        """The plan, of which the overlap says no more than what gives its program, and that program."""
        with self.clock.phase("overlap"):
            least = plain.orders.least(ordered.plan.overlap)
            return replace(ordered, plan=replace(ordered.plan, overlap=least), program=written(ordered.program))

    def _in_buckets(self, tried: Candidate) -> Iterator[Candidate]:
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

    def _all_room(self, plain: Candidate) -> Overlap:
        slowdown = self.priced.problem.overlap_slowdown
        return Overlap(slowdown, self.budget, self.budget) if slowdown < 1.0 else plain.plan.overlap

    def _within_budget(self, plain: _Plain, roomy: Candidate) -> Candidate | None:
        """With as much beside compute as the budget allows; None where the plan is over it with nothing."""
        tried: dict[Overlap, Candidate] = {}
        beside_bytes = plain.tried.plan.prediction.beside_bytes

        def fits(allowed: Overlap) -> bool:
            with self.clock.phase("overlap"):
                ordered = tried.get(allowed) or (plain.beside(allowed) if tried else roomy)
            with self.clock.phase("memory"):
                peak = ordered.peak_bytes if allowed in tried else self.peak_bytes(ordered.program) + beside_bytes
            tried[allowed] = replace(ordered, peak_bytes=peak)
            return peak <= self.budget

        allowed = self._all_room(plain.tried)
        if not fits(allowed):
            left = self._left(plain.tried, roomy.plan.overlap)
            if left is None:
                return None
            allowed = left.overlap
            for _ in range(_TRIES):
                if fits(allowed):
                    break
                allowed = self._less(allowed, tried[allowed], left.beside_bytes)
            else:
                allowed = Overlap(allowed.slowdown)
                is_within = fits(allowed)
                assert is_within, "it is the plan with nothing early"
        return replace(tried[allowed], plan=replace(plain.tried.plan, overlap=allowed))

    def _left(self, plain: Candidate, held: Overlap) -> _Left | None:
        """Beside what a plan holds with nothing early; None where that alone is over the budget."""
        with self.clock.phase("memory"):
            beside = plain.plan.prediction.beside_bytes
            peak = self.peak_bytes(plain.program) + beside if plain.plan.buckets else plain.peak_bytes
            if peak > self.budget:
                return None
            seen = self.by_node(plain.program)
            beside = peak - max(each.peak_bytes for each in seen)  # what a schedule holds beside the microbatch that runs
            graphs = {"forward": plain.program.forward.graph, "backward": plain.program.backward.graph}
            left = rooms_left(graphs, seen, beside, self.budget)
        return _Left(replace(held, forward_room=left["forward"], backward_room=left["backward"]), beside)

    def _less(self, allowed: Overlap, over: Candidate, beside: int) -> Overlap:
        """With less room in the phases in which an order was over the budget, by what it was over it."""
        excess = dict.fromkeys(("forward", "backward"), 0)
        with self.clock.phase("memory"):
            for each in (peak for peak in self.by_node(over.program) if peak.phase in excess):  # at a step's begin nothing is early
                excess[each.phase] = max(excess[each.phase], each.peak_bytes + beside - self.budget)
        if not any(excess.values()):  # it was over it between the phases
            excess = dict.fromkeys(excess, over.peak_bytes - self.budget)
        return replace(
            allowed,
            forward_room=tuple((since, max(size - excess["forward"], 0)) for since, size in allowed.forward_room),
            backward_room=tuple((since, max(size - excess["backward"], 0)) for since, size in allowed.backward_room),
        )


@dataclass(frozen=True, slots=True)
class _Left:
    """What early steps may hold; bytes that the step holds beside what its nodes do."""

    overlap: Overlap
    beside_bytes: int


@dataclass(frozen=True, slots=True)
class _Plain:
    """A plan in the order of its ops, and the orders that it may have."""

    tried: Candidate
    orders: Orders

    def beside(self, allowed: Overlap) -> Candidate:
        """With as much beside compute as is allowed; the program's graphs are not written."""
        program, held = self.orders.within(allowed)
        return replace(self.tried, plan=replace(self.tried.plan, overlap=held), program=program)


def _seconds(tried: Candidate) -> float:
    """Of a simulated step; a little more where there are buckets, which have to be worth their place in the plan."""
    return simulated_s(tried.program, tried.plan) * (1.0 + WORTH * bool(tried.plan.buckets))
