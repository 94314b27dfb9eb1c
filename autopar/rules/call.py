"""The description of one call of an op that rules use, independent of torch.fx.

Terms. An *operand* is a tensor argument of the call. Operands are numbered in order of appearance
in args, then kwargs, with lists flattened; a tensor that is passed twice is two operands. A *slot*
is a parameter of the op that accepts a tensor. An op always has the same slots; the slot of an
optional operand may be empty.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from autopar.errors import Where
from autopar.ops.formats import aten_op_of


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Global shape and dtype of an operand or a result."""

    shape: tuple[int, ...]
    dtype: torch.dtype


NO_TENSOR = TensorInfo((0,), torch.uint8)
"""Placeholder of a result that is None (of an op with an output mask), so that the numbers of the
other results do not change."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Placeholder of the operand with this number in args and kwargs."""

    index: int


@dataclass(frozen=True)
class Call:
    """One call of an op.

    Attributes:
        target: the op: a torch OpOverload, a function of `autopar.ops`, or `operator.getitem`.
        args: positional arguments as in the graph, with tensors replaced by `Operand` and lists by
            tuples.
        kwargs: keyword arguments, likewise.
        inputs: the operands, in order.
        outputs: the results; `NO_TENSOR` for a result that is None.
        where: location in the user's model, for errors and reports.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    where: Where = field(default_factory=Where)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Everything that rules depend on; equal calls of repeated layers have equal keys.

        The number of a random draw (`draw`, see `autopar.ops.random`) is omitted: it differs
        between layers and does not affect rules.
        """
        settings = tuple(sorted(item for item in self.kwargs.items() if item[0] != "draw"))
        return self.target, self.args, settings, self.inputs, self.outputs

    @cached_property
    def keyed(self) -> KeyedCall:
        """The call as a key for caches."""
        return KeyedCall(self)


class KeyedCall:
    """A call that is compared and hashed by its `key`, for caches."""

    __slots__ = ("_hash", "_key", "call")

    def __init__(self, call: Call) -> None:
        self.call, self._key = call, call.key
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyedCall) and self._key == other._key


def _collect(value: Any, is_tensor: Callable[[Any], bool], found: list[Any]) -> Any:
    """Return `value` with tensors replaced by `Operand` objects and every NaN by `math.nan`, and
    append the tensors to `found`."""
    if is_tensor(value):
        found.append(value)
        return Operand(len(found) - 1)
    if isinstance(value, list | tuple):
        return tuple(_collect(v, is_tensor, found) for v in value)
    if isinstance(value, float) and math.isnan(value):
        return math.nan  # the same object, so that keys with NaN are equal
    return value


def _info(value: Any) -> TensorInfo:
    return NO_TENSOR if value is None else TensorInfo(tuple(map(int, value.shape)), value.dtype)


def _infos(result: Any) -> tuple[TensorInfo, ...]:
    if isinstance(result, list | tuple):
        return tuple(map(_info, result))
    return (_info(result),) if isinstance(result, torch.Tensor) else ()


def call_on(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> tuple[Call, list[torch.Tensor]]:
    """Describe a call with real tensors.

    Args:
        target: the op.
        args: its positional arguments.
        kwargs: its keyword arguments.
        result: its result.

    Returns:
        The call, and its operands in order.
    """
    tensors: list[torch.Tensor] = []
    new_args = tuple(_collect(a, lambda v: isinstance(v, torch.Tensor), tensors) for a in args)
    new_kwargs = {
        k: _collect(v, lambda v: isinstance(v, torch.Tensor), tensors) for k, v in kwargs.items()
    }
    return Call(
        target, new_args, MappingProxyType(new_kwargs), tuple(map(_info, tensors)), _infos(result)
    ), tensors


def _is_tensor_node(value: Any) -> bool:
    return isinstance(value, fx.Node)


def operands_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the operand nodes of `node`, in the order of `Call.inputs`; the operand of a getitem
    is the node with several results."""
    operands: list[fx.Node] = []
    for value in (*node.args, *node.kwargs.values()):
        _collect(value, _is_tensor_node, operands)
    return tuple(operands)


def op_name(target: Any) -> str:
    """Return the name of an op for messages, such as ``aten.mm.default`` or ``ops.dot``."""
    target = aten_op_of(target)
    if getattr(target, "_schema", None) is not None or not hasattr(target, "__name__"):
        return str(target)
    module = str(target.__module__).removeprefix("autopar.").removeprefix("_").split(".")[0]
    return f"{module}.{target.__name__}"


def where_of(node: fx.Node) -> Where:
    """Return the op, module and source line of a node for errors."""
    return Where(op_name(node.target), node.meta.get("module", ""), node.meta.get("source", ""))


# A search needs the calls of a trace many times: for clusters, named plans and each emitted plan.
# Nodes of traces do not change.
_calls: WeakKeyDictionary[fx.Node, Call] = WeakKeyDictionary()


def call_of(node: fx.Node) -> Call:
    """Return the call of a node. A getitem has one operand: the result that it selects.

    Args:
        node: a call in a graph that no longer changes; ``meta["val"]`` of the node and its operands
            must be set.
    """
    call = _calls.get(node)
    if call is None:
        call = _calls[node] = _describe(node)
    return call


def _describe(node: fx.Node) -> Call:
    assert node.op == "call_function" and callable(node.target), (
        f"node {node.name} is a {node.op}, not a call"
    )
    operands: list[fx.Node] = []
    args = tuple(_collect(a, _is_tensor_node, operands) for a in node.args)
    kwargs = {k: _collect(v, _is_tensor_node, operands) for k, v in node.kwargs.items()}
    inputs = [n.meta["val"] for n in operands]
    if node.target is operator.getitem:
        inputs = [inputs[0][args[1]]]
    return Call(
        node.target,
        args,
        MappingProxyType(kwargs),
        tuple(map(_info, inputs)),
        _infos(node.meta["val"]),
        where_of(node),
    )


def takes_tensor(type_name: str) -> bool:
    """Return whether a parameter with this type, as written in a schema, accepts a single
    tensor."""
    return type_name in ("Tensor", "Optional[Tensor]")


@lru_cache(maxsize=1024)
def _parameters(target: Callable[..., Any]) -> tuple[tuple[str, bool], ...]:
    """Return (name, whether it accepts a single tensor) of every parameter, in order."""
    schema = getattr(aten_op_of(target), "_schema", None)
    if schema is not None:
        return tuple((a.name, takes_tensor(str(a.type))) for a in schema.arguments)
    if target is operator.getitem:
        return (("a", True), ("b", False))
    return tuple((name, True) for name in inspect.signature(target).parameters)


def argument(call: Call, name: str, default: Any = None) -> Any:
    """Return an argument of a call by the name of its parameter.

    Args:
        call: the call.
        name: name of the parameter.
        default: the value if the argument was not passed.
    """
    for position, (parameter, _) in enumerate(_parameters(call.target)):
        if parameter == name and position < len(call.args):
            return call.args[position]
    return call.kwargs.get(name, default)


def slots(call: Call) -> tuple[int | None, ...]:
    """Return the operand number of each slot; None for slots without a tensor."""
    values = [
        argument(call, name) for name, takes_tensor in _parameters(call.target) if takes_tensor
    ]
    return tuple(v.index if isinstance(v, Operand) else None for v in values)


def replace_arguments(
    call: Call, changes: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs with new values for the named parameters."""
    names = [name for name, _ in _parameters(call.target)]
    args, kwargs = list(call.args), dict(call.kwargs)
    for name, value in changes.items():
        position = names.index(name)
        if position < len(args):
            args[position] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs
