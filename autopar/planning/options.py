"""What a user may ask of the planner, as one frozen record."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from autopar.constraints import Constraint, check_number
from autopar.cost.priced import OPTIMIZERS
from autopar.errors import AutoparError, ConstraintError
from autopar.hardware import HardwareProfile
from autopar.run.executor import Batch, Outputs
from autopar.solve import check_solver

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What parameters may be read in where they rest in a wider dtype. Training in fp16 needs the loss scaled, by `torch.amp.GradScaler`."""
UNLIMITED = 2**60
"""Bytes of a budget that limits nothing."""
_BEHIND = 0.25  # share of a time limit that is left to what comes behind the last solve: emission, memory, the order of communications
RESERVED_SHARE = 0.1  # of the device's memory, left to the allocator, kernels' workspaces and communication buffers


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of `plan` and `compile`.

    Attributes:
        memory_bytes: budget per device; by default the profile's device memory less 10 %.
        optimizer: ``adamw``, ``adam``, ``sgd``, ``momentum`` or ``none``; sets the resting state and the step's traffic.
        constraints: what is forced (`autopar.constraints`).
        strict: refuse plans that run a tensor op replicated because no rule is known.
        gap: relative distance of incumbent and bound at which the search stops. time_limit_s: of all planning; by default none, as all
            other limits count work, so that the same input gives the same plan. When it is nearly over, the best plan so far is the answer;
            where there is none yet, the search goes on to the first.
        solver: ``highs``, or one of PuLP's that is on this machine (`autopar.solve.named`).
        num_microbatches: into how many microbatches a step's batch is cut, or ``"auto"``.
        loss_rows: rows of a cross entropy's logits that there are at a time on a device, 0 for all, or ``"auto"``.
        precision: ``"bf16"`` or ``"fp16"``: the dtype that wider floating parameters and inputs are read in;
            None: the dtypes that the model computes in by itself.
        ends: when, on the monotonic clock, the time of a planning that has begun is over (`begun`).
        inference: whether forward alone is planned. batch, outputs: as in `autopar.compile`; they bear on the peak.
    """

    memory_bytes: int | None = None
    optimizer: str = "adamw"
    constraints: tuple[Constraint, ...] = ()
    strict: bool = False
    gap: float = 0.01
    time_limit_s: float = math.inf
    solver: str = "highs"
    num_microbatches: int | Literal["auto"] = "auto"
    loss_rows: int | Literal["auto"] = "auto"
    precision: str | None = None
    inference: bool = False
    batch: Batch = "global"
    outputs: Outputs = "dtensor"
    ends: float = field(default=math.inf, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise AutoparError(f"optimizer {self.optimizer!r} is not known", remedy=f"pass one of {', '.join(OPTIMIZERS)}")
        if self.memory_bytes is not None and not (isinstance(self.memory_bytes, int | float) and self.memory_bytes > 0):
            raise AutoparError(f"memory_bytes={self.memory_bytes!r} is no budget", remedy="pass bytes per device, for example 80 * 2**30")
        if self.num_microbatches != "auto" and not (isinstance(self.num_microbatches, int) and self.num_microbatches >= 1):
            what = f"num_microbatches={self.num_microbatches!r} is no number of microbatches"
            raise AutoparError(what, remedy='pass a number from 1, or "auto"')
        if self.batch not in get_args(Batch):
            raise AutoparError(f"batch={self.batch!r} is not known", remedy=f"pass one of {', '.join(get_args(Batch))}")
        if self.outputs not in get_args(Outputs):
            raise AutoparError(f"outputs={self.outputs!r} is not known", remedy=f"pass one of {', '.join(get_args(Outputs))}")
        if self.loss_rows != "auto" and not (isinstance(self.loss_rows, int) and self.loss_rows >= 0):
            raise AutoparError(f"loss_rows={self.loss_rows!r} is no number of rows", remedy='pass a number from 0, or "auto"')
        if self.precision is not None and self.precision not in PRECISIONS:
            what = f"precision={self.precision!r} is not known"
            raise AutoparError(what, remedy=f"pass one of {', '.join(PRECISIONS)}, or None")
        if not 0 <= self.gap < 1:
            raise AutoparError(f"gap={self.gap} is no relative gap", remedy="pass a number from 0 to below 1, for example 0.01")
        if not self.time_limit_s > 0.0:
            what = f"time_limit_s={self.time_limit_s} is no limit"
            raise AutoparError(what, remedy="pass seconds of planning, for example 60, or leave it out")
        check_solver(self.solver)
        for constraint in self.constraints:
            if not isinstance(constraint, Constraint):
                raise ConstraintError(f"{constraint!r} is no constraint", remedy="make constraints with autopar.constraints")
        if self.num_microbatches != "auto":
            check_number(self.constraints, self.num_microbatches)

    def begun(self) -> PlanOptions:
        """These, of a planning that begins now, if none with them has begun."""
        return self if math.isfinite(self.ends) else replace(self, ends=time.monotonic() + self.time_limit_s)

    def worth_s(self, step_s: float) -> float:
        """What another plan is to take at most, beside one of this step: the less that it saves, the gap may cost, too."""
        return step_s * (1.0 - self.gap)

    @property
    def solve_s(self) -> float:
        """Seconds that a solve may take which begins now."""
        return max(self.ends - _BEHIND * self.time_limit_s - time.monotonic(), 0.0) if math.isfinite(self.ends) else self.time_limit_s

    @property
    def is_late(self) -> bool:
        """Whether no further solve is to begin if there is a plan."""
        return self.solve_s <= 0.0

    @property
    def is_over(self) -> bool:
        """Whether no time is left at all."""
        return time.monotonic() >= self.ends

    def budget(self, profile: HardwareProfile) -> int:
        """Bytes per device that a plan may use."""
        return self.memory_bytes or int(profile.device_memory_bytes * (1 - RESERVED_SHARE))

    def to_json(self, profile: HardwareProfile) -> Mapping[str, Any]:
        """What the plan records."""
        return {
            "memory_bytes": self.budget(profile),
            "optimizer": self.optimizer,
            "constraints": [c.to_json() for c in self.constraints],
            "strict": self.strict,
            "gap": self.gap,
            "num_microbatches": self.num_microbatches,
            "loss_rows": self.loss_rows,
            "precision": self.precision,
            "inference": self.inference,
            "batch": self.batch,
            "outputs": self.outputs,
        }
