"""Mixed precision: parameters rest in their own dtype, and are read in a narrower one.

Two ways lead there, and one trace describes both. With a precision, the call is captured as if every wider floating parameter and input
had that dtype, buffers apart: what `MixedPrecisionPolicy(param_dtype=...)` of torch's FSDP does. Under `torch.autocast` the model casts
by itself, op by op. Either way a placeholder that is read in one narrower dtype alone has that dtype in the graph, `compute_dtype`, and
the cast is done before anything is moved, so that gathers move the narrow one. Gradients are cast back in the graph: they have the
parameter's own dtype before they are summed over devices. What is only added to sums of several microbatches is left as it is made, where
that is enough (`autopar.cost.uncast`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.capture.graphs import cast, dtype_of, emit, is_tensor, shape_of

_cast = torch.ops.aten._to_copy.default


def narrowed(dtype: torch.dtype, precision: torch.dtype | None) -> torch.dtype:
    """`precision` in place of a wider floating dtype; any other as it is."""
    if precision is None or not dtype.is_floating_point or dtype.itemsize <= precision.itemsize:
        return dtype
    return precision


def cast_input(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> None:
    """Let a placeholder have its own, wider `dtype`: what read it reads a cast of it."""
    users, narrow = list(node.users), dtype_of(node)
    last = [other for other in graph.nodes if other.op == "placeholder"][-1]
    node.meta["val"] = node.meta["val"].to(dtype)
    with graph.inserting_after(last):
        read = cast(node, node, narrow)
    for user in users:
        user.replace_input_with(node, read)


def widened(gradient: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The gradient of a parameter that rests in `dtype`: of one that is read in several places the terms are cast, and then added up."""
    if dtype_of(gradient) == dtype:
        return gradient
    terms = gradient.args[:2] if gradient.target is torch.ops.aten.add.Tensor and not gradient.kwargs and len(gradient.users) == 1 else ()
    if len(terms) == 2 and all(is_tensor(term) and shape_of(term) == shape_of(gradient) for term in terms):
        with gradient.graph.inserting_after(gradient):
            return emit(gradient, gradient.target, tuple(widened(term, dtype) for term in terms), shape_of(gradient), dtype=dtype)
    with gradient.graph.inserting_after(gradient):
        return cast(gradient, gradient, dtype)


def absorb_casts(graph: fx.Graph, parameter: fx.Node) -> None:
    """Let a placeholder that all its users cast to one narrower floating dtype have that dtype; the casts go."""
    dtypes = {user.kwargs.get("dtype") if _is_cast(user) else None for user in parameter.users}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or narrowed(dtype_of(parameter), dtype) == dtype_of(parameter):
        return
    parameter.meta["val"] = parameter.meta["val"].to(dtype)
    for user in list(parameter.users):
        user.replace_all_uses_with(parameter)
        graph.erase_node(user)


def before_cast(gradient: fx.Node) -> fx.Node:
    """What a cast to another floating dtype, which nothing else reads, casts; else the gradient itself."""
    alone = _is_cast(gradient) and len(gradient.users) == 1
    return gradient.args[0] if alone and dtype_of(gradient.args[0]).is_floating_point else gradient  # type: ignore[arg-type, return-value]


def _is_cast(node: fx.Node) -> bool:
    """Whether it is a cast and nothing else: not to another device or layout."""
    return node.target is _cast and _says(node.kwargs) <= {"dtype"}


def _says(kwargs: Mapping[str, Any]) -> set[str]:
    return {name for name, value in kwargs.items() if value not in (None, False)}
