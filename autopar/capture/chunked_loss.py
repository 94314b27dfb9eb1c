"""Rewrite the end of a model: drop outputs other than the loss, and compute cross entropy without
materializing all logits.

`with_loss_only` drops the other outputs. `outputs_whole` makes every rank return the full outputs.
`loss_by_rows` replaces

::

    x = h Wᵀ    nll = cross entropy of x    dx = (softmax x − onehot) · valid · t    dW = dxᵀ h
                                            dh = dx W

by one op that processes a limited number of rows at a time (`autopar.ops.linear_cross_entropy`)
and, in backward, by two products with the scalar t. These products are computed in place, since a
second buffer of the size of the weight could need as much memory as the logits.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar import ops
from autopar.capture.graphs import (
    IN_PLACE,
    aten,
    calls,
    copy_graph,
    dtype_of,
    emit,
    shape_of,
    sweep,
)
from autopar.capture.trace import CAPTURED_KEY, Input, Parameter, Trace, assign_keys
from autopar.capture.trees import flatten_with_paths
from autopar.errors import CaptureError

_Entry = TypeVar("_Entry", Parameter, Input)


def with_loss_only(trace: Trace) -> Trace:
    """Return the trace with the loss as its only output; the other outputs become None.

    Raises:
        CaptureError: the model returns no loss.
    """
    if trace.loss is None:
        outputs_text = ", ".join(o.path or "the result" for o in trace.outputs) or "no tensor"
        raise CaptureError(
            f'outputs="loss", but the model returns no loss (it returns {outputs_text})',
            remedy='pass outputs="full"',
        )
    dropped = {o.path for o in trace.outputs if not o.is_loss}
    if not dropped:
        return trace
    graph = copy_graph(trace.graph)
    end = next(iter(reversed(graph.nodes)))
    outputs = tuple(o for o in trace.outputs if o.is_loss)
    positions = [
        position
        for position in range(len(end.args[0]))
        if position >= len(trace.outputs) or trace.outputs[position].is_loss
    ]
    place = {before: now for now, before in enumerate(positions)}
    end.args = (tuple(end.args[0][position] for position in positions),)
    sweep(graph)

    def renumber_gradients(entries: Sequence[_Entry]) -> tuple[_Entry, ...]:
        """Return the entries with the new positions of their gradients in the results."""
        return tuple(
            replace(e, gradient=None if e.gradient is None else place[e.gradient]) for e in entries
        )

    leaves = pytree.tree_unflatten(list(range(trace.out_spec.num_leaves)), trace.out_spec)
    nothing = {leaf: None for path, leaf in flatten_with_paths(leaves)[0] if path in dropped}
    return replace(
        trace,
        graph=graph,
        outputs=outputs,
        parameters=renumber_gradients(trace.parameters),
        buffers=renumber_gradients(trace.buffers),
        inputs=renumber_gradients(trace.inputs),
        mutated={name: place[position] for name, position in trace.mutated.items()},
        constants={**trace.constants, **nothing},
    )


def outputs_whole(trace: Trace) -> Trace:
    """Return the trace with all outputs marked so that every rank returns them in full, as it does
    the loss."""
    return replace(trace, outputs=tuple(replace(o, whole=True) for o in trace.outputs))


@dataclass(frozen=True, slots=True)
class Head:
    """The nodes of a linear layer followed by a cross entropy.

    Attributes:
        logits: product of `hidden` and `weight`, ``[…rows, v]``.
        hidden: input of the layer, ``[…rows, d]``.
        weight: weight of the layer, ``[v, d]``.
        labels: class of each row, ``[…rows]``.
        ignored: the label of rows that do not contribute to the loss (`ignore_index`).
        losses: loss of each row, ``[…rows]``.
        scale: the scalar t.
        d_hidden: gradient of `hidden`.
        d_weight: gradient of `weight`.
    """

    logits: fx.Node
    hidden: fx.Node
    weight: fx.Node
    labels: fx.Node
    ignored: int
    losses: fx.Node
    scale: fx.Node
    d_hidden: fx.Node
    d_weight: fx.Node

    @property
    def num_rows(self) -> int:
        """Number of rows of the logits, with their global shape."""
        return int(self.labels.meta["val"].numel())


def heads_of(trace: Trace) -> tuple[tuple[Head, ...], tuple[str, ...]]:
    """Return the cross entropies that can be computed by rows, and the reason for each one that
    cannot."""
    heads: list[Head] = []
    refusals: list[str] = []
    for gradient in calls(trace.graph, ops.cross_entropy_backward):
        try:
            heads.append(_head(gradient))
        except _NoMatchError as error:
            refusals.append(str(error))
    return tuple(heads), tuple(refusals)


def loss_by_rows(trace: Trace, rows: int) -> Trace:
    """Return the trace with each cross entropy computed by rows, if possible: each device computes
    the logits of at most `rows` rows at a time.

    Keys of nodes are numbered again. `CAPTURED_KEY` keeps the earlier key of a node, by which
    microbatches name values of the batch; it is empty for new nodes.

    Raises:
        CaptureError: no cross entropy of the model can be computed by rows.
    """
    graph = copy_graph(trace.graph)
    captured = {node: node.meta["key"] for node in graph.nodes}
    result = replace(trace, graph=graph)
    heads, refusals = heads_of(result)
    if not heads:
        reason = "; ".join(refusals) or "it has no cross entropy"
        raise CaptureError(
            f"loss_rows={rows}, but no loss of the model can be computed by rows: {reason}",
            remedy='pass loss_rows=0, or loss_rows="auto"',
        )
    for head in heads:
        _rewrite(graph, head, rows)
    sweep(graph)
    assign_keys(graph)
    for node in graph.nodes:
        node.meta[CAPTURED_KEY] = captured.get(node, "")
    graph.lint()
    return result


class _NoMatchError(Exception):
    """A cross entropy does not have the form that can be computed by rows."""


def _head(gradient: fx.Node) -> Head:
    """Return the head that a gradient of logits belongs to; raise _NoMatchError if its form
    differs."""
    logits, m, s, labels, factor = gradient.args
    at = logits.meta["module"] or "the model"
    _expect(
        logits.target is ops.dot,
        f"the logits of {at} are computed by {logits.name}, not by a linear layer",
    )
    _expect(len(logits.args) == 3, f"the linear layer that computes the logits of {at} has a bias")
    _expect(
        dtype_of(logits) != torch.float16,
        f"gradients of {at} are in float16 and could overflow before they are scaled",
    )
    _check_readers(logits, {m, s, gradient}, at)
    logs = [n for n in s.users if n.target is aten.log.default]
    picks = [n for n in logits.users if n.target is ops.pick and n.args[1] is labels]
    _expect(
        len(picks) == len(logs) == 1 and set(s.users) == {logs[0], gradient},
        f"the sums of exponentials of {at} are also read by other ops",
    )
    normalizer = _only_user(logs[0], aten.add.Tensor, at)
    _expect(
        normalizer.args[1] is m and set(m.users) == {s, normalizer, gradient},
        f"the maxima of {at} are also read by other ops",
    )
    losses = _only_user(picks[0], aten.sub.Tensor, at)
    _expect(losses.args == (normalizer, picks[0]), f"the losses of {at} are also read by other ops")
    hidden, weight = logits.args[1:]
    rows, _, _ = _terms(logits)
    _expect(len(rows) == len(shape_of(labels)), f"the logits of {at} and the labels differ in rows")
    d_hidden, d_weight = _products_of(gradient, hidden, weight, at)
    ignored = int(picks[0].args[2])
    return Head(
        logits,
        hidden,
        weight,
        labels,
        ignored,
        losses,
        _scalar(factor, labels, ignored, at),
        d_hidden,
        d_weight,
    )


def _check_readers(logits: fx.Node, readers: set[fx.Node], at: str) -> None:
    """Check that only `readers` and the picks of the labels' logits read the logits."""
    others = [n for n in logits.users if n not in readers and n.target is not ops.pick]
    _expect(
        not any(n.op == "output" for n in others),
        f'the model returns the logits of {at} (pass outputs="loss" if only the loss is needed)',
    )
    names = ", ".join(n.meta["key"] for n in others)
    _expect(not others, f"the logits of {at} are also read by {names}")


