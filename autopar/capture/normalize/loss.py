"""Split cross entropies and negative log likelihoods into ops that support a sharded batch,
sequence and vocabulary.

The cross entropy is computed on unflattened logits::

    m = amax(x)    s = Σ exp(x − m)    nll = log s + m − x[label]    valid = label ≠ ignored
    loss = Σ nll · valid / Σ valid
    ∂loss/∂x = cross_entropy_backward(x, m, s, label, valid · tangent / max(Σ valid, 1))

If no label is valid, the loss is NaN and its gradient zero, as in torch. The number of valid labels
is a separate sum, which is known before the first backward. A cast of half-precision logits to
float32 before the loss is omitted, since the ops compute in float32.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar import ops
from autopar.capture.graphs import (
    IN_PLACE,
    aten,
    calls,
    cast,
    dtype_of,
    emit,
    shape_of,
    sweep,
    view,
)
from autopar.capture.normalize.linears import merged_dims

_MEAN, _SUM = 1, 2
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The values of forward that backward needs."""

    x: fx.Node
    m: fx.Node
    s: fx.Node
    labels: fx.Node
    valid: fx.Node
    count: fx.Node | None


def split_cross_entropy(graph: fx.Graph) -> None:
    """Split ``_log_softmax → nll_loss_forward`` and their backward, for the reductions mean and sum
    without class weights."""
    for node in calls(graph, aten.nll_loss_forward.default):
        if not _is_plain(node):
            continue
        with graph.inserting_before(node):
            pieces = _forward(node)
        for gradient in [user for user in node.args[0].users if _is_gradient(user, node)]:
            for end in [
                user
                for user in gradient.users
                if user.target is aten._log_softmax_backward_data.default
            ]:
                with graph.inserting_before(end):
                    _backward(end, gradient.args[0], pieces)
    sweep(graph)


def _is_gradient(node: fx.Node, forward: fx.Node) -> bool:
    """Return whether `node` is the backward of `forward` and not of another loss of the same
    scores."""
    if node.target is not aten.nll_loss_backward.default or node.args[1:6] != forward.args:
        return False
    total = node.args[6]
    return (
        isinstance(total, fx.Node)
        and total.target is operator.getitem
        and total.args == (forward, 1)
    )


def _is_plain(node: fx.Node) -> bool:
    log_softmax, labels, weight, reduction, _ = node.args
    return (
        log_softmax.target is aten._log_softmax.default
        and len(shape_of(log_softmax)) == 2
        and log_softmax.args[1] % 2 == 1
        and weight is None
        and reduction in (_MEAN, _SUM)
        and dtype_of(labels) == torch.int64
    )


def _forward(node: fx.Node) -> _Pieces:
    _, _, _, reduction, ignored = node.args
    x, labels = _unflatten_rows(node)
    rows = shape_of(x)[:-1]
    accumulate = torch.float32 if dtype_of(x) in _HALF else dtype_of(x)

    def step(
        target: Any,
        args: tuple[Any, ...],
        shape: tuple[int, ...] = rows,
        dtype: torch.dtype = accumulate,
    ) -> fx.Node:
        return emit(node, target, args, shape, dtype=dtype)

    m = step(aten.amax.default, (x, [-1]), dtype=dtype_of(x))
    s = step(ops.sum_exp, (x, m))
    normalizer = step(aten.add.Tensor, (step(aten.log.default, (s,)), m))
    losses = step(
        aten.sub.Tensor, (normalizer, step(ops.pick, (x, labels, ignored), dtype=dtype_of(x)))
    )
    is_valid = step(aten.ne.Scalar, (labels, ignored), dtype=torch.bool)
    valid = cast(node, is_valid, accumulate)
    every = list(range(len(rows)))
    loss = step(aten.sum.dim_IntList, (step(aten.mul.Tensor, (losses, valid)), every), ())
    count = step(aten.sum.dim_IntList, (valid, every), ()) if reduction == _MEAN else None
    if count is not None:
        loss = step(aten.div.Tensor, (loss, count), ())
    for result in [user for user in node.users if user.args[1] == 0]:
        result.replace_all_uses_with(cast(node, loss, dtype_of(result)))
    return _Pieces(x, m, s, labels, valid, count)


