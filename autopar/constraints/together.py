"""All constraints together on a mesh: whether they speak of it, the plans by name among them,
the pipeline."""

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
    """The pipeline that is asked for, by `pipeline` or `megatron`.

    Raises:
        ConstraintError: where two are, or no axis has the size that is asked for.
    """
    found: list[tuple[Constraint, Pipelined]] = []
    for constraint in constraints:
        if isinstance(constraint, Pipelined):
            found.append((constraint, constraint))
        elif isinstance(constraint, Megatron) and (
            constraint.pp != 1 or constraint.zero in (1, 2) or constraint.microbatches
        ):
            schedule = INTERLEAVED if constraint.chunks > 1 else "1f1b"
            axis, num, chunks = (
                stage_axis(constraint, mesh),
                constraint.microbatches,
                constraint.chunks,
            )
            found.append(
                (constraint, Pipelined(axis, num, schedule, None, independent=False, chunks=chunks))
            )
    if len(found) > 1:
        raise ConstraintError(
            f"{found[0][0]} and {found[1][0]} both cut the model", remedy="pass one of them"
        )
    return found[0][1] if found else None


def check_number(constraints: Iterable[Constraint], num: int) -> None:
    """That no constraint asks for another number of microbatches.

    Raises:
        ConstraintError: naming the constraint and the number.
    """
    for constraint in constraints:
        if isinstance(constraint, Pipelined | Megatron) and constraint.microbatches not in (
            None,
            num,
        ):
            what = (
                f"{constraint} and num_microbatches={num} ask for different numbers of microbatches"
            )
            raise ConstraintError(what, remedy="pass one of them, or the same number in both")


def check(constraint: Constraint, mesh: Mesh) -> None:
    """That a constraint speaks of this mesh.

    Raises:
        ConstraintError: naming the constraint and the mesh.
    """
    if isinstance(constraint, LayoutConstraint):
        check_layouts(constraint, mesh)
    elif isinstance(constraint, Pipelined):
        if constraint.axis is not None:
            mesh.without(constraint.axis)
    else:
        list(parallelisms([constraint], mesh))


def speak_of(constraints: Iterable[Constraint], mesh: Mesh) -> bool:
    """Whether this mesh has the axes that constraints ask for, by name, by size or by how many
    there are."""
    constraints = tuple(constraints)
    try:
        stages = pipeline_in(constraints, mesh)
        left = mesh.without(stages.axis) if stages is not None and stages.axis else mesh
        for constraint in constraints:
            if not isinstance(
                constraint, Pipelined
            ):  # all but the pipeline speak of what a stage runs on
                check(constraint, left)
        list(parallelisms(constraints, left))
    except (ConstraintError, MeshError):
        return False
    return True


def parallelisms(constraints: Iterable[Constraint], mesh: Mesh) -> Iterator[Parallelism]:
    """The named plans among the constraints, each with its axes named; `megatron` is several.

    Raises:
        ConstraintError: where an axis is not in the mesh, or two plans claim one.
    """
    claimed: dict[str, tuple[Constraint, Parallelism]] = {}
    for constraint in constraints:
        if isinstance(constraint, LayoutConstraint | Pipelined | Offloaded | Resting):
            continue
        for plan in (
            parts_of(constraint, mesh) if isinstance(constraint, Megatron) else (constraint,)
        ):
            names = tuple(mesh.names[axis] for axis in axes_of(plan, mesh))
            if plan.kind is not None and plan.kind in GRIDS:
                check_grid(str(plan), plan.kind, plan.axes or (), mesh)
                names = plan.axes or ()
            for name in names:
                if name in claimed:
                    other, part = claimed[name]
                    both = (
                        f"{constraint}: {plan} and {part}"
                        if other is constraint
                        else f"{constraint} and {other}"
                    )
                    what = f"{both} both speak of axis {name!r}"
                    raise ConstraintError(
                        what, remedy="name the axes of each, for example ddp(axes='node')"
                    )
                claimed[name] = constraint, plan
            if names:
                yield replace(plan, axes=names)


# --------------------------------------------------------------------------------------------------
# Constraints of a plan on a mesh of other axes, which are the same where they have the same name.
#
# An axis that is not there has size 1 there, so nothing is asked of it. Of an axis that is new
# plans by name ask nothing, layouts that nothing is split over it. So what the constraints ask on
# the one mesh is there on the other, if all is whole over axes that are new.


def elsewhere(
    constraints: Iterable[Constraint], before: Mesh, there: Mesh, stages: str
) -> tuple[Constraint, ...]:
    """The constraints for another mesh, as a user would write them there: with axes named.

    Args:
        before, there: without the axis along which there are stages; stages: its name, ``""`` for
            none.

    Raises:
        ConstraintError: of a grid of tensor parallelism without one of its sides.
    """
    return tuple(
        moved
        for c in constraints
        if (moved := _remap_constraint(c, before, there, stages)) is not None
    )


def held_to(constraints: Iterable[Constraint], before: Mesh, there: Mesh) -> tuple[Constraint, ...]:
    """What they ask of layouts on another mesh, over the axes that they were for alone;
    arguments and errors as of `elsewhere`."""
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
    """Per axis of a mesh the one of that name in another; None where that has none, or either
    has size 1: nothing is split over it."""
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
    given = {kind: layout for kind in KINDS if (layout := getattr(constraint, kind)) is not None}
    return replace(constraint, **{kind: layout.over(axes) for kind, layout in given.items()})


def _named(constraint: Parallelism, there: Mesh) -> Parallelism | None:
    axes = constraint.axes or ()
    left = tuple(name for name in axes if name in there.names)
    if left != axes and constraint.kind in GRIDS:
        missing = next(name for name in axes if name not in left)
        what = f"{constraint}: mesh {there} has no axis {missing!r}, a side of its grid"
        raise ConstraintError(
            what,
            remedy="name the axes of the other mesh so, or plan for it without this constraint",
        )
    return replace(constraint, axes=left) if left else None


def _megatron(constraint: Megatron, before: Mesh, there: Mesh) -> Megatron:
    found: dict[str, tuple[str, ...]] = {
        part.name: part.axes or () for part in parts_of(constraint, before)
    }
    words = {"tp": "tensor_parallel_1d", "cp": "context_parallel", "ep": "expert_parallel"}
    named = {
        word: tuple(name for name in found.get(plan, ()) if name in there.names) or 1
        for word, plan in words.items()
    }
    free = (*constraint.free, *(name for name in there.names if name not in before.names))
    return replace(constraint, dp=None, free=free, **named)  # type: ignore[arg-type]
