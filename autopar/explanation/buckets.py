"""Which communications share a bucket, and what that saves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.markup import escape

from autopar.explanation.rendering import table
from autopar.plans import Bucket, Plan
from autopar.units import seconds, size

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def in_buckets(plans: Sequence[Plan], of: str) -> Iterator[str]:
    """How many communications of a plan, or of stages, share how many buckets, and what is saved of a step or a microbatch.

    Args:
        of: ``step`` or ``microbatch``.
    """
    buckets = [bucket for plan in plans for bucket in plan.buckets]
    if buckets:
        num = sum(len(bucket.members) for bucket in buckets)
        saved = ", ".join(seconds(plan.prediction.in_buckets_s) for plan in plans)
        simulated = ", ".join(seconds(plan.prediction.simulated_s) for plan in plans)
        by = f"a {of}{', by stages' if len(plans) > 1 else ''}"
        yield (
            f"{num} small communications share {len(buckets)} bucket{'s' if len(buckets) > 1 else ''}, which saves {saved} of {by}: "
            f"simulated, it takes {simulated}; objective and bound count them as parts of full buckets"
        )


def buckets_of(plan: Plan) -> Iterator[RenderableType]:
    """A table with a row per bucket; nothing where there is none."""
    columns = ("phase", "collective", "of", ">alone", ">in a bucket", ">saves")
    if rows := [_row(bucket, plan.mesh.names) for bucket in plan.buckets]:
        yield from table("Communications that share a bucket", columns, rows)


def _row(bucket: Bucket, names: tuple[str, ...]) -> tuple[str, ...]:
    c = bucket.collective
    when = bucket.phase if bucket.phase != "step" else "end of a step" if bucket.members[0].result else "begin of a step"
    patterns: dict[str, int] = {}
    for member in bucket.members:
        name = _NUMBER.sub("*", member.node.rpartition("/")[0] if member.node.endswith("/storage") else member.node)
        patterns[name] = patterns.get(name, 0) + 1
    of = "\n".join(f"{escape(name)}{f' ({num}×)' if num > 1 else ''}" for name, num in patterns.items())
    moved = f"{c.kind} over {names[c.axis]} of {c.dtype} ({len(bucket.members)} in one, {size(c.bytes)})"
    times = (bucket.time_s + bucket.saved_s, bucket.time_s, bucket.saved_s)
    return when, moved, of, *map(seconds, times)
