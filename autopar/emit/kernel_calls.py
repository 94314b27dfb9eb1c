"""Kernels that fuse a product with a collective of an operand or of the result, if the plan selects
them (`autopar.cost.kernel_offers`).

A kernel that gathers an operand is placed at the first reader of the gathered tensor: at the
position of its product, or before it. A kernel that scatters a sum, and possibly normalizes it, is
placed at the position of the sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx

from autopar import ops
from autopar.analysis.fusable import NORMED, normed_after, product_added
from autopar.core.collective import Collective
from autopar.core.layout import Layout, Strategy, local_shape
from autopar.core.mesh import Mesh
from autopar.emit.context import PlanIndex, TensorKey, local_call
from autopar.errors import ChangedPlanError
from autopar.kernels import fused
from autopar.kernels.chunked import Shards
from autopar.ops.norms import RmsNorm
from autopar.plans import Communication, InKernel
from autopar.rules import call_of, operands_of, where_of
from autopar.sharding import pattern_of

Ref = tuple[str, int]  # trace node name, result index


@dataclass(frozen=True, slots=True)
class KernelStep:
    """The collective of a kernel's node.

    Attributes:
        collective: the collective.
        key: the key that a separate node of the collective would have.
        time_s: the seconds of the collective alone.
        saved_s: the seconds that the kernel saves.
        shards: the tensor that is gathered or scattered.
        others: the keys of other nodes that the kernel replaces: the addition to the product, and
            the norm.
    """

    collective: Collective
    key: str
    time_s: float
    saved_s: float
    shards: Shards
    others: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The bytes of the buffer on each rank that other ranks access."""
        return (
            self.shards.gather_bytes
            if self.collective.kind == "all_gather"
            else self.shards.scatter_bytes
        )


class LowersPlan(Protocol):
    """The state that both phases share (`autopar.emit.context.LoweringContext`)."""

    index: PlanIndex
    mesh: Mesh
    nodes: dict[str, fx.Node]
    emitted: list[tuple[str, str, Collective]]

    def key(self, ref: Ref) -> TensorKey:
        """Return the key of a tensor's node and its result index."""

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Return the global shape of a tensor of the trace."""

    def dtype(self, ref: Ref) -> torch.dtype:
        """Return the dtype of a tensor of the trace."""


class BuildsPhase(Protocol):
    """The builder of one phase's graph (`autopar.emit.phase.PhaseBuilder`)."""

    job: Any  # not LowersPlan, since attributes of protocols are invariant
    phase: str
    graph: fx.Graph
    have: dict[Ref, dict[Layout, fx.Node]]
    done: set[tuple[str, bool]]

    def get(self, ref: Ref, layout: Layout, wanted_by: str) -> fx.Node:
        """See `autopar.emit.phase.PhaseBuilder.get`.

        Args:
            ref, layout, wanted_by: see there.
        """

    def define(self, ref: Ref, layout: Layout, node: fx.Node) -> None:
        """See `autopar.emit.phase.PhaseBuilder.define`.

        Args:
            ref, layout, node: see there.
        """

    def define_results(self, node: fx.Node, here: fx.Node, strategy: Strategy) -> None:
        """See `autopar.emit.phase.PhaseBuilder.define_results`.

        Args:
            node, here, strategy: see there.
        """


def product_of(made: fx.Node, step: Communication) -> fx.Node:
    """Return the product that is fused with a collective of a node's result.

    For a gather, it is the first reader of the gathered tensor that has the kernel's pattern. For a
    scatter, it is the node, or the product that the node adds.

    Args:
        made: the node of the trace whose result is communicated.
        step: the communication.

    Raises:
        EmissionError: if no such product reads or returns the tensor.
    """
    pattern, gathers, place = (
        _kernel(step).node,
        step.collective.kind == "all_gather",
        product_added(made),
    )
    added = () if place is None else (made.args[place],)
    for node in made.users if gathers else (made, *added):
        if node.target is ops.dot and pattern_of(node.meta["key"])[0] == pattern:
            return node
    condition = f"which does not {'read' if gathers else 'return'} the tensor"
    raise ChangedPlanError(
        f"the plan fuses {step.collective.kind} into {pattern}, {condition}", where=where_of(made)
    )


