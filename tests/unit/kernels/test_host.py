"""Copies to and from the host in a graph that is bound to a GPU. The host waits for copies that it
reads."""

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


def bound_nodes(started: bool, reader: object, device: str) -> dict[object, fx.Node]:
    """Return the nodes of a bound graph that stores a tensor and reads the copy, by target."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    if started:
        copy = graph.call_function(
            steps.finish, (graph.call_function(steps.start, (x, "store")), "store")
        )
    else:
        copy = graph.call_function(steps.store, (x,))
    result = graph.call_function(
        reader, (copy,), {"dtype": torch.bfloat16} if reader is _cast else {}
    )
    result.meta["on_host"] = reader is _cast
    graph.output((result,))
    return {
        node.target: node for node in bind(fx.GraphModule({}, graph), GROUPS, device).graph.nodes
    }


@pytest.mark.parametrize("started", [False, True])
def test_store_is_synchronized_for_readers_on_the_host_but_not_for_fetches(started: bool) -> None:
    target = host.finish_store if started else host.store
    assert bound_nodes(started, _cast, "cuda")[target].args[1:] == ("cuda", True)
    assert bound_nodes(started, steps.fetch, "cuda")[target].args[1:] == ("cuda", False)


def test_casts_on_the_host_use_pinned_memory_only_for_gpus() -> None:
    assert bound_nodes(False, _cast, "cuda")[_cast].kwargs["pin_memory"]
    assert "pin_memory" not in bound_nodes(False, _cast, "cpu")[_cast].kwargs


def test_stored_and_fetched_tensor_equals_the_original() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64).t().conj()
    copy = host.store(x)
    assert host.is_on_host(copy) and not host.is_on_host(host.fetch(copy))
    assert torch.equal(host.fetch(copy), x) and not copy.is_conj()
