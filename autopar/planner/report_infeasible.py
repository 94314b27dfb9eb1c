"""Conflicts of constraints: among those that cannot hold together, a smallest set that cannot, by a
deletion filter.

Each constraint in turn is left out; if the others still cannot hold, it is not needed for the
conflict and stays out (Chinneck and Dravnieks, "Locating Minimal Infeasible Constraint Sets in
Linear Programs", 1991). What is left cannot hold, and holds without any one.
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
    """Find a smallest set of constraints that cannot hold together.

    Args:
        hold: raises `ConstraintError` where constraints cannot hold. It is called once per
            constraint.
    """
    left = list(constraints)
    for constraint in constraints:
        without = [c for c in left if c is not constraint]
        if not _holds(without, hold):
            left = without
    return tuple(left)


def with_conflict(
    error: ConstraintError, constraints: Sequence[Constraint], hold: Hold
) -> ConstraintError:
    """Name the constraints that conflict in an error, if it needs more than one.

    Args:
        error: that the constraints caused.
        constraints: all of them.
        hold: as in `find_conflict`.
    """
    return _name_conflict(error, find_conflict(constraints, hold) if len(constraints) > 1 else ())


def _name_conflict(error: ConstraintError, found: Sequence[Constraint]) -> ConstraintError:
    if len(found) < 2:
        return error
    said = f"{', '.join(map(in_words, found[:-1]))} and {in_words(found[-1])}"
    return ConstraintError(
        f"{error.what}; {said} conflict: without any one of them, the others can hold",
        where=error.where,
        remedy=error.remedy,
    )


def with_conflict_of_stages(
    error: ConstraintError,
    whole: Trace,
    part: Trace,
    mesh: Mesh,
    wish: Pipelined,
    constraints: Sequence[Constraint],
) -> ConstraintError:
    """Name the constraints that conflict in the error of a plan with a pipeline or microbatches.

    All constraints but the pipeline apply to a microbatch on the mesh of a stage, so the smallest
    set is found there. The pipeline is part of the conflict if that set can hold without it, for
    the batch on the whole mesh.

    Args:
        whole, part: the traces of the batch and of one microbatch. wish: the pipeline with its
            number of microbatches, ``""`` as its axis where there is one stage.
    """
    asked = pipeline_in(constraints, mesh)
    if (
        asked is not None and asked.axis is None
    ):  # the axis is the planner's choice: no constraint asks for this one
        return error
    others = [c for c in constraints if not isinstance(c, Pipelined)]
    left = mesh.without(wish.axis or "")
    num_stages = wish.chunks * mesh.shape[mesh.names.index(wish.axis)] if wish.axis else 1

    def hold(chosen: Sequence[Constraint]) -> None:
        """Raise ConstraintError if a stage cannot hold these constraints."""
        _enumerate_strategies(part, left, chosen, num_stages=num_stages)

    if _holds(others, hold):  # then it is of the cuts, or of one stage
        return error
    found = find_conflict(others, hold)
    cuts = next((c for c in constraints if pipeline_in([c], mesh) is not None), wish)
    if cuts not in found and _holds(
        found, lambda chosen: _enumerate_strategies(whole, mesh, chosen, num_stages=1)
    ):
        found = (cuts, *found)
    return _name_conflict(error, found)


def _holds(constraints: Sequence[Constraint], hold: Hold) -> bool:
    try:
        hold(constraints)
    except ConstraintError:
        return False
    return True


def _enumerate_strategies(
    trace: Trace, mesh: Mesh, constraints: Sequence[Constraint], *, num_stages: int
) -> None:
    """Check that the constraints leave every op a strategy. With several stages, no cluster may
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
