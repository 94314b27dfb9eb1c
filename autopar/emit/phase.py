"""Emission of the forward or the backward graph.

The emission of each node requests tensors in a layout and a phase (`PhaseBuilder.get`). A request
emits what the tensor depends on: a collective that creates the layout (and, before it, its
operand), a saved value, or a node that backward recomputes. Collectives that shrink their operand
are issued as soon as the operand exists; other collectives are issued at their first reader. A node
is recomputed when backward first requests its result, so a layer is recomputed directly before its
backward.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.analysis.fusable import shared_rows
from autopar.analysis.gradients import has_own_memory, operand_written, owner_of
from autopar.capture.graphs import IN_PLACE
from autopar.capture.trace import Parameter
from autopar.core.collective import JOINING
from autopar.core.fx_nodes import add_call
from autopar.core.layout import Layout, Strategy
from autopar.emit import kernel_calls
from autopar.emit.context import (
    CALLS,
    CAST,
    LoweringContext,
    MovedTensor,
    Ref,
    buffer_key,
    input_key,
    is_ready_at_start,
    local_call,
    output_key,
    parameter_key,
)
from autopar.errors import ChangedPlanError
from autopar.kernels.collectives import add_to
from autopar.kernels.dispatched import with_routes
from autopar.ops.in_place import in_place_form
from autopar.plans import Communication
from autopar.rules import call_of, operands_of, where_of

# --------------------------------------------------------------------------------------------------
# Nodes that write their result into an operand. The trace must allow it, and no other node of the
# program may read the operand.


def mark(node: fx.Node, here: fx.Node, strategy: Strategy) -> None:
    """Mark the operand into which a node of the program may write its result. The operand and the
    result must be sharded in the same way.

    Args:
        node: the node of the trace.
        here: the node of the program, which gets the mark.
        strategy: the layouts of the node.
    """
    place = operand_written(node)
    if place is not None:
        operand = strategy.inputs[operands_of(node).index(node.args[place])]
        here.meta.update({IN_PLACE: place} if operand.splits_like(strategy.outputs[0]) else {})


def write(node: fx.Node, saved: Mapping[fx.Node, fx.Node], mesh_shape: Sequence[int]) -> None:
    """Make a node write into its marked operand if that is safe; otherwise remove the mark.

    Args:
        node: a node of the program.
        saved: the placeholder in this graph for each saved forward node.
        mesh_shape: the sizes of the mesh axes.
    """
    place = node.meta.pop(IN_PLACE, None)
    form = None if place is None else in_place_form(node.target)
    if form is not None and _may_be_overwritten(node.args[place], saved, mesh_shape):
        node.target, keyword = form
        node.kwargs = {**node.kwargs, keyword: node.args[place]} if keyword else node.kwargs
        node.meta[IN_PLACE] = place


def _may_be_overwritten(
    node: fx.Node, saved: Mapping[fx.Node, fx.Node], mesh_shape: Sequence[int]
) -> bool:
    """Return whether a tensor has no other reader and shares its memory with no other tensor.

    A step along an axis of one device returns its operand, so its result shares memory.
    """
    source = next((source for source, placeholder in saved.items() if placeholder is node), node)
    views = (
        user for user in source.users if user.op == "call_function" and not has_own_memory(user)
    )
    step = source.meta.get("collective")
    handed_on = step is not None and step.axis >= 0 and mesh_shape[step.axis] == 1
    return len(node.users) == 1 and has_own_memory(source) and not handed_on and not any(views)


_cast, _clone = torch.ops.aten._to_copy.default, torch.ops.aten.clone.default
# meta of steps that is not copied to saved values
_OF_STEPS = ("collective", "slack", "time_s", "kernel", "own", "moved")
_AT_ONCE = ("reduce_scatter", "all_reduce", "store")
"""Collectives that return less than they read, or free device memory."""
Have = dict[Ref, dict[Layout, fx.Node]]


@dataclass(frozen=True, slots=True)
class GradientSums:
    """The sums of gradients in a graph.

    Attributes:
        nodes: the node of the current sum of each parameter's gradient, by name.
        wide: the reduced value of each tensor and layout in the dtype of the reduction, if that is
            wider than the dtype of the tensor.
    """

    nodes: dict[str, fx.Node] = field(default_factory=dict)
    wide: dict[tuple[Ref, Layout], fx.Node] = field(default_factory=dict)


@dataclass
class PhaseBuilder:
    """The builder of one phase's graph.

    Attributes:
        job: the state that both phases share.
        phase: ``forward`` or ``backward``.
        graph: the graph.
        have: the node of each tensor in each layout.
        earlier: for backward, the builder of forward.
        saved: for backward, the placeholder of each saved forward node.
        done: the names of emitted nodes, and whether they are recomputed.
        in_progress: the tensors and layouts for which steps are being emitted.
        gradient_sums: the sums of the gradients of parameters.
        copied: the placeholders of parameters that this graph casts to the dtype in which they are
            read.
    """

    job: LoweringContext
    phase: str
    graph: fx.Graph = field(default_factory=fx.Graph)
    have: Have = field(default_factory=dict)
    earlier: PhaseBuilder | None = None
    saved: dict[fx.Node, fx.Node] = field(default_factory=dict)
    done: set[tuple[str, bool]] = field(default_factory=set)
    in_progress: set[tuple[Ref, Layout]] = field(default_factory=set)
    gradient_sums: GradientSums = field(default_factory=GradientSums)
    copied: set[str] = field(default_factory=set)

    def placeholders(
        self, parameters: tuple[Parameter, ...], buffers: tuple[Parameter, ...], *, casts: bool
    ) -> None:
        """Write the placeholders of the graph.

        Args:
            parameters, buffers: the parameters and buffers of the trace.
            casts: whether this graph takes parameters in their stored dtype and casts them to the
                dtype in which they are read.
        """
        chosen = self.job.index.chosen
        narrowed = {p.node: p.compute_dtype for p in parameters if p.is_narrowed and casts}
        placeholders: list[tuple[str, fx.Node]] = []
        named = [(p.node, parameter_key(p.name), p.name) for p in parameters]
        named += [(b.node, buffer_key(b.name), b.name) for b in buffers]
        named += [(i.node, input_key(i.path), i.path) for i in self.job.trace.inputs]
        for node, key, name in named:
            here = self.graph.placeholder(node)
            here.meta.update(key=key, module=name, phase=self.phase)
            placeholders.append((node, here))
        for node, here in placeholders:
            key, read = here.meta["key"], here
            if node in narrowed:
                self.copied.add(node)
                read = add_call(self.graph, _cast, (here,), {"dtype": narrowed[node]})
                read.meta.update(here.meta, key=key + CAST, on_host=chosen[key].outputs[0].host)
            self.define((node, 0), chosen[key].outputs[0], read)

    def tangents(self) -> list[fx.Node]:
        """Write one placeholder for each output that has a tangent."""
        placeholders = []
        for o in self.job.trace.differentiable:
            key = self.job.placeholder_keys[o.tangent]
            here = self.graph.placeholder("tangent" if o.is_loss else o.tangent)
            here.meta.update(key=key, module="", phase=self.phase)
            self.define((o.tangent, 0), self.job.index.chosen[key].outputs[0], here)
            placeholders.append(here)
        return placeholders

    def hold_sums(self) -> None:
        """Write one placeholder for each trained parameter: the sum of its gradient, to which the
        gradient is added as soon as it is computed."""
        for p in self.job.trace.parameters:
            if p.gradient is not None:
                here = self.graph.placeholder(f"sum_{p.node}")
                here.meta.update(key=parameter_key(p.name), module=p.name, phase=self.phase)
                self.gradient_sums.nodes[p.name] = here

    def add_up(self, name: str) -> None:
        """Add the result of a node to the sums of the parameters whose gradient it is.

        Args:
            name: the name of a node of the trace.
        """
        sums = self.gradient_sums
        for p in self.job.parameters_of.get(name, ()) if sums.nodes else ():
            key, total = parameter_key(p.name), sums.nodes[p.name]
            layout = self.job.index.chosen[key].inputs[0]
            gradient = self.get((name, 0), layout, key)
            gradient = sums.wide.get(((name, 0), layout), gradient)
            if total.op == "placeholder":
                added = add_call(self.graph, add_to, (total, gradient))
                added.meta.update(total.meta, key=f"{key}/add_to", slack="deferrable")
                sums.nodes[p.name] = added

    def define(self, ref: Ref, layout: Layout, node: fx.Node) -> None:
        """Record the node of a tensor in a layout, and immediately issue the collectives that
        shrink it.

        Args:
            ref: the tensor in the trace.
            layout: the layout.
            node: the node of the program.
        """
        node.meta.setdefault("holds", (ref, layout))  # `verify` compares the node with this tensor
        self.have.setdefault(ref, {})[layout] = node
        for target, step in self.job.index.steps.get((self.phase, self.job.key(ref)), {}).items():
            if (
                step.source == layout
                and step.collective.kind in _AT_ONCE
                and target not in self.have[ref]
            ):
                self._step(ref, node, step)

    def _runs_again(self, node: fx.Node) -> bool:
        """Return whether backward recomputes a node of forward."""
        return node.op == "call_function" and node.meta["key"] in self.job.index.recomputed

    def get(self, ref: Ref, layout: Layout, wanted_by: str) -> fx.Node:
        """Return the node of a tensor in a layout. Emit the nodes that it depends on.

        Args:
            ref: the tensor in the trace.
            layout: the requested layout.
            wanted_by: the key of the reader, for the error message.

        Raises:
            PlanError: if the plan has no collective, saved value or recomputation that creates the
                tensor in this layout.
        """
        at_hand = self._at_hand(ref, layout) or self._from_forward(ref, layout)
        if at_hand is not None:
            return at_hand
        step = self.job.index.steps.get((self.phase, self.job.key(ref)), {}).get(layout)
        if step is not None and step.kernel is not None:
            self._run_kernel(ref, step)
        # without the second condition, steps that form a cycle would not terminate
        elif step is not None and (ref, layout) not in self.in_progress:
            self.in_progress.add((ref, layout))
            source = self.get(ref, step.source, wanted_by)
            self.in_progress.remove((ref, layout))
            return self._at_hand(ref, layout) or self._step(ref, source, step)
        node = self.job.nodes[ref[0]]
        if (
            self._at_hand(ref, layout) is None
            and self.phase == "backward"
            and self._runs_again(node)
        ):
            self.compute(node, again=True)
        result = self._at_hand(ref, layout)
        if result is None:
            raise ChangedPlanError(
                f"{self.phase} needs {self.job.key(ref)} as {layout} for {wanted_by}, but no"
                " collective of the plan returns it",
                where=where_of(node),
            )
        return result

    def _at_hand(self, ref: Ref, layout: Layout) -> fx.Node | None:
        """Return the node of a tensor in a layout if it was emitted already."""
        return self.have.get(ref, {}).get(layout)

    def _run_kernel(self, ref: Ref, step: Communication) -> None:
        """Emit the product whose kernel also runs a step, for the tensor of the step."""
        assert step.kernel is not None
        producer = self.job.nodes[ref[0]]
        gathers = step.collective.kind == "all_gather"
        product = kernel_calls.product_of(producer, step) if gathers else producer
        self.compute(product, again=step.kernel.again)

    def _from_forward(self, ref: Ref, layout: Layout) -> fx.Node | None:
        """Return the placeholder of a forward value if backward may read it. This is the case if
        the plan keeps it, or if it is in memory anyway: parameters, buffers, and inputs that do not
        come from another stage."""
        if self.earlier is None:
            return None
        is_copied = ref[0] in self.job.crossing or ref[0] in self.earlier.copied
        resident = self.job.nodes[ref[0]].op == "placeholder" and not is_copied
        if layout not in self.job.index.kept.get(self.job.key(ref), ()) and not resident:
            return None
        node = self.earlier.have.get(ref, {}).get(layout)
        if node is None or (
            resident
            and not is_ready_at_start(node)
            and layout not in self.job.index.kept.get(self.job.key(ref), ())
        ):
            return None
        if node not in self.saved:
            self.saved[node] = self.graph.placeholder(f"saved_{node.name}")
            self.saved[node].meta.update({k: v for k, v in node.meta.items() if k not in _OF_STEPS})
        self.have.setdefault(ref, {})[layout] = self.saved[node]
        return self.saved[node]

    def _step(self, ref: Ref, source: fx.Node, step: Communication) -> fx.Node:
        c = step.collective
        target, args = CALLS[c.kind](c, step.target)
        key, result = self.job.key(ref)
        source_line = self.job.nodes[ref[0]].meta.get("source", "")
        meta = {
            "module": step.module,
            "phase": self.phase,
            "source": source_line,
            "slack": step.slack,
        }
        tensor_dtype, wide = self.job.dtype(ref), getattr(torch, c.dtype)
        # the tensor was already reduced along another axis in the wider dtype
        if (ref, step.source) in self.gradient_sums.wide and wide != tensor_dtype:
            source = self.gradient_sums.wide[ref, step.source]
        elif wide != tensor_dtype:  # the dtype of the reduction is wider than that of the tensor
            source = add_call(self.graph, _cast, (source,), {"dtype": wide})
            source.meta.update(meta, key=f"{key}/widen")
        node = add_call(self.graph, target, (source, *args), self._length(ref, step))
        moved = MovedTensor(self.phase, key, result, self.job.shape(ref), step.source, step.target)
        node.meta.update(
            meta, key=f"{key}/{c.kind}", collective=c, time_s=step.by_itself_s, moved=moved
        )
        if wide != tensor_dtype:
            self.gradient_sums.wide[ref, step.target] = node
            node = add_call(self.graph, _cast, (node,), {"dtype": tensor_dtype})
            node.meta.update(meta, key=f"{key}/narrow")
        self.job.emitted.append((self.phase, key, c))
        self.define(ref, step.target, node)
        return node

    def _length(self, ref: Ref, step: Communication) -> dict[str, int]:
        """Return the full length of the dim that a step gathers if it is sharded unevenly, as a
        keyword argument."""
        c = step.collective
        if c.kind not in JOINING:
            return {}
        length = self.job.shape(ref)[c.dim]
        return (
            {"length": length}
            if length % step.source.num_shards(c.dim, self.job.mesh.shape)
            else {}
        )

    def compute(self, node: fx.Node, *, again: bool = False) -> None:
        """Emit one compute node with its strategy, unless it was already emitted, for example as
        part of a kernel.

        Args:
            node: the node of the trace.
            again: whether backward recomputes the node.
        """
        if (node.name, again) in self.done:
            return
        self.done.add((node.name, again))
        key = node.meta["key"]
        if node.target is operator.getitem:
            self._alias(node, again)
            return
        strategy = (self.job.index.recomputed if again else self.job.index.chosen)[key]
        refs = _reads(node)
        # the reader of this cast accumulates the operand of the cast directly
        if any(at.uncast for at in strategy.outputs):
            self.have.setdefault((node.name, 0), {})[strategy.outputs[0]] = self.get(
                refs[0], strategy.inputs[0], key
            )
            return
        if kernel_calls.emit_kernel(self, node, strategy, refs, again):
            return
        operands = [
            self.get(ref, layout, key) for ref, layout in zip(refs, strategy.inputs, strict=True)
        ]
        target, args, kwargs = local_call(
            self.graph, call_of(node), strategy, self.job.mesh.shape, operands
        )
        inner_steps = self.job.index.own.get((self.phase, key), ())
        if any(c.kernel is not None for c in inner_steps):
            args = with_routes(args, True)
        here = add_call(self.graph, target, args, kwargs)
        here.meta.update(
            key=key,
            module=node.meta["module"],
            phase=self.phase,
            source=node.meta.get("source", ""),
        )
        here.meta["recomputed"] = again
        if inner_steps:
            here.meta["own"] = inner_steps
            here.meta["routes"] = (
                shared_rows(call_of(node), strategy, self.job.mesh.shape)
                if any(c.kernel for c in inner_steps)
                else ()
            )
            self.job.emitted += [(self.phase, key, c.collective) for c in inner_steps]
        mark(node, here, strategy)
        self.define_results(node, here, strategy)

    def define_results(self, node: fx.Node, here: fx.Node, strategy: Strategy) -> None:
        """Record the nodes of the results of a node.

        Args:
            node: the node of the trace.
            here: the node of the program.
            strategy: the layouts of the results.
        """
        if not isinstance(node.meta["val"], tuple | list):  # a list of one result needs getitem
            self.define((node.name, 0), strategy.outputs[0], here)
            return
        for result, layout in enumerate(strategy.outputs):
            part = add_call(self.graph, operator.getitem, (here, result))
            part.meta.update({name: value for name, value in here.meta.items() if name != "own"})
            self.define((node.name, result), layout, part)

    def _alias(self, node: fx.Node, again: bool) -> None:
        """Record the result of a getitem node of the trace, which is a result of its operand."""
        strategy = (self.job.index.recomputed if again else self.job.index.chosen)[node.meta["key"]]
        source = self.get(_reads(node)[0], strategy.inputs[0], node.meta["key"])
        self.define((node.name, 0), strategy.outputs[0], source)

    def results(self) -> list[fx.Node]:
        """Return the model's outputs in the plan's layouts, then the new values of buffers."""
        nodes, chosen = self.job.results(), self.job.index.chosen
        outputs = [(output_key(o.path), nodes[i]) for i, o in enumerate(self.job.trace.outputs)]
        outputs += [(output_key(name), nodes[i]) for name, i in self.job.trace.mutated.items()]
        return [self.get((node.name, 0), chosen[key].inputs[0], key) for key, node in outputs]

    def gradients(self) -> list[fx.Node]:
        """Return the gradients of parameters in the plan's layouts, or the sums that they were
        added to, then the gradients of inputs. Gradients of inputs are full tensors, or in the
        layout of the input if it comes from another stage.
        """
        nodes, chosen = self.job.results(), self.job.index.chosen
        gradients = []
        for p in self.job.trace.parameters:
            if p.gradient is not None:
                key = parameter_key(p.name)
                # needed if the gradient is not computed by a node of backward
                self.add_up(nodes[p.gradient].name)
                gradients.append(
                    self.gradient_sums.nodes.get(p.name)
                    or self.get((nodes[p.gradient].name, 0), chosen[key].inputs[0], key)
                )
        for i in self.job.trace.inputs:
            if i.gradient is not None:
                key = input_key(i.path)
                gradients.append(self.get((nodes[i.gradient].name, 0), chosen[key].inputs[0], key))
        return self._copy_shared_gradients(gradients)

    def _copy_shared_gradients(self, gradients: list[fx.Node]) -> list[fx.Node]:
        """Copy gradients that share memory. Gradients need separate memory, as with autograd, since
        clipping and the next backward write into each of them."""
        owners, copies = set[fx.Node](self.gradient_sums.nodes.values()), []
        for gradient in gradients:
            owner, lies_over_itself = owner_of(gradient)
            if gradient not in self.gradient_sums.nodes.values() and (
                owner in owners or owner.op == "placeholder" or lies_over_itself
            ):
                meta = gradient.meta
                gradient = add_call(
                    self.graph, _clone, (gradient,), {"memory_format": torch.contiguous_format}
                )
                gradient.meta.update(
                    {
                        name: meta[name]
                        for name in ("key", "module", "phase", "source", "holds")
                        if name in meta
                    }
                )
            owners.add(owner)
            copies.append(gradient)
        return copies

    def close(self, results: list[fx.Node], tangents: Sequence[fx.Node]) -> list[fx.Node]:
        """Write the output node, and remove unused nodes.

        Args:
            results: the results of the graph.
            tangents: the placeholders of tangents. Those of saved values are placed before them.

        Returns:
            The forward nodes whose values are saved.
        """
        self.graph.output(tuple(results))
        self.graph.eliminate_dead_code()
        for node in self.graph.nodes:
            write(node, self.saved, self.job.mesh.shape)
        saved: list[fx.Node] = []
        for source, placeholder in self.saved.items():
            if not placeholder.users:
                self.graph.erase_node(placeholder)
                continue
            if tangents:
                tangents[0].prepend(placeholder)
            saved.append(source)
        return saved


def _reads(node: fx.Node) -> list[Ref]:
    if node.target is operator.getitem:
        return [(node.args[0].name, int(node.args[1]))]
    return [(n.name, 0) for n in operands_of(node)]
