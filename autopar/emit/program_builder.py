"""Emission of the program of a plan.

`emit` emits the program of each stage; a plan without a pipeline has one stage. `emit_stage` checks
that the stage's plan is legal, writes the forward and the backward graph, adds the graphs that run
at the begin and the end of a step of several microbatches, merges buckets, and reorders
communication so that it overlaps with compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import fx

from autopar.analysis.gradients import addable_uncast
from autopar.analysis.microbatches import Microbatching, find_microbatching
from autopar.capture.trace import Parameter, Trace
from autopar.core.collective import JOINING, Collective
from autopar.core.fx_nodes import add_call
from autopar.core.layout import Layout, Strategy
from autopar.core.layout_graph import neighbours
from autopar.core.mesh import Mesh
from autopar.emit.buckets import apply_buckets
from autopar.emit.context import (
    CALLS,
    CAST,
    LoweringContext,
    MovedTensor,
    PlanIndex,
    TensorKey,
    buffer_key,
    compute_nodes,
    input_key,
    output_key,
    parameter_key,
    placeholder_keys,
    storage_key,
)
from autopar.emit.overlap import apply_overlap
from autopar.emit.phase import PhaseBuilder
from autopar.errors import ChangedPlanError, Where
from autopar.kernels.collectives import sum_dtype
from autopar.plans import Communication, Plan
from autopar.program.executor import ReturnedOutputs, is_returned
from autopar.program.program import (
    Count,
    LazyGraphModule,
    Microbatches,
    Program,
    ProgramTensor,
    StageProgram,
    whole_outputs,
)
from autopar.request import Outputs
from autopar.rules import call_of, is_strategy, own_moves, where_of
from autopar.rules.dispatch import OWN
from autopar.stages import Cut, cut_trace

# --------------------------------------------------------------------------------------------------
# Checks that a plan is legal, regardless of its origin.
#
# With an illegal strategy, emission would produce a program that runs and computes wrong results.
# Therefore every strategy must be one that the op's rule allows, every input and output must be
# sharded evenly, and every collective must convert its source layout to its target layout.


_Value = tuple[torch.Size, torch.dtype]


def check_legal(trace: Trace, index: PlanIndex, mesh: Mesh, *, accumulates: bool) -> None:
    """Check every decision of the plan against the traced graph.

    Args:
        trace: the traced model.
        index: the decisions of the plan.
        mesh: the mesh of the plan.
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
            for choices in (index.chosen, index.recomputed):
                if node.meta["key"] in choices:
                    _check_strategy(
                        node, choices[node.meta["key"]], mesh, may_be_uncast=node.name in uncast
                    )


def _check_borders(trace: Trace, index: PlanIndex, mesh: Mesh, *, accumulates: bool) -> None:
    """Check the layouts of the inputs and outputs of the graphs."""
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
    """Iterate over the inputs and outputs of the graphs. Yield the key, the layouts in the plan,
    the traced value, and whether the graph returns it."""
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
    """Check that the collectives inside nodes are those of their strategies."""
    unchecked = dict(index.own)
    for node in trace.graph.nodes:
        key = node.meta.get("key", "")
        for phase, choices in (
            (node.meta.get("phase"), index.chosen),
            ("backward", index.recomputed),
        ):
            if (
                node.op == "call_function"
                and key in choices
                and (node.target in OWN or (phase, key) in unchecked)
            ):
                planned = tuple(c.collective for c in unchecked.pop((str(phase), key), ()))
                if planned != own_moves(call_of(node), choices[key], mesh.shape):
                    message = (
                        f"the internal communication of {key} in {phase} differs from that of its"
                        f" strategy {choices[key]}"
                    )
                    raise ChangedPlanError(message, where=where_of(node))
    for phase, key in unchecked:
        raise ChangedPlanError(
            f"the plan has internal communication of {key} in {phase}, where it does not run"
        )


def _values(trace: Trace) -> Iterator[tuple[TensorKey, _Value]]:
    """Iterate over pairs of a key and the shape and dtype of a tensor, for all tensors and sums of
    gradients."""
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
    if tensor not in values:
        raise ChangedPlanError(f"the plan communicates {tensor}, which the model does not compute")
    shape, dtype = values[tensor]
    if not _converts((tuple(shape), dtype), step.collective, step.source, step.target, mesh):
        c = step.collective
        raise ChangedPlanError(
            f"no {c.kind} in {c.dtype}{f' on axis {c.axis}' if c.axis >= 0 else ''} converts"
            f" {step.source} to {step.target} for {tensor} of {dtype} {tuple(shape)} on mesh"
            f" {mesh}",
            where=Where(module=step.module),
        )


