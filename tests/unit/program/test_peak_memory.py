"""Live bytes are counted per storage, from its first sight to its death, alike on real and fake
tensors."""

from __future__ import annotations

import pytest
import torch
from handwritten import program
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.program.abstract_executor import LiveBytes
from autopar.program.peak_memory import trace_peak


def chain() -> torch.Tensor:
    a = torch.ones(100)
    b = a + 1
    del a
    return b.view(10, 10)[:5] * 2


@pytest.mark.parametrize("fake", [False, True])
def test_a_storage_counts_until_it_is_freed_and_views_share_it(fake: bool) -> None:
    with FakeTensorMode() if fake else torch.no_grad(), LiveBytes() as live:
        result = chain()
        assert live.live_bytes == 200
        assert live.peak_bytes == 800
        live.reset_peak()
        assert live.peak_bytes == 200
        del result
        assert live.live_bytes == 0


def test_registered_tensors_count_once_however_often_they_are_named() -> None:
    x = torch.ones(8)
    with LiveBytes() as live:
        live.register([x, x.view(2, 4), None, 3])
        live.register([x])
        assert live.live_bytes == 32
        del x
        assert live.live_bytes == 0


def test_after_the_block_nothing_is_counted_any_more() -> None:
    with LiveBytes() as live:
        x = torch.ones(8)
    del x
    torch.ones(8)
    assert live.live_bytes == live.peak_bytes == 32


def test_the_prediction_is_in_its_parts_what_the_program_says() -> None:
    predicted = trace_peak(program().stages[0])
    parameters = 4 * (8 * 12 // 4 + 8 * 16 // 4 + 16 * 8 // 4 + 8 // 2 + 1)
    assert predicted.resident_bytes == parameters + 4 * (8 + 8) + 2 * 4 * 64
    gradients = parameters - 4
    loss_and_logits = 4 + 4 * 64
    assert predicted.final_bytes == gradients + loss_and_logits
    # hidden, diff and u are kept; the kept slice of x is a view of the batch.
    assert predicted.kept_bytes == loss_and_logits + 4 * (4 * 8 + 4 * 8 + 4 * 3 * 2)
    assert predicted.peak_bytes > predicted.resident_bytes + predicted.kept_bytes


def test_gathered_outputs_cost_what_they_are_large() -> None:
    whole, local = (
        trace_peak(program().stages[0], outputs="full"),
        trace_peak(program().stages[0], outputs="local"),
    )
    assert whole.final_bytes - local.final_bytes == 4 * 32
