"""Clusters and classes: every node belongs to one decision, equal layers share it, and nothing
moves inside one."""

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
        ),  # only a whole name is an index
        ("a.{b}.0/relu/forward/0", "a.{{b}}.{0}/relu/forward/0", (0,)),
        ("/mean/forward/0", "/mean/forward/0", ()),
    ],
)
def test_a_pattern_holds_fields_for_the_indices_and_gives_the_key_back(
    key: str, pattern: str, indices: tuple[int, ...]
) -> None:
    assert pattern_of(key) == (pattern, indices)
    assert pattern.format(*indices) == key


def test_every_node_belongs_to_one_cluster_and_no_cluster_waits_for_itself(gpt2: Trace) -> None:
    clusters = clusters_of(gpt2)
    names = [m.node for c in clusters for m in c.members]
    assert sorted(names) == sorted(n.name for n in gpt2.graph.nodes if n.op == "call_function")
    home = {m.node: i for i, c in enumerate(clusters) for m in c.members}
    waits = {i: {home[r[0]] for r in c.operands if r[0] in home} for i, c in enumerate(clusters)}
    assert all(i not in before for i, before in waits.items())
    TopologicalSorter(waits).prepare()  # raises on a cycle


def test_clusters_read_from_outside_and_make_what_others_read(gpt2: Trace) -> None:
    clusters = clusters_of(gpt2)
    output = next(iter(reversed(gpt2.graph.nodes)))
    wanted = {(n.name, 0) for n in output.all_input_nodes} | {
        r for c in clusters for r in c.operands
    }
    for cluster in clusters:
        inside = {m.node for m in cluster.members}
        assert not any(name in inside for name, _ in cluster.operands) and len(
            set(cluster.operands)
        ) == len(cluster.operands)
        made = [ref for m in cluster.members for ref in m.makes]
        assert [ref for ref in made if ref in wanted] == list(cluster.results)
        assert len({gpt2.node(m.node).meta["phase"] for m in cluster.members}) == 1


def test_a_contraction_or_lookup_begins_a_cluster_and_never_follows(gpt2: Trace) -> None:
    clusters = clusters_of(gpt2)
    assert any(m.call.target in HEADS for c in clusters for m in c.members)
    assert not any(m.call.target in HEADS for c in clusters for m in c.members[1:])
    assert max(len(c.members) for c in clusters) > 3, "something follows"


def test_equal_layers_take_one_decision(classes: tuple[ClusterClass, ...]) -> None:
    layered = [c for c in classes if c.first.indices]
    assert {len(c.instances) for c in layered} <= {1, 2, 3}
    counts = Counter(len(c.instances) for c in layered)
    assert counts[3] > 5 * (counts[1] + counts[2]), (
        "the first and last layers differ in a few ops only"
    )
    for c in layered:
        assert len({i.indices for i in c.instances}) == len(c.instances)
        assert len({tuple(m.pattern for m in i.members) for i in c.instances}) == 1


