"""Splitting and joining are inverse, and keep the order that layouts define."""

from __future__ import annotations

import pytest
import torch

from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.errors import LayoutError, VerificationError
from autopar.program.splitting import join, split

MESH = Mesh({"a": 2, "b": 3})


@pytest.mark.parametrize(
    "layout", ["R R", "S(0) R", "S(0) S(1)", "S(1) S(1)", "S(1)#1 S(1)#0", "R S(2)"]
)
@pytest.mark.parametrize("size", [6, 7])
def test_join_undoes_split_also_where_parts_are_uneven(layout: str, size: int) -> None:
    full = torch.randn(4, 3 * size * 2)
    view = (4, 3 * size, 2)
    parts = split(full, Layout.parse(layout), MESH, view)
    assert len(parts) == 6
    assert torch.equal(join(parts, Layout.parse(layout), MESH, full.shape), full)


def test_the_outermost_splitter_takes_the_large_blocks() -> None:
    parts = split(torch.arange(12), Layout.parse("S(0)#1 S(0)#0"), MESH)
    assert [part.tolist() for part in parts[:4]] == [[0, 1], [4, 5], [8, 9], [2, 3]]


def test_joining_reduces_partial_sums() -> None:
    parts = [torch.full((2,), float(rank)) for rank in range(6)]
    assert join(parts, Layout.parse("P P"), MESH, (2,)).tolist() == [15, 15]
    assert join(parts, Layout.parse("P(max) P(min)"), MESH, (2,)).tolist() == [3, 3]


def test_replicas_that_differ_are_an_error_unless_within_the_tolerance() -> None:
    parts = [torch.ones(2) for _ in range(6)]
    parts[4] = parts[4] + 1e-6
    with pytest.raises(VerificationError, match="rank 3 and rank 4"):
        join(parts, Layout.parse("R R"), MESH, (2,))
    assert join(parts, Layout.parse("R R"), MESH, (2,), tolerance=1e-5).tolist() == [1, 1]


def test_equal_not_a_numbers_are_equal_replicas() -> None:
    assert join(
        [torch.tensor(float("nan")) for _ in range(6)], Layout.parse("R R"), MESH, ()
    ).isnan()


def test_a_view_of_another_size_and_partial_sums_cannot_be_split() -> None:
    with pytest.raises(LayoutError, match="cannot be viewed as"):
        split(torch.zeros(4), Layout.parse("R R"), MESH, (5,))
    with pytest.raises(LayoutError, match="cannot be sharded"):
        split(torch.zeros(4), Layout.parse("P R"), MESH)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_replicas_that_are_not_finite_are_compared(value: float) -> None:
    mesh, layout = Mesh({"a": 2}), Layout.replicated(1)
    x = torch.tensor([1.0, value])
    assert join([x, x.clone()], layout, mesh, (2,), 1e-6).isfinite().tolist() == [True, False]
    with pytest.raises(VerificationError, match="replicas on mesh axis 'a' differ"):
        join([x, torch.tensor([2.0, value])], layout, mesh, (2,), 1e-6)
