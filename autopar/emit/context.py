"""What the emission of one plan works on: the trace, the mesh and the plan by keys, and what was
emitted so far."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.trace import Trace
from autopar.core.collective import Collective
from autopar.core.layout import Layout, Strategy
from autopar.core.mesh import Mesh
from autopar.core.placements import Halo
from autopar.errors import PlanError
from autopar.kernels import collectives as steps
from autopar.kernels import dispatched
from autopar.plans import Communication, Plan
from autopar.rules import Call, Length, Operand, Start, Starts, localize

# --------------------------------------------------------------------------------------------------
# A plan, looked up by node and tensor: what emission asks of it.
#
# Keys. Compute nodes have the trace's own keys; placeholders and outputs are keyed by what the
# user calls them: ``NAME/parameter``, ``NAME/buffer``, ``PATH/input``, ``PATH/output``. What
# crosses between stages lies as its gradient does: the decision on an input that crosses is also
# on its gradient, that on an output other than the loss also on its tangent.
#
# ``NAME/parameter`` is what a microbatch reads, and how its gradient is added up. Where a
# parameter rests otherwise between steps, ``NAME/storage`` says how; of that key, result 0 moves
# at the begin of a step to what microbatches read, and result 1, the sum of gradients, at its end
# to storage, both in phase ``step``.

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
    return keys | {
        o.tangent: output_key(o.path) if o.is_answered else input_key("tangent")
        for o in trace.differentiable
    }


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
        return PlanIndex(
            plan.node_choices(), plan.recomputed_choices(), steps, plan.kept_layouts(), own
        )

    def storage(self, parameter: str) -> Layout:
        """Where a parameter rests between steps."""
        return self.chosen.get(
            storage_key(parameter), self.chosen[parameter_key(parameter)]
        ).outputs[0]

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
            lines = (
                [f"the plan has no entry for {len(missing)} nodes: {', '.join(missing[:5])}"]
                if missing
                else []
            )
            lines += (
                [f"the model has no node for {len(unknown)} entries: {', '.join(unknown[:5])}"]
                if unknown
                else []
            )
            raise PlanError(
                "; ".join(lines), remedy="plan again for this model, batch shape and torch version"
            )


def compute_nodes(trace: Trace, phase: str) -> list[fx.Node]:
    """The trace's compute nodes of a phase, in order."""
    return [n for n in trace.graph.nodes if n.op == "call_function" and n.meta["phase"] == phase]


Ref = tuple[str, int]  # trace node name, result index
CAST = "/cast"
"""Ends the key of the node that casts a parameter to the dtype in which it is read."""


def rests(node: fx.Node) -> bool:
    """Whether a node of a program is there from the start of its phase: what the graph is given,
    and casts of it."""
    return node.op == "placeholder" or node.meta.get("key", "").endswith(CAST)


@dataclass
class Job:
    """What both phases share."""

    trace: Trace
    mesh: Mesh
    index: PlanIndex
    placeholder_keys: dict[str, str]
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    output: fx.Node | None = None
    emitted: list[tuple[str, str, Collective]] = field(default_factory=list)
    crossing: frozenset[str] = field(init=False)  # the inputs that come from another stage

    def __post_init__(self) -> None:
        self.crossing = frozenset(i.node for i in self.trace.inputs if i.crosses)
        for node in self.trace.graph.nodes:
            self.nodes[node.name] = node
            if node.op == "output":
                self.output = node

    def results(self) -> list[fx.Node]:
        assert self.output is not None
        return list(self.output.args[0])  # type: ignore[arg-type]

    def value(self, ref: Ref) -> torch.Tensor:
        """The traced value, a fake tensor."""
        value = self.nodes[ref[0]].meta["val"]
        return value[ref[1]] if isinstance(value, tuple | list) else value

    def dtype(self, ref: Ref) -> torch.dtype:
        return self.value(ref).dtype

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return tuple(self.value(ref).shape)

    def key(self, ref: Ref) -> TensorKey:
        name, result = ref
        return self.placeholder_keys.get(name) or self.nodes[name].meta["key"], result


# --------------------------------------------------------------------------------------------------
# The call that each kind of collective is emitted as, and what a step says that it moves.


@dataclass(frozen=True, slots=True)
class Moved:
    """What the node of a communication of the plan moves.

    Attributes:
        node, result: the tensor. shape: global. source, target: its layouts before and after.
    """

    phase: str
    node: str
    result: int
    shape: tuple[int, ...]
    source: Layout
    target: Layout

    @property
    def name(self) -> tuple[str, str, int, Layout]:
        """Of all communications of a plan it is the only one of this name."""
        return self.phase, self.node, self.result, self.target


def _halo_arguments(c: Collective, target: Layout) -> tuple[Any, ...]:
    halo = target.placements[c.axis]
    assert isinstance(halo, Halo), "only a halo step leads to a halo"
    return c.dim, halo.before, halo.after, halo.lowest, c.axis


CALLS: dict[str, Callable[[Collective, Layout], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "all_gather": lambda c, _: (steps.all_gather, (c.dim, c.axis)),
    "all_reduce": lambda c, _: (steps.all_reduce, (c.reduce_op, c.axis)),
    "reduce_scatter": lambda c, _: (steps.reduce_scatter, (c.dim, c.reduce_op, c.axis)),
    "all_to_all": lambda c, _: (steps.all_to_all, (c.dim, c.to_dim, c.axis)),
    "swap": lambda c, _: (steps.swap, (c.dim, c.axis)),
    "halo": lambda c, target: (steps.halo, _halo_arguments(c, target)),
    "slice": lambda c, _: (steps.shard, (c.dim, c.axis)),
    "fetch": lambda c, _: (steps.fetch, ()),
    "store": lambda c, _: (steps.store, ()),
}


# --------------------------------------------------------------------------------------------------
# A call's local arguments as graph nodes: operands put in, positions turned into steps that know
# the rank.


def local_call(
    graph: fx.Graph,
    call: Call,
    strategy: Strategy,
    mesh_shape: Sequence[int],
    operands: Sequence[fx.Node],
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Target, args and kwargs of the node that one rank runs."""
    local = localize(call, strategy, mesh_shape)

    def resolve(value: Any) -> Any:
        if isinstance(value, Operand):
            return operands[value.index]
        if isinstance(value, Start | Length):
            place = steps.local_start if isinstance(value, Start) else steps.local_length
            found = graph.call_function(place, (value.dim_size, _splitters(value, mesh_shape)))
            before = value.before if isinstance(value, Start) else 0
            return graph.call_function(operator.sub, (found, before)) if before else found
        if isinstance(value, Starts):
            return value.dim_size, _splitters(value, mesh_shape)
        if isinstance(value, tuple | list):
            return [resolve(v) for v in value]
        return value

    args = tuple(resolve(a) for a in local.args)
    return (
        dispatched.STEPS.get(local.target, local.target),
        args,
        {name: resolve(v) for name, v in local.kwargs.items()},
    )


def _splitters(
    token: Start | Length | Starts, mesh_shape: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """(axis, its size) of those that split the token's dim, outermost first."""
    return tuple((axis, mesh_shape[axis]) for axis in token.layout.splitters(token.dim))
