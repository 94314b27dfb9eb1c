"""`certify`: every claim of a plan, derived anew from the traced model, the plan's mesh and the hardware profile.

What is taken as given: the traced model, the rules of ops, the problem that `autopar.cost.price` states, emission, and the count of live
bytes on the emitted program. What is not: the search, the prices, collectives, sizes, sums and the bound that the plan holds. Prices follow
from the profile by formulas of the certificate's own (`autopar.certificate.rates`, `own_work`). No solver is run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.capture.trace import Trace
from autopar.certificate.bars import bars, is_simulated
from autopar.certificate.buckets import BucketWalk
from autopar.certificate.context import Context
from autopar.certificate.decisions import Decisions, crossing_keys
from autopar.certificate.dims import beyond
from autopar.certificate.facts import Claims, Facts
from autopar.certificate.fields import unverified
from autopar.certificate.hosts import host_memory, on_hosts
from autopar.certificate.kernels import KernelWalk
from autopar.certificate.marks import as_asked, captured, identity, notes
from autopar.certificate.moves import Walk
from autopar.certificate.own import OwnWalk
from autopar.certificate.proof import Stored, proven
from autopar.certificate.report import Certificate, Finding
from autopar.certificate.resources import emission, memory, overlap, seconds_of, sum_resting, times
from autopar.certificate.steps import steps_per_step
from autopar.certificate.words import words
from autopar.cost.priced import Priced
from autopar.emit import emit, least_overlap, overlapped
from autopar.emit.choices import storage_key
from autopar.errors import AutoparError
from autopar.garbage import collected_seldom
from autopar.hardware import Hardware, HardwareProfile, slowest
from autopar.plans import KERNELS_BUFFERS, Overlap, Plan


@collected_seldom()
def certify(trace: Trace, plan: Plan, hardware: Hardware, context: Context | None = None) -> Certificate:
    """Check every claim of `plan`; what a claim rests on is checked before it, and where that fails the claim is left out.

    Args:
        hardware: of unequal devices each claim holds at the pace of the slowest.
        context: of a pipeline's stage (`autopar.certificate.staged`); by default that of a plan without stages.
    """
    title = f"{plan.fingerprint.model_name or 'model'} on mesh {plan.mesh} ({plan.mesh.num_devices} devices), {plan.fingerprint.profile}"
    claimed, proof = plan.prediction, plan.proof
    budget = plan.options.get("memory_bytes")
    said = (*identity(trace, plan, hardware), *captured(trace, plan), *(() if context else as_asked(plan)))
    report = Certificate(
        title, said, tuple(notes(plan)), claimed_step_s=claimed.step_s,
        claimed_peak_bytes=claimed.peak_bytes, budget_bytes=budget if isinstance(budget, int) else 0,
        objective_s=proof.objective_s, claimed_bound_s=proof.bound_s,
        unverified=unverified(plan, but=("prediction.timeline",) if is_simulated(plan) else ()),
    )  # fmt: skip
    if not report.ok:
        return report
    try:
        context, profile = context or Context.of(trace, plan), slowest(hardware)
        priced = context.problem(trace, plan, profile)
    except AutoparError as error:
        return replace(report, findings=(Finding("layouts", f"the problem cannot be stated: {error.what}"),))
    facts = Facts.of(trace, accumulates=context.accumulates)
    return _Job(trace, plan, profile, context, priced, facts, Claims.of(plan)).certificate(report)


@dataclass
class _Job:
    """One certificate in the making."""

    trace: Trace
    plan: Plan
    profile: HardwareProfile
    context: Context
    priced: Priced
    facts: Facts
    claims: Claims

    def certificate(self, report: Certificate) -> Certificate:
        """The report with everything that can be derived."""
        plan = self.plan
        stored = Stored(self.trace, plan, self.priced, self.facts)
        bound_s = stored.bound_s()
        found = [*stored.findings, *proven(plan.proof, bound_s)]
        report = replace(
            report, certified_bound_s=bound_s, num_multipliers=stored.num_multipliers, num_decisions=len(plan.entries),
            num_nodes=len(self.facts.keys), num_steps=len(plan.steps()),
        )  # fmt: skip
        decisions = Decisions(plan, self.trace, self.facts, self.priced, plan.mesh, self.profile, self.context)
        rests = frozenset(storage_key(p.name) for p in self.trace.parameters) if self.context.accumulates else frozenset[str]()
        again = frozenset(n for n, op in enumerate(self.priced.problem.ops) if op.recomputable)
        walk = Walk(self.facts, self.claims, plan.mesh, self.profile, decisions.owner, again, rests, self.context.num_microbatches)
        strangers = [*decisions.strangers(), *walk.strangers(), *beyond(self.facts, self.claims, len(plan.mesh.axes))]
        if strangers:
            return replace(report, findings=(*strangers, *found))
        once = steps_per_step(self.trace, walk, self.claims) if self.context.accumulates else ()
        kernels = KernelWalk(self.facts, self.claims, plan.mesh, self.profile)
        own = OwnWalk(self.facts, self.claims, plan.mesh, self.profile)
        shared = BucketWalk(self.trace, plan, self.facts, self.claims, self.profile, self.context.num_microbatches)
        found = [*decisions.findings(), *walk.findings(), *own.findings(), *kernels.findings(), *shared.findings(), *once, *found]
        found += words(plan, self.trace, self.facts)
        if not any(f.claim == "layouts" for f in found):
            seconds = seconds_of(plan, decisions, self.profile.overlap_slowdown)
            report = replace(report, step_s=seconds.step_s)
            found += times(plan, seconds)
        return self._emitted(report, found, sum((*kernels.shared.values(), *own.shared.values())))

    def _emitted(self, report: Certificate, found: list[Finding], shared_bytes: int) -> Certificate:
        """What follows from the emitted program, beside which kernels share so much."""
        try:
            serial = emit(self.trace, replace(self.plan, overlap=Overlap()), accumulates=self.context.accumulates, named=False)
            program, held = overlapped(serial, self.plan)[0], least_overlap(serial, self.plan)
            found += emission(self.plan, self.claims, program)
            found += overlap(self.plan, program, held, self.profile.overlap_slowdown)
            found += bars(self.plan, program, crossing_keys(self.trace))
            sizes = sum_resting(self.trace, self.facts, self.claims, self.plan, accumulates=self.context.accumulates)
            sizes |= {KERNELS_BUFFERS: shared_bytes} if shared_bytes else {}
            peak, wrong = memory(self.plan, program, self.facts, sizes, self.context)
        except AutoparError as error:
            where = "" if error.where is None else str(error.where)
            return replace(report, findings=(*found, Finding("emission", error.what, where)))
        on_host = on_hosts(self.trace, self.facts, self.claims, self.plan, self.context)
        wrong += host_memory(self.plan, on_host, self.priced.problem.host_budget_bytes)
        if peak > self.profile.device_memory_bytes:
            what = f"the peak of {peak} bytes is over the device's memory of {self.profile.device_memory_bytes}"
            wrong.append(Finding("memory", what))
        return replace(report, findings=(*found, *wrong), peak_bytes=peak)
