"""Choices → Plan: the solver's answer in the user's words."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.analysis.normed import NORMED
from autopar.capture.trace import Trace
from autopar.cost.held import held_of, offered_as, own_time_s
from autopar.cost.kernel_times import NAMES, TAIL
from autopar.cost.kernels import why_none, why_not_normed
from autopar.cost.priced import OPTIMIZERS, Priced, Source
from autopar.cost.times import own_collectives
from autopar.emit.choices import buffer_key, input_key, output_key, parameter_key, placeholder_keys, storage_key
from autopar.mesh import Mesh
from autopar.planning.timeline import crossing_times, own_time, step_time, timeline
from autopar.plans import KERNELS_BUFFERS, Communication, Entry, Fingerprint, InKernel, Kept, NodeChoice, Plan, Prediction, Proof, RunnerUp
from autopar.problem import Choices
from autopar.redistribute import Arc, local_bytes
from autopar.rules import is_discovered, is_fallback
from autopar.rules.call import op_name
from autopar.solve import Evaluation, Taken
from autopar.strategies import Ref, pattern_of
from autopar.streams import PHASES

_KEYS = {"parameter": parameter_key, "buffer": buffer_key, "input": input_key, "output": output_key}
_FIELD = re.compile(r"\{\d+\}")
GIB = 2**30
_ALIKE = "equal nodes of repeated layers take one decision"
_NO_KERNELS = "no collective-overlap kernels: the hardware's profile has no figures for them"
_KERNELS = "collective-overlap kernels, one collective to a product; the share that they hide of what their chunks could: {}"
_NORMS = "; the share of a copy's bandwidth: {} {:g}"
_BALANCED = "all experts picked alike: the rows that are dispatched to them, and those that each computes with, are the expected ones"
BY_ITSELF = "every collective by itself: what buckets save is in neither objective nor bound"
COVERS = (
    "every layout of every op that the rules offer, on every mesh axis; a dim is split unevenly by one axis alone",
    "storage layout of every parameter; gathering it once or again in backward",
    "keeping or recomputing every forward value, in any layout that forward makes",
    "partial sums pass through views, sums and additions, not through products",
    _ALIKE,
    "one microbatch, no pipeline: stages are tried where `constraints.pipeline()` asks for them",
    BY_ITSELF,
)


@dataclass(frozen=True, slots=True)
class Draft:
    """Everything a plan is assembled from."""

    trace: Trace
    mesh: Mesh
    priced: Priced
    choices: Choices
    evaluation: Evaluation
    runner_ups: Mapping[int, RunnerUp]


def assemble(draft: Draft, fingerprint: Fingerprint, options: Mapping[str, object], bound_s: float) -> Plan:
    """The plan, with its peak still to be filled in from the emitted program."""
    objective = draft.evaluation.objective_s
    choices = draft.choices
    proof = Proof(
        objective, min(bound_s, objective), max(objective - bound_s, 0.0) / objective if objective else 0.0,
        choices.num_variables, choices.num_constraints, choices.solver,
        choices.memory_price_s_per_byte * GIB, covers_of(draft) + beside_compute(draft.evaluation),
        searched_bound_s=min(bound_s, objective),
    )  # fmt: skip
    return Plan(
        mesh=draft.mesh,
        fingerprint=fingerprint,
        options=options,
        entries=tuple(_entries(draft)),
        kept=tuple(_kept(draft)),
        communications=tuple(_communications(draft)),
        prediction=_prediction(draft),
        proof=proof,
        capture=str(draft.trace.folding),
        starts=draft.priced.starts,
    )


def covers_of(draft: Draft) -> tuple[str, ...]:
    """What the bound covers."""
    starts = draft.priced.starts
    strategies = (s for op in draft.priced.problem.ops if op.kind == "compute" for s in op.strategies)
    last = (*((_BALANCED,) if any(s.communication_s for s in strategies) else ()), of_kernels(draft.priced))
    if not starts:
        return *COVERS, *last
    apart = f"{_ALIKE} within each group of layers: {'; '.join(_groups(layers, cuts) for layers, cuts in starts.items())}"
    return *(apart if line == _ALIKE else line for line in COVERS), *last


def of_kernels(priced: Priced) -> str:
    """Whether collective-overlap kernels were on offer, and what they reach."""
    figures = priced.profile.kernels
    shares = ", ".join(f"{name} {reached:g}" for name, reached in figures.items() if name != TAIL)
    return _KERNELS.format(shares) + (_NORMS.format(TAIL, figures[TAIL]) if TAIL in figures else "") if shares else _NO_KERNELS


def _groups(layers: str, cuts: Sequence[int]) -> str:
    """``model.layers 0–2, 3–7, from 8 on``."""
    ended = (f"{first}–{after - 1}" if after - first > 1 else str(first) for first, after in zip((0, *cuts), cuts, strict=False))
    return f"{layers} {', '.join(ended)}, from {cuts[-1]} on"


def beside_compute(evaluation: Evaluation) -> tuple[str, ...]:
    """What is said of communication beside compute."""
    slowdown = evaluation.slowdown
    if slowdown >= 1.0:
        return ("compute and communication do not overlap",)
    outlasting = [phase for phase, said in zip(PHASES, evaluation.load.unbalanced(slowdown), strict=True) if said]
    return (
        "max(C + s·P, P) + K in forward and in backward: P is communication that has slack whatever is chosen (gathers of what rests or is "
        f"kept, reductions of gradients), K all else, s = {slowdown:g}; as if memory had room for all of it, the first and last included",
        *(f"in {phase} communication outlasts the compute that could hide it: there the bound may leave a gap" for phase in outlasting),
    )


def _entries(draft: Draft) -> Iterable[Entry]:
    sources = {n.name: n.meta.get("source", "") for n in draft.trace.graph.nodes}
    seen: dict[str, int] = {}
    for index, (op, source) in enumerate(zip(draft.priced.problem.ops, draft.priced.sources, strict=True)):
        nodes, instances = _nodes(draft, index, draft.choices.strategies[index])
        again = draft.choices.recomputed.get(index)
        recompute = _nodes(draft, index, again)[0] if again is not None else ()
        key = _FIELD.sub("*", nodes[0].node)
        seen[key] = seen.get(key, 0) + 1
        first = source.cluster.first if source.cluster else None
        yield Entry(
            key=key if seen[key] == 1 else f"{key} ({seen[key]})",
            kind=op.kind,
            module=key.partition("/")[0],
            op=key.split("/")[1],
            phase=op.phase,
            instances=instances,
            nodes=nodes,
            recompute=recompute,
            time_s=own_time_s(op, draft.choices.strategies[index]),
            again_s=own_time_s(op, again) if again is not None else 0.0,
            runner_up=draft.runner_ups.get(index),
            replicated=first is not None and any(is_fallback(m.call) for m in first.members),
            source=portable_line(sources.get(first.members[0].node, "")) if first else "",
            discovered=tuple(dict.fromkeys(op_name(m.call.target) for m in first.members if is_discovered(m.call))) if first else (),
        )


def portable_line(source: str) -> str:
    """A source line with its file as Python's import path names it, so that a plan is the same on every machine."""
    roots = [os.path.join(os.path.abspath(root), "") for root in sys.path]
    root = max((root for root in roots if source.startswith(root)), key=len, default="")
    return source[len(root) :]


