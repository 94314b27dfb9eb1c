"""Microbatches: whether a batch may be split into them, and how their outputs and gradients are
combined.

A model may run on parts of its batch one after another if each output is a concatenation, a copy, a
sum or an average of the outputs of microbatches, and if each gradient is a sum. This is inferred
from the joint graph, on an axis in time (`autopar.analysis.microbatch_axis`). Let w = 1 if the loss
is a sum, and w = 1/M if it is an average. Then loss = Σ w·loss_m, and the tangent of microbatch m
is w times the tangent of the loss. Without a loss, the tangents of the outputs are cut or shared as
the outputs are combined.

If the rules cannot show that samples do not depend on each other (tokens sorted by expert), the
user may promise it. Shapes then decide which tensors are parts, and every op that needed the
promise is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from autopar import ops
from autopar.analysis.microbatch_axis import label_joint_graph
from autopar.analysis.microbatch_calls import WHOLE, Label
from autopar.analysis.microbatch_sites import Edge
from autopar.capture.graphs import copy_graph, dtype_of, emit, shape_of, sweep
from autopar.capture.trace import OF_BATCH, Input, Trace
from autopar.core.fx_nodes import copy_node
from autopar.errors import ConstraintError
from autopar.rules import operands_of

# --------------------------------------------------------------------------------------------------
# Correspondence between the graph of one sample and the graph of two samples.
#
# The graph of one sample does not have ops without an effect on it: an ``expand`` to all samples, a
# sum over them, a division by their number, a copy of a contiguous tensor. The keys of later nodes
# are numbered without them. So nodes correspond if they have the same op, module and phase, and if
# their operands correspond, up to missing ops.

aten = torch.ops.aten
_MISSING = frozenset(
    (
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.div.Scalar,
        aten.sum.dim_IntList,
        aten.expand.default,
        aten.slice.Tensor,
    )
)
_MOST_MISSING = 8  # consecutive ops
Path = tuple[Edge, ...]
"""Edges of the graph of two samples, from a reader back to a node that the graph of one sample also
has."""


class Counterparts:
    """A map from the nodes and edges of a graph of two samples to those of a graph of one sample.

    Args:
        two: the trace of two samples.
        one: the trace of one sample.
    """

    def __init__(self, two: Trace, one: Trace) -> None:
        self._node, self._edges = dict[str, str](), dict[Edge, list[Edge]]()
        self._stands_for = dict(zip(_placeholders(one), _placeholders(two), strict=True))
        self._alike: dict[str, list[fx.Node]] = defaultdict(list)
        calls = [node for node in two.graph.nodes if node.op == "call_function"]
        for node in calls:
            self._alike[_kind(node)].append(node)
        self._by_key = {node.meta["key"]: node for node in calls}
        for node in one.graph.nodes:
            if node.op == "call_function":
                self._match(node)
            elif node.op == "output":
                self._add(node, next(iter(reversed(two.graph.nodes))))

    def node(self, name: str) -> str:
        """Return the node of the graph of one sample that corresponds to a node.

        Raises:
            ConstraintError: if there is none.
        """
        if name not in self._node:
            raise _otherwise()
        return self._node[name]

    def edges(self, raised: Mapping[Edge, int]) -> dict[Edge, int]:
        """Map powers of raised operands to the edges of the graph of one sample.

        Raises:
            ConstraintError: if an edge has no counterpart.
        """
        edges: dict[Edge, int] = {}
        for edge, power in raised.items():
            if edge not in self._edges:
                raise _otherwise()
            for sample_edge in self._edges[edge]:
                edges[sample_edge] = edges.get(sample_edge, 0) + power
        return edges

    def _match(self, node: fx.Node) -> None:
        """Find the node that corresponds to a node of the graph of one sample, if there is one."""
        for other in self._candidates(node):
            if self._add(node, other):
                self._stands_for[node.name] = other.name
                self._node.setdefault(other.name, node.name)
                return

    def _candidates(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield nodes of the same op, module and phase, starting with the node of the same key.

        A product with a bias may also correspond to an addition: torch adds the bias within the
        product only if the operand is contiguous.
        """
        same_key = self._by_key.get(node.meta["key"])
        similar = [
            n for n in self._alike[_kind(node)] if n is not same_key and n.target is node.target
        ]
        yield from ([same_key] if same_key is not None and same_key.target is node.target else [])
        yield from similar
        if node.target is ops.dot and len(operands_of(node)) == 3:
            yield from self._alike[_kind(node).replace("/dot/", "/add.Tensor/")]

    def _add(self, node: fx.Node, other: fx.Node) -> bool:
        """Record the edges of a node if it corresponds to another one, and return whether it
        does."""
        reads = list(self._reads(other))
        if node.target is ops.dot and other.target is aten.add.Tensor:
            product = operands_of(other)[0]
            if product.target is not ops.dot or len(operands_of(product)) != 2 or len(reads) != 2:
                return False
            reads = [*self._reads(product), reads[1]]
        operands = operands_of(node)
        if len(operands) != len(reads):
            return False
        pairs = zip(operands, reads, strict=True)
        paths = [
            self._path(edge, found, self._stands_for.get(o.name)) for o, (edge, found) in pairs
        ]
        if any(path is None for path in paths):
            return False
        for index, path in enumerate(paths):
            for edge in path or ():
                self._edges.setdefault(edge, []).append((node.name, index))
        return True

    @staticmethod
    def _reads(node: fx.Node) -> Iterator[tuple[Edge, fx.Node]]:
        for index, operand in enumerate(operands_of(node)):
            yield (node.name, index), operand

    def _path(self, edge: Edge, found: fx.Node, due: str | None) -> Path | None:
        """Return the edges from a node back to the node `due`; None if another path leads there."""
        path = [edge]
        while found.name != due:
            operands: Sequence[fx.Node] = operands_of(found) if found.op == "call_function" else ()
            if found.target not in _MISSING or len(operands) != 1 or len(path) > _MOST_MISSING:
                return None
            path.append((found.name, 0))
            (found,) = operands
        return tuple(path)


