"""The solution of an optimisation problem (`autopar.core.problem`), and the proof of its bound."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autopar.core.problem import Condition
from autopar.core.streams import COMPUTE_BOUND, OverlapWeights


@dataclass(frozen=True, slots=True)
class Multipliers:
    """A lower bound and the multipliers that prove it by arithmetic alone (weak duality,
    `autopar.solve.multipliers`).

    Attributes:
        bound_s: lower bound of all solutions of the problem, in seconds.
        potentials_s: (variant, 1 if backward reads a value from forward else 0, the reader's
            position in `uses`, layout) → the worth of the layout to the reader, for all instances
            of the variant together; 0 if there is none.
        memory_s: budget row (`autopar.solve.memory_rows`) → the worth of the whole budget; 0 if
            there is none.
        balance: the balance whose prices they are for (`autopar.solve.prices`).
        versions_s: (variant, layout) → the worth, to kept versions, of making the layout or moving
            to it, for all instances of the variant together (rows (9) of
            `autopar.solve.formulation`); 0 if there is none.
        copies_s: the same for a layout at rest: the worth, to kept copies, of its readers in
            forward.
        once_s: the same for the row that at most one version of the layout is kept.
        cases: the cases into which the problem was divided. The bound is then the least of their
            bounds, and the other fields are empty.
        penalties_s: op → for each strategy, the seconds by which the bound of the solutions with
            this strategy is higher; empty if they are not known.
    """

    bound_s: float
    potentials_s: Mapping[tuple[int, int, int, int], float]
    memory_s: Mapping[str, float]
    balance: OverlapWeights = COMPUTE_BOUND
    versions_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    copies_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    once_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    cases: tuple[CaseMultipliers, ...] = ()
    penalties_s: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    def bound_without(self, excluded: Mapping[int, Collection[int]]) -> float:
        """Return a lower bound of the solutions without some strategies, in seconds.

        Args:
            excluded: op → excluded strategies; each op keeps at least one.
        """
        known = ((self.penalties_s[n], out) for n, out in excluded.items() if n in self.penalties_s)
        return self.bound_s + sum(
            min(penalty for s, penalty in enumerate(penalties) if s not in out)
            for penalties, out in known
        )


@dataclass(frozen=True, slots=True)
class CaseMultipliers:
    """The multipliers that prove a lower bound of the solutions that satisfy some conditions."""

    conditions: tuple[Condition, ...]
    multipliers: Multipliers


@dataclass(frozen=True, slots=True)
class Solution:
    """A solution with its objective and bound.

    Attributes:
        strategies: the chosen strategy index per op.
        recomputed: the strategy index of the recomputation, per recomputed op.
        kept: per variant index, the versions of the value that are kept for backward.
        objective_s: least time of a step with these decisions.
        bound_s: proven lower bound of all solutions of the problem.
        free_bound_s: proven lower bound of all solutions if all reserves were 0.
        num_variables, num_constraints: size of the solved program.
        solver: the solver.
        stats: whether the time limit was reached, and the numbers of added budget rows and rows of
            excess.
        memory_price_s_per_byte: dual of the budget row in the relaxation (0 if memory does not
            bind).
        multipliers: multipliers that prove a bound by arithmetic alone; None if the solver gives no
            duals.
        mixed: op with several instances → the shares of them with the same decision in the
            relaxation, if these are neither all nor none. Separate decisions of these instances
            would come nearer to the bound.
        regions: the regions that kernels may use; None for all.
        unfinished: whether the search ended with a plan before its bound was final.
        split: a condition such that the relaxation mixes solutions on both sides of it; None if the
            search found none.
    """

    strategies: tuple[int, ...]
    recomputed: Mapping[int, int]
    kept: Mapping[int, tuple[int, ...]]
    objective_s: float
    bound_s: float
    free_bound_s: float = 0.0
    num_variables: int = 0
    num_constraints: int = 0
    solver: str = ""
    memory_price_s_per_byte: float = 0.0
    stats: Mapping[str, float] = field(default_factory=dict)
    multipliers: Multipliers | None = None
    mixed: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    regions: frozenset[int] | None = None
    unfinished: bool = False
    split: Condition | None = None

    @property
    def gap(self) -> float:
        """Relative distance between objective and bound."""
        return (self.objective_s - self.bound_s) / max(self.objective_s, 1e-30)


@dataclass(frozen=True, slots=True)
class FractionalGroups:
    """The ops that would decide separately, from a search that found no plan on the way; `mixed`
    and `bound_s` are as in `Solution`."""

    mixed: Mapping[int, tuple[float, ...]]
    bound_s: float
