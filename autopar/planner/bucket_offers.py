"""The buckets that a program may use: groups of communications that may share a bucket, divided
into buckets. `autopar.planner.comm_schedule` chooses among them after the search, by the simulated
step of the emitted program.

Each collective pays the latency of its algorithm. Small collectives of the same kind, axis, dtype
and reduction that no compute waits for form a group. A group may run as one collective on one
bucket, which pays the latency once, and two passes over the bucket. A bucket of deferrable
collectives starts when its last member is ready. A bucket of prefetchable collectives must end
before its first member is read. Both may hide less of the communication.

A collective belongs to its group if two of its size are faster in a bucket. The members are
divided in issue order into one bucket, or into several of about equal bytes. All groups try the
same numbers of buckets, since each number costs a simulation. The buckets with the shortest
simulated step are chosen, if the step is shorter than without buckets and its peak is within the
budget.

A tensor that moves over several axes takes several steps. If some tensors move over one axis
first and others over another, the buckets of the two axes wait for each other in a cycle. In
that case the first steps have separate buckets, the second steps others, and so on: no first
step waits for a second step.

Buckets hold more memory than their members: a bucket of prefetchable collectives runs where its
first member is read, and one of deferrable collectives keeps their operands until the last. If a
plan exceeds the budget, the buckets that hold tensors where it does so are removed, and smaller
buckets are tried.

The objective and the bound count a collective that may share a bucket as its share of a full
bucket (`autopar.solve.prices`). The buckets themselves are in the simulated step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.core.collective import bucket_time, most_put_in
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.emit import can_share, on_bucket, slack_of
from autopar.emit.context import MovedTensor
from autopar.plans import Bucket, Communication, Member, Plan
from autopar.program.program import StageProgram

_Name = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """The communications of a program that may share buckets.

    Attributes:
        mesh, profile, num_microbatches: the parameters of their prices.
        times: seconds of each communication, by `MovedTensor.name`.
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
        members: dict[_Name, list[fx.Node]] = {}
        known: dict[_Name, bool] = {}
        for name in ("forward", "backward", "begin", "end"):
            module, turns = getattr(program, name), Counter[_Name]()
            for node in module.graph.nodes if module is not None else ():
                if can_share(node, self.mesh.shape) and self._gains(node, known):
                    c, moved = node.meta["collective"], node.meta["moved"]
                    tensor = moved.node, moved.result
                    turn = turns[tensor] if by_turn else 0
                    turns[tensor] += 1
                    members.setdefault(
                        (name, slack_of(node), c.kind, c.axis, c.dtype, c.reduce_op, turn), []
                    ).append(node)
        groups = [_without_later_steps(nodes) for nodes in members.values()]
        return sorted(
            (nodes for nodes in groups if len(nodes) > 1),
            key=lambda nodes: -self.bucket(nodes).saved_s,
        )

    def bucket(self, steps: Sequence[fx.Node]) -> Bucket:
        """Make one bucket of these communications."""
        c = on_bucket(steps, self.mesh.shape)
        moved: list[MovedTensor] = [node.meta["moved"] for node in steps]
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
        m: MovedTensor = step.meta["moved"]
        layouts = m.shape, m.source, m.target
        alike = step.meta["collective"], m.phase, *layouts, self.times[m.name]
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
