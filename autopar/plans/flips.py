"""The hardware changes that change choices of a plan, as text (found by
`autopar.planner.sensitivity`), and the mesh axes that a plan does not use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.plans.plan import Plan

COMPUTE = "compute"
FARTHEST = 64.0  # larger factors are not tried
NO_CHOICE = "no choice can change: the constraints leave no choice of another strategy"
NO_OTHER = "no choice can change: no op has another strategy on this mesh"
NO_DEARER = "no choice can change: all runner-ups cost the same, or several stages decide together"
NO_FLIP = (
    "none of the choices with the closest runner-ups changes if the bandwidth of a link, or the "
    f"speed of compute, is between 1/{FARTHEST:g} and {FARTHEST:g} times its value"
)


@dataclass(frozen=True, slots=True)
class Flip:
    """A choice, and the hardware change that makes its runner-up as fast.

    Attributes:
        key: key of the entry.
        strategy: the runner-up.
        delta_s: seconds by which the runner-up lengthens a step, or a microbatch of a stage, on the
            given hardware.
        what: ``compute``, or the name of a link.
        factor: factor of its speed at which both cost the same.
        stage: the stage of the entry, in a plan with a pipeline.
    """

    key: str
    strategy: str
    delta_s: float
    what: str
    factor: float
    stage: int | None = None

    @property
    def change(self) -> str:
        """The hardware change in words: ``2.1 times the bandwidth of link inter``."""
        resource = (
            "the speed of compute" if self.what == COMPUTE else f"the bandwidth of link {self.what}"
        )
        return (
            f"{f'{self.factor:.3g} times' if self.factor > 1 else f'1/{1 / self.factor:.3g} of'}"
            f" {resource}"
        )

    def __str__(self) -> str:
        prefix = "" if self.stage is None else f"stage {self.stage}: "
        return f"{prefix}{self.key} would change to {self.strategy} from {self.change} on"


class Flips(tuple[Flip, ...]):
    """The flips that were found, the smallest change first.

    Attributes:
        why: the reason if there are none.
    """

    why: str

    def __new__(cls, found: Iterable[Flip] = (), why: str = "") -> Flips:
        flips = super().__new__(cls, found)
        flips.why = "" if flips else why
        return flips

    def __str__(self) -> str:
        """Return one line per flip, or the reason if there is none."""
        return "\n".join(map(str, self)) or self.why

    def __repr__(self) -> str:
        return super().__repr__() if self else f"() because {self.why}" if self.why else "()"


# --------------------------------------------------------------------------------------------------
# Mesh axes that a plan does not use: all devices along them do the same work.


def idle_axes(plan: Plan) -> tuple[str, ...]:
    """Return the names of the axes with several devices along which the plan splits nothing, in the
    order of the mesh."""
    shared = {plan.stage_axis}
    for stage in plan.stages:
        strategies = {
            choice.strategy
            for entry in stage.entries
            if entry.kind == "compute"
            for choice in entry.nodes
        }
        for layout in {
            layout for strategy in strategies for layout in (*strategy.inputs, *strategy.outputs)
        }:
            shared |= {
                name
                for name, at in zip(stage.mesh.names, layout.placements, strict=True)
                if not at.is_replicate()
            }
    return tuple(axis.name for axis in plan.mesh.axes if axis.size > 1 and axis.name not in shared)
