"""The backward graph of a call of which some outputs had no part in the loss.

A backward graph is linear in its tangents. What follows from absent ones alone is not computed, so that parameters that nothing else
reaches have no gradient, as in the plain model, and derivatives that are infinite there do no harm (0 · ∞ is no number). In a sum the
other term is left. Where an op takes what follows from absent tangents beside what follows from others in any other way, zeros stand in.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.kernels.bucketed import from_bucket, into_bucket
from autopar.run.program import Program, StagedProgram

_aten = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.add.out)


def without(source: fx.Graph, tangents: Collection[str], absent: Collection[str]) -> fx.Graph:
    """A copy that takes the same, of which the results that follow from absent tangents alone are None.

    Args:
        tangents, absent: names of placeholders; of all tangents, and of those whose outputs had no part.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(source, {}))
    found = _Gone.of(graph, tangents, absent)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _SUMS and node not in found.gone:
            _keep_one_term(node, found.gone)
    end = next(iter(reversed(graph.nodes)))
    end.args = (tuple(None if result in found.gone else result for result in end.args[0]),)
    for node in reversed(list(graph.nodes)):  # not by fx's own rule, to which what writes into its operand is never dead
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    return graph


@dataclass(frozen=True, slots=True)
class Unused:
    """What of a pipeline's backward follows from absent tangents alone, so that it is not computed, and not sent.

    Attributes:
        parameters: that have no gradient. tangents: per stage the outputs, crossing ones too, whose tangents are none. gradients: per stage
            what came from the stage before and gets no gradient.
    """

    parameters: frozenset[str]
    tangents: tuple[frozenset[str], ...]
    gradients: tuple[frozenset[str], ...]

    @staticmethod
    def of(program: StagedProgram, absent: Collection[str]) -> Unused:
        """Where the outputs of these paths had no part in the loss."""
        trace = program.trace
        ends = {o.tangent: o.path for o in trace.differentiable}
        found = _Gone.of(trace.graph, ends, [tangent for tangent, path in ends.items() if path in absent])
        names = {node.name for node in found.gone}
        results = next(iter(reversed(trace.graph.nodes))).args[0]
        trained = {p.name: results[p.gradient] for p in trace.parameters if p.gradient is not None}  # type: ignore[index]
        tangents = tuple(frozenset(path for path, name in tangent_names(stage) if name in names) for stage in program.stages)
        arrived = [frozenset(t.name for t in stage.inputs if t.crosses) for stage in program.stages]
        gradients = tuple(here & before for here, before in zip(arrived, (frozenset[str](), *tangents), strict=False))
        return Unused(frozenset(name for name, node in trained.items() if node in found.gone), tangents, gradients)


def tangent_names(program: Program) -> list[tuple[str, str]]:
    """Outputs that have a tangent, with the name that it has in the trace; the backward graph takes them after what is saved."""
    given = [str(node.target) for node in program.backward.graph.nodes if node.op == "placeholder"][program.num_saved :]
    return list(zip((t.name for t in program.outputs if t.has_gradient), given, strict=False))


@dataclass(slots=True)
class _Gone:
    """Nodes by what they follow from.

    Attributes:
        following: from some tangent. gone: from absent tangents alone.
        parts: of a bucket, and what is made of it as a whole, which of its tensors are gone.
    """

    following: set[fx.Node] = field(default_factory=set)
    gone: set[fx.Node] = field(default_factory=set)
    parts: dict[fx.Node, tuple[bool, ...]] = field(default_factory=dict)

    @staticmethod
    def of(graph: fx.Graph, tangents: Collection[str], absent: Collection[str]) -> _Gone:
        found = _Gone()
        for node in graph.nodes:
            if node.op == "placeholder" and node.target in tangents:
                found.following.add(node)
                if node.target in absent:
                    found.gone.add(node)
            elif node.op == "call_function":
                found._follow(node)
        return found

    def _follow(self, node: fx.Node) -> None:
        reads = [operand for operand in node.all_input_nodes if operand in self.following]
        if not reads:
            return
        self.following.add(node)
        if all(operand in self.gone for operand in reads) or self._is_part(node, reads[0]):
            self.gone.add(node)
        elif node.target is into_bucket:
            self.parts[node] = tuple(tensor in self.gone for tensor in node.args[0])  # type: ignore[union-attr]
        elif len(reads) == 1 and reads[0] in self.parts and node.target is not operator.getitem:
            self.parts[node] = self.parts[reads[0]]

    def _is_part(self, node: fx.Node, bucket: fx.Node) -> bool:
        is_taken = node.target is operator.getitem and bucket.target is from_bucket
        return is_taken and bucket in self.parts and self.parts[bucket][int(node.args[1])]  # type: ignore[arg-type]


def _keep_one_term(node: fx.Node, gone: Collection[fx.Node]) -> None:
    """Of a sum of which a term is gone the other, in memory of its own: what comes after may write into it."""
    terms = [term for term in node.args[:2] if isinstance(term, fx.Node)]
    left = [term for term in terms if term not in gone]
    if (len(terms), len(left)) != (2, 1) or node.kwargs.get("alpha", 1) != 1:
        return
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(_aten.clone.default, (left[0],), {"memory_format": torch.contiguous_format})
    copy.meta.update(node.meta)
    node.replace_all_uses_with(copy)
