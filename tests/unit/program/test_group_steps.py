"""Steps of virtual ranks have the values and the strides of steps on real processes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from autopar.core.placements import Halo
from autopar.kernels.bound_ops import FINISHES, STARTS, shard
from autopar.kernels.collectives import AxisGroup, bound_settings
from autopar.program.interpreter import step, with_halos

SHAPES = [(2, 1, 4, 4), (1, 1, 4, 2), (4, 2, 1, 2)]
ORDERS = list(itertools.permutations(range(4)))[::5]


def strided(shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """A tensor of that shape whose dims lie in memory in that order."""
    return torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(4)])


def strides(x: torch.Tensor) -> list[int]:
    """The strides of dims that have several elements; others are not used."""
    return [stride for stride, length in zip(x.stride(), x.shape, strict=True) if length > 1]


def strides_of_processes(
    kind: str, x: torch.Tensor, settings: tuple[Any, ...], size: int
) -> list[int]:
    """Of what a step on real processes returns, by a group without processes."""
    if kind == "slice":
        return strides(shard(x, settings[0], size, 0))
    bound = bound_settings(kind, (*settings, 0), None, AxisGroup("", size, 0))
    return strides(FINISHES[kind](STARTS[kind](x, *bound), *bound))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_strides_are_those_of_real_processes(
    shape: tuple[int, ...], order: tuple[int, ...], size: int
) -> None:
    parts = [strided(shape, order) for _ in range(size)]
    for dim in range(4):
        cases: list[tuple[str, tuple[Any, ...]]] = [
            ("all_gather", (dim,)),
            ("all_reduce", ("sum",)),
        ]
        if shape[dim] % 2 == 0:
            cases += [("slice", (dim,)), ("reduce_scatter", (dim, "sum")), ("swap", (dim,))]
            cases += [("all_to_all", (other, dim)) for other in range(4)]
        for kind, settings in cases:
            dims = [n for n in settings if n != "sum"]
            found = step(kind, parts, *(*dims, -1, -1)[:2], "sum")  # type: ignore[arg-type]
            wanted = strides_of_processes(kind, parts[0], settings, size)
            assert [strides(part) for part in found] == [wanted] * size, (kind, settings)
        around = Halo(dim, 1, 1, False)
        wanted = strides_of_processes("halo", parts[0], (dim, 1, 1, False), size)
        assert [strides(part) for part in with_halos(parts, around)] == [wanted] * size
