"""Replace attention and comparisons with an extreme by ops of `autopar.ops`, and view the weights
of gated experts with a separate dim for gate and up."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar import ops
from autopar.capture.graphs import aten, calls, emit, shape_of, sweep, view
from autopar.ops import extremes

# --------------------------------------------------------------------------------------------------
# Attention as one op for all devices.
#
# A capture on the CPU contains the flash attention op of the CPU. `autopar.ops.attention`, which
# runs on any device, replaces it.

_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def replace_attention(graph: fx.Graph) -> None:
    """Replace attention and its backward; the new ops have the same results."""
    for node in calls(graph, _FORWARD):
        query, key, value = node.args[:3]
        is_causal = (*node.args, 0.0, False)[4]
        _correct_sum_dtype(node)
        _replace_call(node, ops.attention, (query, key, value), is_causal)
    for node in calls(graph, _BACKWARD):
        *tensors, _, is_causal = node.args
        _replace_call(node, ops.attention_backward, tuple(tensors), is_causal)


def _correct_sum_dtype(node: fx.Node) -> None:
    """Set the dtype of the logsumexp to that of the kernels: fake tensors of torch 2.11 report
    float32 for float64."""
    out, sums = node.meta["val"]
    dtype = torch.promote_types(out.dtype, torch.float32)
    if sums.dtype == dtype:
        return
    node.meta["val"] = (out, sums.to(dtype))
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == 1:
            user.meta["val"] = node.meta["val"][1]


def _replace_call(
    node: fx.Node, target: object, tensors: tuple[fx.Node, ...], is_causal: bool
) -> None:
    query = tensors[0] if node.target is _FORWARD else tensors[1]
    scale = node.kwargs.get("scale")
    scale = shape_of(query)[-1] ** -0.5 if scale is None else scale
    node.args, node.target = (
        (*tensors, node.kwargs.get("attn_mask"), bool(is_causal), scale),
        target,
    )
    node.kwargs = {}


# --------------------------------------------------------------------------------------------------
# Weights of gated experts get a separate dim for gate and up.
#
# The gate and up projections of gated experts are one weight ``[e, 2 f, h]``. A shard of ``2 f``
# would contain different parts of the two. Therefore the parameter is viewed as ``[e, 2, f, h]``,
# the shape that `autopar.ops.experts` reads, like fused projections
# (`autopar.capture.normalize.linears`).

_UP = 2  # index of the gradient of up among the results of `experts_backward`


def see_experts(graph: fx.Graph) -> None:
    """Give every weight that only experts read through views of one shape, and its gradient, the
    shape of these views."""
    for node in calls(graph, ops.experts):
        weight_view = node.args[3]
        if weight_view.target is not aten.view.default or weight_view.args[0].op != "placeholder":
            continue
        weight, shape = weight_view.args[0], shape_of(weight_view)
        views = list(weight.users)
        if all(_is_read_as(view, shape) for view in views):
            for view in views:
                _view_gradients(view)
                view.replace_all_uses_with(weight)
            weight.meta["val"] = weight.meta["val"].new_empty(shape)
    sweep(graph)


def _is_read_as(view: fx.Node, shape: tuple[int, ...]) -> bool:
    """Return whether `view` has shape `shape`, only experts read it, and its gradients are only
    results of the graph."""
    if view.target is not aten.view.default or shape_of(view) != shape:
        return False
    readers = all(user.target in (ops.experts, ops.experts_backward) for user in view.users)
    return readers and all(user.op == "output" for back in _gradients(view) for user in back.users)


def _gradients(view: fx.Node) -> list[fx.Node]:
    """Return the views that convert the gradients of `view` to the shape of the weight."""
    gradient_nodes = [user for user in view.users if user.target is ops.experts_backward]
    parts = [
        part
        for node in gradient_nodes
        for part in node.users
        if part.target is operator.getitem and part.args[1] == _UP
    ]
    return [user for part in parts for user in part.users]


def _view_gradients(view: fx.Node) -> None:
    for back in _gradients(view):
        back.replace_all_uses_with(back.args[0])


# --------------------------------------------------------------------------------------------------
# Comparisons of a value with its extreme are replaced by `autopar.ops.extremes`, which reads the
# value once.
#
# Autograd passes the gradient of ``amax``, ``max()``, a median, an infinity norm and a scatter
# reduction to the elements that equal the result, and compares the elements in backward.

Made = tuple[Callable[..., Any], tuple[Any, ...]]
_SHAPED = (
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
_OF_DIMS = {aten.amax.default: "max", aten.amin.default: "min"}
_OF_ALL = {
    aten.max.default: "max",
    aten.min.default: "min",
    aten.median.default: "median",
    aten.nanmedian.default: "nanmedian",
}
_NORMS = (aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.norm.Scalar)


class _Extreme(NamedTuple):
    """A reduction of `source`, or of its absolute values, over `dims`; empty `dims` mean all."""

    source: fx.Node
    kind: str
    dims: tuple[int, ...]
    of_magnitudes: bool = False


def replace_extremes(graph: fx.Graph) -> None:
    """Replace comparisons with extremes, and backward ops whose kernels contain such
    comparisons."""
    for node in calls(graph, aten.eq.Tensor):
        pairs = [pair for pair in (node.args, node.args[::-1]) if _are_nodes(pair)]
        _replace(node, pairs, torch.bool)
    for node in calls(graph, *_GRADIENTS):
        replacement = _GRADIENTS[node.target](*node.args, **node.kwargs)
        if replacement is not None:
            _insert_op(node, replacement, node.meta["val"].dtype)
    sweep(graph)


def _are_nodes(pair: Any) -> bool:
    return all(isinstance(x, fx.Node) for x in pair)


def _replace(node: fx.Node, pairs: list[Any], dtype: torch.dtype) -> None:
    for x, other in pairs:
        with node.graph.inserting_before(node):
            replacement = _match_reduction(x, other) or _match_scatter(node, x, other)
        if replacement is not None:
            _insert_op(node, replacement, dtype)
            return


def _insert_op(node: fx.Node, made: Made, dtype: torch.dtype) -> None:
    with node.graph.inserting_before(node):
        node.replace_all_uses_with(emit(node, *made, shape_of(node), dtype=dtype))


def _match_reduction(x: fx.Node, other: fx.Node) -> Made | None:
    """Return the op and arguments that compare `x` with `other`, if `other` is the extreme of `x`
    over some dims; else None."""
    while other.target is aten.expand.default:
        other = other.args[0]
    extreme = _extreme(_skip_reshapes(other))
    if extreme is None:
        return None
    compared = x
    if extreme.of_magnitudes and x.target is aten.abs.default:
        compared = x.args[0]
    if compared is not extreme.source or extreme.of_magnitudes is (compared is x):
        return None
    rank = len(shape_of(x))
    dims = [dim % rank for dim in extreme.dims if rank] or list(range(rank))
    reduced_shape = torch.Size(1 if dim in dims else size for dim, size in enumerate(shape_of(x)))
    if (
        torch.broadcast_shapes(shape_of(other), reduced_shape) != reduced_shape
    ):  # broadcast along other dims
        return None
    return extremes.is_extreme, (x, dims, extreme.kind)


def _skip_reshapes(node: fx.Node) -> fx.Node:
    while node.target in _SHAPED:
        node = node.args[0]
    return node


def _extreme(node: fx.Node) -> _Extreme | None:
    """Return the reduction that `node` computes; None if it is not an extreme."""
    if node.target in _OF_ALL and len(node.args) == 1:
        return _Extreme(node.args[0], _OF_ALL[node.target], ())
    if node.target in _OF_DIMS:
        return _Extreme(node.args[0], _OF_DIMS[node.target], _dims(node, 1))
    if node.target is operator.getitem and node.args[0].target is aten.aminmax.default:
        reduction_node: fx.Node = node.args[0]
        return _Extreme(
            reduction_node.args[0], ("min", "max")[node.args[1]], _dims(reduction_node, 1)
        )
    if node.target in _NORMS and "dtype" not in node.kwargs:
        order = node.args[1] if len(node.args) > 1 else node.kwargs.get("ord", 2)
        if isinstance(order, float) and math.isinf(order):
            kind = "max" if order > 0 else "min"
            return _Extreme(node.args[0], kind, _dims(node, 2), of_magnitudes=True)
    return None


def _dims(node: fx.Node, position: int) -> tuple[int, ...]:
    argument = node.args[position] if len(node.args) > position else node.kwargs.get("dim")
    return (argument,) if isinstance(argument, int) else tuple(argument or ())


def _match_scatter(node: fx.Node, x: fx.Node, other: fx.Node) -> Made | None:
    """Return the op and arguments that compare `x` with `other`, if `other` is a scatter reduction
    of `x`; else None."""
    at = (
        other.args[0] if other.target in (aten.gather.default, aten.index_select.default) else other
    )
    if at.target not in (aten.scatter_reduce.two, aten.index_reduce.default):
        return None
    into, dim, index, source, kind = at.args[:5]
    if kind not in ("amax", "amin") or x is not (into if other is at else source):
        return None
    if other is not at and not _is_same(other.args[1:3], (dim, index)):  # read at other indices
        return None
    include_self = at.kwargs.get("include_self", True)
    if at.target is aten.index_reduce.default:
        index = _spread(node, index, dim, shape_of(source))
    arguments = (into, index, source, dim, kind, include_self, other is not at)
    return extremes.is_scattered_extreme, arguments


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two arguments have the same value; forward and backward may have separate
    nodes for the same constant."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or a is b:
        return bool(a == b)
    calls_same = a.op == b.op == "call_function" and a.target is b.target
    return calls_same and a.kwargs == b.kwargs and _is_same(a.args, b.args)


def _spread(node: fx.Node, index: fx.Node, dim: int, shape: tuple[int, ...]) -> fx.Node:
    """Expand an index along dim `dim` to shape `shape`."""
    dtype = index.meta["val"].dtype
    column = [shape[dim] if d == dim % len(shape) else 1 for d in range(len(shape))]
    viewed = view(node, index, column)
    return emit(node, aten.expand.default, (viewed, list(shape)), shape, dtype=dtype)


def _of_distances(grad: Any, x: Any, y: Any, p: float, distances: Any) -> Made | None:
    return (extremes.cdist_backward, (grad, x, y, p)) if math.isinf(p) else None


def _of_own_distances(grad: Any, x: Any, p: float, distances: Any) -> Made | None:
    return (extremes.pdist_backward, (grad, x, p)) if math.isinf(p) else None


def _of_segments(
    grad: Any,
    output: Any,
    data: Any,
    reduce: str,
    *,
    lengths: Any = None,
    offsets: Any = None,
    axis: int = 0,
    initial: Any = None,
) -> Made | None:
    if reduce not in ("max", "min") or initial is not None:
        return None
    arguments = (grad, data, reduce, lengths, offsets, axis)
    return extremes.segment_reduce_backward, arguments


_GRADIENTS: dict[Any, Callable[..., Made | None]] = {
    aten._cdist_backward.default: _of_distances,
    aten._pdist_backward.default: _of_own_distances,
    aten._segment_reduce_backward.default: _of_segments,
}
