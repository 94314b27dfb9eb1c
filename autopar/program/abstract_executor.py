"""Count the bytes of live tensors, real or fake.

`LiveBytes` counts storages. A storage counts from the op that first returns it until it is freed;
views share their storage. Scratch memory of kernels, memory cached by the allocator, and host
memory (`autopar.kernels.host`) do not count. `Rehearsal` runs a program's graphs without tensors
and counts the same bytes.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.core.collective import HOST_KINDS
from autopar.kernels import bound_ops, host
from autopar.kernels.bind import is_last_read
from autopar.kernels.collectives import (
    PARTS,
    Groups,
    all_reduce,
    local_length,
    local_start,
    positional,
    use_groups,
)
from autopar.kernels.host import is_on_host
from autopar.program.executor import Executor, without_saved
from autopar.program.program import Action, StageProgram
from autopar.program.reorder import call_of_action, order_of, reads
from autopar.program.strided_views import MOST_KINDS, StridedView, as_view, flat, view_of
from autopar.request import Batch, Outputs


class LiveBytes(TorchDispatchMode):
    """A mode that counts the bytes of live tensor storages: those that are created while it is
    active, and those that are registered.

    Attributes:
        live_bytes: the current number of bytes.
        peak_bytes: the largest number of bytes since `reset_peak`.
        paused: whether new storages are ignored.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.paused = False
        self._known: dict[int, weakref.finalize] = {}

    def register(self, tensors: Iterable[Any]) -> None:
        """Count existing tensors, such as parameters, buffers and the batch. Other objects are
        ignored."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._count_storage(tensor)

    def reset_peak(self) -> None:
        """Set the peak to the current number of bytes."""
        self.peak_bytes = self.live_bytes

    def mark(self, key: int) -> object:
        """Return an object that identifies the storage at an address while the storage lives; None
        if the storage is not counted."""
        return self._known.get(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its ops on local tensors are dispatched to this mode
        result = func(*args, **(kwargs or {}))
        tensors = (
            [result]
            if isinstance(result, Tensor)
            else [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        )
        if host.is_used() and host.follows(
            [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        ):
            for leaf in tensors:
                host.put_on_host(leaf)
        for leaf in tensors if not self.paused else ():
            self._count_storage(leaf)
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for finalizer in self._known.values():
            finalizer.detach()
        self._known.clear()

    def _count_storage(self, tensor: Tensor) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known and not host.is_on_host(local):
            self._known[key] = weakref.finalize(storage, self._free, key, num_bytes)
            self.live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, key: int, num_bytes: int) -> None:
        if self._known.pop(key, None) is not None:
            self.live_bytes -= num_bytes


# --------------------------------------------------------------------------------------------------
# The *effect* of a call on memory, determined by running the call on fake tensors.
#
# A call's operands are *values*, which are views of storages, like tensors. The effect depends only
# on shapes, strides, dtypes, literals and on which operands share memory.


class AbstractStorage:
    """The memory of a value in a graph. It counts while this object lives; if `outer` has the same
    memory, `outer` counts instead."""

    __slots__ = ("holders", "memory", "num_bytes", "on_host", "outer")

    def __init__(
        self,
        num_bytes: int,
        memory: LiveBytes,
        outer: Tensor | None = None,
        *,
        on_host: bool = False,
    ) -> None:
        self.num_bytes, self.memory, self.outer, self.on_host, self.holders = (
            num_bytes,
            memory,
            outer,
            on_host,
            0,
        )
        if outer is None and not on_host:
            memory.live_bytes += num_bytes

    def __del__(self) -> None:
        if self.outer is None and not self.on_host:
            self.memory.live_bytes -= self.num_bytes

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Return a fake tensor with this memory. The bytes then count through this tensor."""
        if self.outer is None:
            self.memory.live_bytes -= 0 if self.on_host else self.num_bytes
            self.outer = flat(self.num_bytes, dtype, on_host=self.on_host)
        return self.outer

    def release_emptied_list(self) -> bool:
        """Release memory that is held only by a list that a call empties. Return whether the memory
        is then free."""
        if self.outer is None:
            return True
        key = self.outer.untyped_storage()._cdata
        self.outer, self.num_bytes = None, 0
        return self.memory.mark(key) is None


