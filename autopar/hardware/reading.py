"""The fields of a profile's file, checked; an error names the field."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from datetime import date
from typing import Any

from autopar.errors import HardwareError
from autopar.hardware.figures import FLOP_KINDS, KERNELS, LINKS, MEMORY_KINDS, Curve, Figure, Host, Link

_POINT_SIZE = {**dict.fromkeys(FLOP_KINDS, ("flops",)), **dict.fromkeys(MEMORY_KINDS, ("bytes",)), "matmul": ("m", "n", "k")}


class Reader:
    """Reads and checks the fields of one profile, and gathers its figures by dotted path."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.figures: dict[str, Figure] = {}

    def error(self, path: str, what: str) -> HardwareError:
        return HardwareError(f"hardware profile: {path} {what}", where=self.where, remedy="mend it; the shipped profiles show the form")

    def mapping(self, value: Any, path: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.error(path, "is missing" if value is None else f"must be an object, not {type(value).__name__}")
        return value

    def no_more(self, data: Mapping[str, Any], known: Iterable[str], path: str) -> None:
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise self.error(f"{path}{unknown[0]:.60}", "is not a known field")

    def text(self, data: Mapping[str, Any], name: str, path: str = "") -> str:
        value = data.get(name)
        if not isinstance(value, str) or not value:
            raise self.error(path + name, "must be a text that is not empty")
        return value

    def one_of(self, data: Mapping[str, Any], name: str, known: tuple[str, ...]) -> str:
        value = self.text(data, name)
        if value not in known:
            raise self.error(name, f"must be one of {', '.join(known)}, not {value!r:.60}")
        return value

    def number(self, data: Mapping[str, Any], name: str, path: str = "", *, zero: bool = False) -> float:
        value = data.get(name)
        # Integers of any length can be compared, those that no float is as large as cannot be made one.
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(path + name, f"must be a number, not {value!r:.60}")
        if not abs(value) <= sys.float_info.max:
            raise self.error(path + name, f"must be a number, not {value!r:.60}")
        if value < 0 or (value == 0 and not zero):
            raise self.error(path + name, f"must be {'0 or more' if zero else 'above 0'}, not {value!r:.60}")
        return value

    def origin(self, data: Mapping[str, Any], path: str, unit: str) -> tuple[str, str]:
        """Source and date, once the unit is the expected one."""
        if self.text(data, "unit", path) != unit:
            raise self.error(f"{path}unit", f"must be {unit!r}, not {data['unit']!r:.60}")
        day = self.text(data, "date", path)
        try:
            date.fromisoformat(day)
        except ValueError:
            raise self.error(f"{path}date", f"must be a date as 2026-01-31, not {day!r:.60}") from None
        return self.text(data, "source", path), day

    def figure(self, data: Mapping[str, Any], name: str, unit: str, path: str = "", *, zero: bool = False) -> float:
        figure = self.mapping(data.get(name), path + name)
        inner = f"{path}{name}."
        self.no_more(figure, ("value", "unit", "source", "date"), inner)
        value = self.number(figure, "value", inner, zero=zero)
        if unit == "1" and value > 1:
            raise self.error(f"{inner}value", f"is a share and cannot be above 1, not {value!r:.60}")
        source, day = self.origin(figure, inner, unit)
        self.figures[path + name] = Figure(value, unit, source, day)
        return value

    def figures_of(
        self, data: Mapping[str, Any], name: str, unit: str, path: str = "", needed: tuple[str, ...] = ()
    ) -> Mapping[str, float]:
        group = self.mapping(data.get(name), path + name)
        return {key: self.figure(group, key, unit, f"{path}{name}.") for key in (*needed, *(k for k in group if k not in needed))}

    def points(self, data: Mapping[str, Any], kind: str, path: str) -> list[Mapping[str, Any]]:
        """The points of one measurement, its source, date and unit checked."""
        group = self.mapping(data[kind], path + kind)
        inner = f"{path}{kind}."
        self.no_more(group, ("unit", "source", "date", "points"), inner)
        source, day = self.origin(group, inner, "s")
        points = group.get("points")
        if not isinstance(points, list) or not points:
            raise self.error(f"{inner}points", "must be a list that is not empty")
        self.figures[path + kind] = Figure(len(points), "points", source, day)
        return [self.mapping(point, f"{inner}points[{i}]") for i, point in enumerate(points)]


def links(reader: Reader, data: Mapping[str, Any]) -> dict[str, Link]:
    """By name."""
    named = reader.mapping(data.get("links"), "links")
    reader.no_more(named, LINKS, "links.")
    found = {}
    for name in LINKS:
        link, path = reader.mapping(named.get(name), f"links.{name}"), f"links.{name}."
        reader.no_more(link, ("latency_s", "bandwidth_bytes_per_s", "all_to_all_efficiency", "measured"), path)
        found[name] = Link(
            reader.figure(link, "latency_s", "s", path, zero=True),
            reader.figure(link, "bandwidth_bytes_per_s", "bytes/s", path),
            reader.figure(link, "all_to_all_efficiency", "1", path),
            _collective_curves(reader, reader.mapping(link.get("measured", {}), f"{path}measured"), f"{path}measured."),
        )
    return found


def host(reader: Reader, data: Mapping[str, Any]) -> Host | None:
    """What the file says of the host; None where it says nothing."""
    if "host" not in data:
        return None
    known = reader.mapping(data["host"], "host")
    reader.no_more(known, ("memory_bytes", "memory_bandwidth_bytes_per_s", "latency_s", "bandwidth_bytes_per_s"), "host.")
    return Host(
        int(reader.figure(known, "memory_bytes", "bytes", "host.")),
        reader.figure(known, "memory_bandwidth_bytes_per_s", "bytes/s", "host."),
        reader.figure(known, "latency_s", "s", "host.", zero=True),
        reader.figure(known, "bandwidth_bytes_per_s", "bytes/s", "host."),
    )


def kernels(reader: Reader, data: Mapping[str, Any]) -> Mapping[str, float]:
    """What each kernel reaches that the file names."""
    if "kernels" not in data:
        return {}
    reader.no_more(reader.mapping(data["kernels"], "kernels"), KERNELS, "kernels.")
    return reader.figures_of(data, "kernels", "1")


def _collective_curves(reader: Reader, measured: Mapping[str, Any], path: str) -> dict[str, dict[int, Curve]]:
    reader.no_more(measured, ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"), path)
    curves: dict[str, dict[int, Curve]] = {}
    for kind in measured:
        sizes: dict[int, list[tuple[float, float]]] = {}
        for i, point in enumerate(reader.points(measured, kind, path)):
            where = f"{path}{kind}.points[{i}]."
            values = [reader.number(point, name, where) for name in ("num_devices", "bytes", "time_s")]
            sizes.setdefault(int(values[0]), []).append((values[1], values[2]))
        curves[kind] = {num_devices: Curve.through(points) for num_devices, points in sizes.items()}
    return curves


def compute_curves(reader: Reader, data: Mapping[str, Any]) -> dict[tuple[str, str], Curve]:
    """By kind and dtype."""
    measured = reader.mapping(data.get("measured", {}), "measured")
    reader.no_more(measured, _POINT_SIZE, "measured.")
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for kind in measured:
        for i, point in enumerate(reader.points(measured, kind, "measured.")):
            where = f"measured.{kind}.points[{i}]."
            size = math.prod(reader.number(point, name, where) for name in _POINT_SIZE[kind]) * (2 if kind == "matmul" else 1)
            dtype = reader.text(point, "dtype", where) if kind in FLOP_KINDS else ""
            groups.setdefault((kind, dtype), []).append((size, reader.number(point, "time_s", where)))
    return {key: Curve.through(points) for key, points in groups.items()}
