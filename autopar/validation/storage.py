"""Memory that nodes of an emitted graph share, and the writes into it.

Two nodes share memory if one is a view of the other, returns it, or writes its result into it. A
node may write only into memory that no other value needs later. Values that are read later or
returned need their memory. So do operands of the graph, with two exceptions: the sum that a node
adds to, and a saved value that has no other use.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from autopar.kernels import collectives as steps
from autopar.kernels.collectives import add_to, write_to
from autopar.validation.op_calls import written_operand
from autopar.validation.states import unjustified_error

aten = torch.ops.aten
_MAY_ALIAS = frozenset((aten.reshape.default, aten._reshape_alias.default, aten.contiguous.default))
Owner = tuple[fx.Node, int]
"""A piece of memory: the node that allocated it, and the number of the node's result in it."""


class Memory:
    """The memory that each node of a graph uses.

    Args:
        graph: the emitted graph.
        mesh_shape: sizes of the mesh axes. A communication step along an axis of one device returns
            its operand.
    """

    def __init__(self, graph: fx.Graph, mesh_shape: Sequence[int]) -> None:
        self.mesh_shape = mesh_shape
        self.owners: dict[fx.Node, Owner] = {}
        for node in graph.nodes:
            if node.op != "output":
                self.owners[node] = self._owner(node)

    def _owner(self, node: fx.Node) -> Owner:
        shared = self._shares_with(node)
        return (node, 0) if shared is None else shared

    def _shares_with(self, node: fx.Node) -> Owner | None:
        """Return the memory of the operand that a node's result shares, or None if the result has
        its own."""
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            source, number = node.args
            return self.owners[source] if is_view(source) else (source, int(number))
        written = written_in(node)
        if written is not None:
            return self.owners[written]
        handed_on = node.target in (steps.start, steps.finish) or self._is_of_one_device(node)
        if handed_on or is_view(node):
            first = next((x for x in node.all_input_nodes if x in self.owners), None)
            own_bucket = node.target is steps.start and not self._is_of_one_device(node)
            return None if first is None or own_bucket else self.owners[first]
        return None

    def _is_of_one_device(self, node: fx.Node) -> bool:
        if node.target not in steps.KIND_OF and node.target is not steps.start:
            return False
        last = (node.args[2:] if node.target is steps.start else steps.positional(node))[-1:]
        return (
            bool(last)
            and isinstance(last[0], int)
            and 0 <= last[0] < len(self.mesh_shape)
            and self.mesh_shape[last[0]] == 1
        )


def is_view(node: fx.Node) -> bool:
    """Return whether a node's result may share its operand's memory, by the schema of its op."""
    schema = getattr(node.target, "_schema", None)
    if node.target in _MAY_ALIAS:
        return True
    return (
        schema is not None
        and not schema.is_mutable
        and any(r.alias_info is not None for r in schema.returns)
    )


def written_in(node: fx.Node) -> fx.Node | None:
    """Return the operand into which a node writes, if any."""
    if node.op != "call_function":
        return None
    if node.target in (add_to, write_to):
        return node.args[0]
    return written_operand(node)


def check_writes(
    graph: fx.Graph, phase: str, mesh_shape: Sequence[int], owned: Collection[fx.Node]
) -> Memory:
    """Check every write of a graph.

    Args:
        graph: the emitted graph.
        phase: name of the graph.
        mesh_shape: sizes of the mesh axes.
        owned: placeholders into which the graph may write: sums, and saved values whose memory no
            other value uses.

    Returns:
        The memory of the graph's nodes.

    Raises:
        ValidationError: for the first node that overwrites a value which another node needs.
    """
    memory = Memory(graph, mesh_shape)
    places = {node: place for place, node in enumerate(graph.nodes)}
    sharing: dict[Owner, list[fx.Node]] = {}
    for node, owner in memory.owners.items():
        sharing.setdefault(owner, []).append(node)
    for node in graph.nodes:
        written = written_in(node)
        if written is None:
            continue
        owner = memory.owners[written]
        if owner[0].op == "placeholder" and owner[0] not in owned:
            raise unjustified_error(
                node, phase, f"it writes into {owner[0].name}, which it does not own"
            )
        if _overlaps_itself(written, memory):
            raise unjustified_error(
                node, phase, f"elements of {written.name}, which it writes into, share memory"
            )
        for other in sharing[owner]:
            reader = _read_later(other, node, places)
            if reader is not None:
                raise unjustified_error(
                    node,
                    phase,
                    f"it writes into memory of {other.name} that {reader.name} reads later",
                )
    return memory


def _read_later(value: fx.Node, writer: fx.Node, places: Mapping[fx.Node, int]) -> fx.Node | None:
    """Return a reader of a value that runs after the value's memory was overwritten. Readers of
    values that the writer computes, or that follow from these, do not count."""
    if places[value] >= places[writer]:
        return None
    for user in value.users:
        last = places[user]
        if user.target is steps.start:  # it reads until its finish
            last = max([places[finish] for finish in user.users], default=last)
        if user is not writer and last > places[writer]:
            return user
    return None


def check_no_shared_memory(
    graph: fx.Graph, phase: str, memory: Memory, names: Sequence[str], owned: Collection[fx.Node]
) -> None:
    """Check that results which are written to after the graph has run do not share memory.

    Args:
        graph: the emitted graph.
        phase: name of the graph.
        memory: memory of the graph's nodes.
        names: names of the first results of the graph, which are checked.
        owned: placeholders whose memory only this graph uses.

    Raises:
        ValidationError: for two results that share memory.
    """
    output = next(iter(reversed(graph.nodes)))
    names_by_owner: dict[Owner, str] = {}
    for name, node in zip(names, output.args[0], strict=False):
        owner = memory.owners[node]
        if owner in names_by_owner:
            raise unjustified_error(
                node, phase, f"the gradients of {names_by_owner[owner]!r} and {name!r} share memory"
            )
        if owner[0].op == "placeholder" and owner[0] not in owned:
            raise unjustified_error(
                node, phase, f"the gradient of {name!r} uses memory of {owner[0].name}"
            )
        if _overlaps_itself(node, memory):
            raise unjustified_error(
                node, phase, f"elements of the gradient of {name!r} share memory"
            )
        names_by_owner[owner] = name


def _overlaps_itself(node: fx.Node, memory: Memory) -> bool:
    """Return whether elements of a tensor may share a position in memory."""
    return any(x.target is aten.expand.default for x in _views_from(node, memory))


def _views_from(node: fx.Node, memory: Memory) -> list[fx.Node]:
    """Return the views between the owner of a node's memory and the node."""
    views = []
    while is_view(node) and node.target is not aten.reshape.default:
        views.append(node)
        node = next(x for x in node.all_input_nodes if x in memory.owners)
    return views
