"""Hardware profiles: what a device and its links can do, each figure with its unit, source and
date.

Terms. A *figure* is one number of a profile. A *curve* is a set of measured (size, time) points. An
*efficiency* is the share of a peak that is reached: of `peak_flops_per_s` for matmul and attention,
of `memory_bandwidth_bytes_per_s` for the kinds of work that memory bounds. A *link* joins the
devices of a mesh axis, ``"intra"`` within a node, ``"inter"`` between nodes; its bandwidth is per
device and direction, as a ring over it reaches.

The named profiles are the files of ``cost_models/``. That folder lies at the top of the repository,
where people look for it; ``autopar/cost_models`` is a link to it, so checkout, editable install and
wheel find it at one place, beside this file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from autopar.core.hardware.figures import (
    FLOP_KINDS,
    KERNELS,
    LINKS,
    MEMORY_KINDS,
    Curve,
    Figure,
    Host,
    Link,
)
from autopar.core.json_text import read_json
from autopar.core.text_files import read_text, reason_of
from autopar.errors import CONTROL, HardwareError

# --------------------------------------------------------------------------------------------------
# The fields of a profile's file, checked; an error names the field.

_POINT_SIZE = {
    **dict.fromkeys(FLOP_KINDS, ("flops",)),
    **dict.fromkeys(MEMORY_KINDS, ("bytes",)),
    "matmul": ("m", "n", "k"),
}


_RANGES = {"s": (1e-12, 1e5), "1": (1e-6, 1.0)}
"""The least and the largest positive number of a unit."""
_RANGE = (1.0, 1e30)
"""The range of the other units: bytes, flops and their rates, and sizes."""


class ProfileReader:
    """Reads and checks the fields of one profile, and collects its figures by dotted path.

    In all methods `path` is the dotted path of the object that holds the field, with a trailing
    dot, and is empty at the top. Every method raises `HardwareError` with the full path of a field
    that is missing or malformed.

    Args:
        where: the file of the profile, for errors.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.figures: dict[str, Figure] = {}

    def error(self, path: str, what: str) -> HardwareError:
        """Return the error that says `what` is wrong with the field at `path`."""
        return HardwareError(
            f"hardware profile: {path} {what}",
            where=self.where,
            remedy="correct the file; the shipped profiles show the format",
        )

    def mapping(self, value: Any, path: str) -> Mapping[str, Any]:
        """Return `value`, the field at the full `path`, checked to be a JSON object."""
        if not isinstance(value, Mapping):
            raise self.error(
                path,
                "is missing" if value is None else f"must be an object, got {type(value).__name__}",
            )
        return value

    def no_more(self, data: Mapping[str, Any], known: Iterable[str], path: str) -> None:
        """Check that an object has no fields but the `known` ones.

        Args:
            data: the object.
            known: names of the fields that it may have.
            path: dotted path of the object.
        """
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise self.error(f"{path}{unknown[0]:.60}", "is not a known field")

    def text(self, data: Mapping[str, Any], name: str, path: str = "") -> str:
        """Read a field that is a nonempty text.

        Args:
            data: the object that holds the field.
            name: name of the field.
            path: dotted path of the object.
        """
        value = data.get(name)
        if not isinstance(value, str) or not value:
            raise self.error(path + name, "must be a non-empty text")
        return value

    def one_of(self, data: Mapping[str, Any], name: str, known: tuple[str, ...]) -> str:
        """Read a field at the top of the profile whose text is one of several.

        Args:
            data: the profile.
            name: name of the field.
            known: the texts that are allowed.
        """
        value = self.text(data, name)
        if value not in known:
            raise self.error(name, f"must be one of {', '.join(known)}, got {value!r:.60}")
        return value

    def number(
        self,
        data: Mapping[str, Any],
        name: str,
        path: str = "",
        *,
        unit: str = "",
        zero: bool = False,
    ) -> float:
        """Read a field that is a positive number, in a range that no device leaves. Sums and
        quotients of such numbers are finite.

        Args:
            data: the object that holds the field.
            name: name of the field.
            path: dotted path of the object.
            unit: the unit of the number, which decides its range.
            zero: whether 0 is allowed, too.
        """
        value = data.get(name)
        # An integer of any length can be compared with a float; one above the largest float cannot
        # be converted to one.
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(path + name, f"must be a number, got {value!r:.60}")
        if not abs(value) <= sys.float_info.max:
            raise self.error(path + name, f"must be a number, got {value!r:.60}")
        if value < 0 or (value == 0 and not zero):
            raise self.error(
                path + name, f"must be {'0 or more' if zero else 'above 0'}, got {value!r:.60}"
            )
        least, most = _RANGES.get(unit, _RANGE)
        if value != 0 and not least <= value <= most:
            raise self.error(
                path + name, f"must be between {least:g} and {most:g}, got {value!r:.60}"
            )
        return value

    def origin(self, data: Mapping[str, Any], path: str, unit: str) -> tuple[str, str]:
        """Read where a figure or a measurement comes from, and check its unit.

        Args:
            data: the object with the fields ``unit``, ``date`` and ``source``.
            path: dotted path of the object.
            unit: the unit that it must have.

        Returns:
            Source and date (ISO 8601).
        """
        if self.text(data, "unit", path) != unit:
            raise self.error(f"{path}unit", f"must be {unit!r}, got {data['unit']!r:.60}")
        day = self.text(data, "date", path)
        try:
            date.fromisoformat(day)
        except ValueError:
            raise self.error(
                f"{path}date", f"must be a date as 2026-01-31, got {day!r:.60}"
            ) from None
        return self.text(data, "source", path), day

    def figure(
        self, data: Mapping[str, Any], name: str, unit: str, path: str = "", *, zero: bool = False
    ) -> float:
        """Read a figure with its unit, source and date, and record it in `figures`.

        Args:
            data: the object that holds the figure.
            name: name of the figure.
            unit: the unit that it must have; a figure of unit ``"1"`` is a share, at most 1.
            path: dotted path of the object.
            zero: whether 0 is allowed, too.

        Returns:
            Its value, in `unit`.
        """
        figure = self.mapping(data.get(name), path + name)
        inner = f"{path}{name}."
        self.no_more(figure, ("value", "unit", "source", "date"), inner)
        value = self.number(figure, "value", inner, unit=unit, zero=zero)
        source, day = self.origin(figure, inner, unit)
        self.figures[path + name] = Figure(value, unit, source, day)
        return value

    def figures_of(
        self,
        data: Mapping[str, Any],
        name: str,
        unit: str,
        path: str = "",
        needed: tuple[str, ...] = (),
    ) -> Mapping[str, float]:
        """Read an object whose fields are all figures of one unit.

        Args:
            data: the object that holds the group.
            name: name of the group.
            unit: the unit of all its figures.
            path: dotted path of the object that holds the group.
            needed: figures that the group must have; they come first in the result.

        Returns:
            Name → value, in `unit`.
        """
        group = self.mapping(data.get(name), path + name)
        return {
            key: self.figure(group, key, unit, f"{path}{name}.")
            for key in (*needed, *(k for k in group if k not in needed))
        }

    def points(self, data: Mapping[str, Any], kind: str, path: str) -> list[Mapping[str, Any]]:
        """Read the points of a measured curve, and record their number in `figures`.

        Args:
            data: the object that holds the measurement.
            kind: name of the measurement.
            path: dotted path of the object.

        Returns:
            The points, each a JSON object whose fields are not checked yet.
        """
        group = self.mapping(data[kind], path + kind)
        inner = f"{path}{kind}."
        self.no_more(group, ("unit", "source", "date", "points"), inner)
        source, day = self.origin(group, inner, "s")
        points = group.get("points")
        if not isinstance(points, list) or not points:
            raise self.error(f"{inner}points", "must be a non-empty list")
        self.figures[path + kind] = Figure(len(points), "points", source, day)
        return [self.mapping(point, f"{inner}points[{i}]") for i, point in enumerate(points)]


