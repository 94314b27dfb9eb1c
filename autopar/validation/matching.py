"""Match nodes of a microbatch's graph with nodes of the batch's graph.

Nodes with the same key usually match. The two graphs differ if an op has no effect in one of them:
a microbatch of one sample needs no ``expand`` to all samples, no sum over them and no division by
their number, and more of its tensors are contiguous. Capture removes such ops, and the numbers in
the keys of later nodes shift. So a node matches a node of the same target, module and phase whose
operands match its own operands, up to ops that the microbatch does not need.

A match proves nothing: the result of a node is compared for every match, and so is each op that is
missing (`without`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar import ops
from autopar.rules import Call
from autopar.validation.op_law import VIEWS, leading_dims
from autopar.validation.states import Ref
from autopar.validation.time_trials import TimePlacement, split_dim
from autopar.validation.traced import TracedModel

aten = torch.ops.aten
OF_BATCH, TIMES = " of the batch", "/of the batch"
_COPIES = frozenset((aten.clone.default, aten.alias.default, aten.detach.default))
_PRODUCTS = {
    aten.mul.Tensor: -1,
    aten.mul.Scalar: -1,
    aten.div.Tensor: 1,
    aten.div.Scalar: 1,
}  # → the change of `TimePlacement.power` without them
_SUM, _EXPAND = aten.sum.dim_IntList, aten.expand.default
_MISSING = _COPIES | VIEWS | _PRODUCTS.keys() | {_SUM, _EXPAND}
_MOST_MISSING = 8  # consecutive ops
Missing = tuple[fx.Node, ...]


@dataclass(frozen=True)
class Match:
    """A node of the batch's graph that may correspond to a node of a microbatch's graph.

    Attributes:
        node: the node of the batch's graph.
        missing: for each operand, the nodes of the batch's graph between the microbatch's operand
            and `node`, in order.
        product: the product to which `node` adds a bias, if the microbatch has one op for both.
    """

    node: fx.Node
    missing: tuple[Missing, ...]
    product: fx.Node | None = None

    @property
    def is_one_view(self) -> bool:
        """Whether a single view of the microbatch replaces several views and copies of the batch.
        They order elements as one view does."""
        replaced = (self.node, *self.missing[0]) if len(self.missing) == 1 else ()
        return (
            len(replaced) > 1
            and self.node.target in VIEWS
            and all(node.target in VIEWS | _COPIES for node in replaced)
        )


@dataclass
class Matching:
    """A map from the nodes of a microbatch's graph to nodes of the batch's graph.

    Attributes:
        whole: the batch's graph.
        same: name of a node of the microbatch's graph → name of its match.
    """

    whole: TracedModel
    same: dict[str, str] = field(default_factory=dict)
    _by_kind: Mapping[str, list[fx.Node]] = field(init=False)
    _users: Mapping[Ref, list[fx.Node]] = field(init=False)

    def __post_init__(self) -> None:
        by_kind: dict[str, list[fx.Node]] = defaultdict(list)
        users: dict[Ref, list[fx.Node]] = defaultdict(list)
        for key, node in self.whole.by_key.items():
            by_kind[_kind(key)].append(node)
            for ref in dict.fromkeys(self.whole.reads(node)):
                users[ref].append(node)
        self._by_kind, self._users = by_kind, users

    def add_placeholders(self, part: TracedModel) -> None:
        """Match the placeholders of the two graphs by name.

        A value that microbatches receive from the batch matches the node of that name.
        """
        names = _placeholders(self.whole)
        for name, node in _placeholders(part).items():
            if name in names:
                self.same[node] = names[name]
        for i in part.trace.inputs:
            path = i.path.removesuffix(OF_BATCH)
            known = self.whole.by_captured_key.get(path) if i.given else None
            if known is not None:
                self.same[i.node] = known.name

    def matches(self, node: fx.Node, reads: Sequence[Ref]) -> Iterator[Match]:
        """Iterate over the possible matches of a node whose operands have matches, the most likely
        first.

        Args:
            node: a node of the microbatch's graph.
            reads: the values that it reads there.
        """
        due = [self.whole_ref(read) for read in reads]
        for other in self._candidates(node, due):
            missing = self._match_operands(other, due)
            if missing is not None:
                yield Match(other, missing)
        if node.target is ops.dot and len(due) == 3:
            yield from self._with_bias(node, due)

    def take(self, node: fx.Node, match: Match) -> None:
        """Record the match of a node."""
        self.same[node.name] = match.node.name

    def _with_bias(self, node: fx.Node, due: Sequence[Ref]) -> Iterator[Match]:
        """Match one op of the microbatch with a product and the addition of a bias.

        Torch adds the bias of a linear layer within the product only if the operand is contiguous.
        """
        kind = _kind(str(node.meta["key"])).replace("/dot/", "/add.Tensor/")
        for other in self._by_kind.get(kind, ()):
            product = other.args[0]
            if getattr(product, "target", None) is not ops.dot or len(other.args) != 2:
                continue
            paths = [
                self.missing_between(found, wanted)
                for found, wanted in zip(
                    [*self.whole.reads(product), *self.whole.reads(other)[1:]], due, strict=False
                )
            ]
            if len(paths) == len(due) and all(path is not None for path in paths):
                yield Match(other, tuple(p for p in paths if p is not None), product)

    def whole_ref(self, ref: Ref) -> Ref:
        """Return the batch's value that corresponds to a microbatch's value, or an unknown
        value."""
        return self.same.get(ref[0], ""), ref[1]

    def missing_between(self, found: Ref, due: Ref) -> Missing | None:
        """Return the ops between two values of the batch's graph, in order. Return None if another
        path leads to `found`, or if the microbatch must have one of these ops."""
        path: list[fx.Node] = []
        while found != due:
            node = self.whole.nodes[found[0]]
            reads = self.whole.reads(node) if node.op == "call_function" else []
            if node.target not in _MISSING or len(reads) != 1 or len(path) == _MOST_MISSING:
                return None
            path.append(node)
            (found,) = reads
        return tuple(reversed(path))

    def _candidates(self, node: fx.Node, due: Sequence[Ref]) -> Iterator[fx.Node]:
        """Iterate over nodes of the batch's graph that a node may correspond to, the most likely
        first.

        If an op is missing, later ops may be counted under another module.
        """
        key = str(node.meta["key"])
        same_key = self.whole.by_key.get(key)
        if same_key is not None:
            yield same_key
        behind = self._iterate_readers(due[0]) if due else iter(())
        for other in (*self._by_kind.get(_kind(key), ()), *behind):
            if other is not same_key and other.target is node.target:
                yield other

    def _iterate_readers(self, ref: Ref) -> Iterator[fx.Node]:
        """Iterate over readers of a value of the batch's graph, also through ops that a microbatch
        may not need."""
        values = [ref]
        while values:
            value = values.pop()
            for user in self._users.get(value, ()):
                yield user
                if user.target in _MISSING and len(self.whole.reads(user)) == 1:
                    values.append((user.name, 0))

    def _match_operands(self, other: fx.Node, due: Sequence[Ref]) -> tuple[Missing, ...] | None:
        reads = self.whole.reads(other)
        if len(reads) != len(due):
            return None
        paths = [
            self.missing_between(found, wanted) for found, wanted in zip(reads, due, strict=True)
        ]
        return (
            None
            if any(path is None for path in paths)
            else tuple(p for p in paths if p is not None)
        )


def _kind(key: str) -> str:
    """Return a key without the number that distinguishes nodes of one module, op and phase."""
    return key.rpartition("/")[0]


def _placeholders(traced: TracedModel) -> dict[str, str]:
    """Return the placeholders by descriptions that both graphs share."""
    trace = traced.trace
    nodes = {f"tensor {p.name}": p.node for p in (*trace.parameters, *trace.buffers)}
    nodes |= {f"input {i.path}": i.node for i in trace.inputs if not i.given}
    return nodes | {f"tangent {o.path}": o.tangent for o in trace.differentiable}


def without(
    missing: Missing, whole: TracedModel, shape: Sequence[int], read: TimePlacement, num: int
) -> TimePlacement:
    """Return the placement of a microbatch's tensor relative to the result of ops that the
    microbatch's graph does not have.

    Args:
        missing: the nodes of the batch's graph that are missing, in order.
        whole: the batch's graph.
        shape: shape of the microbatch's tensor.
        read: placement of the tensor relative to the operand of the first missing node.
        num: number of microbatches.
    """
    for node in missing:
        read = _without(whole.call(node), tuple(shape), read, num)
    return read


def _without(call: Call, shape: tuple[int, ...], read: TimePlacement, num: int) -> TimePlacement:
    if not read.is_known:
        return read
    if call.inputs[0].dtype != call.outputs[0].dtype:
        return TimePlacement("wrong")
    if call.target in _COPIES:
        return read
    if call.target in _PRODUCTS:
        return _without_product(call, read, num)
    if call.target is _SUM:
        return _without_sum(call, shape, read)
    if call.target is _EXPAND:
        return _without_expand(call, shape, read, num)
    return _without_view(call, shape, read, num)


def _without_expand(
    call: Call, shape: tuple[int, ...], read: TimePlacement, num: int
) -> TimePlacement:
    """Return the placement without an expansion to all samples. A microbatch has one sample."""
    dim = split_dim(call.outputs[0].shape, shape, num)
    fits = read.kind in ("whole", "zero") and read.dim < 0 and call.inputs[0].shape == shape
    if not fits or dim < 0:
        return TimePlacement("wrong")
    return TimePlacement(read.kind if read.kind == "zero" else "split", dim, read.power)


def _without_view(
    call: Call, shape: tuple[int, ...], read: TimePlacement, num: int
) -> TimePlacement:
    """Return the placement without a view. The microbatch's tensor must have the right shape
    without it."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    if call.target not in VIEWS:
        return TimePlacement("wrong")
    if read.dim < 0:
        return read if before == after == shape else TimePlacement("wrong")
    dim = dict(leading_dims(before, after)).get(read.dim, -1)
    right = dim >= 0 and split_dim(after, shape, num) == dim
    return TimePlacement(read.kind, dim, read.power) if right else TimePlacement("wrong")


def _without_product(call: Call, read: TimePlacement, num: int) -> TimePlacement:
    """Return the placement without a multiplication or division by the number of microbatches."""
    by_number = len(call.args) == 2 and call.args[1] == num and type(call.args[1]) in (int, float)
    if not by_number or read.kind == "place" or not call.outputs[0].dtype.is_floating_point:
        return TimePlacement("wrong")
    return TimePlacement(read.kind, read.dim, read.power + _PRODUCTS[call.target])


def _without_sum(call: Call, shape: tuple[int, ...], read: TimePlacement) -> TimePlacement:
    """Return the placement without a sum over samples. A microbatch has one sample; all other
    summed dims have one element."""
    before = call.inputs[0].shape
    keeps = len(call.args) > 2 and call.args[2] is True and call.outputs[0].shape == shape
    dims = {dim % len(before) for dim in call.args[1]} if keeps else set()
    rest = {dim for dim in dims if before[dim] != 1}
    if not keeps or not rest:
        return read if keeps and dims else TimePlacement("wrong")
    if rest != {read.dim} or read.kind not in ("split", "zero"):
        return TimePlacement("wrong")
    return TimePlacement("term" if read.kind == "split" else "zero", -1, read.power)
