"""The negative log likelihood in pieces, where it is not the end of a cross entropy over the last dim (that is `loss`'s).

::

    picked = x[label], x [n, c, ...]     loss = Σ −picked · w[label] · seen / Σ w[label] · seen,   seen = label ≠ ignored
    ∂loss/∂x[label] = −tangent · w[label] · seen / Σ w[label] · seen

Batch and space may be split: the two sums are partial then, and nothing else looks across. They are taken in at least fp32: there may be
more labels than fp16 has numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.graphs import aten, calls, cast, dtype_of, emit, shape_of, sweep

_NONE, _MEAN = 0, 1
_FORWARD = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


def split_likelihood(graph: fx.Graph) -> None:
    """``nll_loss_forward`` and ``nll_loss2d_forward`` of a batch, and their backwards."""
    for node in calls(graph, *_FORWARD):
        x, labels, weight, reduction, ignored = node.args
        if len(shape_of(x)) > 1:
            with graph.inserting_before(node):
                _forward(node, _Rows(node, x, labels, weight, ignored), reduction)
    for node in calls(graph, *_BACKWARD):
        grad, x, labels, weight, reduction, ignored, total = node.args
        if len(shape_of(x)) > 1:
            with graph.inserting_before(node):
                scale = grad
                if reduction == _MEAN:
                    dtype = torch.promote_types(dtype_of(grad), dtype_of(total))
                    scale = cast(node, emit(node, aten.div.Tensor, (grad, total), (), dtype=dtype), dtype_of(grad))
                node.replace_all_uses_with(_Rows(node, x, labels, weight, ignored).scatter(scale))
    sweep(graph)


def _forward(node: fx.Node, rows: _Rows, reduction: int) -> None:
    losses = rows.weighed(rows.picked())
    total = rows.summed(rows.factor())
    loss = losses if reduction == _NONE else rows.summed(losses)
    if reduction == _MEAN:
        loss = rows.step(aten.div.Tensor, (loss, total), (), dtype=dtype_of(total))
    for result in list(node.users):
        result.replace_all_uses_with((cast(node, loss, dtype_of(rows.x)), total)[result.args[1]])


class _Rows:
    """The nodes that are made before `node`; a row is a label with its classes, whose dim is 1."""

    def __init__(self, node: fx.Node, x: fx.Node, labels: fx.Node, weight: fx.Node | None, ignored: int) -> None:
        self.node, self.x, self.weight = node, x, weight
        self.shape = shape_of(labels)
        seen = self.step(aten.ne.Scalar, (labels, ignored), dtype=torch.bool)
        self.unseen = self.step(aten.logical_not.default, (seen,), dtype=torch.bool)
        self.seen, index = seen, dtype_of(labels)
        self.labels = self.step(aten.masked_fill.Scalar, (labels, self.unseen, 0), dtype=index)
        self.index = self.step(aten.unsqueeze.default, (self.labels, 1), (self.shape[0], 1, *self.shape[1:]), dtype=index)

    def step(self, target: Any, args: tuple[Any, ...], shape: tuple[int, ...] | None = None, **how: Any) -> fx.Node:
        return emit(self.node, target, args, self.shape if shape is None else shape, **{"dtype": dtype_of(self.x), **how})

    def picked(self) -> fx.Node:
        """−x[label]."""
        found = self.step(aten.gather.default, (self.x, 1, self.index), shape_of(self.index))
        return self.step(aten.neg.default, (self.step(aten.squeeze.dim, (found, 1)),))

    def factor(self) -> fx.Node:
        """w[label], 0 where the label is ignored; without weights it is only added up, in the dtype for that."""
        if self.weight is None:
            wide = torch.promote_types(dtype_of(self.x), torch.float32)
            return self.step(aten._to_copy.default, (self.seen,), dtype=wide, kwargs={"dtype": wide})
        return self._masked(self.step(aten.index.Tensor, (self.weight, [self.labels])))

    def weighed(self, rows: fx.Node) -> fx.Node:
        """`rows` times the factor; an ignored one is 0, be it infinite."""
        rows = rows if self.weight is None else self.step(aten.mul.Tensor, (rows, self.factor()))
        return self._masked(rows)

    def scatter(self, scale: fx.Node) -> fx.Node:
        """Zeros like x, with −scale times the factor at the labels."""
        down = self.step(aten.neg.default, (scale,), shape_of(scale))
        each = down if shape_of(scale) else self.step(aten.expand.default, (down, list(self.shape)))
        source = self.step(aten.unsqueeze.default, (self.weighed(each), 1), shape_of(self.index))
        zeros = self.step(aten.zeros_like.default, (self.x,), shape_of(self.x))
        return self.step(aten.scatter.src, (zeros, 1, self.index, source), shape_of(self.x))

    def summed(self, rows: fx.Node) -> fx.Node:
        wide = torch.promote_types(dtype_of(rows), torch.float32)
        return self.step(aten.sum.dim_IntList, (cast(self.node, rows, wide), list(range(len(self.shape)))), (), dtype=wide)

    def _masked(self, rows: fx.Node) -> fx.Node:
        return self.step(aten.masked_fill.Scalar, (rows, self.unseen, 0))
