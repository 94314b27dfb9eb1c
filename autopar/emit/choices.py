"""A plan, looked up by node and tensor: what emission asks of it.

Keys. Compute nodes have the trace's own keys; placeholders and outputs are keyed by what the user calls them:
``NAME/parameter``, ``NAME/buffer``, ``PATH/input``, ``PATH/output``. What crosses between stages lies as its gradient does: the
decision on an input that crosses is also on its gradient, that on an output other than the loss also on its tangent.

``NAME/parameter`` is what a microbatch reads, and how its gradient is added up. Where a parameter rests otherwise between steps,
``NAME/storage`` says how; of that key, result 0 moves at the begin of a step to what microbatches read, and result 1, the sum of
gradients, at its end to storage, both in phase ``step``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from autopar.capture.trace import Trace
from autopar.errors import PlanError
from autopar.layout import Layout, Strategy
from autopar.plans import Communication, Plan

TensorKey = tuple[str, int]  # node key, result index


def parameter_key(name: str) -> str:
    return f"{name}/parameter"


def storage_key(name: str) -> str:
    return f"{name}/storage"


def buffer_key(name: str) -> str:
    return f"{name}/buffer"


def input_key(path: str) -> str:
    return f"{path}/input"


def output_key(path: str) -> str:
    return f"{path}/output"


def placeholder_keys(trace: Trace) -> dict[str, str]:
    """Placeholder node name → its key."""
    keys = {p.node: parameter_key(p.name) for p in trace.parameters}
    keys |= {b.node: buffer_key(b.name) for b in trace.buffers}
    keys |= {i.node: input_key(i.path) for i in trace.inputs}
    return keys | {o.tangent: output_key(o.path) if o.is_answered else input_key("tangent") for o in trace.differentiable}


@dataclass(frozen=True, slots=True)
class PlanIndex:
    """The plan's decisions with all instances expanded.

    Attributes:
        chosen, again: node key → strategy in its own phase, and when backward runs it again.
        steps: (phase, tensor) → target layout → the collective that makes it.
        own: (phase, node key) → the collectives that the node does by itself there.
        kept: tensor → layouts kept for backward.
    """

    chosen: dict[str, Strategy]
    again: dict[str, Strategy]
    steps: dict[tuple[str, TensorKey], dict[Layout, Communication]]
    kept: dict[TensorKey, tuple[Layout, ...]]
    own: dict[tuple[str, str], tuple[Communication, ...]] = field(default_factory=dict)

    @staticmethod
    def of(plan: Plan) -> PlanIndex:
        steps: dict[tuple[str, TensorKey], dict[Layout, Communication]] = {}
        own: dict[tuple[str, str], tuple[Communication, ...]] = {}
        for node, c in plan.steps():
            if c.own:
                own[c.phase, node] = (*own.get((c.phase, node), ()), c)
            else:
                steps.setdefault((c.phase, (node, c.result)), {})[c.target] = c
        return PlanIndex(plan.node_choices(), plan.recomputed_choices(), steps, plan.kept_layouts(), own)

    def storage(self, parameter: str) -> Layout:
        """Where a parameter rests between steps."""
        return self.chosen.get(storage_key(parameter), self.chosen[parameter_key(parameter)]).outputs[0]

    def check(self, trace: Trace) -> None:
        """That plan and trace speak of the same nodes.

        Raises:
            PlanError: naming the first entries that are missing on either side.
        """
        keys = {n.meta["key"] for n in trace.graph.nodes if n.op == "call_function"}
        keys |= set(placeholder_keys(trace).values()) | {output_key(o.path) for o in trace.outputs}
        keys |= {output_key(name) for name in trace.mutated}
        possible = keys | {storage_key(p.name) for p in trace.parameters}
        missing, unknown = sorted(keys - self.chosen.keys()), sorted(self.chosen.keys() - possible)
        if missing or unknown:
            lines = [f"the plan has no entry for {len(missing)} nodes: {', '.join(missing[:5])}"] if missing else []
            lines += [f"the model has no node for {len(unknown)} entries: {', '.join(unknown[:5])}"] if unknown else []
            raise PlanError("; ".join(lines), remedy="plan again for this model, batch shape and torch version")


def compute_nodes(trace: Trace, phase: str) -> list[fx.Node]:
    """The trace's compute nodes of a phase, in order."""
    return [n for n in trace.graph.nodes if n.op == "call_function" and n.meta["phase"] == phase]
