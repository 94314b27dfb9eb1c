"""Conflicts of constraints: finds an irreducible set of constraints that cannot hold together, by a
deletion filter.

Each constraint in turn is removed. If the others still cannot hold, the constraint is not needed
for the conflict and stays removed (Chinneck and Dravnieks, "Locating Minimal Infeasible Constraint
Sets in Linear Programs", 1991). The remaining set cannot hold, but holds without any one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.capture.trace import Trace
from autopar.constraints import Constraint, Pipelined, check, pipeline_in
from autopar.constraints.words import in_words
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError
from autopar.planner.pipeline.pipeline_bound import part_constraints
from autopar.sharding import classes_of, resolve
from autopar.stages import seams, usable_points

Hold = Callable[[Sequence[Constraint]], object]


def find_conflict(constraints: Sequence[Constraint], hold: Hold) -> tuple[Constraint, ...]:
    """Find an irreducible set of constraints that cannot hold together.

    Args:
        constraints: constraints that cannot hold together.
        hold: raises `ConstraintError` if constraints cannot hold. It is called once per constraint.
    """
    needed = list(constraints)
    for constraint in constraints:
        without = [c for c in needed if c is not constraint]
        if not _holds(without, hold):
            needed = without
    return tuple(needed)


def with_conflict(
    error: ConstraintError, constraints: Sequence[Constraint], hold: Hold
) -> ConstraintError:
    """Add the conflicting constraints to an error, if there are at least two.

    Args:
        error: the error that the constraints caused.
        constraints: all constraints.
        hold: as in `find_conflict`.
    """
    return _name_conflict(error, find_conflict(constraints, hold) if len(constraints) > 1 else ())


def _name_conflict(error: ConstraintError, found: Sequence[Constraint]) -> ConstraintError:
    if len(found) < 2:
        return error
    names = f"{', '.join(map(in_words, found[:-1]))} and {in_words(found[-1])}"
    return ConstraintError(
        f"{error.what}; {names} conflict: without any one of them, the others can hold",
        where=error.where,
        remedy=error.remedy,
    )


def with_conflict_of_stages(
    error: ConstraintError,
    whole: Trace,
    part: Trace,
    mesh: Mesh,
    pipelined: Pipelined,
    constraints: Sequence[Constraint],
) -> ConstraintError:
    """Add the conflicting constraints to the error of a plan with a pipeline or microbatches.

    All constraints but the pipeline apply to a microbatch on the mesh of a stage, so the
    irreducible set is found there. The pipeline is part of the conflict if that set can hold
    without it, for the batch on the whole mesh.

    Args:
        error: the error.
        whole, part: the traces of the batch and of one microbatch.
        mesh: the whole mesh.
        pipelined: the pipeline with its number of microbatches; its axis is ``""`` for one stage.
        constraints: all constraints.
    """
    requested = pipeline_in(constraints, mesh)
    if (
        requested is not None and requested.axis is None
    ):  # the planner chose the axis, so no constraint requests it
        return error
    others = [c for c in constraints if not isinstance(c, Pipelined)]
    stage_mesh = mesh.without(pipelined.axis or "")
    num_stages = (
        pipelined.chunks * mesh.shape[mesh.names.index(pipelined.axis)] if pipelined.axis else 1
    )

    def hold(chosen: Sequence[Constraint]) -> None:
        """Raise ConstraintError if a stage cannot hold these constraints."""
        _enumerate_strategies(part, stage_mesh, chosen, num_stages=num_stages)

    if _holds(others, hold):  # the cause is the cuts, or the single stage
        return error
    conflict = find_conflict(others, hold)
    cuts = next((c for c in constraints if pipeline_in([c], mesh) is not None), pipelined)
    if cuts not in conflict and _holds(
        conflict, lambda chosen: _enumerate_strategies(whole, mesh, chosen, num_stages=1)
    ):
        conflict = (cuts, *conflict)
    return _name_conflict(error, conflict)


def _holds(constraints: Sequence[Constraint], hold: Hold) -> bool:
    try:
        hold(constraints)
    except ConstraintError:
        return False
    return True


def _enumerate_strategies(
    trace: Trace, mesh: Mesh, constraints: Sequence[Constraint], *, num_stages: int
) -> None:
    """Check that the constraints leave every op a strategy. With several stages, clusters must not
    cross a cut point.

    Raises:
        ConstraintError: if some op has none.
    """
    for constraint in constraints:
        check(constraint, mesh)
    forced = resolve(trace, constraints, mesh)
    if num_stages > 1:
        forced = part_constraints(forced, seams(trace, usable_points(trace, num_stages - 1)[1]))
    classes_of(trace, mesh.shape, forced)
