"""Moments that are learnt: where an emitted program holds more than its budget, and what it held there beside what its moment says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autopar.cost.moments import Liveness
from autopar.cost.widening import WIDENED
from autopar.problem import Choices, Moment
from autopar.run.memory import NodePeak
from autopar.solve import evaluated

_MOST_NEW = 24  # moments that one round adds: those most over the budget
Seen = Mapping[str, tuple[str, int]]
"""By node of the trace: the phase, and the peak that was seen while it ran."""


def by_trace_node(liveness: Liveness, peaks: Iterable[NodePeak], resting_bytes: int) -> Seen:
    """Peaks by node of the trace: those of collectives and of what runs again count for the node that comes after them, that of a product
    which is added to others as it scatters them for it and for the sum, and those of the reduction of sums that are widened for that.

    Args:
        resting_bytes: what rests beside the program's own tensors (the optimizer's state).
    """
    keys = {n.meta["key"]: n.name for n in liveness.trace.graph.nodes if n.op == "call_function"}
    seen: dict[str, tuple[str, int]] = {}
    waiting, last = 0, ""
    for peak in peaks:
        made = keys.get(peak.node.meta.get("key", "").rpartition("/")[0], "")  # of the steps that a sum is reduced by
        if made in liveness.widened:
            before = seen.get(made + WIDENED, ("", 0))[1]
            seen[made + WIDENED] = peak.phase, max(before, peak.peak_bytes + resting_bytes)
            continue
        waiting = max(waiting, peak.peak_bytes)
        total = peak.node.meta["kernel"].total if "kernel" in peak.node.meta else ""
        names = [keys.get(key, "") for key in (peak.node.meta.get("key", ""), total)]
        here = [name for name in names if name in liveness.owner and not peak.node.meta.get("recomputed")]
        for name in here:
            before = seen.get(name, ("", 0))[1]  # a node that picks a result has the key of the op, which may have needed more
            seen[name], last = (peak.phase, max(before, waiting + resting_bytes)), name
        waiting = 0 if here else waiting
    if last:  # what comes after the last node counts for it
        phase, before = seen[last]
        seen[last] = phase, max(before, waiting + resting_bytes)
    return seen


def over_budget(liveness: Liveness, seen: Seen, budget_bytes: int) -> list[str]:
    """The nodes at which a program is over the budget: of equal nodes of repeated layers the worst, and no more than some,
    since others come when these hold."""
    worst: dict[tuple[int, bool], tuple[int, str]] = {}
    for node, (_, peak) in seen.items():
        op = liveness.owner[node.removesuffix(WIDENED)], node.endswith(WIDENED)
        if peak > budget_bytes and peak > worst.get(op, (0, ""))[0]:
            worst[op] = (peak, node)
    return [node for _, node in sorted(worst.values(), reverse=True)[:_MOST_NEW]]


def explained(liveness: Liveness, choices: Choices, seen: Seen, nodes: Iterable[str]) -> dict[str, Moment]:
    """The moments of these nodes, each with the reserve that makes it what was seen of the choices."""
    moments = {node: liveness.moment(node, seen[node][0]) for node in nodes}
    problem = replace(liveness.priced.problem, moments=tuple(moments.values()))
    rows = evaluated(problem, choices).resting_bytes
    sizes = rows[len(rows) - len(moments) :]
    return {node: replace(m, reserve_bytes=seen[node][1] - size) for (node, m), size in zip(moments.items(), sizes, strict=True)}
