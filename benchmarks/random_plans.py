"""Random legal plans: the planner's solution under random prices, with its true price.

Each strategy gets a random price in addition to its true one. The cheapest solution is then a legal
plan. It is as coherent as other plans, but not a good one. A part of the forward ops may also be
recomputed in backward. The plan's prediction follows from the true prices, and its peak from the
emitted program. On request, its communication is ordered and put into buckets as for the planner's
plans, which the prices of small collectives assume.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autopar.capture import Trace, capture
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.core.problem import Op, Problem
from autopar.core.solution import Solution
from autopar.cost.price import price
from autopar.cost.priced import Priced
from autopar.emit import emit_stage
from autopar.errors import LayoutError
from autopar.planner import PlanOptions
from autopar.planner.candidates import Candidate, PlanDraft
from autopar.planner.clock import Clock
from autopar.planner.comm_schedule import Ordering, Peaks
from autopar.planner.plan_assembly import assemble, fingerprint
from autopar.planner.timeline import with_simulated_overlap
from autopar.plans import RESTING, Plan
from autopar.program.program import Program
from autopar.sharding import classes_of
from autopar.solve import Evaluation, evaluate, solve
from autopar.version import VERSION

AMPLE_BYTES = 2**50


@dataclass(frozen=True, slots=True)
class Prepared:
    """The data that all plans of one model on one mesh share."""

    trace: Trace
    mesh: Mesh
    profile: HardwareProfile
    priced: Priced


def prepare(
    model: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    profile: HardwareProfile,
    *,
    inference: bool = False,
) -> Prepared:
    """Capture a model, list its strategies and price them, once for many plans."""
    return prepared_trace(capture(model, (), batch, inference=inference), mesh, profile)


def prepared_trace(trace: Trace, mesh: Mesh, profile: HardwareProfile) -> Prepared:
    """Prepare a captured model."""
    return Prepared(
        trace,
        mesh,
        profile,
        price(trace, classes_of(trace, mesh.shape), mesh, profile, budget_bytes=AMPLE_BYTES),
    )


def random_plan(
    prepared: Prepared,
    seed: int,
    *,
    loudness: tuple[float, float] = (0.0, 1.5),
    recompute_share: float | None = None,
    recompute_otherwise: bool = False,
    in_order: bool = False,
) -> tuple[Plan, Program]:
    """Return the plan and the program of a seed.

    Args:
        prepared: the prepared model.
        seed: seed of the random prices.
        loudness: range of the noise as powers of ten, relative to the time of a typical collective.
            Below 0, plans are close to the best.
        recompute_share: probability that backward recomputes a forward op; by default random, often
            0.
        recompute_otherwise: whether a recomputation has a random strategy instead of the strategy
            of forward.
        in_order: whether to choose buckets and early communication. Otherwise there are none.
    """
    choices, evaluation = random_choices(
        prepared, seed, loudness, recompute_share, recompute_otherwise
    )
    return finish(prepared, choices, evaluation, f"random-{seed}", in_order=in_order)


def random_choices(
    prepared: Prepared,
    seed: int,
    loudness: tuple[float, float] = (0.0, 1.5),
    recompute_share: float | None = None,
    recompute_otherwise: bool = False,
) -> tuple[Solution, Evaluation]:
    """Return the choices of `random_plan`, and their cost."""
    rng = random.Random(seed)
    problem = prepared.priced.problem
    choices = solve(_noisy(problem, rng, _scale_s(problem, rng.uniform(*loudness))), gap=0.05)
    share = rng.choice([0.0, 0.0, 0.3, 1.0]) if recompute_share is None else recompute_share
    recomputed, kept = _recomputation(problem, choices, rng, share)
    as_forward = recomputed
    if recompute_otherwise:
        recomputed = {
            op: rng.choice(_without_partial(problem.ops[op]) or [strategy])
            for op, strategy in recomputed.items()
        }
    try:
        evaluation = evaluate(problem, choices.strategies, recomputed, kept)
    except LayoutError:  # backward reads partial sums that only the strategy of forward produces
        recomputed = as_forward
        evaluation = evaluate(problem, choices.strategies, recomputed, kept)
    return replace(
        choices, recomputed=recomputed, kept=evaluation.kept, objective_s=evaluation.objective_s
    ), evaluation


def _scale_s(problem: Problem, power: float) -> float:
    times = sorted(arc.time_s for value in problem.values for arc in value.graph.arcs)
    return times[len(times) // 2] * 10**power if times else 0.0


def _noisy(problem: Problem, rng: random.Random, scale_s: float) -> Problem:
    def noisy(op: Op) -> Op:
        return replace(
            op,
            strategies=tuple(
                replace(s, time_s=s.time_s + rng.uniform(0, scale_s)) for s in op.strategies
            ),
        )

    return replace(problem, ops=tuple(map(noisy, problem.ops)))


def _recomputation(
    problem: Problem, choices: Solution, rng: random.Random, share: float
) -> tuple[dict[int, int], dict[int, tuple[int, ...]] | None]:
    """Return the ops that backward recomputes with their strategies, and the versions that may be
    kept: none of their results."""
    wanted = {
        index for index, op in enumerate(problem.ops) if op.recomputable and rng.random() < share
    }
    readers: dict[int, set[tuple[int, str]]] = {}
    for variant in problem.variants:
        read = {
            (use.op, use.phase) for use in variant.uses if use.read_again or use.phase == "backward"
        }
        readers.setdefault(problem.values[variant.value].op, set()).update(read)
    while (
        True
    ):  # an op is not recomputed if neither backward nor another recomputed op reads its results
        useful = {
            op
            for op in wanted
            if any(phase == "backward" or reader in wanted for reader, phase in readers.get(op, ()))
        }
        if useful == wanted:
            break
        wanted = useful
    if not wanted:
        return {}, None
    layouts = {
        v: tuple(range(len(problem.values[variant.value].graph.layouts)))
        for v, variant in enumerate(problem.variants)
    }
    kept = {
        v: () if problem.values[problem.variants[v].value].op in wanted else all_of
        for v, all_of in layouts.items()
    }
    return {op: choices.strategies[op] for op in wanted}, kept


def _without_partial(op: Op) -> list[int]:
    """Return the strategies that are possible regardless of the others. No collective leads to
    partial sums."""
    layouts = [(*s.layouts.inputs, *s.layouts.outputs) for s in op.strategies]
    return [i for i, each in enumerate(layouts) if not any(layout.has_partial for layout in each)]


def finish(
    prepared: Prepared,
    choices: Solution,
    evaluation: Evaluation,
    name: str,
    *,
    in_order: bool = False,
) -> tuple[Plan, Program]:
    """Return the plan and the program of choices. `in_order` is that of `random_plan`."""
    trace, profile = prepared.trace, prepared.profile
    mark = fingerprint(trace, name, profile, VERSION)
    options = PlanOptions(
        memory_bytes=AMPLE_BYTES, optimizer=prepared.priced.optimizer, outputs="dtensor"
    )
    recorded = {
        "memory_bytes": AMPLE_BYTES,
        "optimizer": options.optimizer,
        "batch": options.batch,
        "outputs": options.outputs,
    }
    draft = PlanDraft(trace, prepared.mesh, prepared.priced, choices, evaluation, {})
    plan = assemble(draft, mark, recorded, 0.0)
    peak_bytes = plan.prediction.peak_bytes
    tried = Candidate(
        draft, plan, emit_stage(trace, plan), peak_bytes, 0.0, prepared.priced.problem
    )
    peaks = Peaks(options)
    if in_order:
        tried = Ordering(
            prepared.priced, AMPLE_BYTES, peaks.peak_bytes, peaks.by_node, Clock(lambda _: None)
        ).fastest(tried)
    plan, program = tried.plan, tried.program
    peak = peaks.peak_bytes(program) + plan.prediction.beside_bytes
    kinds = plan.prediction.memory_bytes
    rests = sum(kinds.get(kind, 0) for kind in RESTING) + max(
        kinds["activations"], kinds["gradients"]
    )
    prediction = replace(
        plan.prediction, peak_bytes=peak, memory_bytes={**kinds, "transient": max(peak - rests, 0)}
    )
    plan = replace(
        plan,
        prediction=with_simulated_overlap(prediction, program, plan) if in_order else prediction,
    )
    assert math.isfinite(plan.prediction.step_s)
    return plan, Program.of_one_stage(trace, program, plan.hash)
