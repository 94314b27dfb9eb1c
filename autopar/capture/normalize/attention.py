"""Attention as one op for every device, and the weights of gated experts with a dim of their own
for gate and up.

A capture on the CPU contains the CPU's flash attention; `autopar.ops.attention` replaces it, and
runs on any device.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar import ops
from autopar.capture.graphs import aten, calls, shape_of, sweep

_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def replace_attention(graph: fx.Graph) -> None:
    """Replace attention and its backward; ``getitem`` nodes take the results as before."""
    for node in calls(graph, _FORWARD):
        query, key, value = node.args[:3]
        is_causal = (*node.args, 0.0, False)[4]
        _settle_sums(node)
        _become(node, ops.attention, (query, key, value), is_causal)
    for node in calls(graph, _BACKWARD):
        *tensors, _, is_causal = node.args
        _become(node, ops.attention_backward, tuple(tensors), is_causal)


def _settle_sums(node: fx.Node) -> None:
    """Set the dtype of the logsumexp to the one that kernels return: torch 2.11 reports float32 for
    float64."""
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
    node.args, node.target = (
        (*tensors, node.kwargs.get("attn_mask"), bool(is_causal), scale),
        target,
    )
    node.kwargs = {}


# --------------------------------------------------------------------------------------------------
# Weights of gated experts get a dim of their own for gate and up.
#
# A gated expert's two linears are one weight ``[e, 2 f, h]``, and sharding ``2 f`` would cut across
# the two. So the parameter is viewed as `autopar.ops.experts` reads it, ``[e, 2, f, h]``, like
# fused projections (`autopar.capture.normalize.linears`).

_UP = 2  # the result of `experts_backward` that is up's gradient


def see_experts(graph: fx.Graph) -> None:
    """Give every weight that only experts read, through one view, the shape of the view, and its
    gradient too."""
    for node in calls(graph, ops.experts):
        seen = node.args[3]
        if seen.target is not aten.view.default or seen.args[0].op != "placeholder":
            continue
        weight, shape = seen.args[0], shape_of(seen)
        views = list(weight.users)
        if all(_is_read_as(view, shape) for view in views):
            for view in views:
                _see_gradients(view)
                view.replace_all_uses_with(weight)
            weight.meta["val"] = weight.meta["val"].new_empty(shape)
    sweep(graph)


def _is_read_as(view: fx.Node, shape: tuple[int, ...]) -> bool:
    """Whether `view` has `shape` and only experts read it, and only the output reads its
    gradients."""
    if view.target is not aten.view.default or shape_of(view) != shape:
        return False
    readers = all(user.target in (ops.experts, ops.experts_backward) for user in view.users)
    return readers and all(user.op == "output" for back in _gradients(view) for user in back.users)


def _gradients(view: fx.Node) -> list[fx.Node]:
    """Return the views that bring the gradients of `view` back to the weight's shape."""
    made = [user for user in view.users if user.target is ops.experts_backward]
    parts = [
        part
        for node in made
        for part in node.users
        if part.target is operator.getitem and part.args[1] == _UP
    ]
    return [user for part in parts for user in part.users]


def _see_gradients(view: fx.Node) -> None:
    for back in _gradients(view):
        back.replace_all_uses_with(back.args[0])
