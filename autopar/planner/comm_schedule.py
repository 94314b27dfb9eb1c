"""The order of an emitted program's communications: which share buckets, and which overlap with
compute.

Both are chosen after the search, by the simulated step. Each candidate is simulated with the whole
budget as room for early communications, and the shortest is taken. If its peak is over the budget,
early communications only get the memory that the step leaves while they run, and the candidate is
taken if it is still the shortest.
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
from autopar.emit import Orders, WaitingError, apply_buckets, can_share, on_bucket, places, slack_of
from autopar.emit.context import Moved
from autopar.planner.candidates import Candidate
from autopar.planner.clock import Clock
from autopar.planner.pipeline.stage_cache import Alike
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
# The memory that early communications may hold at each place: the budget, less what the step holds
# there itself.

_WINDOWS = 64  # of a phase, each with one room: its least
# rooms are rounded down to powers of this share of the largest, so that a plan says them in few
# pieces
_LEVEL = 0.9


def rooms_left(
    graphs: Mapping[str, fx.Graph], peaks: Iterable[NodePeak], beside: int, budget: int
) -> dict[str, tuple[Piece, ...]]:
    """Compute the bytes that early communications may hold, by phase and place.

    Args:
        graphs: by phase, with no step started early. peaks: bytes while each of their nodes runs.
            beside: bytes that are there as well.
        budget: bytes.
    """
    seen = {(peak.phase, peak.node): peak.peak_bytes for peak in peaks}
    found = {}
    for phase, graph in graphs.items():
        spine = [node for node, _ in places(graph) if node.op != "placeholder"]
        found[phase] = _pieces([seen[phase, node] + beside for node in spine], budget)
    return found


def _pieces(held: list[int], budget: int) -> tuple[Piece, ...]:
    """Round the bytes that are left at each place down to a few pieces."""
    width = -(-len(held) // _WINDOWS)
    left = [max(budget - max(held[at : at + width]), 0) for at in range(0, len(held), width)]
    levels = [int(max(left) * _LEVEL**n) for n in range(_WINDOWS)]
    rounded = [next((level for level in levels if level <= size), 0) for size in left]
    return tuple(
        (next(run)[0] * width, size)
        for size, run in groupby(enumerate(rounded), key=lambda each: each[1])
    )


# --------------------------------------------------------------------------------------------------
# The communications that share a bucket: chosen after the search, by the simulated step of the
# emitted program.
#
# Each collective pays the latency of its algorithm. Many small ones of one kind, axis, dtype and
# reduction, for which nothing that computes waits, are one collective on one bucket; that pays it
# once, and for two passes over the bucket. One of what may be deferred starts when the last of
# them is there, and one of what may be prefetched is done before the first of them is read, which
# may hide less of it. So those members of a group that two of their own size would gain from go
# together, in the order in which they are issued, in one bucket or in several of about equal
# bytes; as many for every group, since each number that is tried costs a simulation. The one with
# the shortest simulated step is taken, if it is shorter and its peak is within the budget.
#
# A tensor that moves over several axes takes several steps. Where some tensors move over one axis
# first and others over another, buckets of the two axes wait for each other in a circle. Then
# first steps have buckets of their own, second steps others, and so on: none of a first step
# waits for one of a second.
#
# Objective and bound count what may share a bucket as its share of a full one
# (`autopar.solve.prices`); the buckets themselves are in the simulated step.

WORTH = 1e-3  # share of the step: buckets that save less are not worth their place in the plan
_NUM_BUCKETS = (8, 4, 1)  # into which each group is put
_Name = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """The communications of a program that may share buckets.

    Attributes:
        mesh, profile, num_microbatches: what they are priced with. times: seconds of each, by
            `Moved.name`.
    """

    mesh: Mesh
    profile: HardwareProfile
    num_microbatches: int
    times: Mapping[_Name, float]

    @staticmethod
    def of(plan: Plan, profile: HardwareProfile, num_microbatches: int) -> Groups:
        """Collect the communications of a plan.

        Args:
            plan: whose communications may share buckets.
            profile: that buckets are priced with.
            num_microbatches: of a step; communications at its ends run once for all of them.
        """
        steps: Iterator[tuple[str, Communication]] = iter(plan.steps())
        return Groups(
            plan.mesh,
            profile,
            num_microbatches,
            {(c.phase, node, c.result, c.target): c.by_itself_s for node, c in steps if not c.own},
        )

    def of_program(self, program: StageProgram, *, by_turn: bool = False) -> list[list[fx.Node]]:
        """The members of each group, in the order in which they are issued; the group that saves
        most first.

        Args:
            by_turn: whether first, second, … steps of the tensors are in groups of their own; else
                steps of a tensor that wait for another in their group are left out.
        """
        found: dict[_Name, list[fx.Node]] = {}
        for name in ("forward", "backward", "begin", "end"):
            module, turns = getattr(program, name), Counter[_Name]()
            for node in module.graph.nodes if module is not None else ():
                if can_share(node, self.mesh.shape) and self._gains(node):
                    c, tensor = (
                        node.meta["collective"],
                        (node.meta["moved"].node, node.meta["moved"].result),
                    )
                    turn = turns[tensor] if by_turn else 0
                    turns[tensor] += 1
                    found.setdefault(
                        (name, slack_of(node), c.kind, c.axis, c.dtype, c.reduce_op, turn), []
                    ).append(node)
        groups = [_apart(nodes) for nodes in found.values()]
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
        """Divide communications into about `num` buckets of equal bytes, or more if these were too
        large. A communication that would be alone in a bucket gets none."""
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

    def _gains(self, step: fx.Node) -> bool:
        """Whether it and another of its size are faster in a bucket."""
        return self.bucket((step, step)).saved_s > 0.0


def _apart(steps: Sequence[fx.Node]) -> list[fx.Node]:
    """The steps without those that wait for another of them."""
    found: list[fx.Node] = []
    tensors = set[tuple[str, int]]()
    for node in steps:
        tensor = node.meta["moved"].node, node.meta["moved"].result
        if tensor not in tensors:
            found.append(node)
        tensors.add(tensor)
    return found


def offer_buckets(
    groups: Groups,
    program: StageProgram,
    now_s: float,
    fits_together: Callable[[tuple[Bucket, ...]], bool],
) -> Iterator[tuple[Bucket, ...]]:
    """Generate the buckets to try, none of which wait for each other in a circle.

    Args:
        program: without any, in the order without communication beside compute. now_s: its step, of
            which what they save is some part.
        fits_together: whether none of these waits for another in a circle.
    """
    found, by_turn = groups.of_program(program), groups.of_program(program, by_turn=True)
    if sum(groups.bucket(steps).saved_s for steps in found) < WORTH * now_s:
        return
    for num in _NUM_BUCKETS:
        for members in (found, by_turn):
            together = tuple(
                bucket for steps in members for bucket in groups.in_buckets(steps, num)
            )
            if fits_together(together):
                yield together
                break


_TRIES = 6  # with ever less room for early steps, before there is none


@dataclass(frozen=True, slots=True)
class Ordering:
    """Orders the communications of plans within a budget.

    Attributes:
        peak_bytes: of what a program holds. by_node: of one microbatch, while each node runs.
        over: whether the first order that is found is to do.
    """

    priced: Priced
    budget: int
    peak_bytes: Callable[[StageProgram], int]
    by_node: Callable[[StageProgram], tuple[NodePeak, ...]]
    clock: Clock
    over: Callable[[], bool] = lambda: False

    def fastest(self, tried: Candidate) -> Candidate:
        """Order the communications of a plan that fits such that its simulated step is the
        shortest."""
        return self.fastest_within(tried, math.inf) or tried

    def fastest_within(self, tried: Candidate, limit_s: float) -> Candidate | None:
        """Return what `fastest` does; None if no order has a simulated step below a limit.

        Args:
            tried: the plan that fits, in the order of its ops.
            limit_s: seconds of a step that is too long.
        """
        with self.clock.phase("buckets"):
            plans = [tried, *self._in_buckets(tried)]
        if len(plans) == 1 and self.priced.problem.overlap_slowdown >= 1.0:
            return tried
        with self.clock.phase("overlap"):
            every = [_Plain(plain, Orders(plain.program, plain.plan)) for plain in plans]
            roomy = [plain.beside(self._all_room(plain.tried)) for plain in every]
            shortest_first = sorted(
                zip(map(_seconds, roomy), every, roomy, strict=True), key=lambda each: each[0]
            )
        found: tuple[Candidate, _Plain] | None = (
            None  # the best plan so far, with communication beside compute and without
        )
        least_s = math.inf
        if shortest_first[0][0] >= limit_s * (1.0 + WORTH):
            return None
        for roomy_s, plain, ordered in shortest_first:
            if roomy_s >= least_s or (math.isfinite(least_s) and self.over()):
                break
            within = self._within_budget(plain, ordered)
            seconds = math.inf if within is None else _seconds(within)
            if within is not None and seconds < least_s:
                found, least_s = (within, plain), seconds
        return tried if found is None else self._in_little_room(*found)

    def _in_little_room(self, ordered: Candidate, plain: _Plain) -> Candidate:
        """Reduce the plan's overlap to the rooms that give the same program, and write the
        program."""
        with self.clock.phase("overlap"):
            least = plain.orders.least(ordered.plan.overlap)
            return replace(
                ordered,
                plan=replace(ordered.plan, overlap=least),
                program=write_order(ordered.program),
            )

    def _in_buckets(self, tried: Candidate) -> Iterator[Candidate]:
        """Generate the plan with buckets, with its program in the order of its ops."""
        programs: dict[tuple[Bucket, ...], StageProgram] = {}

        def fits_together(buckets: tuple[Bucket, ...]) -> bool:
            """Whether the program can have these buckets; it is kept if so."""
            try:
                programs[buckets] = apply_buckets(
                    tried.program, replace(tried.plan, buckets=buckets)
                )
            except WaitingError:  # groups over several axes, each in order, may not be so together
                return False
            return True

        groups = Groups.of(tried.plan, self.priced.profile, self.priced.moves.num_microbatches)
        for buckets in dict.fromkeys(
            offer_buckets(groups, tried.program, tried.plan.prediction.serial_s, fits_together)
        ):
            if buckets:
                yield replace(
                    tried, plan=replace(tried.plan, buckets=buckets), program=programs[buckets]
                )

    def _all_room(self, plain: Candidate) -> Overlap:
        slowdown = self.priced.problem.overlap_slowdown
        return Overlap(slowdown, self.budget, self.budget) if slowdown < 1.0 else plain.plan.overlap

    def _within_budget(self, plain: _Plain, roomy: Candidate) -> Candidate | None:
        """Overlap as much as the budget allows; None if the plan is over it without overlap."""
        tried: dict[Overlap, Candidate] = {}
        beside_bytes = plain.tried.plan.prediction.beside_bytes

        def fits(allowed: Overlap) -> bool:
            """Whether the program with as much overlap is within the budget; it is kept."""
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
            left = self._room_left(plain.tried, roomy.plan.overlap)
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

    def _room_left(self, plain: Candidate, held: Overlap) -> _Left | None:
        """Compute the room beside a plan without overlap; None if that alone is over the
        budget."""
        with self.clock.phase("memory"):
            beside = plain.plan.prediction.beside_bytes
            peak = (
                self.peak_bytes(plain.program) + beside if plain.plan.buckets else plain.peak_bytes
            )
            if peak > self.budget:
                return None
            seen = self.by_node(plain.program)
            beside = peak - max(
                each.peak_bytes for each in seen
            )  # what a schedule holds beside the microbatch that runs
            graphs = {
                "forward": plain.program.forward.graph,
                "backward": plain.program.backward.graph,
            }
            left = rooms_left(graphs, seen, beside, self.budget)
        return _Left(
            replace(held, forward_room=left["forward"], backward_room=left["backward"]), beside
        )

    def _less(self, allowed: Overlap, over: Candidate, beside: int) -> Overlap:
        """Reduce the room in each phase by the bytes by which an order was over the budget
        there."""
        excess = dict.fromkeys(("forward", "backward"), 0)
        with self.clock.phase("memory"):
            for each in (
                peak for peak in self.by_node(over.program) if peak.phase in excess
            ):  # at a step's begin nothing is early
                excess[each.phase] = max(excess[each.phase], each.peak_bytes + beside - self.budget)
        if not any(excess.values()):  # it was over it between the phases
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
class _Left:
    """The room of early communications, and the bytes that the step holds beside its nodes."""

    overlap: Overlap
    beside_bytes: int


@dataclass(frozen=True, slots=True)
class _Plain:
    """A plan in the order of its ops, and the orders that it may have."""

    tried: Candidate
    orders: Orders

    def beside(self, allowed: Overlap) -> Candidate:
        """Overlap as much as is allowed; the program's graphs are not written."""
        program, held = self.orders.within(allowed)
        return replace(self.tried, plan=replace(self.tried.plan, overlap=held), program=program)


