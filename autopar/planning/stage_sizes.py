"""The least memory of pipelines, over all cuts: what each possible stage needs at least, and the cut whose neediest stage needs least."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.cost.price import price
from autopar.planning.asked import Asked
from autopar.planning.options import UNLIMITED
from autopar.planning.smallest import proven_bytes
from autopar.planning.units import Unit, balanced
from autopar.run.orders import num_in_flight
from autopar.stages import CutPoint, cut
from autopar.strategies import Forced, classes_of

_MOST = 40  # stages whose problems are looked at; beyond, what rests bounds all cuts


def light_cuts(units: Sequence[Unit], in_flight: Sequence[int]) -> tuple[int, ...]:
    """Cuts whose neediest stage needs little, as indices of units."""
    sizes = [replace(u, time_s=float(u.static_bytes + max(in_flight) * u.kept_bytes)) for u in units]
    return balanced(sizes, in_flight, UNLIMITED)


@dataclass
class StageSizes:
    """Of the stages of one pipeline."""

    asked: Asked
    forced: Forced
    points: Sequence[CutPoint]
    _known: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def proven(self, cuts: Sequence[int] | None) -> tuple[int, tuple[int, ...] | None]:
        """No pipeline needs less on its neediest device; and the cuts of which no more is proven, None where they were not looked at.

        Args:
            cuts: those that are asked for, as indices of units; None for all.
        """
        num, num_stages = len(self.points) + 1, self.asked.num_stages
        if cuts is not None or num_stages == 1:
            edges = [0, *(cuts or ()), num]
            return max(self._stage(*edge, stage) for stage, edge in enumerate(itertools.pairwise(edges))), tuple(cuts or ())
        spare = num - num_stages  # units beyond one per stage
        if 2 * (spare + 1) + (num_stages - 2) * (spare + 1) * (spare + 2) // 2 > _MOST:
            return self._resting(), None
        least: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
        for stage in range(num_stages):
            ends = [num] if stage == num_stages - 1 else range(stage + 1, num - (num_stages - stage - 1) + 1)
            least = {
                end: min((max(size, self._stage(i, end, stage)), (*made, end)) for i, (size, made) in least.items() if i < end)
                for end in ends
            }
        size, made = least[num]
        return size, made[:-1]

    def _stage(self, first: int, end: int, number: int) -> int:
        """What a stage of these units needs at least, whatever the layouts of what crosses."""
        asked = self.asked
        flying = num_in_flight(asked.wish.schedule, asked.num_stages, asked.how.num, asked.wish.chunks)[number]
        key = first, end, flying
        if key not in self._known:
            positions = [self.points[border - 1].position for border in (first, end) if 0 < border <= len(self.points)]
            stage = cut(asked.part, positions).stages[1 if first else 0] if positions else asked.part
            classes = classes_of(stage, asked.left.shape, self.forced)
            priced = price(
                stage, classes, asked.left, asked.profile, budget_bytes=UNLIMITED, optimizer=asked.options.optimizer, forced=self.forced,
                crossing=asked.crossing, num_microbatches=asked.how.num, num_in_flight=flying,
            )  # fmt: skip
            self._known[key] = proven_bytes(stage, priced, asked.options.time_limit_s)
        return self._known[key]

    def _resting(self) -> int:
        """Of what rests, a rank's part."""
        asked = self.asked
        classes = classes_of(asked.part, asked.left.shape, self.forced)
        priced = price(
            asked.part, classes, asked.left, asked.profile, budget_bytes=UNLIMITED, optimizer=asked.options.optimizer, forced=self.forced,
            num_microbatches=asked.how.num,
        )  # fmt: skip
        parameters = [op for op, source in zip(priced.problem.ops, priced.sources, strict=True) if source.kind == "parameter"]
        total = sum(op.count * min(s.static_bytes for s in op.strategies) for op in parameters)
        return total * asked.wish.chunks // asked.num_stages
