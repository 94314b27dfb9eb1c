"""Restricted programs: plans looked for among columns of small reduced cost (`autopar.solve.engine`), few at first, then more.

Memory makes near-ties of many versions, so that shares of the bound say little of how many columns are needed; and few do better than many:
beyond some thousands each node of a search tree takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solve.engine import Engine
from autopar.solve.formulation import SCALE, Formulation
from autopar.solve.incoming import Incoming
from autopar.solve.incumbent import Incumbent
from autopar.solve.live import Point
from autopar.solve.proven import Proven
from autopar.solve.rows import Columns, Floats

_RUNGS = (2000, 4000, 8000)  # columns
SMALL = 4000  # columns: below, one program over all is cheaper than several
LARGE = 20_000  # columns: from here on a program is large, and its vertex is known sooner than a point within
_NODES = 20
_SHARES = (1e-6, 1e-5, 1e-4)  # of the bound: reduced costs in those that begin from a vertex
_WIDE_SHARE = 1e-3  # the same, of a program that is not large
_USED = 1e-6  # of a column: from here on a solution takes it


@dataclass
class Climb:
    """The restricted programs of one search; each method returns rows that are to come in, and ends where there are some."""

    program: Formulation
    engine: Engine
    extra: Incoming
    proven: Proven
    gap: float
    plans: Incumbent
    _seen: set[tuple[bytes, tuple[int, ...]]] = field(default_factory=set)  # columns and rows

    def up(self, point: Point | None, free: Floats, rungs: Sequence[int] = ()) -> list[int]:
        """From small to large, until the gap is closed.

        Args:
            point: a vertex to begin from. free: as in `from_vertex`. rungs: how many columns, if not as many as usual.
        """
        if self.plans.is_close():
            return []
        if point is not None:
            broken = self.from_vertex(point, free, soon=self._is_large)
            if broken or self.plans.is_close() or self._is_large:
                return broken
        relaxation = self.engine.relax(self.extra.matrix(self.extra.active), interior=True)
        for most in rungs or _RUNGS:
            if relaxation is None or self.plans.is_close() or (self._has_plan and most == _RUNGS[-1]):
                return []
            columns = np.ones(len(relaxation.reduced), bool)
            if len(columns) > max(SMALL, most):
                columns = self.extra.with_excess(relaxation.reduced <= np.partition(relaxation.reduced, most)[most])
            broken = self.over(columns)
            if broken or columns.all():
                return broken
        return []

    def from_vertex(self, point: Point, free: Floats, *, soon: bool) -> list[int]:
        """Over columns that cost least at a vertex. Then, unless it is to end soon, over the layouts that are best where memory does not
        bind, `free`: what is kept and what runs again is still open."""
        for share in _SHARES if soon else (*_SHARES, _WIDE_SHARE):
            broken = [] if self.plans.is_close() else self.over(self.extra.with_excess(point.reduced <= share * abs(point.bound)))
            if broken:
                return broken
        return [] if soon or self.plans.is_close() or not self._has_plan else self._among(free, point)

    def over(self, columns: Columns) -> list[int]:
        """A quick search for a plan over some columns, if these were not searched before."""
        seen = np.packbits(columns).tobytes(), tuple(self.extra.active)
        if seen in self._seen:
            return []
        self._seen.add(seen)
        found = self.engine.restricted(
            columns, self.extra.matrix(self.extra.active), gap=min(self.gap / 10, 1e-3), target=self.proven.bound / (1 - self.gap),
            max_nodes=_NODES, start=self._start(columns), quick=True,
        )  # fmt: skip
        return self.plans.offer(found.values) if found.values is not None else []

    def prove(self, max_nodes: int, point: Point | None = None) -> list[int]:
        """The program over all columns that could belong to a better plan, if these are few or there is no plan yet. Where communication
        outlasts compute in some, half of one tree of collectives and half of another cost less than either; so they are whole there.

        Args:
            point: a vertex whose reduced costs say which, where a relaxation with all rows would take long; by default that one's do.
        """
        budget = self.extra.matrix(self.extra.active)
        relaxation = self.engine.relax(budget) if point is None else point
        if self.plans.is_close() or relaxation is None:
            return []
        room = self.plans.best_s * SCALE - relaxation.bound
        columns = self.extra.with_excess(relaxation.reduced <= room + 1e-9 * abs(relaxation.bound))
        if self._has_plan and columns.sum() > SMALL:
            return []
        whole = ~self.extra.with_excess(np.zeros(len(columns), bool)) if self.extra.phases else None
        found = self.engine.restricted(
            columns, budget, gap=self.gap, target=-np.inf, max_nodes=max_nodes, start=self._start(columns), whole=whole
        )
        proven = min(found.bound, self.plans.best_s * SCALE)
        broken = [] if found.values is None else self.plans.offer(found.values)
        self.proven.rise(proven)
        return broken

    @property
    def _is_large(self) -> bool:
        return len(self.engine.names) >= LARGE

    @property
    def _has_plan(self) -> bool:
        return bool(np.isfinite(self.plans.best_s))

    def _among(self, known: Floats, point: Point) -> list[int]:
        """Over the strategies that a solution takes, whole or in part; less the columns that no better plan has."""
        columns = point.reduced <= self.plans.best_s * SCALE - point.bound
        for row in self.program.x:
            places = np.array([self.engine.column[v.name] for v in row], np.int32)
            columns[places[known[places] <= _USED]] = False
        return self.over(self.extra.with_excess(columns))

    def _start(self, columns: Columns) -> Floats | None:
        known = self.plans.start
        return known if known is not None and not known[~columns].any() else None
