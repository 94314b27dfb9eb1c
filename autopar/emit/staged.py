"""`emit_staged`: a plan with a pipeline into the programs of its stages."""

from __future__ import annotations

from autopar.analysis.microbatches import Microbatching
from autopar.capture.trace import Trace
from autopar.emit.build import emit
from autopar.errors import ChangedPlanError
from autopar.plans import Plan
from autopar.request import Outputs
from autopar.run.lazy_graph import LazyGraphModule
from autopar.run.program import Count, Microbatches, StagedProgram, whole_outputs
from autopar.run.returned import Returned, is_returned
from autopar.stages import Cut


def emit_staged(part: Trace, cut: Cut, how: Microbatching, plan: Plan, *, named: bool = True) -> StagedProgram:
    """Turn a plan with a pipeline into one program per stage.

    Args:
        part: the trace of one microbatch. cut: the same in stages. how: how microbatches make the batch. named: as `emit`.

    Raises:
        PlanError, EmissionError: as `emit`; where neighbours do not agree on the layout in which something crosses.
    """
    pipeline = plan.pipeline
    assert pipeline is not None, "the plan has stages"
    pairs = zip(cut.stages, pipeline.stages, strict=True)
    programs = tuple(emit(stage, staged, accumulates=pipeline.accumulates, named=False) for stage, staged in pairs)
    for number in range(len(programs) - 1):
        leaving = {t.name: t.layout for t in programs[number].outputs if t.crosses}
        arriving = {t.name: t.layout for t in programs[number + 1].inputs if t.crosses}
        for name in sorted(leaving.keys() | arriving.keys()):
            if leaving.get(name) != arriving.get(name):
                what = f"{name} leaves stage {number} as {leaving.get(name)} and arrives at the next as {arriving.get(name)}"
                raise ChangedPlanError(what)
    plan_hash = plan.hash if named else ""
    return StagedProgram(plan.mesh, pipeline.axis, part, programs, microbatches_of(part, how), pipeline.schedule, cut.shared, plan_hash)


def microbatches_of(part: Trace, how: Microbatching) -> Microbatches:
    """How a program works through microbatches; arguments as of `emit_staged`."""
    outputs = {path: (label.joined, label.dim) for path, label in how.outputs.items()}
    loss = None if part.loss is None else part.loss.path
    counts = (Count({g.path: g.kind for g in c.given}, LazyGraphModule({}, c.graph), c.buffers, c.inputs) for c in how.counting)
    return Microbatches(how.num, how.inputs, outputs, loss, tuple(counts))


def returned_of(part: Trace, how: Microbatching, outputs: Outputs) -> Returned:
    """What a call of several stages returns; arguments as of `emit_staged`."""
    microbatches = microbatches_of(part, how)
    kept = tuple(t for t in whole_outputs(part, microbatches, 0) if is_returned(t, outputs))
    return Returned(kept, microbatches, waits=not any(o.is_loss for o in part.differentiable))
