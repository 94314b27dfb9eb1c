"""What users may pass as hardware: one profile, or, of unequal devices, one per index along an axis of the mesh."""

from __future__ import annotations

from autopar.api.arguments import MeshLike, as_mesh
from autopar.devices import HardwareLike, hardware_of, is_unshaped
from autopar.hardware import Hardware
from autopar.plans import Plan


def as_hardware(hardware: HardwareLike, mesh: MeshLike) -> Hardware:
    """Read what users pass as hardware for a mesh, as `autopar.devices.hardware_of`.

    Raises:
        HardwareError: where a profile is not there, or the mesh has no such axis, or not so many devices along it.
    """
    return hardware_of(hardware, mesh if is_unshaped(mesh) else as_mesh(mesh))


def of_plan(plan: Plan, hardware: HardwareLike | None = None) -> Hardware:
    """Hardware for a plan's mesh; by default what the plan was made for.

    Raises:
        HardwareError: where a profile is not here under the name that the plan has: pass its path, or a profile.
    """
    return as_hardware(planned_for(plan) if hardware is None else hardware, plan.mesh)


def planned_for(plan: Plan) -> HardwareLike:
    """What a plan was made for, by name."""
    mark = plan.fingerprint
    return {mark.axis: [name for name, _ in mark.profiles]} if mark.axis else mark.profile
