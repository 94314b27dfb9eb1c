"""The state of the emission of one plan: the trace, the mesh, the plan indexed by keys, and the
emitted collectives."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar.capture.trace import Parameter, Trace
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
# A plan, indexed by node and tensor.
#
# Compute nodes have the keys of the trace. Placeholders and outputs are keyed by their names in the
# model: ``NAME/parameter``, ``NAME/buffer``, ``PATH/input``, ``PATH/output``. A tensor that is sent
# between stages has the same layout as its gradient: the decision on such an input also applies to
# its gradient, and the decision on an output other than the loss also applies to its tangent.
#
# ``NAME/parameter`` is the layout in which a microbatch reads the parameter and accumulates its
# gradient. If the parameter has another layout between steps, ``NAME/storage`` is that layout.
# Result 0 of that key, the parameter, is converted to the layout of microbatches when a step
# begins. Result 1, the sum of gradients, is converted to the storage layout when the step ends.
# Both conversions are in phase ``step``.

TensorKey = tuple[str, int]  # node key, result index


def parameter_key(name: str) -> str:
    """Return the key of a parameter in the layout that microbatches read."""
    return f"{name}/parameter"


def storage_key(name: str) -> str:
    """Return the key of a parameter in its storage layout, if that is another layout."""
    return f"{name}/storage"


def buffer_key(name: str) -> str:
    """Return the key of a buffer, by its name."""
    return f"{name}/buffer"


def input_key(path: str) -> str:
    """Return the key of an input, by its path in the batch."""
    return f"{path}/input"


def output_key(path: str) -> str:
    """Return the key of an output, by its path, or of a mutated buffer, by its name."""
    return f"{path}/output"


def placeholder_keys(trace: Trace) -> dict[str, str]:
    """Return the key of each placeholder of the trace, by its node's name."""
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
        chosen: the strategy of each node in its phase, by node key.
        recomputed: the strategy of each recomputed node in backward, by node key.
        steps: for each phase and tensor, the collective that creates each layout.
        kept: the layouts of each tensor that are kept for backward.
        own: for each phase and node key, the collectives inside the node.
    """

    chosen: dict[str, Strategy]
    recomputed: dict[str, Strategy]
    steps: dict[tuple[str, TensorKey], dict[Layout, Communication]]
    kept: dict[TensorKey, tuple[Layout, ...]]
    own: dict[tuple[str, str], tuple[Communication, ...]] = field(default_factory=dict)

    @staticmethod
    def of(plan: Plan) -> PlanIndex:
        """Expand the entries and communications of a plan."""
        steps: dict[tuple[str, TensorKey], dict[Layout, Communication]] = {}
        inner_steps: dict[tuple[str, str], tuple[Communication, ...]] = {}
        for node, c in plan.steps():
            if c.own:
                inner_steps[c.phase, node] = (*inner_steps.get((c.phase, node), ()), c)
            else:
                steps.setdefault((c.phase, (node, c.result)), {})[c.target] = c
        return PlanIndex(
            plan.node_choices(), plan.recomputed_choices(), steps, plan.kept_layouts(), inner_steps
        )

    def storage(self, parameter: str) -> Layout:
        """Return the storage layout of a parameter."""
        return self.chosen.get(
            storage_key(parameter), self.chosen[parameter_key(parameter)]
        ).outputs[0]

    def check(self, trace: Trace) -> None:
        """Check that the plan and the trace contain the same nodes.

        Raises:
            PlanError: if entries are missing on either side. The message lists the first ones.
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
    """Return the trace's compute nodes of a phase, in order."""
    return [n for n in trace.graph.nodes if n.op == "call_function" and n.meta["phase"] == phase]


Ref = tuple[str, int]  # trace node name, result index
CAST = "/cast"
"""The suffix of the key of a node that casts a parameter to the dtype in which it is read."""


def is_ready_at_start(node: fx.Node) -> bool:
    """Return whether a node is available from the start of its phase: a placeholder, or a cast of a
    placeholder."""
    return node.op == "placeholder" or node.meta.get("key", "").endswith(CAST)


