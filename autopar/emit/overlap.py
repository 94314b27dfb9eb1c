"""The order of a program's communication steps. Steps start early and finish late, so that they
overlap with compute.

`Orders` computes the order for an overlap, and the smallest overlap that leads to the same order.
`apply_overlap` writes an order into a program's graphs.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.core.collective import HOST_KINDS, Collective
from autopar.core.streams import Streams
from autopar.emit.simulation import blocked_s, node_times
from autopar.kernels.packing import from_bucket, into_bucket
from autopar.plans import Overlap, Piece, Plan
from autopar.program.program import Action, StageProgram
from autopar.program.reorder import without_idle_starts, write_order

# --------------------------------------------------------------------------------------------------
# Limits on the bytes that early steps may hold, by place in a phase.
#
# A place is the index of a node of the spine, counted from 0. Placeholders have the place of the
# first node.


@dataclass(frozen=True, slots=True)
class Room:
    """The number of bytes that early steps may hold in one phase, by place.

    Attributes:
        most_bytes: the limit at every place.
        pieces: pairs (place, bytes), sorted by place. From each place up to the next one, the limit
            is `bytes` if that is less than `most_bytes`.
    """

    most_bytes: int
    pieces: tuple[Piece, ...] = ()

    def at(self, place: int) -> int:
        """Return the limit in bytes at a place."""
        return self.least(place, place)

    def least(self, first: int, last: int) -> int:
        """Return the smallest limit in bytes from place `first` to place `last`, inclusive."""
        begin = max(bisect_right(self.pieces, first, key=lambda piece: piece[0]) - 1, 0)
        pieces = itertools.takewhile(lambda piece: piece[0] <= last, self.pieces[begin:])
        return min([self.most_bytes, *(size for _, size in pieces)])


def follows(node: fx.Node) -> bool:
    """Return whether a node belongs only to steps that have slack, so that it may run at another
    place. All other nodes form the spine.
    """
    return node.op == "call_function" and node.meta.get("slack", "critical") != "critical"


def places(graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    """Iterate over pairs of a node of the spine and its place, in order."""
    place = -1
    for node in graph.nodes:
        if not follows(node):
            place += node.op != "placeholder"
            yield node, max(place, 0)


# --------------------------------------------------------------------------------------------------
# The order of one phase.
#
# An *early* step is a communication step with slack (`autopar.solve.tensor_moves`). A *follower* is
# a node that belongs only to such steps: a slice, a cast around a reduction in a wider dtype, or
# the pack or unpack of a bucket. All other nodes form the *spine*, which keeps its order. `work` is
# the time of compute without concurrent communication, in seconds. During a second of concurrent
# communication, 1 − s seconds of work are done, where s is the slowdown (`autopar.core.streams`).
#
# Steps start just in time. Before each node of the spine, steps are started while the communication
# stream would otherwise become idle during the node. The next prefetchable step is started if it
# would otherwise be late; otherwise, a deferrable step whose input is available is started. The
# latest starts of prefetchable steps are computed from the end of the phase, start ≤ min(next
# start, need) − duration, so that each step is hidden and holds its memory for the shortest time. A
# prefetchable step is finished at its first reader. A deferrable step is finished when the time
# since its end equals its duration, or at the end of the phase.
#
# A step is not started early if early steps would then hold more bytes than the plan allows. In
# this case it stays at its place. A step also stays at its place if nothing would run between its
# start and its finish. Where the limit decreases below the bytes held, deferrable steps are
# finished. All ranks emit the same order, so they issue collectives in the same order.


def is_early(node: fx.Node) -> bool:
    """Return whether a node is a step that may overlap with compute."""
    return follows(node) and "collective" in node.meta and node.meta["collective"].kind != "slice"


def _feeds(node: fx.Node) -> bool:
    """Return whether a node only prepares the operand of an early step, so that it runs directly
    before the step."""
    return follows(node) and node.meta["key"].endswith(("/widen", "/pack"))


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """The data of a phase that does not depend on memory limits.

    Attributes:
        spine: pairs of a node of the spine and its place.
        times: the seconds of each node.
        mesh_shape: the sizes of the mesh axes.
        slowdown: the fraction of its speed that compute loses during communication.
        latest: the latest start of each prefetchable step, in seconds of compute. The steps are in
            the order in which they are read.
        needed: the place at which each prefetchable step is read.
    """

    spine: tuple[tuple[fx.Node, int], ...]
    times: Mapping[fx.Node, float]
    mesh_shape: tuple[int, ...]
    slowdown: float
    latest: Mapping[fx.Node, float]
    needed: Mapping[fx.Node, int]

    @staticmethod
    def of(
        graph: fx.Graph,
        times: Mapping[fx.Node, float],
        mesh_shape: tuple[int, ...],
        slowdown: float,
    ) -> PhaseWork:
        """Compute the latest starts of a phase's prefetchable steps.

        Args:
            graph: the emitted graph of the phase.
            times: the seconds of each node.
            mesh_shape: the sizes of the mesh axes.
            slowdown: the fraction of its speed that compute loses during communication.
        """
        spine, total, place = tuple(places(graph)), 0.0, 0
        before, read, needed = dict[fx.Node, float](), dict[fx.Node, int](), dict[fx.Node, int]()
        for node, place in spine:
            before[node], read[node] = total, place
            total += 0.0 if "collective" in node.meta else times.get(node, 0.0)
        latest: dict[fx.Node, float] = {}
        following = total
        for node in reversed(graph.nodes):
            if follows(node) and node.meta["slack"] == "prefetchable":
                need = min((before.get(user, total) for user in node.users), default=total)
                read[node] = needed[node] = min(
                    (read.get(user, place) for user in node.users), default=place
                )
                if is_early(node):
                    following = need = min(following, need) - times[node] * (1.0 - slowdown)
                    latest[node] = need
                before[node] = need
        return PhaseWork(spine, times, mesh_shape, slowdown, dict(reversed(latest.items())), needed)


@dataclass
class OverlapSchedule:
    """Builds the order of one phase.

    Attributes:
        phase: the data of the phase.
        room: the bytes that early steps may hold.
        order: the actions so far.
        streams: the simulated streams of the device.
        work_s: the seconds of the spine's compute so far.
        held_bytes: the bytes that early steps currently hold.
        most_held: the largest number of bytes that they held.
        available: the nodes whose results are available.
        started: the early steps that are not finished, in order, with the bytes that each holds.
        waiting: the deferrable steps whose input is available, with the bytes that each holds.
        pending: the prefetchable steps that are not started, with the latest start of each.
        place: the place of the current node of the spine.
    """

    phase: PhaseWork
    room: Room
    order: list[Action] = field(default_factory=list)
    streams: Streams = field(init=False)
    work_s: float = 0.0
    held_bytes: int = 0
    most_held: int = 0
    available: set[fx.Node] = field(default_factory=set)
    started: dict[fx.Node, int] = field(default_factory=dict)
    waiting: dict[fx.Node, int] = field(default_factory=dict)
    pending: dict[fx.Node, float] = field(init=False)
    place: int = 0

    def __post_init__(self) -> None:
        self.slowdown, self.times = self.phase.slowdown, self.phase.times
        self.streams = Streams(self.slowdown)
        self.pending = dict(self.phase.latest)

    def within(self, limit: int) -> OverlapSchedule:
        """Return a new schedule of the phase in which early steps may hold at most `limit`
        bytes."""
        return OverlapSchedule(self.phase, Room(limit, self.room.pieces))

    def run(self) -> list[Action]:
        """Return the order, which ends with the graph's output."""
        for node, place in self.phase.spine:
            self.place = place
            self._finish_excess()
            if node.op == "output":
                for step in (*self.started, *self.waiting):
                    self._demand(step)
            for operand in node.all_input_nodes:
                self._demand(operand)
            self._feed(0.0 if "collective" in node.meta else self.times.get(node, 0.0))
            self._run(node)
            self._retire()
        return without_idle_starts(self.order)

    def _finish_excess(self) -> None:
        """Finish deferrable steps until early steps hold at most the limit at the current place.

        Prefetchable steps need no check, since they start only if they fit until they are read.
        """
        limit = self.room.at(self.place)
        if self.held_bytes > limit:
            for step in [
                *self.waiting,
                *(s for s in self.started if s.meta["slack"] == "deferrable"),
            ]:
                if self.held_bytes > limit:
                    self._demand(step)

    def _feed(self, time_s: float) -> None:
        """Start the steps that should overlap with the next `time_s` seconds of compute."""
        while self.streams.backlog_s * (1.0 - self.slowdown) < time_s:
            step = self._next(time_s)
            if step is None:
                return
            self._start(step)

    def _next(self, time_s: float) -> fx.Node | None:
        """Return the step to start before the next `time_s` seconds of compute; None if there is
        none."""
        queued_s = self.work_s + self.streams.backlog_s * (1.0 - self.slowdown)
        deferred = next(iter(self.waiting), None)
        for step, latest_s in self.pending.items():
            behind_s = queued_s + (
                self.times[deferred] * (1.0 - self.slowdown) if deferred is not None else 0.0
            )
            if max(self.work_s + time_s, behind_s) <= latest_s:
                break
            if self._is_ready(step) and self.held_bytes + self._bytes(step) <= self.room.least(
                self.place, self.phase.needed[step]
            ):
                return step
        return deferred

    def _is_ready(self, step: fx.Node) -> bool:
        """Return whether a prefetchable step could run now, because all steps that it depends on
        have finished."""

        def is_available(node: fx.Node) -> bool:
            """Return whether the node's result is available or could be computed now."""
            is_computed = node in self.available or node in self.streams.done_s
            return is_computed or (follows(node) and not is_early(node) and self._is_ready(node))

        return all(map(is_available, step.all_input_nodes))

    def _start(self, step: fx.Node) -> None:
        for operand in step.all_input_nodes:
            self._demand(operand)
        if step in self.waiting:
            self.started[step] = self.waiting.pop(step)
        else:
            del self.pending[step]
            self.started[step] = self._hold(self._bytes(step))
        self.order.append(("start", step))
        self.streams.start(step, self.times[step])

    def _demand(self, node: fx.Node) -> None:
        """Make a node's result available now."""
        if node in self.available:
            return
        assert follows(node), (
            "the spine keeps its order, in which every node runs before its readers"
        )
        if node in self.started:
            self.streams.finish(node)
            self.order.append(("finish", node))
            self.held_bytes -= self.started.pop(node)
            self._add_result(node)
            return
        for operand in node.all_input_nodes:
            self._demand(operand)
        if node in self.available:  # it ran when its last operand became available
            return
        self.pending.pop(node, None)
        self.held_bytes -= self.waiting.pop(node, 0)
        self._run(node)

    def _run(self, node: fx.Node) -> None:
        """Run a node at its place. A collective that is not early does not overlap with compute."""
        time_s = self.times.get(node, 0.0)
        self.order.append(("run", node))
        self.streams.block(blocked_s(node))
        if "collective" in node.meta and node.meta["collective"].kind != "slice":
            self.streams.block(time_s)
        else:
            self.streams.compute(time_s)
            self.work_s += 0.0 if follows(node) else time_s
        self._add_result(node)

    def _add_result(self, node: fx.Node) -> None:
        """Record that a result is available, so that deferrable steps that read it may start.

        All tensors of a bucket are unpacked together, so that the bucket is freed.
        """
        self.available.add(node)
        for part in node.users if node.target is from_bucket else ():
            self._demand(part)
        for user in node.users:
            if user in self.available or not follows(user) or user.meta["slack"] != "deferrable":
                continue
            if _feeds(user):
                # a bucket waits for its last operand
                if all(operand in self.available for operand in user.all_input_nodes):
                    self._wait(next(iter(user.users)))
            elif is_early(user):
                if not _feeds(node):  # otherwise, the step is about to run
                    self._wait(user)
            elif all(operand in self.available for operand in user.all_input_nodes):
                self._demand(user)

    def _wait(self, step: fx.Node) -> None:
        size = self._bytes(step)
        if self.held_bytes + size > self.room.at(self.place):
            self._demand(step)
        else:
            self.waiting[step] = self._hold(size)

    def _retire(self) -> None:
        """Finish deferrable steps for which the time since their end is at least their duration."""
        for step in [
            s for s in self.started if s.meta["slack"] == "deferrable" and s in self.streams.done_s
        ]:
            if self.streams.now_s >= self.streams.done_s[step] + self.times[step]:
                self._demand(step)

    def _bytes(self, step: fx.Node) -> int:
        """Return the bytes that a step holds until it is finished: its result and its operand.

        The operand of a gathered parameter does not count, since it stays on the device anyway.
        """
        c: Collective = step.meta["collective"]
        if c.kind in HOST_KINDS:  # either the operand or the result is on the host
            return c.bytes
        rests = (
            c.kind == "all_gather"
            and step.meta["slack"] == "prefetchable"
            and step.args[0].target is not into_bucket
        )
        sent = 0 if rests else c.bytes
        return sent + c.output_bytes(c.size_in(self.phase.mesh_shape))

    def _hold(self, size: int) -> int:
        self.held_bytes += size
        self.most_held = max(self.most_held, self.held_bytes)
        return size


