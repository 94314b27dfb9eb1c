"""Communication beside compute: steps with slack are started early and finished late, on the order of an emitted graph.

Terms. An *early* step has slack (`autopar.solve.slack`) and is communication. A *follower* is what belongs to such steps alone: slices
among them, the casts around a reduction in a wider dtype, and what packs and unpacks buckets. All other nodes are the *spine*: they keep
their order. `work` is seconds of compute as it takes alone; a second of communication beside compute takes 1 − s of it (`autopar.streams`).

The stream of early steps is fed just in time. Before each node of the spine, while the stream would run dry during it, a step is
started: the next prefetchable one if it would come too late otherwise, else a deferrable one whose input is there. The latest start
of a prefetchable step is that of a walk backwards, start ≤ min(next start, need) − duration: hidden at the least lifetime. It is finished
where it is read first; a deferrable one as soon as it has been done for as long as it took, at the latest at the end of the phase.

Nothing is started that would make what early steps hold more than the plan allows before it is finished (`autopar.emit.rooms`): it
stays where it was, as does every step whose start would stand right before its finish; deferrable steps are finished where less
begins to be allowed than they hold. All ranks emit the same order, so they issue their steps in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.collective import HOST_KINDS, Collective
from autopar.emit.rooms import Room, follows, places
from autopar.emit.times import blocked_s
from autopar.kernels.bucketed import from_bucket, into_bucket
from autopar.run.program import Action
from autopar.run.reordered import without_idle_starts
from autopar.streams import Streams


def is_early(node: fx.Node) -> bool:
    """Whether a step may run beside compute."""
    return follows(node) and "collective" in node.meta and node.meta["collective"].kind != "slice"


def _feeds(node: fx.Node) -> bool:
    """Whether it makes what an early step sends, and nothing else: it runs right before that."""
    return follows(node) and node.meta["key"].endswith(("/widen", "/pack"))


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """What is known of a phase whatever the room.

    Attributes:
        spine: its nodes, each with its place. times: seconds of nodes.
        latest: the work after which each prefetchable step must have been started, in the order in which they are read.
        needed: the place at which each of them is read.
    """

    spine: tuple[tuple[fx.Node, int], ...]
    times: Mapping[fx.Node, float]
    mesh_shape: tuple[int, ...]
    slowdown: float
    latest: Mapping[fx.Node, float]
    needed: Mapping[fx.Node, int]

    @staticmethod
    def of(graph: fx.Graph, times: Mapping[fx.Node, float], mesh_shape: tuple[int, ...], slowdown: float) -> PhaseWork:
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
                read[node] = needed[node] = min((read.get(user, place) for user in node.users), default=place)
                if is_early(node):
                    following = need = min(following, need) - times[node] * (1.0 - slowdown)
                    latest[node] = need
                before[node] = need
        return PhaseWork(spine, times, mesh_shape, slowdown, dict(reversed(latest.items())), needed)


@dataclass
class Schedule:
    """One phase's order in the making.

    Attributes:
        room: for what early steps hold. most_held: the most that they did.
        place: of the node of the spine that runs.
        there: the nodes whose results are there. started: early steps on their way, in order, with what they hold.
        waiting: deferrable steps whose input is there, with what they hold.
        pending: prefetchable steps that are not started, with the latest start of each.
    """

    phase: PhaseWork
    room: Room
    order: list[Action] = field(default_factory=list)
    streams: Streams = field(init=False)
    work_s: float = 0.0
    held: int = 0
    most_held: int = 0
    there: set[fx.Node] = field(default_factory=set)
    started: dict[fx.Node, int] = field(default_factory=dict)
    waiting: dict[fx.Node, int] = field(default_factory=dict)
    pending: dict[fx.Node, float] = field(init=False)
    place: int = 0

    def __post_init__(self) -> None:
        self.slowdown, self.times = self.phase.slowdown, self.phase.times
        self.streams = Streams(self.slowdown)
        self.pending = dict(self.phase.latest)

    def within(self, limit: int) -> Schedule:
        """Another, not run, where early steps may hold no more than this."""
        return Schedule(self.phase, Room(limit, self.room.pieces))

    def run(self) -> list[Action]:
        """The order, which ends with the graph's output."""
        for node, place in self.phase.spine:
            self.place = place
            self._shed()
            if node.op == "output":
                for step in (*self.started, *self.waiting):
                    self._demand(step)
            for operand in node.all_input_nodes:
                self._demand(operand)
            self._feed(0.0 if "collective" in node.meta else self.times.get(node, 0.0))
            self._run(node)
            self._retire()
        return without_idle_starts(self.order)

    def _shed(self) -> None:
        """Finish deferrable steps until no more is held than is allowed here; the others were started only where they fit to their end."""
        limit = self.room.at(self.place)
        if self.held > limit:
            for step in [*self.waiting, *(s for s in self.started if s.meta["slack"] == "deferrable")]:
                if self.held > limit:
                    self._demand(step)

    def _feed(self, time_s: float) -> None:
        """Start what should run beside the next `time_s` of work."""
        while self.streams.backlog_s * (1.0 - self.slowdown) < time_s:
            step = self._next(time_s)
            if step is None:
                return
            self._start(step)

    def _next(self, time_s: float) -> fx.Node | None:
        queued_s = self.work_s + self.streams.backlog_s * (1.0 - self.slowdown)
        deferred = next(iter(self.waiting), None)
        for step, latest_s in self.pending.items():
            behind_s = queued_s + (self.times[deferred] * (1.0 - self.slowdown) if deferred is not None else 0.0)
            if max(self.work_s + time_s, behind_s) <= latest_s:
                break
            if self._is_ready(step) and self.held + self._bytes(step) <= self.room.least(self.place, self.phase.needed[step]):
                return step
        return deferred

    def _is_ready(self, step: fx.Node) -> bool:
        """Whether a prefetchable step could run at once: no step before it is on its way, or still to come."""

        def is_there(node: fx.Node) -> bool:
            done = node in self.there or node in self.streams.done_s
            return done or (follows(node) and not is_early(node) and self._is_ready(node))

        return all(map(is_there, step.all_input_nodes))

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
        """Have a node's result there, now."""
        if node in self.there:
            return
        assert follows(node), "the spine keeps its order, in which every node is made before it is read"
        if node in self.started:
            self.streams.finish(node)
            self.order.append(("finish", node))
            self.held -= self.started.pop(node)
            self._made(node)
            return
        for operand in node.all_input_nodes:
            self._demand(operand)
        if node in self.there:  # it ran as soon as the last operand was there
            return
        self.pending.pop(node, None)
        self.held -= self.waiting.pop(node, 0)
        self._run(node)

    def _run(self, node: fx.Node) -> None:
        """Run a node where it stands; nobody works beside a collective that is not early."""
        time_s = self.times.get(node, 0.0)
        self.order.append(("run", node))
        self.streams.block(blocked_s(node))
        if "collective" in node.meta and node.meta["collective"].kind != "slice":
            self.streams.block(time_s)
        else:
            self.streams.compute(time_s)
            self.work_s += 0.0 if follows(node) else time_s
        self._made(node)

    def _made(self, node: fx.Node) -> None:
        """A result is there: what can be deferred may wait from now on. Out of a bucket come all its tensors, so that none is held longer
        than it is read."""
        self.there.add(node)
        for part in node.users if node.target is from_bucket else ():
            self._demand(part)
        for user in node.users:
            if user in self.there or not follows(user) or user.meta["slack"] != "deferrable":
                continue
            if _feeds(user):
                if all(operand in self.there for operand in user.all_input_nodes):  # of a bucket, the last is what it waits for
                    self._wait(next(iter(user.users)))
            elif is_early(user):
                if not _feeds(node):  # else it is about to run
                    self._wait(user)
            elif all(operand in self.there for operand in user.all_input_nodes):
                self._demand(user)

    def _wait(self, step: fx.Node) -> None:
        size = self._bytes(step)
        if self.held + size > self.room.at(self.place):
            self._demand(step)
        else:
            self.waiting[step] = self._hold(size)

    def _retire(self) -> None:
        """Finish deferrable steps that have been done for as long as they took."""
        for step in [s for s in self.started if s.meta["slack"] == "deferrable" and s in self.streams.done_s]:
            if self.streams.now_s >= self.streams.done_s[step] + self.times[step]:
                self._demand(step)

    def _bytes(self, step: fx.Node) -> int:
        """What a step holds until it is finished: what comes, and what is sent, which is there anyway where a parameter is gathered."""
        c: Collective = step.meta["collective"]
        if c.kind in HOST_KINDS:  # one of the two is on the host
            return c.bytes
        rests = c.kind == "all_gather" and step.meta["slack"] == "prefetchable" and step.args[0].target is not into_bucket  # type: ignore[union-attr]
        sent = 0 if rests else c.bytes
        return sent + c.output_bytes(c.size_in(self.phase.mesh_shape))

    def _hold(self, size: int) -> int:
        self.held += size
        self.most_held = max(self.most_held, self.held)
        return size
