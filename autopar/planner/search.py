"""The search without stages, from trace and mesh to plan and program (its rounds are in
`autopar.planner.rounds`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from autopar.capture.trace import Trace
from autopar.constraints import Constraint, check
from autopar.core.hardware import Hardware, slowest
from autopar.core.mesh import Mesh
from autopar.core.problem import Problem
from autopar.cost.price import price
from autopar.errors import AutoparError, ConstraintError
from autopar.planner.candidates import Candidate
from autopar.planner.clock import Clock, Progress
from autopar.planner.comm_schedule import Peaks
from autopar.planner.emitter import Emitter
from autopar.planner.min_memory import Need
from autopar.planner.named_plans import NamedPlans
from autopar.planner.plan_assembly import assemble, fingerprint
from autopar.planner.report_infeasible import with_conflict
from autopar.planner.rounds import PlannerLoop, price_by_groups
from autopar.planner.sensitivity import runner_ups
from autopar.planner.timeline import with_simulated_overlap
from autopar.plans import Plan
from autopar.program.program import Program, StageProgram
from autopar.request import PlanOptions
from autopar.sharding import (
    ClusterClass,
    Forced,
    classes_of,
    resolve,
)
from autopar.solve import write_lp
from autopar.version import VERSION


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, its program, and the seconds of each phase of planning.

    Attributes:
        plan: the plan.
        program: the emitted program.
        seconds: seconds by name of the phase.
        closer: raises the plan's bound over all cuts by a factor, and returns the proven bound in
            seconds; None if it cannot be raised.
        computing_s: lower bound of the compute of any plan without stages, in seconds; 0 if it is
            not known.
        was_interrupted: whether Ctrl-C ended the search. Another run may find another plan.
        problem: the solved problem of a plan without stages.
    """

    plan: Plan
    program: Program
    seconds: dict[str, float]
    closer: Callable[[float], float] | None = field(default=None, repr=False, compare=False)
    computing_s: float = field(default=0.0, repr=False, compare=False)
    was_interrupted: bool = field(default=False, repr=False, compare=False)
    problem: Problem | None = field(default=None, repr=False, compare=False)

    def closer_proven(self, *, in_time: bool = True) -> Planned:
        """Raise the plan's bound to the requested gap, if possible. No multipliers prove the higher
        bound; it relies on the search.

        Args:
            in_time: whether there is time left.
        """
        proof, gap = self.plan.proof, float(self.plan.options["gap"])  # type: ignore[arg-type]
        if not in_time or self.closer is None or proof.gap <= gap or not proof.bound_s:
            return replace(self, closer=None)
        found_s = min(
            self.closer(proof.objective_s * (1.0 - gap) / proof.bound_s), proof.objective_s
        )
        if found_s > proof.bound_s:
            proof = replace(
                proof,
                bound_s=found_s,
                searched_bound_s=found_s,
                gap=1.0 - found_s / proof.objective_s,
            )
        return replace(self, plan=replace(self.plan, proof=proof), closer=None)

    def write_lp(self, path: str | Path) -> None:
        """Write the integer program of the plan in LP format (`autopar.solve.pulp_models`).

        Args:
            path: the file to write.

        Raises:
            AutoparError: if the plan has stages, each with a separate program, or the file cannot
                be written.
        """
        if self.problem is None:
            message = (
                "a plan with pipeline stages solves several integer programs, but one LP file"
                " holds only one"
            )
            raise AutoparError(
                message,
                where=str(path),
                remedy="pass num_microbatches=1 and no pipeline, or omit the LP file",
            )
        write_lp(self.problem, self.plan.proof.objective_s, path)

    def stage_program(self) -> StageProgram:
        """Return the program of the only stage."""
        (stage,) = self.program.stages
        return stage


def make_plan(
    trace: Trace,
    mesh: Mesh,
    hardware: Hardware,
    options: PlanOptions,
    *,
    model_name: str = "",
    progress: Progress = lambda _: None,
    limit_s: float = math.inf,
) -> Planned:
    """Plan a captured model for a mesh.

    Args:
        trace: the trace of the model.
        mesh: the mesh.
        hardware: the hardware. If devices are unequal, the slowest limits all of them.
        options: the options of planning.
        model_name: the model's name, for the plan's fingerprint.
        progress: called with the name of each phase.
        limit_s: exclusive upper limit of the step, in seconds.

    Raises:
        ConstraintError: if a constraint matches nothing, or no strategy satisfies it.
        InfeasibleError: if no plan fits; the error has the bytes needed.
        TooSlow: if the bound shows that no plan is below the limit.
    """
    clock, options = Clock(progress), options.of_a_trace().begun()
    search = prepare_search(
        trace,
        mesh,
        hardware,
        options,
        clock,
        model_name=model_name,
        limit_s=limit_s,
    )
    if options.effort != "quick" and not options.constraints and mesh.num_devices > 1:
        search.named = NamedPlans(trace, mesh, is_thorough=options.effort == "thorough")
    return finish_search(search.find_best(), clock, options)


