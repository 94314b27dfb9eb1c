"""The order of the communications of an emitted program: which share buckets, and which overlap
with compute.

Both are chosen after the search, by the simulated step. Each candidate is first simulated with the
whole budget as room for early communications, and the shortest candidate is preferred. If its peak
exceeds the budget, early communications get only the memory that the step leaves while they run.
The candidate is chosen if it is still the shortest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

from torch import fx

from autopar.cost.priced import Priced
from autopar.emit import (
    Orders,
    WaitingError,
    apply_buckets,
    buckets_without,
    places,
)
from autopar.planner.bucket_offers import BucketOffers, Groups
from autopar.planner.candidates import Candidate
from autopar.planner.clock import Clock
from autopar.planner.pipeline.stage_cache import StageCache
from autopar.planner.timeline import simulated_s
from autopar.plans import Bucket, Overlap, Piece
from autopar.program.executor import ReturnedOutputs
from autopar.program.peak_memory import NodePeak, PeakMemory, all_peaks
from autopar.program.program import StageProgram
from autopar.program.reorder import write_order
from autopar.program.schedule import Action
from autopar.program.stage_memory import StagePeak, chunk_memory, rank_peak, trace_stage_peak
from autopar.request import PlanOptions

# --------------------------------------------------------------------------------------------------
# The memory that early communications may hold at each position: the budget, minus the bytes that
# the step itself holds there.

# Windows of a phase. The room of a window is the least of its positions.
_WINDOWS = 64
# Rooms are rounded down to the largest room times a power of this factor, so that a plan stores
# them in few pieces.
_LEVEL = 0.9


def rooms_left(
    graphs: Mapping[str, fx.Graph], peaks: Iterable[NodePeak], beside: int, budget: int
) -> dict[str, tuple[Piece, ...]]:
    """Compute the bytes that early communications may hold, by phase and position.

    Args:
        graphs: the graphs by phase, with no communication started early.
        peaks: the peaks of their nodes.
        beside: further bytes that are held at every node.
        budget: bytes per device.
    """
    peak_bytes = {(peak.phase, peak.node): peak.peak_bytes for peak in peaks}
    rooms = {}
    for phase, graph in graphs.items():
        spine = [node for node, _ in places(graph) if node.op != "placeholder"]
        rooms[phase] = _pieces([peak_bytes[phase, node] + beside for node in spine], budget)
    return rooms


def _pieces(held: list[int], budget: int) -> tuple[Piece, ...]:
    """Round the free bytes at each position down to a few pieces."""
    width = -(-len(held) // _WINDOWS)
    free_bytes = [max(budget - max(held[at : at + width]), 0) for at in range(0, len(held), width)]
    levels = [int(max(free_bytes) * _LEVEL**n) for n in range(_WINDOWS)]
    rounded = [next((level for level in levels if level <= size), 0) for size in free_bytes]
    return tuple(
        (next(run)[0] * width, size)
        for size, run in groupby(enumerate(rounded), key=lambda each: each[1])
    )


# --------------------------------------------------------------------------------------------------
# The order of the communications of a plan.

WORTH = 1e-3  # buckets that save a smaller share of the step are not added to the plan
_NUM_BUCKETS = 8  # number of buckets per group to try first
_FEWER, _MORE = (4, 1), (32,)  # numbers to try if those fit into the budget, and if they do not
_MAX_REMOVALS = 3  # attempts to remove the buckets that exceed the budget
_MAX_REDUCTIONS = 6  # attempts with less and less room; then no communication starts early


@dataclass(frozen=True, slots=True)
class Ordering:
    """Orders the communications of plans within a budget.

    Attributes:
        priced: the problem that the plans solve.
        budget: bytes per device.
        peak_bytes: measures the peak of a program, in bytes.
        by_node: measures the peak of each node for one microbatch.
        clock: measures phases.
        over: whether the time is over, so that the first order that fits is chosen.
    """

    priced: Priced
    budget: int
    peak_bytes: Callable[[StageProgram], int]
    by_node: Callable[[StageProgram], tuple[NodePeak, ...]]
    clock: Clock
    over: Callable[[], bool] = lambda: False

    def fastest(self, tried: Candidate) -> Candidate:
        """Return a plan that fits with the order of communications that has the shortest simulated
        step."""
        return self.fastest_within(tried, math.inf) or tried

    def fastest_within(self, tried: Candidate, limit_s: float) -> Candidate | None:
        """Do as `fastest`, but return None if no order has a simulated step below a limit.

        Args:
            tried: a plan that fits, in the order of its ops.
            limit_s: exclusive upper limit of the simulated step, in seconds.
        """
        with self.clock.phase("buckets"):
            plans = [tried, *self._in_buckets(tried)]
        if len(plans) == 1 and self.priced.problem.overlap_slowdown >= 1.0:
            return tried
        with self.clock.phase("overlap"):
            unordered = [_Plain(plain, Orders(plain.program, plain.plan)) for plain in plans]
            roomy = [plain.overlapped(self._all_room(plain.tried)) for plain in unordered]
            shortest_first = sorted(
                zip(map(_seconds, roomy), unordered, roomy, strict=True), key=lambda each: each[0]
            )
        best: tuple[Candidate, _Plain] | None = (
            None  # the best plan so far, with overlap and without
        )
        least_s = math.inf
        for least_possible_s, plain, ordered in shortest_first:
            if least_possible_s >= min(least_s, limit_s * (1.0 + WORTH)) or (
                math.isfinite(least_s) and self.over()
            ):
                break
            within = self._within_budget(plain, ordered)
            seconds = math.inf if within is None else _seconds(within)
            if within is not None and seconds < least_s:
                best, least_s = (within, plain), seconds
        if best is None:
            return tried if math.isinf(limit_s) else None
        return self._minimize_room(*best)

    def _minimize_room(self, ordered: Candidate, plain: _Plain) -> Candidate:
        """Reduce the rooms of the plan's overlap to the least that give the same program, and write
        the graphs of the program."""
        with self.clock.phase("overlap"):
            least = plain.orders.least(ordered.plan.overlap)
            return replace(
                ordered,
                plan=replace(ordered.plan, overlap=least),
                program=write_order(ordered.program),
            )

    def _in_buckets(self, tried: Candidate) -> Iterator[Candidate]:
        """Generate the variants of the plan with buckets, each in the order of its ops."""
        programs: dict[tuple[Bucket, ...], StageProgram] = {}

        def fits_together(buckets: tuple[Bucket, ...]) -> bool:
            """Whether the buckets can be applied to the program. The program is stored if so."""
            try:
                programs[buckets] = apply_buckets(
                    tried.program, replace(tried.plan, buckets=buckets)
                )
            except WaitingError:  # buckets of several axes may form a cycle
                return False
            return True

        groups = Groups.of(tried.plan, self.priced.profile, self.priced.moves.num_microbatches)
        offers = BucketOffers.of(groups, tried.program, fits_together)
        if offers.saved_s() < WORTH * tried.plan.prediction.serial_s:
            return
        numbers, known_buckets = [_NUM_BUCKETS], set[tuple[Bucket, ...]]([()])
        for num in numbers:
            buckets, fits = offers.with_num(num), True
            if buckets not in known_buckets:
                known_buckets.add(buckets)
                plan = replace(tried.plan, buckets=buckets)
                candidate = replace(tried, plan=plan, program=programs[buckets])
                reduced = self._reduce_to_budget(candidate, tried.program)
                fits = reduced is candidate
                if reduced is not None:
                    yield reduced
            if num == _NUM_BUCKETS:
                numbers += _FEWER if fits else _MORE

    def _reduce_to_budget(self, tried: Candidate, plain: StageProgram) -> Candidate | None:
        """Remove the buckets that hold tensors where the plan exceeds the budget.

        Args:
            tried: the plan with buckets, in the order of its ops.
            plain: the program without buckets.

        Returns:
            The plan with the buckets that fit; None if these save less than `WORTH` of the step.
        """
        for _ in range(_MAX_REMOVALS):
            over = self._nodes_over_budget(tried)
            if over is None:
                return tried
            buckets = buckets_without(tried.program, over)
            saved_s = sum(bucket.saved_s for bucket in buckets)
            if len(buckets) == len(tried.plan.buckets) or (
                saved_s < WORTH * tried.plan.prediction.serial_s
            ):
                return None
            plan = replace(tried.plan, buckets=buckets)
            tried = replace(tried, plan=plan, program=apply_buckets(plain, plan))
        return None

    def _nodes_over_budget(self, tried: Candidate) -> set[fx.Node] | None:
        """Return the nodes during which a plan exceeds the budget; None if it never does."""
        peak = self.peak_bytes(tried.program) + tried.plan.prediction.beside_bytes
        if peak <= self.budget:
            return None
        peaks = self.by_node(tried.program)
        simultaneous_bytes = peak - max(each.peak_bytes for each in peaks)
        return {each.node for each in peaks if each.peak_bytes + simultaneous_bytes > self.budget}

    def _all_room(self, plain: Candidate) -> Overlap:
        slowdown = self.priced.problem.overlap_slowdown
        return Overlap(slowdown, self.budget, self.budget) if slowdown < 1.0 else plain.plan.overlap

    def _within_budget(self, plain: _Plain, roomy: Candidate) -> Candidate | None:
        """Overlap as much as the budget allows. Return None if the plan exceeds the budget without
        overlap."""
        tried: dict[Overlap, Candidate] = {}
        beside_bytes = plain.tried.plan.prediction.beside_bytes

        def fits(allowed: Overlap) -> bool:
            """Whether the program with this overlap is within the budget. The program is stored."""
            with self.clock.phase("overlap"):
                ordered = tried.get(allowed) or (plain.overlapped(allowed) if tried else roomy)
            with self.clock.phase("memory"):
                peak = (
                    ordered.peak_bytes
                    if allowed in tried
                    else self.peak_bytes(ordered.program) + beside_bytes
                )
            tried[allowed] = replace(ordered, peak_bytes=peak)
            return peak <= self.budget

        allowed = self._all_room(plain.tried)
        if not fits(allowed):
            remaining = self._room_left(plain.tried, roomy.plan.overlap)
            if remaining is None:
                return None
            allowed = remaining.overlap
            for _ in range(_MAX_REDUCTIONS):
                if fits(allowed):
                    break
                allowed = self._less(allowed, tried[allowed], remaining.beside_bytes)
            else:
                allowed = Overlap(allowed.slowdown)
                is_within = fits(allowed)
                assert is_within, "the plan without early communications fits"
        return replace(tried[allowed], plan=replace(plain.tried.plan, overlap=allowed))

    def _room_left(self, plain: Candidate, held: Overlap) -> _RemainingRoom | None:
        """Compute the room that a plan without overlap leaves. Return None if that plan already
        exceeds the budget."""
        with self.clock.phase("memory"):
            simultaneous_bytes = plain.plan.prediction.beside_bytes
            peak = (
                self.peak_bytes(plain.program) + simultaneous_bytes
                if plain.plan.buckets
                else plain.peak_bytes
            )
            if peak > self.budget:
                return None
            peaks = self.by_node(plain.program)
            simultaneous_bytes = peak - max(
                each.peak_bytes for each in peaks
            )  # bytes that the schedule holds in addition to the running microbatch
            graphs = {
                "forward": plain.program.forward.graph,
                "backward": plain.program.backward.graph,
            }
            rooms = rooms_left(graphs, peaks, simultaneous_bytes, self.budget)
        return _RemainingRoom(
            replace(held, forward_room=rooms["forward"], backward_room=rooms["backward"]),
            simultaneous_bytes,
        )

    def _less(self, allowed: Overlap, over: Candidate, beside: int) -> Overlap:
        """Reduce the room of each phase by the bytes by which an order exceeded the budget
        there."""
        excess = dict.fromkeys(("forward", "backward"), 0)
        with self.clock.phase("memory"):
            for peak in self.by_node(over.program):
                if peak.phase in excess:  # no communication starts early before forward
                    over_bytes = peak.peak_bytes + beside - self.budget
                    excess[peak.phase] = max(excess[peak.phase], over_bytes)
        if not any(excess.values()):  # the peak is between the phases
            excess = dict.fromkeys(excess, over.peak_bytes - self.budget)
        return replace(
            allowed,
            forward_room=tuple(
                (since, max(size - excess["forward"], 0)) for since, size in allowed.forward_room
            ),
            backward_room=tuple(
                (since, max(size - excess["backward"], 0)) for since, size in allowed.backward_room
            ),
        )


@dataclass(frozen=True, slots=True)
class _RemainingRoom:
    """The room of early communications, and the bytes that the step holds in addition to those of
    its nodes."""

    overlap: Overlap
    beside_bytes: int


@dataclass(frozen=True, slots=True)
class _Plain:
    """A plan in the order of its ops, and its possible orders."""

    tried: Candidate
    orders: Orders

    def overlapped(self, allowed: Overlap) -> Candidate:
        """Overlap as much as is allowed, without writing the program's graphs."""
        program, overlap = self.orders.within(allowed)
        return replace(self.tried, plan=replace(self.tried.plan, overlap=overlap), program=program)


