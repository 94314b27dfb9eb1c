"""Repeat the pattern of a run in the joint graph of a shortened model, to get the graph of the full
model.

The graph already has the labels and names of the full model. It contains the first two and the last
two units of the run. Copies are inserted between them, and unit `two` and the backward of unit
`one` are connected to their new neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.capture.folding.repeated_units import (
    Border,
    Ref,
    UnitKind,
    Units,
    UnitStep,
    pattern_of,
)
from autopar.capture.folding.runs import Run
from autopar.capture.folding.shorten import Kept
from autopar.capture.trace import ModuleAttribute
from autopar.core.fx_nodes import add_call


def renumber_path(path: str, kept: Kept) -> str:
    """Return the path in the full model of a path in the shortened model: ``layers.3.mlp`` →
    ``layers.31.mlp``."""
    full = ""
    for name in path.split(".") if kept else ():
        now = kept.get(full, {}).get(name, name)
        full = f"{full}.{now}" if full else now
    return full if kept else path


def repeat_attributes(
    attributes: Iterable[ModuleAttribute], run: Run
) -> tuple[ModuleAttribute, ...]:
    """Return the attributes that the full model reads; each removed layer reads the same attributes
    as its counterpart in the first unit."""
    by_layer: dict[int, list[tuple[ModuleAttribute, str]]] = {}
    stay = []
    for attribute in attributes:
        run_place = run.find(attribute.path)
        if run_place is not None:
            by_layer.setdefault(run_place[0], []).append((attribute, run_place[1]))
        if (
            run_place is None or run_place[0] not in run.removed_positions
        ):  # the module that replaces a removed layer has the same path
            stay.append(attribute)
    added = [
        replace(each, path=f"{run.layers[position]}{inner}")
        for position in run.removed_positions
        for each, inner in by_layer.get(run.like(position), ())
    ]
    return (*stay, *added)


def repeat(
    run: Run, graph: fx.Graph, placeholders: Border, results: Border, ranks: Mapping[str, int]
) -> tuple[Border, Border]:
    """Insert copies of the interior units of a run into a graph.

    Args:
        run: the run.
        graph: the graph of the shortened model, changed in place.
        placeholders: placeholders of the graph by (kind, name), in order.
        results: results of the graph by (kind, name), in the order of its output.
        ranks: name of each parameter and buffer → its position in the order of registration in the
            full model.

    Returns:
        The placeholders and results of the new graph, in the order of a full capture.

    Raises:
        NotFoldable: the units differ; the graph is not changed.
    """
    return _Repetition(run, graph, placeholders, results, ranks).run()


class _Repetition:
    """The copies of the units of one run: `copies[unit][phase]` are the nodes in the order of the
    pattern, and `own[unit]` the placeholders."""

    def __init__(
        self,
        run: Run,
        graph: fx.Graph,
        placeholders: Border,
        results: Border,
        ranks: Mapping[str, int],
    ) -> None:
        self.graph, self.placeholders, self.results, self.ranks = (
            graph,
            placeholders,
            results,
            ranks,
        )
        self.units = units = Units(run, graph, placeholders)
        self.pattern = pattern_of(units, placeholders, results)
        self.inserted = range(units.one + 1, units.two)
        interior = (units.one, units.two)
        self.copies = {
            unit: {"forward": units.forward[unit], "backward": units.backward[unit]}
            for unit in interior
        }
        self.own: dict[int, dict[tuple[str, str], fx.Node]] = {}

    def run(self) -> tuple[Border, Border]:
        """Insert and connect the copies; return the new placeholders and results."""
        for unit in self.inserted:
            self.copies[unit] = {"forward": [], "backward": []}
        self._insert_placeholders()
        first_behind = {
            "forward": self.units.forward[self.units.two][0],
            "backward": self.units.backward[self.units.one][0],
        }
        orders = {"forward": self.inserted, "backward": reversed(self.inserted)}
        for phase, steps in (
            ("forward", self.pattern.forward),
            ("backward", self.pattern.backward),
        ):
            with self.graph.inserting_before(first_behind[phase]):
                for unit in orders[phase]:
                    for step in steps:
                        self.copies[unit][phase].append(self._node(step, unit))
        self._redirect()
        copies = {
            unit: {
                entry: self.copies[unit][ref.offset[0]][ref.offset[1]]
                for entry, ref in self.pattern.results
            }
            for unit in self.inserted
        }
        results = self._join_border(self.results, copies)
        output = next(iter(reversed(self.graph.nodes)))
        output.args = (tuple(results.values()),)
        placeholders = self._join_border(self.placeholders, self.own)
        for kind in ("parameter", "buffer"):
            nodes = [
                node
                for entry, node in placeholders.items()
                if entry[0] == kind and entry[1] in self.ranks
            ]
            for before, node in itertools.pairwise(nodes):
                before.append(node)
        return placeholders, results

    def _insert_placeholders(self) -> None:
        for kind in dict.fromkeys(kind for kind, _ in self.pattern.own):
            rests = [rest for other, rest in self.pattern.own if other == kind]
            with self.graph.inserting_before(
                self.placeholders[kind, self.units.path(self.units.two, rests[0])]
            ):
                for unit in self.inserted:
                    for rest in rests:
                        like = self.placeholders[kind, self.units.path(self.units.two, rest)]
                        node = self.graph.placeholder(like.name)
                        node.meta = {**like.meta, "module": self.units.path(unit, rest)}
                        self.own.setdefault(unit, {})[kind, rest] = node

    def _node(self, step: UnitStep, unit: int) -> fx.Node:
        def operand(ref: Ref) -> fx.Node:
            """Return the node that an operand of the pattern refers to in this unit."""
            match ref.kind:
                case UnitKind.HERE:
                    phase, offset = ref.offset
                    return self.copies[unit][phase][offset]
                case UnitKind.PREVIOUS:
                    return self.copies[unit - 1]["forward"][ref.offset]
                case UnitKind.NEXT:
                    return self.copies[unit + 1]["backward"][ref.offset]
                case UnitKind.OWN:
                    return self.own[unit][ref.offset]

        def fill_in(value: Any) -> Any:
            """Return an argument with references replaced by nodes."""
            if isinstance(value, Ref):
                return operand(value)
            if isinstance(value, tuple):
                return tuple([fill_in(item) for item in value])
            if isinstance(value, list):
                return [fill_in(item) for item in value]
            if isinstance(value, dict):
                return {name: fill_in(item) for name, item in value.items()}
            if isinstance(value, slice):
                return slice(fill_in(value.start), fill_in(value.stop), fill_in(value.step))
            return value

        args, kwargs = fill_in(step.args), fill_in(step.kwargs)
        node = add_call(self.graph, step.target, args, kwargs, step.name)
        module = step.home if isinstance(step.home, str) else self.units.path(unit, step.home[1])
        node.meta = {**step.meta, "module": module}
        return node

    def _redirect(self) -> None:
        """Connect the copies to the interior units of the shortened model.

        Unit `two` reads the last copy instead of unit `one`. The backward of unit `one` reads the
        backward of the first copy instead of that of unit `two`.
        """
        units = self.units
        before = dict(
            zip(units.forward[units.one], self.copies[units.two - 1]["forward"], strict=True)
        )
        behind = dict(
            zip(units.backward[units.two], self.copies[units.one + 1]["backward"], strict=True)
        )
        for nodes, moved in (
            (units.forward[units.two], before),
            (units.backward[units.two], before),
            (units.backward[units.one], behind),
        ):
            for node in nodes:
                for operand in node.all_input_nodes:
                    if operand in moved:
                        node.replace_input_with(operand, moved[operand])

    def _join_border(
        self, border: Border, added: Mapping[int, Mapping[tuple[str, str], fx.Node]]
    ) -> Border:
        """Return the placeholders or results with those of the copies added; each kind is in the
        order of the full model."""
        more = {
            (kind, self.units.path(unit, rest)): copy
            for unit in self.inserted
            for (kind, rest), copy in added.get(unit, {}).items()
        }
        changed = {kind for kind, _ in more}
        joined: Border = {}
        for entry, node in border.items():
            if entry in joined:
                continue
            joined[entry] = node
            if entry[0] in changed and entry[1] in self.ranks:
                same = {
                    each: of
                    for part in (border, more)
                    for each, of in part.items()
                    if each[0] == entry[0] and each[1] in self.ranks
                }
                del joined[entry]
                joined |= {
                    each: same[each] for each in sorted(same, key=lambda each: self.ranks[each[1]])
                }
        return joined
