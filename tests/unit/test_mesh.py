"""Meshes: axes, ranks, links, and invalid meshes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.core.mesh import Mesh, MeshAxis
from autopar.errors import MeshError

MESHES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(
    lambda sizes: Mesh({f"a{i}": n for i, n in enumerate(sizes)})
)


@given(MESHES)
def test_a_mesh_round_trips_through_text_and_json(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh
    assert Mesh.from_json(json.loads(json.dumps(mesh.to_json(), sort_keys=True))) == mesh


@given(MESHES)
def test_ranks_are_row_major_and_every_rank_is_in_one_group_of_each_axis(mesh: Mesh) -> None:
    places = list(itertools.product(*map(range, mesh.shape)))
    assert [mesh.coordinate(rank) for rank in range(mesh.num_devices)] == places
    for axis, size in enumerate(mesh.shape):
        groups = mesh.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(mesh.num_devices))
        for group in groups:
            assert [mesh.coordinate(rank)[axis] for rank in group] == list(range(size))
            assert len({(*c[:axis], *c[axis + 1 :]) for c in map(mesh.coordinate, group)}) == 1
            assert all(b - a == mesh.stride(axis) for a, b in itertools.pairwise(group))


def test_a_mesh_is_built_from_a_count_from_names_or_from_axes() -> None:
    assert Mesh(4).names == ("gpu",) and Mesh(4).shape == (4,)
    named = Mesh({"node": 2, "gpu": 4})
    assert named == Mesh(node=2, gpu=4) and named.names == ("node", "gpu")
    assert Mesh(a=2, b=2, devices_per_node=4) == Mesh({"a": 2, "b": 2}, devices_per_node=4)
    assert named == Mesh([MeshAxis("node", 2), MeshAxis("gpu", 4)]) == Mesh.parse(" node=2, gpu=4")
    assert (named.names, named.shape, named.num_devices, str(named)) == (
        ("node", "gpu"),
        (2, 4),
        8,
        "node=2,gpu=4",
    )
    assert Mesh.parse("8") == Mesh(8)
    assert Mesh.parse("2x4") == Mesh.parse(" 2 x 4") == Mesh({"node": 2, "gpu": 4})


@pytest.mark.parametrize(
    ("mesh", "links"),
    [
        (Mesh(8), ["intra"]),
        (Mesh(16), ["inter"]),  # two nodes of eight
        (Mesh({"node": 2, "gpu": 4}), ["inter", "intra"]),
        (Mesh({"data": 2, "tensor": 4}, devices_per_node=8), ["intra", "intra"]),
        (Mesh({"data": 2, "tensor": 4}, devices_per_node=4), ["inter", "intra"]),
        (Mesh({"data": 2, "tensor": 4}, devices_per_node=2), ["inter", "inter"]),
        (
            Mesh({"pipe": 2, "data": 2, "tensor": 2}, devices_per_node=4),
            ["inter", "intra", "intra"],
        ),
        (
            Mesh({"data": 2, "tensor": 3}, devices_per_node=4),
            ["inter", "inter"],
        ),  # three do not divide four
        (Mesh({"node": 2, "gpu": 4}, links={"gpu": "inter", "node": "intra"}), ["intra", "inter"]),
    ],
)
def test_the_link_of_an_axis_is_given_or_derived_from_its_stride(
    mesh: Mesh, links: list[str]
) -> None:
    assert [mesh.link(axis) for axis in range(len(mesh.axes))] == links


def test_links_and_devices_per_node_round_trip_and_distinguish_meshes() -> None:
    mesh = Mesh({"b": 2, "a": 4}, devices_per_node=2, links={"a": "inter"})
    assert Mesh.from_json(json.loads(json.dumps(mesh.to_json(), sort_keys=True))) == mesh
    assert mesh != Mesh({"b": 2, "a": 4}, devices_per_node=2) and mesh != Mesh(
        {"b": 2, "a": 4}, links={"a": "inter"}
    )
    assert Mesh({"a": 2, "b": 2}) != Mesh({"b": 2, "a": 2})


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Mesh(), "no axes given"),
        (lambda: Mesh(None), "no axes given"),
        (lambda: Mesh({"node": 2}, gpu=4), "given twice, also as gpu"),
        (lambda: Mesh(node=2, device_per_node=4), "not an option of a mesh"),
        (lambda: Mesh({"node": 2}, link={"node": "intra"}), "not an option"),  # type: ignore[arg-type]
        (lambda: Mesh(gpu=0), "has size 0"),
        (lambda: Mesh({}), "at least one axis"),
        (lambda: Mesh([]), "at least one axis"),
        (lambda: Mesh(0), "has size 0"),
        (lambda: Mesh(-2), "has size -2"),
        (lambda: Mesh({"a": 2, "b": 0}), "axis 'b' has size 0"),
        (lambda: Mesh({"a": 2.0}), r"has size 2\.0"),  # type: ignore[dict-item]
        (lambda: Mesh([MeshAxis("a", 2), MeshAxis("a", 2)]), "names repeat"),
        (lambda: Mesh({"": 2}), "has no name"),
        (lambda: Mesh({"a,b": 2}), "'a,b'"),
        (lambda: Mesh(4, devices_per_node=0), "devices_per_node must be a positive number"),
        (lambda: Mesh({"a": 2}, links={"b": "intra"}), "'b': 'intra' is unknown"),
        (lambda: Mesh({"a": 2}, links={"a": "nvlink"}), "'a': 'nvlink' is unknown"),
    ],
)
def test_an_invalid_mesh_is_refused_with_the_reason(
    make: Callable[[], Mesh], complaint: str
) -> None:
    with pytest.raises(MeshError, match=complaint):
        make()


@pytest.mark.parametrize(
    "text",
    ["", "x", "2,3", "a=", "a=x", "a=2,", "a=2=3", "a=2,3", "1.5", "2x", "x2", "2x2x2", "2xa"],
)
def test_text_that_is_not_a_mesh_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(MeshError, match=r"cannot read mesh(.|\n)*node=4,gpu=8"):
        Mesh.parse(text)


def test_text_that_names_an_axis_twice_or_a_size_below_one_is_refused() -> None:
    with pytest.raises(MeshError, match="names an axis twice"):
        Mesh.parse("a=2,a=4")
    with pytest.raises(MeshError, match="has size 0"):
        Mesh.parse("a=0")
