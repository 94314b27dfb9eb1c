"""The search: trace and mesh in, plan and program out.

The transient peak depends on the order of the emitted program, so it is not in the optimisation: it is re-derived on the
emitted program, and where the plan is over its budget, the reserve in the budget rows is raised by what was missing and
the problem is solved again. The first problem has no reserve, so its bound holds for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.capture.trace import Trace
from autopar.constraints import check
from autopar.cost.price import Priced, price
from autopar.emit import emit
from autopar.errors import AutoparError, InfeasibleError, size_text
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.planning.assembly import Draft, assemble, fingerprint
from autopar.planning.options import PlanOptions
from autopar.planning.runner_up import runner_ups
from autopar.plans import Plan
from autopar.problem import Choices
from autopar.run.memory import trace_peak
from autopar.run.program import Program
from autopar.solve import REMEDY, Least, choices_or_least, evaluate
from autopar.strategies import classes_of, resolve
from autopar.version import VERSION

_ROUNDS = 8  # reserve is raised at most this often; each round either fits or adds what was missing
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, the program it is emitted into, and how long each phase took (seconds by name)."""

    plan: Plan
    program: Program
    seconds: dict[str, float]


def make_plan(
    trace: Trace, mesh: Mesh, profile: HardwareProfile, options: PlanOptions, *, model_name: str = "", progress: Progress = lambda _: None
) -> Planned:
    """Plan a captured model for a mesh.

    Raises:
        ConstraintError: where a constraint matches nothing or no strategy meets it.
        InfeasibleError: where nothing fits the memory; says what would.
    """
    clock = _Clock(progress)
    for constraint in options.constraints:
        check(constraint, mesh)
    with clock.phase("enumerate"):
        forced = resolve(trace, options.constraints)
        classes = classes_of(trace, mesh.shape, forced)
    with clock.phase("price"):
        budget = options.budget(profile)
        priced = price(trace, classes, mesh, profile, budget_bytes=budget, optimizer=options.optimizer, forced=forced)
    mark = fingerprint(trace, model_name, profile.name, profile.hash, VERSION)
    recorded = options.to_json(profile)
    reserve, bound, smallest = 0, 0.0, 0
    for _ in range(_ROUNDS):
        with clock.phase("solve"):
            choices = _solve(priced, reserve, options)
            if isinstance(choices, Least):
                break
            bound = bound or choices.bound_s
        with clock.phase("assemble"):
            evaluation = evaluate(priced.problem, choices.strategies, choices.recomputed, choices.kept)
            draft = Draft(trace, mesh, priced, choices, evaluation, {})
            plan = assemble(draft, mark, recorded, bound)
        with clock.phase("emit"):
            program = emit(trace, plan)
        with clock.phase("memory"):
            optimizer_bytes = plan.prediction.memory_bytes["optimizer"]
            peak = trace_peak(program, batch=options.batch, outputs=options.outputs).peak_bytes + optimizer_bytes
        if peak <= budget:
            return _finished(draft, plan, program, peak, clock, options, bound)
        smallest = min(smallest or peak, peak)
        reserve = max(peak - evaluation.static_bytes - max(evaluation.kept_bytes, evaluation.gradient_bytes), int(reserve * 1.05) + 1)
    raise _refusal(budget, choices, smallest)


def _solve(priced: Priced, reserve: int, options: PlanOptions) -> Choices | Least:
    problem = replace(priced.problem, reserve_bytes=reserve)
    return choices_or_least(problem, gap=options.gap, time_limit_s=options.time_limit_s, solver=options.solver, bound_only=True)


def _refusal(budget: int, last: Choices | Least, smallest: int) -> InfeasibleError:
    """Says what is certain: the smallest peak of a plan that was emitted, or, where none was, what any plan needs at least."""
    if smallest or isinstance(last, Choices):
        tried = f"; the smallest that was tried needs {size_text(smallest)}"
        return InfeasibleError(f"no plan was found that fits into {size_text(budget)} per device{tried}", remedy=REMEDY)
    needed = f"at least {size_text(last.bound_bytes)} is needed, and the transient peak beside it"
    return InfeasibleError(f"no plan fits into {size_text(budget)} per device: {needed}", remedy=REMEDY)


def _finished(draft: Draft, plan: Plan, program: Program, peak: int, clock: _Clock, options: PlanOptions, bound: float) -> Planned:
    priced, choices, evaluation = draft.priced, draft.choices, draft.evaluation
    with clock.phase("explain"):
        draft = replace(draft, runner_ups=runner_ups(priced.problem, choices))
        plan = assemble(draft, plan.fingerprint, plan.options, bound)
    replicated = [entry for entry in plan.entries if entry.replicated]
    if options.strict and replicated:
        lines = [f"{e.key} ({e.time_s * len(e.instances) / plan.prediction.step_s:.1%} of the step) at {e.source}" for e in replicated]
        raise AutoparError("ops without a rule run replicated: " + "; ".join(lines), remedy="pass strict=False to accept their cost")
    memory = dict(plan.prediction.memory_bytes)
    memory["transient"] = max(peak - evaluation.static_bytes - max(evaluation.kept_bytes, evaluation.gradient_bytes), 0)
    plan = replace(plan, prediction=replace(plan.prediction, peak_bytes=peak, memory_bytes=memory))
    return Planned(plan, replace(program, plan_hash=plan.hash), clock.seconds)


class _Clock:
    """Seconds by phase; tells `progress` what is going on."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._name = ""
        self._start = 0.0

    def phase(self, name: str) -> _Clock:
        self._name = name
        return self

    def __enter__(self) -> None:
        self._progress(self._name)
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + time.perf_counter() - self._start
