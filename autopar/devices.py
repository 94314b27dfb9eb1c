"""What users say of devices: a mesh or what is to be one, and the hardware of it. Nothing here needs torch: what is mistyped does not wait
for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, TypeGuard

from autopar.errors import HardwareError, MeshError
from autopar.hardware import Hardware, HardwareProfile, Mixed
from autopar.mesh import Mesh, nodes_in

Unshaped: TypeAlias = int | tuple[int, int]  # a device count; nodes × devices per node
ProfileLike: TypeAlias = str | Path | HardwareProfile
HardwareLike: TypeAlias = ProfileLike | Mixed | Mapping[str, Sequence[ProfileLike]]
_FORM = 'one axis of the mesh and a profile per index along it, {"stage": ["h100-sxm", "a100-sxm-80gb"]}'


def read_mesh(text: str, devices_per_node: int | None = None) -> Mesh | Unshaped:
    """A mesh as the command line has it: axes, or what the planner is to shape, a device count or nodes × devices per node as 4x8.

    Args:
        devices_per_node: where the text does not say it; of axes by default as `Mesh` has it.

    Raises:
        MeshError: where it is none of these, or its nodes are not of so many devices.
    """
    found = int(text) if text.isdecimal() else nodes_in(text) or Mesh.parse(text)
    if devices_per_node is None:
        return found
    if isinstance(found, tuple):
        raise MeshError(f"mesh {text} says how many devices a node has", remedy="leave --devices-per-node out")
    total = found if isinstance(found, int) else found.num_devices
    if total % devices_per_node:
        raise MeshError(f"{total} devices are no whole nodes of {devices_per_node}", remedy="pass a divisor as --devices-per-node")
    if isinstance(found, int):
        return total // devices_per_node, devices_per_node
    return Mesh(found.axes, devices_per_node=devices_per_node, links=dict(found.links))


def is_unshaped(mesh: object) -> TypeGuard[Unshaped]:
    """Whether a mesh is a device count, or nodes × devices per node, whose shape is the planner's choice."""
    sizes = mesh if isinstance(mesh, tuple) and len(mesh) == 2 else (mesh,)
    return all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)


def read_hardware(hardware: HardwareLike) -> Hardware:
    """A profile, its name or path, or a mapping from an axis to one per index along it; as text ``stage=h100-sxm,a100-sxm-80gb``.

    Raises:
        HardwareError: where a profile is not there.
    """
    if isinstance(hardware, HardwareProfile | Mixed):
        return hardware
    if isinstance(hardware, str | os.PathLike):
        axis, along = _parsed(os.fspath(hardware))
        return _mixed({axis: along}) if axis else HardwareProfile.load(hardware)
    return _mixed(hardware)


def hardware_of(hardware: HardwareLike, mesh: Mesh | Unshaped) -> Hardware:
    """As `read_hardware`, for a mesh.

    Raises:
        HardwareError: also where the mesh has no such axis, or not so many devices along it.
    """
    found = read_hardware(hardware)
    if isinstance(found, HardwareProfile):
        return found
    if isinstance(mesh, Mesh):
        return _on(found, mesh)
    what = f"hardware= names profiles along {found.axis!r}, and the shape of the mesh is the planner's choice"
    raise HardwareError(what, remedy=f'pass a mesh with that axis, autopar.Mesh({{"{found.axis}": {len(found.profiles)}, ...}})')


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