def _seconds(tried: Candidate) -> float:
    """Return the seconds of the simulated step. Plans with buckets get a small penalty, so that
    buckets with a negligible saving are not chosen."""
    return simulated_s(tried.program, tried.plan) * (1.0 + WORTH * bool(tried.plan.buckets))


# --------------------------------------------------------------------------------------------------
# The memory of an emitted program under its schedule.


@dataclass(frozen=True, slots=True)
class StageSchedule:
    """The schedule that a stage is planned for.

    Attributes:
        name: the name of the schedule.
        num_microbatches: microbatches per step.
        batch_bytes: bytes of the whole batch, which is live during the whole step.
        returned: the values that calls of the pipeline return.
        stage, actions: the index of the stage, and the actions of its rank, if the rank holds
            several stages.
    """

    name: str
    num_microbatches: int
    batch_bytes: int
    returned: ReturnedOutputs
    stage: int = 0
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measures the memory of the programs of one search.

    Attributes:
        options: the options of planning.
        schedule: the schedule of a stage; None if the batch is not divided into microbatches.
        num_in_flight: microbatches that wait for their backward.
        stage_cache: measurements of equal programs.
    """

    options: PlanOptions
    schedule: StageSchedule | None = None
    num_in_flight: int = 1
    stage_cache: StageCache = field(default_factory=StageCache)

    def peak_bytes(self, program: StageProgram) -> int:
        """Measure the peak of the program over a step, in bytes."""
        schedule = self.schedule
        if schedule is None:
            return self._measure(program)[0].peak_bytes
        return schedule.batch_bytes + self._stage_peak_bytes(schedule, write_order(program))

    def by_node(self, program: StageProgram) -> tuple[NodePeak, ...]:
        """Measure the peak of each node for one microbatch, in bytes."""
        return self._measure(program)[1]

    def _measure(self, program: StageProgram) -> tuple[PeakMemory, tuple[NodePeak, ...]]:
        return self.stage_cache.measure_once(
            program,
            lambda: all_peaks(program, batch=self.options.batch, outputs=self.options.outputs),
        )

    def _stage_peak_bytes(self, schedule: StageSchedule, program: StageProgram) -> int:
        if schedule.actions:
            memory = self.stage_cache.memory(
                program, lambda: chunk_memory(program, self.options.outputs)
            )
            return rank_peak({schedule.stage: memory}, schedule.actions, schedule.num_microbatches)

        def measure() -> StagePeak:
            """Measure the peak of the stage under its schedule."""
            kind, num = schedule.name, schedule.num_microbatches
            return trace_stage_peak(
                program, kind, self.num_in_flight, num, self.options.outputs, schedule.returned
            )

        return self.stage_cache.peak(program, self.num_in_flight, measure).peak_bytes
