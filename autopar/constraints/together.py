"""All constraints together on a mesh: checks that they fit it, the named plans and the pipeline
among them, and their translation to a mesh with other axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from autopar.constraints.layouts import KINDS, LayoutConstraint, Resting, check_layouts
from autopar.constraints.megatron import Megatron, parts_of, stage_axis
from autopar.constraints.parallel import GRIDS, Parallelism, axes_of, check_grid
from autopar.constraints.resources import Offloaded, Pipelined
from autopar.core.mesh import Mesh
from autopar.core.schedules import INTERLEAVED
from autopar.errors import ConstraintError, MeshError

Constraint = LayoutConstraint | Parallelism | Megatron | Pipelined | Offloaded | Resting


def pipeline_in(constraints: Iterable[Constraint], mesh: Mesh) -> Pipelined | None:
    """Return the pipeline that a `pipeline` or `megatron` constraint requests, if any.

    Raises:
        ConstraintError: if two constraints request one, or no axis has the requested size.
    """
    pipelines: list[tuple[Constraint, Pipelined]] = []
    for constraint in constraints:
        if isinstance(constraint, Pipelined):
            pipelines.append((constraint, constraint))
        elif isinstance(constraint, Megatron) and (
            constraint.pp != 1 or constraint.zero in (1, 2) or constraint.microbatches
        ):
            schedule = INTERLEAVED if constraint.chunks > 1 else "1f1b"
            axis, num, chunks = (
                stage_axis(constraint, mesh),
                constraint.microbatches,
                constraint.chunks,
            )
            pipelines.append(
                (constraint, Pipelined(axis, num, schedule, None, independent=False, chunks=chunks))
            )
    if len(pipelines) > 1:
        raise ConstraintError(
            f"{pipelines[0][0]} and {pipelines[1][0]} both define a pipeline",
            remedy="pass one of them",
        )
    return pipelines[0][1] if pipelines else None


def check_number(constraints: Iterable[Constraint], num: int) -> None:
    """Check that no constraint requests another number of microbatches than `num`.

    Raises:
        ConstraintError: if one does; the constraint and the number are named.
    """
    for constraint in constraints:
        if isinstance(constraint, Pipelined | Megatron) and constraint.microbatches not in (
            None,
            num,
        ):
            message = (
                f"{constraint} and num_microbatches={num} request different numbers of microbatches"
            )
            raise ConstraintError(message, remedy="pass one of them, or the same number in both")


def check(constraint: Constraint, mesh: Mesh) -> None:
    """Check that a constraint fits a mesh: the mesh has its axes.

    Raises:
        ConstraintError: if it does not; the constraint and the mesh are named.
        MeshError: if the mesh has no axis of the name of a pipeline's axis.
    """
    if isinstance(constraint, LayoutConstraint):
        check_layouts(constraint, mesh)
    elif isinstance(constraint, Pipelined):
        if constraint.axis is not None:
            mesh.without(constraint.axis)
    else:
        list(parallelisms([constraint], mesh))


def speak_of(constraints: Iterable[Constraint], mesh: Mesh) -> bool:
    """Whether a mesh has the axes that constraints request, by name, by size or by number of
    axes."""
    constraints = tuple(constraints)
    try:
        stages = pipeline_in(constraints, mesh)
        other_axes = mesh.without((stages.axis if stages is not None else None) or "")
        for constraint in constraints:
            if not isinstance(
                constraint, Pipelined
            ):  # all but the pipeline are for the mesh of one stage
                check(constraint, other_axes)
        list(parallelisms(constraints, other_axes))
    except (ConstraintError, MeshError):
        return False
    return True


def parallelisms(constraints: Iterable[Constraint], mesh: Mesh) -> Iterator[Parallelism]:
    """Yield the named plans among the constraints, each with the names of its axes; `megatron`
    consists of several.

    Raises:
        ConstraintError: if an axis is not in the mesh, or two plans use the same one.
    """
    claimed: dict[str, tuple[Constraint, Parallelism]] = {}
    for constraint in constraints:
        if isinstance(constraint, LayoutConstraint | Pipelined | Offloaded | Resting):
            continue
        parts = parts_of(constraint, mesh) if isinstance(constraint, Megatron) else (constraint,)
        for plan in parts:
            names = tuple(mesh.names[axis] for axis in axes_of(plan, mesh))
            if plan.kind is not None and plan.kind in GRIDS:
                check_grid(str(plan), plan.kind, plan.axes or (), mesh)
                names = plan.axes or ()
            for name in names:
                if name in claimed:
                    raise _same_axis_error(name, (constraint, plan), claimed[name])
                claimed[name] = constraint, plan
            if names:
                yield replace(plan, axes=names)


def _same_axis_error(
    name: str, one: tuple[Constraint, Parallelism], other: tuple[Constraint, Parallelism]
) -> ConstraintError:
    """Return the error for two plans on one axis.

    Args:
        name: the axis.
        one, other: each plan, after the constraint that it is a part of.
    """
    constraint, plan = one
    is_one_constraint = other[0] is constraint
    both = (
        f"{constraint}: {plan} and {other[1]}"
        if is_one_constraint
        else f"{constraint} and {other[0]}"
    )
    return ConstraintError(
        f"{both} both apply to axis {name!r}",
        remedy="name the axes of each, for example ddp(axes='node')",
    )


# --------------------------------------------------------------------------------------------------
# Constraints on a mesh with other axes. Axes of the same name correspond to each other.
#
# An axis that the other mesh does not have counts as one of size 1, so that nothing is required of
# it. On an axis that only the other mesh has, named plans require nothing, and layouts require that
# nothing is split. So the constraints on both meshes are met alike if all tensors are whole over
# new axes.


def rewrite_for_mesh(
    constraints: Iterable[Constraint], before: Mesh, there: Mesh, stages: str
) -> tuple[Constraint, ...]:
    """Return the constraints as a user would write them for another mesh, with the names of axes.

    Args:
        constraints: the constraints.
        before: the mesh that they are for, without the axis of stages.
        there: the other mesh, without the axis of stages.
        stages: name of the axis of stages of the other mesh; ``""`` if there is none.

    Raises:
        ConstraintError: if a side of a grid of tensor parallelism is missing in the other mesh.
    """
    return tuple(
        moved
        for c in constraints
        if (moved := _remap_constraint(c, before, there, stages)) is not None
    )


def constraints_on_mesh(
    constraints: Iterable[Constraint], before: Mesh, there: Mesh
) -> tuple[Constraint, ...]:
    """Return constraints that require the same layouts on another mesh, over the common axes only.

    Args:
        constraints: the constraints.
        before: the mesh that they are for, without the axis of stages.
        there: the other mesh, without the axis of stages.

    Raises:
        ConstraintError: if a side of a grid of tensor parallelism is missing in the other mesh.
    """
    constraints = tuple(constraints)
    layouts = (
        _remap_constraint(c, before, there, "")
        for c in constraints
        if isinstance(c, LayoutConstraint | Resting)
    )
    named = (_named(c, there) for c in parallelisms(constraints, before))
    offloaded = (c for c in constraints if isinstance(c, Offloaded))
    return (*(c for c in (*layouts, *named) if c is not None), *offloaded)


def axes_from(before: Mesh, there: Mesh) -> tuple[int | None, ...]:
    """Return, for each axis of the mesh `there`, the index of the axis of the same name in
    `before`; None if there is none, or if one of both has size 1, so that nothing is split over
    it."""
    old = {axis.name: index for index, axis in enumerate(before.axes) if axis.size > 1}
    return tuple(old.get(axis.name) if axis.size > 1 else None for axis in there.axes)


def _remap_constraint(
    constraint: Constraint, before: Mesh, there: Mesh, stages: str
) -> Constraint | None:
    if isinstance(constraint, LayoutConstraint):
        return _layouts(constraint, before, there)
    if isinstance(constraint, Resting):
        axes = axes_from(before, there)
        return Resting(tuple((name, at.over(axes)) for name, at in constraint.storage))
    if isinstance(constraint, Megatron):
        return replace(_megatron(constraint, before, there), pp=stages or 1)
    if isinstance(constraint, Pipelined | Offloaded):
        return constraint
    return _named(
        constraint if constraint.axes is not None else replace(constraint, axes=before.names), there
    )


def _layouts(constraint: LayoutConstraint, before: Mesh, there: Mesh) -> LayoutConstraint:
    axes = axes_from(before, there)
    layouts = {kind: layout for kind in KINDS if (layout := getattr(constraint, kind)) is not None}
    return replace(constraint, **{kind: layout.over(axes) for kind, layout in layouts.items()})


def _named(constraint: Parallelism, there: Mesh) -> Parallelism | None:
    axes = constraint.axes or ()
    known_axes = tuple(name for name in axes if name in there.names)
    if known_axes != axes and constraint.kind in GRIDS:
        missing = next(name for name in axes if name not in known_axes)
        message = f"{constraint}: mesh {there} has no axis {missing!r}, which is a side of its grid"
        raise ConstraintError(
            message,
            remedy="use these axis names in the other mesh, or plan for it without this constraint",
        )
    return replace(constraint, axes=known_axes) if known_axes else None


def _megatron(constraint: Megatron, before: Mesh, there: Mesh) -> Megatron:
    axes_by_plan: dict[str, tuple[str, ...]] = {
        part.name: part.axes or () for part in parts_of(constraint, before)
    }
    words = {"tp": "tensor_parallel_1d", "cp": "context_parallel", "ep": "expert_parallel"}
    named = {
        word: tuple(name for name in axes_by_plan.get(plan, ()) if name in there.names) or 1
        for word, plan in words.items()
    }
    free = (*constraint.free, *(name for name in there.names if name not in before.names))
    return replace(constraint, dp=None, free=free, **named)  # type: ignore[arg-type]
