"""The multipliers of the bound, in the user's words: tensors, readers and layouts instead of indices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autopar.choices import Multipliers
from autopar.cost.widening import WIDENED
from autopar.emit.choices import buffer_key, input_key, output_key, parameter_key, placeholder_keys
from autopar.planning.draft import PlanDraft
from autopar.plans import Potential, Proof, Version

_KEYS = {"parameter": parameter_key, "buffer": buffer_key, "input": input_key, "output": output_key}


def certified(proof: Proof, draft: PlanDraft, multipliers: Multipliers | None) -> Proof:
    """The proof with what arithmetic alone can tell of it; as it is where there are no multipliers."""
    if multipliers is None:
        return proof
    proof = replace(proof, certified_bound_s=min(multipliers.bound_s, proof.bound_s))
    return with_multipliers(proof, draft, multipliers)


def with_multipliers(proof: Proof, draft: PlanDraft, multipliers: Multipliers) -> Proof:
    """The proof with these."""
    keys = {node.name: node.meta["key"] for node in draft.trace.graph.nodes if node.op == "call_function"}
    keys_at = keys | {name + WIDENED: key + WIDENED for name, key in keys.items()}
    memory = {keys_at.get(row, row): value for row, value in multipliers.memory_s.items()}
    potentials, versions = tuple(_potentials(draft, multipliers, keys)), tuple(_versions(draft, multipliers, keys))
    return replace(proof, potentials=potentials, memory_s=memory, versions=versions, balance=multipliers.balance)


def _versions(draft: PlanDraft, multipliers: Multipliers, keys: dict[str, str]) -> Iterable[Version]:
    tensors, problem = {**keys, **placeholder_keys(draft.trace)}, draft.priced.problem

    def by_layout(v: int, worths: Mapping[tuple[int, int], float]) -> dict[str, float]:
        layouts = problem.values[problem.variants[v].value].graph.layouts
        return {str(layouts[layout]): worth for (variant, layout), worth in worths.items() if variant == v}

    worths = multipliers.versions_s, multipliers.copies_s, multipliers.once_s
    for v in sorted({v for each in worths for v, _ in each}):
        name, result = draft.priced.refs[v][0]
        yield Version(tensors[name], result, *(by_layout(v, each) for each in worths))


def _potentials(draft: PlanDraft, multipliers: Multipliers, keys: dict[str, str]) -> Iterable[Potential]:
    problem, tensors = draft.priced.problem, {**keys, **placeholder_keys(draft.trace)}
    grouped: dict[tuple[int, int, int], dict[int, float]] = {}
    for (v, late, use, layout), worth in multipliers.potentials_s.items():
        grouped.setdefault((v, late, use), {})[layout] = worth
    for (v, late, use), values in grouped.items():
        variant = problem.variants[v]
        value = problem.values[variant.value]
        name, result = draft.priced.refs[v][0]
        reader = variant.uses[use]
        phase = "backward" if late else value.phase
        by_layout = {str(value.graph.layouts[layout]): worth for layout, worth in values.items()}
        yield Potential(tensors[name], result, _first_key(draft, reader.op), reader.operand, phase, by_layout)


def _first_key(draft: PlanDraft, op: int) -> str:
    """The key of an op's first node, in the first of its instances."""
    source = draft.priced.sources[op]
    return source.cluster.first.members[0].key if source.cluster else _KEYS[source.kind](source.names[0])