def _unflatten_rows(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the logits and the labels with the dims that the labels had before they were
    flattened."""
    logits, labels = node.args[0].args[0], node.args[1]
    if (
        labels.target is aten.view.default
        and merged_dims(shape_of(labels.args[0]), shape_of(labels)) is not None
    ):
        labels = labels.args[0]
        labels = labels.args[0] if labels.target is aten.clone.default else labels
    x = view(node, _before_cast(logits), (*shape_of(labels), shape_of(logits)[-1]))
    return _before_cast(x), labels


def _before_cast(logits: fx.Node) -> fx.Node:
    """Return the operand of `logits` if it is a cast from half precision to float32, else
    `logits`."""
    widened = (
        logits.target is aten._to_copy.default
        and dtype_of(logits) == torch.float32
        and dtype_of(logits.args[0]) in _HALF
    )
    return logits.args[0] if widened else logits


def _backward(end: fx.Node, tangent: fx.Node, pieces: _Pieces) -> None:
    accumulate = dtype_of(pieces.valid)
    per_row = cast(end, tangent, accumulate)
    if pieces.count is not None:
        count = emit(end, aten.clamp_min.default, (pieces.count, 1), (), dtype=accumulate)
        per_row = emit(end, aten.div.Tensor, (per_row, count), (), dtype=accumulate)
    scale = emit(
        end, aten.mul.Tensor, (pieces.valid, per_row), shape_of(pieces.valid), dtype=accumulate
    )
    args = (pieces.x, pieces.m, pieces.s, pieces.labels, scale)
    gradient = emit(
        end, ops.cross_entropy_backward, args, shape_of(pieces.x), dtype=dtype_of(pieces.x)
    )
    gradient.meta[IN_PLACE] = True
    for back in [
        n
        for n in end.users
        if n.target is aten._to_copy.default and dtype_of(n) == dtype_of(gradient)
    ]:
        back.replace_all_uses_with(
            view(end, gradient, shape_of(end))
        )  # the gradient has the dtype of the logits already
    end.replace_all_uses_with(view(end, cast(end, gradient, dtype_of(end)), shape_of(end)))


# --------------------------------------------------------------------------------------------------
# Negative log likelihoods that are not part of a cross entropy over the last dim (see above).
#
#     picked = x[label],  x [n, c, ...]        seen = label ≠ ignored
#     loss = Σ −picked · w[label] · seen / Σ w[label] · seen
#     ∂loss/∂x[label] = −tangent · w[label] · seen / Σ w[label] · seen
#
# Batch and spatial dims may be sharded: the two sums are then partial, and no other op combines
# rows. Sums use at least float32, since there may be more labels than float16 can count.

_NONE, _LIKELIHOOD_MEAN = 0, 1
_FORWARD = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


def split_likelihood(graph: fx.Graph) -> None:
    """Split ``nll_loss_forward`` and ``nll_loss2d_forward`` of a batch, and their backward."""
    for node in calls(graph, *_FORWARD):
        x, labels, weight, reduction, ignored = node.args
        if len(shape_of(x)) > 1:
            with graph.inserting_before(node):
                _likelihood_forward(node, _Rows(node, x, labels, weight, ignored), reduction)
    for node in calls(graph, *_BACKWARD):
        grad, x, labels, weight, reduction, ignored, total = node.args
        if len(shape_of(x)) > 1:
            with graph.inserting_before(node):
                scale = grad
                if reduction == _LIKELIHOOD_MEAN:
                    dtype = torch.promote_types(dtype_of(grad), dtype_of(total))
                    scale = cast(
                        node,
                        emit(node, aten.div.Tensor, (grad, total), (), dtype=dtype),
                        dtype_of(grad),
                    )
                node.replace_all_uses_with(_Rows(node, x, labels, weight, ignored).scatter(scale))
    sweep(graph)


def _likelihood_forward(node: fx.Node, rows: _Rows, reduction: int) -> None:
    losses = rows.weigh(rows.negated_picks())
    total = rows.sum_all(rows.factor())
    loss = losses if reduction == _NONE else rows.sum_all(losses)
    if reduction == _LIKELIHOOD_MEAN:
        loss = rows.step(aten.div.Tensor, (loss, total), (), dtype=dtype_of(total))
    for result in list(node.users):
        result.replace_all_uses_with((cast(node, loss, dtype_of(rows.x)), total)[result.args[1]])


class _Rows:
    """Inserts the ops of one likelihood before `node`. A row is a label with its class scores along
    dim 1 of `x`."""

    def __init__(
        self, node: fx.Node, x: fx.Node, labels: fx.Node, weight: fx.Node | None, ignored: int
    ) -> None:
        self.node, self.x, self.weight = node, x, weight
        self.shape = shape_of(labels)
        is_valid = self.step(aten.ne.Scalar, (labels, ignored), dtype=torch.bool)
        self.unseen = self.step(aten.logical_not.default, (is_valid,), dtype=torch.bool)
        self.seen, index = is_valid, dtype_of(labels)
        self.labels = self.step(aten.masked_fill.Scalar, (labels, self.unseen, 0), dtype=index)
        self.index = self.step(
            aten.unsqueeze.default,
            (self.labels, 1),
            (self.shape[0], 1, *self.shape[1:]),
            dtype=index,
        )

    def step(
        self, target: Any, args: tuple[Any, ...], shape: tuple[int, ...] | None = None, **how: Any
    ) -> fx.Node:
        """Insert a call.

        Args:
            target: the op.
            args: its arguments.
            shape: shape of the result; by default that of the labels.
            how: ``dtype`` of the result, by default that of the scores, and ``kwargs`` of the call.
        """
        return emit(
            self.node,
            target,
            args,
            self.shape if shape is None else shape,
            **{"dtype": dtype_of(self.x), **how},
        )

    def negated_picks(self) -> fx.Node:
        """Return −x[label]."""
        picked = self.step(aten.gather.default, (self.x, 1, self.index), shape_of(self.index))
        return self.step(aten.neg.default, (self.step(aten.squeeze.dim, (picked, 1)),))

    def factor(self) -> fx.Node:
        """Return w[label], or 0 if the label is ignored.

        Without weights, the factor is 1 or 0 in at least float32, since it is only summed.
        """
        if self.weight is None:
            wide = torch.promote_types(dtype_of(self.x), torch.float32)
            return self.step(
                aten._to_copy.default, (self.seen,), dtype=wide, kwargs={"dtype": wide}
            )
        return self._mask_ignored(self.step(aten.index.Tensor, (self.weight, [self.labels])))

    def weigh(self, rows: fx.Node) -> fx.Node:
        """Return `rows` times the factor; ignored rows become 0, even if they are infinite."""
        rows = rows if self.weight is None else self.step(aten.mul.Tensor, (rows, self.factor()))
        return self._mask_ignored(rows)

    def scatter(self, scale: fx.Node) -> fx.Node:
        """Return a tensor like x with −`scale` times the factor at the labels, and zeros
        elsewhere."""
        down = self.step(aten.neg.default, (scale,), shape_of(scale))
        factor = (
            down if shape_of(scale) else self.step(aten.expand.default, (down, list(self.shape)))
        )
        source = self.step(aten.unsqueeze.default, (self.weigh(factor), 1), shape_of(self.index))
        zeros = self.step(aten.zeros_like.default, (self.x,), shape_of(self.x))
        return self.step(aten.scatter.src, (zeros, 1, self.index, source), shape_of(self.x))

    def sum_all(self, rows: fx.Node) -> fx.Node:
        """Return the sum of `rows`, in at least float32."""
        wide = torch.promote_types(dtype_of(rows), torch.float32)
        return self.step(
            aten.sum.dim_IntList,
            (cast(self.node, rows, wide), list(range(len(self.shape)))),
            (),
            dtype=wide,
        )

    def _mask_ignored(self, rows: fx.Node) -> fx.Node:
        return self.step(aten.masked_fill.Scalar, (rows, self.unseen, 0))
