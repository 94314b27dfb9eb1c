"""Merging of communications that share a bucket into one collective: pack, the collective, unpack.

A bucket of deferrable steps is placed at the position of its last member in the graph, and readers
of earlier members move behind it. A bucket of prefetchable steps is placed at the position of its
first member. All other nodes keep their order. Pack and unpack include the casts around a reduction
in a wider dtype.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

import torch
from torch import fx

from autopar.core.collective import Collective
from autopar.core.fx_nodes import add_call, copy_node
from autopar.core.layout import local_shape
from autopar.core.layout_graph import may_share
from autopar.emit.context import CALLS, Moved
from autopar.errors import ChangedPlanError
from autopar.kernels.packing import BucketLayout, from_bucket, into_bucket
from autopar.plans import Bucket, Plan
from autopar.program.program import LazyGraphModule, StageProgram

_OF_STEPS = ("collective", "time_s", "moved")  # meta of steps that is not copied to results
Emitted = tuple[str, str, Any]
"""An entry of `StageProgram.collectives`."""


class WaitingError(ChangedPlanError):
    """Raised if buckets wait for each other's results. Each bucket alone may be legal."""


def can_share(step: fx.Node, mesh_shape: Sequence[int]) -> bool:
    """Return whether a node is a communication step that may be in a bucket.

    The step must communicate a floating-point tensor that is sharded evenly. Within a microbatch,
    it must also be deferrable or a prefetchable all-gather. In the graphs `begin` and `end` of a
    step of several microbatches, any such step qualifies.

    Args:
        step: a node of an emitted graph.
        mesh_shape: the sizes of the mesh axes.
    """
    moved: Moved | None = step.meta.get("moved")
    if moved is None or not may_share(
        step.meta["collective"], moved.shape, moved.source, moved.target, mesh_shape
    ):
        return False
    early = (
        step.meta["collective"].kind == "all_gather" and step.meta.get("slack") == "prefetchable"
    )
    return early or step.meta["phase"] == "step" or step.meta["slack"] == "deferrable"


def on_bucket(steps: Sequence[fx.Node], mesh_shape: Sequence[int]) -> Collective:
    """Return the single collective that replaces several steps.

    Args:
        steps: nodes with the same kind, axis, dtype and reduction.
        mesh_shape: the sizes of the mesh axes.

    Returns:
        The collective on the packed bucket, with its size in bytes.
    """
    c: Collective = steps[0].meta["collective"]
    packing = _Packing.of(steps, mesh_shape)
    shapes = tuple(size or (1,) for size in packing.sizes)
    num_bytes = (
        packing.count
        * BucketLayout(shapes, packing.dims, packing.parts).row
        * getattr(torch, c.dtype).itemsize
    )
    return Collective(
        c.kind, c.axis, -1 if c.kind == "all_reduce" else 0, -1, c.reduce_op, c.dtype, num_bytes
    )


def apply_buckets(program: StageProgram, plan: Plan) -> StageProgram:
    """Return the program with the plan's buckets instead of their members.

    Args:
        program: the program without buckets.
        plan: the plan that lists the buckets.

    Raises:
        PlanError: if a bucket contains a step that cannot be in a bucket.
        WaitingError: if members depend on each other.
    """
    if not plan.buckets:
        return program
    emitted, within = list[Emitted](), Counter[Emitted]()
    remaining = dict(enumerate(plan.buckets))
    changed: dict[str, fx.GraphModule] = {}
    for name in ("forward", "backward", "begin", "end"):
        module: fx.GraphModule | None = getattr(program, name)
        steps = (
            {}
            if module is None
            else {n.meta["moved"].name: n for n in module.graph.nodes if "moved" in n.meta}
        )
        buckets_here = [
            (remaining.pop(b), steps)
            for b, bucket in list(remaining.items())
            if all(m in steps for m in names_of(bucket))
        ]
        if module is not None and buckets_here:
            together = [
                _BucketNodes.of(bucket, steps, program.mesh.shape) for bucket, steps in buckets_here
            ]
            changed[name] = LazyGraphModule(
                module, _rebuilt(module.graph, together, program.mesh.shape)
            )
            for bucket_nodes in together:
                within.update(
                    (step.meta["phase"], step.meta["moved"].name[1], step.meta["collective"])
                    for step in bucket_nodes.steps
                )
                emitted.append(
                    (
                        bucket_nodes.bucket.phase,
                        bucket_nodes.bucket.members[0].node,
                        bucket_nodes.bucket.collective,
                    )
                )
    for bucket in remaining.values():
        first = bucket.members[0].node if bucket.members else "nothing"
        raise ChangedPlanError(
            f"a bucket in {bucket.phase}, starting with {first}, has collectives that no graph of"
            " the program runs"
        )
    alone = _without_first(program.collectives, within)
    return replace(program, **changed, collectives=(*alone, *emitted))


