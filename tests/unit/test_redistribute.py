"""Redistribution: every chain of collectives converts real shards correctly and is the cheapest
one."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from autopar.core.collective import JOINING, Collective
from autopar.core.layout import Layout, local_shape, part_range
from autopar.core.layout_graph import (
    Arc,
    LayoutGraph,
    _collective,
    all_layouts,
    layout_graph,
    local_bytes,
    neighbours,
)
from autopar.core.mesh import Mesh
from autopar.core.redistribute import Step, _chain, _steiner, cheapest_chain, cheapest_tree
from autopar.errors import LayoutError
from autopar.program.splitting import split

FLOAT = torch.float64


def unit_price(_: Collective) -> float:
    return 1.0


def by_bytes(c: Collective) -> float:
    """A price that prefers small and local steps, so that chains of several steps pay."""
    return 0.01 if c.kind == "slice" else 1.0 + c.bytes / 64


def parts_of(full: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """Return the shard of every rank. Partial sums add up to the full tensor, and other partial
    values reduce to it."""
    plain = Layout(
        [
            Layout.parse("R").placements[0] if isinstance(p, Partial) else p
            for p in layout.placements
        ],
        layout.order,
    )
    parts = split(full, plain, mesh)
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Partial):
            for group in mesh.groups(axis):
                for position, rank in enumerate(group):
                    if placement.reduce_op == "sum":
                        share = (position + 1) / sum(range(1, len(group) + 1))
                        parts[rank] = parts[rank] * share
                    else:
                        parts[rank] = parts[rank] - float(position)
    return parts


def run(step: Step, parts: list[Tensor], mesh: Mesh) -> list[Tensor]:
    """Run the step on the shards of all ranks, using only its kind, axis, dims and reduce op."""
    c = step.collective
    result = list(parts)
    for group in mesh.groups(c.axis):
        members = [parts[rank] for rank in group]
        if c.kind in ("all_gather", "all_to_all"):
            whole = torch.cat(members, dim=c.dim)
        elif c.kind == "slice":
            whole = members[0]
        else:
            whole = (
                torch.stack(members).sum(0)
                if c.reduce_op == "sum"
                else torch.stack(members).amax(0)
            )
        for position, rank in enumerate(group):
            whole_here = parts[rank] if c.kind == "slice" else whole
            dim = c.to_dim if c.kind == "all_to_all" else c.dim
            if c.kind in ("all_gather", "all_reduce"):
                result[rank] = whole_here
            else:
                result[rank] = whole_here.narrow(
                    dim, *part_range(whole_here.shape[dim], [len(group)], [position])
                )
    return result


CASES = [
    ((4, 8), (2, 2)),
    ((8,), (2, 2)),
    ((4, 6), (2, 3)),
    ((6, 4), (4,)),
    ((5, 6), (2, 3)),
    ((8, 2), (2, 2, 2)),
]


def pairs(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> list[tuple[Layout, Layout]]:
    """Return a sample of all pairs of layouts, with partial sums among the sources."""
    rng = random.Random(str((shape, mesh_shape)))
    whole = all_layouts(shape, mesh_shape)
    partial = [
        Layout([Partial(op), *layout.placements[1:]], layout.order)
        for layout in whole
        for op in ("sum", "max")
    ]
    every = [
        (a, b)
        for a in (*whole, *(p for p in partial if p.fits(shape, mesh_shape)))
        for b in whole
        if a != b
    ]
    return rng.sample(every, min(60, len(every)))


@pytest.mark.parametrize(("shape", "mesh_shape"), CASES, ids=str)
def test_a_chain_converts_the_shards_of_one_layout_into_those_of_the_other(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> None:
    mesh = Mesh({f"a{i}": n for i, n in enumerate(mesh_shape)})
    full = torch.randn(shape, dtype=FLOAT, generator=torch.Generator().manual_seed(0))
    for source, target in pairs(shape, mesh_shape):
        parts, at = parts_of(full, source, mesh), source
        for step in cheapest_chain(shape, FLOAT, mesh_shape, source, target, by_bytes):
            assert step.source == at, "one step begins where the one before ended"
            assert step.collective.bytes == max(p.numel() for p in parts) * FLOAT.itemsize
            assert step.time_s == by_bytes(step.collective)
            parts, at = run(step, parts, mesh), step.target
            assert [tuple(p.shape) for p in parts] == [
                local_shape(shape, at, mesh_shape, mesh.coordinate(rank))
                for rank in range(mesh.num_devices)
            ]
        assert at == target
        for got, wanted in zip(parts, split(full, target, mesh), strict=True):
            torch.testing.assert_close(got, wanted)


def test_joining_collectives_are_those_that_reduce_the_number_of_shards_of_a_dim() -> None:
    mesh_shape, shape = (2, 2), (8, 8)
    kinds = set()
    for layout in all_layouts(shape, mesh_shape):
        for c, after in neighbours(shape, FLOAT, layout, mesh_shape):
            kinds.add(c.kind)
            joined = c.dim >= 0 and (
                layout.num_shards(c.dim, mesh_shape) > after.num_shards(c.dim, mesh_shape)
            )
            assert joined == (c.kind in JOINING), (layout, c, after)
    assert set(JOINING) <= kinds


def test_a_placement_without_a_collective_is_refused() -> None:
    class Odd(Shard):
        """A placement that no collective produces."""

    for before, after in ((Shard(0), Odd(1)), (Odd(0), Shard(1))):
        with pytest.raises(AssertionError, match="no collective converts"):
            _collective(0, before, after, "float32", 64)


def test_only_the_innermost_axis_of_a_dim_is_gathered_or_moved() -> None:
    after = {
        str(layout): c for c, layout in neighbours((8, 8), FLOAT, Layout.parse("S(0) S(0)"), (2, 2))
    }
    assert set(after) == {"S(0) R", "S(0) S(1)"}
    assert after["S(0) R"] == Collective("all_gather", 1, 0, -1, "", "float64", 128)
    after = {
        str(layout): c
        for c, layout in neighbours((8, 8), FLOAT, Layout.parse("S(0)#1 S(0)#0"), (2, 2))
    }
    assert set(after) == {"R S(0)", "S(1) S(0)"}
    assert after["S(1) S(0)"] == Collective("all_to_all", 0, 0, 1, "", "float64", 128)


def test_a_new_split_of_a_dim_is_innermost_and_must_fit() -> None:
    after = [str(layout) for _, layout in neighbours((4, 8), FLOAT, Layout.parse("S(0) R"), (4, 2))]
    assert after == ["R R", "S(1) R", "S(0) S(1)"], "four rows in four parts cannot be split again"
    assert neighbours((8, 8), FLOAT, Layout.parse("R S(0)"), (1, 1)) == [], (
        "nothing to do along an axis of size 1"
    )


def test_a_halo_is_produced_only_from_the_plain_shard_and_has_no_outgoing_steps() -> None:
    halo = Layout.parse("S(1)~2~1 R")
    graph = layout_graph((4, 16), FLOAT, (4, 2), [Layout.parse("S(0) R")], [halo], unit_price)
    into = {
        str(graph.layouts[arc.src]): arc.collective
        for arc in graph.arcs
        if graph.layouts[arc.dst] == halo
    }
    assert into == {"S(1) R": Collective("halo", 0, 1, -1, "", "float64", 4 * 4 * 8, 4 * 3 * 8)}
    assert not [arc for arc in graph.arcs if graph.layouts[arc.src] == halo]
    twice = layout_graph(
        (4, 16),
        FLOAT,
        (2, 2),
        [Layout.parse("S(1) S(1)")],
        [Layout.parse("S(1)~1~1 R")],
        unit_price,
    )
    assert {str(twice.layouts[a.src]) for a in twice.arcs if a.collective.kind == "halo"} == {
        "S(1) R"
    }


def test_mirrored_shards_convert_only_from_and_to_the_plain_shard() -> None:
    mirrored, whole = Layout.parse("S(1)~mirrored R"), Layout.parse("R R")
    swap = Collective("swap", 0, 1, -1, "", "float64", 4 * 4 * 8)
    for produced, wanted in ((whole, mirrored), (mirrored, whole)):
        graph = layout_graph((4, 16), FLOAT, (4, 2), [produced], [wanted], unit_price)
        arcs = {
            (str(graph.layouts[a.src]), str(graph.layouts[a.dst])): a.collective
            for a in graph.arcs
            if mirrored in (graph.layouts[a.src], graph.layouts[a.dst])
        }
        there = {("S(1) R", str(mirrored)): swap} if wanted == mirrored else {}
        assert arcs == {**there, (str(mirrored), "S(1) R"): swap}
    kinds = [
        arc.collective.kind
        for arc in cheapest_chain(
            (4, 16), FLOAT, (4, 2), mirrored, Layout.parse("S(0) R"), unit_price
        )
    ]
    assert kinds == ["swap", "all_to_all"]
    plain = layout_graph((4, 16), FLOAT, (4, 2), [Layout.parse("S(1) R")], [whole], unit_price)
    assert all(arc.collective.kind != "swap" for arc in plain.arcs), (
        "no swap without a mirrored layout"
    )


def test_halos_of_two_dims_are_exchanged_in_sequence() -> None:
    source, target = Layout.parse("S(1) S(2)"), Layout.parse("S(1)~1~1 S(2)~0~2")
    first, second = cheapest_chain((2, 8, 8), FLOAT, (2, 2), source, target, unit_price)
    assert {first.collective.kind, second.collective.kind} == {"halo"}
    assert second.collective.bytes == first.collective.bytes + first.collective.halo_bytes, (
        "the corners come with the second"
    )


def test_only_reductions_of_partial_sums_use_the_requested_dtype() -> None:
    source, target = Layout.parse("P S(1)"), Layout.parse("R R")
    graph = layout_graph(
        (4, 8), torch.bfloat16, (2, 2), [source], [target], unit_price, torch.float32
    )
    kinds = {
        (arc.collective.kind, arc.collective.dtype, arc.collective.bytes) for arc in graph.arcs
    }
    assert ("all_reduce", "float32", 4 * 4 * 4) in kinds and (
        "all_gather",
        "bfloat16",
        4 * 4 * 2,
    ) in kinds
    assert {dtype for kind, dtype, _ in kinds if kind in ("all_reduce", "reduce_scatter")} == {
        "float32"
    }
    assert {dtype for kind, dtype, _ in kinds if kind in ("all_gather", "all_to_all", "slice")} == {
        "bfloat16"
    }


def test_a_large_reduction_over_a_fast_and_a_slow_axis_is_hierarchical() -> None:
    """The chain is a reduce-scatter on the fast axis, an all-reduce on the slow axis, and an
    all-gather on the fast axis."""

    def price(c: Collective) -> float:
        moved = {"all_gather": c.bytes * 4, "all_reduce": 2 * c.bytes}.get(c.kind, c.bytes)
        return 0.0 if c.kind == "slice" else 1.0 + moved * (100.0 if c.axis == 0 else 1.0)

    # some layout splits the dim, on any axis
    source, target = Layout.parse("P P"), Layout.parse("R R")
    graph = layout_graph((64, 64), FLOAT, (2, 4), [source], [target, Layout.parse("S(0) R")], price)
    arcs = cheapest_tree(graph, [graph.index[source]], [graph.index[target]])
    assert [(a.collective.kind, a.collective.axis) for a in arcs] == [
        ("reduce_scatter", 1),
        ("all_reduce", 0),
        ("all_gather", 1),
    ]


def test_the_layout_graph_has_the_produced_and_requested_layouts_with_local_bytes() -> None:
    made, wanted = [Layout.parse("P R"), Layout.parse("S(0) R")], [Layout.parse("R S(1)")]
    graph = layout_graph((4, 8), FLOAT, (2, 2), made, wanted, unit_price)
    assert graph.layouts[:3] == (*made, *wanted)
    assert all(graph.layouts[n] == layout for layout, n in graph.index.items()) and len(
        graph.index
    ) == len(graph.layouts)
    assert graph.bytes == tuple(
        local_bytes((4, 8), FLOAT, layout, (2, 2)) for layout in graph.layouts
    )
    outgoing = graph.arcs_by_source()
    assert sorted(a for arcs in outgoing for a in map(id, arcs)) == sorted(map(id, graph.arcs))
    assert all(arc.src == n for n, arcs in enumerate(outgoing) for arc in arcs)


def test_all_layouts_lists_each_fitting_layout_once_in_every_order_of_axes() -> None:
    assert list(map(str, all_layouts((4, 4), (2,)))) == ["R", "S(0)", "S(1)"]
    square = all_layouts((4, 4), (2, 2))
    assert len(square) == len(set(square)) == 11
    assert {"S(0) S(0)", "S(0)#1 S(0)#0"} <= set(map(str, square))
    assert list(map(str, all_layouts((2, 1), (2, 2)))) == ["R R", "R S(0)", "S(0) R"], (
        "two rows are not split in four"
    )
    assert list(map(str, all_layouts((4,), (2, 1)))) == ["R R", "S(0) R"]
    assert list(map(str, all_layouts((), (2,)))) == ["R"]
    assert list(map(str, all_layouts((3,), (2,)))) == ["R", "S(0)"] and list(
        map(str, all_layouts((5,), (4,)))
    ) == ["R"]


# Cheapest trees compared with enumeration


def random_graph(rng: random.Random) -> LayoutGraph:
    """Return any directed graph. The search does not depend on the layouts."""
    num = rng.randint(3, 6)
    layouts = tuple(Layout((Shard(d),)) for d in range(num))
    every = list(itertools.permutations(range(num), 2))
    ends = rng.sample(every, min(rng.randint(3, 10), len(every)))
    step = Collective("all_to_all", 0, 0, 1, "", "float32", 4)
    arcs = tuple(Arc(a, b, step, rng.choice((0.0, 1.0, rng.uniform(0.1, 3.0)))) for a, b in ends)
    return LayoutGraph(layouts, (4,) * num, arcs, {layout: n for n, layout in enumerate(layouts)})


def reached(have: set[int], arcs: tuple[Arc, ...]) -> set[int]:
    seen = set(have)
    while more := {a.dst for a in arcs if a.src in seen} - seen:
        seen |= more
    return seen


def cheapest_by_hand(graph: LayoutGraph, have: set[int], want: set[int]) -> float:
    sets = (
        arcs for k in range(len(graph.arcs) + 1) for arcs in itertools.combinations(graph.arcs, k)
    )
    return min(
        (sum(a.time_s for a in arcs) for arcs in sets if want <= reached(have, arcs)),
        default=float("inf"),
    )


FROM_SEVERAL = (148, 226, 302, 733, 1092, 2759)
"""Seeds whose cheapest tree starts from several available layouts."""


@pytest.mark.parametrize("seed", [*range(60), *FROM_SEVERAL])
def test_a_tree_is_the_cheapest_set_of_steps_that_reaches_the_requested_layouts(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng)
    nodes = range(len(graph.layouts))
    have, want = (
        set(rng.sample(nodes, rng.randint(1, 2))),
        set(rng.sample(nodes, rng.randint(1, 3))),
    )
    best = cheapest_by_hand(graph, have, want)
    if best == float("inf"):
        with pytest.raises(LayoutError, match="no chain of collectives leads from"):
            cheapest_tree(graph, have, want)
        return
    arcs = cheapest_tree(graph, have, want)
    assert sum(a.time_s for a in arcs) == pytest.approx(best)
    ready = set(have)
    for arc in arcs:
        assert arc.src in ready and arc.dst not in ready, (
            "each step reads an available layout and produces a new one"
        )
        ready.add(arc.dst)
    assert want <= ready
    assert {arc.dst for arc in arcs} - {arc.src for arc in arcs} <= want, (
        "every produced layout is used"
    )


def test_one_gather_serves_all_readers_and_available_layouts_cost_nothing() -> None:
    source, split_rows, whole = Layout.parse("S(0)"), Layout.parse("S(1)"), Layout.parse("R")
    graph = layout_graph((8, 8), FLOAT, (2,), [source], [whole, split_rows], by_bytes)
    arcs = cheapest_tree(
        graph, [graph.index[source]], [graph.index[whole], graph.index[split_rows]]
    )
    assert [a.collective.kind for a in arcs] == ["all_gather", "slice"]
    assert (
        cheapest_tree(graph, [graph.index[source], graph.index[whole]], [graph.index[whole]]) == ()
    )


def test_many_requested_layouts_cost_at_most_the_sum_of_their_chains() -> None:
    shape, mesh_shape = (8, 8), (2, 2)
    layouts = all_layouts(shape, mesh_shape)
    source = Layout.parse("S(0) S(1)")
    graph = layout_graph(shape, FLOAT, mesh_shape, [source], layouts, by_bytes)
    want = [graph.index[layout] for layout in layouts]
    arcs = cheapest_tree(graph, [graph.index[source]], want)
    assert set(want) <= reached({graph.index[source]}, arcs)
    alone = (cheapest_tree(graph, [graph.index[source]], [w]) for w in want)
    assert sum(a.time_s for a in arcs) <= sum(a.time_s for each in alone for a in each)
    assert len(arcs) == len({a.dst for a in arcs}), "no layout is produced twice"


def test_a_tree_without_an_available_layout_is_refused() -> None:
    graph = layout_graph((4,), FLOAT, (2,), [Layout.parse("R")], [Layout.parse("S(0)")], unit_price)
    with pytest.raises(LayoutError, match=r"no version is at hand to make S\(0\) from"):
        cheapest_tree(graph, [], [graph.index[Layout.parse("S(0)")]])
    with pytest.raises(LayoutError, match=r"no chain of collectives leads from .*R.* to P"):
        cheapest_chain((4,), FLOAT, (2,), Layout.parse("R"), Layout.parse("P"), unit_price)


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_to_one_layout_equals_the_dreyfus_wagner_tree_including_ties(
    seed: int,
) -> None:
    rng = random.Random(seed)
    possible = all_layouts((8, 8), (2, 2))
    graph = layout_graph(
        (8, 8),
        FLOAT,
        (2, 2),
        [*possible, Layout.parse("P R")],
        possible,
        lambda c: rng.choice((0.0, 1.0, 1.0, 2.0)),
    )
    for target in range(len(possible)):
        have = sorted(rng.sample(range(len(graph.layouts)), 3))
        if target not in have:
            assert _chain(graph, have, target, lambda arc: arc.time_s) == _steiner(
                graph, have, [target], lambda arc: arc.time_s
            )
