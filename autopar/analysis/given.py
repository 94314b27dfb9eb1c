"""What each microbatch is given of the whole batch: sums and averages over samples that follow from the call and from buffers alone.

A loss ``Σa / Σf`` is no sum over microbatches of what each makes of its own a and f. It is one of ``Σa_m / F``, with the batch's F = Σf:
labels that are not ignored, weights of classes, a mask's ones. F follows from no parameter, so that it is known before the first microbatch
runs, and an input of each: that of the batch stands where the graph of one microbatch would compute its own, in forward and backward.

Terms so divided are sums over samples. Beside averages, or beside what no sample is part of, they are averages instead: ``M · Σa_m / F``,
of M microbatches, and so is the gradient of Σa_m, which is where backward divides by F, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from autopar.analysis.value_numbers import number_known_values
from autopar.capture.graphs import aten, copied, dtype_of, emit, is_tensor, shape_of, sweep
from autopar.capture.trace import Input, Trace


@dataclass(frozen=True, slots=True)
class Given:
    """A value of the whole batch.

    Attributes:
        node: name of the node of a microbatch's graph in the place of which it stands. path: what the input is called.
        kind: what a microbatch's own is of it, as of `autopar.analysis.microbatch_labels`.
    """

    node: str
    path: str
    kind: Literal["sum", "mean"]


@dataclass(frozen=True, slots=True)
class Counting:
    """What each microbatch makes of its own: the terms of values that all are given.

    Attributes:
        graph: from the buffers, by name, then the inputs, by path, of a microbatch, all whole, to the terms of `given`, as a tuple. Among
            the inputs are values that are given, too, which were counted before.
    """

    graph: fx.Graph
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    given: tuple[Given, ...]


def add_equal_values(part: Trace, given: Sequence[Given]) -> tuple[Given, ...]:
    """Extend `given` to every node that computes an equal value.

    A loss may count its labels once for forward and once more for backward. If only one of the two
    were replaced by the value of the whole batch, the gradients would be wrong by a factor.

    Args:
        part: the trace of one microbatch, which computes its own values.
        given: the values of the whole batch that forward needs.

    Returns:
        One entry for each node with an equal value, in graph order. The reshape of such a node has no
        entry: it reads the value of the batch.
    """
    values, known = number_known_values(part), {g.node: g for g in given}
    kinds = {values[g.node]: g.kind for g in given}
    found = list[Given]()
    for node in part.graph.nodes:
        value = values.get(node.name)
        if value in kinds and not any(values.get(o.name) == value for o in node.all_input_nodes):
            own = Given(node.name, f"{node.meta['key']} of the batch", kinds[value])
            found.append(known.get(node.name, own))
    return tuple(found)


def find_unexplained_sum(whole: Trace, part: Trace, given: Sequence[Given], cut: Collection[str]) -> fx.Node | None:
    """Find a sum over samples in backward that nothing in forward accounts for.

    Backward is the derivative of forward, so replacing a value of forward by that of the whole batch is
    right only if backward reads the same value. A sum over the samples of one microbatch that backward
    computes in another form cannot be told apart from a value that has to be replaced.

    Args:
        whole, part: the traces of the batch and of one microbatch.
        given: the values of the whole batch that forward needs, without those that are equal to them.
        cut: placeholders of the inputs that are cut into microbatches.

    Returns:
        The node of `part` that is read in backward, or None if forward accounts for all of them.
    """
    values = number_known_values(part)
    explained = {values[g.node] for g in given} | _values_of_outputs(part, values)
    replaced = {g.node for g in add_equal_values(part, given)}
    calls = [n for n in whole.graph.nodes if n.op == "call_function" and is_tensor(n)]
    shapes = {n.meta["key"]: shape_of(n) for n in calls}

    def is_sum(node: fx.Node) -> bool:
        # Without a counterpart in the graph of the batch, nothing says that a node is no sum.
        return is_tensor(node) and shapes.get(node.meta["key"], shape_of(node)) == shape_of(node)

    for node in _follow_samples(part, values.keys() - replaced, cut):
        if values[node.name] not in explained and is_sum(node) and any(user.name not in values for user in node.users):
            return node
    return None


def _follow_samples(trace: Trace, among: Collection[str], cut: Collection[str]) -> tuple[fx.Node, ...]:
    """The nodes of `among` that depend on an input that is cut, by way of each other alone, in graph order."""
    follows, found = set(cut), list[fx.Node]()
    for node in trace.graph.nodes:
        if node.name in among and any(operand.name in follows for operand in node.all_input_nodes):
            follows.add(node.name)
            found.append(node)
    return tuple(found)


def _values_of_outputs(trace: Trace, values: Mapping[str, int]) -> set[int]:
    """The numbers of the known values that outputs depend on."""
    stack, seen = [trace.node(o.node) for o in trace.outputs], set[str]()
    while stack:
        node = stack.pop()
        if node.name not in seen:
            seen.add(node.name)
            stack += node.all_input_nodes
    return {values[name] for name in seen if name in values}


def counting(part: Trace, given: Sequence[Given]) -> tuple[Counting, ...]:
    """How the terms of what is given are computed: one after another, since some follow from others.

    Args:
        part: the trace of one microbatch, which computes its own.
    """
    paths, ranks, of = {g.node: g.path for g in given}, dict[str, int](), {g.node: g for g in given}
    for node in part.graph.nodes:
        rank = max((ranks[operand.name] for operand in node.all_input_nodes), default=0)
        ranks[node.name] = rank + (node.name in of)
    rounds = [tuple(g for g in given if ranks[g.node] == rank) for rank in range(1, max(ranks.values()) + 1)]
    return tuple(_counting(part, now, paths) for now in rounds)


def _counting(part: Trace, given: tuple[Given, ...], paths: Mapping[str, str]) -> Counting:
    """Of values that do not follow from each other; `paths` of all."""
    own, wanted = {g.node for g in given}, {g.node for g in given}
    before = {name: path for name, path in paths.items() if name not in own}
    for node in reversed(part.graph.nodes):
        if node.name in wanted and node.name not in before:
            wanted |= {operand.name for operand in node.all_input_nodes}
    buffers = {b.node: b.name for b in part.buffers if b.node in wanted}
    inputs = {i.node: i.path for i in part.inputs if i.node in wanted} | {name: path for name, path in before.items() if name in wanted}
    graph = fx.Graph()
    env = {part.node(name): graph.placeholder(name) for name in (*buffers, *inputs)}
    for node in part.graph.nodes:
        if node.name in wanted and node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[part.node(g.node)] for g in given))
    return Counting(graph, tuple(buffers.values()), tuple(inputs.values()), given)


def with_given(part: Trace, given: Sequence[Given], averages: Collection[str], num: int) -> Trace:
    """The trace of one microbatch that takes what is given of the batch as inputs, and does not compute it.

    Args:
        averages: names of the quotients that are to be averages. num: of microbatches.

    Raises:
        ReadOtherwiseError: as `scaled`.
    """
    graph = copied(part.graph)
    nodes = {node.name: node for node in graph.nodes}
    here = replace(part, graph=graph)
    for name in (*averages, *(scaled(part, given, averages) if averages else ())):
        _multiply(nodes[name], num)
    inputs = list(part.inputs)
    last = [node for node in graph.nodes if node.op == "placeholder"][len(part.parameters) + len(part.buffers) + len(inputs) - 1]
    for g in given:
        node = nodes[g.node]
        with graph.inserting_after(last):
            last = graph.create_node("placeholder", f"{g.node}_of_batch")
        last.meta = {**node.meta, "phase": "forward", "key": f"{node.meta['key']}/of the batch"}
        node.replace_all_uses_with(last)
        inputs.append(Input(g.path, last.name, shape_of(node), dtype_of(node), given=True))
    sweep(graph)
    graph.lint()
    results = next(iter(reversed(graph.nodes))).args[0]
    outputs = tuple(replace(o, node=result.name) for o, result in zip(part.outputs, results, strict=False))
    return replace(here, inputs=tuple(inputs), outputs=outputs)


class ReadOtherwiseError(Exception):
    """What is given is read by more than quotients of sums: the node that does, in ``args``."""


def scaled(part: Trace, given: Sequence[Given], averages: Collection[str]) -> tuple[str, ...]:
    """Names of the nodes of backward that divide by what is given, or by what is made of it: where quotients are averages, their gradients
    are of M times as much.

    Raises:
        ReadOtherwiseError: where anything else reads it, or backward does otherwise than divide.
    """
    fixed, found = {g.node for g in given}, list[str]()
    varies = {p.node for p in part.parameters} | {i.node for i in part.inputs} | {o.tangent for o in part.outputs}
    for node in part.graph.nodes:
        if node.op != "call_function" or node.name in fixed:
            continue
        reads = {operand.name for operand in node.all_input_nodes}
        if reads & varies:
            varies.add(node.name)
            if reads & fixed and node.name not in averages:
                if node.meta["phase"] == "forward" or not divides(node, fixed):
                    raise ReadOtherwiseError(node)
                found.append(node.name)
        elif reads & fixed:
            fixed.add(node.name)
    return tuple(found)


def divides(node: fx.Node, by: Collection[str]) -> bool:
    """Whether a node divides something else by one of these, or multiplies it with one."""
    first, second = (n.name if isinstance(n, fx.Node) else "" for n in (*node.args, None, None)[:2])
    if node.target is aten.mul.Tensor:
        return (first in by) != (second in by)
    return node.target is aten.div.Tensor and second in by and first not in by


def _multiply(node: fx.Node, num: int) -> None:
    """Whatever reads a node reads `num` times as much."""
    with node.graph.inserting_after(node):
        times = emit(node, torch.ops.aten.mul.Tensor, (node, num), shape_of(node), dtype=dtype_of(node))
    times.meta["key"] = f"{node.meta['key']}/of the batch"
    node.replace_all_uses_with(times, delete_user_cb=lambda user: user is not times)
