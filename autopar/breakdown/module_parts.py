"""Describe each module of a plan: layouts and the parallelism that they form, time, communication
and memory.

Terms. A *part* is one module pattern (``model.layers.*.mlp.up_proj``) with all the copies that took
the same decisions; copies with other decisions form another part. The *main op* of a part is the
forward op that characterizes it: a matmul, convolution, attention or embedding if there is one,
otherwise the slowest op.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TypeVar

from torch.distributed.tensor import Replicate, Shard

from autopar.breakdown.parallelism import PARALLELISMS, ROLES, has_two_dims, over, parallelism_of
from autopar.core.collective import Collective
from autopar.core.layout import Layout
from autopar.plans import Communication, Entry, Kept, NodeChoice, Plan, RunnerUp

# --------------------------------------------------------------------------------------------------
# The module and the copies that each decision of a plan belongs to.

INPUTS = "(inputs)"  # name of the part for the batch
BEFORE, BEHIND = (
    "(from the previous stage)",
    "(from the next stage)",
)  # names of the parts for tensors that cross between stages
CROSSING = (BEFORE, BEHIND)
Instances = tuple[tuple[int, ...], ...]
_Item = TypeVar("_Item", Entry, Communication, Kept)
_FIELD = re.compile(r"\{\d+\}")
_CROSSES = re.compile(r"/(forward|backward)/\d+(/.+)?/(input|output)$")


@dataclass(slots=True)
class ModuleGroup:
    """The decisions, forward nodes, communications and kept values of one part while they are
    collected."""

    module: str
    instances: Instances
    entries: list[Entry] = field(default_factory=list)
    nodes: list[tuple[NodeChoice, Entry]] = field(default_factory=list)
    communications: list[Communication] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)


def star_indices(path: str) -> str:
    """Replace every index of repeated layers in a node's path by ``*``."""
    return _FIELD.sub("*", path)


def crosses(node: str) -> bool:
    """Return whether a node pattern stands for a tensor that comes from, or goes to, another stage.

    Such patterns are named after the node that produces the tensor. Names of batch tensors may
    contain slashes, too; the part of the batch that each microbatch receives has the name of a node
    with a suffix.
    """
    return _CROSSES.search(node) is not None


def owner(node: str) -> str:
    """Return the module pattern, with ``*``, that a node pattern belongs to.

    A parameter or buffer belongs to the module that holds it.
    """
    if crosses(node):
        return BEFORE if node.endswith("/input") else BEHIND
    border = node.rpartition("/")[2]
    if border in ("input", "output"):
        return INPUTS if border == "input" else ""
    path, kind = node.split("/")[:2]
    if kind in ("parameter", "buffer", "storage"):
        path = path.rpartition(".")[0]
    return star_indices(path)


def group_by_module(plan: Plan) -> list[ModuleGroup]:
    """Group the decisions of a plan by module and set of copies. Modules with compute come first,
    in forward order.

    The groups of one pattern have no copy in common. A decision that modules of several groups
    share, such as that of the biases of a convolution and of a norm, is divided among them.
    """
    groups: list[ModuleGroup] = []
    for entry in sorted(plan.entries, key=lambda e: (e.kind != "compute", e.phase != "forward")):
        for group, copies in _divide(groups, owner(entry.nodes[0].node), entry.instances):
            group.entries.append(_restrict(entry, copies))
        if entry.kind == "compute" and entry.phase == "forward":
            for choice in entry.nodes:
                for group, copies in _divide(groups, owner(choice.node), entry.instances):
                    group.nodes.append((choice, _restrict(entry, copies)))
    return groups