@lru_cache(maxsize=2**12)
def _converts(
    value: tuple[tuple[int, ...], torch.dtype],
    collective: Collective,
    source: Layout,
    target: Layout,
    mesh: Mesh,
) -> bool:
    """Return whether a collective converts a tensor from one layout to another. Results are cached,
    since equal layers have the same collectives."""
    shape, dtype = value
    moved = getattr(torch, str(collective.dtype), None)
    wide = isinstance(moved, torch.dtype) and torch.promote_types(dtype, moved) == moved
    if not wide or not _fits(source, shape, mesh):
        return False
    stored = [target.on_device()] if target.host else []
    possible = neighbours(
        shape, dtype, source, mesh.shape, moved, special=target.special, stored=stored
    )
    return (collective, target) in possible


def _fits(layout: Layout, shape: Sequence[int], mesh: Mesh) -> bool:
    return len(layout.placements) == len(mesh.shape) and layout.fits(shape, mesh.shape)


# --------------------------------------------------------------------------------------------------
# The graphs at the begin and at the end of a step of several microbatches.
#
# ``begin`` takes the stored local parameters and returns them in the layouts that microbatches
# read. ``end`` takes the sums of gradients and returns gradients in the layouts and dtypes of the
# stored parameters.

PHASE = "step"
_cast = torch.ops.aten._to_copy.default
_Emitted = list[tuple[str, str, Collective]]


def with_step(program: StageProgram, trace: Trace, index: PlanIndex) -> StageProgram:
    """Add the graphs that run before the first microbatch and after the last one.

    Args:
        program: the program of one microbatch.
        trace: the trace of one microbatch.
        index: the decisions of the plan.

    Raises:
        EmissionError: if the plan has no collectives that convert between the two layouts.
    """
    emitted: _Emitted = []
    begin, end = [], []
    for p, tensor in zip(trace.parameters, program.parameters, strict=True):
        storage, wide = index.storage(p.name), sum_dtype(p.dtype)
        begin.append(_Conversion(p, 0, storage, tensor.layout))
        if p.gradient is not None:
            end.append(
                _Conversion(
                    p,
                    1,
                    index.chosen[parameter_key(p.name)].inputs[0].plain,
                    storage,
                    p.dtype if wide != p.dtype else None,
                )
            )
    parameters = tuple(
        replace(t, layout=each.source) for t, each in zip(program.parameters, begin, strict=True)
    )
    sums = tuple(
        ProgramTensor(e.p.name, e.p.shape, e.p.view, sum_dtype(e.p.dtype), e.source) for e in end
    )
    return replace(
        program,
        parameters=parameters,
        begin=_GraphBuilder(program.mesh.shape, index, emitted).module(begin),
        end=_GraphBuilder(program.mesh.shape, index, emitted).module(end),
        sums=sums,
        accumulates=True,
        collectives=(*program.collectives, *emitted),
    )


@dataclass(frozen=True, slots=True)
class _Conversion:
    """A tensor that a graph converts from one layout to another.

    Attributes:
        p: the parameter.
        result: 0 for the parameter, 1 for the sum of its gradients.
        source, target: the layouts before and after.
        dtype: the dtype to which the tensor is cast at the end; None for no cast.
    """

    p: Parameter
    result: int
    source: Layout
    target: Layout
    dtype: torch.dtype | None = None


