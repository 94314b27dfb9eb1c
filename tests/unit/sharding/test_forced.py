"""Layout constraints on a model: the tensors that each kind applies to, and the errors for
constraints that an op cannot satisfy."""

from __future__ import annotations

import math
import re

import pytest
import torch
from mlp import traced
from torch import nn

from autopar.capture import capture
from autopar.capture.trace import Parameter, Trace
from autopar.constraints import LayoutConstraint, layout
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError
from autopar.planner import PlanOptions, make_plan
from autopar.plans import Plan
from autopar.sharding import classes_of, resolve
from autopar.sharding.resolve_constraints import view_layout

MESH = Mesh({"a": 2, "b": 2})


def trace() -> Trace:
    return traced(16, 32, 8, num_layers=2, bias=True, dtype=torch.float32)


def plan_with(*constraints: LayoutConstraint) -> Plan:
    return make_plan(
        trace(), MESH, HardwareProfile.load("cpu-gloo"), PlanOptions(constraints=constraints)
    ).plan


def test_weight_constraint_applies_to_all_readers_of_the_weight_and_to_no_other_layer() -> None:
    choices = plan_with(layout("layers.0.up", weight="S(1) S(0)")).node_choices()
    assert str(choices["layers.0.up/dot/forward/0"].inputs[1]) == "S(1) S(0)"
    assert str(choices["layers.1.up/dot/forward/0"].inputs[1]) == "R R"
    resolved = resolve(trace(), [layout("layers.1.up", weight="S(1) S(0)")], MESH)
    weight = next(p for p in trace().parameters if p.name == "layers.1.up.weight")
    readers = {n.name for n in trace().node(weight.node).users if n.op == "call_function"}
    assert set(resolved.slots) == readers and len(readers) == 2, (
        "the linear layer and the gradient of its input"
    )


def test_bias_constraint_sets_the_layout_in_which_the_bias_is_read() -> None:
    choices = plan_with(layout("layers.*.up", bias="R S(0)")).node_choices()
    assert str(choices["layers.0.up/dot/forward/0"].inputs[2]) == "R S(0)"


def test_sharded_bias_of_a_product_with_partial_sums_is_refused() -> None:
    message = (
        r"no strategy(.|\n)*layers\.0\.down/dot/forward/0 as '(R S\(1\)|R S\(0\))'(.|\n)*with the"
        r" other constraints"
    )
    with pytest.raises(ConstraintError, match=message):
        plan_with(layout("layers.0.down", weight="R S(1)", bias="R S(0)"))


def test_storage_constraint_sets_the_layout_of_the_parameter_and_its_gradient() -> None:
    plan = plan_with(layout("layers.*.down", storage="S(0)#1 S(0)#0"))
    rests = {e.key: e.nodes[0].strategy for e in plan.entries if e.kind == "parameter"}
    assert str(rests["layers.*.down.weight/parameter"]) == "S(0)#1 S(0)#0 -> S(0)#1 S(0)#0"


def test_input_constraint_applies_only_to_tensors_from_outside_the_scope() -> None:
    choices = plan_with(layout("layers.1", input="S(0) S(1)")).node_choices()
    assert str(choices["layers.1.up/dot/forward/0"].inputs[0]) == "S(0) S(1)"
    assert str(choices["layers.1/add.Tensor/forward/0"].inputs[0]) == "S(0) S(1)", (
        "the residual is also an input of the scope"
    )
    assert str(choices["layers.1.down/dot/forward/0"].inputs[0]) != "S(0) S(1)", (
        "tensors computed inside the scope are not constrained"
    )


def test_output_constraint_sets_the_layout_of_the_results_of_the_scope() -> None:
    choices = plan_with(layout("layers.0", output="S(1) S(0)")).node_choices()
    assert str(choices["layers.0/add.Tensor/forward/0"].outputs[0]) == "S(1) S(0)"


def test_constrained_layers_get_separate_classes() -> None:
    free = classes_of(trace(), MESH.shape)
    some = classes_of(
        trace(), MESH.shape, resolve(trace(), [layout("layers.1.up", weight="R S(0)")], MESH)
    )
    assert len(some) > len(free)
    assert sum(len(c.instances) for c in some) == sum(len(c.instances) for c in free)


