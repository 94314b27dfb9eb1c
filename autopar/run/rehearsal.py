"""An executor that runs a program's graphs without tensors: what each call does to memory is found out once per kind of call, on fake
tensors, and added up from then on.

A kind of call is a function with its literals and, per operand, shape, strides, dtype and which operands share memory; the equal layers of
a deep model make the same kinds. A call's *effect* is how far live bytes rise above what they were while it runs, the storages that it
leaves, and how its results lie in those or in its operands'. Between graphs tensors are fake ones as with any executor: a graph takes
over the bytes of the operands that nobody else holds, and hands over those of its results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.kernels.collectives import PARTS, Groups, use_groups
from autopar.run.executor import Batch, Executor, Outputs, without_saved
from autopar.run.live import LiveBytes
from autopar.run.program import Program

Seen = Callable[[str, fx.Node, int], None]
"""Called with phase, node, and the peak of live bytes while it ran."""
_MOST_KINDS = 50_000  # remembered; programs of one session have a few hundred each


class Rehearsal(Executor):
    """Runs `program` as an `Executor` does, on fake tensors, and keeps `memory` as that would.

    Args:
        memory: counts live bytes; active while this runs.
        seen: told of every node.
    """

    def __init__(
        self, program: Program, groups: Groups, memory: LiveBytes, *, batch: Batch = "global", outputs: Outputs = "full",
        seen: Seen | None = None,
    ) -> None:  # fmt: skip
        super().__init__(program, groups, batch=batch, outputs=outputs)
        self._memory, self._seen = memory, seen

    def _graph(self, phase: str) -> Callable[[list[Any]], list[Any]]:
        if phase not in self._graphs:
            graph = self._source(phase).graph
            if phase == "inference":
                graph = without_saved(graph, self.program.num_saved)
            self._graphs[phase] = _Run(graph, phase, self.groups, self._memory, self._seen)
        return self._graphs[phase]


class _Storage:
    """Memory of a value in a graph: counted while it is there, by `outer` where a tensor from outside has it."""

    __slots__ = ("holders", "memory", "num_bytes", "outer")

    def __init__(self, num_bytes: int, memory: LiveBytes, outer: Tensor | None = None) -> None:
        self.num_bytes, self.memory, self.outer, self.holders = num_bytes, memory, outer, 0
        if outer is None:
            memory.live_bytes += num_bytes

    def __del__(self) -> None:
        if self.outer is None:
            self.memory.live_bytes -= self.num_bytes

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """A fake tensor with this memory, whose bytes it then counts."""
        if self.outer is None:
            self.memory.live_bytes -= self.num_bytes
            self.outer = _flat(self.num_bytes, dtype)
        return self.outer

    def let_go(self) -> bool:
        """Of what a list alone holds and a call is about to empty: whether the memory is free then."""
        if self.outer is None:
            return True
        key = self.outer.untyped_storage()._cdata
        self.outer, self.num_bytes = None, 0
        return self.memory.mark(key) is None


Lie = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]  # size, stride, offset, dtype


class _Value:
    """A tensor of a graph: how it lies in its storage."""

    __slots__ = ("lie", "storage")

    def __init__(self, storage: _Storage, lie: Lie) -> None:
        self.storage, self.lie = storage, lie
        storage.holders += 1

    def __del__(self) -> None:
        self.storage.holders -= 1


@dataclass(frozen=True, slots=True)
class _Place:
    """A result: in which storage (an operand's, then those that the call leaves), and how it lies there."""

    storage: int
    lie: Lie


@dataclass(frozen=True, slots=True)
class _Effect:
    """What a kind of call does.

    Attributes:
        rise_bytes: of live bytes, at most, above what they were before.
        made: sizes of the storages that it leaves. result: a tree with a place for each tensor.
        emptied: whether it empties a list that it is given.
    """

    rise_bytes: int
    made: tuple[int, ...]
    result: Any
    emptied: bool


_effects: dict[Any, _Effect] = {}


@dataclass(frozen=True, slots=True)
class _Run:
    """One graph, as a function of one list, which it empties."""

    graph: fx.Graph
    phase: str
    groups: Groups
    memory: LiveBytes
    seen: Seen | None

    def __call__(self, operands: list[Any]) -> list[Any]:
        env: dict[fx.Node, Any] = {}
        nodes = list(self.graph.nodes)
        given = (node for node in nodes if node.op == "placeholder")
        env.update(zip(given, _taken_over(operands, self.memory), strict=True))
        last_use = _last_uses(self.graph)
        with use_groups(self.groups):
            for node in nodes:
                if node.op == "call_function":
                    before = self.memory.live_bytes
                    env[node], rise_bytes = self._called(node, env)
                    self._tell(node, before + rise_bytes)
                    for dead in last_use.get(node, ()):
                        del env[dead]
        self._tell(nodes[-1], self.memory.live_bytes)
        values = [env[r] if isinstance(r, fx.Node) else r for r in nodes[-1].args[0]]
        env.clear()
        return _handed_over(values)

    def _tell(self, node: fx.Node, peak_bytes: int) -> None:
        self.memory.peak_bytes = max(self.memory.peak_bytes, peak_bytes)
        if self.seen is not None:
            self.seen(self.phase, node, peak_bytes)

    def _called(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> tuple[Any, int]:
        """The node's value, and how far live bytes rise while it runs."""
        if node.target in PARTS and node.args[1] != "halo" and self.groups[node.args[-1]].size == 1:  # type: ignore[index]
            return _copied(env[node.args[0]]), 0  # type: ignore[index]
        if node.target is operator.getitem:
            return _copied(env[node.args[0]][node.args[1]]), 0  # type: ignore[index]
        call = Operands(env)
        args, kwargs = call.token(node.args), call.token(node.kwargs)
        key = (node.target, args, kwargs, call.sizes(), self.groups)
        effect = _effects.get(key)
        if effect is None:
            if len(_effects) >= _MOST_KINDS:
                _effects.clear()
            effect = _effects[key] = _tried_out(node, call, env, self.memory)
        storages = [*call.storages, *(_Storage(size, self.memory) for size in effect.made)]
        value = _placed(effect.result, storages)
        if effect.emptied:
            for started in call.started:
                started.clear()
        return value, effect.rise_bytes


class Operands:
    """The operands of a call: a hashable token of them, in which storages are numbered as they come."""

    def __init__(self, env: Mapping[fx.Node, Any]) -> None:
        self.env = env
        self.storages: list[_Storage] = []
        self.started: list[list[Any]] = []
        self.num_bytes: list[int] = []
        self.freed: frozenset[int] = frozenset()
        self._numbers: dict[int, int] = {}
        self._in_lists: dict[int, int] = {}  # storage's number → holders in lists that are given

    def token(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            return self._of_value(self.env[x])
        if isinstance(x, list | tuple):
            return tuple(map(self.token, x))
        if isinstance(x, dict):
            return tuple((name, self.token(value)) for name, value in x.items())
        if isinstance(x, slice):
            return "slice", self.token((x.start, x.stop, x.step))
        return type(x), x

    def _of_value(self, value: Any) -> Any:
        if isinstance(value, _Value):
            return self._number(value.storage), value.lie
        if isinstance(value, list):  # of a step that was started
            self.started.append(value)
            for each in value:
                if isinstance(each, _Value):
                    number = self._number(each.storage)
                    self._in_lists[number] = self._in_lists.get(number, 0) + 1
            return "started", tuple(map(self._of_value, value))
        if isinstance(value, tuple):
            return tuple(map(self._of_value, value))
        return type(value), value

    def _number(self, storage: _Storage) -> int:
        number = self._numbers.setdefault(id(storage), len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return number

    def sizes(self) -> tuple[tuple[int, bool], ...]:
        """Per storage its bytes, and whether a call that empties its lists frees it."""
        self.num_bytes = [s.num_bytes for s in self.storages]
        alone = [n for n, held in self._in_lists.items() if self.storages[n].holders == held]
        self.freed = frozenset(n for n in alone if self.storages[n].let_go())
        return tuple((size, number in self.freed) for number, size in enumerate(self.num_bytes))


def _tried_out(node: fx.Node, call: Operands, env: Mapping[fx.Node, Any], outside: LiveBytes) -> _Effect:
    """The effect of a call, run on fake tensors."""
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
        self.made: list[int] = []

    def run(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> _Effect:
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
        return _Effect(rise, tuple(self.made), places, bool(given) and not any(given))

    def _real(self, x: Any) -> Any:
        if isinstance(x, _Value):
            number = self.numbers[id(x.storage)]
            base = self.flat[number]
            if base is None:
                base = self.flat[number] = _flat(self.call.num_bytes[number], x.lie[3])
            return _lying(base, x.lie)
        return type(x)(map(self._real, x)) if isinstance(x, list | tuple) else x

    def _placed(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            key = storage._cdata
            if key not in self.known or self.memory.mark(key) is not self.marks[key]:  # freed, and its address used again
                self.known[key], self.marks[key] = len(self.flat) + len(self.made), self.memory.mark(key)
                self.made.append(storage.nbytes())
            return _Place(self.known[key], _lie(x))
        return type(x)(map(self._placed, x)) if isinstance(x, list | tuple) else x


def _flat(num_bytes: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(num_bytes // dtype.itemsize, dtype=dtype)


def _lying(base: Tensor, lie: Lie) -> Tensor:
    size, stride, offset, dtype = lie
    return (base if base.dtype == dtype else base.view(dtype)).as_strided(size, stride, offset)


def _placed(tree: Any, storages: Sequence[_Storage]) -> Any:
    if isinstance(tree, _Place):
        return _Value(storages[tree.storage], tree.lie)
    return type(tree)(_placed(each, storages) for each in tree) if isinstance(tree, list | tuple) else tree


def _copied(value: Any) -> Any:
    return _Value(value.storage, value.lie) if isinstance(value, _Value) else value


def _taken_over(operands: list[Tensor], memory: LiveBytes) -> list[_Value]:
    """Values that stand for the operands, which are let go when these are."""
    storages: dict[int, _Storage] = {}
    values = []
    for x in operands:
        storage = x.untyped_storage()
        held = storages.setdefault(storage._cdata, _Storage(storage.nbytes(), memory, x))
        values.append(_Value(held, _lie(x)))
    operands.clear()
    return values


def _lie(x: Tensor) -> Lie:
    return tuple(x.shape), tuple(x.stride()), x.storage_offset(), x.dtype


def _handed_over(values: list[Any]) -> list[Any]:
    """Fake tensors that lie as the values do, which are let go."""
    results: list[Any] = []
    for value in values:
        results.append(_lying(value.storage.tensor(value.lie[3]), value.lie) if isinstance(value, _Value) else value)
    return results


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node → the nodes whose values nothing reads after it, as generated code lets go of them."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for operand in node.all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                found.setdefault(node, []).append(operand)
        if not node.users and node.op == "call_function":
            found.setdefault(node, []).append(node)
    return found
