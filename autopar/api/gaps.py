"""A warning where a plan is proven less closely than was asked for."""

from __future__ import annotations

import logging

from autopar.planning import Planned
from autopar.units import share

log = logging.getLogger("autopar")
_SAME = 1e-6  # a gap that is this much wider is not


def told_of_gap(found: Planned, *, is_late: bool) -> Planned:
    """The plan as it is, and a warning where the gap to its bound is wider than the one asked for.

    Args:
        is_late: whether planning ended because its time was over.
    """
    plan, asked = found.plan, found.plan.options["gap"]
    if plan.proof.gap <= asked + _SAME:
        return found
    if is_late:
        why, remedy = "the time was over", "pass a larger time_limit_s"
    else:
        stages = plan.pipeline is not None and bool(plan.pipeline.axis)
        why = f"the bound over all {'cuts and stages' if stages else 'layouts'} proves no more"
        remedy = f"autopar.explain(plan) says what it covers, and gap={plan.proof.gap:.2g} accepts it"
    log.warning(
        "a plan that is %s faster is not excluded, where gap=%s is asked for: %s; %s",
        share(plan.proof.gap), asked, why, remedy,
    )  # fmt: skip
    return found
