"""Clusters and classes. Every node belongs to one cluster, equal layers share a class, and no
collective runs inside a cluster."""

from __future__ import annotations

from collections import Counter
from graphlib import TopologicalSorter

import pytest
import torch
import zoo_small
from mlp import traced
from torch import nn

from autopar import ops
from autopar.capture import capture
from autopar.capture.trace import Trace
from autopar.core.layout import Layout
from autopar.rules import Call, is_strategy
from autopar.sharding import ClusterClass, classes_of, clusters, clusters_of, pattern_of

MESH = (2, 2)
HEADS = {ops.dot, ops.attention, ops.attention_backward, ops.embedding, ops.embedding_backward}


@pytest.fixture(scope="module")
def gpt2() -> Trace:
    model, batch = zoo_small.gpt2(num_layers=3)
    return capture(model, (), batch)


@pytest.fixture(scope="module")
def classes(gpt2: Trace) -> tuple[ClusterClass, ...]:
    return classes_of(gpt2, MESH)


@pytest.mark.parametrize(
    ("key", "pattern", "indices"),
    [
        ("head/dot/forward/0", "head/dot/forward/0", ()),
        ("layers.3.mlp/dot/forward/1", "layers.{0}.mlp/dot/forward/1", (3,)),
        (
            "stages.1.layers.12/add.Tensor/backward/0",
            "stages.{0}.layers.{1}/add.Tensor/backward/0",
            (1, 12),
        ),
        (
            "net.conv2d.0.w1/parameter",
            "net.conv2d.{0}.w1/parameter",
            (0,),
        ),  # an index is a whole component of the path
        ("a.{b}.0/relu/forward/0", "a.{{b}}.{0}/relu/forward/0", (0,)),
        ("/mean/forward/0", "/mean/forward/0", ()),
    ],
)
def test_pattern_of_a_key_formats_back_to_the_key(
    key: str, pattern: str, indices: tuple[int, ...]
) -> None:
    assert pattern_of(key) == (pattern, indices)
    assert pattern.format(*indices) == key


def test_clusters_partition_the_nodes_without_cyclic_dependencies(gpt2: Trace) -> None:
    clusters = clusters_of(gpt2)
    names = [m.node for c in clusters for m in c.members]
    assert sorted(names) == sorted(n.name for n in gpt2.graph.nodes if n.op == "call_function")
    home = {m.node: i for i, c in enumerate(clusters) for m in c.members}
    waits = {i: {home[r[0]] for r in c.operands if r[0] in home} for i, c in enumerate(clusters)}
    assert all(i not in before for i, before in waits.items())
    TopologicalSorter(waits).prepare()  # raises on a cycle


def test_operands_of_a_cluster_are_external_and_its_results_are_read_elsewhere(gpt2: Trace) -> None:
    clusters = clusters_of(gpt2)
    output = next(iter(reversed(gpt2.graph.nodes)))
    read = {(n.name, 0) for n in output.all_input_nodes} | {r for c in clusters for r in c.operands}
    for cluster in clusters:
        inside = {m.node for m in cluster.members}
        assert not any(name in inside for name, _ in cluster.operands) and len(
            set(cluster.operands)
        ) == len(cluster.operands)
        outputs = [ref for m in cluster.members for ref in m.makes]
        assert [ref for ref in outputs if ref in read] == list(cluster.results)
        assert len({gpt2.node(m.node).meta["phase"] for m in cluster.members}) == 1


def test_contractions_and_lookups_are_always_first_in_their_cluster(gpt2: Trace) -> None:
    clusters = clusters_of(gpt2)
    assert any(m.call.target in HEADS for c in clusters for m in c.members)
    assert not any(m.call.target in HEADS for c in clusters for m in c.members[1:])
    assert max(len(c.members) for c in clusters) > 3, "some clusters have followers"


