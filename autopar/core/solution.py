"""The answer to an optimisation problem (`autopar.core.problem`), and what proves how good it
is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autopar.core.problem import Condition
from autopar.core.streams import COMPUTE_BOUND, OverlapWeights


@dataclass(frozen=True, slots=True)
class Multipliers:
    """A lower bound and what proves it by arithmetic alone (weak duality,
    `autopar.solve.multipliers`).

    Attributes:
        bound_s: what they prove of every choice the problem admits.
        potentials_s: (variant, 1 where backward reads what forward made else 0, the reader's
            position in `uses`, layout) → what the layout is worth to the reader, all instances of
            the variant together; 0 if there is none.
        memory_s: budget row (`autopar.solve.memory_rows`) → what the whole budget is worth there; 0
            if there is none.
        balance: at whose prices they hold (`autopar.solve.prices`).
        versions_s: (variant, layout) → what it is worth that the layout is made or arrives, to
            those who keep it, all instances of the variant together (rows (9) of
            `autopar.solve.formulation`); 0 if there is none.
        copies_s: likewise, of what rests in the layout anyway, what it is worth that forward reads
            it, to those who keep a copy.
        once_s: likewise, what it is worth to keep the layout that no version of it is kept more
            than once.
        cases: the cases that the choices were divided into; the bound is then the least of theirs,
            and the other fields are empty.
        penalties_s: op → for each strategy, the seconds by which the bound of the choices with this
            strategy is higher; empty if they are not known.
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
        """Bound the choices without some strategies, in seconds.

        Args:
            excluded: op → the strategies that are left out; each op keeps at least one.
        """
        known = ((self.penalties_s[n], out) for n, out in excluded.items() if n in self.penalties_s)
        return self.bound_s + sum(
            min(penalty for s, penalty in enumerate(penalties) if s not in out)
            for penalties, out in known
        )


@dataclass(frozen=True, slots=True)
class CaseMultipliers:
    """What proves a lower bound of the choices that meet some conditions."""

    conditions: tuple[Condition, ...]
    multipliers: Multipliers


@dataclass(frozen=True, slots=True)
class Solution:
    """The solver's answer.

    Attributes:
        strategies: chosen strategy index per op.
        recomputed: strategy index with which backward recomputes an op, per recomputed op.
        kept: per variant index, the versions of the value that are kept for backward.
        objective_s: least time of a step with these choices.
        bound_s: proven lower bound on every choice the problem admits.
        free_bound_s: proven lower bound on every choice that the problem would admit if all
            reserves were 0.
        num_variables, num_constraints: size of the program that was solved.
        solver: which solver answered.
        stats: whether time ran out, how many budget rows came in, and how many of excess.
        memory_price_s_per_byte: dual of the budget row in the relaxation (0 where memory is ample).
        multipliers: what of the bound is proven by arithmetic alone; None if the solver gives no
            duals.
        mixed: op of several instances → the shares of them for which the relaxation decides, runs
            again or keeps something, where these are neither all nor none: instances that decide
            apart would come nearer to the bound.
        regions: those that kernels may use; None is all.
        unfinished: the search ended with a plan, though it might have proven more.
        split: a condition such that the relaxation mixes choices that meet it with others that do
            not; None if the search did not find any.
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
        """Relative distance between incumbent and bound."""
        return (self.objective_s - self.bound_s) / max(self.objective_s, 1e-30)


@dataclass(frozen=True, slots=True)
class FractionalGroups:
    """Which ops would decide apart, of a search that has met no plan on the way: `mixed` and
    `bound_s` as of `Solution`."""

    mixed: Mapping[int, tuple[float, ...]]
    bound_s: float
