"""The proof of a plan: the bound, and the multipliers from which it can be derived again without a
solver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.core.streams import COMPUTE_BOUND, OverlapWeights


@dataclass(frozen=True, slots=True)
class Potential:
    """Multipliers of the proof (`autopar.certificate.bound`) for one reader of a tensor: the value
    of each layout to the reader. They hold for all tensors with the same readers.

    Attributes:
        node, result: the first of these tensors.
        reader, operand: the first instance of the reader, and the operand as which it reads the
            tensor.
        phase: phase of the reader; also ``backward`` if backward runs a forward reader again.
        values_s: layout → seconds, without those that are 0.
    """

    node: str
    result: int
    reader: str
    operand: int
    phase: str
    values_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Version:
    """Multipliers of the proof (`autopar.certificate.bound`, for pipelines
    `autopar.certificate.over_cuts`) for keeping a tensor until backward: the value, to those that
    keep it, of making it or receiving it in a layout. They hold for all tensors with the same
    readers. All mappings are layout → seconds, without those that are 0.

    Attributes:
        node, result: the first of these tensors.
        values_s: value of making or receiving the tensor in a layout.
        copies_s: for tensors that rest in a layout, the value of forward reading that layout; empty
            in the proof of a pipeline.
        once_s: value of not keeping a version twice; empty in the proof of a pipeline.
    """

    node: str
    result: int
    values_s: Mapping[str, float]
    copies_s: Mapping[str, float] = field(default_factory=dict)
    once_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OnProfile:
    """Multipliers of a pipeline's proof at the prices of a further kind of device.

    `Proof.potentials` and `Proof.versions` are multipliers at the prices of the first stage's
    devices. There is one object of this class for each other kind, in the order of the stages.
    """

    profile: str
    potentials: tuple[Potential, ...]
    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class ProofCondition:
    """A condition on the strategy of an op: whether the op runs whole along a mesh axis, that is,
    with every operand and result replicated on this axis.

    Attributes:
        node: first node of the op, in the first of its instances.
        axis: index of the mesh axis.
        is_whole: whether the op has to run whole along the axis.
    """

    node: str
    axis: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class ProofCase:
    """Multipliers of a proof that hold for plans that meet all of some conditions. The cases of a
    proof together cover all plans; each condition divides a case into two.

    Attributes:
        conditions: the conditions, from the one that divides all plans on.
        potentials, memory_s, balance, versions: as of `Proof`.
    """

    conditions: tuple[ProofCondition, ...]
    potentials: tuple[Potential, ...]
    memory_s: Mapping[str, float]
    balance: OverlapWeights
    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """Objective and bound of a plan, and what the bound covers.

    Attributes:
        objective_s: seconds of the plan's step, as the objective counts them.
        bound_s: the proven lower bound of the objective in seconds: the larger of
            `certified_bound_s` and `searched_bound_s`.
        gap: relative distance of objective and bound.
        num_variables: number of variables of the integer program.
        num_constraints: number of its constraints.
        solver: name of the solver.
        memory_price_s_per_gib: seconds that a step would be faster per GiB of further memory.
        covers: the parts of the search space that the bound covers, and exceptions, in words.
        certified_bound_s: the bound that the multipliers prove by arithmetic alone
            (`autopar.check`).
        searched_bound_s: the bound that the search of the solver reports, without a certificate; 0
            if there was no search, in a pipeline whose multipliers prove the requested gap.
        potentials: multipliers of tensors.
        memory_s: point of the step (``start of backward``, ``end of backward``, or a node while it
            runs) → multiplier of the whole budget there, in seconds.
        balance: λ of forward and backward for whose prices the multipliers hold
            (`autopar.core.streams`).
        versions: further multipliers of tensors.
        on_profiles: multipliers at the prices of further kinds of devices.
        cases: the cases that all plans are divided into, each with multipliers of its own; the
            certified bound is then the least of theirs.
    """

    objective_s: float
    bound_s: float
    gap: float
    num_variables: int
    num_constraints: int
    solver: str
    memory_price_s_per_gib: float
    covers: tuple[str, ...]
    certified_bound_s: float = 0.0
    searched_bound_s: float = 0.0
    potentials: tuple[Potential, ...] = ()
    memory_s: Mapping[str, float] = field(default_factory=dict)
    balance: OverlapWeights = COMPUTE_BOUND
    versions: tuple[Version, ...] = ()
    on_profiles: tuple[OnProfile, ...] = ()
    cases: tuple[ProofCase, ...] = ()

    @property
    def certified_gap(self) -> float:
        """Relative distance of the objective and `certified_bound_s`."""
        return (
            max(self.objective_s - self.certified_bound_s, 0.0) / self.objective_s
            if self.objective_s
            else 0.0
        )
