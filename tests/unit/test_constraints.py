"""Constraints: what can be forced, how it is written, and what is refused before a model is seen."""

from __future__ import annotations

import pytest

from autopar.constraints import KINDS, LayoutConstraint, check, layout
from autopar.errors import ConstraintError, LayoutError
from autopar.layout import Layout
from autopar.mesh import Mesh


def test_a_constraint_holds_the_layouts_that_were_given_and_no_others() -> None:
    made = layout("*.up_proj", weight="R S(0)", input="S(0) R")
    assert made == LayoutConstraint("*.up_proj", weight=Layout.parse("R S(0)"), input=Layout.parse("S(0) R"))
    assert made.to_json() == {"pattern": "*.up_proj", "weight": "R S(0)", "input": "S(0) R"}
    for kind in KINDS:
        assert layout("m", **{kind: "R"}).to_json() == {"pattern": "m", kind: "R"}


def test_a_constraint_that_forces_nothing_is_refused_with_what_can_be_forced() -> None:
    with pytest.raises(ConstraintError, match=r"'layers\.\*' forces nothing(.|\n)*weight=, bias=, storage=, input= or output="):
        layout("layers.*")


def test_a_layout_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(LayoutError, match="cannot read 'S0'"):
        layout("up", weight="S0 R")


@pytest.mark.parametrize(
    ("pattern", "module", "matches"),
    [
        ("layers.*.up", "layers.0.up", True),
        ("layers.*.up", "layers.12.mlp.up", True),  # as a shell matches in one word: the dots are letters
        ("*.up", "up", False),
        ("layers.[01].up", "layers.1.up", True),
        ("layers.[01].up", "layers.2.up", False),
        ("layers.?.up", "layers.12.up", False),
        ("Layers.0", "layers.0", False),
        ("layers", "layers.0", False),
    ],
)
def test_patterns_match_module_paths_as_shells_do(pattern: str, module: str, matches: bool) -> None:
    assert layout(pattern, weight="R").matches(module) is matches


@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_needs_one_placement_per_mesh_axis_and_the_constraint_is_named(kind: str) -> None:
    constraint = layout("net.head", **{kind: "S(0) R"})
    check(constraint, Mesh({"a": 2, "b": 2}))
    with pytest.raises(ConstraintError, match=rf"{kind}='S\(0\) R' on 'net.head' has 2 placements, mesh gpu=4 has 1 axes"):
        check(constraint, Mesh(4))
