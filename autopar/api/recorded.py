"""What a plan was asked for, read back from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.constraints import read_constraint
from autopar.hardware import Hardware, HardwareProfile, Mixed, profile_of
from autopar.plans import Plan
from autopar.request import OPTIONS, PlanOptions


def options_of(plan: Plan, hardware: Hardware, memory_bytes: int | None) -> PlanOptions:
    """The options that a plan was made with, on some hardware.

    Args:
        memory_bytes: another budget. By default the plan's, where its user set one or the hardware is the same, else the hardware's.

    Raises:
        ConstraintError: where a constraint cannot be read.
    """
    options = recorded(plan)
    return replace(options, memory_bytes=memory_bytes or (options.memory_bytes if _is_asked(plan, hardware) else None))


def recorded(plan: Plan) -> PlanOptions:
    """The same on the hardware that the plan was made for: with its budget; where stages' devices have their own, with none."""
    known: Mapping[str, Any] = {"outputs": "dtensor", **plan.options}
    asked = {name: known[name] for name, option in OPTIONS.items() if option.is_recorded and name in known}
    own = plan.pipeline is not None and plan.pipeline.rank_budgets
    asked["memory_bytes"] = None if own else known.get("memory_bytes")
    return PlanOptions(**{**asked, "constraints": tuple(read_constraint(c) for c in known.get("constraints", ()))})


def _is_asked(plan: Plan, hardware: Hardware) -> bool:
    """Whether the plan's budget goes with it: it is for this hardware, or its own would have given another one."""
    mark = plan.fingerprint
    if mark.profile_hash == hardware.hash:
        return True
    named = [name for name, _ in mark.profiles] or [mark.profile]
    if not set(named) <= set(HardwareProfile.names()):
        return False
    profiles = tuple(map(HardwareProfile.load, named))
    own: Hardware = Mixed(mark.axis, profiles) if mark.axis else profiles[0]
    if mark.profile_hash != own.hash:
        return False
    axis = plan.pipeline.axis if plan.pipeline else ""
    given = {PlanOptions().budget(profile_of(own, axis, rank)) for rank in range(len(profiles))}
    return plan.options.get("memory_bytes") not in given
