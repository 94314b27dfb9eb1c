"""Solution → candidate: the plan, its program, and the peak memory of that program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from autopar.capture.trace import Trace
from autopar.core.mesh import Mesh
from autopar.core.solution import Solution
from autopar.emit import emit_stage
from autopar.planner.candidates import Candidate, PlanDraft
from autopar.planner.clock import Clock
from autopar.planner.comm_schedule import Ordering, Peaks
from autopar.planner.learned_moments import LayerGroups, LearnedMoments
from autopar.planner.plan_assembly import assemble, certify_proof
from autopar.plans import Fingerprint, Plan
from autopar.request import PlanOptions
from autopar.solve import within


@dataclass(frozen=True, slots=True)
class Emitter:
    """Emits the plans of one trace on one mesh and measures them.

    Attributes:
        trace: the trace.
        mesh: its mesh.
        options: the options of planning.
        clock: measures phases.
        mark: the fingerprint of the model and the machine that the plans are for.
        recorded: the options that the plans record.
        budget: bytes per device.
        peaks: measures the memory of emitted programs.
    """

    trace: Trace
    mesh: Mesh
    options: PlanOptions
    clock: Clock
    mark: Fingerprint
    recorded: Mapping[str, object]
    budget: int
    peaks: Peaks

    def emit(self, groups: LayerGroups, choices: Solution) -> Candidate:
        """Emit the plan of a solution and measure its peak.

        Args:
            groups: the groups of layers of the problem, with the lower bound that the plan states.
            choices: the solution.

        Returns:
            The candidate, with its communications in the order of the ops.
        """
        draft, plan = self._assemble(groups, choices)
        with self.clock.phase("emit"):
            accumulates = groups.priced.problem.accumulates
            program = emit_stage(self.trace, plan, accumulates=accumulates)
        with self.clock.phase("memory"):
            peak = self.peaks.peak_bytes(program)
        peak_bytes = peak + plan.prediction.beside_bytes
        problem = within(groups.problem, choices.regions)
        return Candidate(draft, plan, program, peak_bytes, groups.bound_s, problem)

    def prove(self, groups: LayerGroups, candidate: Candidate) -> Candidate:
        """Return a candidate with another lower bound and the same program.

        Args:
            groups: the groups of layers of the problem, with the lower bound that the plan states.
            candidate: the candidate.
        """
        choices = candidate.draft.choices
        draft, plan = self._assemble(groups, choices)
        return replace(
            candidate,
            draft=draft,
            plan=plan,
            bound_s=groups.bound_s,
            problem=within(groups.problem, choices.regions),
        )

    def _assemble(self, groups: LayerGroups, choices: Solution) -> tuple[PlanDraft, Plan]:
        with self.clock.phase("assemble"):
            draft = PlanDraft.of(self.trace, self.mesh, groups.priced, choices)
            plan = assemble(draft, self.mark, self.recorded, groups.bound_s)
            proof = certify_proof(plan.proof, draft, groups.multipliers)
            return draft, replace(plan, proof=proof)

    def fits(self, candidate: Candidate) -> bool:
        """Whether the peak of a candidate is within the budget."""
        return candidate.peak_bytes <= self.budget

    def order(self, candidate: Candidate) -> Candidate:
        """Order the communications of a candidate that fits.

        Returns:
            The candidate in the order with the shortest simulated step within the budget. If no
            time is left, the candidate is returned unchanged.
        """
        if self.options.is_over:
            return candidate
        return self._ordering_for(candidate).fastest(candidate)

    def order_within(self, candidate: Candidate, limit_s: float) -> Candidate | None:
        """Order the communications of a candidate that fits, if its step can be below a limit.

        Args:
            candidate: the candidate.
            limit_s: exclusive upper limit of the simulated step, in seconds.

        Returns:
            The result of `order`; None if no order has a step below the limit.
        """
        if self.options.is_over:
            return candidate
        return self._ordering_for(candidate).fastest_within(candidate, limit_s)

    def _ordering_for(self, candidate: Candidate) -> Ordering:
        over = partial(getattr, self.options, "is_over")
        measures = self.peaks.peak_bytes, self.peaks.by_node
        return Ordering(candidate.draft.priced, self.budget, *measures, self.clock, over)

    def learn(self, learnt: LearnedMoments, candidate: Candidate) -> LearnedMoments:
        """Learn the moments at which a candidate exceeds the budget.

        Args:
            learnt: the moments known so far.
            candidate: the candidate.

        Returns:
            The known moments, updated by the candidate, and those at which it exceeds the budget.
        """
        with self.clock.phase("memory"):
            peaks = self.peaks.by_node(candidate.program)
            simultaneous_bytes = candidate.plan.prediction.beside_bytes
            if self.peaks.schedule is not None:  # also held: bytes of the other microbatches
                simultaneous_bytes = candidate.peak_bytes - max(peak.peak_bytes for peak in peaks)
            return learnt.further(candidate.draft.choices, peaks, simultaneous_bytes, self.budget)
