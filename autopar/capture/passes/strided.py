"""``as_strided`` reads a tensor's memory, of which a part, or what was gathered of parts, may have another order."""

from __future__ import annotations

import torch
from torch import fx

from autopar.capture.graphs import aten, calls, dtype_of, emit, shape_of
from autopar.errors import CaptureError, Where


def copy_before_strided(graph: fx.Graph) -> None:
    """Let it read a copy whose elements lie as they do in what was captured.

    Raises:
        CaptureError: they lie apart there, or one is several.
    """
    for node in calls(graph, aten.as_strided.default):
        x = node.args[0]
        strides = x.meta["val"].stride()
        order = sorted(range(len(strides)), key=lambda dim, strides=strides: -strides[dim])  # type: ignore[misc]
        if not x.meta["val"].permute(order).is_contiguous():
            raise CaptureError(
                "forward reads by strides (as_strided) a tensor that is a part or an expansion of another",
                where=Where(op=str(node.target), module=node.meta["module"], source=node.meta["source"]),
                remedy="read a copy: `x.contiguous().as_strided(...)`, or windows by `x.unfold(dim, size, step)`",
            )
        shape = tuple(shape_of(x)[dim] for dim in order)
        with graph.inserting_before(node):
            laid = x if order == list(range(len(order))) else emit(node, aten.permute.default, (x, order), shape, dtype=dtype_of(x))
            how = {"memory_format": torch.contiguous_format}
            copied = emit(node, aten.clone.default, (laid,), shape, dtype=dtype_of(x), kwargs=how)
        node.args = (copied, *node.args[1:])
