"""The units of a run in the joint graph of a shortened model, and the common pattern of its two
interior units.

The forward nodes of a unit are consecutive, and so are its backward nodes. The *slice* of a unit
begins at the first node of a module of the unit and ends where the next slice begins; in backward,
the next slice is that of the previous unit. The two interior units, `one` and `two`, define the
pattern of all units between them. Node by node, they must call the same ops with the same
arguments, and each operand must be one of

==================  ========================================================
`HERE`              a node of the same unit
`PREVIOUS`          a forward node of the previous unit
`NEXT`              (backward) a backward node of the next unit
`OWN`               a placeholder of the unit
an outside node     a node outside all units, the same for both
==================  ========================================================

Only the unit and its neighbour may read the results of the unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import fx

from autopar.capture.folding.runs import Run
from autopar.capture.folding.stream import NotFoldable

Border = dict[tuple[str, Any], fx.Node]  # (kind, name) → placeholder or result
Home = tuple[int, str]  # unit, and the rest of a path: position in the unit and path in the layer


class UnitKind(Enum):
    """Kind of an operand (see the module docstring)."""

    HERE, PREVIOUS, NEXT, OWN = auto(), auto(), auto(), auto()


@dataclass(frozen=True, slots=True)
class Ref:
    """An operand of the pattern.

    Attributes:
        kind: kind of the operand.
        offset: (phase, offset) in the same unit, offset in the slice of a neighbour, or (kind,
            rest) of a placeholder.
    """

    kind: UnitKind
    offset: Any


@dataclass(frozen=True, slots=True)
class UnitStep:
    """A node of the pattern; its arguments contain `Ref` objects and outside nodes.

    `home` is the module within the unit, or the full path of a module outside the units.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: Mapping[str, Any]
    home: Home | str


@dataclass(frozen=True, slots=True)
class Pattern:
    """The repeated part of the graph: forward and backward steps, and the placeholders and results
    by (kind, rest of the name)."""

    forward: tuple[UnitStep, ...]
    backward: tuple[UnitStep, ...]
    own: tuple[tuple[str, str], ...]
    results: tuple[tuple[tuple[str, str], Ref], ...]


class Units:
    """The slices of `run` in `graph`; `one` and `two` are the numbers of the interior units."""

    def __init__(self, run: Run, graph: fx.Graph, placeholders: Border) -> None:
        self.run, self.graph = run, graph
        self.one, self.two, self.last = 1, run.num_units - 2, run.num_units - 1
        self._homes: dict[str, Home | None] = {}
        self.own = {
            node: (self.home(str(name)), kind)
            for (kind, name), node in placeholders.items()
            if kind in ("parameter", "buffer")
        }
        self.forward = self._slices("forward", (0, self.one, self.two, self.last))
        self.backward = self._slices("backward", (self.last, self.two, self.one, 0))
        self.place = {
            node: (phase, unit, offset)
            for phase, slices in (("forward", self.forward), ("backward", self.backward))
            for unit, nodes in slices.items()
            for offset, node in enumerate(nodes)
        }

    def home(self, path: str) -> Home | None:
        """Return the unit that contains the path of a module or parameter, and the rest of the
        path; None outside the run."""
        if path not in self._homes:
            self._homes[path] = self._home(path)
        return self._homes[path]

    def _home(self, path: str) -> Home | None:
        position = self.run.find(path)
        if position is None:
            return None
        unit, within = divmod(position[0], self.run.period)
        return (unit, f"{within}{position[1]}") if unit < self.run.num_units else None

    def path(self, unit: int, rest: str) -> str:
        """Return the full path for a unit and a rest as returned by `home`."""
        within, dot, inner = rest.partition(".")
        return f"{self.run.layers[unit * self.run.period + int(within)]}{dot}{inner}"

    def _slices(self, phase: str, order: Sequence[int]) -> dict[int, list[fx.Node]]:
        nodes = [
            node
            for node in self.graph.nodes
            if node.op == "call_function" and node.meta["phase"] == phase
        ]
        homes = [self.home(node.meta["module"]) for node in nodes]
        units = [home[0] if home else None for home in homes]
        if not set(order) <= set(units):
            missing = next(unit for unit in order if unit not in units)
            raise NotFoldable(
                f"the {phase} graph has no nodes of {self.run.layer(missing * self.run.period)}",
                self.run,
            )
        starts = [units.index(unit) for unit in order]
        final = max(position for position, unit in enumerate(units) if unit is not None)
        ends = [*starts[1:], final + 1]
        self._extend_last(starts, ends, order, len(nodes))
        for start, end, unit in zip(starts, ends, order, strict=True):
            if start >= end or any(other not in (unit, None) for other in units[start:end]):
                raise NotFoldable(
                    f"the layers of {self.run.name} are mixed in the {phase} graph", self.run
                )
        return {
            unit: nodes[start:end] for start, end, unit in zip(starts, ends, order, strict=True)
        }

    def _extend_last(
        self, starts: list[int], ends: list[int], order: Sequence[int], num_nodes: int
    ) -> None:
        """Extend the slice of the last unit by the ops after its layers (``x = x + layer(x)``), up
        to the length of an interior unit."""
        last, two = order.index(self.last), order.index(self.two)
        length = ends[two] - starts[two]
        if last > two:
            ends[last] = min(max(ends[last], starts[last] + length), num_nodes)
        else:
            starts[last] = max(min(starts[last], ends[last] - length), 0)


