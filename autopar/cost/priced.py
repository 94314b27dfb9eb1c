"""A priced problem and what it stands for; how tensors cross between stages; what optimizers
hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.core.hardware import Hardware, HardwareProfile, profile_of, slowest_link
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.core.problem import OpKind, Problem
from autopar.cost.zero_stages import StepMoves
from autopar.sharding import ClusterClass, Ref, Starts

# Resting bytes of an optimizer's state, as multiples of the parameter's own bytes (torch.optim
# keeps it in the parameter's dtype), and how many parameter-sized tensors a step reads and writes.
OPTIMIZERS: Mapping[str, tuple[int, int]] = {
    "adamw": (2, 7),
    "adam": (2, 7),
    "sgd": (0, 3),
    "momentum": (1, 5),
    "none": (0, 0),
}


@dataclass(frozen=True, slots=True)
class Source:
    """What an op of the problem stands for.

    Attributes:
        kind: as in `Op.kind`. names: parameter, buffer, input or output names of the instances (not
            for compute).
        nodes: placeholder or read node per instance (not for compute). cluster: the class (compute
            only).
        crosses: whether it crosses between stages. copies: whether what ops read are copies in a
            narrower dtype, which forward makes.
    """

    kind: OpKind
    names: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    cluster: ClusterClass | None = None
    crosses: bool = False
    copies: bool = False


@dataclass(frozen=True, slots=True)
class Wire:
    """The link between two neighbouring stages, one direction; by default it costs nothing."""

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf

    def time_s(self, num_bytes: int) -> float:
        """Of sending so many bytes to a neighbour, which waits for them."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Crossing:
    """How tensors cross between stages.

    Attributes:
        before, behind: the links to the stage before, over which values arrive, and to the one
            behind, over which gradients return.
        layouts: path of what crosses → the layout it crosses in, where that is settled.
    """

    before: Wire = Wire()
    behind: Wire = Wire()
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    @staticmethod
    def along(axis: str, mesh: Mesh, hardware: Hardware, stage: int = 0) -> Crossing:
        """Over the link of a mesh axis, for one of the stages along it; free where there is
        none, for a single stage."""
        return Crossing(
            wire(axis, mesh, hardware, max(stage - 1, 0), stage),
            wire(axis, mesh, hardware, stage, stage + 1),
        )


def wire(axis: str, mesh: Mesh, hardware: Hardware, *stages: int) -> Wire:
    """Between stages along an axis: of unequal devices the worst of both ends. Free where there
    is no axis."""
    if not axis:
        return Wire()
    name = mesh.link(mesh.names.index(axis))
    link = slowest_link(profile_of(hardware, axis, stage).links[name] for stage in stages)
    return Wire(link.latency_s, link.bandwidth_bytes_per_s)


def handing_s(axis: str, mesh: Mesh, hardware: Hardware, num_bytes: int) -> float:
    """Seconds in which every stage along an axis gets what one of them has: handed on from rank to
    rank in pieces so small that all P − 1 links are busy at once, (P − 1) · latency + bytes /
    bandwidth. What broadcasts reach on real links was not measured."""
    if not axis or not num_bytes:
        return 0.0
    ranks = mesh.shape[mesh.names.index(axis)]
    link = wire(axis, mesh, hardware, *range(ranks))
    return (ranks - 1) * link.latency_s + num_bytes / link.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Priced:
    """A problem, and what its ops and variants stand for.

    Attributes:
        sources: per op. refs: per variant, the tensors (node, result) of its instances.
        optimizer: whose state and traffic the parameters were priced with.
        moves: collectives of parameters at the begin and the end of a step of several microbatches.
        starts: groups of layers that decide for themselves
            (`autopar.sharding.resolve_constraints`).
        profile: at whose figures.
        notes: what named plans do that their names do not say.
    """

    problem: Problem
    sources: tuple[Source, ...]
    refs: tuple[tuple[Ref, ...], ...]
    optimizer: str
    moves: StepMoves
    profile: HardwareProfile
    starts: Starts = field(default_factory=dict)
    notes: tuple[str, ...] = ()