@dataclass
class _GraphBuilder:
    """The builder of one of the two graphs."""

    mesh_shape: tuple[int, ...]
    index: PlanIndex
    emitted: _Emitted
    graph: fx.Graph = field(default_factory=fx.Graph)

    def module(self, passing: Sequence[_Conversion]) -> fx.GraphModule:
        """Return the graph that converts the tensors."""
        here = [
            self.graph.placeholder(
                f"sum_{conversion.p.node}" if conversion.result else conversion.p.node
            )
            for conversion in passing
        ]
        for node, conversion in zip(here, passing, strict=True):
            node.meta.update(
                key=storage_key(conversion.p.name), module=conversion.p.name, phase=PHASE, source=""
            )
        self.graph.output(
            tuple(
                self._convert(node, conversion)
                for node, conversion in zip(here, passing, strict=True)
            )
        )
        return LazyGraphModule({}, self.graph)

    def _convert(self, node: fx.Node, each: _Conversion) -> fx.Node:
        if each.p.is_narrowed and not each.result:
            node = self._cast(node, each.p.compute_dtype, each.p.name, CAST)
            node.meta["on_host"] = each.source.host
        for step in reversed(self._chain(each)):
            c, meta = step.collective, node.meta
            call, args = CALLS[c.kind](c, step.target)
            node = add_call(self.graph, call, (node, *args), self._length(each.p, step))
            moved = MovedTensor(
                PHASE, storage_key(each.p.name), each.result, each.p.view, step.source, step.target
            )
            node.meta.update(
                meta, key=f"{storage_key(each.p.name)}/{c.kind}", collective=c, moved=moved
            )
            self.emitted.append((PHASE, storage_key(each.p.name), c))
        return node if each.dtype is None else self._cast(node, each.dtype, each.p.name, "/narrow")

    def _cast(self, node: fx.Node, dtype: torch.dtype, name: str, what: str) -> fx.Node:
        meta = {
            name: value for name, value in node.meta.items() if name not in ("collective", "moved")
        }
        node = add_call(self.graph, _cast, (node,), {"dtype": dtype})
        node.meta.update(meta, key=storage_key(name) + what)
        return node

    def _chain(self, each: _Conversion) -> list[Communication]:
        """Return the plan's collectives between the two layouts, in reverse order."""
        key = storage_key(each.p.name)
        steps = self.index.steps.get((PHASE, (key, each.result)), {})
        chain: list[Communication] = []
        at = each.target
        while at != each.source:
            step = steps.get(at)
            if step is None or step in chain:
                when = "at the end" if each.result else "at the begin"
                message = (
                    f"{key} changes from {each.source} to {each.target} {when} of a step, but the"
                    " plan has no collectives for it"
                )
                raise ChangedPlanError(message)
            chain.append(step)
            at = step.source
        return chain

    def _length(self, p: Parameter, step: Communication) -> dict[str, int]:
        """Return the full length of the dim that a step gathers if it is sharded unevenly, as a
        keyword argument."""
        c = step.collective
        uneven = c.kind in JOINING and p.view[c.dim] % step.source.num_shards(
            c.dim, self.mesh_shape
        )
        return {"length": p.view[c.dim]} if uneven else {}


def emit_stage(trace: Trace, plan: Plan, *, accumulates: bool = False) -> StageProgram:
    """Turn the plan of a stage into its program, with local shapes and explicit collectives.

    Args:
        trace: the trace of the stage, or of the whole model.
        plan: the plan for this trace.
        accumulates: whether gradients are added to sums over the microbatches of a step.

    Raises:
        PlanError: if the plan and the trace contain different nodes, or a strategy is not legal.
        EmissionError: if the plan requires a layout that none of its collectives creates.
    """
    index = PlanIndex.of(plan)
    index.check(trace)
    check_legal(trace, index, plan.mesh, accumulates=accumulates)
    job = LoweringContext(trace, plan.mesh, index, placeholder_keys(trace))
    forward, backward = PhaseBuilder(job, "forward"), PhaseBuilder(job, "backward")
    forward.placeholders(trace.parameters, trace.buffers, casts=not accumulates)
    for node in compute_nodes(trace, "forward"):
        forward.compute(node)
    results = forward.results()
    backward.earlier = forward
    tangents = backward.tangents()
    if accumulates:
        backward.hold_sums()
    for node in compute_nodes(trace, "backward"):
        backward.compute(node)
        backward.add_up(node.name)
    gradients = backward.gradients()
    saved = backward.close(gradients, tangents)
    forward.close([*results, *saved], ())
    program = _program(job, plan, forward, backward, len(saved))
    return apply_overlap(
        apply_buckets(with_step(program, trace, index) if accumulates else program, plan), plan
    )[0]


