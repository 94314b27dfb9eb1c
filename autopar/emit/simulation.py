"""Prediction of the time of an emitted program. Its two streams (`autopar.core.streams`) are
simulated node by node in the order of its graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.core.streams import Streams
from autopar.kernels import collectives as kernels
from autopar.plans import Plan
from autopar.program.program import Action, StageProgram
from autopar.program.reorder import order_of

# --------------------------------------------------------------------------------------------------
# Seconds of the nodes of an emitted graph, as the plan predicts them. The collectives inside a node
# are counted separately (`blocked_s`).
#
# The time of a kernel's node consists of two parts: the time of its collective, during which no
# other node runs, and the time of its product minus the time that the kernel saves. The second part
# counts as compute. It is negative if the kernel saves more than the product takes. The time that a
# node saves by routing its rows is treated in the same way.


def node_times(graph: fx.Graph, plan: Plan) -> Mapping[fx.Node, float]:
    """Return the predicted seconds of a graph's nodes.

    A communication step has a time. The time of a plan's entry is assigned to the first of its
    nodes that the graph runs, and once more if the entry is recomputed. Copies of tensors between
    stages do not include the time of the transfer.

    Args:
        graph: an emitted graph.
        plan: the plan that the graph was emitted from.
    """
    owner = _owners(plan)
    times: dict[fx.Node, float] = {}
    assigned: set[tuple[int, int, bool]] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if "time_s" in node.meta:
            times[node] = node.meta["time_s"]
            continue
        again, kernel = bool(node.meta.get("recomputed")), node.meta.get("kernel")
        for key in (node.meta.get("key", ""), *(kernel.others if kernel is not None else ())):
            if (at := owner.get(key)) is not None and (*at, again) not in assigned:
                assigned.add((*at, again))
                entry = plan.entries[at[0]]
                times[node] = times.get(node, 0.0) + (entry.again_s if again else entry.time_s)
        saved_s = _saved_s(node)
        if kernel is not None or saved_s:
            times[node] = times.get(node, 0.0) - saved_s
    return times


def _saved_s(node: fx.Node) -> float:
    """Return the seconds that a node saves by its kernel, or by routing its rows."""
    if "kernel" in node.meta:
        return node.meta["kernel"].saved_s
    return sum(c.kernel.saved_s for c in node.meta.get("own", ()) if c.kernel is not None)


def _owners(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return, for each node key, the indices of the plan's entry and instance with its time."""
    computed = ((e, entry) for e, entry in enumerate(plan.entries) if entry.kind == "compute")
    return {
        c.node.format(*at): (e, i)
        for e, entry in computed
        for i, at in enumerate(entry.instances)
        for c in entry.nodes
    }


def blocked_s(node: fx.Node) -> float:
    """Return the seconds of communication inside a node, during which no other node runs: that of a
    kernel, and that of the node's internal collectives."""
    own_s = sum(c.time_s for c in node.meta.get("own", ()))
    return own_s + (node.meta["kernel"].time_s if "kernel" in node.meta else 0.0)


_ROUNDING = 1e-9  # fraction of a sum
Span = tuple[
    str, str, float, float
]  # node key, kind (``compute`` or ``communication``), start, seconds


@dataclass(frozen=True, slots=True)
class Simulated:
    """The simulation of one phase.

    Attributes:
        time_s: the seconds from the start to the end of the phase.
        hidden_s: the seconds during which compute and communication ran at the same time.
        spans: when each node ran. Compute takes longer while communication runs.
        missing_s: the seconds of compute that the plan contains and the graph does not run.
    """

    time_s: float
    hidden_s: float
    spans: tuple[Span, ...]
    missing_s: float


def simulate_program(program: StageProgram, plan: Plan) -> tuple[Simulated, Simulated]:
    """Simulate forward and backward.

    Entries of the plan that run in neither graph, such as the optimizer step, are not included.
    """
    forward, backward = (
        _phase(
            phase, order_of(program, phase), node_times(getattr(program, phase).graph, plan), plan
        )
        for phase in ("forward", "backward")
    )
    return forward, backward


def _phase(
    phase: str, order: Sequence[Action], times: Mapping[fx.Node, float], plan: Plan
) -> Simulated:
    streams = Streams(plan.overlap.slowdown)
    spans: list[Span] = []
    for action, node in order:
        time_s = times.get(node, 0.0)
        if action == "start" or node.target is kernels.start:
            streams.start(node, time_s)
        elif action == "finish" or node.target is kernels.finish:
            streams.finish(node if action == "finish" else node.args[0])
        else:
            spans += _run(streams, node, time_s)
    for step, start_s, end_s in streams.ran:
        assert isinstance(step, fx.Node)
        spans.append((step.meta["key"], "communication", start_s, end_s - start_s))
    return Simulated(
        streams.now_s,
        streams.hidden_s,
        tuple(sorted(spans, key=lambda span: span[2])),
        _missing_s(phase, times, plan),
    )


def _run(streams: Streams, node: fx.Node, time_s: float) -> list[Span]:
    """Run a node that is neither the start nor the finish of a collective. Return its spans.

    Args:
        streams: the two streams of the device.
        node: the node.
        time_s: the time of the node without `blocked_s`.
    """
    spans: list[Span] = []
    if moved_s := blocked_s(node):
        before_s = streams.now_s
        streams.block(moved_s)
        moved = node.meta["kernel"].key if "kernel" in node.meta else node.meta["key"]
        spans.append((moved, "communication", before_s, streams.now_s - before_s))
    before_s = streams.now_s
    # a slice is a local copy, so it runs on the compute stream
    waits = "collective" in node.meta and node.meta["collective"].kind != "slice"
    (streams.block if waits else streams.compute)(time_s)
    if time_s > 0.0:
        kind = "communication" if waits else "compute"
        spans.append((node.meta["key"], kind, before_s, streams.now_s - before_s))
    return spans


def _missing_s(phase: str, times: Mapping[fx.Node, float], plan: Plan) -> float:
    """Return the seconds of compute that the plan contains for a phase and its graph does not
    run."""
    priced_s = sum(
        len(e.instances) * e.time_s
        for e in plan.entries
        if e.kind == "compute" and e.phase == phase
    )
    priced_s += (
        sum(len(e.instances) * e.again_s for e in plan.entries) if phase == "backward" else 0.0
    )
    missing_s = priced_s - sum(
        time_s for node, time_s in times.items() if "collective" not in node.meta
    )
    inner_kernels = (
        c.kernel for node in times for c in node.meta.get("own", ()) if c.kernel is not None
    )
    missing_s -= sum(
        kernel.saved_s
        for kernel in (
            *(node.meta["kernel"] for node in times if "kernel" in node.meta),
            *inner_kernels,
        )
    )
    return missing_s if missing_s > _ROUNDING * priced_s else 0.0
