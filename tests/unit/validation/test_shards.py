"""The certificate's own arithmetic of layouts against the planner's."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from autopar.core.layout import Layout, local_shape
from autopar.core.layout_graph import all_layouts, local_bytes, neighbours
from autopar.core.placements import Halo, Mirrored
from autopar.validation.shards import apply_collective, held_bytes, local_lengths

CASES = [
    ((8, 4), (2, 2)),
    ((7, 6), (2,)),
    ((8, 12, 3), (2, 3)),
    ((16, 8), (2, 2, 2)),
    ((6, 4), (2, 1)),
]
PARTIAL = {1: ["P", "P(max)"], 2: ["P R", "P P", "S(0) P", "P(max) S(1)"], 3: ["P P R", "S(1) P P"]}


def layouts(shape: tuple[int, ...], mesh: tuple[int, ...]) -> list[Layout]:
    return [
        *all_layouts(shape, mesh),
        *(x for x in map(Layout.parse, PARTIAL[len(mesh)]) if x.fits(shape, mesh)),
    ]


@pytest.mark.parametrize(("shape", "mesh"), CASES, ids=str)
def test_a_device_holds_what_the_planner_says(
    shape: tuple[int, ...], mesh: tuple[int, ...]
) -> None:
    found = layouts(shape, mesh)
    assert len(found) > 3
    for layout in found:
        assert local_lengths(shape, layout, mesh) == local_shape(shape, layout, mesh)
        assert held_bytes(shape, torch.bfloat16, layout, mesh) == local_bytes(
            shape, torch.bfloat16, layout, mesh
        )
    halo = Layout([Halo(0, 1, 2), *Layout.replicated(len(mesh) - 1).placements])
    assert local_lengths(shape, halo, mesh) == local_shape(shape, halo, mesh)


@pytest.mark.parametrize(("shape", "mesh"), CASES, ids=str)
def test_a_collective_leads_where_the_planner_says_and_a_changed_one_does_not(
    shape: tuple[int, ...], mesh: tuple[int, ...]
) -> None:
    num_changed = 0
    for layout in layouts(shape, mesh):
        special = (
            (Halo(0, 1, 1), Mirrored(0))
            if layout.placements[0] == Layout.parse("S(0)").placements[0]
            else ()
        )
        steps = neighbours(shape, torch.float32, layout, mesh, special=special)
        known = {(c.kind, c.axis, c.dim, c.to_dim, c.reduce_op) for c, _ in steps}
        for c, after in steps:
            assert apply_collective(layout, c, after) == after
            for axis, dim, to_dim, op in itertools.product(
                range(len(mesh)), (-1, 0, 1), (-1, 0, 1), ("", "sum", "max")
            ):
                other = replace(c, axis=axis, dim=dim, to_dim=to_dim, reduce_op=op)
                if (c.kind, axis, dim, to_dim, op) not in known and mesh[axis] > 1:
                    num_changed += 1
                    led = apply_collective(layout, other, after)
                    assert led is None or not led.fits(shape, mesh), f"{layout} {other}"
    assert num_changed > 100
