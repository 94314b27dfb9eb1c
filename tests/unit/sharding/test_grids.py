"""2d and 3d tensor parallelism on a trace: how products are sharded, which ops are exceptions, and
which models are refused."""

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
    """x + linear(relu(norm(…))) with a number of linear layers, a norm before each of them, and a
    module before the loss."""

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


def trace_model(model: nn.Module, *shape: int) -> tuple[Trace, nn.Module, dict[str, torch.Tensor]]:
    batch = {"x": torch.randn(*(shape or (8, 8)), generator=torch.Generator().manual_seed(0))}
    return capture(model, (), batch), model, batch


def plan_with(
    trace: Trace, constraint: constraints.Parallelism, mesh: Mesh | None = None
) -> Planned:
    options = PlanOptions(constraints=(constraint,))
    return make_plan(trace, mesh or MESHES[constraint], HardwareProfile.load("h100-sxm"), options)


def products(trace: Trace, constraint: constraints.Parallelism, axis: int) -> dict[str, str]:
    """Map the module of each product with a weight to the labels of activation, weight and result
    on an axis. Partial sums and unconstrained tensors (inputs) are shown as R."""
    rows, graph = resolve(trace, [constraint], MESHES[constraint]).named.rows, read_trace(trace)
    labels = {}
    for name, node in graph.nodes.items():
        if product_of(graph, node):
            row = dict(rows[name])[axis]
            labels[node.meta["module"]] = " ".join(
                str(label or "R") for label in (*row.inputs, *row.outputs)
            )
    return labels


def test_second_axis_of_a_2d_grid_shards_all_products_by_columns() -> None:
    trace, *_ = trace_model(Chain(2))
    assert set(products(trace, SQUARE, 1).values()) == {"R S(0) S(1)"}
    assert set(products(trace, SQUARE, 0).values()) == {"S(0) R S(0)"}, "samples"


def test_two_axes_of_a_3d_grid_alternate_between_columns_and_rows() -> None:
    trace, *_ = trace_model(Chain(2))
    columns, rows = "R S(0) S(1)", "S(1) S(1) R"
    assert products(trace, CUBE, 1) == {"start": columns, "linears.0": rows, "linears.1": columns}
    assert products(trace, CUBE, 2) == {
        "start": "R R S(0)",
        "linears.0": columns,
        "linears.1": rows,
    }


@pytest.mark.parametrize("constraint", [SQUARE, CUBE], ids=str)
@pytest.mark.parametrize("num_linears", [1, 2, 3])
def test_sharded_chains_of_any_length_match_the_model(
    constraint: constraints.Parallelism, num_linears: int
) -> None:
    trace, model, batch = trace_model(Chain(num_linears))
    plan = plan_with(trace, constraint)
    assert verify_program(trace, plan.program, model, (), batch).ok


def test_norm_over_sharded_features_is_sharded_over_tokens_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trace, model, batch = trace_model(Chain(2, nn.LayerNorm(8)), 4, 6, 8)
    with caplog.at_level("WARNING", logger="autopar"):
        plan = plan_with(trace, SQUARE)
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
def test_keys_with_one_head_are_gathered_if_queries_are_sharded_by_heads() -> None:
    model, batch = zoo_small.llama(num_layers=1, num_key_value_heads=1)
    trace = capture(model, (), batch)
    plan = plan_with(trace, SQUARE)
    assert {str(p.layout) for p in plan.program.stages[0].parameters if "k_proj" in p.name} == {
        "S(1) S(0)"
    }
    assert verify_program(trace, plan.program, model, (), batch).ok


def test_embedding_tied_to_the_head_has_the_layout_of_the_head() -> None:
    model, batch = zoo_small.gpt2(num_layers=1)
    rests = {
        p.name: str(p.layout)
        for p in plan_with(capture(model, (), batch), SQUARE).program.stages[0].parameters
    }
    assert (
        rests["transformer.wte.weight"] == "S(1) S(0)"
        and rests["transformer.wpe.weight"] == "S(0) S(1)"
    )


class Sorted(nn.Module):
    """Means over the samples, sorted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(0).sort().values


def test_op_without_a_dim_to_shard_is_refused() -> None:
    message = (
        r"tensor_parallel\('2d', axes=\['a', 'b'\]\) cannot hold: at end/sort/forward/0, it"
        r" cannot read the shards(.|\n)*op aten\.sort"
    )
    with pytest.raises(ConstraintError, match=message):
        plan_with(trace_model(Chain(1, end=Sorted()))[0], SQUARE)


def test_number_of_heads_not_divisible_by_an_axis_is_refused() -> None:
    model, batch = zoo_small.llama(num_layers=1)
    message = (
        r"cannot hold: model\.layers\.0\.self_attn/view/forward/1 has a tensor of shape \(4, 12, 2,"
        r" 8\), whose dim 2 would be in 4 parts"
    )
    with pytest.raises(ConstraintError, match=message):
        plan_with(capture(model, (), batch), SQUARE, Mesh({"a": 4, "b": 4}))


def test_batch_not_divisible_by_a_3d_grid_is_refused() -> None:
    with pytest.raises(
        ConstraintError,
        match=(
            r"tensor_parallel\('3d'.*has a tensor of shape \(2, 8\), whose dim 0 would be in 4"
            r" parts"
        ),
    ):
        plan_with(trace_model(Chain(2), 2, 8)[0], CUBE)


class Scaled(nn.Module):
    """A model without linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * x).pow(2).mean()


def test_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(
        ConstraintError,
        match=r"tensor_parallel\('2d', axes=\['a', 'b'\]\): the model has no linear layer to shard",
    ):
        plan_with(trace_model(Scaled())[0], SQUARE)


def test_axes_of_size_one_add_no_constraints() -> None:
    resolved = resolve(trace_model(Chain(1))[0], [SQUARE], Mesh({"a": 1, "b": 1, "c": 2}))
    assert not resolved.named.rows and not resolved.named.grid


@pytest.mark.parametrize(
    ("order", "rests"),
    [("ijl", "R S(0) S(2)"), pytest.param("jli", "S(0) S(2) S(0)", marks=pytest.mark.slow)],
)
def test_fused_projection_is_stored_sharded_over_the_sample_axis_only_if_it_is_last(
    order: str, rests: str
) -> None:
    model, batch = zoo_small.gpt2(num_layers=1)
    trace = capture(model, (), batch)
    program = plan_with(trace, CUBE, Mesh(dict.fromkeys(order, 2))).program
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
    """The result of the second linear layer is read directly and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.relu(self.first(x)))
        return torch.relu(y).pow(2).mean() + torch.tanh(y.transpose(1, 2)).pow(2).mean()


def test_partial_sum_with_two_readers_is_reduce_scattered_once() -> None:
    trace, model, batch = trace_model(Twice(), 8, 4, 8)
    program = plan_with(trace, CUBE).program
    scattered = [
        key
        for phase, key, c in program.stages[0].collectives
        if (phase, c.kind, c.axis) == ("forward", "reduce_scatter", 1)
    ]
    assert scattered == ["second/dot/forward/0"]
    assert verify_program(trace, program, model, (), batch).ok
