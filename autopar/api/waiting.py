"""How long unequal devices that run one program in lockstep wait for the slowest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from autopar.api.recorded import recorded
from autopar.capture import Trace
from autopar.hardware import Hardware, Mixed, slowest
from autopar.planning import Planned
from autopar.planning.repricing import repriced
from autopar.plans import Plan

log = logging.getLogger("autopar")


def with_waits(found: Planned, hardware: Hardware, part: Callable[[Plan], Trace]) -> Planned:
    """The plan with its step on each kind of device alone, where not each stage has devices of its own; else as it is.

    Args:
        part: what a plan is for, the batch or one microbatch.
    """
    plan = found.plan
    stages = plan.pipeline.axis if plan.pipeline else ""
    if not isinstance(hardware, Mixed) or slowest(hardware) in hardware.profiles or stages == hardware.axis:
        return found
    options, trace = recorded(plan), part(plan)
    times = {profile: repriced(plan, trace, plan.mesh, profile, options) for profile in dict.fromkeys(hardware.profiles)}
    steps = trace.loss is not None and bool(trace.differentiable)
    way = f"; constraints=[autopar.constraints.pipeline({hardware.axis!r})] gives each a stage of its own" if steps and not stages else ""
    log.warning("devices along %s are not alike and run in lockstep, at the pace of the slowest%s", hardware.axis, way)
    plan = replace(plan, alone_s=tuple(times[profile] for profile in hardware.profiles))
    return replace(found, plan=plan, program=replace(found.program, plan_hash=plan.hash))
