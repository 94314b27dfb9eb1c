"""What a search has proven so far, and by what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autopar.choices import Choices, Multipliers
from autopar.solve.engine import Engine, Relaxation
from autopar.solve.formulation import SCALE, Formulation
from autopar.solve.incoming import Incoming
from autopar.solve.live import Point
from autopar.solve.memory import unsure_bytes
from autopar.solve.mixing import mixed
from autopar.solve.multipliers import multipliers, quickest
from autopar.solve.quick import Quick
from autopar.solve.rows import Floats, Rows
from autopar.streams import ON_COMPUTE, Balance


@dataclass
class Proven:
    """Bounds, in the program's unit.

    Attributes:
        bound: no plan costs less. free: none would if all reserves were 0. relaxed: what a relaxation alone proves of `bound`.
        prices: budget row → its dual in the best relaxation. balance: at which prices it proves the same without the rows of excess.
        first: what was known before. vertex: duals of the relaxation without further rows. duals: of the best one, those of the engine's
            rows and of rows (9). mixed: as in `Choices`, of the best relaxation.
    """

    program: Formulation
    engine: Engine
    extra: Incoming
    bound: float = -np.inf
    free: float = -np.inf
    relaxed: float = -np.inf
    price_s_per_byte: float = 0.0
    first: Multipliers | None = None
    vertex: Floats | None = None
    duals: Floats | None = None
    prices: dict[int, float] = field(default_factory=dict)
    balance: Balance = ON_COMPUTE
    mixed: dict[int, tuple[float, ...]] = field(default_factory=dict)

    @property
    def bound_s(self) -> float:
        """In seconds; 0 where none is known."""
        return max(self.bound / SCALE, 0.0) if np.isfinite(self.bound) else 0.0

    def know(self, known: Quick) -> None:
        """By what was known before the search."""
        self.first = known.multipliers
        self.rise(known.bound_s * SCALE)

    def take(self, choices: Choices) -> None:
        """By what is known of an answer to this problem."""
        if choices.bound_s > 0.0:
            self.first = choices.multipliers or self.first
            self.rise(choices.bound_s * SCALE)

    def begin(self, relaxation: Relaxation) -> None:
        """By the relaxation without further rows."""
        self.vertex = relaxation.duals if relaxation.exact else None
        self.relaxed = relaxation.bound
        self.bound, self.free = max(self.bound, relaxation.bound), max(self.free, relaxation.bound)

    def learn(self, point: Point, balance: Balance, duals: Mapping[int, float]) -> None:
        """By a relaxation with further rows, at these prices.

        Args:
            duals: of budget rows.
        """
        prices = np.array([*duals.values()]) / max(self.program.problem.budget_bytes, 1)
        reserves = [unsure_bytes(self.program.problem, self.extra.rows[r]) for r in duals]
        if point.bound > self.relaxed:
            self.relaxed, self.prices, self.balance = point.bound, dict(duals), balance
            self.duals = point.duals[: len(self.program.keys) + len(self.program.tighter)]
            self.mixed = mixed(self.program, self.engine, point.values) if len(point.values) else {}
            self.price_s_per_byte = max(0.0, float(-prices.sum()) / SCALE)
        self.bound = max(self.bound, point.bound)
        self.free = max(self.free, point.bound + float(prices @ np.array(reserves, float)))

    def rise(self, bound: float) -> None:
        """By a search tree."""
        self.bound = max(self.bound, bound)
        if not self.extra.reserves:
            self.free = max(self.free, bound)

    def multipliers(self) -> Multipliers | None:
        """What is proven by arithmetic alone, or None where that leans on reserves: by what was known, by the first relaxation, without
        further rows, or by the best, whichever proves most."""
        if self.extra.reserves:
            return None
        found = [self.first] if self.first is not None else []
        if self.vertex is not None:
            found.append(multipliers(self.program, self.engine, ON_COMPUTE, self.vertex, Rows.of([]), {}))
        if self.duals is not None:
            budget, named = self.extra.matrix([*self.prices]), {self.extra.rows[r].name: y for r, y in self.prices.items()}
            found.append(multipliers(self.program, self.engine, self.balance, self.duals, budget, named))
        return max(found, key=lambda m: m.bound_s) if found else quickest(self.program.problem) if self.bound_s else None
