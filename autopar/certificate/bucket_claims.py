"""Check buckets: whether their members may share a bucket, and its bytes and savings.

Members are collectives of the plan that no op waits for, gathers of tensors that exist when their
phase begins, or collectives at the beginning or the end of a step. They have the same kind, axis,
dtype, reduction and slack, and all devices have equal parts of their tensors. No member starts from
the result of another member. Since no op waits for members, or they start from existing tensors,
only two collectives of the same tensor could. Each segment of a bucket is padded to a multiple of 8
elements. The operand of a reduce-scatter has a row for each device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.capture.trace import Trace
from autopar.certificate.facts import Claims, Facts
from autopar.certificate.rates import Rates
from autopar.certificate.report import Finding, near
from autopar.core.collective import Collective
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.emit.context import storage_key
from autopar.plans import Bucket, Communication, Plan
from autopar.validation.shards import FLOATS, SHARING, is_even, local_lengths

_FILLED_TO = 8  # elements


@dataclass(frozen=True, slots=True)
class BucketWalk:
    """All buckets of a plan.

    Attributes:
        num_microbatches: number of microbatches that share the time of collectives once per step.
    """

    trace: Trace
    plan: Plan
    facts: Facts
    claims: Claims
    profile: HardwareProfile
    num_microbatches: int

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each claim about buckets that does not hold."""
        members = [
            (b.phase, m.node, m.result, m.target) for b in self.plan.buckets for m in b.members
        ]
        for phase, node, _, target in (
            {name for name in members if members.count(name) > 1}
            if len(set(members)) < len(members)
            else ()
        ):
            yield Finding(
                "buckets", (f"the collective to {target} in {phase} is in two buckets"), node
            )
        for bucket in self.plan.buckets:
            bucket_place = bucket.members[0].node if bucket.members else ""
            for fault in self._find_faults(bucket):
                yield Finding("buckets", f"a bucket in {bucket.phase}: {fault}", bucket_place)
        saved_s, claimed_s = (
            sum(b.saved_s for b in self.plan.buckets),
            self.plan.prediction.in_buckets_s,
        )
        if not near(saved_s, claimed_s):
            yield Finding("time", f"buckets save {saved_s:.9g} s, not {claimed_s:.9g} s")

    def _find_faults(self, bucket: Bucket) -> Iterator[str]:
        """Yield the faults of one bucket: its members, the bytes of its collective, and its
        time."""
        steps = [self._step(bucket.phase, m.node, m.result, m.target) for m in bucket.members]
        members = [step for step in steps if step is not None]
        if len(members) < len(steps) or len(members) < 2:
            yield f"the plan has {len(members)} of the collectives of its {len(steps)} members"
            return
        yield from self._check_members(bucket, members)
        c = bucket.collective
        num_bytes = _bytes_before(
            c, members, [self._shape(m.node, m.result) for m in bucket.members], self.plan.mesh
        )
        expected = Collective(
            c.kind, c.axis, -1 if c.kind == "all_reduce" else 0, -1, c.reduce_op, c.dtype, num_bytes
        )
        if c != expected:
            yield (
                f"a device contributes {num_bytes} bytes along dim {expected.dim}, which differs"
                f" from {c}"
            )
            return
        yield from self._check_time(bucket, members)

    def _check_members(self, bucket: Bucket, steps: Sequence[Communication]) -> Iterator[str]:
        """Yield a fault if the members may not share a collective, or if one waits for another of
        its bucket."""
        c = bucket.collective
        for member, step in zip(bucket.members, steps, strict=True):
            yield from (
                f"{member.node} {what}"
                for what in self._member(c, step, self._shape(member.node, member.result))
            )
            if bucket.phase != "step" and not self._may_wait(step):
                yield f"{member.node} is {step.slack}: it depends on an op, or an op depends on it"
        if bucket.phase != "step" and len({step.slack for step in steps}) > 1:
            yield "some members may be prefetched, others deferred"
        if bucket.phase == "step" and len({m.result for m in bucket.members}) > 1:
            yield "some members run at the start of a step, others at its end"
        yield from self._in_order(bucket, steps)

    def _check_time(self, bucket: Bucket, steps: Sequence[Communication]) -> Iterator[str]:
        """Yield a fault if a bucket exceeds the largest size, or if its claimed time or saving is
        wrong.

        Collectives once per step count 1/M in each of M microbatches.
        """
        shared = self.num_microbatches if bucket.phase == "step" else 1
        sizes, rates = (
            [step.collective.bytes for step in steps],
            Rates(self.plan.mesh, self.profile),
        )
        if sum(sizes) > rates.most_in_bucket(bucket.collective):
            yield "it exceeds the largest bucket size"
        time_s = rates.bucket_s(bucket.collective, sizes) / shared
        saved_s = sum(step.by_itself_s for step in steps) - time_s
        if not near(bucket.time_s, time_s):
            yield f"it takes {time_s:.6g} s, not {bucket.time_s:.6g} s"
        if not near(bucket.saved_s, saved_s):
            yield f"it saves {saved_s:.6g} s, not {bucket.saved_s:.6g} s"

    def _step(self, phase: str, node: str, result: int, target: Layout) -> Communication | None:
        steps = self.claims.steps.get(((node, result), phase), ())
        return next((step for step in steps if step.target == target), None)

    def _shape(self, node: str, result: int) -> tuple[int, ...]:
        if (node, result) in self.facts.tensors:
            return self.facts.tensors[node, result].shape
        return next(tuple(p.view) for p in self.trace.parameters if storage_key(p.name) == node)

    def _member(self, c: Collective, step: Communication, shape: Sequence[int]) -> Iterator[str]:
        """Yield the reasons why a collective cannot be in a bucket."""
        collective, sizes = step.collective, self.plan.mesh.shape
        if collective.kind not in SHARING:
            yield f"uses {collective.kind}, which is not bucketed"
        if (collective.kind, collective.axis, collective.dtype, collective.reduce_op) != (
            c.kind,
            c.axis,
            c.dtype,
            c.reduce_op,
        ):
            yield (
                f"uses {collective.kind} of {collective.dtype} along axis {collective.axis}, but "
                f"its bucket uses {c.kind} of {c.dtype} along axis {c.axis}"
            )
        if step.kernel is not None:
            yield "is communicated by a kernel together with a matrix product"
        if collective.dtype not in FLOATS:
            yield f"is {collective.dtype}, but buckets hold floating-point tensors only"
        for layout in (step.source, step.target):
            if not is_even(layout, shape, sizes):
                yield f"is sharded unevenly as {layout}"

    @staticmethod
    def _may_wait(step: Communication) -> bool:
        """Return whether no op waits for a collective, or whether it is a gather that does not wait
        for an op. Slacks are checked elsewhere."""
        return step.slack == "deferrable" or (
            step.slack == "prefetchable" and step.collective.kind == "all_gather"
        )

    def _in_order(self, bucket: Bucket, steps: Sequence[Communication]) -> Iterator[str]:
        """Yield a fault if a member starts from the result of another."""
        for a, step in zip(bucket.members, steps, strict=True):
            for b, other in zip(bucket.members, steps, strict=True):
                same = (a.node, a.result) == (b.node, b.result) and step is not other
                if same and other.source in self._reached_layouts(
                    bucket.phase, a.node, a.result, step.target
                ):
                    yield (
                        f"{b.node} as {other.target} depends on {step.target}, which is in the same"
                        " bucket"
                    )

    def _reached_layouts(self, phase: str, node: str, result: int, start: Layout) -> set[Layout]:
        """Return the layouts that the plan's collectives produce from one layout of a tensor."""
        reached, steps = {start}, self.claims.steps.get(((node, result), phase), ())
        while further := {step.target for step in steps if step.source in reached} - reached:
            reached |= further
        return reached


