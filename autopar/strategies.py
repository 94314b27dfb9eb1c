"""Rules applied to nodes: the decisions of a trace.

Terms. A *cluster* is a set of nodes that share one decision, with no redistribution inside. A *pattern* is a node key in
which the indices of repeated layers are written ``{0}``, ``{1}``, …; a cluster *class* is all clusters with the same
patterns and the same calls, one decision for all of them. Per-axis options of a cluster are the consistent combinations
of its members' options; strategies are their product over the mesh axes.

When is a node merged into the cluster of a producer? Only where no choice is lost that could pay: on every axis, whatever
placement the producer can give, the node accepts; and what it makes is no larger than what it reads, so that
redistributing its result is never dearer than redistributing its operand.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.capture.trace import Trace
from autopar.layout import Layout, Strategy
from autopar.rules import AxisOption, Call, TensorInfo, axis_options, call_of, operands_of

Ref = tuple[str, int]  # a tensor: node name, result index
_INDEX = re.compile(r"(?<=\.)\d+(?=[./]|$)")


def pattern_of(key: str) -> tuple[str, tuple[int, ...]]:
    """A node key's pattern and the layer indices in it: ``layers.3.mlp/dot/…`` → ``layers.{0}.mlp/dot/…``, (3,)."""
    module, slash, rest = key.partition("/")
    indices = tuple(int(m) for m in _INDEX.findall(module))
    counter = itertools.count()
    escaped = module.replace("{", "{{").replace("}", "}}")
    return _INDEX.sub(lambda _: f"{{{next(counter)}}}", escaped) + slash + rest, indices


@dataclass(frozen=True, slots=True)
class Member:
    """One node of a cluster: its call, and the tensors it reads and makes."""

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
        operands: tensors read from outside, each once. results: tensors read outside.
        indices: the layer indices of this instance.
    """

    members: tuple[Member, ...]
    operands: tuple[Ref, ...]
    results: tuple[Ref, ...]
    phase: str
    indices: tuple[int, ...]

    @property
    def signature(self) -> tuple[object, ...]:
        """What equal instances have in common."""
        local = {ref: i for i, ref in enumerate(self.operands)}
        names = {m.node: i for i, m in enumerate(self.members)}
        reads = tuple(tuple(local.get(r, (names.get(r[0]), r[1])) for r in m.reads) for m in self.members)
        results = tuple((names[n], i) for n, i in self.results)
        calls = tuple((m.pattern, m.call.target, repr(m.call.args), repr(m.call.kwargs), m.call.inputs, m.call.outputs) for m in self.members)
        return (calls, reads, results, len(self.indices))


@dataclass(frozen=True, slots=True)
class ClusterStrategy:
    """A strategy of a cluster: its outer layouts, and every member's own."""

    outer: Strategy
    members: tuple[Strategy, ...]


@dataclass
class _Graph:
    """Working view of the trace's compute nodes."""

    members: dict[str, Member] = field(default_factory=dict)
    phase: dict[str, str] = field(default_factory=dict)
    indices: dict[str, tuple[int, ...]] = field(default_factory=dict)
    readers: dict[Ref, list[str]] = field(default_factory=dict)
    options: dict[str, tuple[AxisOption, ...]] = field(default_factory=dict)


def clusters_of(trace: Trace) -> tuple[Cluster, ...]:
    """Merge the trace's nodes into clusters, in topological order of their first member."""
    graph = _read(trace)
    home = {name: name for name in graph.members}  # node → first node of its cluster
    content = {name: [name] for name in graph.members}
    for name, member in graph.members.items():
        for root in dict.fromkeys(home[r[0]] for r in member.reads if r[0] in home):
            if root != home[name] and _mergeable(graph, content[root], member, name):
                content[root] += content.pop(home[name])
                for node in content[root]:
                    home[node] = root
                break
    content = _acyclic(graph, content)
    outputs = _graph_outputs(trace)
    return tuple(_cluster(graph, names, outputs) for names in content.values())


def _read(trace: Trace) -> _Graph:
    graph = _Graph()
    for node in trace.graph.nodes:
        if node.op != "call_function":
            continue
        call = call_of(node)
        pattern, indices = pattern_of(node.meta["key"])
        reads = tuple((n.name, _result_index(node)) for n in operands_of(node))
        makes = tuple((node.name, i) for i in range(len(call.outputs)))
        graph.members[node.name] = Member(node.name, node.meta["key"], pattern, call, reads, makes)
        graph.phase[node.name], graph.indices[node.name] = node.meta["phase"], indices
        graph.options[node.name] = axis_options(call)
        for ref in reads:
            graph.readers.setdefault(ref, []).append(node.name)
    return graph


