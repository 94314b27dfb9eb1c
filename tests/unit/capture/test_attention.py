"""The logsumexp of attention has the dtype that kernels return, whatever the fake tensors of torch
say."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from autopar.capture.normalize.composites import replace_attention

DTYPES = {torch.float64: torch.float64, torch.float32: torch.float32, torch.bfloat16: torch.float32}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_logsumexp_of_attention_has_the_dtype_of_the_kernel(dtype: torch.dtype) -> None:
    graph, op = fx.Graph(), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    query = graph.placeholder("query")
    query.meta["val"] = torch.zeros(1, 2, 4, 8, dtype=dtype)
    node = graph.call_function(op, (query, query, query))
    node.meta["val"] = (
        torch.zeros(1, 2, 4, 8, dtype=dtype),
        torch.zeros(1, 4, 2),
    )  # torch 2.11 reports float32 for float64, too
    out, sums = (graph.call_function(operator.getitem, (node, place)) for place in (0, 1))
    out.meta["val"], sums.meta["val"] = node.meta["val"]
    graph.output((out, sums))
    replace_attention(graph)
    given = op(*[torch.zeros(1, 2, 4, 8, dtype=dtype)] * 3)
    assert [sums.meta["val"].dtype, node.meta["val"][1].dtype, given[1].dtype] == [
        DTYPES[dtype]
    ] * 3
    assert out.meta["val"].dtype == dtype
