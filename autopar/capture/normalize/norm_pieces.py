"""Split batch norms and root-mean-square norms into several ops (`autopar.ops.norms`), so that
their statistics can be sums over ranks.

The mean over a sharded batch is a partial sum, and so are the variance and the gradients of weight
and bias. The normalization is elementwise. The running statistics are updated from those of the
full batch.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar import ops
from autopar.capture.graphs import aten, calls, cast, dtype_of, emit, is_tensor, shape_of, sweep
from autopar.ops import norms
from autopar.ops.blocks import wide_dtype

_FORWARD = {
    aten._native_batch_norm_legit_functional.default: (
        "weight",
        "bias",
        "mean",
        "var",
        "training",
        "momentum",
        "eps",
    ),
    aten.native_batch_norm.default: (
        "weight",
        "bias",
        "mean",
        "var",
        "training",
        "momentum",
        "eps",
    ),
    aten._native_batch_norm_legit.no_stats: ("weight", "bias", "training", "momentum", "eps"),
    aten._native_batch_norm_legit_no_training.default: (
        "weight",
        "bias",
        "mean",
        "var",
        "momentum",
        "eps",
    ),
}


@dataclass(frozen=True, slots=True)
class _NormSite:
    """Inserts the ops of one batch norm; sums use the dtype `wide`.

    Attributes:
        like: the node to replace, whose phase, module and source are copied to new nodes.
        x: the operand ``[n, c, ...]``.
    """

    like: fx.Node
    x: fx.Node

    @property
    def channels(self) -> tuple[int, ...]:
        """Shape of a tensor with one element per channel."""
        return shape_of(self.x)[1:2]

    @property
    def count(self) -> int:
        """Number of elements of each channel."""
        return math.prod(shape_of(self.x)) // self.channels[0]

    @property
    def wide(self) -> torch.dtype:
        """Dtype of sums: at least float32."""
        return torch.promote_types(dtype_of(self.x), torch.float32)

    def per_channel(self, target: Any, *args: Any) -> fx.Node:
        """Insert a call whose result has one element per channel."""
        return emit(self.like, target, args, self.channels, dtype=self.wide)

    def like_x(self, target: Any, *args: Any) -> fx.Node:
        """Insert a call whose result has the shape and dtype of x."""
        return emit(self.like, target, args, shape_of(self.x), dtype=dtype_of(self.x))

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return `node` in `dtype`."""
        return cast(self.like, node, dtype)

    def rstd(self, var: fx.Node, eps: float) -> fx.Node:
        """Return 1/√(var + eps) per channel."""
        return self.per_channel(
            aten.rsqrt.default, self.per_channel(aten.add.Tensor, self.cast(var, self.wide), eps)
        )


def split_batch_norm(graph: fx.Graph) -> None:
    """Split the forward and backward of every batch norm."""
    for node in calls(graph, *_FORWARD):
        with graph.inserting_before(node):
            _forward(node)
    for node in calls(graph, aten.native_batch_norm_backward.default):
        with graph.inserting_before(node):
            _backward(node)
    sweep(graph)


def _forward(node: fx.Node) -> None:
    x, *rest = node.args
    settings = dict(zip(_FORWARD[node.target], rest, strict=True))
    site, running = _NormSite(node, x), settings.get("mean")
    if not settings.get("training", False):
        mean, rstd = (
            site.cast(settings["mean"], site.wide),
            site.rstd(settings["var"], settings["eps"]),
        )
        out = site.like_x(norms.normalize, x, mean, rstd, settings["weight"], settings["bias"])
        _replace(node, out, mean, rstd, running, settings.get("var"))
        return
    mean = site.per_channel(aten.div.Tensor, site.per_channel(norms.channel_sum, x), site.count)
    deviation = site.per_channel(norms.squared_deviation, x, mean)
    rstd = site.rstd(site.per_channel(aten.div.Tensor, deviation, site.count), settings["eps"])
    out = site.like_x(norms.normalize, x, mean, rstd, settings["weight"], settings["bias"])
    updated = ()
    if running is not None:
        unbiased = site.per_channel(aten.div.Tensor, deviation, max(site.count - 1, 1))
        updated = tuple(
            _update_statistic(site, settings[name], new, settings["momentum"])
            for name, new in (("mean", mean), ("var", unbiased))
        )
    _replace(node, out, mean, rstd, *updated)


