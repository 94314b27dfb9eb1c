"""Copies to and from the host in a graph that is bound for a GPU: what the host reads next it
waits for."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.kernels import collectives as steps
from autopar.kernels import host
from autopar.kernels.bind import bind
from autopar.kernels.collectives import AxisGroup

_cast = torch.ops.aten._to_copy.default
GROUPS = (AxisGroup("", 1, 0),)


def bound(started: bool, reader: object, device: str) -> dict[object, fx.Node]:
    """A tensor is stored, and what is stored read; by target."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    if started:
        stored = graph.call_function(
            steps.finish, (graph.call_function(steps.start, (x, "store")), "store")
        )
    else:
        stored = graph.call_function(steps.store, (x,))
    read = graph.call_function(
        reader, (stored,), {"dtype": torch.bfloat16} if reader is _cast else {}
    )
    read.meta["on_host"] = reader is _cast
    graph.output((read,))
    return {
        node.target: node for node in bind(fx.GraphModule({}, graph), GROUPS, device).graph.nodes
    }


@pytest.mark.parametrize("started", [False, True])
def test_an_op_on_the_host_waits_for_what_is_stored_and_a_copy_back_does_not(started: bool) -> None:
    target = host.finish_store if started else host.store
    assert bound(started, _cast, "cuda")[target].args[1:] == ("cuda", True)
    assert bound(started, steps.fetch, "cuda")[target].args[1:] == ("cuda", False)


def test_what_is_cast_on_the_host_for_a_gpu_is_page_locked_and_nowhere_else() -> None:
    assert bound(False, _cast, "cuda")[_cast].kwargs["pin_memory"]
    assert "pin_memory" not in bound(False, _cast, "cpu")[_cast].kwargs


def test_what_is_stored_and_fetched_is_what_it_was_be_it_read_conjugated() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64).t().conj()
    stored = host.store(x)
    assert host.is_on_host(stored) and not host.is_on_host(host.fetch(stored))
    assert torch.equal(host.fetch(stored), x) and not stored.is_conj()
