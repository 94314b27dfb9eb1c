"""Captures that the processes of one run of the tests share: what one has traced, the others read
from a folder.

`stored(key, make)` is the trace that ``make()`` returns, or one that a process wrote for the same
`key` before. Of several processes that want one at the same time, the first traces and the others
wait for it: tracing waits for nobody. The folder lives as long as the run of the tests, so no
source changes under it.

Variables of closures that forward looked at belong to one process: the others do not watch them.
What else a key or a trace holds and cannot be told from process to process, as a class that is not
found under its name, makes it one that each process traces for itself.
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
from autopar.capture.trace import OutsideValue

FOLDER = "AUTOPAR_TESTS_CAPTURES"  # in the environment, so that started processes know it too
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Untold(Exception):
    """Something that means nothing to another process."""


def stored(key: Any, make: Callable[[], Trace]) -> Trace:
    """The trace of that key. Without a folder, and where it cannot be told to others,
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
            written = dumps(trace)
        except (pickle.PicklingError, TypeError, AttributeError):
            return trace
        path.write_bytes(written)  # nobody reads while the lock is held
        return trace


def _words(value: Any) -> Iterator[str]:
    """`value` in words that are the same in every process, and of no other value.

    Raises:
        Untold: where there are none.
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
    """Where `value` is found in every process that has imported its module."""
    module = value.__module__ or "torch"  # whose own functions name no module
    found: Any = sys.modules.get(module)
    for part in value.__name__.split(".") if module == "torch" else value.__qualname__.split("."):
        found = getattr(found, part, None)
    if (
        found is not value and value not in vars(types).values()
    ):  # as None's type, which builtins names and does not have
        raise Untold(value)
    return f"{module} {value.__qualname__}"


def dumps(trace: Trace) -> bytes:
    """The trace as bytes.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: where it holds what cannot be written.
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
    told = {f.name: getattr(trace, f.name) for f in fields(trace) if f.name != "graph"}
    told["attributes"] = tuple(
        a for a in trace.attributes if not isinstance(a, OutsideValue) or isinstance(a.holder, str)
    )
    out = io.BytesIO()
    _Pickler(out).dump((nodes, told))
    return out.getvalue()


def loads(written: bytes) -> Trace:
    """What was written."""
    nodes, rest = _Unpickler(io.BytesIO(written)).load()
    graph, made = fx.Graph(), list[fx.Node]()
    for op, name, target, operands, kind, meta in nodes:
        args, kwargs = fx.node.map_aggregate(
            operands, lambda x: made[x.number] if isinstance(x, _Operand) else x
        )
        node = graph.create_node(op, target, args, kwargs, name, kind)
        node.name, node.meta = name, meta
        made.append(node)
    return Trace(graph=graph, **rest)


class _Operand:
    """A node, by its position."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Pickler(pickle.Pickler):
    """Ops by their names, fake tensors by how they look and which of them share a mode and a
    storage."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.numbers: dict[int, int] = {}
        self.kept: list[Any] = []  # so that no id is given twice

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

    def persistent_load(self, told: Any) -> Any:
        if told[0] == "op":
            return reduce(getattr, told[1:], torch.ops)
        number, mode, storage, num_bytes, shape, stride, offset, dtype, device = told[1:]
        if number not in self.made:
            if mode not in self.made:
                self.made[mode] = new_fake_mode()
            with no_modes():  # by hand, which takes a tenth of what the mode's own dispatch does
                if storage not in self.made:
                    self.made[storage] = torch.empty(
                        num_bytes, dtype=torch.uint8, device="meta"
                    ).untyped_storage()
                plain = torch.empty(0, dtype=dtype, device="meta").set_(
                    self.made[storage], offset, shape, stride
                )
                self.made[number] = fake_like(plain, device, self.made[mode])
        return self.made[number]
