"""A priced problem with the sources of its ops; links between stages; memory and traffic of
optimizers."""

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

# Bytes of an optimizer's state at rest, as multiples of the parameter's own bytes (torch.optim
# keeps it in the parameter's dtype), and the number of parameter-sized tensors that a step reads
# and writes.
OPTIMIZERS: Mapping[str, tuple[int, int]] = {
    "adamw": (2, 7),
    "adam": (2, 7),
    "sgd": (0, 3),
    "momentum": (1, 5),
    "none": (0, 0),
}


@dataclass(frozen=True, slots=True)
class Source:
    """The source of an op of the problem in the trace.

    Attributes:
        kind: as in `Op.kind`.
        names: for each instance the name of the parameter, buffer, input or output (not for
            compute).
        nodes: for each instance the placeholder, or the node of the output (not for compute).
        cluster: the class of clusters (compute only).
        crosses: whether it crosses between stages.
        copies: whether ops read copies in a narrower dtype, which forward computes.
    """

    kind: OpKind
    names: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    cluster: ClusterClass | None = None
    crosses: bool = False
    copies: bool = False


@dataclass(frozen=True, slots=True)
class Wire:
    """One direction of the link between two neighbouring stages. The default takes no time."""

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf

    def time_s(self, num_bytes: int) -> float:
        """Return the seconds to send bytes to a neighbour that waits for them."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Crossing:
    """How tensors cross between stages.

    Attributes:
        before: the link to the previous stage, over which values arrive.
        behind: the link to the next stage, over which gradients return.
        layouts: path of a tensor that crosses → its layout there, if that is decided.
    """

    before: Wire = Wire()
    behind: Wire = Wire()
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    @staticmethod
    def links_along(axis: str, mesh: Mesh, hardware: Hardware, stage: int = 0) -> Crossing:
        """Return the links of one of the stages along a mesh axis.

        Args:
            axis: name of the pipeline axis; "" for a single stage, whose links take no time.
            mesh: the mesh of all stages.
            hardware: the profiles of the devices.
            stage: index of the stage.
        """
        return Crossing(
            wire(axis, mesh, hardware, max(stage - 1, 0), stage),
            wire(axis, mesh, hardware, stage, stage + 1),
        )


def wire(axis: str, mesh: Mesh, hardware: Hardware, *stages: int) -> Wire:
    """Return the link between stages along a mesh axis.

    Args:
        axis: name of the pipeline axis; "" for a single stage, whose link takes no time.
        mesh: the mesh of all stages.
        hardware: the profiles of the devices.
        stages: the stages that the link connects. If their devices differ, the slowest counts.
    """
    if not axis:
        return Wire()
    name = mesh.link(mesh.names.index(axis))
    link = slowest_link(profile_of(hardware, axis, stage).links[name] for stage in stages)
    return Wire(link.latency_s, link.bandwidth_bytes_per_s)


def output_broadcast_s(axis: str, mesh: Mesh, hardware: Hardware, num_bytes: int) -> float:
    """Return the seconds in which one stage sends data to all other stages along an axis.

    Ranks forward the data in pieces so small that all P − 1 links are busy at once: (P − 1) ·
    latency + bytes / bandwidth. The bandwidth of broadcasts on real links was not measured.

    Args:
        axis: name of the pipeline axis; "" for a single stage.
        mesh: the mesh of all stages.
        hardware: the profiles of the devices.
        num_bytes: bytes that each stage receives.
    """
    if not axis or not num_bytes:
        return 0.0
    ranks = mesh.shape[mesh.names.index(axis)]
    link = wire(axis, mesh, hardware, *range(ranks))
    return (ranks - 1) * link.latency_s + num_bytes / link.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Priced:
    """A problem, and the sources of its ops and variants.

    Attributes:
        problem: the optimization problem, in seconds and bytes.
        sources: source of each op.
        refs: for each variant, the tensors (node, result) of its instances.
        optimizer: name of the optimizer whose state and traffic are priced.
        moves: collectives of parameters at the beginning and the end of a step with several
            microbatches.
        profile: the hardware.
        starts: groups of layers with separate decisions (`autopar.sharding.resolve_constraints`).
        notes: effects of named plans that their names do not show.
    """

    problem: Problem
    sources: tuple[Source, ...]
    refs: tuple[tuple[Ref, ...], ...]
    optimizer: str
    moves: StepMoves
    profile: HardwareProfile
    starts: Starts = field(default_factory=dict)
    notes: tuple[str, ...] = ()
