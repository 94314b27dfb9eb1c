"""Conversion of a `Trace` to JSON data and back.

The graph is a list of nodes: op, name, target by its qualified name, arguments, and ``meta``.
Values of nodes are fake tensors, which are written as shapes, strides, dtypes, devices and shared
storages. Variables that a capture read are identified by the numbers that `autopar.cache.walk`
assigned to them when it hashed the model.

A trace with a part that cannot be written raises `Opaque` and is not cached.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import numpy
import torch
from torch import fx, nn
from torch.utils._pytree import treespec_dumps, treespec_loads

from autopar.cache.walk import Followed, Opaque
from autopar.capture import Trace
from autopar.capture.dynamo.fakes import fake_like, is_fake, new_fake_mode, no_modes
from autopar.capture.hugging_face import register_types
from autopar.capture.module_values import of_the_model
from autopar.capture.outside_values import value_at
from autopar.capture.stamps import FunctionStamp, Trait, renewed
from autopar.capture.trace import (
    Folding,
    Input,
    ModuleAttribute,
    Output,
    OutsideValue,
    Parameter,
    Stamp,
)

_MODULES = ("autopar", "_operator", "math", "torch")  # modules of the functions that nodes call
_META = ("phase", "module", "source", "key", "in_place")
_BY_NAME = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_GROUPS = {"parameters": Parameter, "buffers": Parameter, "inputs": Input, "outputs": Output}
_PLAIN = (type(None), bool, int, str)
_FLOATS: Mapping[type, str] = {float: "float", numpy.float64: "numpy.float64"}


class _Writer:
    """Converts values to JSON data. Each fake tensor and each storage is written once.

    Attributes:
        fakes: the shape, strides, offset, dtype, device and storage number of each fake tensor.
        storages: the size of each storage in bytes.
    """

    def __init__(self, numbers: Mapping[fx.Node, int]) -> None:
        self.fakes: list[Any] = []
        self.storages: list[int] = []
        self._nodes = numbers
        self._fake_numbers: dict[int, int] = {}
        self._storage_numbers: dict[int, int] = {}

    def value(self, value: Any) -> Any:
        """Convert a value to JSON data: a list that begins with its kind, or a plain value.

        Raises:
            Opaque: if the value cannot be converted.
        """
        if type(value) in _PLAIN:
            return value
        if type(value) in _FLOATS:
            return [_FLOATS[type(value)], value.hex()]
        if isinstance(value, fx.Node):
            return ["node", self._nodes[value]]
        if isinstance(value, torch.Tensor):
            return ["fake", self._fake(value)]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        for kind, held in _BY_NAME.items():
            if isinstance(value, held):
                return [kind, str(value).removeprefix("torch.")]
        if isinstance(value, slice):
            return ["slice", *map(self.value, (value.start, value.stop, value.step))]
        return self._container(value)

    def _container(self, value: Any) -> Any:
        if isinstance(value, torch.Size):
            return ["size", *map(int, value)]
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return ["list" if isinstance(value, list) else "tuple", *map(self.value, value)]
        if isinstance(value, dict):
            return ["dict", *([self.value(key), self.value(v)] for key, v in value.items())]
        raise Opaque(f"a graph that contains a {type(value).__name__} cannot be stored")

    def _fake(self, fake: torch.Tensor) -> int:
        if id(fake) in self._fake_numbers:
            return self._fake_numbers[id(fake)]
        if (
            not is_fake(fake)
            or fake.layout is not torch.strided
            or fake.requires_grad
            or fake.is_conj()
            or fake.is_neg()
            or getattr(fake, "constant", None) is not None
        ):
            raise Opaque("a graph that contains a tensor with values cannot be stored")
        storage = fake.untyped_storage()
        number = self._storage_numbers.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage.nbytes())
        look = list(fake.shape), list(fake.stride()), fake.storage_offset()
        dtype = str(fake.dtype).removeprefix("torch.")
        self.fakes.append([*look, dtype, str(fake.device), number])
        return self._fake_numbers.setdefault(id(fake), len(self.fakes) - 1)


def _target(target: Any) -> Any:
    """Return the name of the target of a node.

    Raises:
        Opaque: if the target cannot be found by its name.
    """
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        name = ["op", *target._schema.name.split("::"), target._overloadname]
    else:
        name = [
            "function",
            str(getattr(target, "__module__", "")),
            str(getattr(target, "__qualname__", "")),
        ]
    try:
        found = _find_target(name)
    except (AttributeError, ValueError, ImportError):
        found = None
    if found is not target:
        raise Opaque(f"a graph that calls {target} cannot be stored")
    return name


def _find_target(name: Any) -> Any:
    """Return the target with a name from `_target`.

    Raises:
        ValueError, AttributeError, ImportError: if there is no such target.
    """
    if isinstance(name, str):
        return name
    if name[0] == "op":
        return reduce(getattr, name[1:], torch.ops)
    if name[0] != "function" or name[1].partition(".")[0] not in _MODULES:
        raise ValueError(f"no graph calls {name}")
    return reduce(getattr, name[2].split("."), importlib.import_module(name[1]))


def trace_to_json(trace: Trace, followed: Followed) -> dict[str, Any]:
    """Convert a trace to JSON data.

    Args:
        trace: the trace.
        followed: the objects that the walk over the model and the call has followed.

    Raises:
        Opaque: if a part cannot be converted.
    """
    numbers = {node: number for number, node in enumerate(trace.graph.nodes)}
    writer = _Writer(numbers)
    nodes = [
        [
            node.op,
            node.name,
            _target(node.target),
            writer.value(tuple(node.args)),
            writer.value(dict(node.kwargs)),
            writer.value(dict(node.meta)),
        ]
        for node in trace.graph.nodes
    ]
    if any(node.type is not None for node in trace.graph.nodes):
        raise Opaque("a graph with annotated nodes cannot be stored")
    groups = {
        name: [
            [writer.value(getattr(entry, f.name)) for f in fields(kind)]
            for entry in getattr(trace, name)
        ]
        for name, kind in _GROUPS.items()
    }
    return {
        "nodes": nodes,
        "fakes": writer.fakes,
        "storages": writer.storages,
        **groups,
        **{
            name: writer.value(dict(getattr(trace, name)))
            for name in ("mutated", "constants", "settings")
        },
        "in_spec": _spec(trace.in_spec),
        "out_spec": _spec(trace.out_spec),
        "fingerprint": trace.fingerprint,
        "folding": [list(trace.folding.runs), trace.folding.refusal],
        "precision": writer.value(trace.precision),
        "attributes": [_attribute(each, followed, writer) for each in trace.attributes],
        "code": [list(each) for each in trace.code],
    }


def _spec(spec: Any) -> str:
    try:
        text = treespec_dumps(spec)
        is_same = treespec_loads(text) == spec
    except (NotImplementedError, TypeError, ValueError) as error:
        raise Opaque(f"a structure of inputs or outputs cannot be stored: {error}") from error
    if not is_same:
        raise Opaque("a structure of inputs or outputs cannot be stored")
    return text


def _read_spec(text: str) -> Any:
    """Return the spec of inputs or outputs that `_spec` wrote.

    Raises:
        Opaque: if a type in it is not registered with pytree in this process.
    """
    register_types()  # a process that captured nothing has not registered them
    try:
        return treespec_loads(text)
    except NotImplementedError as error:
        raise Opaque(f"a structure of inputs or outputs cannot be read: {error}") from error


def _attribute(each: Any, followed: Followed, writer: _Writer) -> Any:
    is_stamp = isinstance(getattr(each, "value", None), Stamp)
    if isinstance(each, ModuleAttribute):  # a stamp is created again from the model's tensor
        return ["module", each.path, each.name, None if is_stamp else _stamp(each.value, writer)]
    if not isinstance(each, OutsideValue):
        raise Opaque(f"a capture that depends on a {type(each).__name__} cannot be stored")
    if isinstance(each.holder, str):
        holder: Any = each.holder
    elif id(each.holder) in followed.cells:
        holder = ["cell", list(followed.cells).index(id(each.holder))]
    elif id(each.holder) in followed.namespaces:
        holder = ["namespace", list(followed.namespaces).index(id(each.holder))]
    else:
        raise Opaque(f"the {each.name} cannot be found again")
    if is_stamp:
        raise Opaque(f"the {each.name} is a tensor")
    steps = [[attribute, writer.value(key)] for attribute, key in each.steps]
    return ["outside", each.name, holder, steps, _stamp(each.value, writer)]


def _stamp(value: Any, writer: _Writer) -> Any:
    if isinstance(value, FunctionStamp):  # it is created again from the function
        return ["function"]
    if isinstance(value, Trait):
        return ["trait", value.kind, writer.value(value.of)]
    return writer.value(value)


# --------------------------------------------------------------------------------------------------
# Reading.


class _Reader:
    """Converts the JSON data of `_Writer` to values.

    Args:
        data: the fake tensors and their storages.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.nodes: list[fx.Node] = []
        mode = new_fake_mode()
        with no_modes():  # the dispatch of the fake mode would take ten times as long
            storages = [
                torch.empty(num_bytes, dtype=torch.uint8, device="meta").untyped_storage()
                for num_bytes in data["storages"]
            ]
            self._fakes = [
                fake_like(
                    torch.empty(0, dtype=_dtype(dtype), device="meta").set_(
                        storages[storage], offset, shape, stride
                    ),
                    torch.device(device),
                    mode,
                )
                for shape, stride, offset, dtype, device, storage in data["fakes"]
            ]

    def value(self, data: Any) -> Any:
        """Convert JSON data to the value.

        Raises:
            ValueError, LookupError, TypeError: if the data is malformed.
        """
        if not isinstance(data, list):
            return data
        kind, *rest = data
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](self.value(item) for item in rest)
        if kind == "node":
            return self.nodes[rest[0]]
        if kind == "fake":
            return self._fakes[rest[0]]
        if kind == "dict":
            return {self.value(key): self.value(item) for key, item in rest}
        if kind == "slice":
            return slice(*map(self.value, rest))
        return _READ[kind](rest[0])


