"""Routes: experts write dispatched tokens into the memory of peers (`autopar.rules.dispatch`).

Along axes whose ranks can access each other's memory, rows need no all-to-all. ``moe_dispatch``
writes the tokens directly to where the experts read them. ``moe_combine`` writes the results of the
experts to where they are added (`autopar_csrc/expert_rows.cu`, called by
`autopar.kernels.dispatched`). This saves the pass that packs rows before one all-to-all, and the
pass that orders results before the other. With b bytes of rows, t seconds of their all-to-all, and
the share f of its bandwidth that the profile states, each kernel saves

    2·b / memory bandwidth − t·(1/f − 1)

Counts and gates have no such pass. A route is offered if the total saving of a node exceeds the
time of a launch. Ranks keep the memory that they share for it. Nodes with equal regions share one
region.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.analysis.fusable import SharedRows, shared_rows
from autopar.analysis.work import Work, computes_in
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Strategy
from autopar.core.mesh import Mesh
from autopar.core.problem import PeerRoute, Problem
from autopar.cost.kernel_offers import NO_ROOM, out_of_reach
from autopar.cost.op_times import CollectivePrices, compute_time
from autopar.cost.priced import Priced, Source
from autopar.kernels.routed import MOST_RANKS
from autopar.plans import Communication
from autopar.rules import EXCHANGES, Call, own_moves

ROUTE = "moe_route"
"""Name of the figure in profiles: share of an all-to-all's bandwidth."""
TOO_LITTLE = "sending rows directly to peers would save less than a kernel launch takes"


def savings(
    call: Call, strategy: Strategy, price: CollectivePrices, profile: HardwareProfile
) -> tuple[float, ...]:
    """Return the seconds that a route saves on each of a node's internal collectives.

    Args:
        call: an op that dispatches rows, or combines them.
        strategy: the layouts of its operands and results.
        price: prices of collectives on the mesh.
        profile: the hardware; `ROUTE` in its kernels is the share of the bandwidth that routes
            reach.

    Returns:
        Seconds per collective, in order. Empty if the op has no internal collectives, the profile
        has no figure for routes, the ranks do not share memory, or the axis has more ranks than the
        kernels support.
    """
    reached, moves = profile.kernels.get(ROUTE, 0.0), own_moves(call, strategy, price.mesh.shape)
    if not reached or not moves or why_none(price.mesh, moves[0].axis):
        return ()
    dtype, savings_s = computes_in(call.inputs), []
    for move, (_, has_pass) in zip(moves, EXCHANGES[call.target], strict=True):
        pass_s = (
            compute_time(Work(0, 2 * move.bytes, "indexing"), dtype, profile) if has_pass else 0.0
        )
        savings_s.append(pass_s - price(move) * (1.0 / reached - 1.0))
    return tuple(savings_s)


def saved_of(
    call: Call,
    strategy: Strategy,
    price: CollectivePrices,
    profile: HardwareProfile,
    c: Communication,
) -> float:
    """Return the seconds that a plan's route saves on one of a node's internal collectives.

    Args:
        call: the op that issues the collective.
        strategy: the layouts of its operands and results.
        price: prices of collectives on the mesh.
        profile: the hardware.
        c: the collective in the plan.

    Returns:
        Seconds; 0 if the profile has no figure for routes.
    """
    saved, name = (
        savings(call, strategy, price, profile),
        c.kernel.name if c.kernel is not None else "",
    )
    moves = zip(own_moves(call, strategy, price.mesh.shape), EXCHANGES[call.target], strict=True)
    places = (
        i for i, (move, (kernel, _)) in enumerate(moves) if (move, kernel) == (c.collective, name)
    )
    return saved[next(places)] if saved else 0.0


def with_routes(
    problem: Problem, sources: Sequence[Source], price: CollectivePrices, profile: HardwareProfile
) -> Problem:
    """Return a problem with the routes that save time, and the memory that they share.

    Args:
        problem: the priced problem.
        sources: the sources of its ops.
        price: prices of collectives on the mesh.
        profile: the hardware.
    """
    if ROUTE not in profile.kernels:
        return problem
    mesh_shape, numbers = price.mesh.shape, dict[SharedRows, int]()
    routes: dict[tuple[int, int], PeerRoute] = {}
    for n, source in enumerate(sources):
        for s, calls in _dispatch_strategies(source, mesh_shape):
            saved_s = sum(sum(savings(*each, price, profile)) for each in calls)
            if saved_s > profile.launch_overhead_s:
                shared = [rows for each in calls for rows in shared_rows(*each, mesh_shape)]
                regions = {
                    len(problem.regions) + numbers.setdefault(rows, len(numbers)) for rows in shared
                }
                routes[n, s] = PeerRoute(saved_s, tuple(sorted(regions)))
    return replace(
        problem, routes=routes, regions=(*problem.regions, *(rows.num_bytes for rows in numbers))
    )


def why_none(mesh: Mesh, axis: int) -> str:
    """Return why no route is possible along an axis, regardless of its saving; "" if it is
    possible."""
    num_ranks, far = mesh.shape[axis], out_of_reach(mesh, axis)
    if far:
        return far
    return (
        f"the kernels support up to {MOST_RANKS} ranks per axis, not {num_ranks}"
        if num_ranks > MOST_RANKS
        else ""
    )


def why_not(priced: Priced, n: int, s: int, axis: int) -> str:
    """Return why an op sends its rows by all-to-alls.

    Args:
        priced: the priced problem.
        n: index of the op.
        s: index of its strategy.
        axis: the mesh axis along which it sends.

    Returns:
        The reason, or "" if the profile has no figure for routes.
    """
    if ROUTE not in priced.profile.kernels:
        return ""
    offered = (n, s) in priced.problem.routes
    return why_none(priced.moves.price.mesh, axis) or (NO_ROOM if offered else TOO_LITTLE)


def _dispatch_strategies(
    source: Source, mesh_shape: Sequence[int]
) -> Iterator[tuple[int, list[tuple[Call, Strategy]]]]:
    """Yield the index of each strategy of an op that sends rows, with the calls that send them."""
    if source.cluster is None:
        return
    for s, strategy in enumerate(source.cluster.strategies):
        members = zip(source.cluster.first.members, strategy.members, strict=True)
        calls = [
            (member.call, how) for member, how in members if own_moves(member.call, how, mesh_shape)
        ]
        if calls:
            yield s, calls