def _without_first(emitted: Iterable[Emitted], within: Counter[Emitted]) -> Iterator[Emitted]:
    """Iterate over collectives, without the first ones that are in buckets."""
    left = within.copy()
    for each in emitted:
        if left[each] > 0:
            left[each] -= 1
        else:
            yield each


def buckets_without(program: StageProgram, nodes: Collection[fx.Node]) -> tuple[Bucket, ...]:
    """Return the buckets of a program that hold no tensor while any of these nodes runs.

    A bucket holds its operands from the first one that an op produces, and its results until the
    last one is read.

    Args:
        program: a program with buckets.
        nodes: nodes of its graphs.
    """
    modules = (program.forward, program.backward, program.begin, program.end)
    return tuple(
        bucket
        for module in modules
        if module is not None
        for bucket in _holding_nothing(module.graph, nodes)
    )


def _holding_nothing(graph: fx.Graph, nodes: Collection[fx.Node]) -> Iterator[Bucket]:
    """Iterate over the buckets of a graph that hold no tensor while any of these nodes runs."""
    spine = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    place = {node: number for number, node in enumerate(spine)}
    hits = list(itertools.accumulate((node in nodes for node in spine), initial=0))
    for pack in spine:
        if "bucket" in pack.meta:
            (step,) = pack.users
            (unpacked,) = step.users
            readers = (reader for result in unpacked.users for reader in result.users)
            positions = [
                place[n] for n in (*pack.all_input_nodes, pack, unpacked, *readers) if n in place
            ]
            if hits[min(positions)] == hits[max(positions) + 1]:
                yield pack.meta["bucket"]


def names_of(bucket: Bucket) -> list[tuple[Any, ...]]:
    """Return the names of a bucket's members, in the form of `Moved.name`."""
    return [(bucket.phase, m.node, m.result, m.target) for m in bucket.members]


def slack_of(step: fx.Node) -> str:
    """Return a step's slack. It is empty in the graphs `begin` and `end`, where it has no
    effect."""
    return str(step.meta.get("slack", ""))


@dataclass(frozen=True, slots=True)
class _Packing:
    """The arrangement of tensors in a bucket.

    Attributes:
        sizes: the shape of each tensor with all shards of the axis.
        dims: the dim of each tensor that is divided into `parts`.
        parts: the number of shards.
        count: the number of these shards that the bucket contains.
    """

    sizes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    parts: int
    count: int

    @staticmethod
    def of(steps: Sequence[fx.Node], mesh_shape: Sequence[int]) -> _Packing:
        """Collect the shapes and sharded dims of the tensors that these steps communicate."""
        c: Collective = steps[0].meta["collective"]
        parts = 1 if c.kind == "all_reduce" else mesh_shape[c.axis]
        layouts = [
            (
                n.meta["moved"].shape,
                n.meta["moved"].target if c.kind == "all_gather" else n.meta["moved"].source,
            )
            for n in steps
        ]
        sizes = tuple(local_shape(shape, layout, mesh_shape) for shape, layout in layouts)
        dims = tuple(max(n.meta["collective"].dim, 0) for n in steps)
        return _Packing(sizes, dims, parts, parts if c.kind == "reduce_scatter" else 1)


@dataclass(frozen=True, slots=True)
class _BucketNodes:
    """A bucket and its members in a graph.

    Attributes:
        bucket: the bucket of the plan.
        steps: the nodes of the members.
        reads: the node that each member reads, before a widening cast.
        made: the result of each member, after a narrowing cast.
    """

    bucket: Bucket
    steps: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    made: tuple[fx.Node, ...]

    @property
    def nodes(self) -> Iterator[fx.Node]:
        """Iterate over all nodes that the bucket replaces."""
        yield from self.steps
        yield from (
            node for step, node in zip(self.steps, self.made, strict=True) if node is not step
        )
        yield from (
            step.args[0]
            for step, read in zip(self.steps, self.reads, strict=True)
            if step.args[0] is not read
        )

    @staticmethod
    def of(bucket: Bucket, steps: Mapping[Any, fx.Node], mesh_shape: Sequence[int]) -> _BucketNodes:
        """Look up a bucket's members in a graph.

        Args:
            bucket: the bucket of the plan.
            steps: the steps of the graph, by `Moved.name`.
            mesh_shape: the sizes of the mesh axes.

        Raises:
            PlanError: if the members cannot be merged into one collective.
        """
        members = tuple(steps[name] for name in names_of(bucket))
        kinds = {
            (c.kind, c.axis, c.dtype, c.reduce_op, slack_of(n))
            for n in members
            for c in (n.meta["collective"],)
        }
        legal = len(members) == len(set(members)) > 1 == len(kinds) and all(
            can_share(n, mesh_shape) for n in members
        )
        if not legal or on_bucket(members, mesh_shape) != bucket.collective:
            message = (
                f"{', '.join(m.node for m in bucket.members)} cannot share one"
                f" {bucket.collective.kind} in {bucket.phase}"
            )
            raise ChangedPlanError(message)
        sources = [n.args[0] for n in members]
        reads = tuple(s.args[0] if s.meta.get("key", "").endswith("/widen") else s for s in sources)
        return _BucketNodes(bucket, members, reads, tuple(map(_cast_behind, members)))


