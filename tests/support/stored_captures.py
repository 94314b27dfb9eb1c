"""Captures that the processes of a test run share through a folder.

`stored(key, make)` returns the trace that ``make()`` returns, or the trace that a process stored
for the same `key`. If several processes need a trace at the same time, the first one traces and the
others wait for it. Tracing itself never waits. The folder exists as long as the test run, during
which the sources do not change.

Functions and variables of closures that forward reads belong to one process and are not watched by
the others. A key or trace that refers to anything else that cannot be identified in another
process, such as a class that is not found by its name, is traced by each process.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autopar.capture import Trace
from autopar.capture.dynamo.fakes import fake_like, is_fake, new_fake_mode, no_modes
from autopar.capture.stamps import FunctionStamp
from autopar.capture.trace import Constant, OutsideValue

FOLDER = "AUTOPAR_TESTS_CAPTURES"  # in the environment, so that started processes inherit it
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Untold(Exception):
    """An object that cannot be identified in another process."""


def stored(key: Any, make: Callable[[], Trace]) -> Trace:
    """Return the trace of a key. Without a folder, or if the trace cannot be stored, return
    ``make()``."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return make()
    try:
        path = Path(folder) / hashlib.sha256("\n".join(_words(key)).encode()).hexdigest()
    except Untold:
        return make()
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return loads(path.read_bytes())
        trace = make()
        try:
            data = dumps(trace)
        except (pickle.PicklingError, TypeError, AttributeError):
            return trace
        path.write_bytes(data)  # no process reads while the lock is held
        return trace


def _words(value: Any) -> Iterator[str]:
    """Return a text that identifies `value` in all processes.

    Raises:
        Untold: there is no such text.
    """
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}"
    elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        yield f"named {_name(value)}"
    elif isinstance(value, types.CodeType):
        if value.co_filename.startswith("<"):
            raise Untold(value)
        yield (
            f"code {value.co_filename!r} {value.co_firstlineno} {value.co_qualname}"
            f" {value.co_code.hex()}"
        )
    elif type(value) is tuple:
        yield f"tuple {len(value)}"
        for item in value:
            yield from _words(item)
    elif type(value) is frozenset:
        yield f"set {len(value)}"
        yield from sorted("\n".join(_words(item)) for item in value)
    else:
        raise Untold(value)


def _name(value: Any) -> str:
    """Return the name by which all processes that have imported its module find `value`."""
    module = value.__module__ or "torch"  # the functions of torch have no module
    module_object: Any = sys.modules.get(module)
    for part in value.__name__.split(".") if module == "torch" else value.__qualname__.split("."):
        module_object = getattr(module_object, part, None)
    if (
        module_object is not value and value not in vars(types).values()
    ):  # for example, the type of None, which is not an attribute of builtins
        raise Untold(value)
    return f"{module} {value.__qualname__}"


def dumps(trace: Trace) -> bytes:
    """Return the trace as bytes.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: the trace contains an object that cannot be
            pickled.
    """
    numbers = {node: number for number, node in enumerate(trace.graph.nodes)}
    nodes = [
        (
            n.op,
            n.name,
            n.target,
            fx.map_arg((n.args, n.kwargs), lambda operand: _Operand(numbers[operand])),
            n.type,
            n.meta,
        )
        for n in trace.graph.nodes
    ]
    values = {f.name: getattr(trace, f.name) for f in fields(trace) if f.name != "graph"}
    values["attributes"] = tuple(a for a in trace.attributes if _is_of_all_processes(a))
    out = io.BytesIO()
    _Pickler(out).dump((nodes, values))
    return out.getvalue()


def _is_of_all_processes(attribute: Constant) -> bool:
    """Return whether other processes can watch a constant. A function is identified by its object,
    and a closure by its cell."""
    if isinstance(attribute, OutsideValue) and not isinstance(attribute.holder, str):
        return False
    return not isinstance(getattr(attribute, "value", None), FunctionStamp)


def loads(data: bytes) -> Trace:
    """Return the trace that `dumps` wrote."""
    nodes, rest = _Unpickler(io.BytesIO(data)).load()
    graph, created = fx.Graph(), list[fx.Node]()
    for op, name, target, operands, kind, meta in nodes:
        args, kwargs = fx.node.map_aggregate(
            operands, lambda x: created[x.number] if isinstance(x, _Operand) else x
        )
        node = graph.create_node(op, target, args, kwargs, name, kind)
        node.name, node.meta = name, meta
        created.append(node)
    return Trace(graph=graph, **rest)


class _Operand:
    """A node, by its position."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Pickler(pickle.Pickler):
    """A pickler that writes ops by their names, and fake tensors by their properties, mode and
    storage."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.numbers: dict[int, int] = {}
        self.kept: list[Any] = []  # keeps objects alive, so that ids are unique

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch._ops.OpOverload):
            return "op", *value._schema.name.split("::"), value._overloadname
        if isinstance(value, torch.Tensor):
            if not is_fake(value) or value.layout is not torch.strided or value.requires_grad:
                raise pickle.PicklingError(f"a tensor that is no plain fake one: {value}")
            storage = value.untyped_storage()
            self.kept.append((value, storage))
            numbers = (
                self._number(id(value)),
                self._number(id(value.fake_mode)),
                self._number(storage._cdata),
            )  # type: ignore[attr-defined]
            look = (
                tuple(value.shape),
                value.stride(),
                value.storage_offset(),
                value.dtype,
                value.device,
            )
            return "fake", *numbers, storage.nbytes(), *look
        if isinstance(value, (fx.Node, fx.Graph)):
            raise pickle.PicklingError("a node outside of its graph")
        return None

    def _number(self, key: int) -> int:
        return self.numbers.setdefault(key, len(self.numbers))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.made: dict[int, Any] = {}

    def persistent_load(self, persistent_id: Any) -> Any:
        if persistent_id[0] == "op":
            return reduce(getattr, persistent_id[1:], torch.ops)
        number, mode, storage, num_bytes, shape, stride, offset, dtype, device = persistent_id[1:]
        if number not in self.made:
            if mode not in self.made:
                self.made[mode] = new_fake_mode()
            with no_modes():  # built directly, which takes a tenth of the time of the dispatch mode
                if storage not in self.made:
                    self.made[storage] = torch.empty(
                        num_bytes, dtype=torch.uint8, device="meta"
                    ).untyped_storage()
                plain = torch.empty(0, dtype=dtype, device="meta").set_(
                    self.made[storage], offset, shape, stride
                )
                self.made[number] = fake_like(plain, device, self.made[mode])
        return self.made[number]