def _nodes(draft: Draft, index: int, strategy: int) -> tuple[tuple[NodeChoice, ...], tuple[tuple[int, ...], ...]]:
    source: Source = draft.priced.sources[index]
    if source.cluster is not None:
        members = zip(source.cluster.first.members, source.cluster.strategies[strategy].members, strict=True)
        return tuple(NodeChoice(m.pattern, s) for m, s in members), tuple(c.indices for c in source.cluster.instances)
    patterns = [pattern_of(_KEYS[source.kind](name)) for name in source.names]
    said = offered_as(draft.priced.problem.ops[index].strategies[strategy])
    keys = (patterns[0][0], pattern_of(storage_key(source.names[0]))[0])
    nodes = tuple(NodeChoice(key, chosen) for key, chosen in zip(keys, said, strict=False))
    return nodes, tuple(indices for _, indices in patterns)


def _tensor_patterns(draft: Draft, refs: Sequence[Ref], keys: Mapping[str, str]) -> Iterable[tuple[str, int, tuple[tuple[int, ...], ...]]]:
    """(node pattern, result, instances) of a variant's tensors."""
    grouped: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for name, result in refs:
        pattern, indices = pattern_of(keys[name])
        grouped.setdefault((pattern, result), []).append(indices)
    return [(pattern, result, tuple(indices)) for (pattern, result), indices in grouped.items()]