def _products_of(
    gradient: fx.Node, hidden: fx.Node, weight: fx.Node, at: str
) -> tuple[fx.Node, fx.Node]:
    """Return the products that compute the gradients of a linear layer's input and weight.

    Args:
        gradient: the gradient of the layer's result.
        hidden: the layer's input.
        weight: its weight.
        at: the layer's name in errors.
    """
    rows, inner, out = _terms(gradient.args[0])
    ends = list(_past_casts(gradient).users)
    products = [n for n in ends if n.target is ops.dot]
    d_weights = [
        n for n in products if _is_product_with(n, hidden, rows + inner, out + inner, rows + out)
    ]
    d_hiddens = [
        n for n in products if _is_product_with(n, weight, out + inner, rows + inner, rows + out)
    ]
    _expect(
        len(d_weights) == len(d_hiddens) == 1 and len(ends) == 2,
        f"the gradient of the logits of {at} is also read by other ops",
    )
    return d_hiddens[0], d_weights[0]


def _expect(holds: bool, refusal: str) -> None:
    if not holds:
        raise _NoMatchError(refusal)


def _only_user(node: fx.Node, target: object, at: str) -> fx.Node:
    users = list(node.users)
    _expect(
        len(users) == 1 and users[0].target is target,
        f"{node.name} of {at} is also read by other ops",
    )
    return users[0]