_LITERALS = frozenset((int, float, bool, str, type(None)))


class AbstractValue:
    """A tensor of a graph: its storage and its view of it."""

    __slots__ = ("storage", "view")

    def __init__(self, storage: AbstractStorage, view: StridedView) -> None:
        self.storage, self.view = storage, view
        storage.holders += 1

    def __del__(self) -> None:
        self.storage.holders -= 1


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The location of a result.

    Attributes:
        storage: the number of its storage. Storages of operands come first, then new storages.
        view: its view of the storage.
    """

    storage: int
    view: StridedView


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of a kind of call.

    Attributes:
        rise_bytes: the largest increase of live bytes during the call.
        made: the size in bytes of each new storage, and whether it is in host memory.
        result: the result, with a `NodePlace` instead of each tensor.
        emptied: whether the call empties a list that is an operand.
    """

    rise_bytes: int
    made: tuple[tuple[int, bool], ...]
    result: Any
    emptied: bool


class Operands:
    """The operands of a call as a hashable token. Storages are numbered in order."""

    def __init__(self, env: Mapping[fx.Node, Any]) -> None:
        self.env = env
        self.storages: list[AbstractStorage] = []
        self.started: list[list[Any]] = []
        self.num_bytes: list[int] = []
        self.freed: frozenset[int] = frozenset()
        self._numbers: dict[int, int] = {}
        self._in_lists: dict[int, int] = {}  # number of a storage → its holders in list operands

    def token(self, x: Any) -> Any:
        """Return the hashable form of an argument."""
        kind = type(x)
        if kind is fx.Node:
            return self._of_value(self.env[x])
        if kind in _LITERALS:
            return kind, x
        if isinstance(x, list | tuple):
            return tuple(map(self.token, x))
        if isinstance(x, dict):
            return tuple((name, self.token(value)) for name, value in x.items())
        if isinstance(x, slice):
            return "slice", self.token((x.start, x.stop, x.step))
        return kind, x

    def _of_value(self, value: Any) -> Any:
        if isinstance(value, AbstractValue):
            return self._number(value.storage), value.view
        if isinstance(value, list):  # the value of a step that was started
            self.started.append(value)
            for item in value:
                if isinstance(item, AbstractValue):
                    number = self._number(item.storage)
                    self._in_lists[number] = self._in_lists.get(number, 0) + 1
            return "started", tuple(map(self._of_value, value))
        if isinstance(value, tuple):
            return tuple(map(self._of_value, value))
        return type(value), value

    def _number(self, storage: AbstractStorage) -> int:
        number = self._numbers.setdefault(id(storage), len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return number

    def sizes(self) -> tuple[tuple[int, bool, bool], ...]:
        """Return, for each storage, its size in bytes, whether a call that empties its list
        operands frees it, and whether it is in host memory."""
        self.num_bytes = [s.num_bytes for s in self.storages]
        alone = [n for n, held in self._in_lists.items() if self.storages[n].holders == held]
        self.freed = frozenset(n for n in alone if self.storages[n].release_emptied_list())
        return tuple(
            (size, n in self.freed, s.on_host)
            for n, (size, s) in enumerate(zip(self.num_bytes, self.storages, strict=True))
        )


def tried_out(node: Any, call: Operands, env: Mapping[fx.Node, Any], outside: LiveBytes) -> Effect:
    """Run a call on fake tensors and return its effect.

    Args:
        node: a node, or an object with target, args and kwargs.
        call: the operands of the call.
        env: the value of each node.
        outside: the counter that must ignore the call.
    """
    outside.paused = True
    try:
        with LiveBytes() as memory:
            return _Trial(call, memory).run(node, env)
    finally:
        outside.paused = False


class _Trial:
    """A call on fake tensors. It uses no closures, since reference cycles would keep storages alive
    longer than generated code does."""

    def __init__(self, call: Operands, memory: LiveBytes) -> None:
        self.call, self.memory = call, memory
        self.flat: list[Tensor | None] = [None] * len(call.storages)
        self.numbers = {id(storage): number for number, storage in enumerate(call.storages)}
        self.known: dict[int, int] = {}  # address of a storage → its number
        self.marks: dict[int, object] = {}
        self.made: list[tuple[int, bool]] = []

    def run(self, node: Any, env: Mapping[fx.Node, Any]) -> Effect:
        """Run the call and return its effect."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self._real(env[n]))
        owned_lists = [a for a in args if isinstance(a, list)] if self.call.started else []
        addresses = [base.untyped_storage()._cdata for base in self.flat if base is not None]
        self.known = {address: number for number, address in enumerate(addresses)}
        self.marks = {address: self.memory.mark(address) for address in addresses}
        for number in self.call.freed:
            self.flat[number] = None  # only the call holds this storage
        self.memory.reset_peak()
        before = self.memory.live_bytes
        result = node.target(*args, **kwargs)
        rise = self.memory.peak_bytes - before
        places = self._place(result)
        return Effect(rise, tuple(self.made), places, bool(owned_lists) and not any(owned_lists))

    def _real(self, x: Any) -> Any:
        if isinstance(x, AbstractValue):
            number = self.numbers[id(x.storage)]
            base = self.flat[number]
            if base is None:
                base = self.flat[number] = flat(
                    self.call.num_bytes[number], x.view.dtype, on_host=x.storage.on_host
                )
            return as_view(base, x.view)
        return type(x)(map(self._real, x)) if isinstance(x, list | tuple) else x

    def _place(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            key = storage._cdata
            # with another mark, the storage was freed and its address is used again
            if key not in self.known or self.memory.mark(key) is not self.marks[key]:
                self.known[key], self.marks[key] = (
                    len(self.flat) + len(self.made),
                    self.memory.mark(key),
                )
                self.made.append((storage.nbytes(), host.is_on_host(x)))
            return NodePlace(self.known[key], view_of(x))
        return type(x)(map(self._place, x)) if isinstance(x, list | tuple) else x


# --------------------------------------------------------------------------------------------------
# An executor that runs a program's graphs without tensors. The effect of each kind of call is
# determined once, on fake tensors, and then only added.
#
# A kind of call consists of a function, its literals, the shape, strides and dtype of each operand,
# and which operands share memory. Equal layers of a model have equal kinds. The operands and
# results of a graph are fake tensors, as with any executor. While the graph runs, its values count
# instead; values that forward saves only for backward stay values between the graphs.

Seen = Callable[[str, fx.Node, int], None]
"""Called with the phase, the node, and the peak of live bytes while the node ran. For a step that
starts early, it is called at the start and at the finish."""
_effects: dict[Groups, dict[Any, Effect]] = {}


class Rehearsal(Executor):
    """Runs a program like an `Executor`, but on fake tensors, and counts the same bytes.

    Args:
        memory: the counter of live bytes; it must be active while this runs.
        seen: called for every node.
        unread: whether the caller ignores the gradients of backward, so that they need no tensors.
        last_queries: whether shards of causal attention's queries are assumed to be the last ones,
            which read the most keys and need the most memory; otherwise `groups` determines them.
    """

    def __init__(
        self,
        program: StageProgram,
        groups: Groups,
        memory: LiveBytes,
        *,
        batch: Batch = "global",
        outputs: Outputs = "full",
        seen: Seen | None = None,
        unread: bool = False,
        last_queries: bool = False,
    ) -> None:
        super().__init__(program, groups, batch=batch, outputs=outputs)
        self._memory, self._seen, self._unread, self._last_queries = (
            memory,
            seen,
            unread,
            last_queries,
        )

    def _graph(
        self, phase: str, absent: frozenset[int] = frozenset()
    ) -> Callable[[list[Any]], list[Any]]:
        assert not absent, "memory is predicted for a step with all of its outputs"
        # writing a sum needs the same memory as adding to it
        phase = "backward" if phase == "first" else phase
        if phase not in self._graphs:
            graph = self._source(phase).graph
            if phase == "inference":
                assert not self.program.orders, "orders exist only for training"
                graph = without_saved(graph, self.program.num_saved)
            order = (
                order_of(self.program, phase)
                if phase in self.program.orders
                else [("run", node) for node in graph.nodes]
            )
            num_unread = self._num_unread(phase, graph)
            self._graphs[phase] = _Run(
                order, phase, self.groups, self._memory, self._seen, num_unread, self._last_queries
            )
        return self._graphs[phase]

    def _num_unread(self, phase: str, graph: fx.Graph) -> int:
        if phase == "backward" and self._unread:
            return len(graph.output_node().args[0])
        return self.program.num_saved if phase == "forward" else 0


@dataclass(frozen=True, slots=True)
class _Run:
    """A graph in a given order, as a function of one list of operands, which it empties.

    The last `num_unread` results stay values, since only another graph of the program reads them,
    or nothing. Between the start and the finish of a step, its value is the result of the start.
    """

    order: Sequence[Action]
    phase: str
    groups: Groups
    memory: LiveBytes
    seen: Seen | None
    num_unread: int
    last_queries: bool

    def __call__(self, operands: list[Any]) -> list[Any]:
        env: dict[fx.Node, Any] = {}
        placeholders = (node for _, node in self.order if node.op == "placeholder")
        env.update(zip(placeholders, _as_values(operands, self.memory), strict=True))
        last_use = _last_uses(self.order)
        known = _effects.setdefault(self.groups, {})
        with use_groups(self.groups):
            for place, (action, node) in enumerate(self.order):
                if node.op == "call_function":
                    before = self.memory.live_bytes
                    call = _Part.in_place(action, node, self.groups)
                    if call is None:
                        call = node if action == "run" else _Part.of(action, node)
                    env[node], rise_bytes = self._call_node(call, env, known)
                    self._report_peak(node, before + rise_bytes)
                    for dead in last_use.get(place, ()):
                        del env[dead]
        last = self.order[-1][1]
        self._report_peak(last, self.memory.live_bytes)
        values = [env[r] if isinstance(r, fx.Node) else r for r in last.args[0]]
        env.clear()
        unread = [_copy_value(values.pop()) for _ in range(self.num_unread)]
        return [*_as_fake_tensors(values), *reversed(unread)]

    def _report_peak(self, node: fx.Node, peak_bytes: int) -> None:
        self.memory.peak_bytes = max(self.memory.peak_bytes, peak_bytes)
        if self.seen is not None:
            self.seen(self.phase, node, peak_bytes)

    def _call_node(
        self, node: fx.Node | _Part, env: Mapping[fx.Node, Any], known: dict[Any, Effect]
    ) -> tuple[Any, int]:
        """Return the node's value, and the increase of live bytes while it runs."""
        if (
            node.target in PARTS
            and node.args[1] not in ("halo", *HOST_KINDS)
            and self.groups[node.args[-1]].size == 1
        ):
            return _copy_value(env[node.args[0]]), 0
        if node.target is operator.getitem:
            return _copy_value(env[node.args[0]][node.args[1]]), 0
        if (
            self.last_queries
            and node.target is local_start
            and any(_sees_most_at_last(user, node) for user in node.users)
        ):
            return node.args[0] - local_length(*node.args), 0
        call = Operands(env)
        args, kwargs = call.token(node.args), call.token(node.kwargs)
        key = (node.target, args, kwargs, call.sizes())
        effect = known.get(key)
        if effect is None:
            if sum(map(len, _effects.values())) >= MOST_KINDS:
                _effects.clear()
            effect = known[key] = tried_out(node, call, env, self.memory)
        storages = [
            *call.storages,
            *(AbstractStorage(size, self.memory, on_host=there) for size, there in effect.made),
        ]
        value = _place_storages(effect.result, storages)
        if effect.emptied:
            for started in call.started:
                started.clear()
        return value, effect.rise_bytes


class _Part(NamedTuple):
    """A call that differs from its node: the start or the finish of a step, or a sum over ranks in
    the memory of its operand. A finish reads the value of the step's node."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    users: Mapping[fx.Node, None]

    @staticmethod
    def of(action: str, step: fx.Node) -> _Part:
        """Return the call of an action ``start`` or ``finish``."""
        target, settings = call_of_action(action, step)
        first = step if action == "finish" else reads(action, step)[0]
        return _Part(target, (first, *settings), step.kwargs, step.users)

    @staticmethod
    def in_place(action: str, step: fx.Node, groups: Groups) -> _Part | None:
        """Return the call of a sum over ranks that `autopar.kernels.bind.bind` computes in the
        memory of its operand; None for other calls."""
        if step.target is not all_reduce or action == "finish":
            return None
        x, reduce_op, axis = positional(step)
        group = groups[axis]
        if group.size == 1 or not is_last_read(x):
            return None
        form = bound_ops.all_reduce if action == "run" else bound_ops.start_all_reduce
        settings = (x, reduce_op, group.size, group.name)
        return _Part(bound_ops.IN_PLACE[form], settings, {}, step.users)


def _sees_most_at_last(reader: fx.Node, start: fx.Node) -> bool:
    """Return whether a node is causal attention whose queries begin at `start`. Mirrored shards are
    excluded, since the first rank's shard reads the most keys."""
    return reader.kwargs.get("q_start") is start and "mirrored_in" not in reader.kwargs


def _place_storages(tree: Any, storages: Sequence[AbstractStorage]) -> Any:
    if isinstance(tree, NodePlace):
        return AbstractValue(storages[tree.storage], tree.view)
    return (
        type(tree)(_place_storages(each, storages) for each in tree)
        if isinstance(tree, list | tuple)
        else tree
    )


def _copy_value(value: Any) -> Any:
    return AbstractValue(value.storage, value.view) if isinstance(value, AbstractValue) else value


def _as_values(operands: list[Any], memory: LiveBytes) -> list[Any]:
    """Convert operands to values, and release the operands. Saved values are unchanged."""
    saved = [x.storage for x in operands if isinstance(x, AbstractValue)]
    storages = {
        held.outer.untyped_storage()._cdata: held for held in saved if held.outer is not None
    }
    values = list[Any]()
    for x in operands:
        if not isinstance(x, Tensor):
            values.append(x)
            continue
        storage = x.untyped_storage()
        plain_storage = storages.setdefault(
            storage._cdata, AbstractStorage(storage.nbytes(), memory, x, on_host=is_on_host(x))
        )
        values.append(AbstractValue(plain_storage, view_of(x)))
    operands.clear()
    return values


def _as_fake_tensors(values: list[Any]) -> list[Any]:
    """Convert values to fake tensors with the same views, and release the values."""
    results: list[Any] = []
    for value in values:
        results.append(
            as_view(value.storage.tensor(value.view.dtype), value.view)
            if isinstance(value, AbstractValue)
            else value
        )
    return results


def _last_uses(order: Sequence[Action]) -> dict[int, list[fx.Node]]:
    """Return, for each place in the order, the nodes whose values are not read after it."""
    read_later: set[fx.Node] = set()
    dying: dict[int, list[fx.Node]] = {}
    for place in range(len(order) - 1, -1, -1):
        action, node = order[place]
        for operand in reads(action, node):
            if operand not in read_later:
                read_later.add(operand)
                dying.setdefault(place, []).append(operand)
        if action != "start" and not node.users and node.op == "call_function":
            dying.setdefault(place, []).append(node)
    return dying
