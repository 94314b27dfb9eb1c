"""Where each node comes from: phase, module path, source line and a stable key."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from torch import fx, nn

from autopar.capture.refusals import user_line

_LEVELS = 3  # of lists and dicts within each other
_ROOT = re.compile(r"^L\['\w+'\]\.?")


def label(graph: fx.Graph, tangents: Collection[fx.Node] = (), elsewhere: Mapping[str, str] = MappingProxyType({})) -> None:
    """Set ``phase``, ``module`` and ``source`` of every node from what Dynamo and AOTAutograd recorded.

    Sums of gradients carry no module; they take that of their latest labelled operand, which is the gradient that joined.
    The backward of a user's autograd function carries no phase; it comes amid the backward, or begins it, with a tangent.

    Args:
        tangents: placeholders.
        elsewhere: paths by which forward reaches a module beside that of its registration → that one (`held_elsewhere`).
    """
    order: dict[fx.Node, int] = {}
    phase = "forward"
    for position, node in enumerate(graph.nodes):
        order[node] = position
        meta = node.meta
        if node.op == "output" or any(operand in tangents for operand in node.all_input_nodes):
            phase = "backward"
        elif "partitioner_tag" in meta:
            phase = "backward" if meta["partitioner_tag"].endswith("backward") else "forward"
        module = _registered(recorded_module(meta), elsewhere)
        source = user_line(meta.get("stack_trace") or "")
        if not _modules(meta) and phase == "backward" and node.op == "call_function":
            sources = [operand for operand in node.all_input_nodes if operand.op == "call_function"]
            nearest = max(sources, key=order.__getitem__, default=None)
            if nearest is not None:
                module, source = nearest.meta["module"], source or nearest.meta["source"]
        node.meta = {"phase": phase, "module": module, "source": source, **({"val": meta["val"]} if "val" in meta else {})}


def recorded_module(meta: dict[str, Any]) -> str:
    """The path of the module that ran a node, by what torch recorded of it; empty of the model itself, or where it did not."""
    stack = _modules(meta)
    return _path(next(reversed(stack.values()))[0]) if stack else ""


def held_elsewhere(model: nn.Module) -> dict[str, str]:
    """Paths of modules in lists and dicts of Python's (``blocks.0``) → the paths under which they are registered."""
    registered = {id(module): path for path, module in model.named_modules()}
    found: dict[str, str] = {}

    def look(value: Any, path: str, depth: int) -> None:
        if isinstance(value, nn.Module) and id(value) in registered:
            found[path] = registered[id(value)]
        elif isinstance(value, (list, tuple, dict)) and depth:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                look(item, f"{path}.{key}", depth - 1)

    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_"):
                look(value, f"{prefix}.{name}".lstrip("."), _LEVELS)
    return found


def _registered(path: str, elsewhere: Mapping[str, str]) -> str:
    prefix = path if elsewhere else ""
    while prefix and prefix not in elsewhere:
        prefix = prefix.rpartition(".")[0]
    return elsewhere[prefix] + path[len(prefix) :] if prefix else path


def _modules(meta: dict[str, Any]) -> Any:
    return meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")


def assign_keys(graph: fx.Graph) -> None:
    """Set ``key`` of every node: ``module/op/phase/ordinal``, the ordinal counting equals in graph order."""
    seen: Counter[str] = Counter()
    for node in graph.nodes:
        stem = f"{node.meta['module']}/{op_name(node)}/{node.meta['phase']}"
        node.meta["key"] = f"{stem}/{seen[stem]}"
        seen[stem] += 1


def op_name(node: fx.Node) -> str:
    """``dot``, ``add.Tensor``, ``silu``, ``placeholder``: the op without its namespace and without ``.default``."""
    if node.op != "call_function":
        return node.op
    if hasattr(node.target, "overloadpacket"):
        return str(node.target).split(".", 1)[1].removesuffix(".default")
    return node.target.__name__


def _path(dynamo_path: str) -> str:
    """``L['self'].model.layers.0`` or ``L['self']._modules['model']`` as the model's own ``model.layers.0``."""
    path = _ROOT.sub("", dynamo_path)
    path = re.sub(r"(?:\._modules)?\['?([^'\]]+)'?\]", r".\1", path)
    return path.lstrip(".")
