"""A tensor that replaces a parameter must have the layout of the program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.core.layout import Layout
from autopar.errors import RuntimeStateError
from autopar.program.program import ProgramTensor
from autopar.runtime.parameters import Storage


@pytest.fixture(scope="module", autouse=True)
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (4, 1), mesh_dim_names=("a", "b"))


def storage(layout: str, shape: tuple[int, ...] = (8, 8)) -> Storage:
    return Storage.of(ProgramTensor("w", shape, shape, torch.float32, Layout.parse(layout)), mesh())


def held(local: tuple[int, ...], *placements: Any) -> DTensor:
    return DTensor.from_local(torch.zeros(local), mesh(), placements, run_check=False)


def test_a_tensor_with_the_stored_layout_is_accepted_for_any_placement_on_axes_of_size_1() -> None:
    assert storage("S(0) R").local(held((2, 8), Shard(0), Replicate())).shape == (2, 8)
    assert storage("S(0) R").local(held((2, 8), Shard(0), Shard(1))).shape == (2, 8)
    assert storage("R R").local(held((8, 8), Replicate(), Shard(0))).shape == (8, 8)
    assert storage("R R").local(torch.zeros(8, 8)).shape == (8, 8)


@pytest.mark.parametrize(
    ("layout", "given"),
    [
        ("S(0) R", lambda: held((8, 2), Shard(1), Replicate())),
        ("S(0) R", lambda: held((8, 8), Replicate(), Replicate())),
        ("S(0) R", lambda: held((4, 4), Shard(0), Replicate())),
        ("S(0) R", lambda: torch.zeros(8, 8)),
        ("S(0) R", lambda: torch.zeros(2, 8)),
        ("R R", lambda: torch.zeros(4, 16)),
        ("R R", lambda: held((8, 8), Partial(), Replicate())),
        ("R R", lambda: held((2, 8), Shard(0), Replicate())),
    ],
)
def test_a_tensor_with_another_layout_is_refused_with_a_remedy(layout: str, given: Any) -> None:
    with pytest.raises(
        RuntimeStateError,
        match=(r"'w' was replaced by[\s\S]*distribute_tensor[\s\S]*load_state_dict"),
    ):
        storage(layout).local(given())
