"""A plan into its program: legality, the two graphs, steps of several microbatches, buckets, what runs beside compute."""

from __future__ import annotations

from dataclasses import replace

from autopar.capture.trace import Parameter, Trace
from autopar.emit.buckets import bucketed
from autopar.emit.choices import PlanIndex, buffer_key, compute_nodes, input_key, output_key, parameter_key, placeholder_keys
from autopar.emit.job import Job
from autopar.emit.legality import check_legal
from autopar.emit.overlap import overlapped
from autopar.emit.phase import Phase
from autopar.emit.step import with_step
from autopar.plans import Plan
from autopar.run.lazy_graph import LazyGraphModule
from autopar.run.program import Program, ProgramTensor


def emit(trace: Trace, plan: Plan, *, accumulates: bool = False, named: bool = True) -> Program:
    """Turn a plan into a program with local shapes and explicit collectives.

    Args:
        accumulates: whether gradients are added to sums that are held through a step of several microbatches.
        named: whether the program says of which plan it is (`Program.plan_hash`); one that is only looked at need not.

    Raises:
        PlanError: where the plan speaks of other nodes than the trace, or of strategies that are not legal.
        EmissionError: where it asks for a layout that nothing makes.
    """
    index = PlanIndex.of(plan)
    index.check(trace)
    check_legal(trace, index, plan.mesh, accumulates=accumulates)
    job = Job(trace, plan.mesh, index, placeholder_keys(trace))
    forward, backward = Phase(job, "forward"), Phase(job, "backward")
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
    program = replace(program, plan_hash=plan.hash) if named else program
    return overlapped(bucketed(with_step(program, trace, index) if accumulates else program, plan), plan)[0]


def _program(job: Job, plan: Plan, forward: Phase, backward: Phase, num_saved: int) -> Program:
    trace, chosen = job.trace, job.index.chosen

    def tensor(p: Parameter, key: str) -> ProgramTensor:
        has_gradient = p.gradient is not None
        layout = chosen[key].outputs[0]
        return ProgramTensor(p.name, p.shape, p.view, p.dtype, layout, p.aliases, p.requires_grad, has_gradient)

    inputs = tuple(
        ProgramTensor(
            i.path, i.shape, i.shape, i.dtype, chosen[input_key(i.path)].outputs[0],
            requires_grad=i.requires_grad, has_gradient=i.gradient is not None, crosses=i.crosses, given=i.given,
        )
        for i in trace.inputs
    )  # fmt: skip
    outputs = tuple(
        ProgramTensor(
            o.path, o.shape, o.shape, o.dtype, chosen[output_key(o.path)].inputs[0],
            has_gradient=bool(o.tangent), is_loss=o.is_loss, crosses=o.crosses, requires_grad=o.requires_grad,
        )
        for o in trace.outputs
    )  # fmt: skip
    return Program(
        mesh=plan.mesh,
        forward=LazyGraphModule({}, forward.graph),
        backward=LazyGraphModule({}, backward.graph),
        parameters=tuple(tensor(p, parameter_key(p.name)) for p in trace.parameters),
        buffers=tuple(tensor(b, buffer_key(b.name)) for b in trace.buffers),
        inputs=inputs,
        outputs=outputs,
        num_saved=num_saved,
        mutated=tuple(trace.mutated),
        in_spec=trace.in_spec,
        out_spec=trace.out_spec,
        constants=trace.constants,
        collectives=tuple(job.emitted),
        settings=trace.settings,
        attributes=trace.attributes,
    )