def links(reader: ProfileReader, data: Mapping[str, Any]) -> dict[str, Link]:
    """Read the links of a profile, by name (`LINKS`)."""
    named = reader.mapping(data.get("links"), "links")
    reader.no_more(named, LINKS, "links.")
    links_by_name = {}
    for name in LINKS:
        link, path = reader.mapping(named.get(name), f"links.{name}"), f"links.{name}."
        reader.no_more(
            link, ("latency_s", "bandwidth_bytes_per_s", "all_to_all_efficiency", "measured"), path
        )
        links_by_name[name] = Link(
            reader.figure(link, "latency_s", "s", path, zero=True),
            reader.figure(link, "bandwidth_bytes_per_s", "bytes/s", path),
            reader.figure(link, "all_to_all_efficiency", "1", path),
            _collective_curves(
                reader,
                reader.mapping(link.get("measured", {}), f"{path}measured"),
                f"{path}measured.",
            ),
        )
    return links_by_name


def host(reader: ProfileReader, data: Mapping[str, Any]) -> Host | None:
    """Read the figures of a device's share of its host; None if the file has none."""
    if "host" not in data:
        return None
    known = reader.mapping(data["host"], "host")
    reader.no_more(
        known,
        ("memory_bytes", "memory_bandwidth_bytes_per_s", "latency_s", "bandwidth_bytes_per_s"),
        "host.",
    )
    return Host(
        int(reader.figure(known, "memory_bytes", "bytes", "host.")),
        reader.figure(known, "memory_bandwidth_bytes_per_s", "bytes/s", "host."),
        reader.figure(known, "latency_s", "s", "host.", zero=True),
        reader.figure(known, "bandwidth_bytes_per_s", "bytes/s", "host."),
    )


