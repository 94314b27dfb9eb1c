"""What a plan was asked for, read back from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.constraints import read_constraint
from autopar.hardware import HardwareProfile
from autopar.planning import PlanOptions
from autopar.plans import Plan


def options_of(plan: Plan, profile: HardwareProfile, memory_bytes: int | None) -> PlanOptions:
    """The options that a plan was made with, on a profile.

    Args:
        memory_bytes: another budget. By default the plan's, where its user set one or the profile is the same, else the profile's.

    Raises:
        ConstraintError: where a constraint cannot be read.
    """
    options = recorded(plan)
    return replace(options, memory_bytes=memory_bytes or (options.memory_bytes if _is_asked(plan, profile) else None))


def recorded(plan: Plan) -> PlanOptions:
    """The same on the profile that the plan was made for: with its budget."""
    known: Mapping[str, Any] = plan.options
    names = ("optimizer", "strict", "gap", "num_microbatches", "batch", "outputs", "loss_rows", "precision", "inference")
    words = {name: known[name] for name in names if name in known}
    constraints = tuple(read_constraint(c) for c in known.get("constraints", ()))
    return PlanOptions(memory_bytes=known.get("memory_bytes"), constraints=constraints, **words)


def _is_asked(plan: Plan, profile: HardwareProfile) -> bool:
    """Whether the plan's budget goes with it: it is for this profile, or its own profile would have given another one."""
    mark = plan.fingerprint
    if mark.profile_hash == profile.hash:
        return True
    if mark.profile not in HardwareProfile.names():
        return False
    own = HardwareProfile.load(mark.profile)
    return mark.profile_hash == own.hash and plan.options.get("memory_bytes") != PlanOptions().budget(own)
