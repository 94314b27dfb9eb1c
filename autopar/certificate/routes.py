"""Experts' rows that go between peers: what that saves, and what ranks share for it.

An all-to-all of rows, but not one of counts or gates, takes one more pass over them, 2 bytes of memory traffic for each that it moves:
before rows go, or before what experts made goes back. Between peers that is saved, and where the profile says that such routes reach a
share f of an all-to-all's bandwidth, t·(1/f − 1) seconds are lost of each that takes t.

What ranks share along an axis rests there, once for all that move equal rows. With n ranks, p pairs of a rank and E experts of all: 8·n·E
bytes of counts; room for n·p of what goes there, and for p of what comes back, of each of the two that travels; all in lines of 128 bytes,
with n lines of flags each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import fx

from autopar import ops
from autopar.certificate.rates import Rates
from autopar.certificate.report import Finding, near
from autopar.hardware import HardwareProfile
from autopar.layout import Strategy
from autopar.mesh import Mesh
from autopar.plans import Communication
from autopar.rules import call_of
from autopar.strategies import pattern_of
from autopar.validation.shards import local_lengths

_THERE, _BACK = "moe_dispatch", "moe_combine"
_FORWARD = ((_THERE, 0), (_THERE, 2), (_BACK, 2))  # kernel, passes saved
_BACKWARD = ((_THERE, 0), (_THERE, 2), (_THERE, 0), (_BACK, 2), (_BACK, 0))
_LINE = 128  # bytes
_MOST_RANKS = 64  # that the kernels know
Form = tuple[object, ...]


def routed(node: fx.Node, phase: str, said: Sequence[Communication], mesh: Mesh, profile: HardwareProfile) -> Iterator[Finding]:
    """What does not hold of a node of which some collectives are said to go between peers."""
    key, reached = node.meta["key"], profile.kernels.get("moe_route", 0.0)
    again, total_s = phase != node.meta["phase"], 0.0
    for c, (name, num) in zip(said, _FORWARD if node.target is ops.experts else _BACKWARD, strict=True):
        if c.kernel is None or (c.kernel.name, c.kernel.again, c.kernel.num_chunks) != (name, again, 1) or not reached:
            yield Finding("kernels", f"what it moves by itself in {phase} is no {name}, all of it goes between peers or none", key)
            return
        pass_s = Rates(mesh, profile).op_s("indexing", 0, num * c.collective.bytes, c.collective.dtype) if num else 0.0
        saved_s = pass_s - c.time_s * (1.0 / reached - 1.0)
        total_s += saved_s
        if c.kernel.node != pattern_of(key)[0] or not near(c.kernel.saved_s, saved_s):
            yield Finding("kernels", f"{name} saves {saved_s:.6g} s in {phase}, not {c.kernel.saved_s:.6g} s of {c.kernel.node}", key)
    if total_s <= profile.launch_overhead_s:
        yield Finding("kernels", f"its route saves nothing in {phase}, and the problem does not offer it", key)
    axis = said[0].collective.axis
    if mesh.link(axis) != "intra":
        yield Finding("kernels", f"ranks along {mesh.axes[axis].name!r} do not reach each other's memory", key)
    if (num_ranks := mesh.shape[axis]) > _MOST_RANKS:
        yield Finding("kernels", f"there are {num_ranks} ranks, and routes know {_MOST_RANKS}", key)


def shared(node: fx.Node, strategy: Strategy, mesh_shape: Sequence[int], axis: int) -> dict[Form, int]:
    """Bytes on a rank of what a node whose rows go between peers shares along an axis, by form."""
    infos, forward, num = call_of(node).inputs[-5:], node.target is ops.experts, mesh_shape[axis]
    x, picks, _, up, down = (local_lengths(i.shape, at, mesh_shape) for i, at in zip(infos, strategy.inputs[-5:], strict=True))
    pairs, experts = math.prod(picks), up[0] * num
    token, gate = infos[0].dtype.itemsize, infos[2].dtype.itemsize
    there, back = (x[1], down[1]) if forward else (down[1] + x[1], x[1])
    sizes = {("counts", 0): 8 * num * experts, ("there", there * token): num * pairs * there * token}
    sizes["back", back * token] = pairs * back * token
    sizes |= {} if forward else {("gates there", gate): num * pairs * gate, ("gates back", gate): pairs * gate}
    flags = num * _LINE
    return {(axis, *form, experts, num, pairs): -(-size // _LINE) * _LINE + flags for form, size in sizes.items()}
