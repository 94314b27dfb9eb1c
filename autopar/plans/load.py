"""The load of the two streams of a step under a plan (`autopar.core.streams.Load`), from the times
that the plan records for each piece of work."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.core.collective import collective_time, share_of_bucket
from autopar.core.hardware import HardwareProfile
from autopar.core.streams import Load, work
from autopar.plans.parts import Communication, Entry
from autopar.plans.plan import Plan


def load_of(plan: Plan) -> Load:
    """Return the load of a step, or of one microbatch for the plan of a stage."""
    entries = sum(
        (
            _entry_load(e, e.time_s * len(e.instances), e.again_s * len(e.instances))
            for e in plan.entries
        ),
        Load(),
    )
    return sum(
        (moved_load(c, c.time_s * len(c.instances), _saved_s(c)) for c in plan.communications),
        entries,
    )


def forward_load(plan: Plan) -> Load:
    """Return the load of the forward phase of a step, or of one microbatch for the plan of a
    stage."""
    entries = (e for e in plan.entries if e.phase == "forward" and e.kind in ("compute", "input"))
    found = sum((_entry_load(e, e.time_s * len(e.instances), 0.0) for e in entries), Load())
    moves = (c for c in plan.communications if c.phase == "forward")
    return sum((moved_load(c, c.time_s * len(c.instances), _saved_s(c)) for c in moves), found)


def beyond_shares_s(moves: Iterable[Communication]) -> float:
    """Return the seconds by which collectives on their own take longer than the shares of buckets
    that the objective counts.
    """
    return sum(len(c.instances) * (c.by_itself_s - c.time_s) for c in moves)


def counted_time(c: Communication, axis_size: int, link: str, profile: HardwareProfile) -> float:
    """Return the seconds of one instance of a collective on other hardware, counted as in the plan.

    Args:
        c: the communication.
        axis_size: devices on the mesh axis there.
        link: the link of the axis there, ``"intra"`` or ``"inter"``.
        profile: the other hardware.
    """
    moved = c.collective
    alone_s = collective_time(moved, axis_size, link, profile)
    if c.alone_s is None or axis_size == 1:
        return alone_s
    return min(alone_s, share_of_bucket(moved, axis_size, link, profile))


def _entry_load(entry: Entry, time_s: float, again_s: float) -> Load:
    """Load of an entry that takes `time_s`, and `again_s` when backward runs it again."""
    if entry.kind != "compute":  # parameters, inputs and transfers of stages do not overlap
        return Load(time_s + again_s)
    return work(entry.phase, time_s, compute=True) + work("backward", again_s, compute=True)


def _saved_s(c: Communication) -> float:
    return c.kernel.saved_s * len(c.instances) if c.kernel else 0.0


def moved_load(c: Communication, time_s: float, saved_s: float = 0.0) -> Load:
    """Return the load of all instances of a communication.

    Args:
        c: the communication.
        time_s: seconds of all its instances.
        saved_s: seconds of these and of the products beside them that kernels save.
    """
    if c.phase == "step":
        return Load(time_s)
    found = work(c.phase, time_s, compute=c.collective.kind == "slice", early=c.beside)
    return found + work(c.phase, saved_s, compute=True).scale(-1.0) if saved_s else found
