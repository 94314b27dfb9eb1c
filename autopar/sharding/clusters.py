"""Nodes merged into clusters. A cluster is one decision of the planner.

Terms. A *cluster* is a set of nodes that share one decision, with no redistribution inside. A
*pattern* is a node key in which the indices of repeated layers are written ``{0}``, ``{1}``, ….

A node is merged into the cluster of a producer only if no useful choice is lost:

- The node is not a contraction or a lookup. Gathering an operand may pay off before these.
- On every axis the node accepts every placement that the producer can give. If it reads several
  tensors of the cluster, it accepts every combination of their placements. (The mean of split
  samples is a partial sum, which cannot be subtracted from them.)
- Its results are no larger than its operands, so that redistributing a result never costs more than
  redistributing the operand.
- The placements of its operands determine those of its results. A tensor that is created like
  another one may have any placement, and several of them would multiply the strategies.
- It reads no tensor that the cluster may read with a halo or mirrored, which is another layout.
- If the cluster depends on no tensor (zeros, a range), neither does the node. Such tensors are
  replicated, and other operands of the node would have to be replicated as well.

A contraction can be the first node of a cluster. If backward reads more bytes of one memory than it
holds (a tensor and a view of it), views are not merged into the producer, and other nodes are not
merged into views that backward reads. A cluster keeps all or none of its results, so the shared
memory would count twice.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import torch
from torch import fx
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from autopar import ops
from autopar.analysis.work import is_view
from autopar.capture.trace import Trace
from autopar.core.placements import Mirrored, Special, adds_up
from autopar.ops import random
from autopar.rules import AxisOption, Call, TensorInfo, axis_options, call_of, operands_of

# --------------------------------------------------------------------------------------------------
# Tensors that share memory, and memory from which backward reads more bytes than it holds.

Ref = tuple[str, int]  # a tensor: node name, result index


class Storages:
    """The memory of the tensors of a trace, identified by the tensor that it was allocated for.

    A kept view of a kept tensor takes no memory, but counts as a tensor. If both can be recomputed
    separately, a plan that keeps one and recomputes the other is counted correctly.
    """

    def __init__(self) -> None:
        self._owner: dict[Ref, Ref] = {}
        self._free: dict[Ref, int] = {}  # bytes of a memory minus bytes of the tensors kept in it
        self._viewing: set[str] = set()

    def add(self, name: str, call: Call, reads: Sequence[Ref]) -> None:
        """Add a node, after the nodes that it reads.

        Args:
            name: name of the node.
            call: its call.
            reads: the tensors that it reads.
        """
        views = (
            bool(reads)
            and is_view(call.target)
            and (call.target is not operator.getitem or reads[0][0] in self._viewing)
        )
        self._viewing |= {name} if views else set()
        for result, info in enumerate(call.outputs):
            self._owner[name, result] = (
                self._owner.get(reads[0], reads[0]) if views else (name, result)
            )
            self._free.update({} if views else {(name, result): size_of(info)})

    def keep(self, kept: Mapping[Ref, TensorInfo]) -> None:
        """Count the tensors of forward that backward reads."""
        for ref, info in kept.items():
            owner = self._owner.get(ref, ref)
            self._free[owner] = self._free.get(owner, 0) - size_of(
                info
            )  # parameters, buffers and inputs have no entry, as views of them take no memory

    def is_view(self, name: str) -> bool:
        """Return whether the results of a node share the memory of its operand."""
        return name in self._viewing

    def are_full(self, refs: Sequence[Ref]) -> bool:
        """Return whether more bytes are kept than the memory of one of these tensors holds."""
        return any(self._free.get(self._owner.get(ref, ref), 0) < 0 for ref in refs)


def size_of(info: TensorInfo) -> int:
    """Return the bytes of a replicated tensor on one device."""
    return info.dtype.itemsize * math.prod(info.shape)


# --------------------------------------------------------------------------------------------------
# Options of several nodes together on one mesh axis, with no redistribution between them.

Assignment = dict[Ref, Placement]  # on one axis
Node = tuple[Sequence[Ref], Sequence[Ref], Iterable[AxisOption]]  # (operands, results, options)


def joint_options(nodes: Iterable[Node]) -> list[Assignment]:
    """List every consistent choice of one option per node on one mesh axis.

    Args:
        nodes: operands, results and options of each node, in topological order.

    Returns:
        Each choice as tensor → placement.
    """
    assignments: list[Assignment] = [{}]
    for reads, results, options in nodes:
        options = tuple(options)
        assignments = [
            joined
            for state in assignments
            for option in options
            if (joined := _join_option(state, reads, results, option)) is not None
        ]
    return assignments


def _join_option(
    state: Assignment, reads: Sequence[Ref], results: Sequence[Ref], option: AxisOption
) -> Assignment | None:
    """Add an option to a choice. Return None if it reads a tensor with another placement."""
    joined = dict(state)
    if any(
        joined.setdefault(ref, placement) != placement
        for ref, placement in zip(reads, option.inputs, strict=True)
    ):
        return None
    joined.update(zip(results, option.outputs, strict=True))
    return joined


HEADS = frozenset(
    (
        ops.dot,
        ops.attention,
        ops.attention_backward,
        ops.embedding,
        ops.embedding_backward,
        ops.experts,
        ops.experts_backward,
        ops.flex_attention,
        ops.flex_attention_backward,
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten.convolution_backward.default,
    )
)
_PRODUCTS = HEADS | {
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.div.Tensor,
    random.masked_scale,
    ops.rms_product,
    ops.rms_norm_backward,
    ops.rms_weight_gradient,
}
_INDEX = re.compile(r"(?<=\.)\d+(?=[./]|$)")


def pattern_of(key: str) -> tuple[str, tuple[int, ...]]:
    """Return the pattern of a node key and the layer indices in it: ``layers.3.mlp/dot/…`` →
    ``layers.{0}.mlp/dot/…``, (3,)."""
    module, slash, rest = key.partition("/")
    indices = tuple(int(m) for m in _INDEX.findall(module))
    counter = itertools.count()
    escaped = module.replace("{", "{{").replace("}", "}}")
    return _INDEX.sub(lambda _: f"{{{next(counter)}}}", escaped) + slash + rest, indices


@dataclass(frozen=True, slots=True)
class ClusterMember:
    """One node of a cluster: its call, its operands and its results."""

    node: str
    key: str
    pattern: str
    call: Call
    reads: tuple[Ref, ...]
    makes: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that share one decision (see the module docstring).

    Attributes:
        members: the nodes, in topological order.
        operands: tensors from outside that members read, each once.
        results: tensors that nodes outside read.
        phase: phase of the members.
        indices: layer indices of this instance.
    """

    members: tuple[ClusterMember, ...]
    operands: tuple[Ref, ...]
    results: tuple[Ref, ...]
    phase: str
    indices: tuple[int, ...]

    @property
    def signature(self) -> tuple[object, ...]:
        """A key that is equal for equal instances of repeated layers."""
        local = {ref: i for i, ref in enumerate(self.operands)}
        names = {m.node: i for i, m in enumerate(self.members)}
        reads = tuple(
            tuple(local.get(r, (names.get(r[0]), r[1])) for r in m.reads) for m in self.members
        )
        results = tuple((names[n], i) for n, i in self.results)
        calls = tuple((m.pattern, m.call.key) for m in self.members)
        return (calls, reads, results, len(self.indices))