def _result_index(node: fx.Node) -> int:
    return int(node.args[1]) if node.target is operator.getitem else 0  # type: ignore[arg-type]


def _graph_outputs(trace: Trace) -> set[Ref]:
    output = next(iter(reversed(trace.graph.nodes)))
    return {(n.name, 0) for n in output.args[0] if isinstance(n, fx.Node)}  # type: ignore[union-attr]


def _size(info: TensorInfo) -> int:
    total = info.dtype.itemsize
    for dim in info.shape:
        total *= dim
    return total


def _mergeable(graph: _Graph, content: Sequence[str], member: Member, name: str) -> bool:
    """Whether `member` may join the cluster `content` that makes one of its operands (see the module docstring)."""
    if graph.phase[name] != graph.phase[content[0]] or graph.indices[name] != graph.indices[content[0]]:
        return False
    inside = set(content)
    if member.call.target is operator.getitem:
        return True
    from_cluster = [i for i, r in enumerate(member.reads) if r[0] in inside]
    largest = max((_size(member.call.inputs[i]) for i in from_cluster), default=0)
    if any(_size(info) > largest for info in member.call.outputs):
        return False
    if any(r[0] in graph.members and r[0] not in inside and _depends(graph, r[0], inside) for r in member.reads):
        return False
    return all(_accepts_all(graph, member, name, i) for i in from_cluster)


def _accepts_all(graph: _Graph, member: Member, name: str, operand: int) -> bool:
    producer, result = member.reads[operand]
    given = {option.outputs[result] for option in graph.options[producer]}
    accepted = {option.inputs[operand] for option in graph.options[name]}
    return given <= accepted


def _depends(graph: _Graph, name: str, inside: set[str]) -> bool:
    """Whether `name` reads, over at most a few nodes, what the cluster makes (longer ways are caught by `_acyclic`)."""
    frontier, seen = [name], {name}
    for _ in range(32):
        if not frontier:
            return False
        node = frontier.pop()
        for ref in graph.members[node].reads:
            if ref[0] in inside:
                return True
            if ref[0] in graph.members and ref[0] not in seen:
                seen.add(ref[0])
                frontier.append(ref[0])
    return False


