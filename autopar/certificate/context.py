"""What a plan is certified under: its constraints, and, for a pipeline's stage, what surrounds it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.capture.trace import Trace
from autopar.constraints import check, read_constraint
from autopar.cost.price import price
from autopar.cost.priced import Crossing, Priced
from autopar.hardware import HardwareProfile
from autopar.plans import Plan
from autopar.run.orders import Action
from autopar.run.returned import Returned
from autopar.strategies import Forced, classes_of, resolve


@dataclass(frozen=True, slots=True)
class Context:
    """The surroundings of a plan.

    Attributes:
        forced: what constraints force. crossing: how tensors cross to a stage's neighbours.
        num_microbatches, num_in_flight: of a stage. schedule: its name, ``""`` for a plan without stages.
        batch_bytes: of the whole batch, which is there during a step of several microbatches.
        returned: what calls of a pipeline return.
        stage, actions: its number, and what its rank does, where the rank holds other stages beside it.
    """

    forced: Forced
    crossing: Crossing = field(default_factory=Crossing)
    num_microbatches: int = 1
    num_in_flight: int = 1
    schedule: str = ""
    batch_bytes: int = 0
    returned: Returned | None = None
    stage: int = 0
    actions: tuple[Action, ...] = ()

    @property
    def accumulates(self) -> bool:
        """Whether gradients are added to sums, and parameters may be held gathered, through a step."""
        return self.num_microbatches > 1 or self.forced.named.holds

    @staticmethod
    def of(trace: Trace, plan: Plan) -> Context:
        """Of a plan without stages, under the constraints that it records.

        Raises:
            ConstraintError: where one is no constraint, or cannot hold.
        """
        constraints = [read_constraint(data) for data in plan.options.get("constraints", ())]
        for constraint in constraints:
            check(constraint, plan.mesh)
        return Context(replace(resolve(trace, constraints, plan.mesh), starts=plan.starts))

    def problem(self, trace: Trace, plan: Plan, profile: HardwareProfile) -> Priced:
        """The problem that the plan claims to solve."""
        classes = classes_of(trace, plan.mesh.shape, self.forced)
        budget, optimizer = int(plan.options.get("memory_bytes", 0)), str(plan.options["optimizer"])
        return price(
            trace, classes, plan.mesh, profile, budget_bytes=budget, optimizer=optimizer, forced=self.forced, crossing=self.crossing,
            num_microbatches=self.num_microbatches, num_in_flight=self.num_in_flight,
        )  # fmt: skip