def _of_torch(kind: type) -> Any:
    def read(name: str) -> Any:
        found = getattr(torch, name)
        if not isinstance(found, kind):
            raise ValueError(f"torch.{name} is not a {kind.__name__}")
        return found

    return read


_dtype = _of_torch(torch.dtype)
_CONTAINERS: Mapping[str, Any] = {"tuple": tuple, "list": list, "size": torch.Size}
_READ: Mapping[str, Any] = {
    "float": float.fromhex,
    "numpy.float64": lambda text: numpy.float64(float.fromhex(text)),
    "device": torch.device,
    **{kind: _of_torch(held) for kind, held in _BY_NAME.items()},
}


def trace_from_json(data: Mapping[str, Any], model: nn.Module, followed: Followed) -> Trace:
    """Convert the JSON data of `trace_to_json` to the trace.

    Args:
        data: the JSON data.
        model: a model with the same key.
        followed: the objects that the walk over that model and the call has followed.

    Raises:
        ValueError, LookupError, TypeError, AttributeError, ImportError: if the data is malformed.
        Opaque: if a type of the inputs or outputs is not registered with pytree.
    """
    reader, graph = _Reader(data), fx.Graph()
    for op, name, target, args, kwargs, meta in data["nodes"]:
        node = graph.create_node(
            op, _find_target(target), reader.value(args), reader.value(kwargs), name
        )
        node.name, node.meta = name, reader.value(meta)
        reader.nodes.append(node)
    groups: dict[str, Any] = {
        name: tuple(kind(*map(reader.value, entry)) for entry in data[name])
        for name, kind in _GROUPS.items()
    }
    mappings = {name: reader.value(data[name]) for name in ("mutated", "constants", "settings")}
    runs, refusal = data["folding"]
    attributes = tuple(_read_attribute(each, followed, reader) for each in data["attributes"])
    return Trace(
        graph=graph,
        **groups,
        **mappings,
        in_spec=_read_spec(data["in_spec"]),
        out_spec=_read_spec(data["out_spec"]),
        fingerprint=data["fingerprint"],
        folding=Folding(tuple(runs), refusal),
        precision=reader.value(data["precision"]),
        attributes=of_the_model(attributes, model),
        code=tuple((file, name, line) for file, name, line in data["code"]),
    )


def _read_attribute(
    data: Any, followed: Followed, reader: _Reader
) -> ModuleAttribute | OutsideValue:
    if data[0] == "module":
        return ModuleAttribute(data[1], data[2], _read_stamp(data[3], reader))
    _, name, holder, steps, value = data
    if isinstance(holder, list):
        kind, number = holder
        held = followed.cells if kind == "cell" else followed.namespaces
        holder = list(held.values())[number]
    read = tuple((attribute, reader.value(key)) for attribute, key in steps)
    found = OutsideValue(name, holder, read, _read_stamp(value, reader))
    if not isinstance(found.value, FunctionStamp | Trait):
        return found
    try:
        return replace(found, value=renewed(found.value, value_at(holder, read)))
    except (AttributeError, LookupError, TypeError) as error:
        raise Opaque(f"the {name} cannot be found again") from error


def _read_stamp(value: Any, reader: _Reader) -> Any:
    """Return a value that `_stamp` converted. The stamp of a function and the value of a trait are
    not those of this process yet."""
    if isinstance(value, list) and value[0] == "function":
        return FunctionStamp.of(None)
    if isinstance(value, list) and value[0] == "trait":
        return Trait(value[1], reader.value(value[2]), None)
    return reader.value(value)
