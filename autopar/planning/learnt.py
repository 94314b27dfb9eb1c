"""What the plans of one problem that were over the budget have taught, as its moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.capture.trace import Trace
from autopar.choices import Choices, Multipliers
from autopar.cost.learnt import by_trace_node, explained, over_budget
from autopar.cost.moments import Liveness
from autopar.cost.priced import Priced
from autopar.cost.widening import WIDENED
from autopar.problem import Moment, Problem
from autopar.run.memory import NodePeak
from autopar.strategies import Starts


@dataclass(frozen=True, slots=True)
class Learnt:
    """Moments beside those that are certain.

    Attributes:
        latest: by node, as they were in the last plan that was looked at. retained: as they were in others before.
    """

    liveness: Liveness
    latest: Mapping[str, Moment]
    retained: tuple[Moment, ...] = ()

    @staticmethod
    def nothing(liveness: Liveness) -> Learnt:
        return Learnt(liveness, {})

    @staticmethod
    def expected(liveness: Liveness, reserves: Mapping[str, int]) -> Learnt:
        """Moments with reserves that were learnt where layers are in other groups."""
        phases = {node: liveness.trace.node(node.removesuffix(WIDENED)).meta["phase"] for node in reserves}
        return Learnt(liveness, {n: replace(liveness.moment(n, phases[n]), reserve_bytes=size) for n, size in reserves.items()})

    def __bool__(self) -> bool:
        return bool(self.latest)

    @property
    def moments(self) -> tuple[Moment, ...]:
        """All of the problem's, those that are certain first."""
        return (*self.liveness.certain(), *self.latest.values(), *self.retained)

    @property
    def reserves(self) -> dict[str, int]:
        """By node."""
        return {node: moment.reserve_bytes for node, moment in self.latest.items()}

    def further(self, choices: Choices, peaks: Iterable[NodePeak], beside_bytes: int, budget: int) -> Learnt:
        """With the moments at which a plan is over the budget, and those known before as they were in it.

        Args:
            peaks: of the emitted program. beside_bytes: what it does not hold itself.
        """
        seen = by_trace_node(self.liveness, peaks, beside_bytes)
        wanted = dict.fromkeys([*self.latest, *over_budget(self.liveness, seen, budget)])
        return replace(self, latest=explained(self.liveness, choices, seen, wanted))

    def lasting(self) -> Learnt:
        """The same, as it is now also beside what is learnt from now on."""
        first = len(self.retained)
        now = (replace(moment, key=f"{moment.key} ({first + n})") for n, moment in enumerate(self.latest.values()))
        return replace(self, retained=(*self.retained, *now))


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Layers in groups that decide alike, their problem, and what is known of it.

    Attributes:
        starts: where groups begin, by list of layers; empty where all equal layers decide alike.
        bound_s: no plan takes less; 0 where nothing is proven. multipliers: prove it by arithmetic.
    """

    priced: Priced
    learnt: Learnt
    starts: Starts
    bound_s: float = 0.0
    multipliers: Multipliers | None = None

    @staticmethod
    def of(trace: Trace, priced: Priced, starts: Starts) -> LayerGroups:
        """Groups of which nothing is known yet."""
        return LayerGroups(priced, Learnt.nothing(Liveness(trace, priced)), starts)

    @property
    def problem(self) -> Problem:
        """The problem with all moments that are known."""
        return replace(self.priced.problem, moments=self.learnt.moments)

    def forget(self) -> LayerGroups:
        """Drop the learned moments; the bound stays."""
        return replace(self, learnt=Learnt.nothing(self.learnt.liveness))