@dataclass(frozen=True, slots=True)
class _SharedOptions:
    """The options that nodes of equal layers share.

    Attributes:
        by_call: (call, possible placements of its operands) → options, and the operands that some
            options read with a halo or mirrored.
        given: tensor → partial and mirrored placements in which it can be produced.
    """

    by_call: dict[Any, tuple[tuple[AxisOption, ...], frozenset[int]]]
    given: dict[Ref, frozenset[Placement]]


@dataclass
class _Graph:
    """The compute nodes of a trace, with look-ups."""

    members: dict[str, ClusterMember] = field(default_factory=dict)
    phase: dict[str, str] = field(default_factory=dict)
    indices: dict[str, tuple[int, ...]] = field(default_factory=dict)
    readers: dict[Ref, list[str]] = field(default_factory=dict)
    options: dict[str, tuple[AxisOption, ...]] = field(default_factory=dict)
    shared: _SharedOptions = field(default_factory=lambda: _SharedOptions({}, {}))
    specially: dict[str, frozenset[Ref]] = field(
        default_factory=dict
    )  # tensors that a node may read with a halo or mirrored
    position: dict[str, int] = field(default_factory=dict)
    from_nothing: set[str] = field(
        default_factory=set
    )  # nodes that depend on no tensor from outside the graph
    storages: Storages = field(default_factory=Storages)

    def is_kept(self, name: str) -> bool:
        """Return whether backward reads a result of a forward node."""
        read = (reader for ref in self.members[name].makes for reader in self.readers.get(ref, ()))
        return self.phase[name] == "forward" and any(
            self.phase[reader] == "backward" for reader in read
        )


