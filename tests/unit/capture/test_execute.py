"""Running a normal-form graph: views of values that another op has laid out differently."""

from __future__ import annotations

import torch
from torch import fx

from autopar.capture.execute import propagate

aten = torch.ops.aten


def viewed(stride: tuple[int, ...]) -> list[object]:
    """The ops of a graph that views a [2, 3] placeholder of these strides as [6], after propagation."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty_strided((2, 3), stride, device="meta")
    graph.output((graph.call_function(aten.view.default, (x, [6])),))
    for node in graph.nodes:
        node.meta |= {"phase": "forward", "module": "here", "source": ""}
    propagate(graph)
    graph.lint()
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert calls[-1].meta["val"].shape == (6,) and all(node.meta["module"] == "here" for node in calls)
    return [node.target for node in calls]


def test_a_view_that_strides_do_not_allow_reads_a_copy() -> None:
    assert viewed((1, 2)) == [aten.clone.default, aten.view.default]


def test_a_view_that_strides_allow_reads_the_value() -> None:
    assert viewed((3, 1)) == [aten.view.default]
