"""Equal stages are solved and measured once, with the same plans as if each stage had been solved
separately."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.api.planning import plan_model
from autopar.constraints import fsdp, pipeline
from autopar.core.problem import Problem
from autopar.core.solution import Solution
from autopar.planner import Planned, comm_schedule, solving
from autopar.planner.pipeline.stage_cache import Effort, StageCache, form_of
from autopar.program.stage_memory import trace_stage_peak
from autopar.solve import SearchRequest
from benchmarks import zoo

MESH = autopar.Mesh({"stage": 4, "data": 2})


def planned(schedule: str) -> Planned:
    model, batch = zoo.build("llama", batch=8, num_hidden_layers=4)
    constraints = (pipeline("stage", microbatches=4, schedule=schedule), fsdp("data"))
    return plan_model(
        model, MESH, example_inputs=batch, hardware="h100-sxm", constraints=constraints
    )[1]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
def test_plans_are_the_same_as_with_each_stage_solved_and_measured_separately(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"solved": 0, "measured": 0}
    solve, measure = solving.choices_or_least, trace_stage_peak

    def counted_solve(request: SearchRequest, **how: Any) -> object:
        counts["solved"] += 1
        return solve(request, **how)

    def counted_measure(*args: object) -> object:
        counts["measured"] += 1
        return measure(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(solving, "choices_or_least", counted_solve)
    monkeypatch.setattr(comm_schedule, "trace_stage_peak", counted_measure)
    shared = planned(schedule)
    seen = dict(counts)
    monkeypatch.setattr(StageCache, "known", lambda self, problem, effort: None)
    monkeypatch.setattr(StageCache, "peak", lambda self, program, num, measured: measured())
    assert planned(schedule).plan.dumps() == shared.plan.dumps()
    assert counts["solved"] > 2 * seen["solved"]
    assert counts["measured"] > 2 * seen["measured"]
    program = shared.program
    first, second, third = program.stages[:3]
    assert form_of(second) == form_of(third) != form_of(first), "the first reads tokens"
    tensor = second.parameters[0]
    wide = replace(
        second, parameters=(replace(tensor, dtype=torch.float64), *second.parameters[1:])
    )
    assert form_of(wide) != form_of(second)


def test_a_solution_is_reused_for_fewer_in_flight_only_if_memory_was_not_binding() -> None:
    def ended(budget_rows: float, timed_out: float = 0.0) -> Solution:
        return Solution(
            (), {}, {}, 1.0, 1.0, stats={"budget_rows": budget_rows, "timed_out": timed_out}
        )

    problem = Problem((), (), (), 2**20, num_in_flight=4)
    fewer, other = replace(problem, num_in_flight=2), replace(problem, budget_bytes=2**21)
    for binding in (0.0, 1.0):
        stage_cache = StageCache()
        stage_cache.learn(problem, ended(binding), Effort.WHOLE)
        assert stage_cache.known(problem, Effort.WHOLE) is not None
        assert stage_cache.known(problem, Effort.MIXED) is not None
        assert (stage_cache.known(fewer, Effort.WHOLE) is None) == bool(binding)
        assert stage_cache.known(other, Effort.WHOLE) is None
    late = StageCache()
    late.learn(problem, ended(0.0, timed_out=1.0), Effort.WHOLE)
    assert late.known(problem, Effort.WHOLE) is None
    early = StageCache()
    early.learn(problem, replace(ended(0.0), mixed={0: (0.5,)}), Effort.MIXED)
    assert early.known(problem, Effort.WHOLE) is None, (
        "a search that ended early is no answer to one that is to go on"
    )
    assert early.known(problem, Effort.MIXED) is not None
    short = StageCache()
    short.learn(problem, replace(ended(0.0), unfinished=True), Effort.WHOLE)
    assert short.known(problem, Effort.END) is None, (
        "nor is one that ended with a plan to one that is to prove it"
    )
    assert short.known(problem, Effort.WHOLE) is not None