def clusters_of(trace: Trace, apart: Container[str] = ()) -> tuple[Cluster, ...]:
    """Merge the nodes of a trace into clusters.

    Args:
        trace: the trace.
        apart: names of nodes that are not merged into the cluster of a producer.

    Returns:
        The clusters, in topological order of their first member.
    """
    graph = _read_graph(trace)
    home = {name: name for name in graph.members}  # node → first node of its cluster
    content = {name: [name] for name in graph.members}
    for name, member in graph.members.items():
        for root in dict.fromkeys(
            home[r[0]] for r in member.reads if r[0] in home and name not in apart
        ):
            if root != home[name] and _mergeable(graph, content[root], member, name):
                content[root] += content.pop(home[name])
                for node in content[root]:
                    home[node] = root
                break
    content = _acyclic(graph, content)
    outputs = _graph_outputs(trace)
    return tuple(_cluster(graph, names, outputs) for names in content.values())


def _read_graph(trace: Trace) -> _Graph:
    graph = _Graph()
    for node in trace.graph.nodes:
        if node.op != "call_function":
            continue
        call = call_of(node)
        pattern, indices = pattern_of(node.meta["key"])
        reads = tuple((n.name, _result_index(node)) for n in operands_of(node))
        results = tuple((node.name, i) for i in range(len(call.outputs)))
        graph.members[node.name] = ClusterMember(
            node.name, node.meta["key"], pattern, call, reads, results
        )
        graph.phase[node.name], graph.indices[node.name] = node.meta["phase"], indices
        graph.position[node.name] = len(graph.position)
        graph.options[node.name], special = _possible_options(graph, call, reads)
        graph.specially[node.name] = frozenset(reads[i] for i in special)
        graph.storages.add(node.name, call, reads)
        if graph.from_nothing.issuperset(n for n, _ in reads):
            graph.from_nothing.add(node.name)
        for ref in reads:
            graph.readers.setdefault(ref, []).append(node.name)
    listed = (member for name, member in graph.members.items() if graph.is_kept(name))
    graph.storages.keep(
        {
            ref: info
            for member in listed
            for ref, info in zip(member.makes, member.call.outputs, strict=True)
        }
    )
    return graph


def offered_options(call: Call) -> tuple[AxisOption, ...]:
    """Return the options of a call that strategies consist of.

    Partial sums pass through views, sums and additions, so that several of them need one reduction.
    Options that pass them through a product are left out: the reduction would come later, on a
    tensor that is not smaller.
    """
    options = axis_options(call)
    if call.target not in _PRODUCTS or len(call.inputs) < 2:
        return options
    return tuple(o for o in options if not any(adds_up(p) for p in o.inputs))


def _possible_options(
    graph: _Graph, call: Call, reads: Sequence[Ref]
) -> tuple[tuple[AxisOption, ...], frozenset[int]]:
    """Return the options whose partial operands some producer can give, and the operands that some
    options read with a halo or mirrored. A getitem reads the placements of its producer.

    Nodes of equal layers share the answer.
    """
    producible = tuple(_find_given(graph, ref) for ref in reads)
    key = call.keyed, producible
    if key not in graph.shared.by_call:
        graph.shared.by_call[key] = _find_possible(call, producible)
    return graph.shared.by_call[key]


