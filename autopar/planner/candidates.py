"""Candidates of a search: drafts that plans are assembled from, emitted plans with their peaks, and
the limits beyond which no plan is tried."""

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
"""In a pattern, what stands for the index of a layer."""


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
        """Make the draft of choices, without runner-ups.

        Args:
            trace: of the model.
            mesh: that the plan is for.
            priced: the problem that the choices answer.
            choices: the solver's answer.
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
    """Map the nodes that compute, and placeholders, to their keys."""
    keys = {n.name: n.meta["key"] for n in trace.graph.nodes if n.op == "call_function"}
    return {**keys, **placeholder_keys(trace)}


class TooSlow(Exception):
    """No plan is as fast as is asked for; its argument is the bound in seconds."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that was emitted: its peak, all that rests included, and the bound that holds for all
    plans.

    Attributes:
        problem: what the solver was asked, with the moments that were known then.
    """

    draft: PlanDraft
    plan: Plan
    program: StageProgram
    peak_bytes: int
    bound_s: float
    problem: Problem

    @property
    def time_s(self) -> float:
        """Seconds of the step."""
        return self.draft.evaluation.objective_s

    @property
    def gap(self) -> float:
        """Relative distance of the step from its bound."""
        return (self.time_s - self.bound_s) / self.time_s if self.time_s else 0.0
