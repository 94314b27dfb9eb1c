"""Constraints on single layouts: `layout`, by module pattern, and `rests_as`, by parameter.

A pattern is a module path with shell wildcards, ``model.layers.*.mlp.up_proj``. Layouts are written
as text (`autopar.core.layout`), one placement per mesh axis, over the dims of the tensor as the
model stores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from autopar.core.keywords import named
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError

KINDS = ("weight", "bias", "storage", "input", "output")


@dataclass(frozen=True, slots=True)
class LayoutConstraint:
    """Layouts forced on every module that `pattern` matches; None leaves the planner free.

    Attributes:
        pattern: the pattern.
        weight: compute layout in which forward reads the module's parameters named ``weight``.
        bias: the same for ``bias``.
        storage: storage layout of the module's ``weight``.
        input: layout of the activations that the module's forward reads from outside of it.
        output: layout in which the module's forward makes the tensors that other modules read.
    """

    pattern: str
    weight: Layout | None = None
    bias: Layout | None = None
    storage: Layout | None = None
    input: Layout | None = None
    output: Layout | None = None

    def matches(self, module: str) -> bool:
        """Whether a module path matches the pattern."""
        return fnmatchcase(module, self.pattern)

    def to_json(self) -> dict[str, Any]:
        """Return the record of a plan, which `autopar.constraints.read_constraint` reads."""
        parts = ((name, getattr(self, name)) for name in KINDS)
        return {
            "pattern": self.pattern,
            **{name: str(value) for name, value in parts if value is not None},
        }


@named("autopar.constraints.layout", "docs/constraints.md")
def layout(
    pattern: str,
    *,
    weight: str | None = None,
    bias: str | None = None,
    storage: str | None = None,
    input: str | None = None,
    output: str | None = None,
) -> LayoutConstraint:
    """Force layouts on the modules that match `pattern`, for example ``layout("*.mlp.up_proj",
    weight="R S(0)")``. At least one layout must be given.

    Args:
        pattern: module path with shell wildcards.
        weight: compute layout in which forward reads the module's parameters named ``weight``.
        bias: the same for ``bias``.
        storage: storage layout of the module's ``weight``.
        input: layout of the activations that the module's forward reads from outside of it.
        output: layout in which the module's forward makes the tensors that other modules read.

    Raises:
        ConstraintError: if no layout is given.
        LayoutError: if a layout cannot be read.
    """
    layouts = {"weight": weight, "bias": bias, "storage": storage, "input": input, "output": output}
    if all(value is None for value in layouts.values()):
        raise ConstraintError(
            f"the constraint on {pattern!r} has no layout",
            remedy="pass weight=, bias=, storage=, input= or output=",
        )
    return LayoutConstraint(
        pattern,
        **{name: Layout.parse(value) for name, value in layouts.items() if value is not None},
    )


def check_layouts(constraint: LayoutConstraint, mesh: Mesh) -> None:
    """Check that every layout of a constraint has one placement per mesh axis.

    Raises:
        ConstraintError: if one has not; the constraint and the mesh are named.
    """
    for name in KINDS:
        value = getattr(constraint, name)
        if value is not None and len(value.placements) != len(mesh.axes):
            raise ConstraintError(
                f"{name}={str(value)!r} on {constraint.pattern!r} has {len(value.placements)} "
                f"placements, but mesh {mesh} has {len(mesh.axes)} axes",
                remedy="write one placement per mesh axis",
            )


# --------------------------------------------------------------------------------------------------
# `rests_as`: every parameter rests as in another plan, so that two programs share one set of
# parameters.


@dataclass(frozen=True, slots=True)
class Resting:
    """(parameter name, storage layout) pairs; see `rests_as`."""

    storage: tuple[tuple[str, Layout], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the record of a plan, which `autopar.constraints.read_constraint` reads."""
        return {"plan": "rests_as", "storage": {name: str(layout) for name, layout in self.storage}}

    def __str__(self) -> str:
        return f"rests_as(<{len(self.storage)} parameters>)"


def rests_as(storage: Mapping[str, Layout | str]) -> Resting:
    """Force the storage layouts of parameters; those of parameters that are not named are chosen by
    the planner.

    Args:
        storage: parameter name → its storage layout, over the dims that it has in graphs (those of
            the model, except for fused parameters).

    Raises:
        LayoutError: if a layout cannot be read.
    """
    return Resting(
        tuple(
            (name, Layout.parse(at) if isinstance(at, str) else at) for name, at in storage.items()
        )
    )
