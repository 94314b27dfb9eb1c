"""Attention as one op for every device.

A capture on the cpu holds the cpu's own flash attention; `autopar.ops.attention` stands for it wherever the graph runs.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar import ops
from autopar.capture.graphs import aten, calls, shape_of

_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def replace_attention(graph: fx.Graph) -> None:
    """Both directions; results are taken by ``getitem`` as before."""
    for node in calls(graph, _FORWARD):
        query, key, value = node.args[:3]
        is_causal = (*node.args, 0.0, False)[4]
        _settle_sums(node)
        _become(node, ops.attention, (query, key, value), is_causal)
    for node in calls(graph, _BACKWARD):
        *tensors, _, is_causal = node.args
        _become(node, ops.attention_backward, tuple(tensors), is_causal)


def _settle_sums(node: fx.Node) -> None:
    """Say of the logsumexp in which dtype kernels give it: torch 2.11 takes that of float64 for float32."""
    out, sums = node.meta["val"]
    dtype = torch.promote_types(out.dtype, torch.float32)
    if sums.dtype == dtype:
        return
    node.meta["val"] = (out, sums.to(dtype))
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == 1:
            user.meta["val"] = node.meta["val"][1]


def _become(node: fx.Node, target: object, tensors: tuple[fx.Node, ...], is_causal: bool) -> None:
    query = tensors[0] if node.target is _FORWARD else tensors[1]
    scale = node.kwargs.get("scale")
    scale = shape_of(query)[-1] ** -0.5 if scale is None else scale
    node.args, node.target = (*tensors, node.kwargs.get("attn_mask"), bool(is_causal), scale), target
    node.kwargs = {}
