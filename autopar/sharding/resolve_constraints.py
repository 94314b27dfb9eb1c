"""Constraints resolved to the nodes and parameters of a trace, and groups of equal layers.

`autopar.sharding.resolve_presets` resolves named plans.

A module pattern matches a *scope*: the module and everything below it. ``weight`` applies to every
node of the scope that reads the parameter, in forward or backward. ``input`` applies to forward
tensors from outside the scope, at every node of the scope that reads them, in forward or backward.
``output`` applies to tensors of the scope that forward nodes outside read, in the layout in which
the scope produces them. A scope that ends in a contraction over a sharded dim produces partial
sums: force the ``input`` of its readers instead.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import fx
from torch.distributed.tensor import Shard

from autopar.capture.trace import Parameter, Trace
from autopar.constraints import (
    KINDS,
    Constraint,
    LayoutConstraint,
    Megatron,
    Offloaded,
    Recompute,
    Resting,
    parallelisms,
)
from autopar.core.keywords import close_to
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError
from autopar.rules import operands_of
from autopar.sharding.clusters import pattern_of
from autopar.sharding.presets.tensor import around_softmax
from autopar.sharding.resolve_presets import Named, Rest, resolve_named

# --------------------------------------------------------------------------------------------------
# Groups of equal layers with separate decisions.
#
# Equal layers share one decision as long as that is good enough. If the best plan is a mixture (for
# example, memory suffices for two thirds of the layers to keep a value), a list of layers is cut.
# The layers before a cut are one class, and the layers after it another.

log = logging.getLogger("autopar")
Starts = Mapping[str, tuple[int, ...]]
"""Path of a list of layers → the first layers of its second and later groups, ascending."""
_MOST_CUTS = 3  # cuts per list; more would only separate alternating layers


def layer_of(key: str) -> tuple[str, int] | None:
    """Return the outermost list of layers of a node key or a parameter's name, and the index of the
    layer; None if it belongs to no list."""
    pattern, indices = pattern_of(key)
    return (pattern[: pattern.index("{0}")].rstrip("."), indices[0]) if indices else None


def group_of(key: str, starts: Starts) -> int:
    """Return the index of the group to which the layer of a node or a parameter belongs."""
    layer = layer_of(key) if starts else None
    return sum(layer[1] >= start for start in starts.get(layer[0], ())) if layer else 0


def frozen_starts(trace: Trace) -> Starts:
    """Return the layers at which backward ends because all earlier layers are frozen.

    Backward reads other tensors of these layers than of later ones, although they are equal in
    forward. With one decision for all of them, an op that backward recomputes for one layer would
    be recomputed for all, and in some of them nothing would read the result.
    """
    if all(p.gradient is not None for p in trace.parameters):
        return {}
    read: dict[str, dict[int, set[str]]] = {}
    for node in trace.graph.nodes:
        layer = (
            layer_of(node.meta["key"])
            if node.op == "call_function" and node.meta["phase"] == "forward"
            else None
        )
        if layer is not None:
            here = read.setdefault(layer[0], {}).setdefault(layer[1], set())
            if any(
                user.op == "call_function" and user.meta["phase"] == "backward"
                for user in node.users
            ):
                here.add(pattern_of(node.meta["key"])[0])
    starts: dict[str, tuple[int, ...]] = {}
    for path, layers in read.items():
        order = sorted(layers)
        cuts = tuple(
            after for before, after in itertools.pairwise(order) if layers[before] != layers[after]
        )
        starts |= {path: cuts} if 0 < len(cuts) <= _MOST_CUTS else {}
    return starts


def combine_groupings(some: Starts, others: Starts) -> Starts:
    """Combine two groupings: layers that either separates are separate."""
    return {
        path: tuple(sorted({*some.get(path, ()), *others.get(path, ())}))
        for path in (*some, *(p for p in others if p not in some))
    }


Slot = tuple[str, int, Layout]  # ("input" | "output", operand or result index, layout)


@dataclass(frozen=True, slots=True)
class Forced:
    """The constraints on a trace.

    Attributes:
        slots: node name → layouts of its operands and results.
        storage: parameter name → storage layout.
        named: what named plans force, axis by axis.
        recompute: what backward recomputes (`autopar.constraints.megatron`); None leaves it to the
            planner.
        softmax: names of the nodes that selective recomputation runs again.
        starts: groups of layers that decide separately. The planner sets them, not the user.
        offload: what may be kept in host memory; None for nothing.
    """

    slots: Mapping[str, tuple[Slot, ...]]
    storage: Mapping[str, Layout]
    named: Named = field(default_factory=Named)
    recompute: Recompute | None = None
    softmax: frozenset[str] = frozenset()
    starts: Starts = field(default_factory=dict)
    offload: Offloaded | None = None

    @staticmethod
    def nothing() -> Forced:
        """Return no constraints."""
        return Forced({}, {})

    def rests(self, parameter: str) -> tuple[Rest, ...]:
        """Return the alternatives of named plans for the storage of a parameter.

        The first one that can be stored applies. Empty if no plan concerns the parameter.
        """
        return self.named.rests.get(parameter, ())

    def filter_storage(self, parameter: str, layouts: Sequence[Layout]) -> Sequence[Layout]:
        """Select the storage layouts of a parameter that named plans allow.

        Args:
            parameter: name of the parameter.
            layouts: layouts in which it can be stored.
        """
        rests, gathered = self.rests(parameter), self.named.gathered.get(parameter, frozenset())
        admitted = (
            [
                layout
                for layout in layouts
                if _allows(rest, layout) and _can_gather(gathered, layout)
            ]
            for rest in rests
        )
        return next(filter(None, admitted), []) if rests else layouts

    def describe_storage(self, parameter: str) -> str:
        """Describe the storage layouts that constraints allow a parameter, for error messages."""
        if parameter in self.storage:
            return str(self.storage[parameter])
        placements = (
            "any" if allowed is None else " or ".join(sorted(map(str, allowed)))
            for allowed in (self.rests(parameter) or ((),))[-1]
        )
        return (
            f"{' '.join(placements)}, which"
            f" {' and '.join(filter(None, dict.fromkeys(self.named.plans)))} require"
        )


def _drop_contradicted(named: Named, given: Mapping[str, Layout]) -> Named:
    """Remove the storage that named plans force on parameters whose given layout contradicts it.

    These parameters keep the given layout, and are redistributed when they are read.
    """
    otherwise = {
        n
        for n, at in given.items()
        if (rests := named.rests.get(n)) and not any(_allows(rest, at) for rest in rests)
    }
    storages = {name: rests for name, rests in named.rests.items() if name not in otherwise}
    return replace(named, rests=storages) if otherwise else named


def _allows(rest: Rest, layout: Layout) -> bool:
    return all(
        allowed is None or placement in allowed
        for allowed, placement in zip(rest, layout.placements, strict=True)
    )


def _can_gather(axes: frozenset[int], layout: Layout) -> bool:
    """Return whether these axes can be gathered without the others: they must be the innermost
    splitters of each dim."""
    splitters = (
        [axis in axes for axis in layout.splitters(p.dim)]
        for p in layout.placements
        if isinstance(p, Shard)
    )
    return all(is_gathered == sorted(is_gathered) for is_gathered in splitters)


def resolve(trace: Trace, constraints: Iterable[Constraint], mesh: Mesh) -> Forced:
    """Resolve constraints to the nodes and parameters of a trace.

    Args:
        trace: the trace.
        constraints: the constraints of the user.
        mesh: the mesh of the trace.

    Raises:
        ConstraintError: if a part of a constraint matches nothing, forces a dim that the tensor
            does not have, or contradicts another one on the storage of a parameter; if a named plan
            cannot be met.
    """
    constraints = tuple(constraints)
    slots, storage = _resolve_layouts(trace, constraints)
    named = resolve_named(trace, parallelisms(constraints, mesh), mesh)
    for note in named.notes:
        log.warning(note)
    named = _drop_contradicted(
        named,
        {
            n: at
            for c in constraints
            if isinstance(c, Resting)
            for n, at in _resting_layouts(trace, c).items()
        },
    )
    recompute = next(
        (c.recompute for c in constraints if isinstance(c, Megatron) and c.recompute), None
    )
    softmax = _softmax_to_recompute(trace) if recompute == "selective" else frozenset[str]()
    return Forced(slots, storage, named, recompute, softmax, offload=_find_offload(constraints))


def _resolve_layouts(
    trace: Trace, constraints: Iterable[Constraint]
) -> tuple[dict[str, tuple[Slot, ...]], dict[str, Layout]]:
    """Return node name → slots, and parameter name → storage layout, that constraints force.

    Raises:
        ConstraintError: if a part of a constraint matches nothing, or two constraints contradict
            each other on the storage of a parameter.
    """
    slots: dict[str, list[Slot]] = {}
    storage: dict[str, Layout] = {}
    for constraint in constraints:
        if isinstance(constraint, Resting):
            storage |= _resting_layouts(trace, constraint)
        if isinstance(constraint, LayoutConstraint):
            for name, forced in _match(trace, constraint):
                if not isinstance(forced, Layout):
                    slots.setdefault(name, []).append(forced)
                elif storage.setdefault(name, forced) != forced:
                    message = (
                        f"{name} would be stored as {storage[name]} and, by"
                        f" {constraint.pattern!r}, as {forced}"
                    )
                    raise ConstraintError(message, remedy="force one storage layout for it")
    return {name: tuple(forced) for name, forced in slots.items()}, storage


def _softmax_to_recompute(trace: Trace) -> frozenset[str]:
    """Return the names of the nodes that selective recomputation runs again.

    Raises:
        ConstraintError: if there are none.
    """
    softmax = around_softmax(trace)
    if not softmax:
        raise ConstraintError(
            "recompute='selective': the model has no attention",
            remedy="pass recompute='full', or remove the option",
        )
    return softmax


def _match(
    trace: Trace, constraint: LayoutConstraint
) -> Iterable[tuple[str, Slot] | tuple[str, Layout]]:
    """Yield the node names with slots, and the parameter names with storage layouts, on which a
    constraint forces layouts.

    Raises:
        ConstraintError: if a part of the constraint matches nothing.
    """
    for kind in KINDS:
        layout = getattr(constraint, kind)
        if layout is None:
            continue
        matches = (
            list(_storage(trace, constraint))
            if kind == "storage"
            else list(_slots(trace, constraint, kind))
        )
        if not matches:
            raise ConstraintError(
                f"{kind}={str(layout)!r} on {constraint.pattern!r} matches nothing in the model",
                remedy=_nearest(trace, constraint.pattern, kind),
            )
        yield from matches


def _find_offload(constraints: Iterable[Constraint]) -> Offloaded | None:
    """Return the constraint on offloading, if there is one.

    Raises:
        ConstraintError: if there are several.
    """
    offloads = [c for c in constraints if isinstance(c, Offloaded)]
    if len(offloads) > 1:
        raise ConstraintError(
            f"{offloads[0]} and {offloads[1]} both set what may be offloaded",
            remedy="pass one of them",
        )
    return offloads[0] if offloads else None


def _slots(trace: Trace, constraint: LayoutConstraint, kind: str) -> Iterable[tuple[str, Slot]]:
    return (
        _weights(trace, constraint, kind)
        if kind in ("weight", "bias")
        else _activations(trace, constraint, kind)
    )


def view_layout(layout: Layout, parameter: Parameter) -> Layout:
    """Convert a layout over the stored dims of a parameter to its dims in the graph.

    If the graph has several dims for a stored dim, the last of them is sharded.

    Args:
        layout: the layout over the stored dims.
        parameter: the parameter.

    Raises:
        ConstraintError: if the parameter does not have a dim that the layout shards.
    """
    last: list[int] = []  # stored dim → its last dim in the view
    position = 0
    for size in parameter.shape:
        product = 1
        while product < size or position == len(last):
            product *= parameter.view[position]
            position += 1
            if product >= size:
                break
        last.append(position - 1)
    placements = []
    for placement in layout.placements:
        if isinstance(placement, Shard):
            if placement.dim >= len(last):
                raise ConstraintError(
                    f"{str(layout)!r} shards dim {placement.dim} of {parameter.name}, but its shape"
                    f" is {parameter.shape}",
                    remedy="use one of its dims",
                )
            placement = Shard(last[placement.dim])
        placements.append(placement)
    return Layout(placements, layout.order, host=layout.host)


def _weights(trace: Trace, constraint: LayoutConstraint, kind: str) -> Iterable[tuple[str, Slot]]:
    layout = getattr(constraint, kind)
    for p in trace.parameters:
        for name in (p.name, *p.aliases):
            module, _, last = name.rpartition(".")
            if last != kind or not constraint.matches(module):
                continue
            for reader in trace.node(p.node).users:
                if reader.op == "call_function" and _scope(reader.meta["module"], constraint):
                    for i, operand in enumerate(operands_of(reader)):
                        if operand.name == p.node:
                            yield reader.name, ("input", i, view_layout(layout, p))


def _storage(trace: Trace, constraint: LayoutConstraint) -> Iterable[tuple[str, Layout]]:
    for p in trace.parameters:
        for name in (p.name, *p.aliases):
            module, _, last = name.rpartition(".")
            if constraint.storage is not None and last == "weight" and constraint.matches(module):
                yield p.name, view_layout(constraint.storage, p)


def _resting_layouts(trace: Trace, constraint: Resting) -> dict[str, Layout]:
    """Return parameter name in this trace → storage layout from another plan.

    Raises:
        ConstraintError: if a layout shards a dim that the parameter does not have.
    """
    layouts = dict(constraint.storage)
    storage = {
        p.name: layouts[name]
        for p in trace.parameters
        for name in (*p.aliases, p.name)
        if name in layouts
    }
    for p in trace.parameters:
        dims = (
            [at.dim for at in storage[p.name].placements if isinstance(at, Shard)]
            if p.name in storage
            else []
        )
        if dims and max(dims) >= len(p.view):
            message = f"{p.name} would be stored as {storage[p.name]}, but its view is {p.view}"
            raise ConstraintError(message, remedy="use layouts from a plan of the same model")
    return storage


def _activations(
    trace: Trace, constraint: LayoutConstraint, kind: str
) -> Iterable[tuple[str, Slot]]:
    """Yield the slots of the activations that enter or leave the modules of a constraint."""
    layout = getattr(constraint, kind)
    inputs = {i.node for i in trace.inputs}
    for edge in _edges_between_modules(trace, constraint):
        is_activation = _is_forward(edge.operand) or edge.operand.name in inputs
        if kind == "input" and edge.scope and is_activation:
            yield edge.node.name, ("input", edge.position, layout)
        if kind == "output" and edge.operand_scope and _is_forward(edge.node):
            yield edge.operand.name, ("output", 0, layout)


class _Edge(NamedTuple):
    """An operand of a node, and the modules of a constraint that contain the node and the node that
    computes the operand; ``""`` if there is none."""

    node: fx.Node
    position: int
    operand: fx.Node
    scope: str
    operand_scope: str


def _edges_between_modules(trace: Trace, constraint: LayoutConstraint) -> Iterable[_Edge]:
    """Yield the operands that another module of the constraint computes than that which reads
    them."""
    for node in trace.graph.nodes:
        if node.op != "call_function":
            continue
        scope = _scope(node.meta["module"], constraint)
        for i, operand in enumerate(operands_of(node)):
            other = _scope(operand.meta["module"], constraint) if _is_forward(operand) else ""
            if other != scope:
                yield _Edge(node, i, operand, scope, other)


def _is_forward(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta["phase"] == "forward"


def _scope(module: str, constraint: LayoutConstraint) -> str:
    """Return the shortest ancestor that the pattern matches, or the module itself; ``""`` if there
    is none."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if constraint.matches(path):
            return path
    return ""


def _nearest(trace: Trace, pattern: str, kind: str) -> str:
    """Return the remedy for a pattern without matches: the most similar module paths."""
    named = [p.name.rpartition(".")[0] for p in trace.parameters]
    run = [n.meta["module"] for n in trace.graph.nodes if n.op == "call_function"]
    modules = list(dict.fromkeys(path for path in (*named, *run) if path))
    here = next((m for m in modules if fnmatchcase(m, pattern)), None)
    if here is not None:
        return f"module {here!r} exists, but has no {kind} that can be forced"
    repeated = dict.fromkeys(
        ".".join("*" if part.isdecimal() else part for part in m.split(".")) for m in modules
    )
    close = close_to(pattern, [*repeated, *modules] if "*" in pattern else modules)
    return (
        f"did you mean {' or '.join(map(repr, close))}?"
        if close
        else f"module paths are, for example, {', '.join(modules[:4])}"
    )
