"""An executor that runs a program's graphs without tensors: what each call does to memory is found out once per kind of call, on fake
tensors, and added up from then on.

A kind of call is a function with its literals and, per operand, shape, strides, dtype and which operands share memory; the equal layers of
a deep model make the same kinds. Each has its effect (`autopar.run.effects`). Between graphs tensors are fake ones as with any
executor: a graph takes over its operands, and hands over the bytes of its results, but for what forward saves for backward alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, fx

from autopar.collective import HOST_KINDS
from autopar.kernels.collectives import PARTS, Groups, local_length, local_start, use_groups
from autopar.kernels.host import is_on_host
from autopar.request import Batch, Outputs
from autopar.run.effects import Effect, Operands, Place, Storage, Value, lie_of, lying, tried_out
from autopar.run.executor import Executor, without_saved
from autopar.run.live import LiveBytes
from autopar.run.program import Action, Program
from autopar.run.reordered import called, order_of, reads

Seen = Callable[[str, fx.Node, int], None]
"""Called with phase, node, and the peak of live bytes while it ran; of a step that is started early once more as it starts."""
_MOST_KINDS = 50_000  # remembered; programs of one session have a few hundred each
_effects: dict[Any, Effect] = {}


class Rehearsal(Executor):
    """Runs `program` as an `Executor` does, on fake tensors, and keeps `memory` as that would.

    Args:
        memory: counts live bytes; active while this runs.
        seen: told of every node. unread: whether nobody reads the gradients that backward returns: they are there, and no tensors.
        last_queries: whether parts of causal attention's queries are taken to be the last ones, which see the most keys and so need the
            most memory; else they are where `groups` is.
    """

    def __init__(
        self, program: Program, groups: Groups, memory: LiveBytes, *, batch: Batch = "global", outputs: Outputs = "full",
        seen: Seen | None = None, unread: bool = False, last_queries: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(program, groups, batch=batch, outputs=outputs)
        self._memory, self._seen, self._unread, self._last_queries = memory, seen, unread, last_queries

    def _graph(self, phase: str, absent: frozenset[int] = frozenset()) -> Callable[[list[Any]], list[Any]]:
        assert not absent, "what is predicted is a step with all of its outputs"
        phase = "backward" if phase == "first" else phase  # writing a sum holds what adding to it does
        if phase not in self._graphs:
            graph = self._source(phase).graph
            if phase == "inference":
                assert not self.program.orders, "an order keeps what backward needs"
                graph = without_saved(graph, self.program.num_saved)
            order = order_of(self.program, phase) if phase in self.program.orders else [("run", node) for node in graph.nodes]
            num_unread = self._num_unread(phase, graph)
            self._graphs[phase] = _Run(order, phase, self.groups, self._memory, self._seen, num_unread, self._last_queries)
        return self._graphs[phase]

    def _num_unread(self, phase: str, graph: fx.Graph) -> int:
        if phase == "backward" and self._unread:
            return len(graph.output_node().args[0])  # type: ignore[arg-type]
        return self.program.num_saved if phase == "forward" else 0


@dataclass(frozen=True, slots=True)
class _Run:
    """One graph in an order, as a function of one list, which it empties. The last `num_unread` of its results stay values: another graph
    takes them over, or nothing does. Between its start and its finish a step's value is what was started."""

    order: Sequence[Action]
    phase: str
    groups: Groups
    memory: LiveBytes
    seen: Seen | None
    num_unread: int
    last_queries: bool

    def __call__(self, operands: list[Any]) -> list[Any]:
        env: dict[fx.Node, Any] = {}
        given = (node for _, node in self.order if node.op == "placeholder")
        env.update(zip(given, _taken_over(operands, self.memory), strict=True))
        last_use = _last_uses(self.order)
        with use_groups(self.groups):
            for place, (action, node) in enumerate(self.order):
                if node.op == "call_function":
                    before = self.memory.live_bytes
                    env[node], rise_bytes = self._called(node if action == "run" else _Part.of(action, node), env)
                    self._tell(node, before + rise_bytes)
                    for dead in last_use.get(place, ()):
                        del env[dead]
        last = self.order[-1][1]
        self._tell(last, self.memory.live_bytes)
        values = [env[r] if isinstance(r, fx.Node) else r for r in last.args[0]]  # type: ignore[union-attr]
        env.clear()
        unread = [_copied(values.pop()) for _ in range(self.num_unread)]
        return [*_handed_over(values), *reversed(unread)]

    def _tell(self, node: fx.Node, peak_bytes: int) -> None:
        self.memory.peak_bytes = max(self.memory.peak_bytes, peak_bytes)
        if self.seen is not None:
            self.seen(self.phase, node, peak_bytes)

    def _called(self, node: fx.Node | _Part, env: Mapping[fx.Node, Any]) -> tuple[Any, int]:
        """The node's value, and how far live bytes rise while it runs."""
        if node.target in PARTS and node.args[1] not in ("halo", *HOST_KINDS) and self.groups[node.args[-1]].size == 1:  # type: ignore[index]
            return _copied(env[node.args[0]]), 0  # type: ignore[index]
        if node.target is operator.getitem:
            return _copied(env[node.args[0]][node.args[1]]), 0  # type: ignore[index]
        if self.last_queries and node.target is local_start and any(_sees_most_at_last(user, node) for user in node.users):
            return node.args[0] - local_length(*node.args), 0  # type: ignore[operator,arg-type]
        call = Operands(env)
        args, kwargs = call.token(node.args), call.token(node.kwargs)
        key = (node.target, args, kwargs, call.sizes(), self.groups)
        effect = _effects.get(key)
        if effect is None:
            if len(_effects) >= _MOST_KINDS:
                _effects.clear()
            effect = _effects[key] = tried_out(node, call, env, self.memory)
        storages = [*call.storages, *(Storage(size, self.memory, on_host=there) for size, there in effect.made)]
        value = _placed(effect.result, storages)
        if effect.emptied:
            for started in call.started:
                started.clear()
        return value, effect.rise_bytes


