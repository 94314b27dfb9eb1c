"""What a plan says about each module: layouts, the parallelism they amount to, time, communication and memory.

Terms. A *part* is one module pattern (``model.layers.*.mlp.up_proj``) with all the copies that took the same decisions;
copies that took others are a part of their own. The *main op* of a part is the forward op that decides what it computes:
a matmul, convolution, attention or embedding where it has one, else the one that takes longest.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from torch.distributed.tensor import Replicate, Shard

from autopar.breakdown.grouping import BEFORE, CROSSING, Group, Instances, crosses, grouped, index_of, starred
from autopar.breakdown.words import ROLES, parallelism_of
from autopar.collective import Collective
from autopar.layout import Layout
from autopar.plans import Communication, Entry, Kept, NodeChoice, Plan, RunnerUp

_LAYOUT_FREE = ("getitem",)  # picks one of several results: says nothing about what a module takes or gives


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter: its name within the module, storage layout, and the layouts in which ops read it.

    Attributes:
        kept: whether a gathered copy is kept from forward to backward.
        working: in which layout it is held through a step; that of storage, or a gathered copy. sums: in which its gradients add up.
    """

    name: str
    storage: Layout
    compute: tuple[Layout, ...]
    kept: bool
    working: Layout
    sums: Layout


@dataclass(frozen=True, slots=True)
class Transfer:
    """Collectives of one kind on one axis in one phase: how many run on a device, the bytes it puts in, their time.

    What is received from another stage is of kind ``receive``, on axis -1, and puts nothing in.
    """

    phase: str
    kind: str
    axis: int
    num: int
    bytes: int
    time_s: float


@dataclass(frozen=True, slots=True)
class Part:
    """One module pattern with the copies that took the same decisions. Times and bytes are per device, of all copies.

    Attributes:
        module: the path, ``*`` for indices that go through repeated modules; ``""`` is the model itself. pattern: ``*`` for every index.
        instances: the indices of its copies. copies: the same as text, where the module has other parts too.
        parallelism: one of `PARALLELISMS` per mesh axis. sharded: ``ZeRO-1`` to ``ZeRO-3`` or ``""`` per mesh axis.
        enters, leaves: layouts of the activation that the first forward op reads and of the one that the last makes.
        kept_bytes: kept for backward, gathered weights included. recomputed: ops that backward runs again.
        recompute_s: their time, as forward's; it is within `compute_s`.
        entries: all decisions of the part; main: the one that the main op belongs to.
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

    @property
    def offloaded(self) -> bool:
        """Whether a weight rests on the hosts."""
        return any(weight.storage.host for weight in self.weights)

    @property
    def communication_s(self) -> float:
        return sum(t.time_s for t in self.transfers)

    @property
    def runner_up(self) -> RunnerUp | None:
        """Of the main op's decision."""
        return self.main.runner_up if self.main else None

    @property
    def name(self) -> str:
        """The module pattern, with the copies where they are not all of the module's: ``layers.* [0-30]``."""
        return (self.module or "(model)") + (f" [{self.copies}]" if self.copies else "")

    def matches(self, pattern: str) -> bool:
        """Whether `pattern`, a module path with shell wildcards, names the module or one of its copies."""
        form = self.pattern.replace("*", "{}")
        names = {self.module, self.pattern, *(form.format(*i) for i in self.instances if len(i) == self.pattern.count("*"))}
        return any(fnmatchcase(name, pattern) for name in names)


