"""Seconds of the nodes of an emitted graph, as the plan predicts them; of what a node moves by itself, beside them.

A kernel's node takes the time of its collective, beside which nothing runs, and of its product what is left of it beyond what the kernel
saves. That part is counted as compute: what saves more than the product takes, would save part of the collective. Likewise of what a node's
own rows save by their route.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopar.plans import Plan


def node_times(graph: fx.Graph, plan: Plan) -> Mapping[fx.Node, float]:
    """Seconds by node: of steps their own, of an entry for the first of its nodes that the graph runs, and again where it runs again.

    Copies of what crosses go by its key, and take none of the time that it takes to cross.
    """
    computed = ((e, entry) for e, entry in enumerate(plan.entries) if entry.kind == "compute")
    owner = {c.node.format(*at): (e, i) for e, entry in computed for i, at in enumerate(entry.instances) for c in entry.nodes}
    found: dict[fx.Node, float] = {}
    spent: set[tuple[int, int, bool]] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if "time_s" in node.meta:
            found[node] = node.meta["time_s"]
            continue
        again, kernel = bool(node.meta.get("recomputed")), node.meta.get("kernel")
        for key in (node.meta.get("key", ""), *(kernel.others if kernel is not None else ())):
            if (at := owner.get(key)) is not None and (*at, again) not in spent:
                spent.add((*at, again))
                found[node] = found.get(node, 0.0) + (plan.entries[at[0]].again_s if again else plan.entries[at[0]].time_s)
        routed_s = sum(c.kernel.saved_s for c in node.meta.get("own", ()) if c.kernel is not None)
        if kernel is not None or routed_s:
            found[node] = found.get(node, 0.0) - (routed_s if kernel is None else kernel.saved_s)
    return found


def blocked_s(node: fx.Node) -> float:
    """Seconds of communication in a node beside which nothing runs but its own product: of a kernel, and what the node moves by itself."""
    own_s = sum(c.time_s for c in node.meta.get("own", ()))
    return own_s + (node.meta["kernel"].time_s if "kernel" in node.meta else 0.0)
