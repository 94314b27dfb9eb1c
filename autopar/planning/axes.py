"""A plan's decisions on a mesh of other axes: an axis is the plan's axis of its name.

An axis of the plan that is not there has size 1 there: what was split over it is whole. One that is new to the plan is one over which all
is whole: its devices do the same work. So of an axis of size 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.constraints.elsewhere import axes_from
from autopar.errors import PlanError
from autopar.layout import Layout, Strategy
from autopar.mesh import Mesh
from autopar.plans import Entry, Kept, NodeChoice, Plan


def on_axes(plan: Plan, mesh: Mesh) -> Plan:
    """The plan's decisions and what it keeps, in the layouts that they are on the axes of another mesh; without its communications.

    Raises:
        PlanError: where no axis has a name of the plan's, or its stages do not lie along their axis there.
    """
    _check(plan, mesh)
    pipeline = plan.pipeline
    if pipeline is None:
        return _decisions(plan, mesh)
    left = without_stages(plan, mesh)
    stages = tuple(_decisions(stage, left) for stage in pipeline.stages)
    return replace(plan, mesh=mesh, pipeline=replace(pipeline, stages=stages))


def without_stages(plan: Plan, mesh: Mesh) -> Mesh:
    """What of a mesh each of the plan's stages runs on."""
    return mesh.without(plan.pipeline.axis) if plan.pipeline and plan.pipeline.axis else mesh


def notes(plan: Plan, mesh: Mesh) -> tuple[str, ...]:
    """What is to be known of axes that only one of the meshes has, one sentence each."""
    return tuple(_notes(plan, mesh))


def _notes(plan: Plan, mesh: Mesh) -> Iterator[str]:
    before = {axis.name: axis.size for axis in plan.mesh.axes}
    for axis in mesh.axes:
        if axis.size > 1 and before.get(axis.name, 1) == 1:
            why = "is new" if axis.name not in before else "has size 1 in the plan"
            yield f"axis {axis.name!r} {why}: the plan's decisions repeat the same work on its {axis.size} devices"
    for name, size in before.items():
        if size > 1 and name not in mesh.names:
            yield f"axis {name!r} of the plan is not in this mesh: it has size 1 there, and what the plan splits over it is whole"


def _check(plan: Plan, mesh: Mesh) -> None:
    if not set(plan.mesh.names) & set(mesh.names):
        what = f"the plan is for {plan.mesh}, this is {mesh}: no axis has a name of the plan's, by which its decisions would be carried"
        raise PlanError(what, remedy=f"name the axes as in the plan, {', '.join(plan.mesh.names)}, or plan for this mesh")
    if plan.pipeline and plan.pipeline.axis:
        name, num = plan.pipeline.axis, len(plan.pipeline.stages)
        size, wanted = ({a.name: a.size for a in m.axes}.get(name, 1) for m in (mesh, plan.mesh))
        if size != wanted:
            what = f"the plan has {num} stages along {name!r}, {wanted} devices; in mesh {mesh} these are {size}"
            raise PlanError(what, remedy=f"ask about a mesh with {name}={wanted}, whatever its other axes are, or plan for that one")


def _decisions(plan: Plan, mesh: Mesh) -> Plan:
    axes = axes_from(plan.mesh, mesh)
    entries = tuple(_entry(entry, axes) for entry in plan.entries)
    kept = tuple(_kept(value, axes) for value in plan.kept)
    return replace(plan, mesh=mesh, entries=entries, kept=kept, communications=(), buckets=())


def _entry(entry: Entry, axes: Sequence[int | None]) -> Entry:
    nodes, again = (tuple(NodeChoice(c.node, _strategy(c.strategy, axes)) for c in choices) for choices in (entry.nodes, entry.recompute))
    if entry.kind == "parameter" and len(nodes) > 1 and nodes[0].strategy == nodes[1].strategy:  # it is used as it rests
        nodes = nodes[:1]
    return replace(entry, nodes=nodes, recompute=again)


def _strategy(strategy: Strategy, axes: Sequence[int | None]) -> Strategy:
    inputs, outputs = (tuple(layout.over(axes) for layout in layouts) for layouts in (strategy.inputs, strategy.outputs))
    return Strategy(inputs, outputs)


def _kept(kept: Kept, axes: Sequence[int | None]) -> Kept:
    layouts: dict[Layout, None] = dict.fromkeys(layout.over(axes) for layout in kept.layouts)
    return replace(kept, layouts=tuple(layouts))
