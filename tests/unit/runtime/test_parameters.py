"""Translation of storage layouts over the dims of a view into placements of the stored shape."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.core.stored_placements import (
    StoredPlacements,
    storable,
    stored_dims,
    stored_placements,
)
from autopar.errors import LayoutError, MeshError
from autopar.runtime.device_mesh import device_mesh


@pytest.mark.parametrize(
    ("shape", "view", "expected"),
    [
        ((), (), ()),
        ((4, 6), (4, 6), ((0,), (1,))),
        ((4, 24), (4, 3, 8), ((0,), (1, 2))),
        ((24, 4), (3, 2, 4, 4), ((0, 1, 2), (3,))),
        ((1, 6), (1, 2, 3), ((0,), (1, 2))),
        ((6, 4), (6, 1, 4), ((0,), (1, 2))),
        ((6, 4), (6, 4, 1), ((0,), (1, 2))),
    ],
)
def test_each_stored_dim_corresponds_to_a_group_of_view_dims(
    shape: tuple[int, ...], view: tuple[int, ...], expected: tuple[tuple[int, ...], ...]
) -> None:
    groups = stored_dims(shape, view)
    assert groups == expected


@pytest.mark.parametrize(
    ("shape", "view"), [((4, 6), (24,)), ((4, 6), (2, 12)), ((4,), (4, 2)), ((4, 6), (6, 4))]
)
def test_a_view_that_mixes_stored_dims_is_refused(
    shape: tuple[int, ...], view: tuple[int, ...]
) -> None:
    with pytest.raises(LayoutError, match="cannot be viewed as"):
        stored_dims(shape, view)


@pytest.mark.parametrize(
    ("shape", "view", "layout", "expected"),
    [
        ((8, 8), (8, 8), "S(0) S(1)", (Shard(0), Shard(1))),
        ((8, 8), (8, 8), "S(0) S(0)", (Shard(0), Shard(0))),
        ((8, 8), (8, 8), "S(0)#1 S(0)#0", (_StridedShard(0, split_factor=4), Shard(0))),
        ((8, 24), (8, 3, 8), "S(0) S(2)", (Shard(0), _StridedShard(1, split_factor=3))),
        ((8, 24), (8, 4, 6), "R S(1)", (Replicate(), Shard(1))),
        ((24, 8), (3, 4, 2, 8), "R S(1)", (Replicate(), _StridedShard(0, split_factor=3))),
        ((24, 8), (3, 8, 8), "S(2) S(1)", (Shard(1), _StridedShard(0, split_factor=3))),
    ],
)
def test_placements_describe_the_stored_shards(
    shape: tuple[int, ...], view: tuple[int, ...], layout: str, expected: tuple[object, ...]
) -> None:
    assert stored_placements(shape, view, Layout.parse(layout), (2, 4)) == StoredPlacements(
        ((0,), (1,)), expected
    )


@pytest.mark.parametrize(
    ("layout", "axes", "expected"),
    [
        ("S(2) S(2) R", ((0, 1), (2,)), (_StridedShard(1, split_factor=3), Replicate())),
        ("S(2) S(0) S(2)", ((0, 2), (1,)), (_StridedShard(1, split_factor=3), Shard(0))),
        ("S(0) S(2) S(2)", ((0,), (1, 2)), (Shard(0), _StridedShard(1, split_factor=3))),
        ("S(2) S(2) S(2)", ((0, 1, 2),), (_StridedShard(1, split_factor=3),)),
        (
            "S(0) S(2)#0 S(0)",
            ((0,), (1,), (2,)),
            (Shard(0), _StridedShard(1, split_factor=3), Shard(0)),
        ),
    ],
)
def test_axes_that_split_heads_together_are_one_dim_of_the_mesh_of_the_dtensor(
    layout: str, axes: tuple[tuple[int, ...], ...], expected: tuple[object, ...]
) -> None:
    assert stored_placements(
        (8, 48), (8, 3, 16), Layout.parse(layout), (2, 2, 2)
    ) == StoredPlacements(axes, expected)


def test_an_axis_of_size_1_replicates() -> None:
    at = stored_placements((8, 24), (8, 3, 8), Layout.parse("S(2) S(2)"), (1, 2))
    assert at == StoredPlacements(((0,), (1,)), (Replicate(), _StridedShard(1, split_factor=3)))


@pytest.mark.parametrize("layout", ["S(2)#1 S(2)#0", "S(1) S(2)"])
def test_a_fused_dim_split_out_of_mesh_order_or_in_two_places_cannot_be_stored(layout: str) -> None:
    assert not storable((8, 32), (8, 4, 8), Layout.parse(layout), (2, 2))
    with pytest.raises(LayoutError, match="torch has no placements for"):
        stored_placements((8, 32), (8, 4, 8), Layout.parse(layout), (2, 2))


def test_heads_not_divisible_by_the_joined_axes_cannot_be_stored() -> None:
    assert storable((8, 24), (8, 3, 8), Layout.parse("S(2) S(2)"), (2, 2))
    assert not storable((8, 30), (8, 3, 10), Layout.parse("S(2) S(2)"), (2, 2))


def test_an_uneven_shard_can_be_stored_of_a_plain_dim_but_not_of_a_view_dim() -> None:
    assert not storable((8, 21), (8, 3, 7), Layout.parse("R S(2)"), (2, 2))
    assert storable((7, 8), (7, 8), Layout.parse("R S(0)"), (2, 2))


def test_a_mesh_with_several_devices_without_a_launcher_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(MeshError, match=r"needs 4 processes.*not initialized") as caught:
        device_mesh(Mesh({"data": 2, "tensor": 2}))
    assert "autopar run -n 4" in str(caught.value)
