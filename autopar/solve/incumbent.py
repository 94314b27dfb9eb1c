"""The best plan that a search has met, and what is made of values that could be a better one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.choices import Choices
from autopar.errors import LayoutError
from autopar.solve.engine import Engine, Relaxation
from autopar.solve.evaluate import evaluate, fits
from autopar.solve.formulation import SCALE, Formulation
from autopar.solve.incoming import Incoming
from autopar.solve.proven import Proven
from autopar.solve.rows import Floats

_FAR = 0.05  # relative distance of plan and relaxation from which on mixtures are told, though none unmixed is better


@dataclass
class Incumbent:
    """The best plan so far, and where better ones go.

    Attributes:
        best: None before the first. start: its columns, where they are known.
    """

    program: Formulation
    engine: Engine
    extra: Incoming
    proven: Proven
    gap: float
    best: Choices | None = None
    start: Floats | None = None

    @property
    def best_s(self) -> float:
        """Infinite where there is none."""
        return np.inf if self.best is None else self.best.objective_s

    def is_close(self) -> bool:
        """Whether the best plan is as near to the bound as is asked for."""
        return self.best is not None and self.best_s * SCALE * (1 - self.gap) <= self.proven.bound

    def is_far(self) -> bool:
        """Whether equal ops that decide apart could be much better: the search has not closed the gap, or has only by not mixing them."""
        return not self.is_close() or self.best_s * SCALE * (1 - max(self.gap, _FAR)) > self.proven.relaxed

    def offer(self, values: Floats) -> list[int]:
        """Take a plan if it fits and is the best; else the rows that it breaks, where none of them is in yet."""
        strategies, recomputed, kept, regions = self.program.chosen(self._named(values))
        return self._consider(strategies, recomputed, kept, values, regions if self.extra.budget else None)  # else they cost nothing yet

    def rounded(self, relaxation: Relaxation) -> list[int]:
        """Offer the relaxation itself, rounded where it is fractional, with every version kept that backward reads."""
        strategies = self.program.chosen(self._named(relaxation.values))[0]
        try:
            return self._consider(strategies, {}, None, relaxation.values)
        except LayoutError:  # rounded strategies may make nothing that a reader can use
            return []

    def meet(self, choices: Choices) -> None:
        """Begin with a plan that is known."""
        evaluation = evaluate(self.program.problem, choices.strategies, choices.recomputed, choices.kept, choices.regions)
        if evaluation.objective_s < self.best_s and fits(self.program.problem, evaluation):
            self.best = Choices(
                choices.strategies, choices.recomputed, evaluation.kept, evaluation.objective_s, 0.0, regions=choices.regions
            )
            self.engine.waits = False

    def _named(self, values: Floats) -> dict[str, float]:
        return dict(zip(self.engine.names, values.tolist(), strict=True))

    def _consider(
        self, strategies: tuple[int, ...], recomputed: dict[int, int], kept: dict[int, tuple[int, ...]] | None, values: Floats | None,
        regions: frozenset[int] | None = None,
    ) -> list[int]:  # fmt: skip
        """Take a plan, or itself without kernels, if it fits and is the best. If it breaks rows none of which is in yet, these, the worst
        first; else, as long as the best is too far from the bound, and communication outlasts compute in it, the excess of both phases."""
        evaluation = evaluate(self.program.problem, strategies, recomputed, kept, regions)
        over = self.extra.over(evaluation)
        if over is not None and evaluation.regions:
            regions, values = frozenset(), None
            evaluation = evaluate(self.program.problem, strategies, recomputed, kept, regions)
        if evaluation.objective_s < self.best_s and fits(self.program.problem, evaluation):
            self.best = Choices(strategies, recomputed, evaluation.kept, evaluation.objective_s, 0.0, regions=regions)
            self.start, self.engine.waits = values, False
        if over is not None:
            return over
        return [] if self.is_close() else self.extra.outlasted(evaluation)
