"""The collectives of a tensor in a solution: the cheapest trees of both phases at the prices of a
balance, and the slack of each collective.

An offered kernel (`autopar.cost.kernel_offers`) is used if it saves time
(`autopar.solve.pick_kernels`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autopar.core.collective import Collective, Kind
from autopar.core.layout import Layout
from autopar.core.layout_graph import Arc, LayoutGraph
from autopar.core.problem import Problem, Slack, Use, Value, is_early
from autopar.core.redistribute import cheapest_tree
from autopar.core.streams import COMPUTE_BOUND, Load, OverlapWeights, work
from autopar.errors import LayoutError
from autopar.solve.pick_kernels import (
    Chosen,
    KernelUse,
    most_saved,
    pick_kernels,
    saved_by,
    unseen_layouts,
    usable,
)
from autopar.solve.prices import arc_loads, tree_costs

# --------------------------------------------------------------------------------------------------
# Communication that may overlap with compute: the slack of each collective for given choices.
#
# prefetchable   its source exists at the start of the phase: parameters, buffers, inputs, values
#                from another stage, kept values, and results of other prefetchable collectives of
#                the same tensor
# deferrable     its result is read only at the end of the phase: gradients, outputs, values kept
#                for backward
# critical       all others: some op waits for it, and it waits for some op
#
# A slice moves nothing between devices: it has the slack of its place, but is not communication.
# Slack follows from the choices alone. Emission and explanation use it as computed here. Pricing
# counts only slack that exists for all choices (`autopar.solve.prices`).


def slacks(
    arcs: Sequence[Arc], at_hand: Collection[int], waited_for: Collection[int]
) -> tuple[Slack, ...]:
    """Return the slack of each arc of a tree. Each arc begins at the end of an earlier one.

    Args:
        arcs: the arcs of the tree, in order.
        at_hand: layouts (node indices) of the tensor that exist at the start of the phase.
        waited_for: layouts in which ops read it before the end of the phase.
    """
    available = set(at_hand)
    from_start: list[bool] = []
    for arc in arcs:
        from_start.append(arc.src in available)
        available |= {arc.dst} if arc.src in available else set()
    awaited = set(waited_for)
    reversed_slacks: list[Slack] = []
    for arc, early in zip(reversed(arcs), reversed(from_start), strict=True):
        late = arc.dst not in awaited
        awaited |= set() if late else {arc.src}
        reversed_slacks.append("prefetchable" if early else "deferrable" if late else "critical")
    return tuple(reversed(reversed_slacks))


@dataclass(frozen=True, slots=True)
class Redistribution:
    """The collectives of one variant in one phase, for one instance.

    Attributes:
        sources: available layouts (node indices).
        arcs: the collectives, in order.
        read_layouts: layouts (node indices) that are read.
        time_s: seconds of the collectives.
        slacks: slack of each arc.
        early: whether it counts as early (`autopar.solve.prices`).
        load: the load, without the savings of kernels.
        kernels: position among `arcs` → the kernel that runs the arc.
    """

    sources: tuple[int, ...]
    arcs: tuple[Arc, ...]
    read_layouts: tuple[int, ...]
    time_s: float
    slacks: tuple[Slack, ...] = ()
    early: bool = False
    load: Load = Load()  # noqa: RUF009 - frozen
    kernels: Mapping[int, KernelUse] = field(default_factory=dict)


Moves = tuple[Redistribution, Redistribution, tuple[int, ...]]
"""Collectives of a variant in its own phase, those in backward of a forward value, and the versions
that are kept between the two."""


def demand(problem: Problem, use: Use, chosen: Mapping[int, int] | Sequence[int]) -> Layout:
    """Return the layout in which a use reads.

    Args:
        problem: the problem.
        use: an operand of an op.
        chosen: strategy index by op.
    """
    return problem.ops[use.op].strategies[chosen[use.op]].layouts.inputs[use.operand]


def moves_of(
    problem: Problem,
    v: int,
    strategies: Sequence[int],
    recomputed: Mapping[int, int],
    kept: Mapping[int, tuple[int, ...]] | None,
    balance: OverlapWeights = COMPUTE_BOUND,
) -> Moves:
    """Return the collectives of a variant, and its kept versions.

    Args:
        problem: the problem.
        v: index of the variant.
        strategies, recomputed, kept: as in `autopar.solve.evaluate.evaluate`.
        balance: overlap weights at whose prices the trees are cheapest.

    Raises:
        LayoutError: if some layout cannot be reached.
    """
    value = problem.values[problem.variants[v].value]
    variant = _ChosenVariant(problem, v, value, (strategies, recomputed), balance)
    ends = variant.ends_in_own_phase()
    first = variant.redistribute(False, ends)
    later = variant.reads_in_backward()
    if not later.read_layouts:
        return first, Redistribution((), (), (), 0.0), ()
    kept_here = None if kept is None else kept.get(v, ())
    allowed, stored = _versions_allowed(value, ends.sources | ends.read_layouts, kept_here)
    allowed |= later.resident  # it may always be kept in its storage layout
    second, keep = later.redistribute(allowed, stored)
    kept_layouts = {n % len(value.graph.layouts) for n in keep}
    if not unseen_layouts(first.arcs, first.kernels) & kept_layouts:
        return _add_stores(value, first, keep, ends), second, keep
    # A result that a kernel scatters or norms as it is computed never exists separately. So either
    # it is not kept in that layout, or the kernel is not used.
    plain = variant.without_norms(first)
    ways = [(_without_kernels_of(plain, kept_layouts), second, keep)]
    for forward in (first, plain) if plain.kernels != first.kernels else (first,):
        with suppress(LayoutError):
            unseen = unseen_layouts(forward.arcs, forward.kernels)
            ways.append((forward, *later.redistribute(allowed - unseen, stored - unseen)))
    ways = [
        (_add_stores(value, forward, versions, ends), backward, versions)
        for forward, backward, versions in ways
    ]
    return min(
        ways,
        key=lambda way: moved_load(problem, v, way).priced_s(problem.overlap_slowdown, balance),
    )


def _without_kernels_of(moves: Redistribution, layouts: set[int]) -> Redistribution:
    """Return the collectives without the kernels that leave out one of these layouts."""
    kernels = {
        i: kernel
        for i, kernel in moves.kernels.items()
        if not unseen_layouts(moves.arcs, {i: kernel}) & layouts
    }
    return replace(moves, kernels=kernels)


def _layout_made(problem: Problem, value: Value, strategy: int) -> int:
    """Return the layout in which a strategy of its op produces a value."""
    return value.graph.index[
        problem.ops[value.op].strategies[strategy].layouts.outputs[value.result]
    ]


def _versions_allowed(
    value: Value, versions: set[int], kept: Collection[int] | None
) -> tuple[set[int], set[int]]:
    """Return the versions that may be kept on the devices, and those that are stored on the hosts.

    Args:
        value: the value.
        versions: the layouts in which it exists in forward.
        kept: the versions to keep; None allows all, on the devices.
    """
    keepable = versions if value.keepable is None else versions & value.keepable
    if kept is None:
        return set(keepable), set()
    allowed = keepable & set(kept)
    stored = {
        n
        for n in keepable - allowed
        if value.stored_version(n) in kept and value.away(n) < math.inf
    }
    return allowed, stored


def _add_stores(
    value: Value, first: Redistribution, keep: Sequence[int], ends: _Ends
) -> Redistribution:
    """Return the collectives of forward between `ends`, with the copies of versions that are stored
    on the hosts."""
    stores = tuple(_copy(value, n, "store") for n in keep if value.on_host(n))
    if not stores:
        return first
    arcs, time_s = (*first.arcs, *stores), sum(arc.time_s for arc in stores)
    load = first.load + work("forward", time_s, compute=False, early=True)
    return replace(
        first,
        arcs=arcs,
        time_s=first.time_s + time_s,
        slacks=slacks(arcs, ends.at_hand, ends.awaited),
        load=load,
    )


def _copy(value: Value, version: int, kind: Kind) -> Arc:
    """Return the copy of a stored version to the hosts or from them."""
    layout, time_s = (
        version - len(value.graph.layouts),
        value.away(version - len(value.graph.layouts)),
    )
    ends = (layout, version) if kind == "store" else (version, layout)
    return Arc(
        *ends, Collective(kind, -1, -1, -1, "", value.dtype, value.host_bytes(version)), time_s
    )


def moved_load(problem: Problem, v: int, moves: Moves) -> Load:
    """Return the communication of all instances of a variant, minus the savings of kernels.

    Args:
        problem: the problem.
        v: index of the variant.
        moves: its collectives in both phases.
    """
    first, second, _ = moves
    moved = (first.load + second.load).scale(problem.variants[v].count)
    return sum(
        (
            saved_by(problem, v, late, r)
            for late, r in ((False, first), (True, second))
            if r.kernels
        ),
        moved,
    )


def _layouts_wanted(
    problem: Problem,
    graph: LayoutGraph,
    uses: Iterable[Use],
    chosen: Mapping[int, int] | Sequence[int],
) -> tuple[set[int], set[int]]:
    """Return the layouts that the uses read, and those of them that ops wait for. Parameters and
    outputs read theirs at the end of a phase."""
    read = [(graph.index[demand(problem, use, chosen)], problem.ops[use.op].kind) for use in uses]
    return {layout for layout, _ in read}, {layout for layout, kind in read if kind == "compute"}


@dataclass(frozen=True, slots=True)
class _Ends:
    """The layouts (node indices) between which a tensor moves in one phase.

    Attributes:
        sources: layouts from which collectives may start.
        read_layouts: layouts that are read.
        at_hand: layouts that exist at the start of the phase.
        awaited: layouts that ops read before the end of the phase.
        stored: layouts on the hosts, from which they can be fetched.
    """

    sources: set[int]
    read_layouts: set[int]
    at_hand: set[int]
    awaited: set[int]
    stored: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class _ChosenVariant:
    """A variant with the strategies of all ops.

    Attributes:
        problem: the problem.
        v: index of the variant.
        value: its value.
        chosen: strategies, and those of ops that backward recomputes.
        balance: overlap weights at whose prices the trees are cheapest.
    """

    problem: Problem
    v: int
    value: Value
    chosen: Chosen
    balance: OverlapWeights

    def ends_in_own_phase(self) -> _Ends:
        """Return the layouts between which the tensor moves in the phase that computes it."""
        problem, value, (strategies, _) = self.problem, self.value, self.chosen
        made_layout = _layout_made(problem, value, strategies[value.op])
        rests = problem.ops[value.op].kind != "compute"
        uses = [u for u in problem.variants[self.v].uses if u.phase == value.phase]
        read_layouts, awaited = _layouts_wanted(problem, value.graph, uses, strategies)
        return _Ends({made_layout}, read_layouts, {made_layout} if rests else set(), awaited)

    def reads_in_backward(self) -> _BackwardReads:
        """Return what backward reads of a forward value."""
        problem, value, (strategies, recomputed) = self.problem, self.value, self.chosen
        uses = problem.variants[self.v].uses
        later = [u for u in uses if u.phase != value.phase]
        repeated = [
            u for u in uses if u.phase == value.phase and u.read_again and u.op in recomputed
        ]
        read_layouts, awaited = _layouts_wanted(problem, value.graph, later, strategies)
        wanted_again, awaited_again = _layouts_wanted(problem, value.graph, repeated, recomputed)
        resident, remade = set[int](), set[int]()
        if value.resident:
            resident.add(_layout_made(problem, value, strategies[value.op]))
        if value.op in recomputed:
            remade.add(_layout_made(problem, value, recomputed[value.op]))
        return _BackwardReads(
            self, read_layouts | wanted_again, awaited | awaited_again, resident, remade
        )

    def redistribute(self, late: bool, ends: _Ends) -> Redistribution:
        """Find the cheapest tree of collectives. Source layouts that are stored on the hosts are
        fetched first.

        Args:
            late: whether backward reads a forward value.
            ends: the layouts between which the tensor moves.
        """
        problem, v, value, read_layouts = self.problem, self.v, self.value, ends.read_layouts
        kernels = usable(problem, v, late, self.chosen)
        saved_s = most_saved(value.graph, kernels)
        costs = tree_costs(problem, v, late=late, saved_s=saved_s, balance=self.balance)
        tree = cheapest_tree(value.graph, {*ends.sources, *ends.stored}, read_layouts, costs)
        begun = {arc.src for arc in tree} | read_layouts
        fetches = tuple(
            _copy(value, value.stored_version(n), "fetch")
            for n in sorted(ends.stored)
            if n in begun
        )
        arcs, early = (*fetches, *tree), is_early(problem, v, late=late)
        at_hand = ends.at_hand | {arc.src for arc in fetches}
        return Redistribution(
            tuple(sorted(ends.sources)),
            arcs,
            tuple(sorted(read_layouts)),
            time_s=sum(arc.seconds(shares=early) for arc in arcs),
            slacks=slacks(arcs, at_hand, ends.awaited),
            early=early,
            load=sum(map(arc_loads(problem, v, late=late), arcs), Load()),
            kernels=pick_kernels(problem, v, arcs, read_layouts, kernels) if kernels else {},
        )

    def without_norms(self, first: Redistribution) -> Redistribution:
        """Return the collectives of the tensor's own phase with kernels of a product only."""
        kernels = [k for k in usable(self.problem, self.v, False, self.chosen) if not k.also]
        read_layouts = set(first.read_layouts)
        return replace(
            first, kernels=pick_kernels(self.problem, self.v, first.arcs, read_layouts, kernels)
        )


