"""Sums of two tensors of which one is a product: as a gradient of what several products read is."""

from __future__ import annotations

import torch
from torch import fx

from autopar import ops
from autopar.capture.graphs import dtype_of, shape_of

_ADD = torch.ops.aten.add.Tensor


def product_added(node: fx.Node) -> int | None:
    """The place among a sum's arguments of the product that is taken where the sum is made, and added to the other there, if a kernel
    scatters the sum: of `products_added` the one that comes last, None where there is none."""
    places = products_added(node)
    if len(places) == 2:
        return int(node.args[0] < node.args[1])  # type: ignore[operator]  # nodes stand in an order
    return places[0] if places else None


def products_added(node: fx.Node) -> list[int]:
    """The places among a sum's arguments of products of the sum's phase, shape and dtype that nothing else reads.

    Of backward's sums: forward's may run again, from the product as it was kept, and a product that is taken with the sum never lies alone.
    """
    if node.target is not _ADD or node.kwargs or len(node.args) != 2 or node.args[0] is node.args[1] or node.meta["phase"] != "backward":
        return []
    return [i for i, x in enumerate(node.args) if isinstance(x, fx.Node) and _only_added(x, node)]


def _only_added(x: fx.Node, total: fx.Node) -> bool:
    alone = x.op == "call_function" and x.target is ops.dot and len(x.users) == 1 and x.meta["phase"] == total.meta["phase"]
    return alone and all(isinstance(each, fx.Node) and _like(each, total) for each in total.args)


def _like(x: fx.Node, other: fx.Node) -> bool:
    return shape_of(x) == shape_of(other) and dtype_of(x) == dtype_of(other)