def breakdown(plan: Plan) -> tuple[Part, ...]:
    """The parts of a plan, in the order in which forward reaches them.

    The parts' compute and communication times add up to the prediction's, their kept bytes to its activations.
    """
    groups = grouped(plan)
    transfers: dict[int, list[Communication]] = {}
    kept: dict[int, list[Kept]] = {}
    for communication in plan.communications:
        transfers.setdefault(index_of(groups, communication.node, communication.instances), []).append(communication)
    for value in plan.kept:
        kept.setdefault(index_of(groups, value.node, value.instances), []).append(value)
    parts = [_part(plan, group, transfers.get(i, ()), kept.get(i, ())) for i, group in enumerate(groups)]
    parts = [part for part in parts if part.compute_s or part.transfers or part.kept_bytes or part.weights]
    repeated = {prefix for part in parts for prefix, indices in _indices(part) if len(indices) > 1}
    parts = [replace(part, module=_path(part, repeated), pattern=part.module) for part in parts]
    num_parts = Counter(part.module for part in parts)
    return tuple(replace(part, copies=copies_of(part.instances) if num_parts[part.module] > 1 else "") for part in parts)


def _indices(part: Part) -> Iterator[tuple[str, set[int]]]:
    """Of each ``*`` of a part the path up to it, and the indices that stand there."""
    pieces = part.module.split("*")
    if all(len(i) == len(pieces) - 1 for i in part.instances):
        yield from (("*".join(pieces[: k + 1]), {i[k] for i in part.instances}) for k in range(len(pieces) - 1))


def _path(part: Part, repeated: Container[str]) -> str:
    """The path with those indices that go through no repeated modules, such as a place in a Sequential within each layer."""
    shown = ["*" if prefix in repeated or len(indices) != 1 else str(*indices) for prefix, indices in _indices(part)]
    pieces = part.module.split("*")
    return "".join(itertools.chain(*zip(pieces, shown, strict=False), pieces[-1:])) if shown else part.module


def copies_of(instances: Instances) -> str:
    """``0-30`` or ``0,2,5``: stretches of the first index."""
    stretches: list[list[int]] = []
    for index in sorted({i[0] for i in instances if i}):
        if stretches and stretches[-1][-1] == index - 1:
            stretches[-1][1:] = [index]
        else:
            stretches.append([index])
    return ",".join("-".join(map(str, stretch)) for stretch in stretches)


def _part(plan: Plan, group: Group, communications: Iterable[Communication], kept: Iterable[Kept]) -> Part:
    communications, kept = list(communications), list(kept)
    weights = tuple(_weight(entry, communications, kept) for entry in group.entries if entry.kind == "parameter")
    part = Part(group.module, group.instances, weights=weights, entries=tuple(group.entries))
    axes = range(len(plan.mesh.axes))
    again = [entry for entry in group.entries if entry.recompute]
    recompute_s = sum(entry.again_s * len(entry.instances) for entry in again)
    part = replace(
        part,
        sharded=tuple(_sharded(weights, axis) for axis in axes),
        compute_s=sum(entry.time_s * len(entry.instances) for entry in group.entries) + recompute_s,
        transfers=_transfers(communications),
        kept_bytes=sum(_kept_bytes(k, group.entries, plan.mesh.shape) for k in kept),
        recomputed=tuple(entry.op for entry in again),
        recompute_s=recompute_s,
    )
    if group.module in CROSSING:
        return _crossing(part, len(axes))
    if not group.nodes:
        return replace(part, parallelism=("replicated",) * len(axes))
    main, entry = max(group.nodes, key=lambda n: (op_of(n[0].node) in ROLES, n[1] in group.entries, n[1].time_s))
    op = op_of(main.node)
    return replace(
        part,
        parallelism=tuple(parallelism_of(op, main.strategy, axis) for axis in axes),
        enters=next((read for read in map(_activation, group.nodes) if read is not None), None),
        leaves=next((c.strategy.outputs[0] for c, _ in reversed(group.nodes) if op_of(c.node) not in _LAYOUT_FREE), None),
        main_op=op,
        main=entry,
    )


