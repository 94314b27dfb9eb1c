"""Check that a plan is legal, whoever wrote it.

Emission would turn an illegal strategy into a program that runs and computes something else.
Therefore every strategy must be one that the op's rule offers, every border must be split evenly,
and every collective must lead from its source layout to its target layout.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from autopar.analysis.gradients import addable_uncast
from autopar.capture.trace import Trace
from autopar.core.layout import Layout, Strategy
from autopar.core.layout_graph import neighbours
from autopar.core.mesh import Mesh
from autopar.emit.context import (
    PlanIndex,
    TensorKey,
    input_key,
    output_key,
    parameter_key,
    placeholder_keys,
    storage_key,
)
from autopar.errors import ChangedPlanError, Where
from autopar.kernels.collectives import sum_dtype
from autopar.plans import Communication
from autopar.rules import call_of, is_strategy, own_moves, where_of
from autopar.rules.dispatch import OWN

_Value = tuple[torch.Size, torch.dtype]


def check_legal(trace: Trace, index: PlanIndex, mesh: Mesh, *, accumulates: bool) -> None:
    """Check every decision of the plan against the traced graph.

    Args:
        trace: the traced model. index: the plan's decisions. mesh: the plan's mesh.
        accumulates: whether gradients are added to sums, which may be partial sums over ranks.

    Raises:
        PlanError: for the first decision that is not legal.
    """
    _check_strategies(trace, index, mesh, accumulates=accumulates)
    values = dict(_values(trace))
    _check_borders(trace, index, mesh, accumulates=accumulates)
    for i in trace.given_back:
        at = index.chosen[input_key(i.path)].inputs[0]
        if not at.is_replicated:
            raise ChangedPlanError(
                f"the gradient of input {i.path!r} would have layout {at}, but every rank needs"
                " the full gradient"
            )
    for (_, tensor), steps in index.steps.items():
        for step in steps.values():
            _check_step(tensor, step, values, mesh)
    _check_own(trace, index, mesh)


def _check_strategies(trace: Trace, index: PlanIndex, mesh: Mesh, *, accumulates: bool) -> None:
    """Check the strategies of all compute nodes."""
    uncast = addable_uncast(trace) if accumulates else {}
    for node in trace.graph.nodes:
        if node.op == "call_function":
            for choices in (index.chosen, index.again):
                if node.meta["key"] in choices:
                    _check_strategy(
                        node, choices[node.meta["key"]], mesh, may_be_uncast=node.name in uncast
                    )


def _check_borders(trace: Trace, index: PlanIndex, mesh: Mesh, *, accumulates: bool) -> None:
    """Check the layouts in which tensors go in and out of the graphs."""
    summed = {parameter_key(p.name) for p in trace.parameters} if accumulates else set()
    for key, layouts, value, read in _borders(trace, index):
        of_sums = any(layout.has_partial or layout.uncast for layout in layouts) and not (
            read and key in summed
        )
        if (
            len(layouts) != 1
            or of_sums
            or layouts[0].special
            or not _fits(layouts[0], value.shape, mesh)
        ):
            shown = ", ".join(map(str, layouts)) or "no layout"
            raise ChangedPlanError(
                f"{key} of shape {tuple(value.shape)} cannot have layout {shown} on mesh {mesh}"
            )


def _borders(
    trace: Trace, index: PlanIndex
) -> Iterator[tuple[str, tuple[Layout, ...], torch.Tensor, bool]]:
    """Iterate over the tensors that the graphs take or return: key, layouts in the plan, traced
    value, and whether the graph returns it."""
    nodes = {node.name: node for node in trace.graph.nodes}
    for name, key in placeholder_keys(trace).items():
        yield key, index.chosen[key].outputs, nodes[name].meta["val"], False
    for p in trace.parameters:
        if storage_key(p.name) in index.chosen:
            yield (
                storage_key(p.name),
                index.chosen[storage_key(p.name)].outputs,
                nodes[p.node].meta["val"],
                False,
            )
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    named = [
        (p.gradient, parameter_key(p.name)) for p in trace.parameters if p.gradient is not None
    ]
    named += [(i.gradient, input_key(i.path)) for i in trace.inputs if i.gradient is not None]
    named += [(i, output_key(o.path)) for i, o in enumerate(trace.outputs)] + [
        (i, output_key(n)) for n, i in trace.mutated.items()
    ]
    for position, key in named:
        yield key, index.chosen[key].inputs, results[position].meta["val"], True


def _check_strategy(node: fx.Node, strategy: Strategy, mesh: Mesh, *, may_be_uncast: bool) -> None:
    uncast = any(
        at.uncast for at in (*strategy.inputs, *(() if may_be_uncast else strategy.outputs))
    )
    if uncast or not is_strategy(call_of(node), strategy.plain, mesh.shape):
        raise ChangedPlanError(
            f"{node.meta['key']} cannot run as {strategy} on mesh {mesh}", where=where_of(node)
        )


def _check_own(trace: Trace, index: PlanIndex, mesh: Mesh) -> None:
    """Check that the collectives that nodes do themselves are those of their strategies."""
    left = dict(index.own)
    for node in trace.graph.nodes:
        key = node.meta.get("key", "")
        for phase, choices in ((node.meta.get("phase"), index.chosen), ("backward", index.again)):
            if (
                node.op == "call_function"
                and key in choices
                and (node.target in OWN or (phase, key) in left)
            ):
                said = tuple(c.collective for c in left.pop((str(phase), key), ()))
                if said != own_moves(call_of(node), choices[key], mesh.shape):
                    what = (
                        f"the internal communication of {key} in {phase} differs from that of its"
                        f" strategy {choices[key]}"
                    )
                    raise ChangedPlanError(what, where=where_of(node))
    for phase, key in left:
        raise ChangedPlanError(
            f"the plan has internal communication of {key} in {phase}, where it does not run"
        )


def _values(trace: Trace) -> Iterator[tuple[TensorKey, _Value]]:
    """Iterate over shape and dtype of every tensor, and of the sums of gradients, by key."""
    keys = placeholder_keys(trace)
    for node in trace.graph.nodes:
        value = node.meta.get("val")
        for result, tensor in enumerate(value if isinstance(value, tuple | list) else (value,)):
            if isinstance(tensor, torch.Tensor):
                yield (keys.get(node.name, node.meta["key"]), result), (tensor.shape, tensor.dtype)
    nodes = {node.name: node for node in trace.graph.nodes}
    for p in trace.parameters:
        value = nodes[p.node].meta["val"]
        yield (storage_key(p.name), 0), (value.shape, value.dtype)
        yield (storage_key(p.name), 1), (value.shape, sum_dtype(p.dtype))


def _check_step(
    tensor: TensorKey, step: Communication, values: dict[TensorKey, _Value], mesh: Mesh
) -> None:
    moved = getattr(torch, str(step.collective.dtype), None)
    if tensor not in values:
        raise ChangedPlanError(f"the plan communicates {tensor}, which the model does not compute")
    shape, dtype = values[tensor]
    wide = isinstance(moved, torch.dtype) and torch.promote_types(dtype, moved) == moved
    legal = wide and _fits(step.source, shape, mesh)
    stored = [step.target.on_device()] if step.target.host else []
    possible = (
        neighbours(shape, dtype, step.source, mesh.shape, moved, step.target.special, stored=stored)
        if legal
        else []
    )
    if (step.collective, step.target) not in possible:
        c = step.collective
        raise ChangedPlanError(
            f"no {c.kind} in {c.dtype}{f' on axis {c.axis}' if c.axis >= 0 else ''} leads from"
            f" {step.source} to {step.target} for {tensor} of {dtype} {tuple(shape)} on mesh"
            f" {mesh}",
            where=Where(module=step.module),
        )


def _fits(layout: Layout, shape: torch.Size, mesh: Mesh) -> bool:
    return len(layout.placements) == len(mesh.shape) and layout.fits(shape, mesh.shape)