def _update_statistic(site: _NormSite, old: fx.Node, new: fx.Node, momentum: float) -> fx.Node:
    old_share = site.per_channel(aten.mul.Tensor, site.cast(old, site.wide), 1.0 - momentum)
    return site.cast(
        site.per_channel(
            aten.add.Tensor, old_share, site.per_channel(aten.mul.Tensor, new, momentum)
        ),
        dtype_of(old),
    )


def _backward(node: fx.Node) -> None:
    grad, x, weight, running_mean, running_var, mean, rstd, training, eps, requested_results = (
        node.args
    )
    site = _NormSite(node, x)
    if not training:
        mean, rstd = site.cast(running_mean, site.wide), site.rstd(running_var, eps)
    total, product = (
        site.per_channel(norms.channel_sum, grad),
        site.per_channel(norms.scaled_product, grad, x, mean, rstd),
    )
    if training:
        grad_x = site.like_x(
            norms.normalize_backward, grad, x, mean, rstd, weight, total, product, site.count
        )
    else:
        none = site.per_channel(aten.zeros_like.default, rstd)
        grad_x = site.like_x(norms.normalize, grad, none, rstd, weight, None)
    dtype = dtype_of(weight) if is_tensor(weight) else site.wide
    gradients = (grad_x, site.cast(product, dtype), site.cast(total, dtype))
    _replace(
        node,
        *(
            result if requested else None
            for result, requested in zip(gradients, requested_results, strict=True)
        ),
    )


def _replace(node: fx.Node, *results: fx.Node | None) -> None:
    for user in list(node.users):
        assert user.target is operator.getitem
        result = results[user.args[1]]
        if result is not None:
            user.replace_all_uses_with(result)


# --------------------------------------------------------------------------------------------------
# Root-mean-square norms as several ops (`autopar.ops.norms`), so that sums over the normalized dim
# can be sums over ranks.


def split_rms_norms(graph: fx.Graph) -> None:
    """Split the forward and backward of every root-mean-square norm."""
    for node in calls(graph, ops.normed):
        with graph.inserting_before(node):
            _rms_forward(node, *node.args)
    for node in calls(graph, ops.normed_backward):
        with graph.inserting_before(node):
            _rms_backward(node, *node.args)
    sweep(graph)


def _rms_forward(
    node: fx.Node, x: fx.Node, weight: fx.Node | None, eps: float, *dtypes: torch.dtype
) -> None:
    dtype, _, out = dtypes
    squares = _per_row(node, x, ops.square_sum, (x, dtype), dtype)
    result = emit(
        node,
        ops.rms_norm,
        (x, squares, weight, shape_of(x)[-1], eps, *dtypes),
        shape_of(x),
        dtype=out,
    )
    _replace_rms(node, result, squares)


def _rms_backward(
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    squares: fx.Node,
    weight: fx.Node | None,
    eps: float,
    dtype: torch.dtype,
) -> None:
    n = shape_of(x)[-1]
    product = _per_row(node, x, ops.rms_product, (grad, x, weight, dtype), dtype)
    d_x = emit(
        node,
        ops.rms_norm_backward,
        (grad, x, squares, product, weight, n, eps, dtype),
        shape_of(x),
        dtype=dtype_of(x),
    )
    d_weight = (
        None if weight is None else _weight_gradient(node, grad, x, squares, weight, eps, dtype)
    )
    _replace_rms(node, d_x, d_weight)


def _weight_gradient(
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    squares: fx.Node,
    weight: fx.Node,
    eps: float,
    dtype: torch.dtype,
) -> fx.Node:
    wide, shape = wide_dtype(dtype), shape_of(weight)
    products = emit(
        node, ops.rms_weight_gradient, (grad, x, squares, *shape, eps, dtype), shape, dtype=wide
    )
    return cast(node, products, dtype_of(weight))


def _per_row(
    node: fx.Node, x: fx.Node, target: Any, args: tuple[Any, ...], dtype: torch.dtype
) -> fx.Node:
    """Insert a call whose result has one element for each row of `x`."""
    return emit(node, target, args, shape_of(x)[:-1], dtype=wide_dtype(dtype))


def _replace_rms(node: fx.Node, *results: fx.Node | None) -> None:
    for user in list(node.users):
        assert user.target is operator.getitem, "the op has two results"
        result = results[user.args[1]]
        if result is not None:
            user.replace_all_uses_with(result)
