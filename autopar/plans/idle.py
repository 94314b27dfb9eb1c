"""Axes of a mesh along which a plan shares nothing: every device there does the same work."""

from __future__ import annotations

from autopar.plans.plan import Plan


def idle_axes(plan: Plan) -> tuple[str, ...]:
    """The names of those with several devices, in the mesh's order."""
    stages = plan.pipeline.stages if plan.pipeline else (plan,)
    shared = {plan.pipeline.axis} if plan.pipeline else set[str]()
    for stage in stages:
        strategies = {choice.strategy for entry in stage.entries if entry.kind == "compute" for choice in entry.nodes}
        for layout in {layout for strategy in strategies for layout in (*strategy.inputs, *strategy.outputs)}:
            shared |= {name for name, at in zip(stage.mesh.names, layout.placements, strict=True) if not at.is_replicate()}
    return tuple(axis.name for axis in plan.mesh.axes if axis.size > 1 and axis.name not in shared)