def _kind(node: fx.Node) -> str:
    """Return the key of a node without the ordinal among nodes of the same module, op and phase."""
    return str(node.meta["key"]).rpartition("/")[0]


def _placeholders(trace: Trace) -> list[str]:
    return [node.name for node in trace.graph.nodes if node.op == "placeholder"]


def _otherwise() -> ConstraintError:
    return ConstraintError(
        "the loss of one sample is computed differently from that of two",
        remedy="use microbatches of two or more samples",
    )


# --------------------------------------------------------------------------------------------------
# Values of the whole batch that are known before its first microbatch runs.
#
# A loss ``Σa / Σf`` is not a sum over microbatches of ``Σa_m / Σf_m``. It is the sum of ``Σa_m /
# F`` with F = Σf of the batch, such as the number of labels that are not ignored, the weights of
# classes or the ones of a mask. F does not depend on parameters. So the f_m of all microbatches are
# computed first, and F is an input of every microbatch. It replaces the value that the graph of the
# microbatch would compute.


@dataclass(frozen=True, slots=True)
class Given:
    """A value of the whole batch.

    Attributes:
        node: name of the node of a microbatch's graph that it replaces.
        path: path of the input that holds it.
        kind: whether the batch's value is the sum or the average of the microbatches' own.
    """

    node: str
    path: str
    kind: Literal["sum", "mean"]


@dataclass(frozen=True, slots=True)
class Counting:
    """The graph with which each microbatch computes its terms of given values.

    Attributes:
        graph: takes the buffers and the inputs of a microbatch, all replicated, and returns the
            terms of `given` as a tuple.
        buffers: names of the buffers.
        inputs: paths of the inputs. Values that were counted before may be among them.
        given: the values that are counted.
    """

    graph: fx.Graph
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    given: tuple[Given, ...]


def count_in_parts(part: Trace, given: Sequence[Given]) -> tuple[Counting, ...]:
    """Return the graphs that compute the terms of given values, in order, since some values depend
    on others.

    Args:
        part: the trace of one microbatch, which computes its own values.
        given: the values.
    """
    paths, of, ranks = {g.node: g.path for g in given}, {g.node: g for g in given}, dict[str, int]()
    for node in part.graph.nodes:
        rank = max((ranks[operand.name] for operand in node.all_input_nodes), default=0)
        ranks[node.name] = rank + (node.name in of)
    last = max((ranks[g.node] for g in given), default=0)
    rounds = [tuple(g for g in given if ranks[g.node] == rank) for rank in range(1, last + 1)]
    return tuple(_count_together(part, now, paths) for now in rounds)