def _all_keys(trace: Trace) -> dict[str, str]:
    keys = {n.name: n.meta["key"] for n in trace.graph.nodes if n.op == "call_function"}
    return {**keys, **placeholder_keys(trace)}


def _kept(draft: Draft) -> Iterable[Kept]:
    keys = _all_keys(draft.trace)
    for v, nodes in draft.evaluation.kept.items():
        value = draft.priced.problem.values[draft.priced.problem.variants[v].value]
        if nodes:
            layouts = tuple(value.graph.layouts[n] for n in nodes)
            size = sum(value.graph.bytes[n] for n in nodes)
            for pattern, result, instances in _tensor_patterns(draft, draft.priced.refs[v], keys):
                yield Kept(pattern, result, instances, layouts, size)


def _communications(draft: Draft) -> Iterable[Communication]:
    keys = _all_keys(draft.trace)
    problem, evaluation = draft.priced.problem, draft.evaluation
    for v, variant in enumerate(problem.variants):
        value = problem.values[variant.value]
        for late, redistribution in ((False, evaluation.forward[v]), (True, evaluation.backward[v])):
            phase = "backward" if late else value.phase
            for position, (arc, slack) in enumerate(zip(redistribution.arcs, redistribution.slacks, strict=True)):
                kernel = _in_kernel(draft, redistribution.taken.get(position), arc)
                done = kernel is not None or redistribution.early
                why = "" if done else why_none(draft.trace, draft.priced, draft.mesh, (v, late), arc, draft.choices)
                if kernel is not None and kernel.name != NORMED and not late:
                    why = why_not_normed(draft.trace, draft.priced, draft.mesh, v, arc, draft.choices)
                ends = value.graph.layouts[arc.src], value.graph.layouts[arc.dst]
                for pattern, result, instances in _tensor_patterns(draft, draft.priced.refs[v], keys):
                    module = _FIELD.sub("*", pattern.partition("/")[0])
                    beside = redistribution.early and arc.collective.kind != "slice"
                    yield Communication(
                        pattern, result, instances, module, phase, arc.collective, *ends, arc.time_s, slack, beside, kernel, why
                    )
    yield from _own_communications(draft)
    yield from _step_communications(draft)


def _own_communications(draft: Draft) -> Iterable[Communication]:
    """What nodes move by themselves: in their own phase, and where backward runs them again."""
    price, chosen = draft.priced.moves.price, draft.choices
    runs = [(n, s, False) for n, s in enumerate(chosen.strategies)] + [(n, s, True) for n, s in chosen.recomputed.items()]
    for n, s, again in runs:
        op, cluster = draft.priced.problem.ops[n], draft.priced.sources[n].cluster
        if cluster is None or not op.strategies[s].communication_s:
            continue
        instances, phase = tuple(c.indices for c in cluster.instances), "backward" if again else op.phase
        for member, strategy in zip(cluster.first.members, cluster.strategies[s].members, strict=True):
            module, ends = _FIELD.sub("*", member.pattern.partition("/")[0]), (strategy.inputs[0], strategy.outputs[0])
            for c in own_collectives([(member, strategy)], draft.mesh.shape):
                yield Communication(member.pattern, 0, instances, module, phase, c, *ends, price(c), own=True)