def emit_kernel(
    phase: BuildsPhase, node: fx.Node, strategy: Strategy, refs: Sequence[Ref], again: bool
) -> bool:
    """Emit a product as a kernel with a collective, if the plan selects it.

    Args:
        phase: the builder of the graph.
        node: the product in the trace.
        strategy: the strategy of the product.
        refs: the tensors that the product reads.
        again: whether backward recomputes the product.

    Returns:
        Whether the product is emitted as a kernel, now or later.
    """
    job: LowersPlan = phase.job
    for operand, (ref, layout) in enumerate(zip(refs, strategy.inputs, strict=True)):
        step = job.index.steps.get((phase.phase, job.key(ref)), {}).get(layout)
        if step is None or step.kernel is None or step.kernel.again != again:
            continue
        if layout in phase.have.get(ref, {}):
            continue
        if step.collective.kind == "all_gather" and product_of(job.nodes[ref[0]], step) is node:
            _gather(phase, node, strategy, refs, operand, step)
            return True
        if step.kernel.name == NORMED:
            _norm(phase, node, strategy, refs, operand, step)
            return True
    step = _scatter_step(phase, node, strategy, again)
    if step is not None and _kernel(step).name != NORMED:
        _scatter(phase, node, strategy, refs, step)
    return step is not None or _is_emitted_later(phase, node, again)


def _is_emitted_later(phase: BuildsPhase, node: fx.Node, again: bool) -> bool:
    """Return whether a product is emitted later, with the addition whose sum is scattered."""
    total = next(iter(node.users), node)
    place = product_added(total)
    if place is None or total.args[place] is not node:
        return False
    step = _scatter_step(phase, total, phase.job.index.chosen[total.meta["key"]], again)
    return step is not None and product_of(total, step) is node


def _scatter_step(
    phase: BuildsPhase, made: fx.Node, strategy: Strategy, again: bool
) -> Communication | None:
    """Return the step with which a kernel scatters a node's only result; None if there is none."""
    if len(strategy.outputs) != 1:
        return None
    for step in phase.job.index.steps.get(
        (phase.phase, phase.job.key((made.name, 0))), {}
    ).values():
        scatters = step.collective.kind == "reduce_scatter" and step.source == strategy.outputs[0]
        if scatters and step.kernel is not None and step.kernel.again == again:
            return step
    return None


def _gather(
    phase: BuildsPhase,
    node: fx.Node,
    strategy: Strategy,
    refs: Sequence[Ref],
    operand: int,
    step: Communication,
) -> None:
    c, ref = step.collective, refs[operand]
    layouts = [step.source if i == operand else layout for i, layout in enumerate(strategy.inputs)]
    operands = [
        phase.get(each, layout, node.meta["key"])
        for each, layout in zip(refs, layouts, strict=True)
    ]
    args = (*operands[:2], node.args[0], operand, _chunked_axis(step))
    both = _call(
        phase,
        fused.all_gather_matmul,
        args,
        node,
        ref,
        step,
        _bias(phase, node, strategy, operands),
    )
    full_operand, product = (
        phase.graph.call_function(operator.getitem, (both, i)) for i in range(2)
    )
    source = phase.job.nodes[ref[0]].meta.get("source", "")
    full_operand.meta.update(
        key=f"{phase.job.key(ref)[0]}/{c.kind}",
        module=step.module,
        phase=phase.phase,
        source=source,
    )
    product.meta.update({k: v for k, v in both.meta.items() if k != "kernel"})
    phase.define(ref, step.target, full_operand)
    phase.define_results(node, product, strategy)


def _scatter(
    phase: BuildsPhase, node: fx.Node, strategy: Strategy, refs: Sequence[Ref], step: Communication
) -> None:
    product, addend = product_of(node, step), None
    if product is not node:
        others = [
            (ref, layout)
            for ref, layout in zip(refs, strategy.inputs, strict=True)
            if ref[0] != product.name
        ]
        (addend,) = (phase.get(ref, layout, node.meta["key"]) for ref, layout in others)
        strategy = phase.job.index.chosen[product.meta["key"]]
        refs = [(x.name, 0) for x in operands_of(product)]
    operands = [
        phase.get(ref, layout, product.meta["key"])
        for ref, layout in zip(refs, strategy.inputs, strict=True)
    ]
    args = (*operands[:2], addend, product.args[0], _chunked_axis(step))
    here = _call(
        phase,
        fused.matmul_reduce_scatter,
        args,
        product,
        (node.name, 0),
        step,
        _bias(phase, product, strategy, operands),
    )
    if product is not node:
        here.meta["kernel"] = replace(here.meta["kernel"], others=(node.meta["key"],))
    phase.define((node.name, 0), step.target, here)