def _divide(
    groups: list[ModuleGroup], module: str, instances: Instances
) -> list[tuple[ModuleGroup, Instances]]:
    """Divide the copies of a decision among the groups of a module.

    Copies that are in no group form a new group. If the decision covers a single group completely,
    its other copies join that group.

    Args:
        groups: the groups so far; changed in place.
        module: pattern of the module.
        instances: the copies.

    Returns:
        The groups, with the copies that each of them contains.
    """
    mine = [group for group in groups if group.module == module]
    if mine and module in (INPUTS, *CROSSING):  # not a module with copies
        return [(mine[0], instances)]
    shared = [(group, common) for group in mine if (common := _common(instances, group.instances))]
    remaining = _without(instances, [i for _, common in shared for i in common])
    if not remaining:
        return shared
    if len(shared) == 1 and len(shared[0][1]) == len(shared[0][0].instances):
        shared[0][0].instances = instances
        return [(shared[0][0], instances)]
    groups.append(ModuleGroup(module, remaining))
    return [*shared, (groups[-1], remaining)]


def _common(instances: Instances, others: Instances) -> Instances:
    allowed = set(others)
    return tuple(i for i in instances if i in allowed)


def _without(instances: Instances, others: Iterable[tuple[int, ...]]) -> Instances:
    excluded = set(others)
    return tuple(i for i in instances if i not in excluded)


def _restrict(item: _Item, instances: Instances) -> _Item:
    """Return an item of a plan for some of its copies only."""
    return item if len(instances) == len(item.instances) else replace(item, instances=instances)


def _decides(group: ModuleGroup, node: str) -> bool:
    """Return whether one of a group's decisions is about a node of this pattern."""
    return any(choice.node == node for entry in group.entries for choice in entry.nodes)


def _divide_moved(
    groups: list[ModuleGroup], node: str, instances: Instances
) -> list[tuple[ModuleGroup, Instances]]:
    """Divide the copies of a node's communication, or of its kept value, among the groups.

    A module without decisions has no group: for example, one that only reshapes, whose nodes follow
    the decision of another module. Tensors that its nodes move are counted with that decision.

    Args:
        groups: groups of the plan, as returned by `group_by_module`; a module without decisions is
            added.
        node: pattern of the node.
        instances: its copies.
    """
    module = owner(node)
    deciding = [group for group in groups if _decides(group, node)]
    if deciding and not any(group.module == module for group in groups):
        best = max(deciding, key=lambda group: len(_common(instances, group.instances)))
        return [(best, instances)]
    return _divide(groups, module, instances)


_LAYOUT_FREE = ("getitem",)  # picks one of several results; not an input or output of the module


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter: its name within the module, its storage layout, and the layouts in which ops
    read it.

    Attributes:
        kept: whether a gathered copy is kept from forward to backward.
        working: the layout in which it is held during a step: the storage layout, or that of a
            gathered copy.
        sums: the layout in which its gradients are accumulated.
    """

    name: str
    storage: Layout
    compute: tuple[Layout, ...]
    kept: bool
    working: Layout
    sums: Layout


@dataclass(frozen=True, slots=True)
class Transfer:
    """The collectives of one kind on one axis in one phase: their number per device, the bytes sent
    per device, and their seconds.

    Values received from another stage have kind ``receive`` and axis -1, and send nothing.
    """

    phase: str
    kind: str
    axis: int
    num: int
    bytes: int
    time_s: float


@dataclass(frozen=True, slots=True)
class ModulePart:
    """A module pattern with the copies that have the same decisions. Times and bytes are per
    device, for all copies.

    Attributes:
        module: the path, ``*`` for indices that go through repeated modules; ``""`` is the model
            itself.
        pattern: the path with ``*`` for each index.
        instances: the indices of its copies.
        copies: the indices as text, if the module has other parts too.
        parallelism: one of `PARALLELISMS` per mesh axis.
        sharded: ``ZeRO-1`` to ``ZeRO-3`` or ``""`` per mesh axis.
        enters, leaves: layouts of the activation that the first forward op reads, and of the one
            that the last op returns.
        kept_bytes: bytes kept for backward, including gathered weights.
        recomputed: ops that backward recomputes.
        recompute_s: their time, as in forward; included in `compute_s`.
        entries: all decisions of the part.
        role: the role of its activations in `in_words`: ``activation`` or ``matrix``.
        main: the decision of the main op.
    """

    module: str
    instances: Instances
    copies: str = ""
    parallelism: tuple[str, ...] = ()
    sharded: tuple[str, ...] = ()
    weights: tuple[Weight, ...] = ()
    enters: Layout | None = None
    leaves: Layout | None = None
    main_op: str = ""
    main: Entry | None = None
    compute_s: float = 0.0
    transfers: tuple[Transfer, ...] = ()
    kept_bytes: int = 0
    recomputed: tuple[str, ...] = ()
    recompute_s: float = 0.0
    entries: tuple[Entry, ...] = field(default=(), repr=False)
    pattern: str = ""
    role: str = "activation"

    @property
    def has_offloaded_weight(self) -> bool:
        """Whether a weight is stored in host memory."""
        return any(weight.storage.host for weight in self.weights)

    @property
    def communication_s(self) -> float:
        """Seconds of all its collectives."""
        return sum(t.time_s for t in self.transfers)

    @property
    def runner_up(self) -> RunnerUp | None:
        """The runner-up of the main op's decision; None without a main op."""
        return self.main.runner_up if self.main else None

    @property
    def name(self) -> str:
        """The module pattern, followed by the copies if they are not all of the module's:
        ``layers.* [0-30]``."""
        return (self.module or "(model)") + (f" [{self.copies}]" if self.copies else "")

    def matches(self, pattern: str) -> bool:
        """Return whether `pattern`, a module path with shell wildcards, matches the module or one
        of its copies."""
        form = self.pattern.replace("*", "{}")
        names = {
            self.module,
            self.pattern,
            *(form.format(*i) for i in self.instances if len(i) == self.pattern.count("*")),
        }
        return any(fnmatchcase(name, pattern) for name in names)


