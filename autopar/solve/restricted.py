"""Restricted programs: the search for plans over columns with small reduced costs
(`autopar.solve.highs`), with few columns first and then more.

With a memory limit many versions have nearly the same cost, so a share of the bound does not
predict the required number of columns well. Few columns are better than many: with more than some
thousands, each node of a search tree takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.core.streams import PHASES, OverlapWeights
from autopar.solve.bounds import Incumbent, ProvenBound
from autopar.solve.dual_ascent import Ascent
from autopar.solve.formulation import FLOW, SCALE, Formulation
from autopar.solve.highs import Engine, Live, Point, Relaxation
from autopar.solve.lazy_rows import Excess, IncomingRows
from autopar.solve.lp import Columns, Floats, Rows
from autopar.solve.multipliers import complete_duals

_RUNGS = (2000, 4000, 8000)  # numbers of columns
SMALL = 4000  # number of columns below which one program over all columns is cheaper than several
# number of columns from which a program is large: its vertex is known sooner than an interior point
LARGE = 20_000
_NODES = 20
_SHARES = (
    1e-6,
    1e-5,
    1e-4,
)  # reduced costs of columns in programs from a vertex, as shares of the bound
_WIDE_SHARE = 1e-3  # the same for a program that is not large
_USED = 1e-6  # value of a column from which a solution uses it


def is_large(engine: Engine) -> bool:
    """Return whether a program is large (see `LARGE`)."""
    return len(engine.names) >= LARGE


@dataclass
class Climb:
    """The restricted programs of one search. Each method returns rows to add, and ends once there
    are some."""

    extra: IncomingRows
    proven: ProvenBound
    gap: float
    plans: Incumbent
    _seen: set[tuple[bytes, tuple[int, ...]]] = field(default_factory=set)  # columns and rows

    def up(self, point: Point | None, free: Floats, rungs: Sequence[int] = ()) -> list[int]:
        """Search restricted programs from small to large, until the gap is closed.

        Args:
            point: the vertex to start from.
            free: as in `from_vertex`.
            rungs: numbers of columns, if they differ from the default.
        """
        if self.plans.is_close():
            return []
        if point is not None:
            soon = is_large(self.extra.engine)
            broken = self.from_vertex(point, free, soon=soon)
            if broken or self.plans.is_close() or soon:
                return broken
        relaxation = self.extra.engine.relax(self.extra.matrix(self.extra.active), interior=True)
        return [] if relaxation is None else self._over_rungs(relaxation, rungs or _RUNGS)

    def _over_rungs(self, relaxation: Relaxation, rungs: Sequence[int]) -> list[int]:
        """Search over the columns with the smallest reduced costs, and then over more of them."""
        for most in rungs:
            if self.plans.is_close() or (self._has_plan and most == _RUNGS[-1]):
                return []
            columns = np.ones(len(relaxation.reduced), bool)
            if len(columns) > max(SMALL, most):
                columns = self.extra.with_excess(
                    relaxation.reduced <= np.partition(relaxation.reduced, most)[most]
                )
            broken = self.over(columns)
            if broken or columns.all():
                return broken
        return []

    def from_vertex(self, point: Point, free: Floats, *, soon: bool) -> list[int]:
        """Search over the cheapest columns at a vertex, then over the best layouts without a
        budget, with free choice of kept versions and recomputation.

        Args:
            point: the vertex.
            free: columns of the relaxation without budget rows.
            soon: whether to leave out the widest and the last search.
        """
        for share in _SHARES if soon else (*_SHARES, _WIDE_SHARE):
            broken = (
                []
                if self.plans.is_close()
                else self.over(self.extra.with_excess(point.reduced <= share * abs(point.bound)))
            )
            if broken:
                return broken
        return (
            [] if soon or self.plans.is_close() or not self._has_plan else self._among(free, point)
        )

    def over(self, columns: Columns) -> list[int]:
        """Search quickly for a plan over some columns, if they were not searched before."""
        key = np.packbits(columns).tobytes(), tuple(self.extra.active)
        if key in self._seen:
            return []
        self._seen.add(key)
        answer = self.extra.engine.solve_restricted(
            columns,
            self.extra.matrix(self.extra.active),
            gap=min(self.gap / 10, 1e-3),
            target=self.proven.bound / (1 - self.gap),
            max_nodes=_NODES,
            start=self._start(columns),
            quick=True,
        )
        return self.plans.offer(answer.values) if answer.values is not None else []

    def prove(self, max_nodes: int, point: Point | None = None) -> list[int]:
        """Solve the program over all columns that could belong to a better plan, if these are few
        or there is no plan yet.

        If communication outlasts compute, half of one tree of collectives and half of another cost
        less than either. Flows must be integers in this case.

        Args:
            max_nodes: limit of the nodes of the search tree.
            point: a vertex whose reduced costs select the columns, if a relaxation with all rows
                would take long; by default that of this relaxation.
        """
        budget = self.extra.matrix(self.extra.active)
        relaxation = self.extra.engine.relax(budget) if point is None else point
        if self.plans.is_close() or relaxation is None:
            return []
        room = self.plans.best_s * SCALE - relaxation.bound
        columns = self.extra.with_excess(relaxation.reduced <= room + 1e-9 * abs(relaxation.bound))
        if self._has_plan and columns.sum() > SMALL:
            return []
        useless = (
            ~self.extra.with_excess(np.zeros(len(columns), bool)) if self.extra.phases else None
        )
        answer = self.extra.engine.solve_restricted(
            columns,
            budget,
            gap=self.gap,
            target=-np.inf,
            max_nodes=max_nodes,
            start=self._start(columns),
            whole=useless,
        )
        proven = min(answer.bound, self.plans.best_s * SCALE)
        broken = [] if answer.values is None else self.plans.offer(answer.values)
        self.proven.rise(proven)
        return broken

    @property
    def _has_plan(self) -> bool:
        return bool(np.isfinite(self.plans.best_s))

    def _among(self, known: Floats, point: Point) -> list[int]:
        """Search over the strategies that a solution uses, in full or in part, without the columns
        that no better plan has."""
        columns = point.reduced <= self.plans.best_s * SCALE - point.bound
        for row in self.extra.program.x:
            places = np.array([self.extra.engine.column[v.name] for v in row], np.int32)
            columns[places[known[places] <= _USED]] = False
        return self.over(self.extra.with_excess(columns))

    def _start(self, columns: Columns) -> Floats | None:
        known = self.plans.start
        return known if known is not None and not known[~columns].any() else None


# --------------------------------------------------------------------------------------------------
# The balance of large programs, without dense rows.
#
# A row over all columns (`autopar.solve.lazy_rows`) makes each step of the simplex method as
# expensive as the program is large. So two programs alternate. First, a live relaxation, which
# keeps its basis, solves the whole program at the prices of a balance. It proves a bound. Then the
# dense rows are solved over the few columns whose reduced cost was small at a balance so far, which
# takes a twentieth of the time. The result limits how much another balance could improve the bound,
# as far as these columns go, and its duals are the next balance. Plans are searched for among the
# cheapest columns of all balances so far, since at any single balance either compute or
# communication is too cheap. Three or four rounds are enough.

_SMALL, _USEFUL = (
    1e-5,
    1e-4,
)  # reduced costs, as shares of the bound, of columns for plans, and of columns in dense rows
_ROUNDS = 8
_NEAR = 1e-3  # relative distance of the proven bound from the best possible one


@dataclass(frozen=True, slots=True)
class SiftedPoint:
    """The bound of the relaxation at a balance, and the columns that are cheap at it or at an
    earlier balance. Plans use some of each."""

    point: Point
    balance: OverlapWeights
    columns: Columns


def sift_balances(
    program: Formulation,
    engine: Engine,
    live: Live,
    excess: Excess,
    phases: Sequence[int],
    first: Sequence[OverlapWeights],
    learn_mixture: Callable[[Floats], None],
) -> Iterator[SiftedPoint]:
    """Yield better and better balances.

    Args:
        program: the program.
        engine: its arrays.
        live: the relaxation without rows of excess.
        excess: the excess of each phase.
        phases: the phases whose excess counts; λ of the others is 1.
        first: the first balances to try. The more they differ, the better are the rows over few
            columns.
        learn_mixture: called with the columns of the program with rows over few columns. Unlike the
            vertex at a balance, they mix the best columns at several balances.
    """
    lines = Rows.of([excess.line(engine, phase) for phase in phases])
    waiting, best = [*first], -np.inf
    small, selected = np.zeros((2, len(engine.names)), bool)
    selected[excess.columns(engine)] = True
    for _ in range(_ROUNDS):
        balance = waiting.pop(0)
        live.reprice(engine.costs(program.costs(balance)))
        point = live.solve(np.zeros(len(selected)), np.ones(len(selected)))
        if point is None or not len(point.values):
            return
        small |= point.reduced <= _SMALL * abs(point.bound)
        selected |= point.reduced <= _USEFUL * abs(point.bound)
        yield SiftedPoint(point, balance, small.copy())
        best = max(best, point.bound)
        if waiting:
            continue
        part = engine.part(selected, live.rows.plus(lines))
        if part is None:
            return
        mixture = np.zeros(len(selected))
        mixture[selected] = part.values
        learn_mixture(mixture)
        if part.bound - best <= _NEAR * abs(best):
            return
        duals = dict(zip(phases, part.duals[len(part.duals) - len(phases) :].tolist(), strict=True))
        waiting.append(excess.balance(duals))


def middle(phases: Sequence[int]) -> OverlapWeights:
    """Return the balance at which communication counts as much as compute."""
    forward, backward = (0.5 if phase in phases else 1.0 for phase in range(len(PHASES)))
    return forward, backward


# --------------------------------------------------------------------------------------------------
# The start of the relaxation of a large program: the potentials of dual ascent
# (`autopar.solve.dual_ascent`), and a price of memory.

_SWEEPS = (
    8  # fewer leave more work to the simplex method than they save; more take longer than they save
)
_SWEEPS_PER_PRICE = 3
_FIRST, _MOST = (
    0.01,
    16.0,
)  # prices of the whole budget that are tried, as shares of the bound


@dataclass
class DualStart:
    """Dual ascent on a program's problem, as duals of its rows."""

    program: Formulation
    engine: Engine
    ascent: Ascent

    def free(self) -> Floats:
        """Duals of the program's own rows."""
        for _ in range(_SWEEPS if self.ascent.num_sweeps < _SWEEPS else 0):
            self.ascent.sweep()
        return self._duals(Rows.of([]), np.zeros(0))

    def duals_at_price(self, further: Rows, budget_row: str, position: int) -> Floats:
        """Duals of the program's and of further rows, one of which is a budget row; its price is
        doubled as long as that raises the bound.

        Args:
            further: the further rows.
            budget_row: name of the budget row.
            position: the position of that row, among the further ones.
        """
        best_s, price_s, worth_s = -np.inf, 0.0, _FIRST * self.ascent.bound_s
        most_s = _MOST * self.ascent.bound_s
        while worth_s <= most_s:
            self._go_on(budget_row, worth_s)
            if self.ascent.bound_s <= best_s:
                break
            best_s, price_s, worth_s = self.ascent.bound_s, worth_s, 2.0 * worth_s
        self._go_on(budget_row, price_s)
        theirs = np.zeros(len(further.lower))
        theirs[position] = -price_s * SCALE
        return np.concatenate([self._duals(further, theirs), theirs])

    def _go_on(self, budget_row: str, worth_s: float) -> None:
        self.ascent.reprice({budget_row: worth_s})
        for _ in range(_SWEEPS_PER_PRICE):
            self.ascent.sweep()

    def _duals(self, further: Rows, theirs: Floats) -> Floats:
        potentials: dict[tuple[int, ...], float] = {}
        for group in self.ascent.groups:
            lowest = (
                0.0 if group.late else min(float(reader.worth.min()) for reader in group.readers)
            )
            useful = np.flatnonzero(group.useful[: group.num])
            for reader in group.readers:
                key = FLOW, group.variant, int(group.late), reader.use
                potentials |= zip(
                    ((*key, i) for i in useful.tolist()),
                    (reader.worth[useful] - lowest).tolist(),
                    strict=True,
                )
        known = np.array([potentials.get(key, 0.0) for key in self.program.keys]) * SCALE
        return complete_duals(self.program, self.engine, self.engine.cost, known, further, theirs)