def _program(
    job: LoweringContext, plan: Plan, forward: PhaseBuilder, backward: PhaseBuilder, num_saved: int
) -> StageProgram:
    trace, chosen = job.trace, job.index.chosen

    def tensor(p: Parameter, key: str) -> ProgramTensor:
        """Return a parameter or a buffer of the program."""
        has_gradient = p.gradient is not None
        layout = chosen[key].outputs[0]
        return ProgramTensor(
            p.name, p.shape, p.view, p.dtype, layout, p.aliases, p.requires_grad, has_gradient
        )

    inputs = tuple(
        ProgramTensor(
            i.path,
            i.shape,
            i.shape,
            i.dtype,
            chosen[input_key(i.path)].outputs[0],
            requires_grad=i.requires_grad,
            has_gradient=i.gradient is not None,
            crosses=i.crosses,
            given=i.given,
        )
        for i in trace.inputs
    )
    outputs = tuple(
        ProgramTensor(
            o.path,
            o.shape,
            o.shape,
            o.dtype,
            chosen[output_key(o.path)].inputs[0],
            has_gradient=bool(o.tangent),
            is_loss=o.is_loss,
            crosses=o.crosses,
            requires_grad=o.requires_grad,
        )
        for o in trace.outputs
    )
    return StageProgram(
        mesh=plan.mesh,
        forward=LazyGraphModule({}, forward.graph),
        backward=LazyGraphModule({}, backward.graph),
        parameters=tuple(tensor(p, parameter_key(p.name)) for p in trace.parameters),
        buffers=tuple(tensor(b, buffer_key(b.name)) for b in trace.buffers),
        inputs=inputs,
        outputs=outputs,
        num_saved=num_saved,
        mutated=tuple(trace.mutated),
        collectives=tuple(job.emitted),
    )


# --------------------------------------------------------------------------------------------------
# All stages of a plan.


def emit(
    part: Trace,
    plan: Plan,
    how: Microbatching | None = None,
    cut: Cut | None = None,
    *,
    named: bool = True,
) -> Program:
    """Turn a plan into one program per stage. A plan without a pipeline has one stage.

    Args:
        part: the trace of one microbatch.
        plan: the plan.
        how: the division of the batch into microbatches; by default, the batch is one microbatch.
        cut: the stages of `part`; by default, `part` is cut at the positions of the plan.
        named: whether `Program.plan_hash` is set.

    Raises:
        PlanError: as `emit_stage`, or if neighboring stages have different layouts for a tensor
            that is sent between them.
        EmissionError: as `emit_stage`.
    """
    plan_hash = plan.hash if named else ""
    pipeline = plan.as_pipeline
    cut = cut_trace(part, pipeline.positions) if cut is None else cut
    how = find_microbatching(part, part, 1) if how is None else how
    programs = tuple(
        emit_stage(stage, staged, accumulates=pipeline.accumulates)
        for stage, staged in zip(cut.stages, pipeline.stages, strict=True)
    )
    for number in range(len(programs) - 1):
        leaving = {t.name: t.layout for t in programs[number].outputs if t.crosses}
        arriving = {t.name: t.layout for t in programs[number + 1].inputs if t.crosses}
        for name in sorted(leaving.keys() | arriving.keys()):
            if leaving.get(name) != arriving.get(name):
                message = (
                    f"{name} is sent by stage {number} as {leaving.get(name)} but received by the"
                    f" next as {arriving.get(name)}"
                )
                raise ChangedPlanError(message)
    return Program(
        plan.mesh,
        pipeline.axis,
        part,
        programs,
        microbatches_of(part, how),
        pipeline.schedule,
        cut.shared,
        plan_hash,
    )


def microbatches_of(part: Trace, how: Microbatching) -> Microbatches:
    """Return the microbatches of a program. For the arguments, see `emit`."""
    outputs = {path: (label.combination, label.dim) for path, label in how.outputs.items()}
    loss = None if part.loss is None else part.loss.path
    counts = (
        Count({g.path: g.kind for g in c.given}, LazyGraphModule({}, c.graph), c.buffers, c.inputs)
        for c in how.counting
    )
    return Microbatches(how.num, how.inputs, outputs, loss, tuple(counts))


def returned_of(part: Trace, how: Microbatching, outputs: Outputs) -> ReturnedOutputs:
    """Return the outputs that a call of several stages returns.

    Args:
        part, how: see `emit`.
        outputs: the form of outputs that the user selected.
    """
    microbatches = microbatches_of(part, how)
    tensors = tuple(t for t in whole_outputs(part, microbatches, 0) if is_returned(t, outputs))
    return ReturnedOutputs(
        tensors, microbatches, waits=not any(o.is_loss for o in part.differentiable)
    )
