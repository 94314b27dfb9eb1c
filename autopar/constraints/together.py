"""All constraints together on a mesh: whether they speak of it, the plans by name among them, the pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from autopar.constraints.grids import GRIDS, check_grid
from autopar.constraints.layouts import LayoutConstraint, check_layouts
from autopar.constraints.megatron import Megatron, parts_of, stage_axis
from autopar.constraints.offloading import Offloaded
from autopar.constraints.parallel import Parallelism, axes_of
from autopar.constraints.pipelines import Pipelined
from autopar.constraints.resting import Resting
from autopar.errors import ConstraintError, MeshError
from autopar.mesh import Mesh
from autopar.schedules import INTERLEAVED

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
        elif isinstance(constraint, Megatron) and (constraint.pp != 1 or constraint.zero in (1, 2) or constraint.microbatches):
            schedule = INTERLEAVED if constraint.chunks > 1 else "1f1b"
            axis, num, chunks = stage_axis(constraint, mesh), constraint.microbatches, constraint.chunks
            found.append((constraint, Pipelined(axis, num, schedule, None, independent=False, chunks=chunks)))
    if len(found) > 1:
        raise ConstraintError(f"{found[0][0]} and {found[1][0]} both cut the model", remedy="pass one of them")
    return found[0][1] if found else None


def check_number(constraints: Iterable[Constraint], num: int) -> None:
    """That no constraint asks for another number of microbatches.

    Raises:
        ConstraintError: naming the constraint and the number.
    """
    for constraint in constraints:
        if isinstance(constraint, Pipelined | Megatron) and constraint.microbatches not in (None, num):
            what = f"{constraint} and num_microbatches={num} ask for different numbers of microbatches"
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
    """Whether this mesh has the axes that constraints ask for, by name, by size or by how many there are."""
    constraints = tuple(constraints)
    try:
        stages = pipeline_in(constraints, mesh)
        left = mesh.without(stages.axis) if stages is not None and stages.axis else mesh
        for constraint in constraints:
            if not isinstance(constraint, Pipelined):  # all but the pipeline speak of what a stage runs on
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
        for plan in parts_of(constraint, mesh) if isinstance(constraint, Megatron) else (constraint,):
            names = tuple(mesh.names[axis] for axis in axes_of(plan, mesh))
            if plan.kind is not None and plan.kind in GRIDS:
                check_grid(str(plan), plan.kind, plan.axes or (), mesh)
                names = plan.axes or ()
            for name in names:
                if name in claimed:
                    other, part = claimed[name]
                    both = f"{constraint}: {plan} and {part}" if other is constraint else f"{constraint} and {other}"
                    what = f"{both} both speak of axis {name!r}"
                    raise ConstraintError(what, remedy="name the axes of each, for example ddp(axes='node')")
                claimed[name] = constraint, plan
            if names:
                yield replace(plan, axes=names)
