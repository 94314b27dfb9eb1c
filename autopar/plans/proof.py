"""The proof of a plan: the bound, and the multipliers by which it is derived anew without a
solver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.core.streams import ON_COMPUTE, Balance


@dataclass(frozen=True, slots=True)
class Potential:
    """What the layouts of a tensor are worth to one of its readers, for all tensors that have the
    same readers: multipliers of the proof (`autopar.certificate.bound`).

    Attributes:
        node, result: the first of these tensors. reader, operand: its reader in the first of the
            reader's instances.
        phase: ``backward`` too where backward runs a forward reader again. values_s: layout →
            seconds, where it is worth any.
    """

    node: str
    result: int
    reader: str
    operand: int
    phase: str
    values_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Version:
    """What it is worth that a tensor is made, or arrives, in a layout, to those who keep it until
    backward, for all tensors that have the same readers: multipliers of the proof
    (`autopar.certificate.bound`, of a pipeline's `autopar.certificate.over_cuts`).

    Attributes:
        node, result: the first of these tensors. values_s: layout → seconds, where it is worth any.
        copies_s: of what rests in a layout anyway, what it is worth to them that forward reads it;
            likewise. once_s: that none is kept twice. A pipeline's proof has neither.
    """

    node: str
    result: int
    values_s: Mapping[str, float]
    copies_s: Mapping[str, float] = field(default_factory=dict)
    once_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OnProfile:
    """Multipliers of a pipeline's proof at the prices of a further kind of device:
    `Proof.potentials` and `Proof.versions` are at those of the first stage's, these at those of
    each other kind, in the order in which stages have them."""

    profile: str
    potentials: tuple[Potential, ...]
    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """Incumbent, bound, and what the bound covers.

    Attributes:
        bound_s: the larger of what a search proved and what the multipliers prove. gap: relative
            distance of the two above.
        certified_bound_s: what the multipliers prove by arithmetic alone (`autopar.check`).
        searched_bound_s: what the search proved, of which there is its word alone; 0 where none
            did, in a pipeline whose multipliers prove what was asked for.
        balance: λ of forward and backward at whose prices the multipliers hold
            (`autopar.core.streams`).
        potentials: multipliers of tensors. memory_s: what the whole budget is worth at a point of
            the step: ``start of backward``, ``end of backward``, or while a node runs.
        versions: further multipliers of tensors. on_profiles: those at the prices of further kinds
            of devices.
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
    balance: Balance = ON_COMPUTE
    versions: tuple[Version, ...] = ()
    on_profiles: tuple[OnProfile, ...] = ()

    @property
    def certified_gap(self) -> float:
        """Relative distance of objective and certified bound."""
        return (
            max(self.objective_s - self.certified_bound_s, 0.0) / self.objective_s
            if self.objective_s
            else 0.0
        )


def read_proof(data: Mapping[str, Any]) -> Proof:
    lists: dict[str, Any] = {
        "covers": tuple(data["covers"]),
        "balance": tuple(data["balance"]),
        **_multipliers(data),
    }
    lists["on_profiles"] = tuple(
        OnProfile(**{**each, **_multipliers(each)}) for each in data.get("on_profiles", ())
    )
    return Proof(**{**data, **lists})


def _multipliers(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "potentials": tuple(Potential(**p) for p in data.get("potentials", ())),
        "versions": tuple(Version(**v) for v in data.get("versions", ())),
    }