def _find_given(graph: _Graph, ref: Ref) -> frozenset[Placement]:
    """Return the partial and mirrored placements in which a tensor can be produced."""
    if ref not in graph.shared.given:
        outputs = (o.outputs[ref[1]] for o in graph.options.get(ref[0], ()))
        graph.shared.given[ref] = frozenset(
            p for p in outputs if issubclass(type(p), (Partial, Mirrored))
        )
    return graph.shared.given[ref]


def _find_possible(
    call: Call, given: Sequence[frozenset[Placement]]
) -> tuple[tuple[AxisOption, ...], frozenset[int]]:
    """Return the same as `_possible_options`, for operands with these placements."""
    is_getitem = call.target is operator.getitem
    asked = (Partial, Mirrored) if is_getitem else (Partial,)

    def possible(option: AxisOption) -> bool:
        """Return whether producers can give all operands of the option."""
        return all(
            not issubclass(type(p), asked) or p in ok
            for p, ok in zip(option.inputs, given, strict=True)
        )

    options = tuple(filter(possible, offered_options(call)))
    special = (i for o in options for i, p in enumerate(o.inputs) if issubclass(type(p), Special))
    return options, frozenset() if is_getitem else frozenset(special)


def _result_index(node: fx.Node) -> int:
    return int(node.args[1]) if node.target is operator.getitem else 0


def _graph_outputs(trace: Trace) -> set[Ref]:
    output = next(iter(reversed(trace.graph.nodes)))
    return {(n.name, 0) for n in output.args[0] if isinstance(n, fx.Node)}


def _mergeable(graph: _Graph, content: Sequence[str], member: ClusterMember, name: str) -> bool:
    """Return whether `member` may join the cluster `content`, which produces one of its operands
    (see the module docstring)."""
    head = content[0]
    if graph.phase[name] != graph.phase[head] or graph.indices[name] != graph.indices[head]:
        return False
    return member.call.target is operator.getitem or _Merge(graph, content, name).is_allowed


class _Merge:
    """A node that may join a cluster which produces some of its operands.

    Args:
        graph: the graph of members.
        content: the nodes of the cluster.
        name: the node.
    """

    def __init__(self, graph: _Graph, content: Sequence[str], name: str) -> None:
        self.graph, self.content, self.inside = graph, content, set(content)
        self.name, self.member = name, graph.members[name]
        reads = enumerate(self.member.reads)
        self.from_cluster = [i for i, r in reads if r[0] in self.inside]

    @property
    def is_allowed(self) -> bool:
        """Whether the node may join."""
        return (
            not self._begins_cluster()
            and not any(
                self.graph.specially[node].intersection(self.member.reads) for node in self.content
            )
            and not self._would_be_counted_twice()
            and not self._grows()
            and not self._would_close_cycle()
            and self._accepts_placements()
        )

    def _begins_cluster(self) -> bool:
        """Return whether the op of the node may not follow the first node of the cluster."""
        graph, head = self.graph, self.content[0]
        return (
            self.member.call.target in HEADS
            or (head in graph.from_nothing and self.name not in graph.from_nothing)
            # a recomputation for its gradients would then also need the weights of its losses
            or graph.members[head].call.target is ops.linear_cross_entropy
        )

    def _grows(self) -> bool:
        """Return whether a result is larger than every operand from the cluster."""
        inputs, outputs = self.member.call.inputs, self.member.call.outputs
        largest = max((size_of(inputs[i]) for i in self.from_cluster), default=0)
        return any(size_of(info) > largest for info in outputs)

    def _would_close_cycle(self) -> bool:
        """Return whether the node reads a node outside of the cluster that depends on it."""
        return any(
            r[0] in self.graph.members
            and r[0] not in self.inside
            and _depends(self.graph, r[0], self.inside)
            for r in self.member.reads
        )

    def _would_be_counted_twice(self) -> bool:
        """Return whether kept memory might count twice after the merge."""
        graph, reads = self.graph, [self.member.reads[i] for i in self.from_cluster]
        if not graph.storages.are_full(reads):
            return False
        if graph.storages.is_view(self.member.node):
            return any(
                not graph.storages.is_view(name) or graph.is_kept(name) for name in self.content
            )
        return any(graph.storages.is_view(name) and graph.is_kept(name) for name, _ in reads)

    def _accepts_placements(self) -> bool:
        """Return whether the placements of the cluster's results determine those of the node's
        results, and all of them are accepted."""
        options = self.graph.options[self.name]
        return (
            len({option.inputs for option in options}) == len(options)
            and all(map(self._accepts_all, self.from_cluster))
            and self._accepts_together()
        )

    def _accepts_all(self, operand: int) -> bool:
        """Return whether the node accepts every placement that the producer of an operand can give.
        Partial sums as other operands are excluded, as no collective creates them."""
        producer, result = self.member.reads[operand]
        producible = {option.outputs[result] for option in self.graph.options[producer]}
        return producible <= {option.inputs[operand] for option in self._usable()}

    def _accepts_together(self) -> bool:
        """Return the same as `_accepts_all`, for all operands from the cluster together."""
        reads = [self.member.reads[i] for i in self.from_cluster]
        if len(set(reads)) < 2:
            return True
        options = self.graph.options
        content = ((self.graph.members[name], options[name]) for name in self.content)
        states = joint_options((member.reads, member.makes, of) for member, of in content)
        accepted = {tuple(o.inputs[i] for i in self.from_cluster) for o in self._usable()}
        return {tuple(state[ref] for ref in reads) for state in states} <= accepted

    def _usable(self) -> list[AxisOption]:
        """Return the options in which no operand from elsewhere is a partial sum."""
        others = [i for i in range(len(self.member.reads)) if i not in self.from_cluster]
        options = self.graph.options[self.name]
        return [o for o in options if not any(adds_up(o.inputs[i]) for i in others)]


