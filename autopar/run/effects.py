"""What one call of a graph does to memory: its *effect*, found out by running it on fake tensors.

A call's operands are *values*, which lie in storages as tensors would; of a call only shapes, strides, dtypes, literals and which operands
share memory matter to its effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture._torch.fakes import fake_like, is_fake, no_modes
from autopar.kernels import host
from autopar.run.live import LiveBytes


class Storage:
    """Memory of a value in a graph: counted while it is there, by `outer` where a tensor from outside has it; not of the host."""

    __slots__ = ("holders", "memory", "num_bytes", "on_host", "outer")

    def __init__(self, num_bytes: int, memory: LiveBytes, outer: Tensor | None = None, *, on_host: bool = False) -> None:
        self.num_bytes, self.memory, self.outer, self.on_host, self.holders = num_bytes, memory, outer, on_host, 0
        if outer is None and not on_host:
            memory.live_bytes += num_bytes

    def __del__(self) -> None:
        if self.outer is None and not self.on_host:
            self.memory.live_bytes -= self.num_bytes

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """A fake tensor with this memory, whose bytes it then counts."""
        if self.outer is None:
            self.memory.live_bytes -= 0 if self.on_host else self.num_bytes
            self.outer = flat(self.num_bytes, dtype, on_host=self.on_host)
        return self.outer

    def let_go(self) -> bool:
        """Of what a list alone holds and a call is about to empty: whether the memory is free then."""
        if self.outer is None:
            return True
        key = self.outer.untyped_storage()._cdata
        self.outer, self.num_bytes = None, 0
        return self.memory.mark(key) is None


_LITERALS = frozenset((int, float, bool, str, type(None)))
Lie = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, bool, bool]  # size, stride, offset, dtype; read conjugated, negated


class Value:
    """A tensor of a graph: how it lies in its storage."""

    __slots__ = ("lie", "storage")

    def __init__(self, storage: Storage, lie: Lie) -> None:
        self.storage, self.lie = storage, lie
        storage.holders += 1

    def __del__(self) -> None:
        self.storage.holders -= 1


@dataclass(frozen=True, slots=True)
class Place:
    """A result: in which storage (an operand's, then those that the call leaves), and how it lies there."""

    storage: int
    lie: Lie


@dataclass(frozen=True, slots=True)
class Effect:
    """What a kind of call does.

    Attributes:
        rise_bytes: of live bytes, at most, above what they were before.
        made: of the storages that it leaves, sizes, and whether they are on the host. result: a tree with a place for each tensor.
        emptied: whether it empties a list that it is given.
    """

    rise_bytes: int
    made: tuple[tuple[int, bool], ...]
    result: Any
    emptied: bool


class Operands:
    """The operands of a call: a hashable token of them, in which storages are numbered as they come."""

    def __init__(self, env: Mapping[fx.Node, Any]) -> None:
        self.env = env
        self.storages: list[Storage] = []
        self.started: list[list[Any]] = []
        self.num_bytes: list[int] = []
        self.freed: frozenset[int] = frozenset()
        self._numbers: dict[int, int] = {}
        self._in_lists: dict[int, int] = {}  # storage's number → holders in lists that are given

    def token(self, x: Any) -> Any:
        kind = type(x)
        if kind in _LITERALS:
            return kind, x
        if isinstance(x, fx.Node):
            return self._of_value(self.env[x])
        if isinstance(x, list | tuple):
            return tuple(map(self.token, x))
        if isinstance(x, dict):
            return tuple((name, self.token(value)) for name, value in x.items())
        if isinstance(x, slice):
            return "slice", self.token((x.start, x.stop, x.step))
        return kind, x

    def _of_value(self, value: Any) -> Any:
        if isinstance(value, Value):
            return self._number(value.storage), value.lie
        if isinstance(value, list):  # of a step that was started
            self.started.append(value)
            for each in value:
                if isinstance(each, Value):
                    number = self._number(each.storage)
                    self._in_lists[number] = self._in_lists.get(number, 0) + 1
            return "started", tuple(map(self._of_value, value))
        if isinstance(value, tuple):
            return tuple(map(self._of_value, value))
        return type(value), value

    def _number(self, storage: Storage) -> int:
        number = self._numbers.setdefault(id(storage), len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return number

    def sizes(self) -> tuple[tuple[int, bool, bool], ...]:
        """Per storage its bytes, whether a call that empties its lists frees it, and whether it is on the host."""
        self.num_bytes = [s.num_bytes for s in self.storages]
        alone = [n for n, held in self._in_lists.items() if self.storages[n].holders == held]
        self.freed = frozenset(n for n in alone if self.storages[n].let_go())
        return tuple((size, n in self.freed, s.on_host) for n, (size, s) in enumerate(zip(self.num_bytes, self.storages, strict=True)))


def tried_out(node: Any, call: Operands, env: Mapping[fx.Node, Any], outside: LiveBytes) -> Effect:
    """The effect of a call, which is a node or looks like one, run on fake tensors."""
    outside.paused = True
    try:
        with LiveBytes() as memory:
            return _Trial(call, memory).run(node, env)
    finally:
        outside.paused = False


class _Trial:
    """A call on fake tensors. No closures: cycles would hold storages longer than generated code does."""

    def __init__(self, call: Operands, memory: LiveBytes) -> None:
        self.call, self.memory = call, memory
        self.flat: list[Tensor | None] = [None] * len(call.storages)
        self.numbers = {id(storage): number for number, storage in enumerate(call.storages)}
        self.known: dict[int, int] = {}  # address of a storage → its number
        self.marks: dict[int, object] = {}
        self.made: list[tuple[int, bool]] = []

    def run(self, node: Any, env: Mapping[fx.Node, Any]) -> Effect:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self._real(env[n]))
        given = [a for a in args if isinstance(a, list)] if self.call.started else []
        addresses = [base.untyped_storage()._cdata for base in self.flat if base is not None]
        self.known = {address: number for number, address in enumerate(addresses)}
        self.marks = {address: self.memory.mark(address) for address in addresses}
        for number in self.call.freed:
            self.flat[number] = None  # the call alone holds it
        self.memory.reset_peak()
        before = self.memory.live_bytes
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        rise = self.memory.peak_bytes - before
        places = self._placed(result)
        return Effect(rise, tuple(self.made), places, bool(given) and not any(given))

    def _real(self, x: Any) -> Any:
        if isinstance(x, Value):
            number = self.numbers[id(x.storage)]
            base = self.flat[number]
            if base is None:
                base = self.flat[number] = flat(self.call.num_bytes[number], x.lie[3], on_host=x.storage.on_host)
            return lying(base, x.lie)
        return type(x)(map(self._real, x)) if isinstance(x, list | tuple) else x

    def _placed(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            key = storage._cdata
            if key not in self.known or self.memory.mark(key) is not self.marks[key]:  # freed, and its address used again
                self.known[key], self.marks[key] = len(self.flat) + len(self.made), self.memory.mark(key)
                self.made.append((storage.nbytes(), host.is_on_host(x)))
            return Place(self.known[key], lie_of(x))
        return type(x)(map(self._placed, x)) if isinstance(x, list | tuple) else x


def lie_of(x: Tensor) -> Lie:
    return tuple(x.shape), tuple(x.stride()), x.storage_offset(), x.dtype, x.is_conj(), x.is_neg()


def flat(num_bytes: int, dtype: torch.dtype, *, on_host: bool = False) -> Tensor:
    make = host.empty if on_host else torch.empty
    return make((num_bytes // dtype.itemsize,), dtype=dtype)


def lying(base: Tensor, lie: Lie) -> Tensor:
    size, stride, offset, dtype, conjugated, negated = lie
    if is_fake(base):  # by hand: the mode's dispatch of what says nothing new would take ten times as long
        with no_modes():
            plain = torch.empty(0, dtype=dtype, device="meta").set_(base.untyped_storage(), offset, size, stride)
            x = fake_like(plain, base.device, base.fake_mode)  # type: ignore[attr-defined]
    else:
        x = (base if base.dtype == dtype else base.view(dtype)).as_strided(size, stride, offset)
    x = x.conj() if conjugated else x
    return torch._neg_view(x) if negated else x
