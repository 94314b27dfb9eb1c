"""Layouts: the text format, the order of the axes that split a dim, and the shards of ranks."""

from __future__ import annotations

import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.core.layout import Layout, Strategy, local_range, local_shape
from autopar.core.placements import PARTIAL, REPLICATE, Halo, Mirrored
from autopar.errors import LayoutError

PLACEMENTS = st.sampled_from(
    [Replicate(), Shard(0), Shard(1), Shard(12), Partial("sum"), Partial("max")]
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    placements = draw(st.lists(PLACEMENTS, min_size=1, max_size=4))
    return Layout(placements, draw(st.permutations(range(len(placements)))))


@given(layouts())
def test_a_layout_round_trips_through_its_text_and_equal_layouts_have_equal_text(
    layout: Layout,
) -> None:
    again = Layout.parse(str(layout))
    assert again == layout and hash(again) == hash(layout) and str(again) == str(layout)


@given(st.lists(PLACEMENTS, min_size=1, max_size=4), st.data())
def test_the_order_of_axes_matters_only_among_axes_that_split_the_same_dim(
    placements: list[Placement], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(placements))))
    layout = Layout(placements, order)
    for dim in (0, 1, 12):
        assert layout.splitters(dim) == tuple(
            axis for axis in order if placements[axis] == Shard(dim)
        )
    dims = [p.dim for p in placements if isinstance(p, Shard)]
    if len(set(dims)) == len(dims):
        assert layout == Layout(placements) and layout.order == tuple(range(len(placements)))


@pytest.mark.parametrize(
    ("text", "placements", "order"),
    [
        ("R", (REPLICATE,), (0,)),
        ("S(0) R", (Shard(0), REPLICATE), (0, 1)),
        ("P S(12)", (PARTIAL, Shard(12)), (0, 1)),
        ("P(max) P(sum)", (Partial("max"), PARTIAL), (0, 1)),
        ("S(0) S(0)", (Shard(0), Shard(0)), (0, 1)),
        ("S(0)#0 S(0)#1", (Shard(0), Shard(0)), (0, 1)),
        ("S(2)~1~0 S(3)~0~12~lowest", (Halo(2, 1, 0), Halo(3, 0, 12, lowest=True)), (0, 1)),
        ("S(0) S(2)~mirrored", (Shard(0), Mirrored(2)), (0, 1)),
        ("S(0)#1 S(0)#0", (Shard(0), Shard(0)), (1, 0)),
        ("S(0)#2 R S(0)#0 S(0)#1", (Shard(0), REPLICATE, Shard(0), Shard(0)), (2, 1, 3, 0)),
    ],
)
def test_the_parser_reads_placements_and_the_order_of_splitting_axes(
    text: str, placements: tuple[Placement, ...], order: tuple[int, ...]
) -> None:
    layout = Layout.parse(text)
    assert layout.placements == placements
    assert layout.order == order


def test_a_halo_differs_from_the_plain_shard_and_is_part_of_the_local_shape() -> None:
    plain, around = Layout.parse("S(1) R"), Layout.parse("S(1)~2~1 R")
    assert (
        plain != around
        and around.special == (Halo(1, 2, 1),)
        and around.has_halo
        and not plain.special
    )
    assert (
        Halo(1, 2, 1) != Shard(1)
        and Shard(1) != Halo(1, 2, 1)
        and len({Halo(1, 2, 1), Halo(1, 2, 1, lowest=True), Shard(1)}) == 3
    )
    assert local_shape((3, 8), plain, (4, 1)) == (3, 2) and local_shape((3, 8), around, (4, 1)) == (
        3,
        5,
    )
    assert around.splitters(1) == (0,) and local_range(8, around, 1, (4, 1), (2, 0)) == (4, 2), (
        "a part's own elements"
    )
    assert pickle.loads(pickle.dumps(Halo(1, 2, 1, lowest=True))) == Halo(1, 2, 1, lowest=True)


