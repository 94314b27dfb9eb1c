"""What nodes move by themselves: of experts whose tokens are dispatched, from layouts alone.

Where one axis splits tokens (dim 0 of x) and experts (dim 0 of the weights) alike, rows of pairs, one for each pick that a device has, go
by all-to-alls along it. A device puts in, in this order, as many elements as

    forward     an integer for each expert of the axis; pairs · features; pairs · what experts make
    backward    the integers; pairs · (what experts make + features); pairs; pairs · features; pairs

the third and the fifth of backward in the gates' dtype. Nothing runs beside these, and nothing else moves by itself. Where the plan says so
all of it goes between peers (`autopar.certificate.routes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.distributed.tensor import Shard

from autopar import ops
from autopar.certificate.facts import Claims, Facts
from autopar.certificate.rates import Rates
from autopar.certificate.report import Finding, near
from autopar.certificate.routes import routed, shared
from autopar.collective import Collective
from autopar.hardware import HardwareProfile
from autopar.layout import Strategy
from autopar.mesh import Mesh
from autopar.plans import Communication
from autopar.rules import Call, call_of
from autopar.validation.shards import local_lengths

_OPERANDS = 5  # x, picks, gates, up and down, the last ones of both ops


@dataclass(frozen=True, slots=True)
class OwnWalk:
    """All nodes of a model under a plan."""

    facts: Facts
    claims: Claims
    mesh: Mesh
    profile: HardwareProfile
    shared: dict[tuple[object, ...], int] = field(default_factory=dict)  # axis and form → bytes, of the routes that were looked at

    @property
    def rates(self) -> Rates:
        """What collectives take."""
        return Rates(self.mesh, self.profile)

    def findings(self) -> Iterator[Finding]:
        """What does not hold."""
        left = dict(self.claims.own)
        for key, node in self.facts.nodes.items():
            for phase, choices in ((node.meta["phase"], self.claims.chosen), ("backward", self.claims.again)):
                if key in choices and (node.target in (ops.experts, ops.experts_backward) or (key, phase) in left):
                    yield from self._node(node, phase, choices[key], left.pop((key, phase), ()))
        for key, phase in left:
            yield Finding("moves", f"it moves by itself in {phase}, where it does not run", key)

    def _node(self, node: fx.Node, phase: str, strategy: Strategy, said: Sequence[Communication]) -> Iterator[Finding]:
        expected, key = self._expected(node, strategy), node.meta["key"]
        if expected != [c.collective for c in said]:
            shown = ", ".join(f"{c.kind} of {c.bytes} bytes of {c.dtype}" for c in expected) or "nothing"
            yield Finding("moves", f"with {strategy} it moves {shown} by itself in {phase}, and the plan says otherwise", key)
            return
        for c in said:
            if (c.result, c.slack, c.beside) != (0, "critical", False):
                yield Finding("moves", f"nothing runs beside what it moves by itself in {phase}, and the plan says otherwise", key)
            if (c.source, c.target) != (strategy.inputs[0], strategy.outputs[0]):
                yield Finding("moves", f"what it moves by itself in {phase} is from {c.source} to {c.target}, it runs as {strategy}", key)
            time_s = self.rates.alone_s(c.collective)
            if not near(c.time_s, time_s):
                yield Finding("moves", f"an {c.collective.kind} of its own in {phase} takes {time_s:.6g} s, not {c.time_s:.6g} s", key)
        if any(c.kernel is not None for c in said):
            yield from routed(node, phase, said, self.mesh, self.profile)
            self.shared.update(shared(node, strategy, self.mesh.shape, said[0].collective.axis))

    def _expected(self, node: fx.Node, strategy: Strategy) -> list[Collective]:
        call, sizes = call_of(node), self.mesh.shape
        axis = dispatched_along(call, strategy)
        if axis is None:
            return []
        infos, layouts = call.inputs[-_OPERANDS:], strategy.inputs[-_OPERANDS:]
        x, picks, _, up, down = (local_lengths(i.shape, at, sizes) for i, at in zip(infos, layouts, strict=True))
        pairs, features, made = math.prod(picks), x[1], down[1]
        tokens, gates = infos[0].dtype, infos[2].dtype
        elements: list[tuple[int, torch.dtype]] = [(sizes[axis] * up[0], infos[1].dtype)]
        if node.target is ops.experts:
            elements += [(pairs * features, tokens), (pairs * made, tokens)]
        else:
            elements += [(pairs * (made + features), tokens), (pairs, gates), (pairs * features, tokens), (pairs, gates)]
        return [Collective("all_to_all", axis, 0, 0, "", str(d).removeprefix("torch."), n * d.itemsize) for n, d in elements]


def dispatched_along(call: Call, strategy: Strategy) -> int | None:
    """The axis along which a call's tokens are dispatched; None where there is none, or more than one, which no rule offers."""
    if call.target not in (ops.experts, ops.experts_backward):
        return None
    x, *_, up, _ = (layout.placements for layout in strategy.inputs[-_OPERANDS:])
    axes = [axis for axis, both in enumerate(zip(x, up, strict=True)) if both == (Shard(0), Shard(0))]
    return axes[0] if len(axes) == 1 else None
