"""Binding of emitted graphs to one rank. Process groups and coordinates replace mesh axes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.core.collective import HOST_KINDS
from autopar.kernels import bound_ops, dispatched, fused, host, row_kernels
from autopar.kernels.collectives import (
    COPIES,
    PARTS,
    PLACES,
    STEPS,
    AxisGroup,
    all_gather,
    all_reduce,
    all_to_all,
    bound_settings,
    halo,
    positional,
    range_of,
    reduce_scatter,
    shard,
    start,
    swap,
)
from autopar.ops.products import dot
from autopar.ops.vocabulary import embedding_backward


def bind(
    graph_module: fx.GraphModule, groups: Sequence[AxisGroup], device: str | None = None
) -> fx.GraphModule:
    """Return a copy of a graph whose steps refer to process groups and coordinates instead of mesh
    axes.

    Graphs are captured on the CPU. In the copy, ops with a `device` argument create their tensors
    on `device`, and on a GPU, norms and softmaxes are replaced by kernels that make one pass over
    memory (`autopar.kernels.row_kernels`). Steps along axes of size 1 are removed, except `halo`,
    which adds padding. `local_start` and `local_length` become literals. A sum over ranks is
    computed in the memory of its operand if no other node reads this memory.

    Args:
        graph_module: an emitted graph. The copy shares its tensors.
        groups: this rank's group along each mesh axis.
        device: the type of the device that the graph runs on; None leaves devices unchanged.
    """
    graph = fx.Graph()
    result = graph.graph_copy(graph_module.graph, {})
    graph.output(result)
    for node in list(graph.nodes):
        if node.op != "call_function" or not _bind_call(node, groups, device):
            _place_on_device(node, device)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (host.store, host.finish_store):
            node.args = (*node.args, _is_read_by_host(node))
        elif node.target in bound_ops.IN_PLACE and is_last_read(node.args[0]):
            node.target = bound_ops.IN_PLACE[node.target]  # type: ignore[index]
    return fx.GraphModule(graph_module, graph)


def _bind_call(node: fx.Node, groups: Sequence[AxisGroup], device: str | None) -> bool:
    """Bind a node if it refers to mesh axes or copies between device and host. Return whether the
    node is of this kind."""
    for targets, bind_node in _BINDERS:
        if node.target in targets:
            bind_node(node, groups, device)
            return True
    return False


def _place_on_device(node: fx.Node, device: str | None) -> None:
    """Make an op run on `device`: replace it by a kernel, or set its device argument."""
    if device == "cuda" and node.target in row_kernels.ON_GPU:
        node.target = row_kernels.ON_GPU[node.target]
    elif device == "cuda" and node.meta.get("on_host"):
        # copies from memory that is not pinned do not overlap with compute
        node.kwargs = {**node.kwargs, "pin_memory": True}
    elif device is not None and node.kwargs.get("device") is not None:
        node.kwargs = {**node.kwargs, "device": torch.device(device)}


def is_last_read(operand: Any) -> bool:
    """Return whether only one node reads the memory of a tensor."""
    return (
        isinstance(operand, fx.Node) and len(operand.users) == 1 and operand.target in _NEW_MEMORY
    )


def _is_read_by_host(stored: fx.Node) -> bool:
    """Return whether an op on the host reads a stored tensor. Such an op must wait for the copy."""
    return any(
        user.op == "call_function" and user.target not in (host.fetch, host.start_fetch)
        for user in stored.users
    )


def _bind_place(node: fx.Node, groups: Sequence[AxisGroup], device: str | None) -> None:
    """Replace the first index or the length of a rank's shard by a literal."""
    size, splitters = node.args
    place = range_of(size, splitters, [groups[axis].coordinate for axis, _ in splitters])
    _replace(node, place[PLACES.index(node.target)])


def _bind_copy(node: fx.Node, groups: Sequence[AxisGroup], device: str | None) -> None:
    target: Any = node.target
    node.target, node.args = getattr(host, target.__name__), (node.args[0], device or "cpu")


def _bind_experts(node: fx.Node, groups: Sequence[AxisGroup], device: str | None) -> None:
    *operands, split, most, axis, routed = node.args
    starts = dispatched.starts_of(split, axis, tuple(groups))
    settings = dispatched.settings_of(groups[axis], routed)
    node.target = dispatched.BOUND[node.target]
    node.args = (*operands, starts, most, *settings)


def _bind_step(node: fx.Node, groups: Sequence[AxisGroup], device: str | None) -> None:
    x, *rest, axis = positional(node)
    group = groups[axis]
    if group.size == 1 and node.target is not halo:
        _replace(node, x)
    elif node.target is shard:
        node.target, node.args, node.kwargs = (
            bound_ops.shard,
            (x, *rest, group.size, group.coordinate),
            {},
        )
    else:
        settings = bound_settings(
            node.target.__name__, (*rest, axis), node.kwargs.get("length"), group
        )
        node.target, node.args, node.kwargs = _BOUND[node.target], (x, *settings), {}


def _bind_part(node: fx.Node, groups: Sequence[AxisGroup], device: str | None) -> None:
    """Bind a `start` or a `finish`. Along an axis of size 1, both are removed, except for
    `halo`."""
    x, kind, *settings = node.args
    parts = bound_ops.STARTS if node.target is start else bound_ops.FINISHES
    if kind in HOST_KINDS:
        node.target, node.args = parts[kind], (x, device or "cpu")
        return
    group = groups[settings[-1]]
    if group.size == 1 and kind != "halo":
        _replace(node, x)
        return
    node.target, node.args, node.kwargs = (
        parts[kind],
        (x, *bound_settings(kind, settings, node.kwargs.get("length"), group)),
        {},
    )


def _bind_kernel(node: fx.Node, groups: Sequence[AxisGroup], device: str | None) -> None:
    node.target = fused.BOUND[node.target]
    node.args = tuple(
        arg.bind(groups[arg.axis]) if isinstance(arg, fused.ChunkedAxis) else arg
        for arg in node.args
    )


def _replace(node: fx.Node, value: Any) -> None:
    """Replace `node` by `value`, a node or a literal, in all its users, and erase `node`."""
    for user in list(node.users):
        user.args = fx.node.map_aggregate(user.args, lambda a: value if a is node else a)
        user.kwargs = fx.node.map_aggregate(user.kwargs, lambda a: value if a is node else a)
    node.graph.erase_node(node)


_BOUND: dict[Any, Callable[..., Tensor]] = {
    all_gather: bound_ops.all_gather,
    reduce_scatter: bound_ops.reduce_scatter,
    all_reduce: bound_ops.all_reduce,
    all_to_all: bound_ops.all_to_all,
    swap: bound_ops.swap,
    halo: bound_ops.halo,
}
_aten = torch.ops.aten
_NEW_MEMORY = (
    dot,
    embedding_backward,
    _aten._to_copy.default,
    _aten.add.Tensor,
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten.bmm.default,
    _aten.mm.default,
    _aten.mul.Tensor,
    _aten.sum.dim_IntList,
)
"""Functions whose result never shares memory with another tensor."""
_BINDERS: tuple[tuple[Collection[Any], Callable[..., None]], ...] = (
    (PLACES, _bind_place),
    (STEPS, _bind_step),
    (COPIES, _bind_copy),
    (PARTS, _bind_part),
    (fused.BOUND, _bind_kernel),
    (dispatched.BOUND, _bind_experts),
)
"""Functions that a node may call, with the function that binds the node."""