def test_a_mirrored_shard_differs_from_the_plain_shard_and_has_its_length() -> None:
    plain, mirrored = Layout.parse("S(1) R"), Layout.parse("S(1)~mirrored R")
    assert plain != mirrored and mirrored.special == (Mirrored(1),) and not mirrored.has_halo
    assert (
        Mirrored(1) != Shard(1)
        and Shard(1) != Mirrored(1)
        and len({Mirrored(1), Shard(1), Halo(1, 0, 0), Mirrored(2)}) == 4
    )
    assert local_shape((3, 16), plain, (4, 1)) == local_shape((3, 16), mirrored, (4, 1)) == (3, 4)
    assert mirrored.is_mirrored(1) and not mirrored.is_mirrored(0) and not plain.is_mirrored(1)
    assert (
        mirrored.splits_like(Layout.parse("S(1)~mirrored P"))
        and not mirrored.splits_like(plain)
        and not plain.splits_like(mirrored)
    )
    assert pickle.loads(pickle.dumps(Mirrored(1))) == Mirrored(1)


@pytest.mark.parametrize(
    ("text", "size", "fits"),
    [
        ("S(0)~mirrored R", 16, True),
        ("S(0)~mirrored R", 8, True),
        ("S(0)~mirrored R", 12, False),
        ("S(0)~mirrored R", 15, False),
        ("S(0)~mirrored S(0)", 32, False),
        ("S(0)~mirrored S(0)~mirrored", 32, False),
        ("S(0)~mirrored S(1)", 16, True),
    ],
)
def test_mirrored_shards_need_one_splitting_axis_and_an_even_length(
    text: str, size: int, fits: bool
) -> None:
    assert Layout.parse(text).fits((size, 2), (4, 2)) == fits


@pytest.mark.parametrize(
    ("text", "size", "fits"),
    [
        ("S(0)~2~1 R", 8, True),
        ("S(0)~3~0 R", 8, False),
        ("S(0)~1~1 S(0)~1~1", 16, False),
        ("S(0)~1~1 R", 7, True),
        ("S(0)~2~0 R", 7, False),
    ],
)
def test_a_halo_needs_one_splitting_axis_and_shards_at_least_as_long_as_the_halo(
    text: str, size: int, fits: bool
) -> None:
    assert Layout.parse(text).fits((size, 1), (4, 2)) == fits


@pytest.mark.parametrize(
    "text",
    [
        "S",
        "S(-1)",
        "S(x)",
        "r",
        "Q",
        "S(0",
        "R,R",
        "P()",
        "S(0)#",
        "S(0)#a",
        "S(0)~1",
        "S(0)~1~1~low",
        "S(0)~1~1#0",
    ],
)
def test_an_invalid_layout_is_refused_with_the_token_and_an_example(text: str) -> None:
    with pytest.raises(LayoutError, match=r"cannot read '.+' in layout(.|\n)*S\(0\) R"):
        Layout.parse(f"R {text}")


@pytest.mark.parametrize("order", [(0,), (0, 0), (1, 2), (0, 1, 2)])
def test_an_order_that_is_not_a_permutation_of_the_axes_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="not a permutation of 2 axes"):
        Layout((Shard(0), Shard(0)), order)


def test_a_new_axis_that_splits_a_dim_becomes_the_innermost() -> None:
    layout = Layout.parse("R S(0)").with_placement(0, Shard(0))
    assert str(layout) == "S(0)#1 S(0)#0"
    assert layout.splitters(0) == (1, 0)
    assert layout.is_innermost(0) and not layout.is_innermost(1)
    assert not Layout.parse("R P").is_innermost(0)
    assert str(layout.with_placement(1, REPLICATE)) == "S(0) R"


def test_a_layout_knows_if_it_is_replicated_or_a_partial_sum() -> None:
    assert Layout.replicated(2) == Layout.parse("R R") and Layout.replicated(2).is_replicated
    assert not Layout.parse("R S(0)").is_replicated and not Layout.parse("P R").is_replicated
    assert Layout.parse("P(max) R").has_partial and not Layout.parse("R S(0)").has_partial


