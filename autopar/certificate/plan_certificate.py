"""`certify`: check every claim of a plan, stage by stage, and the claims that join the stages.

Each stage is certified as a separate plan (`autopar.certificate.stage_claims`), under the layouts
in which its plan states that tensors cross between stages, and with its microbatches in flight.
Further checks cover the stages together: neighbours agree, the claims about cuts hold
(`autopar.certificate.crossings`), copies of a parameter are stored in the same layout, the schedule
has as many microbatches in flight as claimed, and step, peak and gap follow from those of the
stages. The bound over all cuts is derived too (`autopar.certificate.over_cuts`). The multipliers of
the stages prove a bound for these cuts and layouts only, which is reported in a note.

The following is trusted: the traced model, the rules of ops, the problem that `autopar.cost.price`
states, emission, and the count of live bytes in the emitted program. The following is not: the
search, the prices, collectives, sizes, sums and the bound in the plan. Prices follow from the
profile by the certificate's own formulas (`autopar.certificate.rates`,
`autopar.certificate.intra_op`). No solver runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.analysis.microbatches import Microbatching, find_microbatching
from autopar.capture.trace import Trace
from autopar.certificate.crossings import budgets, cuts
from autopar.certificate.facts import Context, Facts
from autopar.certificate.marks import check_capture, check_request, identity, of_stages
from autopar.certificate.multiplier_proof import StoredMultipliers, check_proof
from autopar.certificate.over_cuts import PipelineFigures, Unfolded, least_over_cuts
from autopar.certificate.rank_schedules import (
    actions_of,
    held_by_chunks,
    interleaves,
    least_of_cuts,
    least_of_ranks,
    phases_of,
    shared_memory,
    step_by_longest_path,
)
from autopar.certificate.rates import handed_on_s, wire_between
from autopar.certificate.report import Certificate, Finding, near
from autopar.certificate.stage_claims import certify_stage, initial_certificate
from autopar.constraints import Constraint, Pipelined, read_constraint
from autopar.core.garbage import collected_seldom
from autopar.core.hardware import Hardware, HardwareProfile, profile_of, slowest
from autopar.core.layout import Layout, Strategy
from autopar.core.schedules import INTERLEAVED
from autopar.core.units import seconds
from autopar.cost.offload import shared_by
from autopar.cost.price import price
from autopar.cost.priced import Crossing
from autopar.emit import emit, returned_of
from autopar.emit.context import input_key, output_key, parameter_key, storage_key
from autopar.errors import AutoparError, PlanError
from autopar.plans import Pipeline, Plan
from autopar.program.executor import ReturnedOutputs
from autopar.sharding import Forced, classes_of, resolve
from autopar.stages import Cut, cut_trace, seams, usable_points


class StagedTrace(NamedTuple):
    """A captured call, in the microbatches and stages of a plan.

    Attributes:
        part: the trace of one microbatch.
        how: how microbatches make up the batch.
        cut: `part`, cut into stages.
    """

    part: Trace
    how: Microbatching
    cut: Cut

    @staticmethod
    def of_one_stage(trace: Trace) -> StagedTrace:
        """Return the trace of a batch as the only microbatch of the only stage."""
        return StagedTrace(trace, find_microbatching(trace, trace, 1), cut_trace(trace, ()))


@collected_seldom()
def certify(
    trace: Trace, plan: Plan, hardware: Hardware, staged: StagedTrace | None = None
) -> Certificate:
    """Check every claim of a plan.

    Args:
        trace: the trace of the batch.
        plan: the plan to check.
        hardware: the profile, or the profiles of unequal devices. Each stage is certified on its
            own devices, at the pace of the slowest of them.
        staged: the trace in the microbatches and stages of the plan; by default the batch as a
            single stage.

    Returns:
        The certificate, with a finding for each claim that does not hold.
    """
    part, how, cut = staged or StagedTrace.of_one_stage(trace)
    pipeline = plan.as_pipeline
    kind = (
        *identity(trace, plan, hardware),
        *check_capture(part, plan),
        *of_stages(plan, pipeline),
        *check_request(plan),
    )
    report = initial_certificate(plan, kind or interleaves(pipeline))
    if not report.ok:
        return report
    try:
        if plan.pipeline is None:  # the plan itself is that of its only stage
            profile = slowest(hardware)
            return certify_stage(report, part, plan, profile, Context.of(part, plan))
        program = emit(part, plan, how, cut, named=False)
        returned = returned_of(part, how, plan.options.get("outputs", "dtensor"))
        stages = _Stages(trace, part, cut, plan, pipeline, hardware, returned).certificates()
    except AutoparError as error:
        return replace(
            report,
            findings=(
                Finding("emission", error.what, "" if error.where is None else str(error.where)),
            ),
        )
    handed = returned.handed_bytes if pipeline.axis else 0
    handed_s = handed_on_s(pipeline.axis, plan.mesh, hardware, handed)
    findings = [
        *(
            replace(f, what=f"stage {n}: {f.what}")
            for n, stage in enumerate(stages)
            for f in stage.findings
        ),
        *_check_schedule(plan, pipeline, part, returned),
        *_check_sent_outputs(pipeline, handed, handed_s),
        *cuts(part, cut, pipeline),
        *budgets(plan, pipeline),
        *_check_joins(plan, pipeline, cut, handed_s),
        *shared_memory(plan, program, cut.stages, hardware),
    ]
    bound_s, num = _bound_s(part, plan, pipeline, hardware, stages, findings)
    bound_s += handed_s
    findings += check_proof(plan.proof, bound_s)
    report = replace(report, findings=tuple(findings), certified_bound_s=bound_s)
    return _sum_stages(report, stages, pipeline, num, handed_s)


def _bound_s(
    part: Trace,
    plan: Plan,
    pipeline: Pipeline,
    hardware: Hardware,
    stages: Sequence[Certificate],
    findings: list[Finding],
) -> tuple[float, int]:
    """Return the lower bound over all plans with this number of stages and microbatches in seconds,
    and the number of multipliers that prove it. Findings are appended to `findings`."""
    if len(stages) == 1:
        return (stages[0].certified_bound_s or 0.0) * pipeline.num_microbatches, 0
    constraints = [read_constraint(data) for data in plan.options.get("constraints", ())]
    points = usable_points(part, len(stages) - 1)[0]
    asked = [c.cuts for c in constraints if isinstance(c, Pipelined) and c.cuts is not None]
    allowed = (
        {i for i, point in enumerate(points, 1) if point.module in asked[0]} if asked else None
    )
    profiles = [profile_of(hardware, pipeline.axis, stage) for stage in range(len(stages))]
    kinds = tuple(dict.fromkeys(profiles))
    names = [profile.name for profile in kinds[1:]]
    if [each.profile for each in plan.proof.on_profiles] != names:
        findings.append(
            Finding(
                "bound",
                "the plan has multipliers on"
                f" {[each.profile for each in plan.proof.on_profiles]}, not on {names}",
            )
        )
        return 0.0, 0
    proofs = [
        plan.proof,
        *(
            replace(plan.proof, potentials=p.potentials, versions=p.versions)
            for p in plan.proof.on_profiles
        ),
    ]
    parts = {}
    num = 0
    for profile, proof in zip(kinds, proofs, strict=True):
        unfolded, stored = _unfold_part(
            part, replace(plan, proof=proof), pipeline, profile, constraints
        )
        parts[profile], num = unfolded, num + stored.num_multipliers
        findings += stored.findings
    rank_parts = [parts[profile] for profile in profiles]
    wires = [
        wire_between(pipeline.axis, plan.mesh, hardware, stage, stage + 1)
        for stage in range(len(stages) - 1)
    ]
    units = [each.units for each in rank_parts]
    borders = [
        before.borders_to(behind, link)
        for (before, behind), link in zip(itertools.pairwise(rank_parts), wires, strict=True)
    ]
    if pipeline.schedule != INTERLEAVED:
        return least_over_cuts(units, borders, pipeline.num_microbatches, allowed), num
    return (
        least_of_cuts(
            least_over_cuts(units, borders, 1, allowed),
            len(pipeline.rank_bytes),
            pipeline.num_microbatches,
        ),
        num,
    )


def _unfold_part(
    part: Trace,
    plan: Plan,
    pipeline: Pipeline,
    profile: HardwareProfile,
    constraints: Sequence[Constraint],
) -> tuple[Unfolded, StoredMultipliers]:
    """Return the least seconds of the parts of a microbatch on one kind of device, from the
    multipliers in the plan's proof."""
    mesh = plan.mesh.without(pipeline.axis)
    points, placing = usable_points(part, len(pipeline.stages) - 1)
    sewn = seams(part, placing)
    forced = resolve(part, [c for c in constraints if not isinstance(c, Pipelined)], mesh)
    forced = replace(
        forced, named=replace(forced.named, separate=forced.named.separate | sewn.readers)
    )
    priced = price(
        part,
        classes_of(part, mesh.shape, forced),
        mesh,
        profile,
        budget_bytes=0,
        optimizer=str(plan.options["optimizer"]),
        forced=forced,
        num_microbatches=pipeline.num_microbatches,
        exposed=sewn.exposed,
    )
    stored = StoredMultipliers(
        part, plan, priced, Facts.of(part, accumulates=priced.problem.accumulates)
    )
    ways = PipelineFigures(part, priced, forced, placing, len(points) + 1, sewn.exposed, mesh.shape)
    return (
        Unfolded(
            ways, stored.prices(), {v: found.made_s for v, found in stored.versions().items()}
        ),
        stored,
    )


