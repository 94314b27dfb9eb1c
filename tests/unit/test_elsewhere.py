"""Layouts and constraints transferred to a mesh with other axes."""

from __future__ import annotations

import pytest

from autopar.constraints import (
    Constraint,
    ddp,
    fsdp,
    layout,
    megatron,
    parallelisms,
    pipeline,
    read_constraint,
    rests_as,
    tensor_parallel,
)
from autopar.constraints.together import axes_from, constraints_on_mesh, rewrite_for_mesh
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError

BEFORE = Mesh({"data": 2, "tensor": 4})


@pytest.mark.parametrize(
    ("text", "there", "expected"),
    [
        ("S(0) S(1)", {"tensor": 2, "data": 2}, "S(1) S(0)"),
        ("S(0) S(0)", {"tensor": 2, "data": 2}, "S(0)#1 S(0)#0"),
        ("S(0)#1 S(0)#0", {"tensor": 2, "data": 2}, "S(0) S(0)"),
        ("S(0)#1 S(0)#0", {"data": 2, "node": 2, "tensor": 2}, "S(0)#1 R S(0)#0"),
        ("P S(0)~1~2", {"tensor": 8}, "S(0)~1~2"),
        ("P S(0)", {"data": 1, "tensor": 2}, "R S(0)"),
    ],
)
def test_a_layout_follows_the_axis_names_and_keeps_the_order_of_splits(
    text: str, there: dict[str, int], expected: str
) -> None:
    assert str(Layout.parse(text).over(axes_from(BEFORE, Mesh(there)))) == expected


def test_axes_of_size_1_in_either_mesh_split_nothing() -> None:
    assert axes_from(Mesh({"a": 1, "b": 2, "c": 2}), Mesh({"a": 2, "b": 1, "c": 4, "d": 2})) == (
        None,
        None,
        2,
        None,
    )


@pytest.mark.parametrize(
    ("given", "there", "expected"),
    [
        (fsdp(), {"data": 4, "tensor": 2, "node": 2}, fsdp(("data", "tensor"))),
        (ddp("data"), {"tensor": 4}, None),
        (layout("up", weight="R S(0)"), {"tensor": 4, "node": 2}, layout("up", weight="S(0) R")),
        (megatron(tp=4, zero=3), {"data": 8, "tensor": 8}, megatron(tp="tensor", zero=3)),
        (
            megatron(tp=4, recompute="full"),
            {"data": 2, "node": 2},
            megatron(recompute="full", free="node"),
        ),
        (megatron(dp=8, cp=1), {"data": 2}, megatron()),
        (pipeline("stage"), {"data": 2}, pipeline("stage")),
    ],
)
def test_transferred_constraints_apply_to_the_same_axes_and_not_to_new_ones(
    given: Constraint, there: dict[str, int], expected: Constraint | None
) -> None:
    assert rewrite_for_mesh([given], BEFORE, Mesh(there), "") == (
        () if expected is None else (expected,)
    )


def test_stages_given_as_a_count_stay_on_their_axis() -> None:
    assert rewrite_for_mesh([megatron(pp=2, microbatches=4)], BEFORE, BEFORE, "stage") == (
        megatron(pp="stage", microbatches=4),
    )


def test_constraints_held_to_the_original_axes_do_not_use_new_axes() -> None:
    there = Mesh({"node": 2, "data": 2, "tensor": 4})
    held = constraints_on_mesh(
        [megatron(tp=4, zero=2), layout("up", storage="S(0) R"), pipeline("stage")], BEFORE, there
    )
    found = [(p.name, p.axes, p.zero) for p in parallelisms(held, there)]
    assert found == [("tensor_parallel_1d", ("tensor",), 0), ("fsdp", ("data",), 2)]
    assert [p.axes for p in parallelisms([megatron(tp=4, zero=2)], there)] == [
        ("tensor",),
        ("node", "data"),
    ], "by itself it would"
    assert [c for c in held if c == layout("up", storage="R S(0) R")]


def test_a_grid_without_a_side_is_refused() -> None:
    with pytest.raises(
        ConstraintError, match=r"mesh data=4 has no axis 'tensor', which is a side of its grid"
    ):
        rewrite_for_mesh(
            [tensor_parallel("2d", axes=("data", "tensor"))], BEFORE, Mesh({"data": 4}), ""
        )


def test_axes_that_megatron_leaves_free_are_recorded_and_not_used() -> None:
    free = megatron(tp="tensor", zero=3, free="data")
    assert read_constraint(free.to_json()) == free and "free=['data']" in str(free)
    assert [p.axes for p in parallelisms([free], BEFORE)] == [("tensor",)]
    assert "free" not in megatron(tp=4).to_json()
    with pytest.raises(
        ConstraintError, match="no combination of axes of mesh data=2,tensor=4 has 2 devices"
    ):
        list(parallelisms([megatron(tp=2, free="data")], BEFORE))


def test_storage_layouts_are_read_back_and_follow_the_axis_names() -> None:
    asked = rests_as({"a.weight": "S(0) R", "b.weight": Layout.parse("R S(1) host")})
    assert read_constraint(asked.to_json()) == asked and str(asked) == "rests_as(<2 parameters>)"
    before, there = Mesh({"node": 2, "gpu": 4}), Mesh({"gpu": 4, "node": 2})
    (moved,) = rewrite_for_mesh((asked,), before, there, "")
    assert moved == rests_as({"a.weight": "R S(0)", "b.weight": "S(1) R host"})
    assert constraints_on_mesh((asked,), before, there) == (moved,)
