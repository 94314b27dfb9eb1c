"""The benefit of choosing layouts and recomputation together, compared with choosing layouts first.

Three ways to plan in stages, as in other systems, are compared with the joint one, under budgets
from ample to the smallest feasible one:

    no_activations   layouts under the whole budget, counting only parameters, gradients and
                     optimizer state
    half_memory      the same under half of the budget; activations have the other half
    keep_all         layouts with every activation that backward reads kept, under the whole budget

Then each of them chooses kept and recomputed values under the whole budget, with fixed layouts. The
same solver solves all problems to the same gap, with one decision for equal layers. All plans are
emitted, and their peaks are derived from the emitted order. Times are predictions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.capture import Trace, capture
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.core.problem import Problem, Value
from autopar.core.solution import Solution
from autopar.cost.price import price
from autopar.cost.priced import Priced, Source
from autopar.errors import InfeasibleError
from autopar.planner import PlanOptions
from autopar.sharding import classes_of
from autopar.solve import SearchRequest, choices_or_least
from benchmarks import tables
from benchmarks.common import Row, load_profile, parser, run_rows, specs_of
from benchmarks.models import ModelSpec
from benchmarks.searching import searched

COLUMNS = (
    "budget_gib",
    "joint_s",
    "gap",
    "no_activations",
    "half_memory",
    "keep_all",
    "best_staged",
)
SHARES = (1.0, 0.8, 0.65, 0.55, 0.45, 0.35, 0.27, 0.2, 0.15, 0.1)  # shares of the ample plan's peak
BISECTIONS = 1  # between the smallest feasible share and the first infeasible one
GIB = 2**30
# (model, mesh, batch, length)
DEFAULTS = (
    (ModelSpec.known("gpt2"), "gpu=8", 64, 1024),
    (ModelSpec.known("llama3-8b"), "node=2,gpu=8", 32, 4096),
    (ModelSpec.known("gpt2"), "node=2,gpu=4", 64, 1024),
)
LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Case:
    """One model on one mesh, priced once."""

    trace: Trace
    mesh: Mesh
    profile: HardwareProfile
    priced: Priced
    gap: float

    def within(self, budget: int) -> Priced:
        return replace(self.priced, problem=replace(self.priced.problem, budget_bytes=budget))

    def planned(self, priced: Priced) -> Row:
        """Return the plan of a problem: its predicted step, peak and gap.

        Raises:
            InfeasibleError: if there is none.
        """
        options = PlanOptions(memory_bytes=priced.problem.budget_bytes, gap=self.gap)
        tried = searched(self.trace, self.mesh, self.profile, lambda _: priced, options, whole=True)
        return {"step_s": tried.time_s, "peak_bytes": tried.peak_bytes, "gap": tried.gap}

    def staged(self, budget: int, first: Callable[[Problem], Problem]) -> Row:
        """Return the plan with the layouts that solve `first` of the problem.

        Raises:
            InfeasibleError: if one of the stages has no solution.
        """
        priced = self.within(budget)
        options = PlanOptions(gap=self.gap)
        request = SearchRequest(
            first(priced.problem), options.gap, time_limit_s=options.time_limit_s
        )
        found = choices_or_least(request, solver=options.solver, bound_only=True)
        if not isinstance(found, Solution):
            raise InfeasibleError("no layouts fit", remedy="more memory")
        return self.planned(with_layouts(priced, found.strategies))


def without_activations(problem: Problem) -> Problem:
    """Return the problem in which the results of ops take no memory."""

    def without_bytes(value: Value) -> Value:
        made = problem.ops[value.op].kind == "compute"
        return (
            replace(value, graph=replace(value.graph, bytes=(0,) * len(value.graph.bytes)))
            if made
            else value
        )

    return replace(problem, values=tuple(map(without_bytes, problem.values)))


def half_the_memory(problem: Problem) -> Problem:
    """Return the problem with half of the budget."""
    return replace(without_activations(problem), budget_bytes=problem.budget_bytes // 2)


def keeping_all(problem: Problem) -> Problem:
    """Return the problem without recomputation."""
    return replace(problem, ops=tuple(replace(op, recomputable=False) for op in problem.ops))


STAGED: dict[str, Callable[[Problem], Problem]] = {
    "no_activations": without_activations,
    "half_memory": half_the_memory,
    "keep_all": keeping_all,
}


def with_layouts(priced: Priced, strategies: Sequence[int]) -> Priced:
    """Return the problem in which every op has one strategy. Kept and recomputed values are still
    free."""

    def only(source: Source, s: int) -> Source:
        cluster = source.cluster
        return (
            source
            if cluster is None
            else replace(source, cluster=replace(cluster, strategies=(cluster.strategies[s],)))
        )

    ops = tuple(
        replace(op, strategies=(op.strategies[s],))
        for op, s in zip(priced.problem.ops, strategies, strict=True)
    )
    sources = tuple(only(source, s) for source, s in zip(priced.sources, strategies, strict=True))
    return replace(priced, problem=replace(priced.problem, ops=ops), sources=sources)


def row(
    spec: dict[str, Any], mesh: str, dtype: str, batch: int, seq: int, hardware: str, gap: float
) -> list[Row]:
    """Return one row per budget. The last budget is too small for the joint plan."""
    model, data = ModelSpec(**spec).build(
        batch=batch, seq=seq, dtype=getattr(torch, dtype), meta=True
    )
    trace, grid, profile = capture(model, (), data), Mesh.parse(mesh), load_profile(hardware)
    priced = price(trace, classes_of(trace, grid.shape), grid, profile, budget_bytes=2**50)
    case = _Case(trace, grid, profile, priced, gap)
    shared = {"hardware": hardware, "dtype": dtype, "batch": batch, "seq": seq}
    return [{**shared, **found} for found in _sweep(case)]


def _sweep(case: _Case) -> Iterator[Row]:
    ample = case.planned(case.priced)["peak_bytes"]
    fits, fails = ample, 0
    for share in SHARES:
        found = _compared(case, int(ample * share))
        yield found
        if found["joint_s"] is None:
            fails = found["budget_bytes"]
            break
        fits = found["budget_bytes"]
    for _ in range(BISECTIONS):
        found = _compared(case, (fits + fails) // 2)
        yield found
        fits, fails = (
            (fits, found["budget_bytes"])
            if found["joint_s"] is None
            else (found["budget_bytes"], fails)
        )


def _compared(case: _Case, budget: int) -> Row:
    start = time.perf_counter()
    joint = _or_none(case.planned, case.within(budget))
    joint_solve_s = time.perf_counter() - start
    stages = {name: _or_none(case.staged, budget, first) for name, first in STAGED.items()}
    return {**compared(budget, {"joint": joint, **stages}), "solve_s": joint_solve_s}


def compared(budget: int, plans: Mapping[str, Row | None]) -> Row:
    """Return the row of a budget: the additional time of the staged plans' steps as a share of the
    joint plan's step; None if one of the two was not found."""
    joint = plans["joint"]

    def over(plan: Row | None) -> float | None:
        return plan["step_s"] / joint["step_s"] - 1 if plan and joint else None

    found = [plan for name, plan in plans.items() if plan and name != "joint"]
    best = min(found, key=lambda plan: plan["step_s"], default=None)
    row = {"ok": True, "error": None, "budget_bytes": budget, "budget_gib": budget / GIB}
    row |= {"joint_s": joint["step_s"] if joint else None, "gap": joint["gap"] if joint else None}
    return {
        **row,
        **{name: over(plans[name]) for name in STAGED},
        "best_staged": over(best),
        "plans": dict(plans),
    }


