"""`offload`: what may lie in the memory of the devices' hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.errors import ConstraintError


@dataclass(frozen=True, slots=True)
class Offloaded:
    """What may be offloaded; see `offload`."""

    parameters: bool
    activations: bool
    host_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        return {"plan": "offload", "parameters": self.parameters, "activations": self.activations, "host_bytes": self.host_bytes}

    def __str__(self) -> str:
        arguments = [f"{name}=False" for name in ("parameters", "activations") if not getattr(self, name)]
        arguments += [] if self.host_bytes is None else [f"host_bytes={self.host_bytes}"]
        return f"offload({', '.join(arguments)})"


def offload(*, parameters: bool = True, activations: bool = True, host_bytes: int | None = None) -> Offloaded:
    """Let the planner put what it likes into the memory of the devices' hosts, by what it costs and what memory is worth.

    A parameter that rests there has its optimizer's state and the gradient that a step leaves there too, and the host's processors take the
    optimizer's step (Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021, section 4). It is copied to the device
    once a step, or once for forward and once for backward (Rajbhandari et al., "ZeRO-Infinity", 2021, section 5), each device its own part,
    which is gathered there. What forward keeps for backward may wait there: stored when it is made, fetched before it is read.

    This allows, and forces nothing: each parameter, and each kept tensor in each layout, goes where the optimum has it. To force a
    parameter there, `layout(pattern, storage="S(0) host")`.

    Args:
        parameters, activations: whether these may. host_bytes: what a device may use of its host; by default four fifths of its share
            in the hardware's profile.

    Raises:
        ConstraintError: where nothing may, or `host_bytes` is no number of bytes. When a model is planned: where the hardware's profile
            says nothing of a host.
    """
    if not (parameters or activations):
        raise ConstraintError("offload(parameters=False, activations=False) lets nothing be offloaded", remedy="leave it out")
    if host_bytes is not None and (not isinstance(host_bytes, int) or host_bytes <= 0):
        raise ConstraintError(f"host_bytes={host_bytes!r} is no budget", remedy="pass bytes per device, for example 128 * 2**30")
    return Offloaded(bool(parameters), bool(activations), host_bytes)