def _chunked_axis(step: Communication) -> fused.ChunkedAxis:
    """Return the dim and axis of a kernel's collective, and the number of chunks."""
    c = step.collective
    return fused.ChunkedAxis(c.dim, c.axis, _kernel(step).num_chunks)


def _bias(
    phase: BuildsPhase, product: fx.Node, strategy: Strategy, operands: Sequence[fx.Node]
) -> dict[str, Any]:
    """Return the bias of a product and the ranks that add it, as keyword arguments. Return an empty
    dict if there is no bias."""
    _, (*_, bias), named = local_call(
        phase.graph, call_of(product), strategy, phase.job.mesh.shape, operands
    )
    return {"bias": bias, **named} if len(operands) > 2 else {}


def _norm(
    phase: BuildsPhase,
    node: fx.Node,
    strategy: Strategy,
    refs: Sequence[Ref],
    place: int,
    step: Communication,
) -> None:
    """Emit the kernel that scatters the product `refs[place]`, adds a residual and normalizes the
    sum."""
    product, chosen = phase.job.nodes[refs[place][0]], phase.job.index.chosen
    after = normed_after(product)
    if after is None or after.total is not node:
        message = f"the plan fuses a norm into {_kernel(step).node}, but no norm of its sum follows"
        raise ChangedPlanError(message, where=where_of(node))
    reads = zip(operands_of(product), chosen[product.meta["key"]].inputs, strict=True)
    a, b = (phase.get((x.name, 0), layout, product.meta["key"]) for x, layout in reads)
    residual = phase.get(refs[1 - place], strategy.inputs[1 - place], node.meta["key"])
    _, _, scale, *settings = after.norm.args
    weight = phase.get(
        (scale.name, 0), chosen[after.norm.meta["key"]].inputs[2], after.norm.meta["key"]
    )
    args = (a, b, residual, weight, product.args[0], _chunked_axis(step), RmsNorm(*settings))
    here = _call(phase, fused.matmul_reduce_add_rmsnorm, args, product, refs[place], step)
    here.meta["kernel"] = replace(
        here.meta["kernel"], others=tuple(following.meta["key"] for following in after)
    )
    for i, following in enumerate(after):
        part = phase.graph.call_function(operator.getitem, (here, i))
        part.meta.update({k: v for k, v in here.meta.items() if k != "kernel"})
        part.meta.update(
            key=following.meta["key"],
            module=following.meta["module"],
            source=following.meta.get("source", ""),
        )
        phase.done.add((following.name, False))
        phase.define_results(following, part, chosen[following.meta["key"]])


def _call(
    phase: BuildsPhase,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    node: fx.Node,
    moved: Ref,
    step: Communication,
    named: dict[str, Any] | None = None,
) -> fx.Node:
    kernel, key = _kernel(step), phase.job.key(moved)[0]
    here = phase.graph.call_function(target, args, named)
    here.meta.update(
        key=node.meta["key"],
        module=node.meta["module"],
        phase=phase.phase,
        source=node.meta.get("source", ""),
    )
    here.meta["recomputed"] = kernel.again
    c, sizes = step.collective, phase.job.mesh.shape
    full_shape = local_shape(
        phase.job.shape(moved), step.target if c.kind == "all_gather" else step.source, sizes
    )
    shards = Shards.of(full_shape, c.dim, phase.job.dtype(moved), sizes[c.axis], kernel.num_chunks)
    here.meta["kernel"] = KernelStep(c, f"{key}/{c.kind}", step.time_s, kernel.saved_s, shards)
    phase.job.emitted.append((phase.phase, key, c))
    return here


def _kernel(step: Communication) -> InKernel:
    assert step.kernel is not None, "the step is fused with a product"
    return step.kernel