def _bytes_before(
    c: Collective, steps: Sequence[Communication], shapes: Sequence[Sequence[int]], mesh: Mesh
) -> int:
    """Return the bytes of a bucket before its collective: the smaller part of every tensor, padded,
    once per device that receives one."""
    elements = 0
    for step, shape in zip(steps, shapes, strict=True):
        part = 1
        for length in local_lengths(
            shape, step.target if c.kind == "reduce_scatter" else step.source, mesh.shape
        ):
            part *= length
        elements += (part + _FILLED_TO - 1) // _FILLED_TO * _FILLED_TO
    rows = mesh.shape[c.axis] if c.kind == "reduce_scatter" else 1
    return int(rows * elements * getattr(torch, c.dtype).itemsize)


def count_issued(plan: Plan, claims: Claims) -> Mapping[tuple[str, str, int], tuple[int, int]]:
    """Count the collectives that the program runs. A bucket counts as one, its members as none.

    Args:
        plan: its communications and buckets are counted.
        claims: the claims of the same plan about each tensor.

    Returns:
        (phase, kind, axis) → number of collectives and the sum of their bytes.
    """
    issued: dict[tuple[str, str, int], tuple[int, int]] = {}

    def add(phase: str, c: Collective, sign: int) -> None:
        """Count a collective, or with `sign` -1 take it out of the count.

        Args:
            phase: the phase in which it runs.
            c: the collective.
            sign: 1 or -1.
        """
        num, size = issued.get((phase, c.kind, c.axis), (0, 0))
        issued[phase, c.kind, c.axis] = num + sign, size + sign * c.bytes

    for c in plan.communications:
        for _ in c.instances:
            add(c.phase, c.collective, 1)
    for bucket in plan.buckets:
        add(bucket.phase, bucket.collective, 1)
        for member in bucket.members:
            steps = claims.steps.get(((member.node, member.result), bucket.phase), ())
            for step in steps:
                if step.target == member.target:
                    add(bucket.phase, step.collective, -1)
    return issued