def pattern_of(units: Units, placeholders: Border, results: Border) -> Pattern:
    """Return the common pattern of the two interior units.

    Args:
        units: the slices of the run.
        placeholders: placeholders of the graph by (kind, name).
        results: results of the graph by (kind, name).

    Raises:
        NotFoldable: the units differ, or a node outside reads their results.
    """
    _Readers(units, results).check()
    merge = _Merge(units)
    inputs = _equal_border(units, placeholders)
    forward = tuple(merge.steps(units.forward))
    backward = tuple(merge.steps(units.backward))
    result_entries = _equal_border(
        units, {entry: node for entry, node in results.items() if entry[0] != "output"}
    )
    crossing = [
        (
            entry,
            merge.value(
                results[_full_name(units, units.one, entry)],
                results[_full_name(units, units.two, entry)],
            ),
        )
        for entry in result_entries
    ]
    if any(not isinstance(value, Ref) or value.kind is not UnitKind.HERE for _, value in crossing):
        raise NotFoldable(f"a gradient of {units.run.name} is not computed in its layer", units.run)
    return Pattern(forward, backward, inputs, tuple(crossing))


def _full_name(units: Units, unit: int, entry: tuple[str, str]) -> tuple[str, str]:
    return entry[0], units.path(unit, entry[1])


def _equal_border(units: Units, border: Border) -> tuple[tuple[str, str], ...]:
    """Return (kind, rest) of the placeholders or results of unit one; raise NotFoldable if those of
    unit two differ."""
    one, two = (
        [(kind, rest) for kind, rest, unit in _homes(units, border) if unit == wanted]
        for wanted in (units.one, units.two)
    )
    if one != two:
        raise NotFoldable(
            f"neighbouring layers of {units.run.name} differ in parameters, buffers or gradients",
            units.run,
        )
    return tuple(one)


def _homes(units: Units, border: Border) -> Iterator[tuple[str, str, int | None]]:
    """Yield the kind, the rest of the name and the unit of every placeholder or result."""
    for kind, name in border:
        home = units.home(name) if isinstance(name, str) else None
        yield (kind, home[1], home[0]) if home else (kind, "", None)


