"""Collectives, kernels and routes of a plan, by name of nodes instead of solver index."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.analysis.fusable import NORMED
from autopar.core.collective import HOST_KINDS
from autopar.core.layout_graph import Arc
from autopar.cost.expert_routes import ROUTE, savings, why_not
from autopar.cost.kernel_offers import why_none, why_not_normed
from autopar.cost.kernel_times import NAMES, TAIL
from autopar.cost.op_times import own_collectives
from autopar.cost.priced import Priced
from autopar.cost.zero_stages import parameter_layouts
from autopar.emit.context import storage_key
from autopar.planner.candidates import FIELD, PlanDraft, all_keys, tensor_patterns
from autopar.plans import Communication, InKernel
from autopar.rules import EXCHANGES
from autopar.sharding import pattern_of
from autopar.solve import KernelUse

_NO_KERNELS = (
    "no collective-overlap kernels, because the hardware profile has no measurements of them"
)
_KERNELS = (
    "collective-overlap kernels that join one collective and one matrix product; the share of the"
    " collective that they hide, of what their chunks allow: {}"
)
_NORMS = "; share of the memory bandwidth of a copy: {} {:g}"
_ROUTES = "; expert rows sent directly between peers, share of an all-to-all's bandwidth: {} {:g}"


def of_kernels(priced: Priced) -> str:
    """Describe the offered collective-overlap kernels and the share that they hide."""
    figures = priced.profile.kernels
    shares = ", ".join(
        f"{name} {reached:g}" for name, reached in figures.items() if name not in (TAIL, ROUTE)
    )
    further = "".join(
        text.format(name, figures[name])
        for name, text in ((TAIL, _NORMS), (ROUTE, _ROUTES))
        if name in figures
    )
    return (_KERNELS.format(shares) if shares else _NO_KERNELS) + further


def communications(draft: PlanDraft) -> Iterable[Communication]:
    """List the communications of all tensors, inside nodes, and at the begin and the end of a
    step."""
    keys = all_keys(draft.trace)
    problem, evaluation = draft.priced.problem, draft.evaluation
    for v, variant in enumerate(problem.variants):
        value = problem.values[variant.value]
        for late, redistribution in (
            (False, evaluation.forward[v]),
            (True, evaluation.backward[v]),
        ):
            phase = "backward" if late else value.phase
            for position, (arc, slack) in enumerate(
                zip(redistribution.arcs, redistribution.slacks, strict=True)
            ):
                kernel = _in_kernel(draft, redistribution.kernels.get(position), arc)
                at_host = arc.collective.kind in HOST_KINDS
                overlapped = redistribution.early or at_host
                why = (
                    ""
                    if overlapped and kernel is None
                    else _why_no_kernel(draft, (v, late), arc, kernel)
                )
                ends = value.layout(arc.src), value.layout(arc.dst)
                for pattern, result, instances in tensor_patterns(draft.priced.refs[v], keys):
                    module = FIELD.sub("*", pattern.partition("/")[0])
                    is_overlapped = overlapped and arc.collective.kind != "slice"
                    shares = redistribution.early and arc.share_s is not None
                    yield Communication(
                        pattern,
                        result,
                        instances,
                        module,
                        phase,
                        arc.collective,
                        *ends,
                        arc.seconds(shares=shares),
                        slack,
                        is_overlapped,
                        kernel,
                        why,
                        alone_s=arc.time_s if shares else None,
                    )
    yield from _own_communications(draft)
    yield from _step_communications(draft)


def _why_no_kernel(
    draft: PlanDraft, where: tuple[int, bool], arc: Arc, kernel: InKernel | None
) -> str:
    """Explain why no kernel runs a collective, or why its kernel computes no norm; "" if there is
    nothing to explain."""
    v, late = where
    if kernel is None:
        return why_none(draft.trace, draft.priced, draft.mesh, where, arc, draft.choices)
    if kernel.name == NORMED or late:
        return ""
    return why_not_normed(draft.trace, draft.priced, draft.mesh, v, arc, draft.choices)


def _own_communications(draft: PlanDraft) -> Iterable[Communication]:
    """List the collectives inside nodes, in the node's phase and if backward recomputes it."""
    price, chosen = draft.priced.moves.price, draft.choices
    runs = [(n, s, False) for n, s in enumerate(chosen.strategies)] + [
        (n, s, True) for n, s in chosen.recomputed.items()
    ]
    for n, s, again in runs:
        op, cluster = draft.priced.problem.ops[n], draft.priced.sources[n].cluster
        if cluster is None or not op.strategies[s].communication_s:
            continue
        instances, phase = (
            tuple(c.indices for c in cluster.instances),
            "backward" if again else op.phase,
        )
        for member, strategy in zip(
            cluster.first.members, cluster.strategies[s].members, strict=True
        ):
            module, ends = (
                FIELD.sub("*", member.pattern.partition("/")[0]),
                (strategy.inputs[0], strategy.outputs[0]),
            )
            routed = (n, again) in draft.evaluation.routed
            saved = savings(member.call, strategy, price, draft.priced.profile) if routed else ()
            for i, c in enumerate(own_collectives([(member, strategy)], draft.mesh.shape)):
                why = "" if routed else why_not(draft.priced, n, s, c.axis)
                name = EXCHANGES[member.call.target][i][0]
                kernel = InKernel(name, member.pattern, again, 1, saved[i]) if routed else None
                yield Communication(
                    member.pattern,
                    0,
                    instances,
                    module,
                    phase,
                    c,
                    *ends,
                    price(c),
                    kernel=kernel,
                    why=why,
                    own=True,
                )


def _in_kernel(draft: PlanDraft, taken: KernelUse | None, arc: Arc) -> InKernel | None:
    if taken is None:
        return None
    cluster = draft.priced.sources[taken.op].cluster
    assert cluster is not None, "a kernel's op is a product"
    hidden = taken.hidden
    name = NORMED if taken.norms else NAMES[arc.collective.kind]
    return InKernel(
        name, cluster.first.members[0].pattern, taken.recomputed, hidden.num_chunks, hidden.saved_s
    )


def _step_communications(draft: PlanDraft) -> Iterable[Communication]:
    """List the collectives at the begin and the end of a step, of parameters (result 0) and of the
    sums of their gradients (result 1)."""
    parameters = {p.name: p for p in draft.trace.parameters}
    for op, source, s in zip(
        draft.priced.problem.ops, draft.priced.sources, draft.choices.strategies, strict=True
    ):
        if source.kind != "parameter" or op.strategies[s].storage is None:
            continue
        p, storages, moves = (
            parameters[source.names[0]],
            parameter_layouts(op.strategies[s]),
            draft.priced.moves,
        )
        patterns = [pattern_of(storage_key(name)) for name in source.names]
        instances = tuple(indices for _, indices in patterns)
        for result, steps in enumerate((moves.gathers(p, storages), moves.reduces(p, storages))):
            for step in steps:
                module = FIELD.sub("*", patterns[0][0].partition("/")[0])
                ends = step.source, step.target
                alone_s = None if step.share_s is None else step.time_s
                yield Communication(
                    patterns[0][0],
                    result,
                    instances,
                    module,
                    "step",
                    step.collective,
                    *ends,
                    step.counted_s,
                    alone_s=alone_s,
                )