@pytest.mark.parametrize("kind", ["weight", "bias", "storage", "input", "output"])
def test_constraint_that_matches_nothing_is_refused_with_similar_paths(kind: str) -> None:
    with pytest.raises(
        ConstraintError,
        match=rf"{kind}='R R' on 'layer\.\*' matches nothing(.|\n)*did you mean 'layers\.\*'",
    ):
        resolve(trace(), [layout("layer.*", **{kind: "R R"})], MESH)


def test_constraint_of_which_one_part_matches_nothing_is_refused() -> None:
    class NoBias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x).mean()

    without = capture(NoBias(), (torch.ones(2, 4),), {})
    with pytest.raises(ConstraintError, match=r"bias='R' on 'up' matches nothing"):
        resolve(without, [layout("up", weight="R", bias="R")], Mesh(2))


def test_layout_with_a_missing_dim_is_refused_with_the_shape_of_the_parameter() -> None:
    for constraint in (
        layout("layers.0.up", weight="S(2) R"),
        layout("layers.0.up", storage="S(2) R"),
    ):
        with pytest.raises(
            ConstraintError,
            match=r"shards dim 2 of layers\.0\.up\.weight, but its shape is \(32, 16\)",
        ):
            resolve(trace(), [constraint], MESH)


def test_error_for_an_impossible_layout_names_the_op_its_line_and_possible_layouts() -> None:
    message = (
        r"no strategy has output 0 of layers\.0/add\.Tensor/forward/0 as 'S\(5\)"
        r" R'(.|\n)*mlp\.py:\d+(.|\n)*R R; "
    )
    with pytest.raises(ConstraintError, match=message):
        plan_with(layout("layers.0", output="S(5) R"))


def test_error_for_contradicting_constraints_names_the_op_and_possible_layouts() -> None:
    message = (
        r"input 1 of layers\.0\.up/dot/\S+ as 'R S\(1\)'(.|\n)*with the other constraints (.|\n)*R"
        r" S\(0\)"
    )
    with pytest.raises(ConstraintError, match=message):
        plan_with(layout("layers.0.up", weight="R S(0)"), layout("*.up", weight="R S(1)"))
    with pytest.raises(
        ConstraintError,
        match=r"layers\.0\.up\.weight would be stored as R R and, by '\*\.up', as S\(0\) R",
    ):
        plan_with(layout("layers.0.up", storage="R R"), layout("*.up", storage="S(0) R"))
    assert plan_with(layout("layers.0.up", storage="R R"), layout("*.up", storage="R R"))


@pytest.mark.parametrize("storage", ["S(0) S(0)", "P R"])
def test_impossible_storage_is_refused_with_the_name_and_shape_of_the_parameter(
    storage: str,
) -> None:
    narrow = traced(6, 10, 8, num_layers=1, dtype=torch.float32)
    options = PlanOptions(constraints=(layout("layers.*.up", storage=storage),))
    message = (
        rf"layers\.0\.up\.weight of shape \(10, 6\) cannot be stored as {re.escape(storage)} on"
        r" mesh a=2,b=2"
    )
    with pytest.raises(ConstraintError, match=message):
        make_plan(narrow, MESH, HardwareProfile.load("cpu-gloo"), options)


@pytest.mark.parametrize(
    ("shape", "view", "layout", "seen"),
    [
        ((8, 4), (8, 4), "S(0) S(1)", "S(0) S(1)"),
        ((4, 24), (4, 3, 8), "R S(1)", "R S(2)"),  # a fused projection is sharded within q, k and v
        ((24,), (3, 8), "S(0) R", "S(1) R"),
        ((24, 4), (3, 8, 4), "S(0)#1 S(0)#0", "S(1)#1 S(1)#0"),
        ((24, 4), (3, 2, 4, 4), "S(1) S(0)", "S(3) S(2)"),
        ((1, 4), (1, 4), "S(0) S(1)", "S(0) S(1)"),
    ],
)
def test_layout_of_stored_dims_applies_to_the_last_dim_of_each_view(
    shape: tuple[int, ...], view: tuple[int, ...], layout: str, seen: str
) -> None:
    assert math.prod(shape) == math.prod(view)
    parameter = Parameter("w", (), "w", shape, view, torch.float32, True, 0, torch.float32)
    assert str(view_layout(Layout.parse(layout), parameter)) == seen