@dataclass
class LoweringContext:
    """The state that both phases share.

    Attributes:
        trace: the trace.
        mesh: the mesh.
        index: the plan, indexed by keys.
        placeholder_keys: the key of each placeholder, by the name of its node.
        nodes: the nodes of the trace, by name.
        output: the output node of the trace.
        emitted: (phase, key, collective) of each step that was emitted.
        crossing: the nodes of inputs that come from another stage.
    """

    trace: Trace
    mesh: Mesh
    index: PlanIndex
    placeholder_keys: dict[str, str]
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    output: fx.Node | None = None
    emitted: list[tuple[str, str, Collective]] = field(default_factory=list)
    crossing: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.crossing = frozenset(i.node for i in self.trace.inputs if i.crosses)
        for node in self.trace.graph.nodes:
            self.nodes[node.name] = node
            if node.op == "output":
                self.output = node

    def results(self) -> list[fx.Node]:
        """Return the nodes that the trace returns."""
        assert self.output is not None
        return list(self.output.args[0])

    @cached_property
    def parameters_of(self) -> dict[str, list[Parameter]]:
        """The parameters whose gradient a node of the trace computes, by the name of the node."""
        results, parameters = self.results(), dict[str, list[Parameter]]()
        for p in self.trace.parameters:
            if p.gradient is not None:
                parameters.setdefault(results[p.gradient].name, []).append(p)
        return parameters

    def value(self, ref: Ref) -> torch.Tensor:
        """Return the traced value of a tensor: a fake tensor with the global shape."""
        value = self.nodes[ref[0]].meta["val"]
        return value[ref[1]] if isinstance(value, tuple | list) else value

    def dtype(self, ref: Ref) -> torch.dtype:
        """Return the dtype of a tensor of the trace."""
        return self.value(ref).dtype

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Return the global shape of a tensor of the trace."""
        return tuple(self.value(ref).shape)

    def key(self, ref: Ref) -> TensorKey:
        """Return the key of a tensor's node and its result index."""
        name, result = ref
        return self.placeholder_keys.get(name) or self.nodes[name].meta["key"], result


# --------------------------------------------------------------------------------------------------
# The function that each kind of collective is emitted as, and a record of the tensor and layouts of
# a step.


@dataclass(frozen=True, slots=True)
class MovedTensor:
    """The tensor and the layouts of a communication step.

    Attributes:
        phase: the phase of the graph that contains the step.
        node, result: the key of the tensor's node, and the result index.
        shape: the global shape of the tensor.
        source, target: the layouts before and after the step.
    """

    phase: str
    node: str
    result: int
    shape: tuple[int, ...]
    source: Layout
    target: Layout

    @property
    def name(self) -> tuple[str, str, int, Layout]:
        """The phase, tensor and target layout, which identify the communication in its plan."""
        return self.phase, self.node, self.result, self.target


def _halo_arguments(c: Collective, target: Layout) -> tuple[Any, ...]:
    halo = target.placements[c.axis]
    assert isinstance(halo, Halo), "the target layout of a halo step has a halo"
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
# The arguments of a local call as graph nodes. Operands are inserted, and positions become nodes
# that compute them from the rank.


def local_call(
    graph: fx.Graph,
    call: Call,
    strategy: Strategy,
    mesh_shape: Sequence[int],
    operands: Sequence[fx.Node],
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the target, args and kwargs of the node that one rank runs.

    Args:
        graph: the graph to which nodes that compute positions from the rank are added.
        call: the call on global tensors.
        strategy: the layouts of operands and results.
        mesh_shape: the sizes of the mesh axes.
        operands: the nodes of the local operands, in order.
    """
    local = localize(call, strategy, mesh_shape)

    def resolve(value: Any) -> Any:
        """Return the node or literal for an argument."""
        if isinstance(value, Operand):
            return operands[value.index]
        if isinstance(value, Start | Length):
            place = steps.local_start if isinstance(value, Start) else steps.local_length
            placed = graph.call_function(place, (value.dim_size, _splitters(value, mesh_shape)))
            before = value.before if isinstance(value, Start) else 0
            return graph.call_function(operator.sub, (placed, before)) if before else placed
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
    """Return pairs (axis, axis size) of the axes that shard the token's dim, outermost first."""
    return tuple((axis, mesh_shape[axis]) for axis in token.layout.splitters(token.dim))