def label(part: ModulePart, names: Sequence[str]) -> str:
    """Return the parallelism as text: ``data over node, sequence over gpu; weights ZeRO-3 over node
    and gpu, on the hosts``."""
    text = over(part.parallelism, names, PARALLELISMS)
    if set(part.parallelism) == {"replicated"}:
        text = "replicated"
    sharded = over(part.sharded, names, ("ZeRO-1", "ZeRO-2", "ZeRO-3"))
    rest = ", ".join(filter(None, (sharded, "on the hosts" if part.has_offloaded_weight else "")))
    return f"{text}; weights {rest}" if rest else text


def breakdown(plan: Plan) -> tuple[ModulePart, ...]:
    """Split a plan into parts, in forward order.

    The compute and communication times of the parts add up to those of the prediction, and their
    kept bytes to its activations.
    """
    groups = group_by_module(plan)
    for communication in plan.communications:
        for group, copies in _divide_moved(groups, communication.node, communication.instances):
            group.communications.append(_restrict(communication, copies))
    for value in plan.kept:
        for group, copies in _divide_moved(groups, value.node, value.instances):
            group.kept.append(_restrict(value, copies))
    two_dims = has_two_dims(
        choice.strategy
        for group in groups
        for choice, _ in group.nodes
        if op_of(choice.node) == "dot"
    )
    parts = [_part(plan, group, two_dims=two_dims) for group in groups]
    parts = [
        part
        for part in parts
        if part.compute_s or part.transfers or part.kept_bytes or part.weights
    ]
    repeated = {prefix for part in parts for prefix, indices in _indices(part) if len(indices) > 1}
    parts = [replace(part, module=_path(part, repeated), pattern=part.module) for part in parts]
    num_parts = Counter(part.module for part in parts)
    return tuple(
        replace(part, copies=copies_of(part.instances, part.module, part.pattern))
        if num_parts[part.module] > 1
        else part
        for part in parts
    )


def _indices(part: ModulePart) -> Iterator[tuple[str, set[int]]]:
    """Yield, for each ``*`` of a part, the path up to it and the indices that occur there."""
    pieces = part.module.split("*")
    if all(len(i) == len(pieces) - 1 for i in part.instances):
        yield from (
            ("*".join(pieces[: k + 1]), {i[k] for i in part.instances})
            for k in range(len(pieces) - 1)
        )


