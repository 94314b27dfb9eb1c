"""`explain`: describe each module of a plan, its costs, and its best alternative."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autopar.breakdown import ModulePart, breakdown
from autopar.core.hardware import Hardware
from autopar.errors import PlanError
from autopar.explanation.link_prices import LinkValue, value_of_bandwidth
from autopar.explanation.module_tables import StageExplanation
from autopar.explanation.stage_tables import Explanation, sections_of
from autopar.plans import Flip, Plan


def explain(
    plan: Plan | str | Path,
    *,
    module: str | None = None,
    profile: Hardware | None = None,
    flips: Sequence[Flip] = (),
) -> Explanation:
    """Explain a plan: its time, memory and proof, and for each module its layouts, its costs and
    the best alternative. For a plan with a pipeline, also the schedule and the tensors that cross
    between stages; modules are then explained stage by stage.

    The parallelism of a module is derived from its layouts; `autopar.breakdown.parallelism` states
    the criteria.

    Args:
        plan: a plan or its file.
        module: a module path with shell wildcards. Only matching modules are shown, with every
            decision in them. None shows all modules.
        profile: the hardware profile of the plan, if it is not shipped with autopar. It is needed
            to price faster links.
        flips: the hardware changes that change close choices, as `autopar.flips` returns them for
            the plan and its model.

    Raises:
        PlanError: if no module matches.
    """
    plan = Plan.of(plan)
    priced = LinkValue() if module is not None else value_of_bandwidth(plan, profile)
    broken = [breakdown(stage) for stage in plan.stages]
    stages = []
    for number, (stage, parts) in enumerate(zip(plan.stages, broken, strict=True)):
        mine = tuple(p for p in parts if module is None or p.matches(module))
        turning = _select(flips, number, mine)
        stages.append(StageExplanation(plan, number, stage, mine, module, turning))
    explanation = Explanation(plan, sections_of(tuple(stages)), module, priced)
    if module is not None and not explanation.parts:
        known = ", ".join(dict.fromkeys(p.module for parts in broken for p in parts if p.module))
        raise PlanError(f"no module matches {module!r}", remedy=f"its modules are {known}")
    return explanation


def _select(flips: Sequence[Flip], stage: int, parts: Sequence[ModulePart]) -> tuple[Flip, ...]:
    """Select the flips of one stage, and of the requested entries."""
    keys = {entry.key for part in parts for entry in part.entries}
    return tuple(flip for flip in flips if (flip.stage or 0) == stage and flip.key in keys)
