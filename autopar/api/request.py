"""What is planned: a model, for which devices, and with which options. The public functions turn their arguments into a `PlanRequest`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from autopar.api.arguments import MeshLike
from autopar.devices import HardwareLike
from autopar.request import PlanOptions


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the planner is called with, beside the call of the model that is captured.

    Attributes:
        mesh: or what the planner is to shape. hardware: None for that of this machine.
        is_further: whether it is another call of what was compiled; one without a loss has outputs all the same.
    """

    model: nn.Module
    mesh: MeshLike
    hardware: HardwareLike | None
    options: PlanOptions
    is_further: bool = False