_ROOM = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0)  # multiples of the bytes that early steps hold


def apply_overlap(program: StageProgram, plan: Plan) -> tuple[StageProgram, Overlap]:
    """Reorder a program so that communication overlaps with compute, within `plan.overlap`.

    Args:
        program: a program that was not reordered before.
        plan: the plan, with the seconds of the nodes.

    Returns:
        The program, and the overlap with the largest number of bytes that early steps hold in it.
        If that were the limit, the order might differ.
    """
    orders, overlap = Orders(program, plan).within(plan.overlap)
    return write_order(orders), overlap


def least_overlap(program: StageProgram, plan: Plan) -> Overlap:
    """Return `Orders.least` of the plan's overlap."""
    return Orders(program, plan).least(plan.overlap)


@dataclass
class Orders:
    """The orders in which a program may run. The program's graphs are not changed.

    Args:
        program: a program that was not reordered before.
        plan: the plan, with the seconds of the nodes.
    """

    program: StageProgram
    plan: Plan
    _phases: dict[str, PhaseWork] = field(default_factory=dict)

    def within(self, overlap: Overlap) -> tuple[StageProgram, Overlap]:
        """Order the program within an overlap.

        Args:
            overlap: the overlap, with the bytes that early steps may hold.

        Returns:
            The program with `StageProgram.orders`, and the overlap with the largest number of bytes
            that early steps hold.
        """
        orders: dict[str, list[Action]] = {}
        most_bytes = dict.fromkeys(("forward", "backward"), 0)
        for phase, schedule in self._schedules(overlap).items():
            order = schedule.run()
            most_bytes[phase] = schedule.most_held
            if schedule.most_held:  # otherwise, no step starts early and the order is unchanged
                orders[phase] = order
        return replace(self.program, orders=orders), _allow_bytes(overlap, most_bytes)

    def least(self, overlap: Overlap) -> Overlap:
        """Return an overlap with low limits that leads to the same program.

        The limits are the largest numbers of bytes that early steps hold. If the order changed with
        such a limit, the limit is a multiple of that number.
        """
        least_bytes = dict.fromkeys(("forward", "backward"), 0)
        for phase, schedule in self._schedules(overlap).items():
            order, most, limit = schedule.run(), schedule.most_held, schedule.room.most_bytes
            less = (int(most * factor) for factor in _ROOM)
            least_bytes[phase] = next(
                (n for n in less if most and n < limit and schedule.within(n).run() == order),
                limit if most else 0,
            )
        return _allow_bytes(overlap, least_bytes)

    def _schedules(self, overlap: Overlap) -> dict[str, OverlapSchedule]:
        """Return the schedules of the phases in which early steps may hold memory."""
        limits = {
            "forward": Room(overlap.forward_bytes, overlap.forward_room),
            "backward": Room(overlap.backward_bytes, overlap.backward_room),
        }
        allowed = {
            phase: room
            for phase, room in limits.items()
            if overlap.slowdown < 1.0 and room.most_bytes > 0
        }
        return {
            phase: OverlapSchedule(self._phase(phase, overlap.slowdown), room)
            for phase, room in allowed.items()
        }

    def _phase(self, phase: str, slowdown: float) -> PhaseWork:
        if phase not in self._phases or self._phases[phase].slowdown != slowdown:
            graph = getattr(self.program, phase).graph
            self._phases[phase] = PhaseWork.of(
                graph, node_times(graph, self.plan), self.program.mesh.shape, slowdown
            )
        return self._phases[phase]


def _allow_bytes(overlap: Overlap, held: Mapping[str, int]) -> Overlap:
    if overlap.slowdown >= 1.0:
        return overlap
    room = {"forward": overlap.forward_room, "backward": overlap.backward_room}
    room = {
        phase: pieces if any(size < held[phase] for _, size in pieces) else ()
        for phase, pieces in room.items()
    }
    return Overlap(
        overlap.slowdown, held["forward"], held["backward"], room["forward"], room["backward"]
    )
