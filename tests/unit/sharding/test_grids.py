"""Grids of tensor parallelism on a trace: which products are by columns and by rows, what steps
aside, and who refuses."""

from __future__ import annotations

import pytest
import torch
import zoo_small
from torch import nn

from autopar import constraints
from autopar.capture import Trace, capture
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError
from autopar.planner import Planned, PlanOptions, make_plan
from autopar.sharding import resolve
from autopar.sharding.propagate import product_of, read_trace
from autopar.verification import verify_program

SQUARE = constraints.tensor_parallel("2d", axes=("a", "b"))
CUBE = constraints.tensor_parallel("3d", axes=("i", "j", "l"))
MESHES = {SQUARE: Mesh({"a": 2, "b": 2}), CUBE: Mesh({"i": 2, "j": 2, "l": 2})}


class Chain(nn.Module):
    """x + linear(relu(linear(…))), with so many linears, a norm between, and what comes before
    the loss."""

    def __init__(
        self, num_linears: int, norm: nn.Module | None = None, end: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.start = nn.Linear(8, 8, bias=False)
        self.linears = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(num_linears))
        self.norm, self.end = norm or nn.Identity(), end or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = y = self.start(x)
        for linear in self.linears:
            y = linear(torch.relu(self.norm(y)))
        return self.end(x + y).pow(2).mean()


def traced(model: nn.Module, *shape: int) -> tuple[Trace, nn.Module, dict[str, torch.Tensor]]:
    batch = {"x": torch.randn(*(shape or (8, 8)), generator=torch.Generator().manual_seed(0))}
    return capture(model, (), batch), model, batch


def planned(trace: Trace, constraint: constraints.Parallelism, mesh: Mesh | None = None) -> Planned:
    options = PlanOptions(constraints=(constraint,))
    return make_plan(trace, mesh or MESHES[constraint], HardwareProfile.load("h100-sxm"), options)


def products(trace: Trace, constraint: constraints.Parallelism, axis: int) -> dict[str, str]:
    """Module of each product with a weight → labels of activation, weight and result on the axis;
    partial sums count as whole, and so does what is free (inputs)."""
    rows, graph = resolve(trace, [constraint], MESHES[constraint]).named.rows, read_trace(trace)
    found = {}
    for name, node in graph.nodes.items():
        if product_of(graph, node):
            row = dict(rows[name])[axis]
            found[node.meta["module"]] = " ".join(
                str(label or "R") for label in (*row.inputs, *row.outputs)
            )
    return found


def test_on_the_second_side_of_a_square_every_product_is_by_columns() -> None:
    trace, *_ = traced(Chain(2))
    assert set(products(trace, SQUARE, 1).values()) == {"R S(0) S(1)"}
    assert set(products(trace, SQUARE, 0).values()) == {"S(0) R S(0)"}, "samples"


def test_in_a_cube_products_are_by_rows_and_by_columns_in_turn_and_the_two_sides_take_turns() -> (
    None
):
    trace, *_ = traced(Chain(2))
    columns, rows = "R S(0) S(1)", "S(1) S(1) R"
    assert products(trace, CUBE, 1) == {"start": columns, "linears.0": rows, "linears.1": columns}
    assert products(trace, CUBE, 2) == {
        "start": "R R S(0)",
        "linears.0": columns,
        "linears.1": rows,
    }


@pytest.mark.parametrize("constraint", [SQUARE, CUBE], ids=str)
@pytest.mark.parametrize("num_linears", [1, 2, 3])
def test_chains_of_any_length_compute_what_the_model_does(
    constraint: constraints.Parallelism, num_linears: int
) -> None:
    trace, model, batch = traced(Chain(num_linears))
    plan = planned(trace, constraint)
    assert verify_program(trace, plan.program, model, (), batch).ok


def test_a_norm_over_split_features_works_on_parts_of_the_tokens_and_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trace, model, batch = traced(Chain(2, nn.LayerNorm(8)), 4, 6, 8)
    with caplog.at_level("WARNING", logger="autopar"):
        plan = planned(trace, SQUARE)
    assert (
        "norm/native_layer_norm/forward/0, norm/native_layer_norm/forward/1"
        in caplog.records[0].getMessage()
    )
    strategies = [
        n.strategy
        for e in plan.plan.entries
        for n in e.nodes
        if "native_layer_norm/forward" in n.node
    ]
    assert strategies and all(str(s.inputs[0]) == "S(0) S(1)" for s in strategies)
    assert verify_program(trace, plan.program, model, (), batch).ok


