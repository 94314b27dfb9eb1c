"""What a plan is assembled from, and tensors and nodes in the user's words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.capture.trace import Trace
from autopar.choices import Choices
from autopar.cost.priced import Priced
from autopar.emit.choices import placeholder_keys
from autopar.mesh import Mesh
from autopar.plans import RunnerUp
from autopar.solve import Evaluation, evaluated
from autopar.strategies import Ref, pattern_of

FIELD = re.compile(r"\{\d+\}")
"""In a pattern, what stands for the index of a layer."""


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """Everything a plan is assembled from."""

    trace: Trace
    mesh: Mesh
    priced: Priced
    choices: Choices
    evaluation: Evaluation
    runner_ups: Mapping[int, RunnerUp]

    @staticmethod
    def of(trace: Trace, mesh: Mesh, priced: Priced, choices: Choices) -> PlanDraft:
        """Of choices as they are, without what would come next."""
        return PlanDraft(trace, mesh, priced, choices, evaluated(priced.problem, choices), {})


def tensor_patterns(refs: Sequence[Ref], keys: Mapping[str, str]) -> Iterable[tuple[str, int, tuple[tuple[int, ...], ...]]]:
    """(node pattern, result, instances) of a variant's tensors."""
    grouped: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for name, result in refs:
        pattern, indices = pattern_of(keys[name])
        grouped.setdefault((pattern, result), []).append(indices)
    return [(pattern, result, tuple(indices)) for (pattern, result), indices in grouped.items()]


def all_keys(trace: Trace) -> dict[str, str]:
    """Node → key, of what computes and of placeholders."""
    keys = {n.name: n.meta["key"] for n in trace.graph.nodes if n.op == "call_function"}
    return {**keys, **placeholder_keys(trace)}