def _crossing(part: Part, num_axes: int) -> Part:
    """The part of what crosses between stages: its decisions are the layouts in which it does, their time is that of waiting for it."""
    phase = "forward" if part.module == BEFORE else "backward"
    received = Transfer(phase, "receive", -1, len(part.entries), 0, part.compute_s)
    strategies = [entry.nodes[0].strategy for entry in part.entries]
    layout = next((x for s in strategies for x in (*s.outputs, *s.inputs)), None)
    transfers = (received, *part.transfers) if part.compute_s else part.transfers
    return replace(part, parallelism=("",) * num_axes, enters=layout, leaves=layout, compute_s=0.0, transfers=transfers)


def op_of(node: str) -> str:
    """The op of a node pattern, without its overload."""
    return node.split("/")[1].split(".")[0]


def _activation(node: tuple[NodeChoice, Entry]) -> Layout | None:
    """The layout in which a node reads its activation."""
    operand, inputs = ROLES.get(op_of(node[0].node), (0, None))[0], node[0].strategy.inputs
    return inputs[operand] if operand < len(inputs) else None


def _weight(entry: Entry, communications: Iterable[Communication], kept: Iterable[Kept]) -> Weight:
    node = entry.nodes[0].node
    storage, working = entry.nodes[-1].strategy.outputs[0], entry.nodes[0].strategy.outputs[0]
    sums = next(iter(entry.nodes[0].strategy.inputs), storage).plain
    arcs = [c for c in communications if c.node == node and c.phase == "forward"]
    left = {c.source for c in arcs}
    compute = tuple(dict.fromkeys(c.target for c in arcs if c.target not in left)) or (working,)
    copies = any(layout != working for k in kept if k.node == node for layout in k.layouts)
    return Weight(starred(node.partition("/")[0]).rpartition(".")[2], storage, compute, copies, working, sums)


def _sharded(weights: Iterable[Weight], axis: int) -> str:
    """How weights that rest sharded on `axis` are gathered; the better sharded where they differ."""
    words = set()
    for weight in weights:
        gathered = any(isinstance(layout.placements[axis], Replicate) for layout in weight.compute)
        if isinstance(weight.storage.placements[axis], Shard) and gathered:
            held = weight.kept or isinstance(weight.working.placements[axis], Replicate)
            scattered = isinstance(weight.sums.placements[axis], Shard)
            words.add(("ZeRO-2" if scattered else "ZeRO-1") if held else "ZeRO-3")
    return max(words, default="")


def _transfers(communications: Iterable[Communication]) -> tuple[Transfer, ...]:
    found: dict[tuple[str, str, int], Transfer] = {}
    for c in communications:
        collective: Collective = c.collective
        key = (c.phase, collective.kind, collective.axis)
        before = found.get(key, Transfer(*key, 0, 0, 0.0))
        n = len(c.instances)
        size = {"halo": collective.halo_bytes, "swap": collective.bytes // 2}.get(collective.kind, collective.bytes)  # what is sent
        found[key] = replace(before, num=before.num + n, bytes=before.bytes + n * size, time_s=before.time_s + n * c.time_s)
    return tuple(found.values())


def _kept_bytes(kept: Kept, entries: Iterable[Entry], mesh_shape: Sequence[int]) -> int:
    """Bytes that a kept value adds: what rests anyway (parameters, buffers and the batch as they are stored) adds none."""
    there = (e for e in entries if e.kind != "compute" and not crosses(kept.node))
    resting = [e.nodes[0].strategy.outputs[0] for e in there if any(c.node == kept.node for c in e.nodes)]
    shares = {layout: _share(layout, mesh_shape) for layout in kept.layouts if not layout.host}
    own = sum(share for layout, share in shares.items() if layout in resting)
    return round(kept.bytes * len(kept.instances) * (1 - own / sum(shares.values()))) if shares else 0


def _share(layout: Layout, mesh_shape: Sequence[int]) -> float:
    share = 1.0
    for placement, size in zip(layout.placements, mesh_shape, strict=True):
        share /= size if isinstance(placement, Shard) else 1
    return share
