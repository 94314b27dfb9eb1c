"""Branch and bound over live relaxations (`autopar.solve.highs`).

A node is a box of bounds: some ops have a fixed strategy or excluded strategies. Once all ops are
fixed, kept versions and recomputation are fixed too. The duals of its relaxation prove a bound for
the box, and its rounded solution is offered as a plan. A node is closed if its bound is within the
requested gap of the best plan. First, one box is made smaller and smaller to find a plan early.
Then the node with the least bound is next, or, until there is a plan, the better child of the last
node.

The op to branch on is the one whose two boxes have the highest bounds. This is tried for a few ops
per node; once an op was tried twice, its average is used. Relaxations of neighbouring nodes differ
by a few simplex steps, so a node costs hundredths of a second, while a restart costs seconds.
Limits count relaxations and simplex steps, also per relaxation: a box that needs too many steps
keeps the bound of its parent.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.solve.formulation import Formulation
from autopar.solve.highs import Engine, Live, Point
from autopar.solve.lp import Floats

Key = tuple[
    int, int
]  # (0, op), or (1, position of a bit of recomputation, kept versions or shared memory)
Places = NDArray[np.int32]
"""Columns of the program, by their position."""
_WHOLE = 1e-6  # distance from 0 or 1 below which a value counts as integral
_TRIED, _OFTEN = 6, 2  # ops to try per node; tries per op
_DIVE = 3  # a dive fixes one third of the free variables at a time
_PER_ROW = (
    1 / 3
    # limit of simplex steps per row: about as many as a relaxation from scratch takes; at least
    # `_FEWEST` in total
)
_FEWEST = 1000
_STEPS = 4  # limit of a whole tree, in such relaxations; more of them seldom close it
_SHORT = 0.25  # limit of a short dive, likewise


@dataclass(frozen=True, slots=True)
class _Node:
    lower: Floats
    upper: Floats
    point: Point


@dataclass(frozen=True, slots=True)
class Grown:
    """The result of a tree.

    Attributes:
        bound: lower bound of all plans, in the program's unit.
        broken: budget rows to add; if there are any, the bound is that of the root.
    """

    bound: float
    broken: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BranchingVariables:
    """The columns that a tree fixes.

    Attributes:
        num_columns: columns of the whole program.
        choices: by op, the columns of its strategies.
        bits: binary columns: recomputation, kept versions and shared memory of kernels.
        bit_sizes: of each bit, its largest share of a budget in the present rows.
        num_rows: rows of the program.
    """

    num_columns: int
    choices: Sequence[Places]
    bits: Places
    bit_sizes: Floats
    num_rows: int

    @staticmethod
    def of(program: Formulation, engine: Engine, sizes: Floats) -> BranchingVariables:
        """Find the columns of a program to fix.

        Args:
            program, engine: the program, and its arrays.
            sizes: per column, its largest share of a budget in the present rows.
        """
        column = engine.column
        choices = [np.array([column[v.name] for v in row], np.int32) for row in program.x]
        again = [column[v.name] for row in program.recomputed.values() for v in row]
        regions = [column[v.name] for v in program.regions.values()]
        regions = [region for region in regions if sizes[region] > 0.0]  # the others are free
        keep_columns = [column[v.name] for v in program.keep.values()]
        bits = np.array([*again, *keep_columns, *regions], np.int32)
        num_rows = len(engine.rows.lower)
        return BranchingVariables(len(engine.cost), choices, bits, sizes[bits], num_rows)


@dataclass
class _Effort:
    """The work and the limits of a tree.

    Attributes:
        per_relaxation: simplex steps of a relaxation from scratch.
        max_relaxations, last_step: the limits; the live relaxation counts steps.
        num_relaxations: solved relaxations.
    """

    per_relaxation: int
    max_relaxations: int
    last_step: int = 0
    num_relaxations: int = 0


class Tree:
    """One tree.

    Args:
        max_relaxations: how many it may solve.

    Attributes:
        offer: offers rounded values of the columns as a plan, and returns budget rows to add.
        best: returns the cost of the best plan.
        wanted: the relative gap at which to stop.
    """

    def __init__(
        self,
        variables: BranchingVariables,
        live: Live,
        offer: Callable[[Floats], Sequence[int]],
        best: Callable[[], float],
        wanted: float,
        max_relaxations: int,
    ) -> None:
        self.variables, self.live = variables, live
        self.offer, self.best, self.wanted = offer, best, wanted
        unit = max(int(_PER_ROW * variables.num_rows), _FEWEST)
        self._effort = _Effort(unit, max_relaxations)
        self.root: _Node | None = None
        self._closed: float = np.inf  # the least bound of nodes that are not branched further
        self._gains: dict[Key, list[float]] = {}
        self._broken: tuple[int, ...] = ()

    @property
    def num_relaxations(self) -> int:
        """Relaxations that were solved so far."""
        return self._effort.num_relaxations

    def dive(self) -> Grown:
        """Solve the root and a short sequence of nested boxes, each of which is offered as a
        plan."""
        n = self.variables.num_columns
        self.root = self._at(np.zeros(n), np.ones(n))
        if self.root is None:
            return Grown(np.inf)
        steps = int(_SHORT * self._effort.per_relaxation)
        self._effort.last_step = self.live.num_iterations + steps
        self._dive(self.root)
        return Grown(self.root.point.bound, self._broken)

    def branch(self, more: int | None = None) -> Grown:
        """Dive, then branch from the root until the gap is closed, there is a budget row to add, or
        a limit is reached.

        Args:
            more: limit of relaxations after the dive, if it is lower than that of the tree.
        """
        root, effort = self.root, self._effort
        assert root is not None, "the dive has found one"
        if more is not None:
            effort.max_relaxations = min(effort.max_relaxations, effort.num_relaxations + more)
        effort.last_step = self.live.num_iterations + _STEPS * effort.per_relaxation
        self._dive(root)
        open_bounds = self._grow(root)
        if self._broken:
            return Grown(root.point.bound, self._broken)
        return Grown(max(root.point.bound, min([self._closed, *open_bounds])))

    def _grow(self, root: _Node) -> list[float]:
        """Branch until no box is open, or a limit is reached.

        Returns:
            The bounds of the boxes that are still open.
        """
        order = itertools.count()
        waiting = [(root.point.bound, next(order), root)]
        last: _Node | None = None  # the better child, which is next while there is no plan
        while (waiting or last) and not self._broken and not self._spent():
            if last is None and self._is_done(waiting[0][0]):
                break
            children = self._branch_node(last or heapq.heappop(waiting)[2])
            last = (
                min(children, key=lambda c: c.point.bound, default=None)
                if np.isinf(self.best())
                else None
            )
            for child in children:
                if child is not last:
                    heapq.heappush(waiting, (child.point.bound, next(order), child))
        bounds = [bound for bound, _, _ in waiting]
        return bounds if last is None else [*bounds, last.point.bound]

    def _dive(self, root: _Node) -> None:
        """Fix nearly integral variables, a share of them at a time, ops first, and offer each box
        as a plan. Stop if no plan in the box can be better, or all variables are fixed."""
        node: _Node | None = root
        while (
            node is not None and len(node.point.values) and not self._broken and not self._spent()
        ):
            if node.point.bound >= self._enough():
                return
            lower, upper, values = node.lower.copy(), node.upper.copy(), node.point.values
            ops = sorted(
                (
                    columns
                    for columns in self.variables.choices
                    if values[columns].max() < 1.0 - _WHOLE
                ),
                key=lambda c: -float(values[c].max()),
            )
            for columns in ops[: max(len(ops) // _DIVE, 1)]:
                upper[columns[columns != columns[int(np.argmax(values[columns]))]]] = 0.0
            if not ops:
                bits = self.variables.bits
                far = np.minimum(values[bits], 1.0 - values[bits])
                open_ = [i for i in np.argsort(far, kind="stable").tolist() if far[i] > _WHOLE]
                if not open_:
                    return
                near = bits[open_[: max(len(open_) // _DIVE, 1)]]
                lower[near] = upper[near] = np.round(values[near])
            node = self._at(lower, upper, node.point.bound)

    def _enough(self) -> float:
        best = self.best()
        return best * (1 - self.wanted) if np.isfinite(best) else np.inf

    def _is_done(self, least: float) -> bool:
        """Return whether no open box is worth branching, given the least of their bounds."""
        return min(least, self._closed) >= self._enough() or self._is_proven(least)

    def _is_proven(self, least: float) -> bool:
        """Return whether there is a plan and no open box can raise the bound, given the least of
        their bounds, since a closed box proves no more. This happens if the relaxation's prices
        assume early communication to be hidden (`autopar.solve.lazy_rows`), and fixed decisions
        cost more than at these prices."""
        return bool(np.isfinite(self.best())) and least >= self._closed

    def _spent(self) -> bool:
        return (
            self._effort.num_relaxations >= self._effort.max_relaxations
            or self.live.num_iterations >= self._effort.last_step
            or self.live.is_over
        )

    def _at(self, lower: Floats, upper: Floats, around: float | None = None) -> _Node | None:
        """Solve the node of a box and offer it as a plan; None if the box is empty.

        Args:
            lower, upper: bounds of the columns.
            around: the bound of the parent, used if the step limit ends the solve; None for the
                root.
        """
        self._effort.num_relaxations += 1
        point = (
            self.live.solve(lower, upper)
            if around is None
            else self.live.solve(lower, upper, self._effort.per_relaxation)
        )
        if point is None:
            return None
        if around is not None and not len(point.values):
            point = replace(point, bound=max(point.bound, around))
        if point.bound < self.best() and len(point.values) and not self._broken:
            self._broken = tuple(self.offer(point.values))
        return _Node(lower, upper, point)

    def _branching_keys(self, values: Floats) -> list[Key]:
        """List the candidates to branch on: the least settled ops, and the fractional bits that
        take most memory. If all ops are settled, list any fractional bits; none if there are
        none."""
        choices, bits = self.variables.choices, self.variables.bits
        shares = ((1.0 - float(values[columns].max()), (0, n)) for n, columns in enumerate(choices))
        ops = sorted((-min(share, 1 - share), key) for share, key in shares if share > _WHOLE)
        fractions, sizes = np.minimum(values[bits], 1 - values[bits]), self.variables.bit_sizes
        worth = fractions * sizes if ops else fractions * (1 + sizes)
        fractional = np.flatnonzero(fractions > _WHOLE)
        heavy = sorted((-worth[i], (1, int(i))) for i in fractional if worth[i] > _WHOLE)
        return [key for _, key in (*ops[:_TRIED], *heavy[:_TRIED])]

    def _branch_node(self, node: _Node) -> list[_Node]:
        """Split a node, and return the boxes that may hold a better plan."""
        bound = node.point.bound
        if bound >= self._enough() or not len(node.point.values):
            self._closed = min(self._closed, bound)
            return []
        some = self._branching_keys(node.point.values)
        if not some:  # all are integral, and a plan of this cost was offered
            self._closed = min(self._closed, bound)
            return []
        scored: list[tuple[float, Key, list[_Node | None] | None]] = []
        for key in some:
            if scored and self._spent():
                break
            gains = self._gains.setdefault(key, [])
            if len(gains) >= _OFTEN:
                scored.append((sum(gains) / len(gains), key, None))
                continue
            pair = self._pair(node, key)
            gains.append(_gain(bound, pair))
            scored.append((gains[-1], key, pair))
        _, key, known = max(scored, key=lambda s: s[0])
        children = [
            child
            for child in (self._pair(node, key) if known is None else known)
            if child is not None
        ]
        self._closed = min(
            [
                self._closed,
                *(child.point.bound for child in children if child.point.bound >= self._enough()),
            ]
        )
        return [child for child in children if child.point.bound < self._enough()]

    def _pair(self, node: _Node, key: Key) -> list[_Node | None]:
        """Split a node into two boxes: one excludes the strategy with the largest value in the
        relaxation, the other fixes it."""
        group, index = key
        without, with_it = node.upper.copy(), (node.lower.copy(), node.upper.copy())
        if group:
            column = self.variables.bits[index]
            without[column] = 0.0
            with_it[0][column] = 1.0
        else:
            columns = self.variables.choices[index]
            most = columns[int(np.argmax(node.point.values[columns]))]
            without[most] = 0.0
            with_it[1][columns[columns != most]] = 0.0
        return [
            self._at(node.lower, without, node.point.bound),
            self._at(*with_it, node.point.bound),
        ]


def _gain(bound: float, pair: Sequence[_Node | None]) -> float:
    """Return how much a pair raises the bound: the smaller increase plus a tenth of the larger."""
    rises = sorted(np.inf if child is None else child.point.bound - bound for child in pair)
    return rises[0] + 0.1 * min(rises[1], abs(bound))
