"""Constraints of a plan on a mesh of other axes, which are the same where they have the same name.

An axis that is not there has size 1 there, so nothing is asked of it. Of an axis that is new plans by name ask nothing, layouts that
nothing is split over it. So what the constraints ask on the one mesh is there on the other, if all is whole over axes that are new.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autopar.constraints.grids import GRIDS
from autopar.constraints.layouts import KINDS, LayoutConstraint
from autopar.constraints.megatron import Megatron, parts_of
from autopar.constraints.offloading import Offloaded
from autopar.constraints.parallel import Parallelism
from autopar.constraints.pipelines import Pipelined
from autopar.constraints.resting import Resting
from autopar.constraints.together import Constraint, parallelisms
from autopar.errors import ConstraintError
from autopar.mesh import Mesh


def elsewhere(constraints: Iterable[Constraint], before: Mesh, there: Mesh, stages: str) -> tuple[Constraint, ...]:
    """The constraints for another mesh, as a user would write them there: with axes named.

    Args:
        before, there: without the axis along which there are stages; stages: its name, ``""`` for none.

    Raises:
        ConstraintError: of a grid of tensor parallelism without one of its sides.
    """
    return tuple(moved for c in constraints if (moved := _moved(c, before, there, stages)) is not None)


def held_to(constraints: Iterable[Constraint], before: Mesh, there: Mesh) -> tuple[Constraint, ...]:
    """What they ask of layouts on another mesh, over the axes that they were for alone; arguments and errors as of `elsewhere`."""
    constraints = tuple(constraints)
    layouts = (_moved(c, before, there, "") for c in constraints if isinstance(c, LayoutConstraint | Resting))
    named = (_named(c, there) for c in parallelisms(constraints, before))
    offloaded = (c for c in constraints if isinstance(c, Offloaded))
    return (*(c for c in (*layouts, *named) if c is not None), *offloaded)


def axes_from(before: Mesh, there: Mesh) -> tuple[int | None, ...]:
    """Per axis of a mesh the one of that name in another; None where that has none, or either has size 1: nothing is split over it."""
    old = {axis.name: index for index, axis in enumerate(before.axes) if axis.size > 1}
    return tuple(old.get(axis.name) if axis.size > 1 else None for axis in there.axes)


def _moved(constraint: Constraint, before: Mesh, there: Mesh, stages: str) -> Constraint | None:
    if isinstance(constraint, LayoutConstraint):
        return _layouts(constraint, before, there)
    if isinstance(constraint, Resting):
        axes = axes_from(before, there)
        return Resting(tuple((name, at.over(axes)) for name, at in constraint.storage))
    if isinstance(constraint, Megatron):
        return replace(_megatron(constraint, before, there), pp=stages or 1)
    if isinstance(constraint, Pipelined | Offloaded):
        return constraint
    return _named(constraint if constraint.axes is not None else replace(constraint, axes=before.names), there)


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
        raise ConstraintError(what, remedy="name the axes of the other mesh so, or plan for it without this constraint")
    return replace(constraint, axes=left) if left else None


def _megatron(constraint: Megatron, before: Mesh, there: Mesh) -> Megatron:
    found: dict[str, tuple[str, ...]] = {part.name: part.axes or () for part in parts_of(constraint, before)}
    words = {"tp": "tensor_parallel_1d", "cp": "context_parallel", "ep": "expert_parallel"}
    named = {word: tuple(name for name in found.get(plan, ()) if name in there.names) or 1 for word, plan in words.items()}
    free = (*constraint.free, *(name for name in there.names if name not in before.names))
    return replace(constraint, dp=None, free=free, **named)  # type: ignore[arg-type]