def _count_together(part: Trace, given: tuple[Given, ...], paths: Mapping[str, str]) -> Counting:
    """Return the graph of values that do not depend on each other. `paths` are those of all
    values."""
    counted_nodes = {g.node for g in given}
    needed, before = (
        set(counted_nodes),
        {name: path for name, path in paths.items() if name not in counted_nodes},
    )
    for node in reversed(part.graph.nodes):
        if node.name in needed and node.name not in before:
            needed |= {operand.name for operand in node.all_input_nodes}
    buffers = {b.node: b.name for b in part.buffers if b.node in needed}
    inputs = {i.node: i.path for i in part.inputs if i.node in needed}
    inputs |= {name: path for name, path in before.items() if name in needed}
    graph = fx.Graph()
    env = {part.node(name): graph.placeholder(name) for name in (*buffers, *inputs)}
    for node in part.graph.nodes:
        if node.name in needed and node not in env:
            env[node] = copy_node(graph, node, env.__getitem__)
    graph.output(tuple(env[part.node(g.node)] for g in given))
    return Counting(graph, tuple(buffers.values()), tuple(inputs.values()), given)


# --------------------------------------------------------------------------------------------------
# The graph of one microbatch, with given values and raised operands.


def raise_operands(part: Trace, raised: Mapping[Edge, int], num: int) -> Trace:
    """Multiply operands of nodes by powers of the number of microbatches.

    Args:
        part: the trace of one microbatch.
        raised: name of a node (``output`` for the results of the graph) and index of an operand →
            power k.
        num: number of microbatches; the operand is multiplied by `num`^k.

    Returns:
        The changed trace, or `part` itself if nothing is raised.
    """
    if not raised:
        return part
    graph = copy_graph(part.graph)
    nodes = {node.name: node for node in graph.nodes}
    readers: dict[tuple[str, fx.Node, int], list[Edge]] = defaultdict(list)
    for (name, index), power in raised.items():
        operand = operands_of(nodes[name])[index]
        readers[_phase(operand, nodes[name]), operand, power].append((name, index))
    order = {node: place for place, node in enumerate(nodes.values())}
    products: dict[tuple[fx.Node, str, int], fx.Node] = {}
    # Forward first: backward reads the products that forward has, since keys are unique.
    for (phase, operand, power), edges in sorted(
        readers.items(), key=lambda item: item[0][0] != "forward"
    ):
        for name, index in sorted(edges, key=lambda edge: order[nodes[edge[0]]]):
            reader = nodes[name]
            product = _power(operand, phase, power, num, products, reader)
            _replace_operand(reader, index, product)
    graph.lint()
    return _with_graph(part, graph)


def _phase(operand: fx.Node, reader: fx.Node) -> str:
    """Return the phase in which an operand is multiplied: that of its reader. The node of results
    has no phase of its own, so that of the operand serves."""
    near = operand if reader.op == "output" else reader
    return str(near.meta["phase"])


def _power(
    operand: fx.Node,
    phase: str,
    power: int,
    num: int,
    products: dict[tuple[fx.Node, str, int], fx.Node],
    reader: fx.Node,
) -> fx.Node:
    """Return the node of the operand times `num`^`power`, in a phase."""
    if power == 0:
        return operand
    known_products = (products.get((operand, each, power)) for each in ("forward", phase))
    raised = next((product for product in known_products if product is not None), None)
    if raised is None:
        below = _power(operand, phase, power - 1, num, products, reader)
        like = below if below.op == "call_function" else reader
        after = operand.meta.get("phase") == phase and operand.op == "call_function"
        graph = operand.graph
        place = graph.inserting_after(below) if after else graph.inserting_before(reader)
        with place:
            times = torch.ops.aten.mul.Tensor
            raised = emit(like, times, (below, num), shape_of(below), dtype=dtype_of(below))
        raised.meta["phase"] = phase
        raised.meta["key"] = f"{below.meta['key']}{OF_BATCH}"
        products[operand, phase, power] = raised
    return raised


def _replace_operand(reader: fx.Node, index: int, product: fx.Node) -> None:
    """Replace the operand of a node with the given index."""
    counted = iter(range(len(operands_of(reader))))

    def replace_counted(operand: fx.Node) -> fx.Node:
        """Return the new operand if this is the operand with the index."""
        return product if next(counted) == index else operand

    arguments: Any = fx.map_arg((reader.args, reader.kwargs), replace_counted)
    reader.args, reader.kwargs = arguments