def _seconds(tried: Candidate) -> float:
    """Seconds of the simulated step; a little more if there are buckets, so that buckets that save
    next to nothing are left out."""
    return simulated_s(tried.program, tried.plan) * (1.0 + WORTH * bool(tried.plan.buckets))


# --------------------------------------------------------------------------------------------------
# The memory of an emitted program, under the schedule that it is planned for.


@dataclass(frozen=True, slots=True)
class StageSchedule:
    """The schedule that a stage is planned for.

    Attributes:
        name: of the schedule. batch_bytes: of the whole batch, which is live during the whole
            step.
        returned: what calls of the pipeline return.
        stage, actions: its number, and what its rank does, where the rank holds other stages beside
            it.
    """

    name: str
    num_microbatches: int
    batch_bytes: int
    returned: Returned
    stage: int = 0
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measures the memory of the programs that one search emits.

    Attributes:
        schedule: None where the batch is worked on in one piece. num_in_flight: microbatches that
            wait for their backward.
    """

    options: PlanOptions
    schedule: StageSchedule | None = None
    num_in_flight: int = 1
    alike: Alike = field(default_factory=Alike)

    def peak_bytes(self, program: StageProgram) -> int:
        """Measure the most bytes that the program holds at any moment of a step."""
        schedule = self.schedule
        if schedule is None:
            return self._measure(program)[0].peak_bytes
        return schedule.batch_bytes + self._of_stage(schedule, write_order(program))

    def by_node(self, program: StageProgram) -> tuple[NodePeak, ...]:
        """Measure the bytes that the program holds while each node runs, for one microbatch."""
        return self._measure(program)[1]

    def _measure(self, program: StageProgram) -> tuple[PeakMemory, tuple[NodePeak, ...]]:
        return self.alike.measure_once(
            program,
            lambda: all_peaks(program, batch=self.options.batch, outputs=self.options.outputs),
        )

    def _of_stage(self, schedule: StageSchedule, program: StageProgram) -> int:
        if schedule.actions:
            memory = self.alike.memory(program, lambda: chunk_memory(program, self.options.outputs))
            return rank_peak({schedule.stage: memory}, schedule.actions, schedule.num_microbatches)

        def measure() -> StagePeak:
            """Measure the peak of the stage under its schedule."""
            kind, num = schedule.name, schedule.num_microbatches
            return trace_stage_peak(
                program, kind, self.num_in_flight, num, self.options.outputs, schedule.returned
            )

        return self.alike.peak(program, self.num_in_flight, measure).peak_bytes
