"""Staged planning as a baseline of joint planning. The staged problems are restrictions of the
joint problem."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.core.mesh import Mesh
from autopar.core.problem import Problem
from autopar.cost.price import price
from autopar.sharding import classes_of
from autopar.solve import evaluate, solve
from benchmarks.common import load_profile
from benchmarks.joint import STAGED, _Case, compared, joint_table, with_layouts
from benchmarks.models import ModelSpec
from benchmarks.random_plans import Prepared, prepare
from benchmarks.tables import JOINT_RESULTS, README


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.stack(x).square().sum()}


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(
        Net(), {"x": torch.ones(512, 64)}, Mesh({"gpu": 4}), load_profile("cpu-gloo-frictionless")
    )


def with_budget(problem: Problem, budget: int) -> Problem:
    return replace(problem, budget_bytes=budget)


def test_joint_optimum_is_unchanged_if_its_layouts_are_fixed(prepared: Prepared) -> None:
    ample = solve(prepared.priced.problem, gap=0.0)
    resting = evaluate(prepared.priced.problem, ample.strategies).resting_bytes
    tight = with_budget(prepared.priced.problem, int(0.9 * max(resting)))
    joint = solve(tight, gap=0.0)
    fixed = with_layouts(replace(prepared.priced, problem=tight), joint.strategies)
    restricted = solve(fixed.problem, gap=0.0)
    assert restricted.objective_s == pytest.approx(joint.objective_s)
    assert {len(op.strategies) for op in fixed.problem.ops} == {1}
    names = [s.cluster.strategies for s in fixed.sources if s.cluster is not None]
    assert {len(each) for each in names} == {1}


def test_first_stages_omit_the_stated_memory(prepared: Prepared) -> None:
    problem = with_budget(prepared.priced.problem, 10**9)
    choices = solve(problem, gap=0.0).strategies
    whole = evaluate(problem, choices)
    assert whole.kept_bytes > 0
    light = {name: first(problem) for name, first in STAGED.items()}
    assert evaluate(light["no_activations"], choices).kept_bytes < whole.kept_bytes
    weights = {value.op: sum(value.graph.bytes) for value in light["no_activations"].values}
    assert {problem.ops[op].kind for op, size in weights.items() if size} == {"parameter", "input"}
    assert evaluate(light["no_activations"], choices).static_bytes == whole.static_bytes
    assert evaluate(light["keep_all"], choices).kept_bytes == whole.kept_bytes
    assert not any(op.recomputable for op in light["keep_all"].ops)
    assert [light[name].budget_bytes for name in STAGED] == [10**9, 10**9 // 2, 10**9]


def test_row_states_the_slowdown_of_staged_steps() -> None:
    plans = {
        "joint": {"step_s": 2.0, "gap": 0.0},
        "no_activations": {"step_s": 3.0},
        "half_memory": None,
        "keep_all": {"step_s": 2.5},
    }
    row = compared(2**30, plans)
    assert (row["no_activations"], row["half_memory"], row["keep_all"], row["best_staged"]) == (
        0.5,
        None,
        0.25,
        0.25,
    )
    table = joint_table([{**row, "model": "m", "mesh": "gpu=2"}])
    assert table.endswith("| m | gpu=2 | 1.00 | 2000.0 | 0.0% | +50.0% | infeasible | +25.0% |")
    alone = compared(2**30, {**plans, "joint": None})
    assert alone["best_staged"] is None
    assert joint_table([{**alone, "model": "m", "mesh": "gpu=2"}]).endswith(
        "| infeasible |  | 3000.0 ms | infeasible | 2500.0 ms |"
    )


def test_readme_table_matches_the_results() -> None:
    rows = json.loads(JOINT_RESULTS.read_text(encoding="utf-8"))["rows"]
    assert all(row["ok"] for row in rows)
    assert joint_table(rows) in README.read_text(encoding="utf-8")


@pytest.mark.slow
def test_joint_step_is_not_slower_than_a_staged_step() -> None:
    """The model is Llama-3 8B on two mesh axes, with a third of the memory that it needs without a
    budget."""
    model, batch = ModelSpec.known("llama3-8b").build(
        batch=32, seq=4096, dtype=torch.bfloat16, meta=True
    )
    trace, mesh, profile = (
        capture(model, (), batch),
        Mesh.parse("node=2,gpu=8"),
        load_profile("h100-sxm"),
    )
    case = _Case(
        trace,
        mesh,
        profile,
        price(trace, classes_of(trace, mesh.shape), mesh, profile, budget_bytes=2**50),
        0.005,
    )
    budget = int(21.6 * 2**30)
    joint, staged = case.planned(case.within(budget)), case.staged(budget, STAGED["no_activations"])
    assert joint["gap"] <= 0.01 and joint["peak_bytes"] <= budget
    assert joint["step_s"] <= staged["step_s"] * 1.001
