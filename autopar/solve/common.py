"""What searches for one problem share, whatever its moments: the program, its relaxation without
budget rows, and where that began.

A search that learns moments solves its problem several times, and between layers in some groups and
others goes back to one it had. Moments are budget rows alone, so that of a large program a third of
each search is the same. A search that begins with what another has found goes on as it would have
with its own: what that has changed since is as it was.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field, fields

from autopar.core.problem import Problem
from autopar.solve.dual_ascent import Ascent, Potentials
from autopar.solve.formulation import Formulation
from autopar.solve.highs import Engine, Relaxation, Work
from autopar.solve.overlap_rows import Excess

_LAST = 2  # problems: of layers in groups, and in none


@dataclass(frozen=True, slots=True)
class Free:
    """One problem's.

    Attributes:
        engine: as it was behind the relaxation. ascent: where the relaxation began, and the
            potentials that it had then.
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
        """As of now."""
        potentials = None if ascent is None else ascent.potentials()
        return Free(
            program.problem, program, excess, engine.again(), relaxation, ascent, potentials
        )

    def begun(self, problem: Problem, time_limit_s: float) -> tuple[Formulation, Excess, Engine]:
        """The program, which speaks of another problem's moments, and an engine behind its
        relaxation."""
        program = copy.copy(self.program)
        program.problem = problem
        return program, Excess(program, self.excess.variables), self.engine.again(time_limit_s)

    def ascent_of(self, problem: Problem) -> Ascent | None:
        """The ascent where it was, for another problem's moments; it is one, so that the search
        before is to be over."""
        if self.ascent is not None and self.potentials is not None:
            self.ascent.go_back(problem, self.potentials)
        return self.ascent


@dataclass
class Common:
    """Those of the last problems of one job.

    Attributes:
        work: of all its searches.
    """

    work: Work = field(default_factory=Work)
    _found: deque[Free] = field(default_factory=lambda: deque(maxlen=_LAST))

    def of(self, problem: Problem) -> Free | None:
        """What was found for a problem that is the same but for its moments."""
        return next((free for free in self._found if _is_same(free.problem, problem)), None)

    def begun(self, problem: Problem, time_limit_s: float) -> tuple[Formulation, Excess, Engine]:
        """A problem's program, and an engine for it."""
        free = self.of(problem)
        if free is not None:
            return free.begun(problem, time_limit_s)
        program = Formulation(problem)
        excess = Excess(program)
        return program, excess, Engine(program.model, time_limit_s, self.work)

    def keep(self, free: Free) -> None:
        """Remember what was found."""
        self._found.append(free)


def _is_same(one: Problem, other: Problem) -> bool:
    """But for the moments; what a pricing has made is not compared, only whether it is that."""
    pairs = (
        (getattr(one, each.name), getattr(other, each.name))
        for each in fields(Problem)
        if each.name != "moments"
    )
    return all(a is b or (isinstance(a, int | float) and a == b) for a, b in pairs)
