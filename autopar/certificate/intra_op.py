"""Check the collectives that nodes issue internally. Only nodes of experts do, to dispatch tokens.
All of these collectives follow from layouts alone.

If one axis splits both tokens (dim 0 of x) and experts (dim 0 of the weights), all-to-alls along
this axis exchange rows: one pair of token and expert per pick of a device. The operands of these
all-to-alls on one device are, in this order and in elements:

    forward     an integer for each expert of the axis; pairs · features; pairs · output features
                of an expert
    backward    the integers; pairs · (output features + features); pairs; pairs · features; pairs

The third and the fifth of backward have the gates' dtype. No compute overlaps these collectives. If
the plan has kernels for them, all of them go directly between peers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from autopar import ops
from autopar.analysis.fusable import PIECES
from autopar.analysis.work import works
from autopar.certificate.facts import Claims, Facts
from autopar.certificate.rates import Rates
from autopar.certificate.report import Finding, near
from autopar.core.collective import Collective
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, Strategy
from autopar.core.mesh import Mesh
from autopar.core.placements import Mirrored
from autopar.ops import random
from autopar.ops.formats import aten_op_of
from autopar.plans import Communication
from autopar.rules import Call, TensorInfo, call_of
from autopar.sharding import pattern_of
from autopar.validation.shards import local_lengths

# --------------------------------------------------------------------------------------------------
# Rows of experts that go directly between peers: the seconds that this saves, and the memory that
# ranks share for it.
#
# An all-to-all of rows (not one of counts or gates) takes one more pass over them, with 2 bytes of
# memory traffic for each byte moved: before rows are sent, or before the experts' results are sent
# back. Routes between peers save this pass. If the profile states that they reach a share f of an
# all-to-all's bandwidth, each all-to-all of t seconds takes t·(1/f − 1) seconds longer.
#
# Ranks share buffers along an axis, one set for all nodes that move rows of equal form. With n
# ranks, p pairs per rank and E experts in total, these are 8·n·E bytes of counts, and, for each of
# the two tensors that travel, room for n·p rows that arrive and for p rows that come back. All
# sizes are multiples of lines of 128 bytes. Each buffer also has n lines of flags.

_THERE, _BACK = "moe_dispatch", "moe_combine"
_FORWARD = ((_THERE, 0), (_THERE, 2), (_BACK, 2))  # (kernel, passes saved) per collective
_BACKWARD = ((_THERE, 0), (_THERE, 2), (_THERE, 0), (_BACK, 2), (_BACK, 0))
_LINE = 128  # bytes
_MOST_RANKS = 64  # limit of the kernels
Form = tuple[object, ...]


def check_routed(
    node: fx.Node,
    phase: str,
    claimed: Sequence[Communication],
    mesh: Mesh,
    profile: HardwareProfile,
) -> Iterator[Finding]:
    """Yield a finding for each claim that does not hold about a node whose collectives go directly
    between peers.

    Args:
        node: the node of the ops `experts` or `experts_backward`.
        phase: phase in which the node runs; "backward" if it runs again.
        claimed: the collectives that the plan lists for the node, in order.
        mesh: the mesh of the plan.
        profile: the profile of the devices; its kernels state the speed of a route.
    """
    key, reached = node.meta["key"], profile.kernels.get("moe_route", 0.0)
    again, total_s = phase != node.meta["phase"], 0.0
    for c, (name, num) in zip(
        claimed, _FORWARD if node.target is ops.experts else _BACKWARD, strict=True
    ):
        if (
            c.kernel is None
            or (c.kernel.name, c.kernel.again, c.kernel.num_chunks) != (name, again, 1)
            or not reached
        ):
            yield Finding(
                "kernels",
                f"its internal communication in {phase} is not a {name}: either all or none of it"
                " goes directly between peers",
                key,
            )
            return
        pass_s = (
            Rates(mesh, profile).op_s("indexing", 0, num * c.collective.bytes, c.collective.dtype)
            if num
            else 0.0
        )
        saved_s = pass_s - c.time_s * (1.0 / reached - 1.0)
        total_s += saved_s
        if c.kernel.node != pattern_of(key)[0] or not near(c.kernel.saved_s, saved_s):
            yield Finding(
                "kernels",
                f"{name} saves {saved_s:.6g} s in {phase}, not {c.kernel.saved_s:.6g} s of"
                f" {c.kernel.node}",
                key,
            )
    if total_s <= profile.launch_overhead_s:
        yield Finding(
            "kernels", f"its route saves nothing in {phase}, so the problem does not offer it", key
        )
    axis = claimed[0].collective.axis
    if mesh.link(axis) != "intra":
        yield Finding(
            "kernels",
            (f"ranks along {mesh.axes[axis].name!r} cannot access each other's memory"),
            key,
        )
    if (num_ranks := mesh.shape[axis]) > _MOST_RANKS:
        yield Finding(
            "kernels", (f"routes support at most {_MOST_RANKS} ranks, not {num_ranks}"), key
        )


def count_shared(
    node: fx.Node, strategy: Strategy, mesh_shape: Sequence[int], axis: int
) -> dict[Form, int]:
    """Count the memory that ranks share along an axis for a node whose rows go directly between
    peers.

    Args:
        node: the node of the ops `experts` or `experts_backward`.
        strategy: the layouts of its operands and results.
        mesh_shape: the size of each mesh axis.
        axis: index of the mesh axis along which rows move.

    Returns:
        Form of a shared buffer → bytes on a rank. Nodes share buffers of equal form.
    """
    infos, forward, num = call_of(node).inputs[-5:], node.target is ops.experts, mesh_shape[axis]
    x, picks, _, up, down = (
        local_lengths(i.shape, at, mesh_shape)
        for i, at in zip(infos, strategy.inputs[-5:], strict=True)
    )
    pairs, experts = math.prod(picks), up[0] * num
    token, gate = infos[0].dtype.itemsize, infos[2].dtype.itemsize
    there, back = (x[1], down[1]) if forward else (down[1] + x[1], x[1])
    sizes = {
        ("counts", 0): 8 * num * experts,
        ("there", there * token): num * pairs * there * token,
    }
    sizes["back", back * token] = pairs * back * token
    sizes |= (
        {}
        if forward
        else {("gates there", gate): num * pairs * gate, ("gates back", gate): pairs * gate}
    )
    flags = num * _LINE
    return {
        (axis, *form, experts, num, pairs): -(-size // _LINE) * _LINE + flags
        for form, size in sizes.items()
    }


_OPERANDS = 5  # x, picks, gates, up and down are the last operands of both ops


@dataclass(frozen=True, slots=True)
class OwnWalk:
    """The collectives that the nodes of a model issue internally under a plan."""

    facts: Facts
    claims: Claims
    mesh: Mesh
    profile: HardwareProfile
    shared: dict[tuple[object, ...], int] = field(
        default_factory=dict
    )  # (axis, form) → bytes, for the routes checked so far

    @property
    def rates(self) -> Rates:
        """The rates of collectives and ops on the plan's mesh."""
        return Rates(self.mesh, self.profile)

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each claim about these collectives that does not hold."""
        unchecked = dict(self.claims.inner_steps)
        for key, node in self.facts.nodes.items():
            for phase, choices in (
                (node.meta["phase"], self.claims.chosen),
                ("backward", self.claims.recomputed),
            ):
                if key in choices and (
                    node.target in (ops.experts, ops.experts_backward) or (key, phase) in unchecked
                ):
                    yield from self._node(
                        node, phase, choices[key], unchecked.pop((key, phase), ())
                    )
        for key, phase in unchecked:
            yield Finding(
                "moves", (f"it has internal communication in {phase}, but does not run there"), key
            )

    def _node(
        self, node: fx.Node, phase: str, strategy: Strategy, claimed: Sequence[Communication]
    ) -> Iterator[Finding]:
        expected, key = self._expected_collectives(node, strategy), node.meta["key"]
        if expected != [c.collective for c in claimed]:
            shown = (
                ", ".join(f"{c.kind} of {c.bytes} bytes of {c.dtype}" for c in expected)
                or "nothing"
            )
            yield Finding(
                "moves",
                f"with {strategy} its internal communication in {phase} is {shown}, which differs"
                " from the plan",
                key,
            )
            return
        for c in claimed:
            if (c.result, c.slack, c.beside) != (0, "critical", False):
                yield Finding(
                    "moves",
                    f"nothing overlaps its internal communication in {phase}, which differs from"
                    " the plan",
                    key,
                )
            if (c.source, c.target) != (strategy.inputs[0], strategy.outputs[0]):
                yield Finding(
                    "moves",
                    f"its internal communication in {phase} is from {c.source} to {c.target}, but"
                    f" it runs as {strategy}",
                    key,
                )
            time_s = self.rates.alone_s(c.collective)
            if not near(c.time_s, time_s):
                yield Finding(
                    "moves",
                    f"its internal {c.collective.kind} in {phase} takes {time_s:.6g} s, not"
                    f" {c.time_s:.6g} s",
                    key,
                )
        if any(c.kernel is not None for c in claimed):
            yield from check_routed(node, phase, claimed, self.mesh, self.profile)
            self.shared.update(
                count_shared(node, strategy, self.mesh.shape, claimed[0].collective.axis)
            )

    def _expected_collectives(self, node: fx.Node, strategy: Strategy) -> list[Collective]:
        call, sizes = call_of(node), self.mesh.shape
        axis = dispatched_along(call, strategy)
        if axis is None:
            return []
        infos, layouts = call.inputs[-_OPERANDS:], strategy.inputs[-_OPERANDS:]
        x, picks, _, up, down = (
            local_lengths(i.shape, at, sizes) for i, at in zip(infos, layouts, strict=True)
        )
        pairs, features, hidden = math.prod(picks), x[1], down[1]
        tokens, gates = infos[0].dtype, infos[2].dtype
        elements: list[tuple[int, torch.dtype]] = [(sizes[axis] * up[0], infos[1].dtype)]
        if node.target is ops.experts:
            elements += [(pairs * features, tokens), (pairs * hidden, tokens)]
        else:
            elements += [
                (pairs * (hidden + features), tokens),
                (pairs, gates),
                (pairs * features, tokens),
                (pairs, gates),
            ]
        return [
            Collective("all_to_all", axis, 0, 0, "", str(d).removeprefix("torch."), n * d.itemsize)
            for n, d in elements
        ]


def dispatched_along(call: Call, strategy: Strategy) -> int | None:
    """Return the axis along which a call's tokens are dispatched. Return None if there is none, or
    more than one, which no rule offers."""
    if call.target not in (ops.experts, ops.experts_backward):
        return None
    x, *_, up, _ = (layout.placements for layout in strategy.inputs[-_OPERANDS:])
    axes = [
        axis for axis, both in enumerate(zip(x, up, strict=True)) if both == (Shard(0), Shard(0))
    ]
    return axes[0] if len(axes) == 1 else None


# --------------------------------------------------------------------------------------------------
# Flops and bytes of one op on one device. The certificate counts them independently.
#
# For each element of its result, a product sums over all letters that the result does not have,
# with two flops per term. A convolution sums over its window in each channel of a group. Attention
# is two products; half of them is skipped if it is causal. Its backward is five products of that
# size. An op reads its operands and writes its results once. A lookup reads as much of its table as
# it writes. A random draw computes each number in several passes.

aten = torch.ops.aten
Infos = Sequence[TensorInfo]
_DRAWS = (random.keep_mask, random.uniform, random.normal, random.randint)
_LOOKUPS = (ops.embedding, ops.pick, aten.embedding, aten.gather, aten.index, aten.index_select)
_FREE = (aten._unsafe_view, aten.reshape)


def product_dtype(reads: Infos) -> torch.dtype:
    """Return the dtype in which a product computes: that of its wider factor."""
    factors = [i.dtype for i in reads[:2]]
    dtype = torch.float32 if not factors else factors[0]
    for factor in factors[1:]:
        wider = factor.is_floating_point, factor.itemsize
        dtype = factor if wider > (dtype.is_floating_point, dtype.itemsize) else dtype
    return dtype


def is_free(target: Callable[..., Any]) -> bool:
    """Return whether an op only changes the view of its operand. Such an op takes no time."""
    if target is operator.getitem:
        return True
    schema = getattr(target, "_schema", None)
    if schema is None:
        return False
    packet = target.overloadpacket  # type: ignore[attr-defined]
    alias = any(r.alias_info is not None for r in schema.returns) and not schema.is_mutable
    return packet in _FREE or bool(alias)


def count_work(call: Call, reads: Infos, results: Infos, *, mirrored: bool) -> tuple[int, int]:
    """Return the flops and bytes of a call on these local tensors.

    Args:
        call: the call; only its op and arguments are read, not its shapes.
        reads: the local tensors that it reads.
        results: the local tensors that it returns.
        mirrored: whether the queries of causal attention are mirrored. If so, each rank computes
            half of all pairs.
    """
    target = aten_op_of(call.target)
    packet = getattr(target, "overloadpacket", target)
    inputs, outputs = _sizes(reads), _sizes(results)
    num_bytes = sum(inputs) + sum(outputs)
    if call.target in _DRAWS:
        num_bytes += 2 * 4 * random.NUM_PASSES * math.prod(results[0].shape)
    if packet in _LOOKUPS:
        num_bytes = sum(outputs) + sum(outputs) + sum(inputs[1:])
    if packet in (ops.attention, ops.attention_backward):
        return _attention(call, reads, results, mirrored=mirrored), num_bytes
    count = _FLOPS.get(packet)
    return 0 if count is None else count(call, reads, results), num_bytes


def _sizes(infos: Infos) -> list[int]:
    return [math.prod(i.shape) * i.dtype.itemsize for i in infos]


def _dot(call: Call, reads: Infos, results: Infos) -> int:
    operands, result = str(call.args[0]).replace(" ", "").split("->")
    summed = dict[str, int]()
    for term, info in zip(operands.split(","), reads[:2], strict=True):
        summed |= {a: n for a, n in zip(term, info.shape, strict=True) if a not in result}
    return 2 * math.prod(results[0].shape) * math.prod(summed.values())


def _matrix(factor: int) -> Callable[[Call, Infos, Infos], int]:
    """Return a function that counts the flops of products which sum over the last dim of an
    operand."""
    return lambda call, reads, results: 2 * math.prod(results[0].shape) * reads[factor].shape[-1]


def _convolution(call: Call, reads: Infos, results: Infos) -> int:
    window = math.prod(reads[1].shape) // reads[1].shape[0]
    transposed = bool(call.args[6]) if len(call.args) > 6 else False
    return 2 * window * math.prod((reads[0] if transposed else results[0]).shape)


def _convolution_backward(call: Call, reads: Infos, results: Infos) -> int:
    window = math.prod(reads[2].shape) // reads[2].shape[0]
    transposed = bool(call.args[7]) if len(call.args) > 7 else False
    gradients = [m for m in results[:2] if math.prod(m.shape)]
    return 2 * window * math.prod((reads[1] if transposed else reads[0]).shape) * len(gradients)


def _attention(call: Call, reads: Infos, results: Infos, *, mirrored: bool) -> int:
    """Count the flops of attention: scores [.., s, t] over e features, and sums over t of v
    features."""
    backward = call.target is ops.attention_backward
    query, key, value = (reads[1:] if backward else reads)[:3]
    *lead, s, e = query.shape
    t, v = key.shape[-2], value.shape[-1]
    pairs = math.prod(lead) * s * t
    flops = 2 * pairs * (e + v)
    flops = flops * 5 // 2 if backward else flops
    is_causal = call.args[7 if backward else 4]
    if not is_causal:
        return flops
    return flops - (flops // 2 if mirrored else flops * s // (2 * t))


_FLOPS: Mapping[Any, Callable[[Call, Infos, Infos], int]] = {
    ops.dot: _dot,
    aten.mm: _matrix(0),
    aten.bmm: _matrix(0),
    aten.addmm: _matrix(1),
    aten.baddbmm: _matrix(1),
    aten.linear: _matrix(0),
    aten.mv: _matrix(0),
    aten.dot: _matrix(0),
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
}


# --------------------------------------------------------------------------------------------------
# Seconds of one call on a device's local tensors, from the certificate's own counts and rates.

_IN_PASSES = (*PIECES, ops.linear_cross_entropy, ops.experts, ops.experts_backward)
"""Ops that run in several passes or by rows. `works` lists their passes."""


def local_infos(
    infos: Sequence[TensorInfo], layouts: Sequence[Layout], mesh_shape: Sequence[int]
) -> list[TensorInfo]:
    """Return the shapes and dtypes of the largest local parts of tensors.

    Args:
        infos: shapes and dtypes of whole tensors.
        layouts: one per tensor.
        mesh_shape: the size of each mesh axis.
    """
    pairs = zip(infos, layouts, strict=True)
    return [TensorInfo(local_lengths(i.shape, at, mesh_shape), i.dtype) for i, at in pairs]


def call_s(call: Call, strategy: Strategy, rates: Rates) -> float:
    """Return the seconds of a call on one device. A cast takes no time if its readers read its
    operand instead.

    Args:
        call: the call, with the shapes of whole tensors.
        strategy: the layouts of its operands and results.
        rates: rates of the mesh and profile.
    """
    if any(at.uncast for at in strategy.outputs):
        return 0.0
    sizes = rates.mesh.shape
    reads = local_infos(call.inputs, strategy.inputs, sizes)
    results = local_infos(call.outputs, strategy.outputs, sizes)
    along, mirrored = dispatched_along(call, strategy), mirrored_queries(call, strategy)
    num = 1 if along is None else sizes[along]
    further = {"mirrored": mirrored, "by_kernels": rates.profile.has_row_kernels}
    parts = works(call.target, call.args, call.kwargs, reads, results, num, **further)
    dtype = product_dtype(reads)
    if call.target not in _IN_PASSES:
        kind = "view" if is_free(call.target) else parts[0][0].kind.replace("view", "elementwise")
        return rates.op_s(kind, *count_work(call, reads, results, mirrored=mirrored), dtype)
    return sum(times * rates.op_s(w.kind, w.flops, w.bytes, dtype) for w, times in parts)


def mirrored_queries(call: Call, strategy: Strategy) -> bool:
    """Return whether attention reads queries that are mirrored along some axis. Then all ranks have
    equally many pairs of query and key."""
    if call.target not in (ops.attention, ops.attention_backward):
        return False
    queries = strategy.inputs[1 if call.target is ops.attention_backward else 0]
    return any(isinstance(placement, Mirrored) for placement in queries.placements)
