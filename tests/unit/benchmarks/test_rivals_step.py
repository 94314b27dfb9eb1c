"""How `benchmarks.rivals_step` counts memory, and where it cuts torch's pipelines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.rivals.distributed import COUNTERPARTS, METHODS, StorageBytes, _cuts


def test_the_bytes_of_storages_are_counted_while_they_live() -> None:
    given = torch.ones(8)
    with StorageBytes([given]) as memory:
        held = torch.zeros(16)
        given.view(2, 4)  # in the memory of a tensor that does not count
        torch.empty(1024, device="meta")
        assert memory.live_bytes == 64
        made = held + 1
        del made
        assert (memory.live_bytes, memory.peak_bytes) == (64, 128)


def test_a_storage_counts_with_the_size_that_it_has_now() -> None:
    with StorageBytes() as memory:
        held = torch.zeros(16)
        held.untyped_storage().resize_(0)  # as FSDP2 frees gathered parameters
        assert memory.live_bytes == 0
        held.untyped_storage().resize_(32)
        assert memory.live_bytes == 32


@pytest.mark.parametrize(("num", "cuts"), [(1, []), (2, [4]), (4, [2, 4, 5])])
def test_a_stage_has_equally_many_layers_of_which_the_head_counts_as_one(
    num: int, cuts: list[int]
) -> None:
    layers = nn.ModuleList(nn.Identity() for _ in range(6))
    assert _cuts(SimpleNamespace(model=SimpleNamespace(layers=layers)), num) == cuts


def test_every_method_of_autopar_has_a_counterpart_that_is_measured() -> None:
    assert {*COUNTERPARTS, *COUNTERPARTS.values()} == {*METHODS}
