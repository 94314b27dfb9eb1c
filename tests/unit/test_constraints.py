"""Constraints: what can be forced, their syntax, and what is refused before a model is captured."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

import autopar
from autopar import constraints
from autopar.constraints import (
    KINDS,
    Constraint,
    LayoutConstraint,
    Megatron,
    check,
    ddp,
    fsdp,
    layout,
    megatron,
    parallelisms,
    pipeline,
    pipeline_in,
    read_constraint,
    rests_as,
    tensor_parallel,
)
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError, LayoutError


def test_a_constraint_has_only_the_given_layouts() -> None:
    made = layout("*.up_proj", weight="R S(0)", input="S(0) R")
    assert made == LayoutConstraint(
        "*.up_proj", weight=Layout.parse("R S(0)"), input=Layout.parse("S(0) R")
    )
    assert made.to_json() == {"pattern": "*.up_proj", "weight": "R S(0)", "input": "S(0) R"}
    for kind in KINDS:
        assert layout("m", **{kind: "R"}).to_json() == {"pattern": "m", kind: "R"}


def test_notebooks_show_the_signatures_of_constraints() -> None:
    assert "pipeline" in dir(constraints) and not {
        "pipelines",
        "pipeline_in",
        "parallelisms",
    } & set(dir(constraints))
    assert all(callable(getattr(constraints, name)) for name in dir(constraints))


def test_a_constraint_that_forces_nothing_is_refused_with_the_possible_arguments() -> None:
    with pytest.raises(
        ConstraintError,
        match=r"'layers\.\*' has no layout(.|\n)*weight=, bias=, storage=, input= or output=",
    ):
        layout("layers.*")


def test_a_layout_that_cannot_be_parsed_is_refused() -> None:
    with pytest.raises(LayoutError, match="cannot read 'S0'"):
        layout("up", weight="S0 R")


@pytest.mark.parametrize(
    ("pattern", "module", "matches"),
    [
        ("layers.*.up", "layers.0.up", True),
        (
            "layers.*.up",
            "layers.12.mlp.up",
            True,
        ),  # as in a shell: dots are ordinary letters
        ("*.up", "up", False),
        ("layers.[01].up", "layers.1.up", True),
        ("layers.[01].up", "layers.2.up", False),
        ("layers.?.up", "layers.12.up", False),
        ("Layers.0", "layers.0", False),
        ("layers", "layers.0", False),
    ],
)
def test_patterns_match_module_paths_as_in_a_shell(
    pattern: str, module: str, matches: bool
) -> None:
    assert layout(pattern, weight="R").matches(module) is matches


@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_needs_one_placement_per_mesh_axis(kind: str) -> None:
    constraint = layout("net.head", **{kind: "S(0) R"})
    check(constraint, Mesh({"a": 2, "b": 2}))
    with pytest.raises(
        ConstraintError,
        match=rf"{kind}='S\(0\) R' on 'net.head' has 2 placements, but mesh gpu=4 has 1 axes",
    ):
        check(constraint, Mesh(4))


MESH = Mesh({"node": 4, "gpu": 8})


def _resolved(*given: Constraint, mesh: Mesh = MESH) -> list[tuple[str, tuple[str, ...] | None]]:
    return [(plan.name, plan.axes) for plan in parallelisms(given, mesh)]


def test_named_plans_apply_to_their_axes_or_to_all_axes() -> None:
    assert _resolved(ddp()) == [("ddp", ("node", "gpu"))]
    assert _resolved(fsdp("node"), tensor_parallel("1d", axes=("gpu",))) == [
        ("fsdp", ("node",)),
        ("tensor_parallel_1d", ("gpu",)),
    ]
    assert _resolved(layout("up", weight="R R")) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (megatron(tp=8), [("tensor_parallel_1d", ("gpu",)), ("ddp", ("node",))]),
        (megatron(tp=8, dp=4, zero=3), [("tensor_parallel_1d", ("gpu",)), ("fsdp", ("node",))]),
        (megatron(tp=4), [("tensor_parallel_1d", ("node",)), ("ddp", ("gpu",))]),
        (megatron(tp=32), [("tensor_parallel_1d", ("node", "gpu"))]),
        (megatron(dp=32), [("ddp", ("node", "gpu"))]),
        (megatron(tp="node", dp=("gpu",)), [("tensor_parallel_1d", ("node",)), ("ddp", ("gpu",))]),
    ],
    ids=str,
)
def test_megatron_assigns_axes_by_their_sizes(
    given: Megatron, expected: list[tuple[str, tuple[str, ...]]]
) -> None:
    assert _resolved(given) == expected


def test_of_axes_with_equal_sizes_the_last_is_the_tensor_axis() -> None:
    assert _resolved(megatron(tp=2), mesh=Mesh({"a": 2, "b": 2})) == [
        ("tensor_parallel_1d", ("b",)),
        ("ddp", ("a",)),
    ]
    assert _resolved(megatron(tp=4), mesh=Mesh({"a": 2, "b": 2, "c": 2})) == [
        ("tensor_parallel_1d", ("b", "c")),
        ("ddp", ("a",)),
    ]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            megatron(tp=3),
            r"megatron\(tp=3\): no combination of axes of mesh node=4,gpu=8 has 3 devices",
        ),
        (
            megatron(tp=8, dp=2),
            r"does not fill mesh node=4,gpu=8: 4 devices remain besides the tensor axes(.|\n)*dp=4",
        ),
        (megatron(tp="gpu", dp="gpu"), r"does not fill mesh"),
        (
            ddp("tensor"),
            (
                r"ddp\(axes=\['tensor'\]\): mesh node=4,gpu=8 has no axis 'tensor'(.|\n)*its axes"
                r" are node, gpu"
            ),
        ),
        (megatron(tp="tensor"), r"has no axis 'tensor'"),
    ],
    ids=str,
)
def test_a_named_plan_that_does_not_fit_the_mesh_is_refused(given: Constraint, says: str) -> None:
    with pytest.raises(ConstraintError, match=says):
        check(given, MESH)


def test_two_plans_for_one_axis_are_refused_with_both_named() -> None:
    with pytest.raises(
        ConstraintError,
        match=(
            r"fsdp\(axes=\['gpu'\]\) and ddp\(\) both apply to axis 'gpu'(.|\n)*name the axes of"
            r" each"
        ),
    ):
        _resolved(ddp(), fsdp("gpu"))


@pytest.mark.parametrize("other", [pipeline("gpu"), megatron(pp="gpu", tp=4)], ids=str)
def test_two_constraints_that_cut_the_model_are_quoted_as_written(other: Constraint) -> None:
    given = megatron(pp=4, microbatches=8)
    with pytest.raises(
        ConstraintError,
        match=re.escape(f"megatron(pp=4, microbatches=8) and {other} both define a pipeline"),
    ):
        pipeline_in((given, other), MESH)
    with pytest.raises(
        ConstraintError,
        match=r"^megatron\(tp=8\) and ddp\(axes=\['gpu'\]\) both apply to axis 'gpu'",
    ):
        list(parallelisms((ddp("gpu"), megatron(tp=8)), MESH))
    with pytest.raises(
        ConstraintError,
        match=(
            r"^megatron\(tp=8, .*\): context_parallel.* and tensor_parallel.* both apply to axis"
            r" 'gpu'"
        ),
    ):
        list(parallelisms((megatron(tp=8, cp="gpu"),), MESH))


WRITTEN = (
    *(
        "ddp()",
        "fsdp(axes=['gpu'])",
        "tensor_parallel('2d', axes=['a', 'b'])",
        "expert_parallel(axes=['gpu'], tokens='dispatched')",
    ),
    *(
        "pipeline()",
        "pipeline('node')",
        "pipeline('node', microbatches=4, schedule='gpipe')",
        "pipeline(schedule='1f1b', independent=True)",
    ),
    *(
        "pipeline(cuts=['layers.2'])",
        "pipeline('node', schedule='interleaved_1f1b', chunks=2)",
        "pipeline('node', schedule='auto')",
    ),
    *(
        "megatron()",
        "megatron(tp=['gpu'], dp=4, zero=3)",
        "megatron(tp=2, cp=2, ep=2, recompute='full', free=['node'])",
    ),
    *(
        "tensor_parallel('1d', axes=['gpu'], sequence=True)",
        "megatron(tp=8, sequence=True, zero=1)",
    ),
    *("megatron(pp='node', microbatches=4, chunks=2)", "megatron(zero=1, microbatches=4)"),
)


@pytest.mark.parametrize("text", WRITTEN)
def test_the_text_of_a_constraint_is_its_call(text: str) -> None:
    assert str(eval(text, dict(vars(autopar.constraints)))) == text


def test_unknown_stages_and_kinds_are_refused_with_the_known_ones() -> None:
    for zero in (-1, 4):
        with pytest.raises(
            ConstraintError, match=rf"in megatron, got {zero}(.|\n)*stages 1, 2 and 3"
        ):
            megatron(tp=2, zero=zero)
    with pytest.raises(
        ConstraintError,
        match=r"tensor_parallel, got '4d'(.|\n)*\"1d\", \"2d\", \"2.5d\" or \"3d\"",
    ):
        tensor_parallel("4d", axes=("a", "b"))
    with pytest.raises(
        ConstraintError,
        match=r"in megatron, got 'all'(.|\n)*\"none\", \"full\" or \"selective\"",
    ):
        megatron(recompute="all")  # type: ignore[arg-type]
    with pytest.raises(ConstraintError, match=r"must be positive, got 0"):
        megatron(tp=0)
    for axes in ((), (3,)):
        with pytest.raises(ConstraintError, match=r"axes must be names of mesh axes"):
            ddp(axes)  # type: ignore[arg-type]


def test_a_grid_needs_its_number_of_distinct_axes() -> None:
    for kind, axes, says in (
        ("2d", "a", "needs 2 mesh axes(.|\n)*names 1"),
        ("3d", ("a", "b"), "needs 3 .*names 2"),
        ("2d", ("a", "a"), "needs .* names 1"),
    ):
        with pytest.raises(ConstraintError, match=rf"tensor_parallel\('{kind}'\) {says}"):
            tensor_parallel(kind, axes=axes)


def test_the_sides_of_a_grid_are_equal_axes_of_the_mesh_and_its_depth_is_free() -> None:
    mesh = Mesh({"a": 2, "b": 2, "c": 4})
    assert _resolved(tensor_parallel("2d", axes=("b", "a")), mesh=mesh) == [
        ("tensor_parallel_2d", ("b", "a"))
    ]
    assert _resolved(tensor_parallel("2.5d", axes=("a", "b", "c")), mesh=mesh) == [
        ("tensor_parallel_2.5d", ("a", "b", "c"))
    ]
    for kind, axes, sizes in (
        ("2d", ("a", "c"), "a=2, c=4"),
        ("2.5d", ("c", "a", "b"), "c=4, a=2"),
        ("3d", ("a", "b", "c"), "a=2, b=2, c=4"),
    ):
        with pytest.raises(
            ConstraintError,
            match=rf"must have equal sizes, but in mesh a=2,b=2,c=4 they are {sizes}",
        ):
            check(tensor_parallel(kind, axes=axes), mesh)
    with pytest.raises(
        ConstraintError,
        match=r"tensor_parallel\('2d', axes=\['a', 'x'\]\): mesh a=2,b=2,c=4 has no axis 'x'",
    ):
        check(tensor_parallel("2d", axes=("a", "x")), mesh)
    with pytest.raises(ConstraintError, match=r"both apply to axis 'a'"):
        _resolved(tensor_parallel("2d", axes=("a", "b")), ddp("a"), mesh=mesh)


def test_a_plan_records_its_constraints() -> None:
    assert megatron(tp=8, recompute="full").to_json()["recompute"] == "full"
    assert tensor_parallel("2.5d", axes=("b", "a", "d")).to_json() == {
        "plan": "tensor_parallel_2.5d",
        "axes": ["b", "a", "d"],
    }
    assert fsdp("node").to_json() == {"plan": "fsdp", "axes": ["node"]}
    assert tensor_parallel(axes="gpu").to_json() == {"plan": "tensor_parallel_1d", "axes": ["gpu"]}
    assert megatron(tp=8, dp="node", zero=3).to_json() == {
        "plan": "megatron",
        "tp": 8,
        "dp": ["node"],
        "zero": 3,
    }


@pytest.mark.parametrize(
    "asked",
    [
        layout(
            "*.up_proj", weight="R S(0)", bias="R R", storage="S(0) R", input="S(0) R", output="R R"
        ),
        layout("m", weight="S(0)#1 S(0)#0"),
        *(ddp(), fsdp("node"), fsdp(("a", "b")), tensor_parallel(axes="gpu")),
        *(tensor_parallel("1d", axes="gpu", sequence=True), megatron(tp=8, sequence=True)),
        *(megatron(), megatron(tp=8, dp=4), megatron(tp="gpu", dp="node", zero=3)),
        *(
            megatron(recompute="selective"),
            megatron(pp="node", microbatches=8),
            tensor_parallel("2d", axes=("node", "gpu")),
        ),
        *(
            pipeline(),
            pipeline("node", microbatches=4, schedule="gpipe", cuts=["layers.3"], independent=True),
        ),
        *(
            pipeline("node", schedule="interleaved_1f1b", chunks=3),
            megatron(pp="node", microbatches=8, chunks=2),
        ),
    ],
    ids=str,
)
def test_recorded_constraints_are_read_back(asked: Constraint) -> None:
    assert read_constraint(json.loads(json.dumps(asked.to_json()))) == asked


@pytest.mark.parametrize(
    "record",
    [
        *(
            {},
            3,
            {"pattern": "m"},
            {"pattern": "m", "weight": "Q"},
            {"pattern": "m", "colour": "R"},
        ),
        *(
            {"plan": "zero", "axes": None},
            {"plan": "ddp"},
            {"plan": "ddp", "axes": 3},
            {"plan": "ddp", "axes": None, "more": 1},
        ),
        *(
            {"plan": "fsdp", "axes": ["gpu"], "sequence": True},
            {"plan": "tensor_parallel_2d", "axes": ["a", "b"], "sequence": True},
        ),
        *({"plan": "megatron", "tp": 0, "dp": None, "zero": 0}, {"plan": "megatron", "tp": 2}),
    ],
    ids=str,
)
def test_an_invalid_record_of_a_constraint_is_refused(record: Any) -> None:
    with pytest.raises(ConstraintError, match="is not a valid constraint record"):
        read_constraint(record)


def test_parameters_are_stored_as_requested_by_name_and_impossible_layouts_are_refused() -> None:
    model, batch = torch.nn.Sequential(torch.nn.Linear(8, 8), Squares()), (torch.randn(8, 8),)
    asked = rests_as({"0.weight": "S(1)", "0.bias": "R"})
    plan = autopar.plan(
        model, Mesh({"gpu": 2}), example_inputs=batch, hardware="cpu-gloo", constraints=[asked]
    )
    rests = {
        key: choice.outputs[0]
        for key, choice in plan.node_choices().items()
        if key.endswith("/parameter")
    }
    assert {key.removesuffix("/parameter"): str(at) for key, at in rests.items()} == {
        "0.weight": "S(1)",
        "0.bias": "R",
    }
    with pytest.raises(
        ConstraintError, match=r"0\.bias would be stored as S\(1\), but its view is \(8,\)"
    ):
        autopar.plan(
            model,
            Mesh({"gpu": 2}),
            example_inputs=batch,
            hardware="cpu-gloo",
            constraints=[rests_as({"0.bias": "S(1)"})],
        )


class Squares(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(2).mean()
