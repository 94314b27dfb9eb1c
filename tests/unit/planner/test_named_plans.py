"""Named plans as exclusions of strategies, their bounds and solutions, and the choice of a plan."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest
import torch
import zoo_small
from mlp import traced
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.capture.trace import Trace
from autopar.constraints import Parallelism, ddp, fsdp, tensor_parallel
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.cost.price import price
from autopar.planner import PlanOptions, make_plan, named_plans
from autopar.planner.named_plans import NamedPlans, excluded_by
from autopar.planner.pipeline.stage_cache import StageCache
from autopar.planner.solving import ProblemSolver
from autopar.sharding import classes_of, resolve, resolve_named
from autopar.solve import SmallerProblem

MESH = Mesh({"node": 2, "gpu": 2})
GLOO = HardwareProfile.load("cpu-gloo")
PLANS = (
    (ddp(),),
    (fsdp(),),
    (ddp("node"), fsdp("gpu")),
    (fsdp("node"), tensor_parallel("1d", axes="gpu")),
    (ddp("node"), tensor_parallel("1d", axes="gpu", sequence=True)),
)


def small(family: str) -> Trace:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, batch = getattr(zoo_small, family)()
    return capture(model, (), batch)


@pytest.fixture(scope="module", params=["gpt2", "llama", "bert"])
def trace(request: pytest.FixtureRequest) -> Trace:
    return small(request.param)


@pytest.mark.parametrize("plans", PLANS, ids=lambda plans: " + ".join(map(str, plans)))
def test_the_remaining_strategies_are_those_that_the_constraint_allows(
    trace: Trace, plans: tuple[Parallelism, ...]
) -> None:
    forced = resolve(trace, plans, MESH)
    free = price(trace, classes_of(trace, MESH.shape), MESH, GLOO, budget_bytes=2**40)
    under = price(
        trace, classes_of(trace, MESH.shape, forced), MESH, GLOO, budget_bytes=2**40, forced=forced
    )
    excluded = excluded_by(free, resolve_named(trace, plans, MESH))
    admitted: dict[str, set[str]] = {}
    for op, source in zip(under.problem.ops, under.sources, strict=True):
        for name in _names(source):
            admitted[name] = {str(strategy.layouts) for strategy in op.strategies}
    num_excluded = 0
    for n, (op, source) in enumerate(zip(free.problem.ops, free.sources, strict=True)):
        out = excluded.get(n, frozenset())
        left = {str(each.layouts) for s, each in enumerate(op.strategies) if s not in out}
        num_excluded += len(out)
        if op.kind in (
            "compute",
            "parameter",
        ):  # a result with fewer partial sums may have fewer strategies
            of_all = set.intersection(*(admitted[name] for name in _names(source)))
            assert of_all <= left, op.key
            partial = {layouts for layouts in left - of_all if "P" not in layouts}
            assert not partial, (op.key, partial)
    assert num_excluded > 0


def _names(source: Any) -> list[str]:
    if source.cluster is None:
        return list(source.names)
    return [cluster.members[0].node for cluster in source.cluster.instances]


@pytest.mark.parametrize("plans", PLANS[:4], ids=lambda plans: " + ".join(map(str, plans)))
def test_the_solution_without_excluded_strategies_is_that_of_the_constrained_plan(
    plans: tuple[Parallelism, ...],
) -> None:
    trace = small("gpt2")
    options = PlanOptions(gap=0.0).of_a_trace().begun()
    free = price(trace, classes_of(trace, MESH.shape), MESH, GLOO, budget_bytes=2**40)
    excluded = excluded_by(free, resolve_named(trace, plans, MESH))
    solving = ProblemSolver(options, StageCache())
    found = solving.without(SmallerProblem.of(free.problem, excluded), math.inf)
    asked = make_plan(trace, MESH, GLOO, PlanOptions(gap=0.0, constraints=plans)).plan
    assert found is not None
    assert found.objective_s <= asked.prediction.step_s * (1 + 1e-6), "it may run more ops again"
    assert all(found.strategies[n] not in out for n, out in excluded.items())
    assert found.objective_s == pytest.approx(asked.prediction.step_s, rel=1e-3)
    assert (
        solving.without(SmallerProblem.of(free.problem, excluded), 0.9 * found.objective_s) is None
    )


def test_multipliers_bound_solutions_without_some_strategies() -> None:
    trace = traced(32, 64, 64, num_layers=3, dtype=torch.float32)
    free = price(trace, classes_of(trace, MESH.shape), MESH, GLOO, budget_bytes=2**40)
    solving = ProblemSolver(PlanOptions(gap=0.0).of_a_trace().begun(), StageCache())
    best = solving.without(SmallerProblem.of(free.problem, {}), math.inf)
    assert best is not None and best.multipliers is not None
    num_higher = 0
    for n, op in enumerate(free.problem.ops):
        if len(op.strategies) < 2:
            continue
        excluded = {n: frozenset([best.strategies[n]])}
        bound_s = best.multipliers.bound_without(excluded)
        found = solving.without(SmallerProblem.of(free.problem, excluded), math.inf)
        assert found is not None
        assert best.multipliers.bound_s <= bound_s <= found.objective_s * (1 + 1e-9)
        num_higher += bound_s > best.multipliers.bound_s * (1 + 1e-6)
    assert num_higher > 0


@pytest.mark.parametrize("family", ["gpt2", "llama", "vit"])
@pytest.mark.parametrize("mesh", [Mesh({"gpu": 4}), MESH], ids=str)
def test_no_named_plan_has_a_shorter_simulated_step_than_a_thorough_free_one(
    family: str, mesh: Mesh
) -> None:
    trace = small(family)
    hardware = HardwareProfile.load("a100-sxm-80gb")
    free = make_plan(trace, mesh, hardware, PlanOptions(effort="thorough")).plan.prediction
    for plans in itertools.product(*((ddp(axis), fsdp(axis)) for axis in mesh.names)):
        under = make_plan(trace, mesh, hardware, PlanOptions(constraints=plans)).plan.prediction
        assert under.simulated_s >= under.step_s * (1 - 1e-9)
        assert free.simulated_s <= under.simulated_s * (1 + 1e-9), plans


def test_a_chosen_named_plan_keeps_the_bound_and_passes_check_and_verify(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, batch = zoo_small.gpt2()
    mesh, asked = Mesh({"gpu": 2}), {"example_inputs": batch, "hardware": "cpu-gloo"}
    best = autopar.plan(model, mesh, effort="quick", **asked)
    first, simulated_s = iter([1e9]), named_plans.simulated_s
    monkeypatch.setattr(
        named_plans, "simulated_s", lambda *program: next(first, 0.0) or simulated_s(*program)
    )
    taken = autopar.plan(model, mesh, **asked)
    assert taken.entries != best.entries
    assert any(
        "chosen because its simulated step is shorter" in line for line in taken.proof.covers
    )
    assert taken.proof.bound_s == best.proof.bound_s <= taken.proof.objective_s
    assert taken.proof.gap == pytest.approx(1 - taken.proof.bound_s / taken.proof.objective_s)
    assert autopar.check(taken, model, batch).ok
    assert autopar.verify(taken, model, batch).ok


def test_named_plans_that_the_model_does_not_support_are_skipped() -> None:
    trace = traced(6, 64, 64, num_layers=2, dtype=torch.float32)
    mesh = Mesh({"gpu": 4})
    free = price(trace, classes_of(trace, mesh.shape), mesh, GLOO, budget_bytes=2**40)
    named = [
        name for name, _ in NamedPlans(trace, mesh, is_thorough=True).search(free, lambda _: True)
    ]
    assert named and not any("context" in name for name in named)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).pow(2).mean()


def test_unrequested_named_plans_give_no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    asked = dict(example_inputs=(torch.zeros(8, 16, 32),), hardware="h100-sxm")
    tensor = tensor_parallel("1d", axes="gpu")
    with caplog.at_level(logging.WARNING, "autopar"):
        autopar.plan(Block(), Mesh({"gpu": 2}), **asked)
        assert not caplog.records
        autopar.plan(Block(), Mesh({"gpu": 2}), constraints=[tensor], **asked)
        assert any(str(tensor) in record.getMessage() for record in caplog.records)
