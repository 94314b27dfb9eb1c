"""Score and mask functions of `flex_attention` (``score_mod`` and ``mask_mod``) as text.

The parameters of a function are scalars, identified by name, and *captured* tensors, identified by
number. Its text is JSON with a sequence of calls of functional ATen ops:

    {"does": [["index.Tensor", [{"t": 0}, [{"c": "h"}]], {}], ["add.Tensor", [{"c": "score"}, {"v":
    0}], {}]], "gives": {"v": 1}}

``{"c": name}`` is a scalar, ``{"t": n}`` a captured tensor, ``{"v": n}`` the result of the n-th
call. Thus a function can be stored, compared, and read on another machine, and reading it does not
run code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from autopar.errors import AutoparError

COORDINATES = ("b", "h", "q", "k")
SEEN = (
    '{"does":[["full.default",[[],true],{"dtype":{"dtype":"bool"},"device":{"device":true}}]],'
    '"gives":{"v":0}}'
)
"""Text of the mask function with which every query sees every key."""
INDEX = "index.Tensor"
_CASTS = ("_to_copy.default",)
_DEVICE = {"device": True}
_FLOATING = re.compile(r'{"dtype":"(?:float|bfloat)\d+"}')
_RANDOM = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True, slots=True)
class Function:
    """A parsed text.

    Attributes:
        does: (name of the ATen op, args, kwargs) of each call, with references as in the text.
        gives: reference of the result.
    """

    does: tuple[tuple[str, Any, Any], ...]
    gives: Any


class UnwritableError(AutoparError):
    """Raised if a function cannot be written as text."""


@lru_cache(maxsize=1024)
def read_function(text: str) -> Function:
    """Parse a text.

    Raises:
        UnwritableError: it calls something other than functional ATen ops.
    """
    fields = json.loads(text)
    for name, _, _ in fields["does"]:
        overload_of(name)
    return Function(
        tuple((name, args, kwargs) for name, args, kwargs in fields["does"]), fields["gives"]
    )


def overload_of(name: str) -> torch._ops.OpOverload:
    """Return the ATen op with a name.

    Raises:
        UnwritableError: there is no such op, or it writes into an operand or draws random numbers.
    """
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable or _RANDOM in op.tags:
        message = (
            f"the function calls {name}, which is not an ATen op, writes into an operand or draws"
            " random numbers"
        )
        raise UnwritableError(
            message,
            remedy=(
                "write the function with torch functions that do not write into tensors or draw"
                " random numbers"
            ),
        )
    return op


def write_function(graph: fx.Graph, scalars: Sequence[str], captured: Sequence[int]) -> str:
    """Write a graph of ATen ops on scalars as text.

    Args:
        graph: the graph; its placeholders are the scalars, then the captured tensors.
        scalars: names of the scalars, in order.
        captured: number of the captured tensor of each further placeholder.

    Raises:
        UnwritableError: the graph contains a tensor constant, or calls anything but functional ATen
            ops.
    """
    written: dict[fx.Node, Any] = {}
    does: list[Any] = []
    names: list[Any] = [*({"c": name} for name in scalars), *({"t": number} for number in captured)]
    for node in graph.nodes:
        if node.op == "placeholder":
            written[node] = names.pop(0)
        elif node.op == "call_function" and not _is_unread(node):
            name = _name_of(node.target)
            overload_of(name)
            kwargs = {
                key: _write_value(value, written)
                for key, value in node.kwargs.items()
                if key != "pin_memory"
            }
            does.append(
                [
                    name,
                    _write_value(node.args, written),
                    {key: value for key, value in kwargs.items() if value is not None},
                ]
            )
            written[node] = {"v": len(does) - 1}
        elif node.op == "output":
            return json.dumps(
                {"does": does, "gives": _write_value(node.args[0], written)}, separators=(",", ":")
            )
        elif node.op == "get_attr":
            written[node] = None  # `_write_value` raises an error if it is read
    raise AssertionError("the last node of a graph is its output")


def _is_unread(node: fx.Node) -> bool:
    return not node.users


def _name_of(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return str(target).removeprefix("aten.")
    return str(target)


def _write_value(value: Any, written: Mapping[fx.Node, Any]) -> Any:
    match value:
        case fx.Node():
            if written.get(value) is None:
                message = "the function creates a tensor from constants, or calls another graph"
                raise UnwritableError(
                    message,
                    remedy=(
                        "pass numbers as Python numbers, and create tensors outside the function"
                    ),
                )
            return written[value]
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case torch.device():
            return _DEVICE
        case float() if not math.isfinite(value):
            return {"float": str(value)}
        case bool() | int() | float() | str() | None:
            return value
        case torch.layout() | torch.memory_format():
            return None
        case list() | tuple():
            return [_write_value(each, written) for each in value]
    raise UnwritableError(
        f"the function calls an op with {value!r}",
        remedy="write the function with tensors and numbers only",
    )


def module_of(
    text: str,
    scalars: Sequence[str],
    num_captured: int,
    own: Sequence[int] = (),
    *,
    for_kernels: bool = False,
) -> fx.GraphModule:
    """Return the function that a text describes, with scalars and captured tensors as arguments.

    Args:
        text: the text.
        scalars: names of the scalars, in order; ``own b``, ``own h`` and ``own q`` are coordinates
            relative to the start of a part.
        num_captured: number of captured tensors.
        own: pairs of tensor and dim, flattened: the dims of captured tensors that are split; they
            are indexed relative to the start of the part.
        for_kernels: whether to write indices as ``t[i]``, which torch's compiled kernels require.
    """
    return _module(text, tuple(scalars), num_captured, tuple(own), for_kernels)


@lru_cache(maxsize=1024)
def _module(
    text: str, scalars: tuple[str, ...], num_captured: int, own: tuple[int, ...], for_kernels: bool
) -> fx.GraphModule:
    function, graph = read_function(text), fx.Graph()
    env: dict[tuple[str, Any], Any] = {
        ("c", name): graph.placeholder(name.replace(" ", "_")) for name in scalars
    }
    env |= {("t", number): graph.placeholder(f"t{number}") for number in range(num_captured)}
    parts = set(zip(own[::2], own[1::2], strict=True))
    device = graph.call_function(getattr, (env["c", scalars[0]], "device"))
    for number, (name, args, kwargs) in enumerate(function.does):
        if name == INDEX and parts:
            args = [
                args[0],
                [
                    _local_index(index, args[0], dim, parts, function)
                    for dim, index in enumerate(args[1])
                ],
            ]
        read_args, read_kwargs = (
            _read_value(args, env, device),
            {key: _read_value(value, env, device) for key, value in kwargs.items()},
        )
        if name == INDEX and for_kernels:
            env["v", number] = graph.call_function(
                torch.Tensor.__getitem__, (read_args[0], tuple(read_args[1]))
            )
        else:
            env["v", number] = graph.call_function(overload_of(name), tuple(read_args), read_kwargs)
    graph.output(_read_value(function.gives, env, device))
    if not device.users:
        graph.erase_node(device)
    return fx.GraphModule({}, graph)


def _local_index(
    index: Any, tensor: Any, dim: int, parts: set[tuple[int, int]], function: Function
) -> Any:
    coordinate = coordinate_of(index, function) if (tensor.get("t"), dim) in parts else None
    return index if coordinate is None else {"c": f"own {coordinate}"}


def _read_value(value: Any, env: Mapping[tuple[str, Any], Any], device: fx.Node) -> Any:
    match value:
        case {"c": name}:
            return env["c", name]
        case {"t": number}:
            return env["t", number]
        case {"v": number}:
            return env["v", number]
        case {"dtype": name}:
            return getattr(torch, name)
        case {"float": number}:
            return float(number)
        case {"device": True}:
            return device
        case list():
            return [_read_value(each, env, device) for each in value]
    return value


@lru_cache(maxsize=1024)
def promoted_text(text: str, dtype: torch.dtype) -> str:
    """Return the text of a function with its floating dtypes replaced by `dtype`; return any other
    text unchanged."""
    return _FLOATING.sub(_dtype_text(dtype), text) if text.startswith('{"does":') else text


def _dtype_text(dtype: torch.dtype) -> str:
    return json.dumps({"dtype": str(dtype).removeprefix("torch.")}, separators=(",", ":"))


def references(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the kind and name of each reference in an argument."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from references(item)
    elif isinstance(value, dict):
        ((kind, name),) = value.items()
        if kind in ("c", "t", "v"):
            yield kind, name


def coordinate_of(reference: Any, function: Function) -> str | None:
    """Return the coordinate that a reference refers to, possibly through casts to integers; None
    for other references."""
    match reference:
        case {"c": name} if name in COORDINATES:
            return str(name)
        case {"v": number} if function.does[number][0] in _CASTS:
            kind = function.does[number][2].get("dtype", {}).get("dtype")
            return (
                coordinate_of(function.does[number][1][0], function)
                if kind in ("int32", "int64")
                else None
            )
    return None


def over_all(
    function: Callable[..., torch.Tensor],
    first: Sequence[int | None],
    rest: int,
    dims: Sequence[int] = (0, 1, 2, 3),
) -> Callable[..., torch.Tensor]:
    """Convert a function of scalars to one of scores ``[b, h, q, k]``.

    Args:
        function: the function.
        first: for each of its first arguments, the dim of the four along which it is a vector; -1
            for scores, which have all four; None for a scalar.
        rest: number of further arguments, which are passed unchanged.
        dims: the dims of the result among the four.
    """
    mapped = function
    for dim in reversed(dims):
        in_dims = tuple(0 if place in (dim, -1) else None for place in first) + (None,) * rest
        mapped = torch.vmap(mapped, in_dims=in_dims)
    return mapped


# --------------------------------------------------------------------------------------------------
# Which coordinates and captured tensors score functions read.
#
# Terms. A *coordinate* is ``b``, ``h``, ``q`` or ``k``: the batch entry, query head, query or key
# of a score. A dim of a captured tensor is *indexed by* a coordinate if every use of the tensor is
# an index with this coordinate in this dim. A part of the scores then only needs the corresponding
# part of the tensor, which is indexed relative to its start.


@dataclass(frozen=True, slots=True)
class Reading:
    """The coordinates and captured tensors that functions read.

    Attributes:
        indexed: tensor → the coordinate by which each dim is indexed, or None.
        free: coordinates that are read other than as the index of such a dim.
    """

    indexed: Mapping[int, tuple[str | None, ...]]
    free: frozenset[str]


@lru_cache(maxsize=1024)
def find_reading(texts: tuple[str, ...], ranks: tuple[int, ...]) -> Reading:
    """Return what functions read.

    Args:
        texts: texts of the functions.
        ranks: ranks of the captured tensors.
    """
    uses: dict[int, list[tuple[str | None, ...]]] = {}
    for text in texts:
        function = read_function(text)
        for tensor, places in _uses(function, ranks):
            uses.setdefault(tensor, []).append(places)
    indexed = {
        tensor: tuple(_same(each) for each in zip(*found, strict=True))
        for tensor, found in uses.items()
    }
    free = frozenset(name for text in texts for name in _free(read_function(text), indexed))
    return Reading(indexed, free)


def _same(coordinates: Sequence[str | None]) -> str | None:
    first = coordinates[0]
    return first if all(each == first for each in coordinates) and first != "k" else None


def _uses(function: Function, ranks: Sequence[int]) -> Iterator[tuple[int, tuple[str | None, ...]]]:
    """Yield each use of a captured tensor, and the coordinate by which it indexes each dim."""
    for name, args, kwargs in function.does:
        is_index = name == INDEX and "t" in args[0]
        if is_index:
            number = args[0]["t"]
            places = [coordinate_of(index, function) for index in args[1]]
            yield number, tuple(places + [None] * (ranks[number] - len(places)))
        for kind, number in references(args[1:] if is_index else (*args, *kwargs.values())):
            if kind == "t":
                yield number, (None,) * ranks[number]
    if "t" in function.gives:
        yield function.gives["t"], (None,) * ranks[function.gives["t"]]


def _free(function: Function, indexed: Mapping[int, tuple[str | None, ...]]) -> Iterator[str]:
    """Yield the coordinates that are read other than as the index of a dim in `indexed`; a cast of
    a coordinate does not count as a read."""

    def coordinates_in(reference: Any) -> Iterator[str]:
        """Yield the coordinates that a reference refers to, also through casts."""
        for kind, name in references(reference):
            if kind == "c" and name in COORDINATES:
                yield name
            elif kind == "v" and (coordinate := coordinate_of({"v": name}, function)):
                yield coordinate

    for number, (name, args, kwargs) in enumerate(function.does):
        if coordinate_of({"v": number}, function):
            continue
        if name == INDEX and "t" in args[0]:
            dims = indexed[args[0]["t"]]
            yield from (
                found
                for dim, index in enumerate(args[1])
                if dims[dim] is None
                for found in coordinates_in(index)
            )
        else:
            yield from coordinates_in((*args, *kwargs.values()))
    yield from coordinates_in(function.gives)


def captures(text: str) -> bool:
    """Return whether a function reads a captured tensor."""
    return any(kind == "t" for kind, _ in _all_references(text))


def reads(text: str, coordinate: str) -> bool:
    """Return whether a function depends on a coordinate, including as an index."""
    return ("c", coordinate) in _all_references(text)


def _all_references(text: str) -> set[tuple[str, Any]]:
    function = read_function(text)
    arguments = [value for _, args, kwargs in function.does for value in (*args, *kwargs.values())]
    return set(references([*arguments, function.gives]))