@dataclass(frozen=True, slots=True)
class _BackwardReads:
    """The layouts (node indices) of a forward value that backward reads.

    Attributes:
        variant: the variant.
        read_layouts: layouts that are read.
        awaited: those of them that ops wait for.
        resident: the storage layout of a value that is in memory during the whole step.
        remade: the layout in which backward recomputes the value.
    """

    variant: _ChosenVariant
    read_layouts: set[int]
    awaited: set[int]
    resident: set[int]
    remade: set[int]

    def redistribute(
        self, allowed: set[int], stored: set[int]
    ) -> tuple[Redistribution, tuple[int, ...]]:
        """Return the collectives of backward, and the versions that they read.

        Args:
            allowed: versions that may be kept on the devices.
            stored: versions that are stored on the hosts.
        """
        free = self.resident | self.remade
        ends = _Ends(
            allowed | free, self.read_layouts, allowed | self.resident, self.awaited, stored - free
        )
        second = self.variant.redistribute(True, ends)
        read = {arc.src for arc in second.arcs} | set(second.read_layouts)
        versions = (*allowed, *map(self.variant.value.stored_version, stored))
        return second, tuple(sorted(n for n in versions if n in read))


def variant_load(
    problem: Problem, v: int, strategies: Sequence[int], recomputed: Mapping[int, int]
) -> Load | None:
    """Compute the communication of all instances of a variant.

    Args:
        problem: that has the variant.
        v: index of the variant.
        strategies, recomputed: as in `autopar.solve.evaluate.evaluate`.

    Returns:
        The load; None if some layout cannot be reached.
    """
    try:
        return moved_load(problem, v, moves_of(problem, v, strategies, recomputed, None))
    except LayoutError:
        return None
