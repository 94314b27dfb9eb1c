"""The order of the communications of an emitted program: which share buckets, and which overlap
with compute.

Both are chosen after the search, by the simulated step. Each candidate is first simulated with the
whole budget as room for early communications, and the shortest candidate is preferred. If its peak
exceeds the budget, early communications get only the memory that the step leaves while they run.
The candidate is chosen if it is still the shortest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from torch import fx

from autopar.core.collective import bucket_time, most_put_in
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.cost.priced import Priced
from autopar.emit import (
    Orders,
    WaitingError,
    apply_buckets,
    buckets_without,
    can_share,
    on_bucket,
    places,
    slack_of,
)
from autopar.emit.context import Moved
from autopar.planner.candidates import Candidate
from autopar.planner.clock import Clock
from autopar.planner.pipeline.stage_cache import StageCache
from autopar.planner.timeline import simulated_s
from autopar.plans import Bucket, Communication, Member, Overlap, Piece, Plan
from autopar.program.executor import Returned
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
# The communications that share a bucket, chosen after the search by the simulated step of the
# emitted program.
#
# Each collective pays the latency of its algorithm. Small collectives of the same kind, axis, dtype
# and reduction that no compute waits for form a group. A group may run as one collective on one
# bucket, which pays the latency once, and two passes over the bucket. A bucket of deferrable
# collectives starts when its last member is ready. A bucket of prefetchable collectives must end
# before its first member is read. Both may hide less of the communication.
#
# A collective belongs to its group if two of its size are faster in a bucket. The members are
# divided in issue order into one bucket, or into several of about equal bytes. All groups try the
# same numbers of buckets, since each number costs a simulation. The buckets with the shortest
# simulated step are chosen, if the step is shorter than without buckets and its peak is within the
# budget.
#
# A tensor that moves over several axes takes several steps. If some tensors move over one axis
# first and others over another, the buckets of the two axes wait for each other in a cycle. In
# that case the first steps have separate buckets, the second steps others, and so on: no first
# step waits for a second step.
#
# Buckets hold more memory than their members: a bucket of prefetchable collectives runs where its
# first member is read, and one of deferrable collectives keeps their operands until the last. If a
# plan exceeds the budget, the buckets that hold tensors where it does so are removed, and smaller
# buckets are tried.
#
# The objective and the bound count a collective that may share a bucket as its share of a full
# bucket (`autopar.solve.prices`). The buckets themselves are in the simulated step.

WORTH = 1e-3  # buckets that save a smaller share of the step are not added to the plan
_NUM_BUCKETS = 8  # number of buckets per group to try first
_FEWER, _MORE = (4, 1), (32,)  # numbers to try if those fit into the budget, and if they do not
_Name = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """The communications of a program that may share buckets.

    Attributes:
        mesh, profile, num_microbatches: the parameters of their prices.
        times: seconds of each communication, by `Moved.name`.
    """

    mesh: Mesh
    profile: HardwareProfile
    num_microbatches: int
    times: Mapping[_Name, float]

    @staticmethod
    def of(plan: Plan, profile: HardwareProfile, num_microbatches: int) -> Groups:
        """Collect the communications of a plan.

        Args:
            plan: the plan.
            profile: the hardware profile that prices buckets.
            num_microbatches: microbatches per step. Communications at the beginning and the end of
                a step run once for all of them.
        """
        steps: Iterator[tuple[str, Communication]] = iter(plan.steps())
        return Groups(
            plan.mesh,
            profile,
            num_microbatches,
            {(c.phase, node, c.result, c.target): c.by_itself_s for node, c in steps if not c.own},
        )

    def of_program(self, program: StageProgram, *, by_turn: bool = False) -> list[list[fx.Node]]:
        """Return the members of each group in issue order, the group with the largest saving first.

        Args:
            program: the program.
            by_turn: whether the first, second, … steps of tensors form separate groups. Otherwise,
                only the first step of a tensor in a group is included, since later steps wait for
                it.
        """
        members, known = dict[_Name, list[fx.Node]](), dict[_Name, bool]()
        for name in ("forward", "backward", "begin", "end"):
            module, turns = getattr(program, name), Counter[_Name]()
            for node in module.graph.nodes if module is not None else ():
                if can_share(node, self.mesh.shape) and self._gains(node, known):
                    c, moved = node.meta["collective"], node.meta["moved"]
                    tensor = moved.node, moved.result
                    turn = turns[tensor] if by_turn else 0
                    turns[tensor] += 1
                    alike = name, slack_of(node), c.kind, c.axis, c.dtype, c.reduce_op, turn
                    members.setdefault(alike, []).append(node)
        groups = [_without_later_steps(nodes) for nodes in members.values()]
        return sorted(
            (nodes for nodes in groups if len(nodes) > 1),
            key=lambda nodes: -self.bucket(nodes).saved_s,
        )

    def bucket(self, steps: Sequence[fx.Node]) -> Bucket:
        """Make one bucket of these communications."""
        c = on_bucket(steps, self.mesh.shape)
        moved: list[Moved] = [node.meta["moved"] for node in steps]
        sizes = [node.meta["collective"].bytes for node in steps]
        shared = self.num_microbatches if moved[0].phase == "step" else 1
        time_s = (
            bucket_time(c, self.mesh.shape[c.axis], self.mesh.link(c.axis), self.profile, sizes)
            / shared
        )
        alone_s = sum(self.times[m.name] for m in moved)
        return Bucket(
            moved[0].phase,
            tuple(Member(m.node, m.result, m.target) for m in moved),
            c,
            time_s,
            alone_s - time_s,
        )

    def in_buckets(self, steps: Sequence[fx.Node], num: int) -> tuple[Bucket, ...]:
        """Divide communications into about `num` buckets of equal bytes, or more if those would be
        too large. A communication that would be alone in its bucket stays without one."""
        sizes = [node.meta["collective"].bytes for node in steps]
        c = steps[0].meta["collective"]
        most = min(max(sum(sizes), 1) / num, most_put_in(c.kind, self.mesh.shape[c.axis]))
        pieces, filled = list[list[fx.Node]](), math.inf
        for node, size in zip(steps, sizes, strict=True):
            if filled + size > most:
                pieces.append([])
                filled = 0
            pieces[-1].append(node)
            filled += size
        return tuple(self.bucket(piece) for piece in pieces if len(piece) > 1)

    def _gains(self, step: fx.Node, known: dict[_Name, bool]) -> bool:
        """Whether two communications of this size are faster in one bucket. `known` has the results
        for equal communications, as of equal layers."""
        m: Moved = step.meta["moved"]
        alike = step.meta["collective"], m.phase, m.shape, m.source, m.target, self.times[m.name]
        if alike not in known:
            known[alike] = self.bucket((step, step)).saved_s > 0.0
        return known[alike]


def _without_later_steps(steps: Sequence[fx.Node]) -> list[fx.Node]:
    """Keep only the first step of each tensor; the later steps wait for it."""
    first: dict[tuple[str, int], fx.Node] = {}
    for node in steps:
        first.setdefault((node.meta["moved"].node, node.meta["moved"].result), node)
    return list(first.values())


@dataclass(frozen=True, slots=True)
class BucketOffers:
    """The sets of buckets of one program.

    Attributes:
        groups: the communications that may share buckets.
        together: the members of each group.
        by_turn: the same, with separate groups for the first, second, … steps of tensors.
        fits_together: whether the buckets of a set do not wait for each other in a cycle.
    """

    groups: Groups
    together: Sequence[Sequence[fx.Node]]
    by_turn: Sequence[Sequence[fx.Node]]
    fits_together: Callable[[tuple[Bucket, ...]], bool]

    @staticmethod
    def of(
        groups: Groups, program: StageProgram, fits_together: Callable[[tuple[Bucket, ...]], bool]
    ) -> BucketOffers:
        """Collect the communications of a program without buckets and without overlap."""
        by_turn = groups.of_program(program, by_turn=True)
        return BucketOffers(groups, groups.of_program(program), by_turn, fits_together)

    def saved_s(self) -> float:
        """Return the seconds that one bucket per group saves of the step."""
        return sum(self.groups.bucket(steps).saved_s for steps in self.together)

    def with_num(self, num: int) -> tuple[Bucket, ...]:
        """Return `num` buckets per group; none if they wait for each other in a cycle."""
        for members in (self.together, self.by_turn):
            buckets = tuple(
                bucket for steps in members for bucket in self.groups.in_buckets(steps, num)
            )
            if self.fits_together(buckets):
                return buckets
        return ()


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
            roomy = [plain.beside(self._all_room(plain.tried)) for plain in unordered]
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
                ordered = tried.get(allowed) or (plain.beside(allowed) if tried else roomy)
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

    def beside(self, allowed: Overlap) -> Candidate:
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
    returned: Returned
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
