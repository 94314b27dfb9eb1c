"""The time of an emitted program, by simulation of its two streams (`autopar.streams`), node by node in the order of its graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.emit.times import blocked_s, node_times
from autopar.kernels import collectives as kernels
from autopar.plans import Plan
from autopar.run.program import Action, Program
from autopar.run.reordered import order_of
from autopar.streams import Streams

_ROUNDING = 1e-9  # share of a sum
Span = tuple[str, str, float, float]  # node key, kind (``compute`` or ``communication``), start, seconds


@dataclass(frozen=True, slots=True)
class Simulated:
    """One phase.

    Attributes:
        time_s: from its start to its end. hidden_s: of this, how long compute and communication both ran.
        spans: what ran when; a hidden second stretches compute. missing_s: compute that the plan prices and the graph does not run.
    """

    time_s: float
    hidden_s: float
    spans: tuple[Span, ...]
    missing_s: float


def simulated(program: Program, plan: Plan) -> tuple[Simulated, Simulated]:
    """Forward and backward; of the plan's entries those that are run in neither graph, such as the optimizer's, are in neither."""
    forward, backward = (
        _phase(phase, order_of(program, phase), node_times(getattr(program, phase).graph, plan), plan) for phase in ("forward", "backward")
    )
    return forward, backward


def _phase(phase: str, order: Sequence[Action], times: Mapping[fx.Node, float], plan: Plan) -> Simulated:
    streams = Streams(plan.overlap.slowdown)
    spans: list[Span] = []
    for action, node in order:
        before_s, time_s = streams.now_s, times.get(node, 0.0)
        if action == "start" or node.target is kernels.start:
            streams.start(node, time_s)
        elif action == "finish" or node.target is kernels.finish:
            streams.finish(node if action == "finish" else node.args[0])
        else:
            waits = "collective" in node.meta and node.meta["collective"].kind != "slice"  # a slice is a local copy
            if blocked_s(node):
                streams.block(blocked_s(node))
                moved = node.meta["kernel"].key if "kernel" in node.meta else node.meta["key"]
                spans.append((moved, "communication", before_s, streams.now_s - before_s))
                before_s = streams.now_s
            (streams.block if waits else streams.compute)(time_s)
            if time_s > 0.0:
                spans.append((node.meta["key"], "communication" if waits else "compute", before_s, streams.now_s - before_s))
    spans += [(step.meta["key"], "communication", start_s, end_s - start_s) for step, start_s, end_s in streams.ran]  # type: ignore[attr-defined]
    priced_s = sum(len(e.instances) * e.time_s for e in plan.entries if e.kind == "compute" and e.phase == phase)
    priced_s += sum(len(e.instances) * e.again_s for e in plan.entries) if phase == "backward" else 0.0
    missing_s = priced_s - sum(time_s for node, time_s in times.items() if "collective" not in node.meta)
    own = (c.kernel for node in times for c in node.meta.get("own", ()) if c.kernel is not None)
    missing_s -= sum(kernel.saved_s for kernel in (*(node.meta["kernel"] for node in times if "kernel" in node.meta), *own))
    missing_s = missing_s if missing_s > _ROUNDING * priced_s else 0.0
    return Simulated(streams.now_s, streams.hidden_s, tuple(sorted(spans, key=lambda span: span[2])), missing_s)
