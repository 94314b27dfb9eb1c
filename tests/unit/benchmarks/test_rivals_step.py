"""Memory counting and pipeline cuts of `benchmarks.rivals_step`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.rivals.distributed import COUNTERPARTS, METHODS, StorageBytes, _cuts


def test_bytes_of_storages_are_counted_during_their_lifetime() -> None:
    excluded = torch.ones(8)
    with StorageBytes([excluded]) as memory:
        tensor = torch.zeros(16)
        excluded.view(2, 4)  # a view of an excluded tensor
        torch.empty(1024, device="meta")
        assert memory.live_bytes == 64
        temporary = tensor + 1
        del temporary
        assert (memory.live_bytes, memory.peak_bytes) == (64, 128)


def test_resized_storage_counts_with_its_current_size() -> None:
    with StorageBytes() as memory:
        tensor = torch.zeros(16)
        tensor.untyped_storage().resize_(0)  # FSDP2 frees gathered parameters in this way
        assert memory.live_bytes == 0
        tensor.untyped_storage().resize_(32)
        assert memory.live_bytes == 32


@pytest.mark.parametrize(("num", "cuts"), [(1, []), (2, [4]), (4, [2, 4, 5])])
def test_stages_have_equal_numbers_of_layers_counting_the_head_as_one(
    num: int, cuts: list[int]
) -> None:
    layers = nn.ModuleList(nn.Identity() for _ in range(6))
    assert _cuts(SimpleNamespace(model=SimpleNamespace(layers=layers)), num) == cuts


def test_each_method_of_autopar_has_a_measured_counterpart() -> None:
    assert {*COUNTERPARTS, *COUNTERPARTS.values()} == {*METHODS}