def _acyclic(graph: _Graph, content: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Split every cluster that lies on a cycle of clusters back into its nodes."""
    import networkx as nx

    home = {node: root for root, nodes in content.items() for node in nodes}
    links = nx.DiGraph()
    links.add_nodes_from(content)
    for name, member in graph.members.items():
        links.add_edges_from((home[r[0]], home[name]) for r in member.reads if r[0] in home and home[r[0]] != home[name])
    bad = {root for component in nx.strongly_connected_components(links) if len(component) > 1 for root in component}
    if not bad:
        return dict(content)
    split = {root: nodes for root, nodes in content.items() if root not in bad}
    for root in bad:
        # a multi-result node and its getitems stay together: they are one kernel
        for node in content[root]:
            target = graph.members[node].reads[0][0] if graph.members[node].call.target is operator.getitem else node
            split.setdefault(target, []).append(node)
    order = {name: i for i, name in enumerate(graph.members)}
    return {root: sorted(nodes, key=order.__getitem__) for root, nodes in sorted(split.items(), key=lambda kv: order[kv[0]])}


def _cluster(graph: _Graph, names: Iterable[str], outputs: set[Ref]) -> Cluster:
    order = {name: i for i, name in enumerate(graph.members)}
    names = sorted(names, key=order.__getitem__)
    inside = set(names)
    members = tuple(graph.members[n] for n in names)
    operands = dict.fromkeys(r for m in members for r in m.reads if r[0] not in inside)
    results = tuple(
        ref for m in members for ref in m.makes if ref in outputs or any(r not in inside for r in graph.readers.get(ref, []))
    )
    return Cluster(members, tuple(operands), results, graph.phase[names[0]], graph.indices[names[0]])


@dataclass(frozen=True, slots=True)
class ClusterClass:
    """All clusters that take one decision, and the strategies they choose from."""

    instances: tuple[Cluster, ...]
    strategies: tuple[ClusterStrategy, ...]

    @property
    def first(self) -> Cluster:
        return self.instances[0]


def classes_of(trace: Trace, mesh_shape: Sequence[int]) -> tuple[ClusterClass, ...]:
    """Clusters of the trace, equal ones folded into classes, with their strategies on a mesh of that shape."""
    clusters = clusters_of(trace)
    groups: dict[tuple[object, ...], list[Cluster]] = {}
    for cluster in clusters:
        groups.setdefault(cluster.signature, []).append(cluster)
    partial = _partial_operands(clusters, groups)
    return tuple(
        ClusterClass(tuple(group), expand(group[0], _joint_options(group[0], partial[signature]), mesh_shape))
        for signature, group in groups.items()
    )


Assignment = dict[Ref, Placement]


def _joint_options(cluster: Cluster, partial: Sequence[set[Placement]]) -> list[Assignment]:
    """Every consistent choice of one option per member on one axis, as tensor → placement.

    `partial` says, per operand, which partial placements some producer can give: others would never be used.
    """
    given = dict(zip(cluster.operands, partial, strict=True))
    found: list[Assignment] = [{}]
    for member in cluster.members:
        options = axis_options(member.call)
        found = [joined for state in found for option in options if (joined := _join(state, member, option, given)) is not None]
    unique = {tuple(sorted((r, str(p)) for r, p in state.items())): state for state in found}
    return list(unique.values())


def _join(state: Assignment, member: Member, option: AxisOption, given: Mapping[Ref, set[Placement]]) -> Assignment | None:
    joined = dict(state)
    for ref, placement in zip(member.reads, option.inputs, strict=True):
        if joined.setdefault(ref, placement) != placement:
            return None
        if isinstance(placement, Partial) and ref in given and placement not in given[ref]:
            return None
    joined.update(zip(member.makes, option.outputs, strict=True))
    return joined


def _partial_operands(
    clusters: Sequence[Cluster], groups: Mapping[tuple[object, ...], Sequence[Cluster]]
) -> dict[tuple[object, ...], list[set[Placement]]]:
    """Per class and operand, the partial placements that a producer of any instance can give on an axis."""
    signature_of = {id(c): s for s, group in groups.items() for c in group}
    can: dict[Ref, set[Placement]] = {}
    result: dict[tuple[object, ...], list[set[Placement]]] = {s: [set() for _ in g[0].operands] for s, g in groups.items()}
    cache: dict[tuple[object, ...], list[set[Placement]]] = {}
    for cluster in clusters:
        signature = signature_of[id(cluster)]
        operands = [can.get(r, set()) for r in cluster.operands]
        for total, new in zip(result[signature], operands, strict=True):
            total |= new
        key = (signature, *(frozenset(map(str, o)) for o in operands))
        if key not in cache:
            options = _joint_options(cluster, operands)
            cache[key] = [{o[r] for o in options if isinstance(o[r], Partial)} for r in cluster.results]
        can.update(zip(cluster.results, cache[key], strict=True))
    return result


def expand(cluster: Cluster, options: Sequence[Assignment], mesh_shape: Sequence[int]) -> tuple[ClusterStrategy, ...]:
    """Strategies over all axes: the product of the options, in every order of the splitters, even splits only."""
    shapes = _shapes(cluster)
    replicated = [o for o in options if all(isinstance(p, Replicate) for p in o.values())]
    per_axis = [options if size > 1 else replicated for size in mesh_shape]
    found: dict[Strategy, ClusterStrategy] = {}
    for chosen in itertools.product(*per_axis):
        for order in _orders(chosen, shapes):
            layouts = {ref: Layout([option[ref] for option in chosen], order) for ref in shapes}
            if all(layout.divides(shapes[ref], mesh_shape) for ref, layout in layouts.items()):
                strategy = _strategy(cluster, layouts)
                found.setdefault(strategy.outer, strategy)
    return tuple(found.values())


def _shapes(cluster: Cluster) -> dict[Ref, tuple[int, ...]]:
    shapes: dict[Ref, tuple[int, ...]] = {}
    for member in cluster.members:
        shapes.update((r, info.shape) for r, info in zip(member.reads, member.call.inputs, strict=True))
        shapes.update((r, info.shape) for r, info in zip(member.makes, member.call.outputs, strict=True))
    return shapes


def _orders(chosen: Sequence[Assignment], shapes: Mapping[Ref, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """All orders of the axes where two of them split one dim of some tensor, else mesh order alone."""
    natural = tuple(range(len(chosen)))
    for ref in shapes:
        dims = [p.dim for option in chosen if isinstance(p := option[ref], Shard)]
        if len(set(dims)) < len(dims):
            return list(itertools.permutations(natural))
    return [natural]


def _strategy(cluster: Cluster, layouts: Mapping[Ref, Layout]) -> ClusterStrategy:
    members = tuple(Strategy(tuple(layouts[r] for r in m.reads), tuple(layouts[r] for r in m.makes)) for m in cluster.members)
    outer = Strategy(tuple(layouts[r] for r in cluster.operands), tuple(layouts[r] for r in cluster.results))
    return ClusterStrategy(outer, members)