class _Part(NamedTuple):
    """The start or the finish of a step, as what it calls; the latter reads the step itself."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    users: Mapping[fx.Node, None]

    @staticmethod
    def of(action: str, step: fx.Node) -> _Part:
        target, settings = called(action, step)
        first = step if action == "finish" else reads(action, step)[0]
        return _Part(target, (first, *settings), step.kwargs, step.users)


def _sees_most_at_last(reader: fx.Node, start: fx.Node) -> bool:
    """Whether it is causal attention of a part of the queries that begins at `start`; of mirrored parts the first rank's sees most."""
    return reader.kwargs.get("q_start") is start and "mirrored_in" not in reader.kwargs


def _placed(tree: Any, storages: Sequence[Storage]) -> Any:
    if isinstance(tree, Place):
        return Value(storages[tree.storage], tree.lie)
    return type(tree)(_placed(each, storages) for each in tree) if isinstance(tree, list | tuple) else tree


def _copied(value: Any) -> Any:
    return Value(value.storage, value.lie) if isinstance(value, Value) else value


def _taken_over(operands: list[Any], memory: LiveBytes) -> list[Any]:
    """Values that stand for the operands, which are let go when these are; what a graph saved is there as such."""
    saved = [x.storage for x in operands if isinstance(x, Value)]
    storages = {held.outer.untyped_storage()._cdata: held for held in saved if held.outer is not None}
    values = list[Any]()
    for x in operands:
        if not isinstance(x, Tensor):
            values.append(x)
            continue
        storage = x.untyped_storage()
        held = storages.setdefault(storage._cdata, Storage(storage.nbytes(), memory, x, on_host=is_on_host(x)))
        values.append(Value(held, lie_of(x)))
    operands.clear()
    return values


def _handed_over(values: list[Any]) -> list[Any]:
    """Fake tensors that lie as the values do, which are let go."""
    results: list[Any] = []
    for value in values:
        results.append(lying(value.storage.tensor(value.lie[3]), value.lie) if isinstance(value, Value) else value)
    return results


def _last_uses(order: Sequence[Action]) -> dict[int, list[fx.Node]]:
    """Place in the order → the nodes whose values nothing reads after it, as generated code lets go of them."""
    seen: set[fx.Node] = set()
    found: dict[int, list[fx.Node]] = {}
    for place in range(len(order) - 1, -1, -1):
        action, node = order[place]
        for operand in reads(action, node):
            if operand not in seen:
                seen.add(operand)
                found.setdefault(place, []).append(operand)
        if action != "start" and not node.users and node.op == "call_function":
            found.setdefault(place, []).append(node)
    return found