def _depends(graph: _Graph, name: str, inside: set[str]) -> bool:
    """Return whether `name` depends on the cluster. Nodes before its first node cannot."""
    first = min(graph.position[n] for n in inside)
    frontier, visited = [name], {name}
    while frontier:
        for producer, _ in graph.members[frontier.pop()].reads:
            if producer in inside:
                return True
            if producer not in visited and graph.position.get(producer, -1) > first:
                visited.add(producer)
                frontier.append(producer)
    return False


def _acyclic(graph: _Graph, content: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Split every cluster on a cycle of clusters into its nodes. The merge test leaves few, if
    any."""
    home = {node: root for root, nodes in content.items() for node in nodes}
    links = nx.DiGraph()
    links.add_nodes_from(content)
    for name, member in graph.members.items():
        links.add_edges_from(
            (home[r[0]], home[name])
            for r in member.reads
            if r[0] in home and home[r[0]] != home[name]
        )
    bad = {
        root
        for component in nx.strongly_connected_components(links)
        if len(component) > 1
        for root in component
    }
    if not bad:
        return dict(content)
    split = {root: nodes for root, nodes in content.items() if root not in bad}
    for root in bad:
        # a node with several results and its getitems are one kernel, and stay together
        for node in content[root]:
            target = (
                graph.members[node].reads[0][0]
                if graph.members[node].call.target is operator.getitem
                else node
            )
            split.setdefault(target, []).append(node)
    place = graph.position.__getitem__
    return {
        root: sorted(nodes, key=place)
        for root, nodes in sorted(split.items(), key=lambda item: place(item[0]))
    }


def _cluster(graph: _Graph, names: Iterable[str], outputs: set[Ref]) -> Cluster:
    names = sorted(names, key=graph.position.__getitem__)
    inside = set(names)
    members = tuple(graph.members[n] for n in names)
    operands = dict.fromkeys(r for m in members for r in m.reads if r[0] not in inside)
    results = tuple(
        ref
        for m in members
        for ref in m.makes
        if ref in outputs or any(r not in inside for r in graph.readers.get(ref, []))
    )
    return Cluster(
        members, tuple(operands), results, graph.phase[names[0]], graph.indices[names[0]]
    )