def take_given(part: Trace, given: Sequence[Given]) -> Trace:
    """Replace given values in a trace by inputs, and remove the nodes that computed them.

    Args:
        part: the trace of one microbatch.
        given: the given values.
    """
    graph = copy_graph(part.graph)
    nodes = {node.name: node for node in graph.nodes}
    inputs = list(part.inputs)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    last = placeholders[len(part.parameters) + len(part.buffers) + len(inputs) - 1]
    for g in given:
        node = nodes[g.node]
        with graph.inserting_after(last):
            last = graph.create_node("placeholder", f"{g.node}_of_batch")
        last.meta = {**node.meta, "phase": "forward", "key": f"{node.meta['key']}{OF_BATCH}"}
        node.replace_all_uses_with(last)
        inputs.append(Input(g.path, last.name, shape_of(node), dtype_of(node), given=True))
    sweep(graph)
    graph.lint()
    return replace(_with_graph(part, graph), inputs=tuple(inputs))


def _with_graph(part: Trace, graph: fx.Graph) -> Trace:
    """Return the trace with another graph and the names of its results."""
    results = next(iter(reversed(graph.nodes))).args[0]
    pairs = zip(part.outputs, results, strict=False)
    return replace(
        part, graph=graph, outputs=tuple(replace(o, node=result.name) for o, result in pairs)
    )


@dataclass(frozen=True, slots=True)
class Microbatching:
    """How a batch is split into microbatches, and how their results are combined.

    Attributes:
        num: number of microbatches.
        inputs: path of each input that is cut → dim along which it is cut.
        outputs: path → label of each output that can be combined, including the loss.
        promised: keys of the ops that need the user's promise that samples are independent.
        given: values of the batch that each microbatch takes as inputs.
        raised: edge of a microbatch's graph → power of `num` by which the operand is raised.
        counting: graphs that compute the given values; set by `ready`.
    """

    num: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, Label]
    promised: tuple[str, ...] = ()
    given: tuple[Given, ...] = ()
    raised: Mapping[Edge, int] = field(default_factory=dict)
    counting: tuple[Counting, ...] = ()


def find_microbatching(
    whole: Trace, part: Trace, num: int, *, independent: bool = False
) -> Microbatching:
    """Return how the results of microbatches are combined into those of the batch.

    Args:
        whole: the trace of the batch.
        part: the trace of one microbatch.
        num: number of microbatches.
        independent: whether the user promises that samples do not depend on each other.

    Raises:
        CoupledError: if the model couples samples (batch normalization, contrastive losses). The
            error names the op.
    """
    if num == 1:
        return Microbatching(1, {}, {o.path: WHOLE for o in whole.outputs})
    labels = label_joint_graph(whole, part, num, independent=independent)
    here = {n.meta["key"]: n.name for n in part.graph.nodes if n.op == "call_function"}
    there = {n.name: n.meta["key"] for n in whole.graph.nodes if n.op == "call_function"}
    names = {name: here[key] for name, key in there.items() if key in here} | {"output": "output"}
    counts = tuple(
        Given(names[name], f"{there[name]} of the batch", "sum" if label.as_term == 0 else "mean")
        for name, label in labels.given.items()
    )
    return Microbatching(
        num,
        {path: label.dim for path, label in labels.inputs.items()},
        labels.outputs,
        labels.promised,
        counts,
        {(names[name], index): power for (name, index), power in labels.raised.items()},
    )


def ready(part: Trace, how: Microbatching) -> tuple[Trace, Microbatching]:
    """Prepare the trace of one microbatch: raise operands and replace given values by inputs.

    Args:
        part: the trace of one microbatch.
        how: how microbatches make up the batch.

    Returns:
        The trace, and `how` with the graphs that compute the given values.
    """
    raised = raise_operands(part, how.raised, how.num)
    if not how.given:
        return raised, how
    return take_given(raised, how.given), replace(how, counting=count_in_parts(raised, how.given))


def for_single_samples(
    like: Microbatching, made_from: Trace, part: Trace, num: int
) -> Microbatching:
    """Return how microbatches of one sample are combined.

    A graph of one sample does not have ops without an effect on it, so it cannot be compared with
    the graph of the batch. But labels do not depend on the number of samples. They are those of
    microbatches of two samples, and only the nodes must be mapped.

    Args:
        like: the analysis of microbatches of two samples.
        made_from: the trace of a microbatch of two samples.
        part: the trace of a microbatch of one sample.
        num: number of microbatches.

    Raises:
        ConstraintError: if the graph of one sample has no counterpart of a node.
    """
    to = Counterparts(made_from, part)
    counts = tuple(replace(g, node=to.node(g.node)) for g in like.given)
    return replace(like, num=num, given=counts, raised=to.edges(like.raised))