def test_a_strategy_of_a_cluster_is_one_of_each_members_rule_with_nothing_moved_inside(
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
                assert [at[ref] for ref in member.reads] == list(own.inputs), "read as it was made"
                at.update(zip(member.makes, own.outputs, strict=True))
            assert [at[ref] for ref in c.first.results] == list(s.outer.outputs)


def test_every_class_can_run_whole_and_every_strategy_fits_its_tensors(
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


def test_partial_operands_are_offered_only_where_some_producer_gives_them() -> None:
    classes = classes_of(traced(8, 16, 8, num_layers=2, dtype=torch.float32), MESH)
    made: set[tuple[str, int]] = set()
    for c in classes:
        for s in c.strategies:
            for ref, layout in zip(c.first.operands, s.outer.inputs, strict=True):
                assert not layout.has_partial or ref in made or len(c.instances) > 1, (
                    f"{c.first.members[0].key} reads a sum nobody makes"
                )
            for cluster in c.instances:
                made |= {
                    ref
                    for ref, layout in zip(cluster.results, s.outer.outputs, strict=True)
                    if layout.has_partial
                }
    assert made


def test_products_do_not_take_partial_sums() -> None:
    classes = classes_of(traced(8, 16, 8, num_layers=2, dtype=torch.float32), MESH)
    for c in classes:
        for position, member in enumerate(c.first.members):
            if member.call.target == ops.dot:
                assert not any(
                    layout.has_partial
                    for s in c.strategies
                    for layout in s.members[position].inputs
                )


def test_an_axis_of_size_one_offers_nothing_but_replication() -> None:
    for c in classes_of(traced(8, 16, 8, num_layers=1, dtype=torch.float32), (1, 2)):
        assert all(
            str(layout).startswith("R ")
            for s in c.strategies
            for layout in (*s.outer.inputs, *s.outer.outputs)
        )


def test_two_axes_split_one_dim_in_both_orders_and_all_tensors_in_the_same() -> None:
    classes = classes_of(traced(8, 16, 8, num_layers=1, dtype=torch.float32), MESH)
    linear = next(c for c in classes if c.first.members[0].key == "layers.0.up/dot/forward/0")
    offered = {str(s.members[0]) for s in linear.strategies}
    assert {"S(0) S(0), R R -> S(0) S(0)", "S(0)#1 S(0)#0, R R -> S(0)#1 S(0)#0"} <= offered
    assert {"S(1) S(1), S(1) S(1) -> P P", "S(1)#1 S(1)#0, S(1)#1 S(1)#0 -> P P"} <= offered
    assert not any("S(0) S(0)" in text and "#" in text for text in offered)


class Bands(nn.Module):
    """Repeated rows added up, whose gradients are written into zeros made like them; and a
    halo's operand that a follower reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv(torch.relu(self.conv(x))))
        rows = torch.tensor([*range(16)] * 2)
        return sum(y[:, :, rows.roll(i)].square().mean() for i in range(3))  # type: ignore[return-value]


def test_a_tensor_made_like_another_may_lie_in_any_way_and_follows_no_cluster() -> None:
    trace = capture(Bands(), (), {"x": torch.randn(4, 4, 16, 16)})
    members = [[m.call.target for m in cluster.members] for cluster in clusters_of(trace)]
    made_alike = [torch.ops.aten.new_zeros.default, torch.ops.aten.zeros_like.default]
    assert any(target in made_alike for targets in members for target in targets), (
        "the model has one"
    )
    assert not any(target in made_alike for targets in members for target in targets[1:])
    assert max(len(c.strategies) for c in classes_of(trace, MESH)) < 200


class Weighed(nn.Module):
    """A range, made one step after the other, weighs what a linear makes of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.ones(4, 8).cumsum(0).sqrt()
        return (weights * self.net(x)).pow(2).mean()


def test_what_is_made_of_nothing_has_no_follower_that_reads_anything_else() -> None:
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
    ] in names, "what is made of it alone is one decision with it"
    found = next(
        c for c in classes_of(trace, (2,)) if c.first.members[0].key == "/mul.Tensor/forward/0"
    )
    assert {"R", "S(0)", "S(1)"} <= {str(s.members[0].outputs[0]) for s in found.strategies}, (
        "all that it reads can be split"
    )


def test_what_a_convolution_may_read_with_a_halo_no_follower_of_it_reads_without() -> None:
    trace = capture(Bands(), (), {"x": torch.randn(4, 4, 16, 16)})
    backward = [
        c
        for c in classes_of(trace, (2,))
        if c.first.members[0].call.target == torch.ops.aten.convolution_backward.default
    ]
    assert backward
    for found in backward:
        assert any(
            halo.dim >= 2
            for s in found.strategies
            for layout in s.outer.inputs
            for halo in layout.special
        ), "space is a choice"


class Centred(nn.Module):
    """A mean over samples is taken from what one op makes, of which it is made, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        return (made - made.mean(0)).pow(3).sum()


def test_where_a_node_reads_several_tensors_of_a_cluster_no_way_to_make_them_is_lost() -> None:
    trace = capture(Centred(), (), {"x": torch.randn(8, 4)})
    home = {m.node: i for i, c in enumerate(clusters_of(trace)) for m in c.members}
    (difference,) = (n for n in trace.graph.nodes if n.target is torch.ops.aten.sub.Tensor)
    (made,) = (n for n in trace.graph.nodes if n.target is ops.dot and n.meta["phase"] == "forward")
    assert home[difference.name] != home[made.name]
    (product,) = (c for c in classes_of(trace, (2,)) if c.first.members[0].node == made.name)
    assert Layout.parse("S(0)") in {s.outer.outputs[0] for s in product.strategies}


def test_nodes_of_equal_layers_share_what_they_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    found, find = list[Call](), clusters._find_possible
    monkeypatch.setattr(
        clusters, "_find_possible", lambda call, made: found.append(call) or find(call, made)
    )
    numbers = []
    for num_layers in (3, 6):
        model, batch = zoo_small.llama(num_layers=num_layers)
        clusters_of(capture(model, (), batch))
        numbers.append(len(found))
        found.clear()
    assert numbers[0] == numbers[1] > 50
