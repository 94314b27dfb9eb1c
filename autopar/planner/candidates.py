"""Candidates of a search: drafts from which plans are assembled, and emitted plans with their
peaks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.capture.trace import Trace
from autopar.core.mesh import Mesh
from autopar.core.problem import Problem
from autopar.core.solution import Solution
from autopar.cost.priced import Priced
from autopar.emit.context import placeholder_keys
from autopar.plans import Plan, RunnerUp
from autopar.program.program import StageProgram
from autopar.sharding import Ref, pattern_of
from autopar.solve import Evaluation, evaluate_choices

# --------------------------------------------------------------------------------------------------
# Drafts of plans, and the names of tensors and nodes in plans.

FIELD = re.compile(r"\{\d+\}")
"""The placeholder of a layer index in a pattern."""


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """Everything a plan is assembled from."""

    trace: Trace
    mesh: Mesh
    priced: Priced
    choices: Solution
    evaluation: Evaluation
    runner_ups: Mapping[int, RunnerUp]

    @staticmethod
    def of(trace: Trace, mesh: Mesh, priced: Priced, choices: Solution) -> PlanDraft:
        """Make a draft without runner-ups.

        Args:
            trace: the trace of the model.
            mesh: the mesh of the plan.
            priced: the priced problem.
            choices: a solution of the problem.
        """
        return PlanDraft(
            trace, mesh, priced, choices, evaluate_choices(priced.problem, choices), {}
        )


def tensor_patterns(
    refs: Sequence[Ref], keys: Mapping[str, str]
) -> Iterable[tuple[str, int, tuple[tuple[int, ...], ...]]]:
    """Group a variant's tensors as (node pattern, result, instances)."""
    grouped: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for name, result in refs:
        pattern, indices = pattern_of(keys[name])
        grouped.setdefault((pattern, result), []).append(indices)
    return [(pattern, result, tuple(indices)) for (pattern, result), indices in grouped.items()]


def all_keys(trace: Trace) -> dict[str, str]:
    """Map the names of ops and placeholders to their keys."""
    keys = {n.name: n.meta["key"] for n in trace.graph.nodes if n.op == "call_function"}
    return {**keys, **placeholder_keys(trace)}


class TooSlow(Exception):
    """Raised if no plan is as fast as requested. The argument is the lower bound in seconds."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An emitted plan.

    Attributes:
        draft: what the plan was assembled from.
        plan: the plan.
        program: the program of the plan.
        peak_bytes: peak memory per device, with parameters and optimizer state.
        bound_s: lower bound of the step of all plans, in seconds.
        problem: the solved problem, with the moments that were known when it was solved.
    """

    draft: PlanDraft
    plan: Plan
    program: StageProgram
    peak_bytes: int
    bound_s: float
    problem: Problem

    @property
    def time_s(self) -> float:
        """The objective: seconds of the step."""
        return self.draft.evaluation.objective_s

    @property
    def gap(self) -> float:
        """The relative distance of the objective from its lower bound."""
        return (self.time_s - self.bound_s) / self.time_s if self.time_s else 0.0