def max_microbatches_held(
    schedule: str, stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> int:
    """Return the largest number of microbatches whose saved values a stage holds at the same time.

    Under GPipe these are all microbatches. Under 1F1B it is one for each stage from this one to the
    last.

    Args:
        schedule: "gpipe", "1f1b" or "interleaved".
        stage: index among all stages.
        num_stages: number of stages on all ranks.
        num_microbatches: number of microbatches per step.
        num_chunks: number of stages per rank.
    """
    if schedule == INTERLEAVED:
        return held_by_chunks(stage, num_stages // num_chunks, num_chunks, num_microbatches)
    return num_microbatches if schedule == "gpipe" else min(num_microbatches, num_stages - stage)


@dataclass(frozen=True, slots=True)
class _Stages:
    """The certification of a plan's stages, one by one."""

    whole: Trace
    part: Trace
    cut: Cut
    plan: Plan
    pipeline: Pipeline
    hardware: Hardware
    returned: ReturnedOutputs

    def certificates(self) -> list[Certificate]:
        """Certify each stage on its own devices.

        The problem of a stage is stated under the plan's constraints, the storage layouts of
        previous stages, and the layouts in which tensors cross to its neighbours.

        Raises:
            AutoparError: if a constraint cannot hold, or if the plan does not state how gradients
                are accumulated.
        """
        plan, pipeline = self.plan, self.pipeline
        constraints = [read_constraint(data) for data in plan.options.get("constraints", ())]
        mesh = plan.mesh.without(pipeline.axis)
        forced = resolve(self.part, [c for c in constraints if not isinstance(c, Pipelined)], mesh)
        storage: dict[str, Layout] = dict(forced.storage)
        certificates = []
        for number, (trace, staged) in enumerate(
            zip(self.cut.stages, pipeline.stages, strict=True)
        ):
            profile = profile_of(self.hardware, pipeline.axis, number)
            here = replace(
                shared_by(forced, profile, pipeline.num_chunks),
                storage=dict(storage),
                starts=staged.starts,
            )
            certificates.append(self._certificate(number, trace, staged, here))
            chosen = staged.node_choices()
            storage |= {
                p.name: _storage_layout(chosen, p.name)
                for p in trace.parameters
                if p.name in self.cut.shared
            }
        return certificates

    def _certificate(self, number: int, trace: Trace, staged: Plan, forced: Forced) -> Certificate:
        """Certify one stage under the layouts that constraints and previous stages force."""
        plan, pipeline = self.plan, self.pipeline
        context = self._context(number, trace, staged, forced)
        if pipeline.accumulates != context.accumulates:
            message = (
                f"with {pipeline.num_microbatches} microbatches gradients"
                f" {'are' if context.accumulates else 'are not'} added to sums"
            )
            raise PlanError(f"{message}, which differs from the plan")
        profile = profile_of(self.hardware, pipeline.axis, number)
        budget = pipeline.budgets[number] if pipeline.budgets else plan.budget_of(number)
        within = replace(staged, options={**plan.options, "memory_bytes": budget})
        report = initial_certificate(
            within, (*identity(trace, within, profile), *check_capture(trace, within))
        )
        certificate = certify_stage(report, trace, within, profile, context)
        if plan.budget_of(number) <= profile.device_memory_bytes or not pipeline.rank_budgets:
            return certificate
        message = (
            f"its devices, {profile.name}, have {profile.device_memory_bytes} bytes, not"
            f" {plan.budget_of(number)}"
        )
        return replace(certificate, findings=(*certificate.findings, Finding("memory", message)))

    def _context(self, number: int, trace: Trace, staged: Plan, forced: Forced) -> Context:
        """Return the context of a stage: its neighbours, its schedule and the whole batch."""
        pipeline, chosen = self.pipeline, staged.node_choices()
        layouts = {i.path: chosen[input_key(i.path)].outputs[0] for i in trace.inputs if i.crosses}
        layouts |= {
            o.path: chosen[output_key(o.path)].inputs[0] for o in trace.outputs if o.crosses
        }
        before, behind = (
            wire_between(pipeline.axis, self.plan.mesh, self.hardware, *ends)
            for ends in ((max(number - 1, 0), number), (number, number + 1))
        )
        return Context(
            forced,
            Crossing(before, behind, layouts),
            pipeline.num_microbatches,
            max_microbatches_held(
                pipeline.schedule,
                number,
                len(pipeline.stages),
                pipeline.num_microbatches,
                pipeline.num_chunks,
            ),
            pipeline.schedule,
            sum(math.prod(i.shape) * i.dtype.itemsize for i in self.whole.inputs),
            self.returned,
            number,
            actions_of(pipeline, number),
        )


def _check_schedule(
    plan: Plan, pipeline: Pipeline, part: Trace, returned: ReturnedOutputs
) -> Iterator[Finding]:
    """Yield a finding if the schedule does not wait for a value that it needs, or if outputs cannot
    be returned as the plan states."""
    alone = pipeline.schedule == INTERLEAVED and not part.differentiable
    if returned.waits and pipeline.schedule != "gpipe" and not alone:
        yield Finding(
            "emission",
            f"no backward runs between forwards, although {pipeline.schedule} is planned: all"
            " forwards run first",
        )
    if (
        returned.waits
        and part.differentiable
        and not pipeline.axis
        and pipeline.num_microbatches > 1
    ):
        yield Finding(
            "emission",
            "backward waits for a loss of the whole batch, so sequential microbatches have"
            " no benefit",
        )
    if part.loss is None and plan.options.get("outputs", "dtensor") != "full":
        yield Finding(
            "emission",
            f"outputs={plan.options.get('outputs', 'dtensor')!r} returns nothing for a staged model"
            " without a loss",
        )


def _check_sent_outputs(pipeline: Pipeline, num_bytes: int, time_s: float) -> Iterator[Finding]:
    """Yield a finding if the claimed bytes or seconds of sending outputs to all stages are
    wrong."""
    if pipeline.handed_bytes != num_bytes or not near(time_s, pipeline.handed_s):
        yield Finding(
            "time",
            f"outputs of {num_bytes} bytes are sent to all stages in {time_s:.9g} s, not"
            f" {pipeline.handed_bytes} bytes in {pipeline.handed_s:.9g} s",
        )


def _check_joins(plan: Plan, pipeline: Pipeline, cut: Cut, handed_s: float) -> Iterator[Finding]:
    """Yield a finding for each claim about the stages together that does not hold. `handed_s` is
    the time of a step in which outputs are sent to all stages."""
    num = len(pipeline.stages)
    expected = tuple(
        max_microbatches_held(
            pipeline.schedule, s, num, pipeline.num_microbatches, pipeline.num_chunks
        )
        for s in range(num)
    )
    if pipeline.num_in_flight != expected:
        message = (
            f"{pipeline.schedule} has {expected} microbatches in flight by stage, not"
            f" {pipeline.num_in_flight}"
        )
        yield Finding("memory", message)
    for name, held_by in cut.shared.items():
        rests = {str(_storage_layout(pipeline.stages[s].node_choices(), name)) for s in held_by}
        if len(rests) > 1:
            yield Finding(
                "layouts",
                f"its copies are stored as {' and '.join(sorted(rests))} and would diverge",
                name,
            )
    yield from _figures(plan, pipeline, handed_s)


def _storage_layout(chosen: Mapping[str, Strategy], parameter: str) -> Layout:
    return chosen.get(storage_key(parameter), chosen[parameter_key(parameter)]).outputs[0]


def _step_s(times: Sequence[float], num_microbatches: int) -> float:
    """Return (M − 1) · max τ + Σ τ in seconds, for M microbatches and stages of τ seconds each."""
    return (num_microbatches - 1) * max(times) + sum(times)


def _whole_step_s(pipeline: Pipeline, *, simulated: bool = False) -> float:
    """Return the seconds of a step, from the claims of the stages.

    Under GPipe, forward and backward go through all stages one after the other, and each waits for
    its own slowest stage.
    """
    if pipeline.schedule == "gpipe" and pipeline.num_microbatches > 1:
        waves = zip(
            *(phases_of(stage, simulated=simulated) for stage in pipeline.stages), strict=True
        )
        return sum(_step_s(times, pipeline.num_microbatches) for times in waves)
    if pipeline.schedule == INTERLEAVED:
        phases = [phases_of(stage, simulated=simulated) for stage in pipeline.stages]
        return step_by_longest_path(phases, len(pipeline.rank_bytes), pipeline.num_microbatches)
    claims = [stage.prediction for stage in pipeline.stages]
    return _step_s(
        [p.simulated_s if simulated else p.step_s for p in claims], pipeline.num_microbatches
    )


def _least_s(pipeline: Pipeline, bounds: Sequence[float]) -> float:
    """Return a lower bound of the step in seconds, from a lower bound of each stage for one
    microbatch."""
    if pipeline.schedule == INTERLEAVED:
        return least_of_ranks(bounds, len(pipeline.rank_bytes), pipeline.num_microbatches)
    return _step_s(bounds, pipeline.num_microbatches)


_OF_THE_SLOWEST = {  # attribute of a prediction → its name in a finding
    "compute_s": "the slowest stage's compute",
    "communication_s": "the slowest stage's communication",
    "in_kernels_s": "the time saved by the slowest stage's kernels",
    "in_buckets_s": "the time saved by the slowest stage's buckets",
    "beyond_shares_s": (
        "the time of the slowest stage's collectives in addition to shares of buckets"
    ),
    "hidden_s": "the hidden time of the slowest stage",
}


def _figures(plan: Plan, pipeline: Pipeline, handed_s: float) -> Iterator[Finding]:
    ranks = [[stage.prediction for stage in stages] for stages in pipeline.ranks]
    slowest = max(ranks, key=lambda chunks: sum(p.step_s for p in chunks))
    fullest = max((p for chunks in ranks for p in chunks), key=lambda p: p.peak_bytes)
    step_s, claimed = _whole_step_s(pipeline) + handed_s, plan.prediction
    simulated_s = _whole_step_s(pipeline, simulated=True) + handed_s
    figures: dict[str, tuple[float, float]] = {
        "the step": (step_s, claimed.step_s),
        "the objective": (step_s, plan.proof.objective_s),
        "the simulated step": (simulated_s, claimed.simulated_s),
    }
    for name, figure in _OF_THE_SLOWEST.items():
        of_all = pipeline.num_microbatches * sum(getattr(p, name) for p in slowest)
        figures[figure] = of_all, getattr(claimed, name)
    for figure, (derived, number) in figures.items():
        if not near(derived, number):
            yield Finding("time", f"{figure} is {derived:.9g} s, not {number:.9g} s")
    alone = pipeline.num_chunks == 1  # else the memory of ranks counts (`shared_memory`)
    if alone and (
        claimed.peak_bytes != fullest.peak_bytes
        or dict(claimed.memory_bytes) != dict(fullest.memory_bytes)
    ):
        yield Finding(
            "memory",
            f"the peak of the fullest stage is {fullest.peak_bytes} bytes, not"
            f" {claimed.peak_bytes}, or its parts differ",
        )
    if dict(claimed.host_bytes) != dict(pipeline.host_bytes):
        yield Finding("memory", "the parts of the largest host memory differ from the plan")


def _sum_stages(
    report: Certificate,
    stages: Sequence[Certificate],
    pipeline: Pipeline,
    num_multipliers: int,
    handed_s: float,
) -> Certificate:
    """Return the report with the sums over the stages, if all figures of the stages were
    derived."""
    report = replace(
        report,
        num_decisions=sum(s.num_decisions for s in stages),
        num_nodes=sum(s.num_nodes for s in stages),
        num_steps=sum(s.num_steps for s in stages),
        num_multipliers=num_multipliers + sum(s.num_multipliers for s in stages),
    )
    steps, peaks = (
        [s.step_s for s in stages if s.step_s is not None],
        [s.peak_bytes for s in stages if s.peak_bytes is not None],
    )
    bounds = [s.certified_bound_s for s in stages if s.certified_bound_s is not None]
    if len(steps) == len(stages):
        shared = (
            pipeline.num_chunks > 1
            # with several chunks or GPipe the claims of the stages serve: a wrong one has its own
            # finding
        )
        step_s = (
            _whole_step_s(pipeline)
            if shared or pipeline.schedule == "gpipe"
            else _step_s(steps, pipeline.num_microbatches)
        )
        report = replace(report, step_s=step_s + handed_s)
    if len(peaks) == len(stages):
        report = replace(report, peak_bytes=max(pipeline.rank_bytes, default=max(peaks)))
    if len(bounds) == len(stages) and report.objective_s:
        least = _least_s(pipeline, [max(b, 0.0) for b in bounds]) + handed_s
        note = (
            f"for these cuts and the layouts at their boundaries, {seconds(least)} is proven by"
            f" arithmetic, {1 - least / report.objective_s:.2%} below the plan"
        )
        report = replace(report, notes=(*report.notes, note))
    return report