@pytest.mark.slow
def test_keys_of_one_head_are_gathered_where_queries_of_several_are_split() -> None:
    model, batch = zoo_small.llama(num_layers=1, num_key_value_heads=1)
    trace = capture(model, (), batch)
    plan = planned(trace, SQUARE)
    assert {str(p.layout) for p in plan.program.stages[0].parameters if "k_proj" in p.name} == {
        "S(1) S(0)"
    }
    assert verify_program(trace, plan.program, model, (), batch).ok


def test_a_table_that_is_also_the_head_lies_as_the_head_asks() -> None:
    model, batch = zoo_small.gpt2(num_layers=1)
    rests = {
        p.name: str(p.layout)
        for p in planned(capture(model, (), batch), SQUARE).program.stages[0].parameters
    }
    assert (
        rests["transformer.wte.weight"] == "S(1) S(0)"
        and rests["transformer.wpe.weight"] == "S(0) S(1)"
    )


class Sorted(nn.Module):
    """Means over the samples, in order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(0).sort().values


def test_an_op_that_reads_all_features_and_has_no_other_dim_refuses() -> None:
    message = (
        r"tensor_parallel\('2d', axes=\['a', 'b'\]\) cannot hold: at end/sort/forward/0, it"
        r" cannot read the shards(.|\n)*op aten\.sort"
    )
    with pytest.raises(ConstraintError, match=message):
        planned(traced(Chain(1, end=Sorted()))[0], SQUARE)


def test_heads_that_a_side_does_not_divide_are_refused_by_the_op_that_makes_them() -> None:
    model, batch = zoo_small.llama(num_layers=1)
    message = (
        r"cannot hold: model\.layers\.0\.self_attn/view/forward/1 has a tensor of shape \(4, 12, 2,"
        r" 8\), whose dim 2 would be in 4 parts"
    )
    with pytest.raises(ConstraintError, match=message):
        planned(capture(model, (), batch), SQUARE, Mesh({"a": 4, "b": 4}))


def test_a_batch_that_a_cube_does_not_divide_is_refused() -> None:
    with pytest.raises(
        ConstraintError,
        match=(
            r"tensor_parallel\('3d'.*has a tensor of shape \(2, 8\), whose dim 0 would be in 4"
            r" parts"
        ),
    ):
        planned(traced(Chain(2), 2, 8)[0], CUBE)


class Scaled(nn.Module):
    """No linear."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * x).pow(2).mean()


def test_a_model_without_linears_is_refused() -> None:
    with pytest.raises(
        ConstraintError,
        match=r"tensor_parallel\('2d', axes=\['a', 'b'\]\): the model has no linear layer to shard",
    ):
        planned(traced(Scaled())[0], SQUARE)


def test_sides_of_one_device_ask_for_nothing() -> None:
    forced = resolve(traced(Chain(1))[0], [SQUARE], Mesh({"a": 1, "b": 1, "c": 2}))
    assert not forced.named.rows and not forced.named.grid


@pytest.mark.parametrize(
    ("order", "rests"),
    [("ijl", "R S(0) S(2)"), pytest.param("jli", "S(0) S(2) S(0)", marks=pytest.mark.slow)],
)
def test_a_fused_projection_rests_split_over_samples_only_where_these_can_be_gathered_alone(
    order: str, rests: str
) -> None:
    model, batch = zoo_small.gpt2(num_layers=1)
    trace = capture(model, (), batch)
    program = planned(trace, CUBE, Mesh(dict.fromkeys(order, 2))).program
    assert {
        str(p.layout) for p in program.stages[0].parameters if p.name.endswith("c_attn.weight")
    } == {rests}
    moved = {
        (c.kind, order[c.axis])
        for _, key, c in program.stages[0].collectives
        if key.endswith("c_attn.weight/parameter")
    }
    assert moved == ({("all_gather", "i")} if order == "jli" else set())


class Twice(nn.Module):
    """What the second linear makes is read as it is, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.relu(self.first(x)))
        return torch.relu(y).pow(2).mean() + torch.tanh(y.transpose(1, 2)).pow(2).mean()


def test_partial_sums_that_several_read_are_scattered_once() -> None:
    trace, model, batch = traced(Twice(), 8, 4, 8)
    program = planned(trace, CUBE).program
    scattered = [
        key
        for phase, key, c in program.stages[0].collectives
        if (phase, c.kind, c.axis) == ("forward", "reduce_scatter", 1)
    ]
    assert scattered == ["second/dot/forward/0"]
    assert verify_program(trace, program, model, (), batch).ok
