"""Whether a batch may be worked through in microbatches, and how they make the batch's outputs and
gradients.

A model may be run on parts of its batch one after another where each output is a concatenation, a
copy, a sum or an average of what microbatches make, and each gradient is a sum. That is inferred
from the joint graph, on an axis in time (`autopar.analysis.microbatch_axis`). With w = 1 of a loss
that is a sum, 1/M of an average, loss = Σ w·loss_m, and the tangent of microbatch m is w times that
of the loss. Without a loss, the tangents of the batch's outputs are cut, or shared, as the outputs
are put together.

Where the rules cannot see that samples do not depend on each other (tokens sorted by expert), the
user may promise it: then shapes say what is a part, and every op where that was needed is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from autopar.analysis.microbatch_axis import label_joint_graph
from autopar.analysis.microbatch_calls import WHOLE, Label
from autopar.analysis.microbatch_sites import Edge
from autopar.analysis.single_samples import Counterparts
from autopar.capture.graphs import copy_graph, dtype_of, emit, shape_of, sweep
from autopar.capture.trace import Input, Trace
from autopar.rules import operands_of

# --------------------------------------------------------------------------------------------------
# Values of the whole batch that are known before its first microbatch runs, and how they are
# counted.
#
# A loss ``Σa / Σf`` is no sum over microbatches of what each makes of its own a and f. It is one
# of ``Σa_m / F`` with the batch's F = Σf: labels that are not ignored, weights of classes, a
# mask's ones. F follows from no parameter. So each microbatch's f_m are computed first, and F is
# an input of every microbatch, in the place where its graph would compute its own.


@dataclass(frozen=True, slots=True)
class Given:
    """A value of the whole batch.

    Attributes:
        node: name of the node of a microbatch's graph in whose place it is read.
        path: of the input.
        kind: whether the batch's value is the sum or the average of the microbatches' own.
    """

    node: str
    path: str
    kind: Literal["sum", "mean"]


@dataclass(frozen=True, slots=True)
class Counting:
    """What each microbatch makes of its own: the terms of values that all are given.

    Attributes:
        graph: from the buffers, by name, then the inputs, by path, of a microbatch, all whole, to
            the terms of `given`, as a tuple. Values that were counted before may be among the
            inputs.
    """

    graph: fx.Graph
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    given: tuple[Given, ...]


def count_in_parts(part: Trace, given: Sequence[Given]) -> tuple[Counting, ...]:
    """How the terms of what is given are computed: one after another, since some follow from
    others.

    Args:
        part: the trace of one microbatch, which computes its own.
    """
    paths, of, ranks = {g.node: g.path for g in given}, {g.node: g for g in given}, dict[str, int]()
    for node in part.graph.nodes:
        rank = max((ranks[operand.name] for operand in node.all_input_nodes), default=0)
        ranks[node.name] = rank + (node.name in of)
    last = max((ranks[g.node] for g in given), default=0)
    rounds = [tuple(g for g in given if ranks[g.node] == rank) for rank in range(1, last + 1)]
    return tuple(_count_together(part, now, paths) for now in rounds)


def _count_together(part: Trace, given: tuple[Given, ...], paths: Mapping[str, str]) -> Counting:
    """Of values that do not follow from each other; `paths` of all."""
    own = {g.node for g in given}
    wanted, before = set(own), {name: path for name, path in paths.items() if name not in own}
    for node in reversed(part.graph.nodes):
        if node.name in wanted and node.name not in before:
            wanted |= {operand.name for operand in node.all_input_nodes}
    buffers = {b.node: b.name for b in part.buffers if b.node in wanted}
    inputs = {i.node: i.path for i in part.inputs if i.node in wanted}
    inputs |= {name: path for name, path in before.items() if name in wanted}
    graph = fx.Graph()
    env = {part.node(name): graph.placeholder(name) for name in (*buffers, *inputs)}
    for node in part.graph.nodes:
        if node.name in wanted and node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[part.node(g.node)] for g in given))
    return Counting(graph, tuple(buffers.values()), tuple(inputs.values()), given)


# --------------------------------------------------------------------------------------------------
# The graph of one microbatch, with what it is given of the batch and what it reads more of.

OF_BATCH = "of the batch"  # ends keys of nodes that the batch's graph has not


def raise_operands(part: Trace, raised: Mapping[Edge, int], num: int) -> Trace:
    """The trace in which nodes read `num`^k times as much of some operands.

    Args:
        raised: name of a node (``output`` for the graph's results) and which of its operands → k.
    """
    if not raised:
        return part
    graph = copy_graph(part.graph)
    nodes = {node.name: node for node in graph.nodes}
    readers: dict[tuple[fx.Node, int], list[Edge]] = defaultdict(list)
    for (name, index), power in raised.items():
        readers[operands_of(nodes[name])[index], power].append((name, index))
    order = {node: place for place, node in enumerate(nodes.values())}
    products: dict[tuple[fx.Node, str, int], fx.Node] = {}
    for (operand, power), edges in readers.items():
        for name, index in sorted(edges, key=lambda edge: order[nodes[edge[0]]]):
            reader = nodes[name]
            product = _power(operand, _phase(operand, reader), power, num, products, reader)
            _replace_operand(reader, index, product)
    graph.lint()
    return _with_graph(part, graph)


def _phase(operand: fx.Node, reader: fx.Node) -> str:
    phase = reader.meta.get("phase") or operand.meta.get("phase")
    return str(phase)


def _power(
    operand: fx.Node,
    phase: str,
    power: int,
    num: int,
    products: dict[tuple[fx.Node, str, int], fx.Node],
    reader: fx.Node,
) -> fx.Node:
    """The operand times `num`^`power`, in a phase."""
    if power == 0:
        return operand
    found = products.get((operand, phase, power))
    if found is None:
        below = _power(operand, phase, power - 1, num, products, reader)
        like = below if below.op == "call_function" else reader
        after = operand.meta.get("phase") == phase and operand.op == "call_function"
        graph = operand.graph
        place = graph.inserting_after(below) if after else graph.inserting_before(reader)
        with place:
            times = torch.ops.aten.mul.Tensor
            found = emit(like, times, (below, num), shape_of(below), dtype=dtype_of(below))
        found.meta["phase"] = phase
        found.meta["key"] = f"{below.meta['key']}/{OF_BATCH}"
        products[operand, phase, power] = found
    return found


def _replace_operand(reader: fx.Node, index: int, product: fx.Node) -> None:
    """Let a node read another one as its operand of that number."""
    counted = iter(range(len(operands_of(reader))))

    def other(operand: fx.Node) -> fx.Node:
        return product if next(counted) == index else operand

    arguments: Any = fx.map_arg((reader.args, reader.kwargs), other)
    reader.args, reader.kwargs = arguments


def take_given(part: Trace, given: Sequence[Given]) -> Trace:
    """The trace that takes what is given of the batch as inputs, and does not compute it."""
    graph = copy_graph(part.graph)
    nodes = {node.name: node for node in graph.nodes}
    inputs = list(part.inputs)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    last = placeholders[len(part.parameters) + len(part.buffers) + len(inputs) - 1]
    for g in given:
        node = nodes[g.node]
        with graph.inserting_after(last):
            last = graph.create_node("placeholder", f"{g.node}_of_batch")
        last.meta = {**node.meta, "phase": "forward", "key": f"{node.meta['key']}/{OF_BATCH}"}
        node.replace_all_uses_with(last)
        inputs.append(Input(g.path, last.name, shape_of(node), dtype_of(node), given=True))
    sweep(graph)
    graph.lint()
    return replace(_with_graph(part, graph), inputs=tuple(inputs))


def _with_graph(part: Trace, graph: fx.Graph) -> Trace:
    """The trace of another graph, with its results."""
    results = next(iter(reversed(graph.nodes))).args[0]
    pairs = zip(part.outputs, results, strict=False)
    return replace(
        part, graph=graph, outputs=tuple(replace(o, node=result.name) for o, result in pairs)
    )


@dataclass(frozen=True, slots=True)
class Microbatching:
    """How a batch is worked through.

    Attributes:
        num: how many microbatches. inputs: path of each input that is cut → the dim it is cut
            along.
        outputs: path → its label, of all that can be put together; the loss among them, if there
            is one.
        promised: keys of the ops at which only the user's promise says that samples are
            independent.
        given: what each microbatch is given of the batch.
        raised: by which power of `num` operands of nodes of a microbatch's graph are raised.
        counting: how what is given is computed, once `ready` has made the graph of one that takes
            it.
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
    """How `num` microbatches make a batch, from the traces of the whole and of one.

    Args:
        independent: the user promises that samples do not depend on each other.

    Raises:
        CoupledError: where the model couples samples (batch normalization, contrastive losses),
        naming the op.
    """
    if num == 1:
        return Microbatching(1, {}, {o.path: WHOLE for o in whole.outputs})
    found = label_joint_graph(whole, part, num, independent=independent)
    here = {n.meta["key"]: n.name for n in part.graph.nodes if n.op == "call_function"}
    there = {n.name: n.meta["key"] for n in whole.graph.nodes if n.op == "call_function"}
    names = {name: here[key] for name, key in there.items() if key in here} | {"output": "output"}
    given = tuple(
        Given(names[name], f"{there[name]} of the batch", "sum" if label.as_term == 0 else "mean")
        for name, label in found.given.items()
    )
    return Microbatching(
        num,
        {path: label.dim for path, label in found.inputs.items()},
        found.outputs,
        found.promised,
        given,
        {(names[name], index): power for (name, index), power in found.raised.items()},
    )


def ready(part: Trace, how: Microbatching) -> tuple[Trace, Microbatching]:
    """The trace of one microbatch that takes what it is given of the batch, and how that is
    computed.
    """
    raised = raise_operands(part, how.raised, how.num)
    if not how.given:
        return raised, how
    return take_given(raised, how.given), replace(how, counting=count_in_parts(raised, how.given))


def for_single_samples(
    like: Microbatching, made_from: Trace, part: Trace, num: int
) -> Microbatching:
    """How `num` microbatches of one sample make a batch.

    A graph of one sample lacks ops that do nothing to it, and cannot be compared with that of the
    batch. Labels do not depend on how many samples there are, so they are those of two microbatches
    of two samples; only the nodes have to be found anew.

    Args:
        like: of batches of two samples, whose trace is `made_from`. part: the trace of one sample.

    Raises:
        ConstraintError: where the graph of one sample has no such nodes.
    """
    to = Counterparts(made_from, part)
    given = tuple(replace(g, node=to.node(g.node)) for g in like.given)
    return replace(like, num=num, given=given, raised=to.edges(like.raised))
