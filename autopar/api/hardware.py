"""What users may pass as hardware: one profile, or, of unequal devices, one per index along an axis of the mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from autopar.api.arguments import MeshLike, as_mesh, is_unshaped
from autopar.errors import HardwareError
from autopar.hardware import Hardware, HardwareProfile, Mixed
from autopar.mesh import Mesh
from autopar.plans import Plan

ProfileLike: TypeAlias = str | Path | HardwareProfile
HardwareLike: TypeAlias = ProfileLike | Mixed | Mapping[str, Sequence[ProfileLike]]
_FORM = 'one axis of the mesh and a profile per index along it, {"stage": ["h100-sxm", "a100-sxm-80gb"]}'


def as_hardware(hardware: HardwareLike, mesh: MeshLike) -> Hardware:
    """Read what users pass as hardware for a mesh: a profile, its name or path, or a mapping from an axis to one per index along it; as
    text ``stage=h100-sxm,a100-sxm-80gb``.

    Raises:
        HardwareError: where a profile is not there, or the mesh has no such axis, or not so many devices along it.
    """
    if isinstance(hardware, HardwareProfile):
        return hardware
    if isinstance(hardware, str | os.PathLike):
        axis, along = _parsed(os.fspath(hardware))
        return as_hardware({axis: along}, mesh) if axis else HardwareProfile.load(hardware)
    found = hardware if isinstance(hardware, Mixed) else _mixed(hardware)
    if is_unshaped(mesh):
        what = f"hardware= names profiles along {found.axis!r}, and the shape of the mesh is the planner's choice"
        raise HardwareError(what, remedy=f'pass a mesh with that axis, autopar.Mesh({{"{found.axis}": {len(found.profiles)}, ...}})')
    return _on(found, as_mesh(mesh))


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


def _mixed(hardware: object) -> Mixed:
    if not isinstance(hardware, Mapping):
        raise HardwareError(f"hardware={hardware!r} is no profile", remedy=f"name a profile, pass one, or {_FORM}")
    if len(hardware) != 1:
        what = f"hardware= has profiles along {' and '.join(map(repr, hardware)) or 'no axis'}"
        raise HardwareError(what, remedy=f"devices may differ along one axis: pass {_FORM}")
    ((axis, along),) = hardware.items()
    if isinstance(along, str | os.PathLike | HardwareProfile) or not isinstance(along, Sequence):
        raise HardwareError(f"hardware= has {along!r} along {axis!r}, which is no list of profiles", remedy=f"pass {_FORM}")
    wrong = [each for each in along if not isinstance(each, str | os.PathLike | HardwareProfile)]
    if wrong:
        raise HardwareError(f"hardware= has {wrong[0]!r} along {axis!r}, which is no profile", remedy=f"pass {_FORM}")
    return Mixed(axis, tuple(each if isinstance(each, HardwareProfile) else HardwareProfile.load(each) for each in along))


def _on(mixed: Mixed, mesh: Mesh) -> Mixed:
    """Raises:
    HardwareError: where the mesh has no such axis, or not so many devices along it.
    """
    if mixed.axis not in mesh.names:
        what = f"hardware= names profiles along {mixed.axis!r}, which mesh {mesh} does not have"
        raise HardwareError(what, remedy=f"its axes are {', '.join(mesh.names)}")
    size, num = mesh.shape[mesh.names.index(mixed.axis)], len(mixed.profiles)
    if size != num:
        what = f"hardware= names {num} profile{'s' if num != 1 else ''} along {mixed.axis!r}, and mesh {mesh} has {size} devices along it"
        raise HardwareError(what, remedy=f"pass {size}, one per index, also where several are the same")
    return mixed


def _parsed(text: str) -> tuple[str, list[str]]:
    """The axis and its profiles of ``stage=h100-sxm,a100-sxm-80gb``; no axis where the text is a name or a path."""
    axis, equals, along = text.partition("=")
    if not equals or os.sep in axis or os.path.exists(text):
        return "", []
    return axis.strip(), [name.strip() for name in along.split(",")]
