"""The device mesh as the planner sees it: named axes, no process group.

Terms. A mesh is a row-major grid of devices; an *axis* is one of its directions. Ranks are numbered
row-major: the last axis is the fastest. The *link* of an axis is the slowest connection that two
neighbours on it must cross: ``"intra"`` within a node, ``"inter"`` between nodes. It follows from
the axis' stride and the number of devices in a node.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from autopar.core.hardware import Hardware, HardwareProfile, Mixed
from autopar.core.keywords import close_to
from autopar.errors import HardwareError, MeshError


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis: its name and its number of devices."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """Named mesh axes in row-major order.

    Args:
        axes: ``{"node": 4, "gpu": 8}``, a sequence of `MeshAxis`, or a device count (one axis,
            ``"gpu"``). Leave it out to name the axes as keywords: ``Mesh(node=4, gpu=8)``.
        devices_per_node: how many consecutive ranks share a node; by default the size of the last
            axis if there are several axes, else all devices up to 8.
        links: the link of each axis whose link does not follow from the stride, ``{"gpu":
            "inter"}``. sizes: the axes as keywords, if `axes` is left out.

    Raises:
        MeshError: if the axes are given twice or not at all, or on an empty mesh, a size below 1, a
            repeated, unknown or unreadable axis name.
    """

    axes: tuple[MeshAxis, ...]
    devices_per_node: int
    links: tuple[tuple[str, str], ...] = field(default=())

    def __init__(
        self,
        axes: Mapping[str, int] | Sequence[MeshAxis] | int | None = None,
        *,
        devices_per_node: int | None = None,
        links: Mapping[str, str] | None = None,
        **sizes: int,
    ) -> None:
        if isinstance(axes, str):
            raise MeshError(
                f"mesh axes must be a mapping of names to sizes, got the text {axes!r}",
                remedy=f"pass autopar.Mesh.parse({axes!r})",
            )
        if axes is None or sizes:
            axes = _named_axes(axes is not None, sizes)
        if isinstance(axes, int):
            axes = {"gpu": axes}
        if isinstance(axes, Mapping):
            axes = tuple(MeshAxis(name, size) for name, size in axes.items())
        axes = tuple(axes)
        _check_axes(axes, links or {})
        if devices_per_node is None:
            total = math.prod(axis.size for axis in axes)
            devices_per_node = axes[-1].size if len(axes) > 1 else min(total, 8)
        if devices_per_node < 1:
            raise MeshError(
                f"devices_per_node must be a positive number, got {devices_per_node}",
                remedy="pass the number of ranks per node",
            )
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "devices_per_node", devices_per_node)
        object.__setattr__(self, "links", tuple(sorted((links or {}).items())))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(axis.name for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of devices on each axis."""
        return tuple([axis.size for axis in self.axes])

    @property
    def num_devices(self) -> int:
        """Number of devices of the whole mesh."""
        return math.prod(self.shape)

    def stride(self, axis: int) -> int:
        """Return the distance in ranks between neighbours on `axis`."""
        return math.prod(self.shape[axis + 1 :])

    def link(self, axis: int) -> str:
        """Return the link of an axis: ``"intra"`` if the whole axis lies within one node, else
        ``"inter"``, unless the user named it in `links`."""
        named = dict(self.links).get(self.axes[axis].name)
        if named is not None:
            return named
        span = self.stride(axis) * self.axes[axis].size
        return "intra" if self.devices_per_node % span == 0 else "inter"

    def shares_memory(self, axis: int) -> bool:
        """Whether ranks along `axis` can access each other's memory, as those of one node can."""
        return self.link(axis) == "intra"

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the rank's position on every axis."""
        return tuple(rank // self.stride(a) % self.axes[a].size for a in range(len(self.axes)))

    def groups(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that communicate along `axis`, one tuple per group, ordered by position
        on the axis."""
        stride, size = self.stride(axis), self.axes[axis].size
        starts = [rank for rank in range(self.num_devices) if self.coordinate(rank)[axis] == 0]
        return tuple(tuple(start + k * stride for k in range(size)) for start in starts)

    def without(self, name: str) -> Mesh:
        """Return the mesh without one axis; the other axes keep their links. Without its only axis
        it is a mesh of one device.

        Args:
            name: name of the axis; ``""`` for none, which returns the mesh itself.

        Raises:
            MeshError: if there is no axis of that name.
        """
        if not name:
            return self
        if name not in self.names:
            raise MeshError(
                f"mesh {self} has no axis {name!r}", remedy=f"its axes are {', '.join(self.names)}"
            )
        links = {
            axis.name: self.link(index) for index, axis in enumerate(self.axes) if axis.name != name
        }
        axes = [axis for axis in self.axes if axis.name != name]
        return Mesh(axes or {"device": 1}, devices_per_node=self.devices_per_node, links=links)

    def to_json(self) -> dict[str, Any]:
        """Return the mesh as data of JSON, the inverse of `from_json`."""
        return {
            "axes": [[a.name, a.size] for a in self.axes],
            "devices_per_node": self.devices_per_node,
            "links": dict(self.links),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Mesh:
        """Make a mesh from the data that `to_json` returns.

        Raises:
            MeshError: if an axis or a link is not valid.
        """
        axes = [
            MeshAxis(name, size) for name, size in data["axes"]
        ]  # a list, because axes are ordered and JSON objects are sorted when they are written
        return Mesh(axes, devices_per_node=data["devices_per_node"], links=data.get("links"))

    @staticmethod
    def parse(text: str) -> Mesh:
        """Read ``"node=4,gpu=8"``, ``"4x8"`` (nodes × devices per node: the same mesh) or
        ``"8"``."""
        try:
            if (nodes := nodes_in(text)) is not None:
                return Mesh({"node": nodes[0], "gpu": nodes[1]})
            if "=" not in text:
                return Mesh(int(text))
            pairs = [part.split("=") for part in text.split(",")]
            if len({name.strip() for name, _ in pairs}) != len(pairs):
                raise MeshError(
                    f"mesh {text!r} names an axis twice", remedy="give each axis a unique name"
                )
            return Mesh({name.strip(): int(size) for name, size in pairs})
        except ValueError as error:
            remedy = "write node=4,gpu=8, nodes × devices per node as 4x8, or a device count"
            raise MeshError(f"cannot read mesh {text!r}", remedy=remedy) from error

    def __str__(self) -> str:
        return ",".join(f"{a.name}={a.size}" for a in self.axes)


def _named_axes(others: bool, sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Check axes that were given as keywords.

    Args:
        others: whether axes were also given as the first argument.
        sizes: devices on each axis.

    Raises:
        MeshError: if there are others or none, or a keyword is a misspelt option of `Mesh`.
    """
    for name in sizes:
        if close := close_to(name, ("devices_per_node", "links")):
            raise MeshError(
                f"{name!r} is not an option of a mesh",
                remedy=f"did you mean {close[0]}? Pass an axis of this name as {{{name!r}: 2}}",
            )
    if others or not sizes:
        raise MeshError(
            f"the axes are given twice, also as {', '.join(sizes)}" if others else "no axes given",
            remedy='pass autopar.Mesh({"node": 4, "gpu": 8}) or autopar.Mesh(node=4, gpu=8)',
        )
    return sizes


def nodes_in(text: str) -> tuple[int, int] | None:
    """Read nodes and devices per node from ``"4x8"``; None if the text has another form."""
    nodes, x, devices = text.partition("x")
    return (
        (int(nodes), int(devices))
        if x and nodes.strip().isdecimal() and devices.strip().isdecimal()
        else None
    )


def _check_axes(axes: tuple[MeshAxis, ...], links: Mapping[str, str]) -> None:
    if not axes:
        raise MeshError(
            "a mesh needs at least one axis",
            remedy='pass for example autopar.Mesh({"node": 4, "gpu": 8})',
        )
    names = [axis.name for axis in axes]
    if len(set(names)) != len(names):
        raise MeshError(f"mesh axis names repeat: {names}", remedy="give each axis a unique name")
    for axis in axes:
        if not axis.name or set(axis.name) & set(",= "):  # `Mesh.parse` must read str(mesh)
            message = (
                f"mesh axis name {axis.name!r} contains a comma, an equals sign or a space"
                if axis.name
                else "a mesh axis has no name"
            )
            raise MeshError(message, remedy='pass for example autopar.Mesh({"node": 4, "gpu": 8})')
        if not isinstance(axis.size, int) or axis.size < 1:
            raise MeshError(
                f"mesh axis {axis.name!r} has size {axis.size!r}",
                remedy="pass positive integers as sizes",
            )
    for name, link in links.items():
        if name not in names or link not in ("intra", "inter"):
            raise MeshError(
                f"link {name!r}: {link!r} is unknown",
                remedy=f'axes are {names}; links are "intra" and "inter"',
            )


# --------------------------------------------------------------------------------------------------
# The arguments mesh= and hardware= as users pass them. Nothing here needs torch, so that typing
# errors are reported before torch is imported.

Unshaped: TypeAlias = int | tuple[int, int]  # a device count; nodes × devices per node
ProfileLike: TypeAlias = str | Path | HardwareProfile
HardwareLike: TypeAlias = ProfileLike | Mixed | Mapping[str, Sequence[ProfileLike]]
_FORM = (
    'one axis of the mesh and one profile per index along it, {"stage": ["h100-sxm", '
    '"a100-sxm-80gb"]}'
)


def read_mesh(text: str, devices_per_node: int | None = None) -> Mesh | Unshaped:
    """Read a mesh of the command line.

    Args:
        text: axes as for `Mesh.parse`, or devices whose mesh the planner shapes: a device count, or
            nodes × devices per node as 4x8.
        devices_per_node: if the text does not say it; by default that of `Mesh`.

    Raises:
        MeshError: if the text has none of these forms, or contradicts `devices_per_node`.
    """
    parsed = int(text) if text.isdecimal() else nodes_in(text) or Mesh.parse(text)
    if devices_per_node is None:
        return parsed
    if isinstance(parsed, tuple):
        raise MeshError(
            f"mesh {text} already specifies the number of devices per node",
            remedy="omit --devices-per-node",
        )
    total = parsed if isinstance(parsed, int) else parsed.num_devices
    if total % devices_per_node:
        raise MeshError(
            f"{total} devices is not a multiple of {devices_per_node} devices per node",
            remedy="pass a divisor as --devices-per-node",
        )
    if isinstance(parsed, int):
        return total // devices_per_node, devices_per_node
    return Mesh(parsed.axes, devices_per_node=devices_per_node, links=dict(parsed.links))


def is_unshaped(mesh: object) -> TypeGuard[Unshaped]:
    """Whether `mesh` is a device count or nodes × devices per node, for which the planner chooses
    the axes."""
    sizes = mesh if isinstance(mesh, tuple) and len(mesh) == 2 else (mesh,)
    return all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)


def read_hardware(hardware: HardwareLike) -> Hardware:
    """Load the hardware that a user names.

    Args:
        hardware: a profile, its name or path, or a mapping from an axis to one profile per index
            along it; as text ``stage=h100-sxm,a100-sxm-80gb``.

    Raises:
        HardwareError: if it has none of these forms, or a profile does not exist.
    """
    if isinstance(hardware, HardwareProfile | Mixed):
        return hardware
    if isinstance(hardware, str | os.PathLike):
        axis, along = _parse_hardware(os.fspath(hardware))
        return _mixed_hardware({axis: along}) if axis else HardwareProfile.load(hardware)
    return _mixed_hardware(hardware)


def hardware_of(hardware: HardwareLike, mesh: Mesh | Unshaped) -> Hardware:
    """Load the hardware that a user names, as `read_hardware`, and check that it fits the mesh.

    Raises:
        HardwareError: as `read_hardware`; also if profiles are named along an axis that the mesh
            does not have, or not one per device along it.
    """
    parsed = read_hardware(hardware)
    if isinstance(parsed, HardwareProfile):
        return parsed
    if isinstance(mesh, Mesh):
        return _on(parsed, mesh)
    message = (
        f"hardware= has profiles along {parsed.axis!r}, but the planner chooses the axes of the"
        " mesh"
    )
    raise HardwareError(
        message,
        remedy=(
            f'pass a mesh with that axis, autopar.Mesh({{"{parsed.axis}": {len(parsed.profiles)},'
            " ...})"
        ),
    )


def _mixed_hardware(hardware: object) -> Mixed:
    if not isinstance(hardware, Mapping):
        raise HardwareError(
            f"hardware={hardware!r} is not a profile",
            remedy=f"pass the name of a profile, a profile, or {_FORM}",
        )
    if len(hardware) != 1:
        message = f"hardware= has profiles along {' and '.join(map(repr, hardware)) or 'no axis'}"
        raise HardwareError(message, remedy=f"devices may differ along one axis: pass {_FORM}")
    ((axis, along),) = hardware.items()
    if isinstance(along, str | os.PathLike | HardwareProfile) or not isinstance(along, Sequence):
        raise HardwareError(
            f"hardware= has {along!r} along {axis!r}, which is not a list of profiles",
            remedy=f"pass {_FORM}",
        )
    wrong = [each for each in along if not isinstance(each, str | os.PathLike | HardwareProfile)]
    if wrong:
        raise HardwareError(
            f"hardware= has {wrong[0]!r} along {axis!r}, which is not a profile",
            remedy=f"pass {_FORM}",
        )
    return Mixed(
        axis,
        tuple(
            each if isinstance(each, HardwareProfile) else HardwareProfile.load(each)
            for each in along
        ),
    )


def _on(mixed: Mixed, mesh: Mesh) -> Mixed:
    """Check that the mesh has the axis of `mixed`, with one device per profile."""
    if mixed.axis not in mesh.names:
        message = f"hardware= has profiles along {mixed.axis!r}, but mesh {mesh} has no such axis"
        raise HardwareError(message, remedy=f"its axes are {', '.join(mesh.names)}")
    size, num = mesh.shape[mesh.names.index(mixed.axis)], len(mixed.profiles)
    if size != num:
        message = (
            f"hardware= has {num} profile{'s' if num != 1 else ''} along {mixed.axis!r}, but mesh "
            f"{mesh} has {size} devices along it"
        )
        raise HardwareError(
            message, remedy=f"pass {size} profiles, one per index, even if several are equal"
        )
    return mixed


def _parse_hardware(text: str) -> tuple[str, list[str]]:
    """The axis and its profiles in ``stage=h100-sxm,a100-sxm-80gb``; no axis if the text is a name
    or a path."""
    axis, equals, along = text.partition("=")
    if not equals or os.sep in axis or os.path.exists(text):
        return "", []
    return axis.strip(), [name.strip() for name in along.split(",")]
