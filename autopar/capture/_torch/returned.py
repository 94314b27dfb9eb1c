"""What Dynamo's graph returns: the leaves of the model's return value, of which backward goes through some."""

from __future__ import annotations

import builtins
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.outputs import Differentiated, differentiated
from autopar.capture.trees import flatten_with_paths, leaves_of
from autopar.errors import CaptureError


def _knows_builtins(captured: Any) -> None:
    """Dynamo's bytecode may name builtins (`type`), which before torch 2.13 are not among the globals that it runs with."""
    for part in (captured._dynamo_bytecode_flatten, captured._dynamo_bytecode_unflatten):
        part.f_globals = {**vars(builtins), **part.f_globals}


def others_detached(captured: Any, inputs: tuple[Any, ...]) -> tuple[tuple[tuple[str, Any], ...], Any, Differentiated]:
    """Make the Dynamo graph return the flat leaves of the model's return value, detached but for those that backward goes through.

    Copies keep AOTAutograd from treating results as views of each other; cleaning removes them, and what detaches.
    """
    graph: fx.Graph = captured.graph
    output = next(iter(reversed(graph.nodes)))
    results = {id(node.meta["example_value"]): node for node in output.args[0] if isinstance(node, fx.Node)}
    values = tuple(node.meta["example_value"] if isinstance(node, fx.Node) else node for node in output.args[0])
    _knows_builtins(captured)
    flat_inputs = captured._dynamo_bytecode_flatten(*inputs)
    arguments = _read_arguments(graph, len(flat_inputs))
    results.update({id(value): node for value, node in zip(flat_inputs, arguments, strict=True) if id(value) not in results})
    leaves, spec = flatten_with_paths(captured._dynamo_bytecode_unflatten(values, inputs))
    given = {id(leaf) for leaf in leaves_of(inputs)}
    batch = {node for value, node in zip(flat_inputs, arguments, strict=True) if id(value) in given}

    def computed(tensor: torch.Tensor) -> bool:
        node = results.get(id(tensor))
        sources = _sources(node) if node is not None else set()
        return not sources.isdisjoint(batch) and any(isinstance(n.meta.get("example_value"), nn.Parameter) for n in sources)

    found = differentiated(captured._dynamo_bytecode_unflatten(values, inputs), leaves, computed)
    returned: list[Any] = []
    with graph.inserting_before(output):
        for position, (path, leaf) in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                returned.append(None)
                continue
            if id(leaf) not in results:
                raise CaptureError(
                    f"the model returns a tensor at {path!r} that its forward does not compute",
                    remedy="return a copy (`self.name.clone()`), or leave it out and read it of the model",
                )
            node = results[id(leaf)]
            if position not in found.positions:
                node = graph.call_method("detach", (node,))
            returned.append(node if position == found.loss else graph.call_method("clone", (node,)))
    output.args = (tuple(returned),)
    graph._codegen.dynamo_bytecode_unflatten = lambda results, _inputs: results
    return leaves, spec, found


def _read_arguments(graph: fx.Graph, num: int) -> list[fx.Node]:
    """The placeholders of so many inputs, without those of tensors that forward found in a list, as an earlier call left them, and did not
    read: of these Dynamo has no source."""
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    unread = [node for node in arguments if not node.users and getattr(node, "_dynamo_source", None) is None]
    if len(arguments) == num or len(arguments) - len(unread) != num:
        return arguments
    for node in unread:
        graph.erase_node(node)
    return [node for node in arguments if node not in unread]


def _sources(node: fx.Node) -> set[fx.Node]:
    """The placeholders that a node depends on."""
    seen, stack = {node}, [node]
    while stack:
        new = set(stack.pop().all_input_nodes) - seen
        seen |= new
        stack += new
    return {each for each in seen if each.op == "placeholder"}