class _Merge:
    """Compares the nodes of units one and two, and merges them into steps."""

    def __init__(self, units: Units) -> None:
        self.units = units
        self.pairs: dict[
            fx.Node, fx.Node
        ] = {}  # node of a neighbour that unit one reads → the node that unit two reads instead

    def steps(self, slices: Mapping[int, Sequence[fx.Node]]) -> Iterator[UnitStep]:
        """Yield the pattern of one phase."""
        first, second = slices[self.units.one], slices[self.units.two]
        if len(first) != len(second):
            raise self.differ(first[0])
        for one, two in zip(first, second, strict=True):
            homes = [self.units.home(node.meta["module"]) for node in (one, two)]
            rests = [
                home[1] if home else node.meta["module"]
                for home, node in zip(homes, (one, two), strict=True)
            ]
            if (
                one.target is not two.target
                or rests[0] != rests[1]
                or _signature(one) != _signature(two)
            ):
                raise self.differ(one)
            try:
                args, kwargs = self.value(one.args, two.args), self.value(one.kwargs, two.kwargs)
            except ValueError:
                raise self.differ(one) from None
            yield UnitStep(two.name, one.target, args, kwargs, two.meta, homes[0] or rests[0])

    def differ(self, node: fx.Node) -> NotFoldable:
        """Return the error for a node of unit one that differs."""
        return NotFoldable(
            f"neighbouring layers of {self.units.run.name} differ in {node.target} of"
            f" {node.meta['module']}",
            self.units.run,
        )

    def value(self, one: Any, two: Any) -> Any:
        """Merge two arguments; raise ValueError if they differ."""
        if isinstance(one, fx.Node) and isinstance(two, fx.Node):
            return self._operand(one, two)
        if type(one) is not type(two):
            raise ValueError
        if isinstance(one, (tuple, list)):
            items = map(self.value, one, two) if len(one) == len(two) else self._unequal()
            return list(items) if isinstance(one, list) else tuple(items)
        if isinstance(one, dict):
            return (
                {name: self.value(one[name], two[name]) for name in one}
                if one.keys() == two.keys()
                else self._unequal()
            )
        if isinstance(one, slice):
            return slice(
                *(
                    self.value(getattr(one, end), getattr(two, end))
                    for end in ("start", "stop", "step")
                )
            )
        return one if one == two else self._unequal()

    def _unequal(self) -> Any:
        raise ValueError

    def _operand(self, one: fx.Node, two: fx.Node) -> Any:
        units = self.units
        if one in units.own or two in units.own:
            return self._merge_own(one, two)
        place, other_place = units.place.get(one), units.place.get(two)
        if place is None and one is two:
            return one
        if place is None or other_place is None or place[0] != other_place[0]:
            raise ValueError
        return self._in_slices(one, two, place, other_place)

    def _merge_own(self, one: fx.Node, two: fx.Node) -> Any:
        """Merge two operands of which at least one is a parameter or buffer."""
        none: tuple[Any, str] = (None, "")
        home, kind = self.units.own.get(one, none)
        other, _ = self.units.own.get(two, none)
        if home is None and one is two:
            return one
        if home is None or other is None:
            raise ValueError
        if home != (self.units.one, other[1]) or other[0] != self.units.two:
            raise ValueError
        return Ref(UnitKind.OWN, (kind, home[1]))

    def _in_slices(
        self, one: fx.Node, two: fx.Node, place: tuple[str, int, int], other: tuple[str, int, int]
    ) -> Ref:
        phase, unit, offset = place
        if (unit, other[1]) == (self.units.one, self.units.two) and offset == other[2]:
            return Ref(UnitKind.HERE, (phase, offset))
        before, behind = (0, self.units.one), (self.units.two, self.units.last)
        if (unit, other[1]) != (before if phase == "forward" else behind) or self.pairs.setdefault(
            one, two
        ) is not two:
            raise ValueError
        # The offset must refer to the slice of an interior unit. In forward, that is the node of
        # unit one that unit two reads; in backward, the node of unit two that unit one reads.
        return (
            Ref(UnitKind.PREVIOUS, other[2]) if phase == "forward" else Ref(UnitKind.NEXT, offset)
        )


def _signature(node: fx.Node) -> Any:
    value = node.meta["val"]
    tensors = [
        (tuple(item.shape), item.stride(), item.dtype) if isinstance(item, torch.Tensor) else item
        for item in (value if isinstance(value, (tuple, list)) else (value,))
    ]
    return (
        type(value).__name__ if isinstance(value, (tuple, list)) else "",
        tensors,
        node.meta["source"],
    )


class _Readers:
    """Checks that only the interior units and their neighbours read the results of the interior
    units."""

    def __init__(self, units: Units, results: Border) -> None:
        self.units = units
        self.output = next(iter(reversed(units.graph.nodes)))
        self.results: dict[fx.Node, set[int | None]] = {}
        for (kind, name), node in results.items():
            home = units.home(str(name)) if kind != "output" else None
            self.results.setdefault(node, set()).add(home[0] if home else None)

    def check(self) -> None:
        """Raise NotFoldable if another node reads these results.

        The backward of unit one is the end of the repeated part. Its results may be read outside,
        such as sums of gradients over all units.
        """
        units = self.units
        for unit, behind in ((units.one, units.two), (units.two, units.last)):
            for node in units.forward[unit]:
                self._check_users(
                    node,
                    unit,
                    {(phase, near) for phase in ("forward", "backward") for near in (unit, behind)},
                )
        for node in units.backward[units.two]:
            self._check_users(node, units.two, {("backward", units.two), ("backward", units.one)})
        for node, (home, _) in units.own.items():
            if home and home[0] in (units.one, units.two):
                self._check_users(node, home[0], {("forward", home[0]), ("backward", home[0])})

    def _check_users(self, node: fx.Node, unit: int, allowed: set[tuple[str, int]]) -> None:
        for user in node.users:
            own_result = user is self.output and self.results.get(node) == {unit}
            if not own_result and self.units.place.get(user, ("", 0, 0))[:2] not in allowed:
                raise NotFoldable(
                    f"{user.meta.get('module') or 'the model'} is outside the layers of"
                    f" {self.units.run.name} and reads {node.target} of a layer",
                    self.units.run,
                )
