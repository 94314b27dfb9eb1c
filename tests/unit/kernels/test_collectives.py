"""Communication steps refer to mesh axes. They need process groups, fake groups or an axis of
size 1."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.core.mesh import Mesh
from autopar.errors import LayoutError, RuntimeStateError
from autopar.kernels import bound_ops as bound
from autopar.kernels.bind import bind
from autopar.kernels.collectives import (
    STEPS,
    all_gather,
    all_reduce,
    all_to_all,
    fake_groups,
    finish,
    halo,
    local_start,
    reduce_scatter,
    shard,
    start,
    swap,
    use_groups,
)

MESH = Mesh({"data": 2, "tensor": 4})
CALLS = {
    all_gather: ((1, 1), (8, 32, 4)),
    reduce_scatter: ((1, "sum", 1), (8, 2, 4)),
    all_reduce: (("sum", 1), (8, 8, 4)),
    all_to_all: ((0, 2, 1), (32, 8, 1)),
    swap: ((1, 1), (8, 8, 4)),
    halo: ((1, 2, 1, False, 1), (8, 11, 4)),
    shard: ((2, 1), (8, 8, 1)),
}


def graph_of(target: Callable[..., Any], *arguments: Any) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output((graph.call_function(target, (graph.placeholder("x"), *arguments)),))
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_step_on_fake_groups_has_the_shape_of_the_real_result(
    step: Callable[..., torch.Tensor],
) -> None:
    arguments, shape = CALLS[step]
    with FakeTensorMode(), use_groups(fake_groups(MESH)):
        result = step(torch.empty(8, 8, 4), *arguments)
    assert tuple(result.shape) == shape
    assert result.is_contiguous()


STRIDED = [
    (step, shape, permutation)
    for step in STEPS
    for shape in [(3, 1, 16, 4), (1, 1, 16, 4), (3, 2, 1, 4), (1, 3, 4, 1), (2, 3, 4, 4)]
    for permutation in [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)]
]


@pytest.mark.parametrize(("step", "shape", "permutation"), STRIDED)
@pytest.mark.parametrize("dim", range(4))
def test_results_are_contiguous_for_all_strides_and_sizes_of_the_operand(
    step: Callable[..., torch.Tensor],
    shape: tuple[int, ...],
    permutation: tuple[int, ...],
    dim: int,
) -> None:
    """Kernels assume contiguous strides, and so does the interpreter that verifies plans."""
    x = torch.empty([shape[i] for i in permutation]).permute(
        [permutation.index(i) for i in range(4)]
    )
    assert x.shape == shape
    settings: dict[Any, list[tuple[Any, ...]]] = {
        all_gather: [(dim, 1)],
        reduce_scatter: [(dim, "sum", 1)],
        all_reduce: [("sum", 1)],
        all_to_all: [(dim, to_dim, 1) for to_dim in range(4) if to_dim != dim],
        swap: [(dim, 1)],
        halo: [(dim, 1, 1, False, 1)],
        shard: [(dim, 1)],
    }
    split = {reduce_scatter: dim, shard: dim}
    for arguments in settings[step]:
        to_dim = arguments[1] if step is all_to_all else split.get(step)
        size = 2 if to_dim is None else shape[to_dim]  # each part has one element
        if size == 1 or (step is swap and shape[dim] % 2):
            continue
        with use_groups(fake_groups(Mesh({"data": 1, "tensor": size}))):
            result = step(x, *arguments)
        assert result.stride() == torch.empty(result.shape).stride(), arguments


@pytest.mark.parametrize(
    "step", [step for step in STEPS if step is not shard], ids=lambda step: step.__name__
)
def test_finish_returns_the_result_of_the_step_and_clears_the_pending_state(
    step: Callable[..., torch.Tensor],
) -> None:
    arguments, shape = CALLS[step]
    with FakeTensorMode(), use_groups(fake_groups(MESH)):
        started = start(torch.empty(8, 8, 4), step.__name__, *arguments)
        assert started
        result = finish(started, step.__name__, *arguments)
    assert tuple(result.shape) == shape
    assert not started


@pytest.mark.parametrize(
    "step", [step for step in STEPS if step is not shard], ids=lambda step: step.__name__
)
def test_bound_start_and_finish_equal_the_bound_step(
    step: Callable[..., torch.Tensor],
) -> None:
    graph = fx.Graph()
    settings = (step.__name__, *CALLS[step][0])
    graph.output(
        (
            graph.call_function(
                finish, (graph.call_function(start, (graph.placeholder("x"), *settings)), *settings)
            ),
        )
    )
    module, x = fx.GraphModule(nn.Module(), graph), torch.ones(8, 8, 8)
    whole = bind(graph_of(step, *CALLS[step][0]), fake_groups(MESH))(x)[0]
    assert bind(module, fake_groups(MESH))(x)[0].shape == whole.shape
    alone = fake_groups(Mesh({"a": 1, "b": 1}))
    bound = bind(module, alone)
    assert torch.equal(bound(x)[0], bind(graph_of(step, *CALLS[step][0]), alone)(x)[0])
    assert step is halo or [node.op for node in bound.graph.nodes] == ["placeholder", "output"]


@pytest.mark.parametrize(
    "step", [step for step in STEPS if step is not halo], ids=lambda step: step.__name__
)
def test_step_over_an_axis_of_size_1_returns_its_operand_and_is_removed_by_binding(
    step: Callable[..., torch.Tensor],
) -> None:
    x, groups = torch.ones(2, 2, 2), fake_groups(Mesh({"a": 1, "b": 1}))
    with use_groups(groups):
        assert step(x, *CALLS[step][0]) is x
    bound = bind(graph_of(step, *CALLS[step][0]), groups)
    assert [node.op for node in bound.graph.nodes] == ["placeholder", "output"]
    assert bound(x)[0] is x


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_step_without_groups_is_refused_with_a_remedy(step: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(RuntimeStateError, match=r"use_groups\(\.\.\.\), bind it"):
        step(torch.ones(8, 8, 8), *CALLS[step][0])


def test_use_groups_is_nestable_and_ends_with_its_block() -> None:
    outer, inner = fake_groups(MESH, (1, 2)), fake_groups(MESH, (0, 0))
    with use_groups(outer):
        with use_groups(inner):
            assert local_start(16, ((1, 4),)) == 0
        assert local_start(16, ((1, 4),)) == 8
    with pytest.raises(RuntimeStateError):
        local_start(16, ((1, 4),))


def test_local_start_follows_the_order_of_the_mesh_axes() -> None:
    with use_groups(fake_groups(MESH, (1, 2))):
        assert local_start(16, ()) == 0
        assert local_start(16, ((0, 2), (1, 4))) == 8 + 2 * 2
        assert local_start(16, ((1, 4), (0, 2))) == 2 * 4 + 2


def test_binding_replaces_local_start_with_a_constant() -> None:
    graph = fx.Graph()
    start = graph.call_function(local_start, (16, ((1, 4),)))
    graph.output((graph.call_function(torch.add, (graph.placeholder("x"), start)),))
    bound = bind(fx.GraphModule(nn.Module(), graph), fake_groups(MESH, (0, 3)))
    assert bound(torch.tensor(0))[0].item() == 12
    assert all(node.target is not local_start for node in bound.graph.nodes)


def test_bound_graph_runs_without_groups_and_the_original_is_unchanged() -> None:
    original = graph_of(shard, 0, 1)
    bound = bind(original, fake_groups(MESH, (0, 3)))
    assert bound(torch.arange(8))[0].tolist() == [6, 7]
    assert [node.target for node in original.graph.nodes if node.op == "call_function"] == [shard]


def test_arguments_may_be_keywords() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(shard, (graph.placeholder("x"),), {"dim": 0, "axis": 0}),))
    assert bind(fx.GraphModule(nn.Module(), graph), fake_groups(MESH, (1, 0)))(torch.arange(4))[
        0
    ].tolist() == [2, 3]


def test_shard_does_not_keep_the_memory_of_the_full_tensor() -> None:
    with use_groups(fake_groups(MESH, (1, 0))):
        part = shard(torch.arange(8), 0, 0)
    assert part.tolist() == [4, 5, 6, 7]
    assert part.untyped_storage().nbytes() == 4 * 8


@pytest.mark.parametrize(
    "step", [reduce_scatter, all_to_all, shard], ids=lambda step: step.__name__
)
def test_dim_not_divisible_by_the_axis_is_refused(step: Callable[..., torch.Tensor]) -> None:
    with (
        use_groups(fake_groups(MESH)),
        pytest.raises(LayoutError, match="length 6 cannot be sharded over 4 ranks"),
    ):
        step(torch.empty(6, 6, 6), *CALLS[step][0])


def test_steps_can_be_compiled_as_a_full_graph() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(all_gather, (graph.call_function(shard, (x, 1, 1)), 1, 1)),))
    bound = bind(fx.GraphModule(nn.Module(), graph), fake_groups(MESH))
    compiled_module: Any = torch.compile(bound, backend="aot_eager", fullgraph=True)
    assert compiled_module(torch.ones(2, 8))[0].shape == (2, 8)


@pytest.mark.parametrize(("lowest", "beyond"), [(False, 0.0), (True, float("-inf"))])
def test_halo_over_an_axis_of_size_1_is_padding(lowest: bool, beyond: float) -> None:
    x, groups = torch.ones(2, 3), fake_groups(Mesh({"a": 1}))
    expected = torch.tensor([[beyond, 1, 1, 1, beyond, beyond]] * 2)
    with use_groups(groups):
        assert torch.equal(halo(x, 1, 1, 2, lowest, 0), expected)
    assert torch.equal(bind(graph_of(halo, 1, 1, 2, lowest, 0), groups)(x)[0], expected)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_sums_of_complex_tensors_are_communicated_as_real_tensors(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands: list[torch.Tensor] = []

    def record_sum(x: torch.Tensor, op: str, *_: object) -> torch.Tensor:
        operands.append(x)
        return (x if kind == "all_reduce" else x[:1]).clone()

    functional = SimpleNamespace(
        all_reduce=record_sum, reduce_scatter_tensor=record_sum, wait_tensor=lambda x: x
    )
    monkeypatch.setattr(bound, "_functional", functional)
    x = torch.complex(torch.arange(8.0), -torch.arange(8.0)).view(4, 2).conj()
    result = (
        bound.all_reduce(x, "sum", 2, "two")
        if kind == "all_reduce"
        else bound.reduce_scatter(x, 0, "sum", 2, "two", 0)
    )
    assert torch.equal(result, x if kind == "all_reduce" else x[:2]) and [
        y.dtype for y in operands
    ] == [torch.float32]
