"""State shared by the searches for one problem with different moments: the program, and its
relaxation without budget rows with the start of that relaxation.

A search that learns moments solves its problem several times, and may return to an earlier grouping
of layers. Moments only change budget rows, so a third of each search of a large program is the
same. The shared state is restored before use, so the result of a search does not depend on it.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field, fields

from autopar.core.problem import Problem
from autopar.solve.dual_ascent import Ascent, Potentials
from autopar.solve.formulation import Formulation
from autopar.solve.highs import Engine, Relaxation, SimplexWork
from autopar.solve.lazy_rows import Excess

_LAST = 2  # stored problems: with groups of layers, and without


@dataclass(frozen=True, slots=True)
class Free:
    """The shared state of one problem.

    Attributes:
        engine: the engine after the relaxation.
        ascent, potentials: the start of the relaxation, and the potentials at that point.
    """

    problem: Problem
    program: Formulation
    excess: Excess
    engine: Engine
    relaxation: Relaxation
    ascent: Ascent | None
    potentials: Potentials | None

    @staticmethod
    def of(
        program: Formulation,
        excess: Excess,
        engine: Engine,
        relaxation: Relaxation,
        ascent: Ascent | None,
    ) -> Free:
        """Record the state after the relaxation without budget rows.

        Args:
            program, excess: the program without budget rows.
            engine: the engine after the relaxation; a copy is stored.
            relaxation: the solution of the relaxation.
            ascent: the start of the relaxation, if it started at potentials.
        """
        potentials = None if ascent is None else ascent.potentials()
        return Free(
            program.problem,
            program,
            excess,
            engine.copy_for_search(),
            relaxation,
            ascent,
            potentials,
        )

    def begin(self, problem: Problem, time_limit_s: float) -> tuple[Formulation, Excess, Engine]:
        """Copy the program for another problem's moments, with an engine that has solved its
        relaxation."""
        program = copy.copy(self.program)
        program.problem = problem
        return (
            program,
            Excess(program, self.excess.variables),
            self.engine.copy_for_search(time_limit_s),
        )

    def ascent_of(self, problem: Problem) -> Ascent | None:
        """Restore the ascent for another problem's moments. All searches share one ascent, so the
        previous search must be over."""
        if self.ascent is not None and self.potentials is not None:
            self.ascent.go_back(problem, self.potentials)
        return self.ascent


@dataclass
class Common:
    """The shared state of the last problems of one job.

    Attributes:
        work: the work of all searches.
        has_plan: whether one of them found a plan, so that the others probably do, too.
    """

    work: SimplexWork = field(default_factory=SimplexWork)
    has_plan: bool = False
    _found: deque[Free] = field(default_factory=lambda: deque(maxlen=_LAST))

    def of(self, problem: Problem) -> Free | None:
        """Find the state of a problem that differs only in its moments."""
        return next((free for free in self._found if _is_same(free.problem, problem)), None)

    def begin(self, problem: Problem, time_limit_s: float) -> tuple[Formulation, Excess, Engine]:
        """Make a problem's program and an engine for it, from shared state if there is some."""
        free = self.of(problem)
        if free is not None:
            return free.begin(problem, time_limit_s)
        program = Formulation(problem)
        excess = Excess(program)
        return program, excess, Engine(program.model, time_limit_s, self.work)

    def keep(self, free: Free) -> None:
        """Store the state of a problem."""
        self._found.append(free)


def _is_same(one: Problem, other: Problem) -> bool:
    """Return whether two problems differ only in their moments. Parts are compared by identity,
    numbers by value."""
    pairs = (
        (getattr(one, each.name), getattr(other, each.name))
        for each in fields(Problem)
        if each.name != "moments"
    )
    return all(a is b or (isinstance(a, int | float) and a == b) for a, b in pairs)