def prepare_search(
    trace: Trace,
    mesh: Mesh,
    hardware: Hardware,
    options: PlanOptions,
    clock: Clock,
    *,
    model_name: str = "",
    limit_s: float = math.inf,
) -> PlannerLoop:
    """Enumerate strategies for the search of `make_plan`.

    Args:
        trace, mesh, hardware, options: as in `make_plan`.
        clock: measures phases.
        model_name: the model's name, for the plan's fingerprint.
        limit_s: exclusive upper limit of the step, in seconds.

    Returns:
        The search; `PlannerLoop.find_best` runs it.

    Raises:
        ConstraintError: if a constraint matches nothing, or no strategy satisfies it.
    """
    for constraint in options.constraints:
        check(constraint, mesh)

    def enumerate_classes(
        constraints: Sequence[Constraint],
    ) -> tuple[Forced, Sequence[ClusterClass]]:
        """Resolve constraints, and enumerate the strategies that they leave."""
        forced = resolve(trace, constraints, mesh)
        return forced, classes_of(trace, mesh.shape, forced)

    with clock.phase("enumerate"):
        try:
            forced, classes = enumerate_classes(options.constraints)
        except ConstraintError as error:
            raise with_conflict(error, options.constraints, enumerate_classes) from error
    profile = slowest(hardware)
    budget = options.budget(profile)

    price_classes = partial(
        price,
        trace,
        mesh=mesh,
        profile=profile,
        budget_bytes=budget,
        optimizer=options.optimizer,
    )
    mark = fingerprint(trace, model_name, hardware, VERSION)
    recorded, peaks = options.to_json(profile), Peaks(options)
    emitter = Emitter(trace, mesh, options, clock, mark, recorded, budget, peaks)
    pricing = price_by_groups(trace, classes, forced, price_classes)
    return PlannerLoop(emitter, pricing, limit_s=limit_s)


def finish_search(candidate: Candidate, clock: Clock, options: PlanOptions) -> Planned:
    """Complete the plan of a candidate: runner-ups, memory by kind, and the simulated time line.

    Args:
        candidate: the answer of a search, with its communications in order.
        clock: the clock of the search.
        options: the options of the search; with `strict`, ops without a rule are refused.

    Raises:
        AutoparError: if `strict` is set and ops without a rule run replicated.
    """
    draft, plan = candidate.draft, candidate.plan
    program, peak = candidate.program, candidate.peak_bytes
    priced, choices, evaluation = draft.priced, draft.choices, draft.evaluation
    with clock.phase("explain"):
        draft = replace(draft, runner_ups=runner_ups(priced.problem, choices))
        complete_plan = assemble(draft, plan.fingerprint, plan.options, candidate.bound_s)
        plan = replace(complete_plan, proof=plan.proof, overlap=plan.overlap, buckets=plan.buckets)
    replicated = [entry for entry in plan.entries if entry.replicated]
    if options.strict and replicated:
        lines = [
            f"{e.key} ({e.time_s * len(e.instances) / plan.prediction.step_s:.1%} of the step) at"
            f" {e.source} ({', '.join(f'{f.op}: {f.reason}' for f in e.fallbacks)})"
            for e in replicated
        ]
        raise AutoparError(
            "ops without a rule run replicated: " + "; ".join(lines),
            remedy=(
                "pass strict=False to run them replicated, or register a rule of each op with"
                " autopar.rules.register"
            ),
        )
    memory = dict(plan.prediction.memory_bytes)
    memory["transient"] = max(
        peak - evaluation.static_bytes - max(evaluation.kept_bytes, evaluation.gradient_bytes), 0
    )
    plan = replace(
        plan,
        prediction=with_simulated_overlap(
            replace(plan.prediction, peak_bytes=peak, memory_bytes=memory), program, plan
        ),
    )
    computing_s = priced.problem.computing_s
    return Planned(
        plan,
        Program.of_one_stage(draft.trace, program, plan.hash),
        clock.seconds,
        computing_s=computing_s,
        problem=candidate.problem,
    )


def needs(planned: Planned) -> tuple[Need, float]:
    """Return memory and seconds of a plan."""
    return need_of(planned.plan), planned.plan.prediction.step_s


def need_of(plan: Plan) -> Need:
    """Return the need of the devices that use the largest share of their budget."""
    pipeline = plan.as_pipeline
    if not pipeline.rank_budgets:
        return Need(plan.prediction.peak_bytes, plan.budget_of(0))
    needs = [
        Need(peak, plan.budget_of(rank), pipeline.where(rank))
        for rank, peak in enumerate(pipeline.peaks)
    ]
    return max(needs, key=lambda need: need.share)
