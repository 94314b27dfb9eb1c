"""Assembles a plan from a solution: nodes, layouts, memory, times and proof by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar import ops
from autopar.analysis.work import is_known
from autopar.capture.trace import Trace
from autopar.core.collective import BUCKET_BYTES
from autopar.core.hardware import Hardware, Mixed
from autopar.core.layout_graph import local_bytes
from autopar.core.solution import Multipliers
from autopar.core.streams import PHASES
from autopar.cost.gradient_dtypes import WIDENED
from autopar.cost.priced import OPTIMIZERS, Source
from autopar.cost.zero_stages import in_plan_form, own_time_s, parameter_layouts
from autopar.emit.context import (
    buffer_key,
    input_key,
    output_key,
    parameter_key,
    placeholder_keys,
    storage_key,
)
from autopar.errors import printable
from autopar.kernels.collectives import sum_dtype
from autopar.planner.candidates import FIELD, PlanDraft, all_keys, tensor_patterns
from autopar.planner.plan_collectives import communications, of_kernels
from autopar.planner.timeline import crossing_times, own_time, step_time, timeline
from autopar.plans import (
    KERNELS_BUFFERS,
    Communication,
    Entry,
    Fallback,
    Fingerprint,
    Kept,
    NodeChoice,
    Plan,
    Potential,
    Prediction,
    Proof,
    ProofCase,
    ProofCondition,
    Version,
    beyond_shares_s,
)
from autopar.rules import is_discovered, is_fallback, why_replicated
from autopar.rules.call import op_name
from autopar.sharding import pattern_of
from autopar.solve import Evaluation

_KEYS = {"parameter": parameter_key, "buffer": buffer_key, "input": input_key, "output": output_key}
GIB = 2**30
_HOSTS = (
    "device or host memory for each parameter and each kept value; transfers to and from the hosts"
    " can overlap with compute; the bound does not depend on the size of the host memory"
)
_ALIKE = "equal ops of repeated layers share one decision"
_BALANCED = "balanced experts: each expert receives the expected number of rows"
_SEEN = (
    "flex attention: in {} of {} calls the mask reads tensors, samples or heads, and the time is"
    " that of all pairs; the other calls compute only blocks that are not fully masked"
)
SHARES = (
    "gathers of parameters and of kept values, and reductions of gradients, are priced as parts of"
    f" full {BUCKET_BYTES >> 20} MiB buckets; other collectives are priced individually"
)
COVERS = (
    (
        "every layout that the sharding rules offer for each op, on every mesh axis; only one axis"
        " may shard a dim unevenly"
    ),
    "the storage layout of every parameter, and whether backward gathers it again",
    "keeping or recomputing each forward value, in any layout that it has in forward",
    "partial sums may pass through views, sums and additions, but not through products",
    _ALIKE,
    "one microbatch without a pipeline; `constraints.pipeline()` makes the planner try stages",
    SHARES,
)


def assemble(
    draft: PlanDraft, fingerprint: Fingerprint, options: Mapping[str, object], bound_s: float
) -> Plan:
    """Assemble the plan of a draft. Its peak is filled in later, from the emitted program.

    Args:
        draft: the draft.
        fingerprint: the fingerprint of the model and the hardware.
        options: the options that the plan records.
        bound_s: lower bound of the step, in seconds.
    """
    objective = draft.evaluation.objective_s
    choices = draft.choices
    proof = Proof(
        objective,
        min(bound_s, objective),
        max(objective - bound_s, 0.0) / objective if objective else 0.0,
        choices.num_variables,
        choices.num_constraints,
        choices.solver,
        choices.memory_price_s_per_byte * GIB,
        covers_of(draft) + beside_compute(draft.evaluation),
        searched_bound_s=min(bound_s, objective),
    )
    moved = tuple(communications(draft))
    return Plan(
        mesh=draft.mesh,
        fingerprint=fingerprint,
        options=options,
        entries=tuple(_entries(draft)),
        kept=tuple(_list_kept(draft)),
        communications=moved,
        prediction=_prediction(draft, moved),
        proof=proof,
        capture=str(draft.trace.folding),
        starts=draft.priced.starts,
    )


def covers_of(draft: PlanDraft) -> tuple[str, ...]:
    """List the scope of the bound, one sentence each."""
    starts = draft.priced.starts
    strategies = (
        s for op in draft.priced.problem.ops if op.kind == "compute" for s in op.strategies
    )
    hosts = (_HOSTS,) if draft.priced.problem.host_budget_bytes else ()
    balanced = (_BALANCED,) if any(s.communication_s for s in strategies) else ()
    masks = [node.args[5] for node in draft.trace.graph.nodes if node.target is ops.flex_attention]
    observed = (
        (_SEEN.format(sum(not is_known(mask) for mask in masks), len(masks)),) if masks else ()
    )
    last = (*hosts, *balanced, *observed, of_kernels(draft.priced), *draft.priced.notes)
    if not starts:
        return *COVERS, *last
    separate_ops = (
        f"{_ALIKE} within each group of layers:"
        f" {'; '.join(_groups(layers, cuts) for layers, cuts in starts.items())}"
    )
    return *(separate_ops if line == _ALIKE else line for line in COVERS), *last


def _groups(layers: str, cuts: Sequence[int]) -> str:
    """Describe the groups of a list of layers, as ``model.layers 0–2, 3–7, from 8 on``."""
    ended = (
        f"{first}–{after - 1}" if after - first > 1 else str(first)
        for first, after in zip((0, *cuts), cuts, strict=False)
    )
    return f"{layers} {', '.join(ended)}, from {cuts[-1]} on"


def beside_compute(evaluation: Evaluation) -> tuple[str, ...]:
    """List the assumptions of the bound about overlap of communication and compute."""
    slowdown = evaluation.slowdown
    if slowdown >= 1.0:
        return ("compute and communication do not overlap",)
    outlasting = [
        phase
        for phase, is_outlasted in zip(
            PHASES, evaluation.load.outlasts_compute(slowdown), strict=True
        )
        if is_outlasted
    ]
    return (
        (
            "forward and backward each take max(C + s·P, P) + K: compute C, communication P that"
            " can overlap with it (gathers of parameters and of kept values, reductions of"
            f" gradients), other communication K, and slowdown s = {slowdown:g}; the bound assumes"
            " that memory allows all of P to overlap, including the first and last collective"
        ),
        *(
            f"in {phase} the communication takes longer than the compute that could hide it, so"
            " the bound may leave a gap"
            for phase in outlasting
        ),
    )


def _entries(draft: PlanDraft) -> Iterable[Entry]:
    sources = {n.name: n.meta.get("source", "") for n in draft.trace.graph.nodes}
    counts: dict[str, int] = {}
    for index, (op, source) in enumerate(
        zip(draft.priced.problem.ops, draft.priced.sources, strict=True)
    ):
        nodes, instances = _nodes(draft, index, draft.choices.strategies[index])
        recomputed_strategy = draft.choices.recomputed.get(index)
        recompute = (
            _nodes(draft, index, recomputed_strategy)[0] if recomputed_strategy is not None else ()
        )
        key = FIELD.sub("*", nodes[0].node)
        counts[key] = counts.get(key, 0) + 1
        first = source.cluster.first if source.cluster else None
        calls = [m.call for m in first.members] if first else []
        yield Entry(
            key=key if counts[key] == 1 else f"{key} ({counts[key]})",
            kind=op.kind,
            module=key.partition("/")[0],
            op=key.split("/")[1],
            phase=op.phase,
            instances=instances,
            nodes=nodes,
            recompute=recompute,
            time_s=own_time_s(op, draft.choices.strategies[index]),
            again_s=own_time_s(op, recomputed_strategy) if recomputed_strategy is not None else 0.0,
            runner_up=draft.runner_ups.get(index),
            replicated=any(map(is_fallback, calls)),
            source=portable_line(sources.get(first.members[0].node, "")) if first else "",
            discovered=tuple(
                dict.fromkeys(op_name(call.target) for call in calls if is_discovered(call))
            ),
            fallbacks=tuple(
                dict.fromkeys(
                    Fallback(op_name(call.target), why_replicated(call))
                    for call in calls
                    if is_fallback(call)
                )
            ),
        )


def portable_line(source: str) -> str:
    """Make the file of a source line relative to Python's import path and remove control
    characters, so that a plan is the same on every machine."""
    roots = [os.path.join(os.path.abspath(root), "") for root in sys.path]
    root = max((root for root in roots if source.startswith(root)), key=len, default="")
    return printable(source[len(root) :])


def _nodes(
    draft: PlanDraft, index: int, strategy: int
) -> tuple[tuple[NodeChoice, ...], tuple[tuple[int, ...], ...]]:
    source: Source = draft.priced.sources[index]
    if source.cluster is not None:
        members = zip(
            source.cluster.first.members, source.cluster.strategies[strategy].members, strict=True
        )
        return tuple(NodeChoice(m.pattern, s) for m, s in members), tuple(
            c.indices for c in source.cluster.instances
        )
    patterns = [pattern_of(_KEYS[source.kind](name)) for name in source.names]
    layouts = in_plan_form(draft.priced.problem.ops[index].strategies[strategy])
    keys = (patterns[0][0], pattern_of(storage_key(source.names[0]))[0])
    nodes = tuple(NodeChoice(key, chosen) for key, chosen in zip(keys, layouts, strict=False))
    return nodes, tuple(indices for _, indices in patterns)


def _list_kept(draft: PlanDraft) -> Iterable[Kept]:
    keys = all_keys(draft.trace)
    for v, nodes in draft.evaluation.kept.items():
        value = draft.priced.problem.values[draft.priced.problem.variants[v].value]
        if nodes:
            layouts, size = tuple(map(value.layout, nodes)), sum(map(value.bytes, nodes))
            for pattern, result, instances in tensor_patterns(draft.priced.refs[v], keys):
                yield Kept(pattern, result, instances, layouts, size, value.copied)


def _prediction(draft: PlanDraft, moved: Sequence[Communication]) -> Prediction:
    evaluation, problem, choices = draft.evaluation, draft.priced.problem, draft.choices
    static_bytes = {"parameters": 0, "optimizer": 0, "buffers": 0, "inputs": 0}
    gathered = 0
    state, _ = OPTIMIZERS[draft.priced.optimizer]
    parameters = {p.name: p for p in draft.trace.parameters}
    for op, source, s in zip(problem.ops, draft.priced.sources, choices.strategies, strict=True):
        size = op.count * op.strategies[s].static_bytes
        if op.kind == "parameter":
            p = parameters[source.names[0]]
            rests = op.count * local_bytes(
                p.view, p.dtype, parameter_layouts(op.strategies[s]).storage, draft.mesh.shape
            )
            optimizer = state * rests if p.gradient is not None else 0
            if parameter_layouts(op.strategies[s]).storage.host:
                gathered += size
                continue
            static_bytes["parameters"] += rests
            static_bytes["optimizer"] += optimizer
            gathered += size - rests - optimizer
        elif op.kind in ("buffer", "input"):
            static_bytes[f"{op.kind}s"] += size
    static_bytes |= {"copies": gathered} if gathered else {}
    shared = sum(problem.regions[region] for region in evaluation.regions)
    static_bytes |= {KERNELS_BUFFERS: shared} if shared else {}
    memory = {
        **static_bytes,
        "activations": evaluation.kept_bytes,
        "gradients": evaluation.gradient_bytes,
    }
    bars = timeline(draft.trace, draft.priced, choices, evaluation)
    moved_s = sum(sum(priced_s) for priced_s in crossing_times(draft.trace, draft.priced, choices))
    moved_s += step_time(draft.priced, choices) + own_time(draft.priced, choices)
    compute_s, communication_s = (
        evaluation.compute_s - moved_s,
        evaluation.communication_s + moved_s,
    )
    saved_s, beyond_s = evaluation.saved_s, beyond_shares_s(moved)
    serial_s = evaluation.compute_s + evaluation.communication_s + beyond_s
    return Prediction(
        evaluation.objective_s,
        compute_s,
        communication_s,
        0,
        memory,
        bars,
        0.0,
        serial_s - saved_s,
        saved_s,
        beyond_shares_s=beyond_s,
        host_bytes=_on_hosts(draft),
    )


def _on_hosts(draft: PlanDraft) -> dict[str, int]:
    """Compute the bytes of host memory by kind."""
    sizes = dict.fromkeys(("parameters", "optimizer", "gradients", "copies"), 0)
    state, _ = OPTIMIZERS[draft.priced.optimizer]
    parameters = {p.name: p for p in draft.trace.parameters}
    for op, source, s in zip(
        draft.priced.problem.ops, draft.priced.sources, draft.choices.strategies, strict=True
    ):
        if op.strategies[s].host_bytes:
            p, storage = parameters[source.names[0]], parameter_layouts(op.strategies[s]).storage
            rests = op.count * local_bytes(p.view, p.dtype, storage, draft.mesh.shape)
            wide = sum_dtype(p.dtype) if draft.priced.problem.accumulates else p.dtype
            trained = p.gradient is not None
            sizes["parameters"] += rests
            sizes["optimizer"] += state * rests * trained
            sizes["gradients"] += (
                op.count * local_bytes(p.view, wide, storage, draft.mesh.shape) * trained
            )
            sizes["copies"] += (
                op.count
                * local_bytes(p.view, p.compute_dtype, storage, draft.mesh.shape)
                * p.is_narrowed
            )
    sizes["activations"] = draft.evaluation.host_bytes - sum(sizes.values())
    return {kind: size for kind, size in sizes.items() if size}


def fingerprint(trace: Trace, model_name: str, hardware: Hardware, version: str) -> Fingerprint:
    """Make the fingerprint of a model, its batch and the hardware.

    Args:
        trace: the trace of the model and batch.
        model_name: the model's name; may be empty.
        hardware: a profile, or the profiles of unequal devices along an axis.
        version: the version of autopar.
    """
    mixed = (
        (hardware.axis, tuple((p.name, p.hash) for p in hardware.profiles))
        if isinstance(hardware, Mixed)
        else ("", ())
    )
    release = torch.__version__.split("+")[0]
    return Fingerprint(
        trace.fingerprint,
        model_name,
        hardware.name,
        hardware.hash,
        version,
        release,
        *mixed,
        trace.batch_in_words,
    )


# --------------------------------------------------------------------------------------------------
# The multipliers of the bound by name, with tensors, readers and layouts instead of indices.


def certify_proof(proof: Proof, draft: PlanDraft, multipliers: Multipliers | None) -> Proof:
    """Add multipliers, and the bound that they prove by arithmetic, to a proof.

    Args:
        proof: the proof of the plan.
        draft: the draft of the plan.
        multipliers: the multipliers of the bound; if None, the proof is returned unchanged.
    """
    if multipliers is None:
        return proof
    proof = replace(proof, certified_bound_s=min(multipliers.bound_s, proof.bound_s))
    return with_multipliers(proof, draft, multipliers)


def with_multipliers(proof: Proof, draft: PlanDraft, multipliers: Multipliers) -> Proof:
    """Add multipliers to a proof, by name.

    Args:
        proof: the proof of the plan.
        draft: the draft of the plan, whose problem has the multipliers.
        multipliers: multipliers by index.
    """
    keys = {
        node.name: node.meta["key"]
        for node in draft.trace.graph.nodes
        if node.op == "call_function"
    }
    keys_at = keys | {name + WIDENED: key + WIDENED for name, key in keys.items()}

    def proof_fields(found: Multipliers) -> dict[str, Any]:
        """Convert multipliers to the fields of a proof or a case."""
        return {
            "potentials": tuple(_potentials(draft, found, keys)),
            "memory_s": {keys_at.get(row, row): value for row, value in found.memory_s.items()},
            "versions": tuple(_versions(draft, found, keys)),
            "balance": found.balance,
        }

    cases = tuple(
        ProofCase(
            tuple(ProofCondition(_first_key(draft, c.op), c.axis, c.is_whole) for c in conditions),
            **proof_fields(found),
        )
        for conditions, found in ((case.conditions, case.multipliers) for case in multipliers.cases)
    )
    return replace(proof, **proof_fields(multipliers), cases=cases)


def _versions(
    draft: PlanDraft, multipliers: Multipliers, keys: dict[str, str]
) -> Iterable[Version]:
    tensors, problem = {**keys, **placeholder_keys(draft.trace)}, draft.priced.problem

    def by_layout(v: int, worths: Mapping[tuple[int, int], float]) -> dict[str, float]:
        """Return the multipliers of a variant by layout."""
        layouts = problem.values[problem.variants[v].value].graph.layouts
        return {
            str(layouts[layout]): worth
            for (variant, layout), worth in worths.items()
            if variant == v
        }

    worths = multipliers.versions_s, multipliers.copies_s, multipliers.once_s
    for v in sorted({v for each in worths for v, _ in each}):
        name, result = draft.priced.refs[v][0]
        yield Version(tensors[name], result, *(by_layout(v, each) for each in worths))


def _potentials(
    draft: PlanDraft, multipliers: Multipliers, keys: dict[str, str]
) -> Iterable[Potential]:
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
        yield Potential(
            tensors[name], result, _first_key(draft, reader.op), reader.operand, phase, by_layout
        )


def _first_key(draft: PlanDraft, op: int) -> str:
    """Return the key of an op's first node, in the first of its instances."""
    source = draft.priced.sources[op]
    return (
        source.cluster.first.members[0].key
        if source.cluster
        else _KEYS[source.kind](source.names[0])
    )
