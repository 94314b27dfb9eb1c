"""Which communications share a bucket: chosen behind the search, by the simulated step of the emitted program.

Each collective pays the latency of its algorithm. Many small ones of one kind, axis, dtype and reduction, for which nothing that computes
waits, are one collective on one bucket; that pays it once, and for two passes over the bucket. One of what may be deferred starts when the
last of them is there, and one of what may be prefetched is done before the first of them is read, which may hide less of it. So those
members of a group that two of their own size would gain from go together, in the order in which they are issued, in one bucket or in
several of about equal bytes; as many for every group, since each number that is tried costs a simulation. The one with the shortest
simulated step is taken, if it is shorter and its peak is within the budget.

A tensor that moves over several axes takes several steps. Where some tensors move over one axis first and others over another, buckets of
the two axes wait for each other in a circle. Then first steps have buckets of their own, second steps others, and so on: none of a first
step waits for one of a second.

Objective and bound count what may share a bucket as its share of a full one (`autopar.solve.prices`); the buckets themselves are in the
simulated step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.collective import bucket_time, most_put_in
from autopar.emit import can_share, on_bucket, slack_of
from autopar.emit.calls import Moved
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.plans import Bucket, Communication, Member, Plan
from autopar.run.program import Program

WORTH = 1e-3  # share of the step: buckets that save less are not worth their place in the plan
_NUM_BUCKETS = (8, 4, 1)  # into which each group is put
_Name = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """The communications of a program that may share buckets.

    Attributes:
        mesh, profile, num_microbatches: what they are priced with. times: seconds of each, by `Moved.name`.
    """

    mesh: Mesh
    profile: HardwareProfile
    num_microbatches: int
    times: Mapping[_Name, float]

    @staticmethod
    def of(plan: Plan, profile: HardwareProfile, num_microbatches: int) -> Groups:
        """Of what a plan moves."""
        steps: Iterator[tuple[str, Communication]] = iter(plan.steps())
        return Groups(
            plan.mesh, profile, num_microbatches, {(c.phase, node, c.result, c.target): c.by_itself_s for node, c in steps if not c.own}
        )

    def of_program(self, program: Program, *, by_turn: bool = False) -> list[list[fx.Node]]:
        """The members of each group, in the order in which they are issued; the group that saves most first.

        Args:
            by_turn: whether first, second, … steps of the tensors are in groups of their own; else steps of a tensor that wait for another
                in their group are left out.
        """
        found: dict[_Name, list[fx.Node]] = {}
        for name in ("forward", "backward", "begin", "end"):
            module, turns = getattr(program, name), Counter[_Name]()
            for node in module.graph.nodes if module is not None else ():
                if can_share(node, self.mesh.shape) and self._gains(node):
                    c, tensor = node.meta["collective"], (node.meta["moved"].node, node.meta["moved"].result)
                    turn = turns[tensor] if by_turn else 0
                    turns[tensor] += 1
                    found.setdefault((name, slack_of(node), c.kind, c.axis, c.dtype, c.reduce_op, turn), []).append(node)
        groups = [_apart(nodes) for nodes in found.values()]
        return sorted((nodes for nodes in groups if len(nodes) > 1), key=lambda nodes: -self.bucket(nodes).saved_s)

    def bucket(self, steps: Sequence[fx.Node]) -> Bucket:
        """One bucket of these."""
        c = on_bucket(steps, self.mesh.shape)
        moved: list[Moved] = [node.meta["moved"] for node in steps]
        sizes = [node.meta["collective"].bytes for node in steps]
        shared = self.num_microbatches if moved[0].phase == "step" else 1
        time_s = bucket_time(c, self.mesh.shape[c.axis], self.mesh.link(c.axis), self.profile, sizes) / shared
        alone_s = sum(self.times[m.name] for m in moved)
        return Bucket(moved[0].phase, tuple(Member(m.node, m.result, m.target) for m in moved), c, time_s, alone_s - time_s)

    def in_buckets(self, steps: Sequence[fx.Node], num: int) -> tuple[Bucket, ...]:
        """These in about so many buckets of equal bytes, or in more where these were too large; what would be alone in one is in none."""
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


def offered(
    groups: Groups, program: Program, now_s: float, fits_together: Callable[[tuple[Bucket, ...]], bool]
) -> Iterator[tuple[Bucket, ...]]:
    """Buckets to try, in which no one waits for another in a circle.

    Args:
        program: without any, in the order without communication beside compute. now_s: its step, of which what they save is some part.
        fits_together: whether none of these waits for another in a circle.
    """
    found, by_turn = groups.of_program(program), groups.of_program(program, by_turn=True)
    if sum(groups.bucket(steps).saved_s for steps in found) < WORTH * now_s:
        return
    for num in _NUM_BUCKETS:
        for members in (found, by_turn):
            together = tuple(bucket for steps in members for bucket in groups.in_buckets(steps, num))
            if fits_together(together):
                yield together
                break
