"""A problem without some of its strategies, and its solution in terms of the whole problem."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.core.problem import MemoryPoint, Op, OverlapKernel, Problem
from autopar.core.solution import Solution

_Kept = Mapping[int, tuple[int, ...]]  # op → its remaining strategies, for ops that lose some
_Live = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class SmallerProblem:
    """A problem without some strategies.

    Attributes:
        problem: the problem, with its strategies renumbered.
        kept: op → the numbers of its remaining strategies in the whole problem, for ops that lose
            some.
    """

    problem: Problem
    kept: _Kept

    @staticmethod
    def of(whole: Problem, excluded: Mapping[int, Collection[int]]) -> SmallerProblem:
        """Exclude strategies of a problem, also from recomputation.

        Args:
            whole: the problem.
            excluded: op → excluded strategies; each op keeps at least one.
        """
        strategies_left = {
            n: tuple(s for s in range(len(whole.ops[n].strategies)) if s not in out)
            for n, out in excluded.items()
        }
        numbers = {(n, s): new for n, each in strategies_left.items() for new, s in enumerate(each)}
        problem = replace(
            whole,
            ops=tuple(
                _with_strategies(op, strategies_left.get(n)) for n, op in enumerate(whole.ops)
            ),
            moments=tuple(_smaller_moment(moment, strategies_left) for moment in whole.moments),
            kernels={
                where: tuple(
                    filter(None, (_smaller_kernel(k, strategies_left, numbers) for k in offered))
                )
                for where, offered in whole.kernels.items()
            },
            routes={
                (n, numbers[n, s] if n in strategies_left else s): route
                for (n, s), route in whole.routes.items()
                if n not in strategies_left or (n, s) in numbers
            },
        )
        return SmallerProblem(problem, strategies_left)

    def at_moments(self, whole: Problem) -> SmallerProblem:
        """Return the same problem with the moments of another whole problem that differs in its
        moments only."""
        moments = tuple(_smaller_moment(moment, self.kept) for moment in whole.moments)
        return replace(self, problem=replace(self.problem, moments=moments))

    def restore(self, found: Solution) -> Solution:
        """Return a solution in terms of the whole problem. Its bound and multipliers hold only for
        the smaller problem."""
        return replace(
            found,
            strategies=tuple(self._number(n, s) for n, s in enumerate(found.strategies)),
            recomputed={n: self._number(n, s) for n, s in found.recomputed.items()},
            mixed={},
            split=None,
        )

    def _number(self, n: int, s: int) -> int:
        return self.kept[n][s] if n in self.kept else s


def _with_strategies(op: Op, kept: tuple[int, ...] | None) -> Op:
    return op if kept is None else replace(op, strategies=tuple(op.strategies[s] for s in kept))


def _smaller_moment(moment: MemoryPoint, kept: _Kept) -> MemoryPoint:
    return replace(
        moment,
        live=_smaller_live(moment.live, kept),
        recomputed=_smaller_live(moment.recomputed, kept),
    )


def _smaller_live(live: _Live, kept: _Kept) -> _Live:
    return tuple((n, tuple(sizes[s] for s in kept[n]) if n in kept else sizes) for n, sizes in live)


def _smaller_kernel(
    kernel: OverlapKernel, kept: _Kept, numbers: Mapping[tuple[int, int], int]
) -> OverlapKernel | None:
    """Return the kernel with the remaining strategies; None if it can no longer be used."""

    def renumber(n: int, strategies: Iterable[int]) -> tuple[int, ...]:
        """Renumber the remaining strategies of one op."""
        if n not in kept:
            return tuple(strategies)
        return tuple(numbers[n, s] for s in strategies if (n, s) in numbers)

    smaller = replace(
        kernel,
        strategies=renumber(kernel.op, kernel.strategies),
        added=kernel.added and (kernel.added[0], renumber(*kernel.added)),
        also=tuple((n, renumber(n, strategies)) for n, strategies in kernel.also),
    )
    lists = [
        smaller.strategies,
        *(each[1] for each in (*smaller.also, *filter(None, [smaller.added]))),
    ]
    return smaller if all(lists) else None