def _in_kernel(draft: Draft, taken: Taken | None, arc: Arc) -> InKernel | None:
    if taken is None:
        return None
    cluster = draft.priced.sources[taken.op].cluster
    assert cluster is not None, "a kernel's op is a product"
    hidden = taken.hidden
    name = NORMED if taken.norms else NAMES[arc.collective.kind]
    return InKernel(name, cluster.first.members[0].pattern, taken.again, hidden.num_chunks, hidden.saved_s)


def _step_communications(draft: Draft) -> Iterable[Communication]:
    """At the begin and the end of a step: of parameters (result 0) and of the sums of their gradients (result 1)."""
    parameters = {p.name: p for p in draft.trace.parameters}
    for op, source, s in zip(draft.priced.problem.ops, draft.priced.sources, draft.choices.strategies, strict=True):
        if source.kind != "parameter" or op.strategies[s].storage is None:
            continue
        p, held, moves = parameters[source.names[0]], held_of(op.strategies[s]), draft.priced.moves
        patterns = [pattern_of(storage_key(name)) for name in source.names]
        instances = tuple(indices for _, indices in patterns)
        for result, steps in enumerate((moves.gathers(p, held), moves.reduces(p, held))):
            for step in steps:
                module = _FIELD.sub("*", patterns[0][0].partition("/")[0])
                ends = step.source, step.target
                yield Communication(patterns[0][0], result, instances, module, "step", step.collective, *ends, step.time_s)


def _prediction(draft: Draft) -> Prediction:
    evaluation, problem, choices = draft.evaluation, draft.priced.problem, draft.choices
    resting = {"parameters": 0, "optimizer": 0, "buffers": 0, "inputs": 0}
    gathered = 0
    state, _ = OPTIMIZERS[draft.priced.optimizer]
    parameters = {p.name: p for p in draft.trace.parameters}
    for op, source, s in zip(problem.ops, draft.priced.sources, choices.strategies, strict=True):
        size = op.count * op.strategies[s].static_bytes
        if op.kind == "parameter":
            p = parameters[source.names[0]]
            rests = op.count * local_bytes(p.view, p.dtype, held_of(op.strategies[s]).storage, draft.mesh.shape)
            optimizer = state * rests if p.gradient is not None else 0
            resting["parameters"] += rests
            resting["optimizer"] += optimizer
            gathered += size - rests - optimizer
        elif op.kind in ("buffer", "input"):
            resting[f"{op.kind}s"] += size
    resting |= {"gathered": gathered} if gathered else {}
    shared = sum(problem.regions[region] for region in evaluation.regions)
    resting |= {KERNELS_BUFFERS: shared} if shared else {}
    memory = {**resting, "activations": evaluation.kept_bytes, "gradients": evaluation.gradient_bytes}
    bars = timeline(draft.trace, draft.priced, choices, evaluation)
    moved_s = sum(sum(priced_s) for priced_s in crossing_times(draft.trace, draft.priced, choices))
    moved_s += step_time(draft.priced, choices) + own_time(draft.priced, choices)
    compute_s, communication_s = evaluation.compute_s - moved_s, evaluation.communication_s + moved_s
    serial_s = evaluation.compute_s + evaluation.communication_s
    saved_s = evaluation.saved_s
    return Prediction(evaluation.objective_s, compute_s, communication_s, 0, memory, bars, 0.0, serial_s - saved_s, saved_s)


def fingerprint(trace: Trace, model_name: str, profile_name: str, profile_hash: str, version: str) -> Fingerprint:
    """What the plan is made for."""
    return Fingerprint(trace.fingerprint, model_name, profile_name, profile_hash, version, torch.__version__.split("+")[0])