def _path(part: ModulePart, repeated: Container[str]) -> str:
    """Return the path with those indices that do not belong to repeated modules, such as a position
    in a Sequential within each layer.
    """
    shown = [
        "*" if prefix in repeated or len(indices) != 1 else str(*indices)
        for prefix, indices in _indices(part)
    ]
    pieces = part.module.split("*")
    return (
        "".join(itertools.chain(*zip(pieces, shown, strict=False), pieces[-1:]))
        if shown
        else part.module
    )


def copies_of(instances: Instances, module: str, pattern: str) -> str:
    """Return the indices at each ``*`` of a path as text, with ranges of the last one: ``0-30``,
    ``0,2,5``, and ``0.0-2,1.0`` for modules in repeated modules.

    Args:
        instances: all indices of the copies.
        module: the path.
        pattern: the path with ``*`` for each index.
    """
    shown = re.fullmatch(re.escape(pattern).replace(r"\*", r"(\*|\d+)"), module)
    stars = [k for k, text in enumerate(shown.groups() if shown else ()) if text == "*"]
    stretches: list[tuple[tuple[int, ...], list[int]]] = []
    for *outer, index in sorted({tuple(i[k] for k in stars) for i in instances if i and stars}):
        if stretches and stretches[-1][0] == tuple(outer) and stretches[-1][1][-1] == index - 1:
            stretches[-1][1][1:] = [index]
        else:
            stretches.append((tuple(outer), [index]))
    return ",".join(
        ".".join((*map(str, outer), "-".join(map(str, stretch)))) for outer, stretch in stretches
    )


def _part(plan: Plan, group: ModuleGroup, *, two_dims: bool) -> ModulePart:
    communications, kept_values = group.communications, group.kept
    weights = tuple(
        _weight(entry, communications, kept_values)
        for entry in group.entries
        if entry.kind == "parameter"
    )
    part = ModulePart(
        group.module,
        group.instances,
        weights=weights,
        entries=tuple(group.entries),
        role="matrix" if two_dims else "activation",
    )
    axes = range(len(plan.mesh.axes))
    again = [entry for entry in group.entries if entry.recompute]
    recompute_s = sum(entry.again_s * len(entry.instances) for entry in again)
    part = replace(
        part,
        sharded=tuple(_describe_sharding(weights, axis) for axis in axes),
        compute_s=sum(entry.time_s * len(entry.instances) for entry in group.entries) + recompute_s,
        transfers=_transfers(communications),
        kept_bytes=sum(_kept_bytes(k, group.entries, plan.mesh.shape) for k in kept_values),
        recomputed=tuple(entry.op for entry in again),
        recompute_s=recompute_s,
    )
    if group.module in CROSSING:
        return _part_of_crossing(part, len(axes))
    if not group.nodes:
        return replace(part, parallelism=("replicated",) * len(axes))
    main, entry = max(
        group.nodes, key=lambda n: (op_of(n[0].node) in ROLES, n[1] in group.entries, n[1].time_s)
    )
    op = op_of(main.node)
    return replace(
        part,
        parallelism=tuple(
            parallelism_of(op, main.strategy, axis, two_dims=two_dims) for axis in axes
        ),
        enters=next((read for read in map(_activation, group.nodes) if read is not None), None),
        leaves=next(
            (
                c.strategy.outputs[0]
                for c, _ in reversed(group.nodes)
                if op_of(c.node) not in _LAYOUT_FREE
            ),
            None,
        ),
        main_op=op,
        main=entry,
    )


def _part_of_crossing(part: ModulePart, num_axes: int) -> ModulePart:
    """Return the part of values that cross between stages. Its decisions are their layouts; its
    time is that of waiting for them.
    """
    phase = "forward" if part.module == BEFORE else "backward"
    received = Transfer(phase, "receive", -1, len(part.entries), 0, part.compute_s)
    strategies = [entry.nodes[0].strategy for entry in part.entries]
    layout = next((x for s in strategies for x in (*s.outputs, *s.inputs)), None)
    transfers = (received, *part.transfers) if part.compute_s else part.transfers
    return replace(
        part,
        parallelism=("",) * num_axes,
        enters=layout,
        leaves=layout,
        compute_s=0.0,
        transfers=transfers,
    )