def _terms(logits: fx.Node) -> tuple[str, str, str]:
    """Return the letters of the rows, ``d`` and ``v`` in a product ``[…rows, d] · [v, d] → […rows,
    v]``."""
    left_term, right, result = (
        term.strip() for side in str(logits.args[0]).split("->") for term in side.split(",")
    )
    rows, inner, out = result[:-1], left_term[-1], result[-1]
    _expect(
        left_term == rows + inner and right == out + inner,
        f"the weight of {logits.meta['module'] or 'the model'} does not have the dims [v, d]",
    )
    return rows, inner, out


def _is_product_with(
    node: fx.Node, other: fx.Node, term: str, result: str, of_gradient: str
) -> bool:
    """Return whether a node is the product of a gradient and `other` with the given dims, up to
    renaming.

    Args:
        node: the product.
        other: the other operand.
        term: letters of the dims of `other`.
        result: letters of the dims of the product.
        of_gradient: letters of the dims of the gradient.
    """
    terms = [part.strip() for side in str(node.args[0]).split("->") for part in side.split(",")]
    operands = [term if operand is other else of_gradient for operand in node.args[1:]]
    expected = [*operands, result]
    same = [len(a) == len(b) for a, b in zip(terms, expected, strict=True)]
    names = {
        (a, b) for x, y in zip(terms, expected, strict=True) for a, b in zip(x, y, strict=False)
    }
    letters = {a for a, _ in names}
    return (
        other in node.args
        and all(same)
        and len(names) == len(letters) == len({b for _, b in names})
    )


def _past_casts(gradient: fx.Node) -> fx.Node:
    """Return the node after a cast of `gradient` to a wider dtype and back, which does not change
    values; without such casts, return `gradient`."""
    users = list(gradient.users)
    if len(users) == 1 and users[0].target is aten._to_copy.default:
        back = list(users[0].users)
        wider = torch.promote_types(dtype_of(users[0]), dtype_of(gradient)) == dtype_of(users[0])
        if (
            wider
            and len(back) == 1
            and back[0].target is aten._to_copy.default
            and dtype_of(back[0]) == dtype_of(gradient)
        ):
            return back[0]
    return gradient


def _scalar(factor: fx.Node, labels: fx.Node, ignored: int, at: str) -> fx.Node:
    """Return t if the factor of each row is t, or 0 for an ignored label; raise _NoMatchError
    otherwise."""
    _expect(factor.target is aten.mul.Tensor, f"the rows of the loss of {at} have weights")
    valid, scalar = factor.args
    visible = (
        valid.args[0]
        if isinstance(valid, fx.Node) and valid.target is aten._to_copy.default
        else valid
    )
    plain = (
        isinstance(visible, fx.Node)
        and visible.target is aten.ne.Scalar
        and visible.args == (labels, ignored)
    )
    _expect(
        plain and isinstance(scalar, fx.Node) and not shape_of(scalar),
        f"the rows of the loss of {at} have weights",
    )
    return scalar


def _rewrite(graph: fx.Graph, head: Head, rows: int) -> None:
    like, losses = head.logits, head.losses
    with graph.inserting_before(losses):
        fused = graph.call_function(
            ops.linear_cross_entropy, (head.hidden, head.weight, head.labels, head.ignored, rows)
        )
        fused.meta.update({name: like.meta[name] for name in ("phase", "module", "source")})
        fused.meta["val"] = (losses.meta["val"], head.hidden.meta["val"], head.weight.meta["val"])
        parts = []
        for number, value in enumerate(fused.meta["val"]):
            part = graph.call_function(operator.getitem, (fused, number))
            part.meta.update({**fused.meta, "val": value})
            parts.append(part)
    losses.replace_all_uses_with(parts[0])
    for gradient, part in ((head.d_hidden, parts[1]), (head.d_weight, parts[2])):
        with graph.inserting_before(gradient):
            scaled = emit(
                gradient,
                aten.mul.Tensor,
                (part, head.scale),
                shape_of(gradient),
                dtype=dtype_of(gradient),
            )
        scaled.meta[IN_PLACE] = True
        gradient.replace_all_uses_with(scaled)
