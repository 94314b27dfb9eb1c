"""Refuse ops of a captured graph that programs do not support."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from autopar.capture.diagnostics import user_line
from autopar.capture.tensor_kinds import of_forward, unusual_kind
from autopar.errors import CaptureError, Where

_MISCOMPILED = ("multilabel_margin_loss",)
# Control-flow ops with subgraphs. Other ops with subgraphs (checkpointing, autograd functions) are
# inlined.
_BRANCHES = ("cond", "while_loop", "switch", "map_impl", "scan", "associative_scan")


def refuse_branches(graph: fx.Graph) -> None:
    """Raise CaptureError at the first control-flow op: torch.cond, while_loop, map and similar."""
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if isinstance(node.target, torch._ops.HigherOrderOperator) and name in _BRANCHES:
            raise CaptureError(
                f"forward calls torch's {name.removesuffix('_impl')}; programs do not support"
                " control-flow ops",
                where=_of_call(node),
                remedy=(
                    "compute the results of all branches and select one with torch.where, or write"
                    " a Python loop with a fixed number of steps"
                ),
            )


def refuse_kinds(graph: fx.Graph) -> None:
    """Raise CaptureError at the first node of Dynamo's graph whose result is a sparse, nested or
    other unsupported tensor."""
    for node in graph.nodes:
        value = node.meta.get("example_value")
        kind = unusual_kind(value) if isinstance(value, torch.Tensor) else None
        if kind is not None:
            readers = [node, *node.users] if node.op == "placeholder" else [node]
            lines = (user_line(reader.meta.get("stack_trace") or "") for reader in readers)
            raise of_forward(kind, Where(source=next((line for line in lines if line), "")))


def refuse_miscompiled(graph: fx.Graph) -> None:
    """Raise CaptureError at the first call that torch decomposes incorrectly."""
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") in _MISCOMPILED:
            raise CaptureError(
                f"torch decomposes {node.target.__name__} into ops that compute a different loss",
                where=_of_call(node),
                remedy="compute the loss with elementwise ops and sums, or use"
                " multilabel_soft_margin_loss",
            )


def refuse_random(graph: fx.Graph) -> None:
    """Raise CaptureError at the first op that draws random numbers and has no counterpart in
    `autopar.ops.random`.

    Its numbers would depend on how the tensor is sharded, and the results of a distributed run
    would differ from those of the plain model without an error.
    """
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and isinstance(node.target, torch._ops.OpOverload)
            and _draws(node)
        ):
            raise CaptureError(
                f"{node.target} draws random numbers that would depend on the layout",
                where=_of_op(node),
                remedy=(
                    "use torch.rand, randn, randint, bernoulli or dropout, which draw the same"
                    " numbers under every layout"
                ),
            )


def refuse_float8(graph: fx.Graph) -> None:
    """Raise CaptureError at the first value in an 8-bit floating dtype: torch does not promote
    these dtypes, and no sharding rule covers their sums."""
    for node, value in _tensors(graph):
        if value.is_floating_point() and value.dtype.itemsize < 2:
            raise CaptureError(
                f"programs do not support tensors of {value.dtype}",
                where=_of_op(node),
                remedy="compute in torch.bfloat16 or float16 instead",
            )


def refuse_sparse(graph: fx.Graph) -> None:
    """Raise CaptureError at the first sparse value; gradients must be dense too."""
    for node, value in _tensors(graph):
        if value.layout is not torch.strided:
            raise CaptureError(
                "programs do not support sparse tensors, such as the gradient of an embedding with"
                " sparse=True",
                where=_of_op(node),
                remedy=(
                    "pass sparse=False to the embedding, and use an optimizer for dense gradients"
                    " (AdamW instead of SparseAdam)"
                ),
            )


def _of_call(node: fx.Node) -> Where:
    """Return the location of a node in a graph of torch functions."""
    return Where(
        op=getattr(node.target, "__name__", ""),
        source=user_line(node.meta.get("stack_trace") or ""),
    )


def _of_op(node: fx.Node) -> Where:
    """Return the location of a node in a graph of ATen ops."""
    return Where(op=str(node.target), module=node.meta["module"], source=node.meta["source"])


def _tensors(graph: fx.Graph) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """Yield every node with one tensor result, and the tensor."""
    for node in graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            yield node, value


def _draws(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    # Attention ops have the tag because of their dropout, whose probability is an argument.
    names = [argument.name for argument in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    probability = node.kwargs.get(
        "dropout_p", node.args[position] if len(node.args) > position else 0.0
    )
    return probability != 0.0