def _or_none(plan: Callable[..., Row], *args: Any) -> Row | None:
    try:
        return plan(*args)
    except InfeasibleError:
        return None


def joint_table(rows: Sequence[Row]) -> str:
    """Return one line per model, mesh and budget, from the largest budget: the joint step, and the
    additional time of the staged ones."""
    lines = [
        (
            "| model | mesh | budget, GiB | joint step, ms | gap | layouts first | in half the"
            " memory | everything kept |"
        ),
        f"|{'---|' * 8}",
    ]
    for row in sorted(rows, key=lambda r: (r["model"], r["mesh"], -r["budget_bytes"])):
        joint = row["plans"]["joint"]
        step = f"{1000 * joint['step_s']:.1f} | {joint['gap']:.1%}" if joint else "infeasible | "
        cells = " | ".join(_cell(row, name) for name in STAGED)
        lines.append(
            f"| {row['model']} | {row['mesh']} | {row['budget_gib']:.2f} | {step} | {cells} |"
        )
    return "\n".join(lines)


def _cell(row: Row, name: str) -> str:
    plan = row["plans"][name]
    if plan is None:
        return "infeasible"
    return f"{row[name]:+.1%}" if row[name] is not None else f"{1000 * plan['step_s']:.1f} ms"


def main(arguments: list[str]) -> int:
    flags = parser("joint", __doc__ or "", meshes=("gpu=8",))
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.set_defaults(batch=64, seq=1024)
    flags.add_argument("--hardware", default="h100-sxm")
    flags.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    flags.add_argument("--gap", type=float, default=0.005)
    options = flags.parse_args(arguments)
    shared = {name: getattr(options, name) for name in ("dtype", "hardware", "gap")}
    meshes = [str(Mesh.parse(mesh)) for mesh in options.mesh or ("gpu=8",)]
    named = [
        (spec, mesh, options.batch, options.seq)
        for spec in specs_of(options, ())
        for mesh in meshes
    ]
    cases = [
        {"spec": spec.to_json(), "mesh": mesh, "batch": b, "seq": s, **shared}
        for spec, mesh, b, s in named or DEFAULTS
    ]
    published = not named and not options.json
    results = str(tables.JOINT_RESULTS) if published else options.json
    status = run_rows("joint", cases, COLUMNS, results, LIMIT_S)
    if published and not status:
        rows = json.loads(tables.JOINT_RESULTS.read_text(encoding="utf-8"))["rows"]
        tables.put("benchmarks.joint", joint_table(rows))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
