"""Refuse ops of a captured graph that no program can have."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from autopar.capture.diagnostics import user_line
from autopar.capture.tensor_kinds import of_forward, unusual_kind
from autopar.errors import CaptureError, Where

_MISCOMPILED = ("multilabel_margin_loss",)
# Graphs within a graph, of which one is run, or one many times; others that torch makes
# (checkpointing, autograd functions) are inlined.
_BRANCHES = ("cond", "while_loop", "switch", "map_impl", "scan", "associative_scan")


def refuse_branches(graph: fx.Graph) -> None:
    """Raise CaptureError at the first op that has graphs of its own: torch.cond, while_loop, map
    and scan."""
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if isinstance(node.target, torch._ops.HigherOrderOperator) and name in _BRANCHES:
            raise CaptureError(
                f"forward calls torch's {name.removesuffix('_impl')}, of which values decide what"
                " is run, and how often",
                where=_of_call(node),
                remedy=(
                    "compute what each branch gives and choose by torch.where, or write a loop of a"
                    " fixed number of steps in Python"
                ),
            )


def refuse_kinds(graph: fx.Graph) -> None:
    """Raise CaptureError at the first node of Dynamo's graph that gives a sparse, nested or
    other tensor that no program computes with."""
    for node in graph.nodes:
        value = node.meta.get("example_value")
        kind = unusual_kind(value) if isinstance(value, torch.Tensor) else None
        if kind is not None:
            readers = [node, *node.users] if node.op == "placeholder" else [node]
            lines = (user_line(reader.meta.get("stack_trace") or "") for reader in readers)
            raise of_forward(kind, Where(source=next((line for line in lines if line), "")))


def refuse_miscompiled(graph: fx.Graph) -> None:
    """Raise CaptureError at the first call for which torch's decomposition computes something
    else."""
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") in _MISCOMPILED:
            raise CaptureError(
                f"torch decomposes {node.target.__name__} into ops that compute another loss",
                where=_of_call(node),
                remedy="write the loss out, or use multilabel_soft_margin_loss",
            )


def refuse_random(graph: fx.Graph) -> None:
    """Raise CaptureError at the first op that draws random numbers, but not by position
    (`autopar.ops.random`).

    Its numbers would depend on how the tensor is sharded, and a distributed run would silently
    differ from the plain one.
    """
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and isinstance(node.target, torch._ops.OpOverload)
            and _draws(node)
        ):
            raise CaptureError(
                f"{node.target} draws random numbers, and has no counterpart that draws the same"
                " under every layout",
                where=_of_op(node),
                remedy=(
                    "draw with torch.rand, randn, randint, bernoulli or dropout, whose numbers"
                    " follow from the element's place"
                ),
            )


def refuse_float8(graph: fx.Graph) -> None:
    """Raise CaptureError at the first value in an 8-bit floating dtype: torch does not promote
    these, and no rule covers their sums."""
    for node, value in _tensors(graph):
        if value.is_floating_point() and value.dtype.itemsize < 2:
            raise CaptureError(
                f"a tensor of {value.dtype}, which programs do not compute with",
                where=_of_op(node),
                remedy="compute in torch.bfloat16 or float16 instead",
            )


def refuse_sparse(graph: fx.Graph) -> None:
    """Raise CaptureError at the first sparse value: programs compute with dense tensors, also for
    gradients."""
    for node, value in _tensors(graph):
        if value.layout is not torch.strided:
            raise CaptureError(
                "a tensor that is sparse, as the gradient of an embedding with sparse=True is:"
                " programs compute with dense ones",
                where=_of_op(node),
                remedy=(
                    "pass sparse=False to the embedding, and an optimizer of dense gradients (AdamW"
                    " in place of SparseAdam)"
                ),
            )


def _of_call(node: fx.Node) -> Where:
    """Return the place of a node in a graph of torch functions."""
    return Where(
        op=getattr(node.target, "__name__", ""),
        source=user_line(node.meta.get("stack_trace") or ""),
    )


def _of_op(node: fx.Node) -> Where:
    """Return the place of a node in a graph of ATen ops."""
    return Where(op=str(node.target), module=node.meta["module"], source=node.meta["source"])


def _tensors(graph: fx.Graph) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """Yield every node with one tensor result, and the tensor."""
    for node in graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            yield node, value


def _draws(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    # Attention ops carry the tag for their dropout, which is an argument.
    names = [argument.name for argument in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    probability = node.kwargs.get(
        "dropout_p", node.args[position] if len(node.args) > position else 0.0
    )
    return probability != 0.0