@pytest.mark.parametrize(
    ("text", "divides", "fits"),
    [
        ("S(0) R", True, True),
        ("S(0) S(0)", True, True),
        ("R S(0)", True, True),
        ("S(1) R", False, True),  # 5 in two parts: 3 and 2
        ("R S(1)", False, False),  # 5 in four parts: 2, 2, 1 and 0
        ("S(1) S(1)", False, False),
        ("S(1) S(0)", False, True),
        ("S(2) R", False, False),  # the dim does not exist
        ("R P", True, True),
    ],
)
def test_a_layout_divides_or_fits_a_shape_on_a_mesh(text: str, divides: bool, fits: bool) -> None:
    layout = Layout.parse(text)
    assert layout.divides((8, 5), (2, 4)) is divides
    assert layout.fits((8, 5), (2, 4)) is fits


@given(size=st.integers(1, 40), parts=st.integers(1, 9))
def test_one_axis_splits_a_dim_as_torch_chunk_and_needs_a_part_for_every_rank(
    size: int, parts: int
) -> None:
    layout = Layout((Shard(0),))
    lengths = [local_shape((size,), layout, (parts,), (c,))[0] for c in range(parts)]
    chunks = [len(c) for c in torch.arange(size).chunk(parts)]
    assert lengths == chunks + [0] * (parts - len(chunks))
    assert layout.fits((size,), (parts,)) is (min(lengths) > 0)
    assert layout.divides((size,), (parts,)) is (len(set(lengths)) == 1)


@given(
    st.integers(1, 30),
    st.permutations([0, 1, 2]),
    st.sampled_from([(2, 3, 2), (4, 1, 2), (3, 3, 1)]),
)
def test_the_shards_of_all_ranks_cover_a_dim_once_in_the_order_of_the_axes(
    size: int, order: list[int], mesh_shape: tuple[int, ...]
) -> None:
    layout = Layout((Shard(0),) * 3, order)
    covered: list[int] = []
    # ranks ordered by the splitting axes, outermost first, hold consecutive parts
    for position in itertools.product(*(range(mesh_shape[axis]) for axis in order)):
        coordinate = [position[order.index(axis)] for axis in range(3)]
        start, length = local_range(size, layout, 0, mesh_shape, coordinate)
        covered += range(start, start + length)
    assert covered == list(range(size))


def test_the_first_rank_has_the_largest_shard_and_replicas_are_full() -> None:
    layout = Layout.parse("S(1) R S(0)#1 S(0)#0")
    mesh_shape, shape = (2, 3, 2, 2), (8, 5, 3)
    assert local_shape(shape, layout, mesh_shape) == (2, 3, 3)
    assert local_shape(shape, layout, mesh_shape, (1, 2, 1, 1)) == (2, 2, 3)
    every = [
        local_shape(shape, layout, mesh_shape, c)
        for c in itertools.product(*map(range, mesh_shape))
    ]
    assert max(map(math.prod, every)) == math.prod(local_shape(shape, layout, mesh_shape))


def test_a_strategy_prints_operands_and_results() -> None:
    strategy = Strategy((Layout.parse("S(0) R"), Layout.parse("R R")), (Layout.parse("S(0) P"),))
    assert str(strategy) == "S(0) R, R R -> S(0) P"


@pytest.mark.parametrize(
    "text", ["S(0)#7", "S(0)#0 S(0)", "S(0)#1 S(0)#1", "S(0)#1 S(0)#2", "S(1)#1 S(0)#0"]
)
def test_an_invalid_order_is_refused(text: str) -> None:
    with pytest.raises(
        LayoutError, match=r"does not specify the order of the axes that split dim \d"
    ):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("a", "b", "alike"),
    [
        ("S(0) P(sum)", "S(0) R", True),
        ("S(0) R", "R R", False),
        ("S(0) S(1)", "S(1) S(0)", False),
        ("S(0)#0 S(0)#1", "S(0)#1 S(0)#0", False),
    ],
)
def test_layouts_split_alike_if_each_rank_has_the_same_position(
    a: str, b: str, alike: bool
) -> None:
    assert (
        Layout.parse(a).splits_like(Layout.parse(b))
        == Layout.parse(b).splits_like(Layout.parse(a))
        == alike
    )