def _cast_behind(step: fx.Node) -> fx.Node:
    """Return the cast behind a step if it is the step's only reader, otherwise the step."""
    users = list(step.users)
    return (
        users[0] if len(users) == 1 and users[0].meta.get("key", "").endswith("/narrow") else step
    )


def _rebuilt(
    graph: fx.Graph, together: Sequence[_BucketNodes], mesh_shape: Sequence[int]
) -> fx.Graph:
    """Return the graph with its buckets.

    Each bucket is placed at the position of its first or last member, or at the next position at
    which its operands are available.
    """
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    at = dict(place)  # node → its position; nodes of a bucket have the position of the bucket
    buckets: dict[int, _BucketNodes] = {}
    placed = set[fx.Node]()
    for bucket in together:
        position = (min if slack_of(bucket.steps[0]) == "prefetchable" else max)(
            place[step] for step in bucket.steps
        )
        buckets[position] = bucket
        for node in bucket.nodes:
            if node in placed:
                raise ChangedPlanError(f"{node.meta['key']} is in two buckets")
            placed.add(node)
            at[node] = position
    waits: TopologicalSorter[int] = TopologicalSorter()
    for node in nodes:
        waits.add(at[node], *({at[operand] for operand in node.all_input_nodes} - {at[node]}))
    try:
        waits.prepare()
    except CycleError as error:
        inside = [
            buckets[number].bucket.members[0].node for number in error.args[1] if number in buckets
        ]
        raise WaitingError(
            f"members of the bucket of {', '.join(inside)} depend on each other"
        ) from error
    return _write_in_order(nodes, waits, buckets, mesh_shape)


def _write_in_order(
    nodes: Sequence[fx.Node],
    waits: TopologicalSorter[int],
    buckets: Mapping[int, _BucketNodes],
    mesh_shape: Sequence[int],
) -> fx.Graph:
    """Write the nodes in the order of their positions, after their operands."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    ready = list(waits.get_ready())
    heapq.heapify(ready)
    while ready:
        number = heapq.heappop(ready)
        if number in buckets:
            _write(graph, copies, buckets[number], mesh_shape)
        else:
            copies[nodes[number]] = copy_node(graph, nodes[number], copies.__getitem__)
        waits.done(number)
        for following in waits.get_ready():
            heapq.heappush(ready, following)
    return graph


def _write(
    graph: fx.Graph, made: dict[fx.Node, fx.Node], each: _BucketNodes, mesh_shape: Sequence[int]
) -> None:
    """Write a bucket: pack, the collective, unpack, and one result per member."""
    c, packing, first = (
        each.bucket.collective,
        _Packing.of(each.steps, mesh_shape),
        each.steps[0].meta,
    )
    wide = getattr(torch, c.dtype)
    about = {name: first[name] for name in ("module", "phase", "source", "slack") if name in first}
    key = f"{each.bucket.members[0].node}/bucket"
    packed = add_call(
        graph,
        into_bucket,
        ([made[x] for x in each.reads], list(packing.dims), packing.parts, packing.count, wide),
    )
    packed.meta.update(about, key=f"{key}/pack", bucket=each.bucket)
    call, args = CALLS[c.kind](c, each.bucket.members[0].target)
    step = add_call(graph, call, (packed, *args))
    step.meta.update(
        about,
        key=f"{key}/{c.kind}",
        collective=c,
        **({"time_s": each.bucket.time_s} if "time_s" in first else {}),
    )
    dtypes = [
        node.kwargs["dtype"] if node is not own else wide
        for node, own in zip(each.made, each.steps, strict=True)
    ]
    sizes = [list(size) for size in packing.sizes]
    unpacked = add_call(
        graph, from_bucket, (step, sizes, list(packing.dims), packing.parts, dtypes)
    )
    unpacked.meta.update(about, key=f"{key}/unpack")
    for number, node in enumerate(each.made):
        made[node] = add_call(graph, operator.getitem, (unpacked, number))
        made[node].meta.update(
            {name: value for name, value in node.meta.items() if name not in _OF_STEPS}
        )