def kernels(reader: ProfileReader, data: Mapping[str, Any]) -> Mapping[str, float]:
    """Read the share that each overlap kernel reaches; empty if the file names none."""
    if "kernels" not in data:
        return {}
    reader.no_more(reader.mapping(data["kernels"], "kernels"), KERNELS, "kernels.")
    return reader.figures_of(data, "kernels", "1")


def _collective_curves(
    reader: ProfileReader, measured: Mapping[str, Any], path: str
) -> dict[str, dict[int, Curve]]:
    reader.no_more(measured, ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"), path)
    curves: dict[str, dict[int, Curve]] = {}
    for kind in measured:
        sizes: dict[int, list[tuple[float, float]]] = {}
        for i, point in enumerate(reader.points(measured, kind, path)):
            path_text = f"{path}{kind}.points[{i}]."
            values = [
                *(reader.number(point, name, path_text) for name in ("num_devices", "bytes")),
                reader.number(point, "time_s", path_text, unit="s"),
            ]
            sizes.setdefault(int(values[0]), []).append((values[1], values[2]))
        curves[kind] = {
            num_devices: Curve.curve_through(points) for num_devices, points in sizes.items()
        }
    return curves


def compute_curves(reader: ProfileReader, data: Mapping[str, Any]) -> dict[tuple[str, str], Curve]:
    """Read the measured curves of compute, by kind and dtype (see `HardwareProfile.curves`)."""
    measured = reader.mapping(data.get("measured", {}), "measured")
    reader.no_more(measured, _POINT_SIZE, "measured.")
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for kind in measured:
        for i, point in enumerate(reader.points(measured, kind, "measured.")):
            path_text = f"measured.{kind}.points[{i}]."
            size = math.prod(
                reader.number(point, name, path_text) for name in _POINT_SIZE[kind]
            ) * (2 if kind == "matmul" else 1)
            dtype = reader.text(point, "dtype", path_text) if kind in FLOP_KINDS else ""
            groups.setdefault((kind, dtype), []).append(
                (size, reader.number(point, "time_s", path_text, unit="s"))
            )
    return {key: Curve.curve_through(points) for key, points in groups.items()}


FORMAT = "autopar-hardware"
VERSION = 1
DEVICE_TYPES = ("cpu", "cuda")
_CHIPS = {
    "a100-sxm4-40gb": "a100-sxm-40gb",
    "a100-sxm": "a100-sxm-80gb",
    "h100 80gb hbm3": "h100-sxm",
    "nvidia h200": "h200-sxm",
}
_NEAR = {
    "h100": "h100-sxm",
    "h200": "h200-sxm",
    "a100": "a100-sxm-80gb",
}  # of the same chip, on another board
_FOLDER = Path(__file__).parents[2] / "cost_models"
_FIELDS = {
    "format",
    "version",
    "name",
    "description",
    "device_type",
    "device_memory_bytes",
    "memory_bandwidth_bytes_per_s",
}
_FIELDS |= {
    "launch_overhead_s",
    "kernels",
    "overlap_slowdown",
    "matmul_half_flops",
    "peak_flops_per_s",
    "efficiency",
    "measured",
    "links",
}
_FIELDS |= {"host"}


@dataclass(frozen=True, slots=True, eq=False)
class HardwareProfile:
    """One kind of device with its links. Profiles with equal figures are equal.

    Attributes:
        peak_flops_per_s: dtype name (``"bfloat16"``) → peak of dense matmul.
        efficiency: kind of `FLOP_KINDS` → dtype name → share of the peak that large sizes reach.
        memory_efficiency: kind of `MEMORY_KINDS` → share of the memory bandwidth.
        overlap_slowdown: seconds by which a second of concurrent communication delays compute: 0 if
            it costs nothing, 1 if nothing can be hidden. 1 if the file does not say.
        kernels: kind of `KERNELS` → the share that a collective-overlap kernel hides of what its
            chunks could (`autopar.cost.kernel_offers`); for ``reduce_add_rmsnorm`` the share of a
            copy's bandwidth, for ``moe_route`` that of an all-to-all's. Kernels that the file does
            not name are not used.
        matmul_half_flops: a matmul of this many flops reaches half of the efficiency of a large
            one.
        curves: (kind, dtype name) → measured curve of seconds; over flops for `FLOP_KINDS`, else
            over bytes, with dtype ``""``.
        figures: every figure by its dotted path, for reports.
        hash: fingerprint of the whole profile.
        device_type: one of `DEVICE_TYPES`; empty if the file does not say.
        host: each device's share of its host, for offload; None if the file does not say.
        parts: for a profile made by `slowest_of`, the profiles whose slowest time it takes at each
            op; a profile of one kind of device has none.
    """

    name: str
    description: str
    device_memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    launch_overhead_s: float
    overlap_slowdown: float
    kernels: Mapping[str, float]
    matmul_half_flops: float
    peak_flops_per_s: Mapping[str, float]
    efficiency: Mapping[str, Mapping[str, float]]
    memory_efficiency: Mapping[str, float]
    links: Mapping[str, Link]
    curves: Mapping[tuple[str, str], Curve]
    figures: Mapping[str, Figure] = field(repr=False)
    hash: str
    device_type: str = ""
    host: Host | None = None
    parts: tuple[HardwareProfile, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HardwareProfile) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    @property
    def is_gpu(self) -> bool:
        """Whether the file says that the device is a GPU."""
        return self.device_type == "cuda"

    @property
    def has_row_kernels(self) -> bool:
        """Whether norms are run by kernels (`autopar.kernels.row_kernels`)."""
        return self.is_gpu

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names of the profiles that come with autopar."""
        return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))

    @staticmethod
    def of_gpu(device_name: str) -> tuple[str, bool]:
        """Return the name of the closest profile to the GPU that torch calls `device_name`.

        Returns:
            The name, and whether the profile describes this GPU. If it does not, it describes the
            same chip on another board, or, if there is none, an H100.
        """
        name = device_name.lower()
        listed_profile = next((profile for gpu, profile in _CHIPS.items() if gpu in name), None)
        if listed_profile is not None and "nvl" not in name:
            return listed_profile, True
        return next((profile for chip, profile in _NEAR.items() if chip in name), "h100-sxm"), False

    @staticmethod
    def local_path() -> Path:
        """Return the path of this machine's profile, in ``$AUTOPAR_HOME`` or
        ``~/.cache/autopar``."""
        return (
            Path(os.environ.get("AUTOPAR_HOME", Path.home() / ".cache" / "autopar")) / "local.json"
        )

    @staticmethod
    def load(profile: str | os.PathLike[str]) -> HardwareProfile:
        """Load a profile: one of `names`, ``"local"``, or the path of a JSON file.

        Raises:
            HardwareError: if there is no such profile, or it is malformed; the field is named.
        """
        return HardwareProfile.from_json(HardwareProfile.read(profile), where=str(_path(profile)))

    @staticmethod
    def read(profile: str | os.PathLike[str]) -> Any:
        """Read the JSON of a profile; its fields are not checked.

        Args:
            profile: as for `load`.

        Raises:
            HardwareError: if there is no such profile, or it is no JSON.
        """
        path = _path(profile)
        try:
            return read_json(read_text(path), without=CONTROL)
        except OSError as error:
            raise HardwareError(
                f"cannot read hardware profile: {reason_of(error)}",
                where=str(path),
                remedy="check the path",
            ) from error
        except ValueError as error:
            message = f"hardware profile is not JSON that autopar can read: {error}"
            raise HardwareError(message, where=str(path), remedy="correct the file") from error

    @staticmethod
    def from_json(data: Any, where: str = "") -> HardwareProfile:
        """Make a profile from parsed JSON.

        Args:
            data: the parsed JSON.
            where: name of its file, for errors.

        Raises:
            HardwareError: if it is malformed; the field is named.
        """
        reader = ProfileReader(where)
        data = reader.mapping(data, "profile")
        if data.get("format") != FORMAT or data.get("version") != VERSION:
            raise reader.error("format", f"must be {FORMAT!r}, version {VERSION}")
        efficiency = reader.mapping(data.get("efficiency"), "efficiency")
        peaks = reader.figures_of(data, "peak_flops_per_s", "flops/s")
        profile = HardwareProfile(
            name=reader.text(data, "name"),
            description=reader.text(data, "description"),
            device_memory_bytes=int(reader.figure(data, "device_memory_bytes", "bytes")),
            memory_bandwidth_bytes_per_s=reader.figure(
                data, "memory_bandwidth_bytes_per_s", "bytes/s"
            ),
            launch_overhead_s=reader.figure(data, "launch_overhead_s", "s", zero=True),
            overlap_slowdown=reader.figure(data, "overlap_slowdown", "1", zero=True)
            if "overlap_slowdown" in data
            else 1.0,
            kernels=kernels(reader, data),
            matmul_half_flops=reader.figure(data, "matmul_half_flops", "flops", zero=True),
            peak_flops_per_s=peaks,
            efficiency={
                kind: reader.figures_of(efficiency, kind, "1", "efficiency.", tuple(peaks))
                for kind in FLOP_KINDS
            },
            memory_efficiency={
                kind: reader.figure(efficiency, kind, "1", "efficiency.") for kind in MEMORY_KINDS
            },
            links=links(reader, data),
            curves=compute_curves(reader, data),
            figures=reader.figures,
            hash=hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16],
            device_type=reader.one_of(data, "device_type", DEVICE_TYPES)
            if "device_type" in data
            else "",
            host=host(reader, data),
        )
        reader.no_more(data, _FIELDS, "")
        return profile


def _path(profile: str | os.PathLike[str]) -> Path:
    """The file of a profile, from its name, ``"local"`` or a path."""
    text = os.fspath(profile)
    if text in HardwareProfile.names():
        return _FOLDER / f"{text}.json"
    if text == "local":
        path = HardwareProfile.local_path()
        if not os.path.lexists(path):
            raise HardwareError(
                "this machine has not been measured",
                where=str(path),
                remedy="run `autopar profile` first",
            )
        return path
    if os.sep in text or text.endswith(".json") or os.path.exists(text):
        return Path(text)
    known = ", ".join((*HardwareProfile.names(), "local"))
    remedy = f"pass the name of a profile ({known}), the path of a JSON file, or a profile"
    raise HardwareError(f"hardware profile {text!r} does not exist", remedy=remedy)