def test_equal_layers_share_a_class(classes: tuple[ClusterClass, ...]) -> None:
    layered = [c for c in classes if c.first.indices]
    assert {len(c.instances) for c in layered} <= {1, 2, 3}
    counts = Counter(len(c.instances) for c in layered)
    assert counts[3] > 5 * (counts[1] + counts[2]), (
        "only a few ops of the first and last layers differ"
    )
    for c in layered:
        assert len({i.indices for i in c.instances}) == len(c.instances)
        assert len({tuple(m.pattern for m in i.members) for i in c.instances}) == 1


def test_cluster_strategies_are_valid_for_each_member_without_internal_collectives(
    classes: tuple[ClusterClass, ...],
) -> None:
    for c in classes:
        assert len({s.outer for s in c.strategies}) == len(c.strategies) > 0
        for s in c.strategies[:: max(1, len(c.strategies) // 8)]:
            at: dict[tuple[str, int], Layout] = dict(
                zip(c.first.operands, s.outer.inputs, strict=True)
            )
            for member, own in zip(c.first.members, s.members, strict=True):
                assert is_strategy(member.call, own, MESH), f"{member.key}: {own}"
                assert [at[ref] for ref in member.reads] == list(own.inputs), (
                    "operands have the layout that their producer returns"
                )
                at.update(zip(member.makes, own.outputs, strict=True))
            assert [at[ref] for ref in c.first.results] == list(s.outer.outputs)


def test_each_class_has_one_replicated_strategy_and_all_strategies_fit_the_shapes(
    classes: tuple[ClusterClass, ...],
) -> None:
    for c in classes:
        whole = [
            s
            for s in c.strategies
            if all(layout.is_replicated for layout in (*s.outer.inputs, *s.outer.outputs))
        ]
        assert len(whole) == 1
        for s in c.strategies:
            for member, own in zip(c.first.members, s.members, strict=True):
                infos = zip(
                    (*own.inputs, *own.outputs),
                    (*member.call.inputs, *member.call.outputs),
                    strict=True,
                )
                assert all(layout.fits(info.shape, MESH) for layout, info in infos)


def test_partial_operands_are_offered_only_if_a_producer_can_return_them() -> None:
    classes = classes_of(traced(8, 16, 8, num_layers=2, dtype=torch.float32), MESH)
    partial: set[tuple[str, int]] = set()
    for c in classes:
        for s in c.strategies:
            for ref, layout in zip(c.first.operands, s.outer.inputs, strict=True):
                assert not layout.has_partial or ref in partial or len(c.instances) > 1, (
                    f"{c.first.members[0].key} reads a partial sum that no op returns"
                )
            for cluster in c.instances:
                partial |= {
                    ref
                    for ref, layout in zip(cluster.results, s.outer.outputs, strict=True)
                    if layout.has_partial
                }
    assert partial


def test_products_do_not_accept_partial_operands() -> None:
    classes = classes_of(traced(8, 16, 8, num_layers=2, dtype=torch.float32), MESH)
    for c in classes:
        for position, member in enumerate(c.first.members):
            if member.call.target == ops.dot:
                assert not any(
                    layout.has_partial
                    for s in c.strategies
                    for layout in s.members[position].inputs
                )


def test_mesh_axis_of_size_one_only_replicates() -> None:
    for c in classes_of(traced(8, 16, 8, num_layers=1, dtype=torch.float32), (1, 2)):
        assert all(
            str(layout).startswith("R ")
            for s in c.strategies
            for layout in (*s.outer.inputs, *s.outer.outputs)
        )


def test_two_axes_shard_one_dim_in_both_orders_consistently_for_all_tensors() -> None:
    classes = classes_of(traced(8, 16, 8, num_layers=1, dtype=torch.float32), MESH)
    linear = next(c for c in classes if c.first.members[0].key == "layers.0.up/dot/forward/0")
    offered = {str(s.members[0]) for s in linear.strategies}
    assert {"S(0) S(0), R R -> S(0) S(0)", "S(0)#1 S(0)#0, R R -> S(0)#1 S(0)#0"} <= offered
    assert {"S(1) S(1), S(1) S(1) -> P P", "S(1)#1 S(1)#0, S(1)#1 S(1)#0 -> P P"} <= offered
    assert not any("S(0) S(0)" in text and "#" in text for text in offered)


class Bands(nn.Module):
    """Sum repeated rows, whose gradients are written into tensors of zeros, and two convolutions
    whose operands with halos have followers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv(torch.relu(self.conv(x))))
        rows = torch.tensor([*range(16)] * 2)
        return sum(y[:, :, rows.roll(i)].square().mean() for i in range(3))  # type: ignore[return-value]


def test_tensors_created_like_another_tensor_follow_no_cluster() -> None:
    trace = capture(Bands(), (), {"x": torch.randn(4, 4, 16, 16)})
    members = [[m.call.target for m in cluster.members] for cluster in clusters_of(trace)]
    factories = [torch.ops.aten.new_zeros.default, torch.ops.aten.zeros_like.default]
    assert any(target in factories for targets in members for target in targets), (
        "the model has such a tensor"
    )
    assert not any(target in factories for targets in members for target in targets[1:])
    assert max(len(c.strategies) for c in classes_of(trace, MESH)) < 200


class Weighed(nn.Module):
    """Weigh the result of a linear layer with a tensor that a chain of ops computes without
    inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.ones(4, 8).cumsum(0).sqrt()
        return (weights * self.net(x)).pow(2).mean()


def test_factory_op_is_clustered_only_with_ops_that_read_nothing_else() -> None:
    trace = capture(Weighed(), (), {"x": torch.randn(4, 8)})
    names = [
        [m.call.target.__name__ for m in cluster.members]
        for cluster in clusters_of(trace)
        if cluster.phase == "forward"
    ]
    assert [
        "ones.default",
        "cumsum.default",
        "sqrt.default",
    ] in names, "ops that read only the factory's result are in its cluster"
    product = next(
        c for c in classes_of(trace, (2,)) if c.first.members[0].key == "/mul.Tensor/forward/0"
    )
    assert {"R", "S(0)", "S(1)"} <= {str(s.members[0].outputs[0]) for s in product.strategies}, (
        "the product can be sharded along each dim"
    )


def test_convolution_backward_may_shard_spatial_dims_with_halos() -> None:
    trace = capture(Bands(), (), {"x": torch.randn(4, 4, 16, 16)})
    backward = [
        c
        for c in classes_of(trace, (2,))
        if c.first.members[0].call.target == torch.ops.aten.convolution_backward.default
    ]
    assert backward
    for cluster_class in backward:
        assert any(
            halo.dim >= 2
            for s in cluster_class.strategies
            for layout in s.outer.inputs
            for halo in layout.special
        ), "a strategy shards a spatial dim"


class Centred(nn.Module):
    """Subtract the mean over samples from the result of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.linear(x)
        return (features - features.mean(0)).pow(3).sum()


def test_node_that_reads_two_tensors_of_a_cluster_does_not_restrict_its_strategies() -> None:
    trace = capture(Centred(), (), {"x": torch.randn(8, 4)})
    home = {m.node: i for i, c in enumerate(clusters_of(trace)) for m in c.members}
    (difference,) = (n for n in trace.graph.nodes if n.target is torch.ops.aten.sub.Tensor)
    (linear,) = (
        n for n in trace.graph.nodes if n.target is ops.dot and n.meta["phase"] == "forward"
    )
    assert home[difference.name] != home[linear.name]
    (product,) = (c for c in classes_of(trace, (2,)) if c.first.members[0].node == linear.name)
    assert Layout.parse("S(0)") in {s.outer.outputs[0] for s in product.strategies}


def test_possible_strategies_are_computed_once_for_equal_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, find = list[Call](), clusters._find_possible
    monkeypatch.setattr(
        clusters,
        "_find_possible",
        lambda call, possible: calls.append(call) or find(call, possible),
    )
    numbers = []
    for num_layers in (3, 6):
        model, batch = zoo_small.llama(num_layers=num_layers)
        clusters_of(capture(model, (), batch))
        numbers.append(len(calls))
        calls.clear()
    assert numbers[0] == numbers[1] > 50