def op_of(node: str) -> str:
    """Return the op of a node pattern, without its overload."""
    return node.split("/")[1].split(".")[0]


def _activation(node: tuple[NodeChoice, Entry]) -> Layout | None:
    """Return the layout in which a node reads its activation."""
    operand, inputs = ROLES.get(op_of(node[0].node), (0, None))[0], node[0].strategy.inputs
    return inputs[operand] if operand < len(inputs) else None


def _weight(entry: Entry, communications: Iterable[Communication], kept: Iterable[Kept]) -> Weight:
    node = entry.nodes[0].node
    storage, working = entry.nodes[-1].strategy.outputs[0], entry.nodes[0].strategy.outputs[0]
    sums = next(iter(entry.nodes[0].strategy.inputs), storage).plain
    arcs = [c for c in communications if c.node == node and c.phase == "forward"]
    sources = {c.source for c in arcs}
    compute = tuple(dict.fromkeys(c.target for c in arcs if c.target not in sources)) or (working,)
    copies = any(layout != working for k in kept if k.node == node for layout in k.layouts)
    return Weight(
        star_indices(node.partition("/")[0]).rpartition(".")[2],
        storage,
        compute,
        copies,
        working,
        sums,
    )


def _describe_sharding(weights: Iterable[Weight], axis: int) -> str:
    """Return how weights that are stored sharded on `axis` are gathered; if they differ, the word
    for the most sharded ones.
    """
    words = set()
    for weight in weights:
        gathered = any(isinstance(layout.placements[axis], Replicate) for layout in weight.compute)
        if isinstance(weight.storage.placements[axis], Shard) and gathered:
            is_kept = weight.kept or isinstance(weight.working.placements[axis], Replicate)
            scattered = isinstance(weight.sums.placements[axis], Shard)
            words.add(("ZeRO-2" if scattered else "ZeRO-1") if is_kept else "ZeRO-3")
    return max(words, default="")


def _transfers(communications: Iterable[Communication]) -> tuple[Transfer, ...]:
    transfers: dict[tuple[str, str, int], Transfer] = {}
    for c in communications:
        collective: Collective = c.collective
        key = (c.phase, collective.kind, collective.axis)
        before = transfers.get(key, Transfer(*key, 0, 0, 0.0))
        n = len(c.instances)
        size = {"halo": collective.halo_bytes, "swap": collective.bytes // 2}.get(
            collective.kind, collective.bytes
        )  # bytes that one rank puts in; of halo and swap, the bytes that it sends
        transfers[key] = replace(
            before,
            num=before.num + n,
            bytes=before.bytes + n * size,
            time_s=before.time_s + n * c.time_s,
        )
    return tuple(transfers.values())


def _kept_bytes(kept: Kept, entries: Iterable[Entry], mesh_shape: Sequence[int]) -> int:
    """Return the bytes that a kept value adds: none in the layout in which it is stored anyway."""
    if kept.is_copy:
        return kept.bytes * len(kept.instances)
    shares = {layout: _share(layout, mesh_shape) for layout in kept.layouts if not layout.host}
    storage_of = dict[tuple[int, ...], Layout]()
    for e in entries:
        if e.kind != "compute" and any(c.node == kept.node for c in e.nodes):
            storage_of |= dict.fromkeys(e.instances, e.nodes[0].strategy.outputs[0])
    here = () if crosses(kept.node) else kept.instances
    stored_share = sum(shares.get(storage_of[i], 0.0) for i in here if i in storage_of)
    total = len(kept.instances) * sum(shares.values())
    return round(kept.bytes * len(kept.instances) * (1 - stored_share / total)) if total else 0


def _share(layout: Layout, mesh_shape: Sequence[int]) -> float:
    share = 1.0
    for placement, size in zip(layout.placements, mesh_shape, strict=True):
        share /= size if isinstance(placement, Shard) else 1
    return share
