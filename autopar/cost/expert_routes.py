"""Routes on offer to experts whose tokens are dispatched (`autopar.rules.dispatch`).

Along axes whose ranks reach each other's memory, rows need no all-to-alls: in what plans call
``moe_dispatch`` they are written from where tokens lie to where experts read them, in
``moe_combine`` what these make to where it is added up (`autopar_csrc/expert_rows.cu`, by
`autopar.kernels.dispatched`). That saves the pass over the rows that brings them together before an
all-to-all, and the one that puts results in order before another. With b bytes of rows, t seconds
of their all-to-all and f the share of its bandwidth that the profile says is reached, each saves

    2·b / memory bandwidth − t·(1/f − 1)

Counts and gates have no such pass. On offer is a route where all that a node sends saves more than
a launch takes; what ranks share for it rests, once for all nodes that use equal regions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.analysis.fusable import SharedRows, shared_rows
from autopar.analysis.work import Work, computes_in
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Strategy
from autopar.core.mesh import Mesh
from autopar.core.problem import Problem, Route
from autopar.cost.kernels import NO_ROOM, out_of_reach
from autopar.cost.op_times import CollectivePrices, compute_time
from autopar.cost.priced import Priced, Source
from autopar.kernels.routed import MOST_RANKS
from autopar.plans import Communication
from autopar.rules import EXCHANGES, Call, own_moves

ROUTE = "moe_route"
"""The figure of profiles: share of an all-to-all's bandwidth."""
TOO_LITTLE = "between peers its rows would save less than a launch takes"


def savings(
    call: Call, strategy: Strategy, price: CollectivePrices, profile: HardwareProfile
) -> tuple[float, ...]:
    """Seconds that a route saves of each of a node's own collectives; nothing where it has none, no
    profile says what routes reach, ranks do not reach each other's memory, or the kernels know
    fewer of them."""
    reached, moves = profile.kernels.get(ROUTE, 0.0), own_moves(call, strategy, price.mesh.shape)
    if not reached or not moves or why_none(price.mesh, moves[0].axis):
        return ()
    dtype, found = computes_in(call.inputs), []
    for move, (_, has_pass) in zip(moves, EXCHANGES[call.target], strict=True):
        pass_s = (
            compute_time(Work(0, 2 * move.bytes, "indexing"), dtype, profile) if has_pass else 0.0
        )
        found.append(pass_s - price(move) * (1.0 / reached - 1.0))
    return tuple(found)


def saved_of(
    call: Call,
    strategy: Strategy,
    price: CollectivePrices,
    profile: HardwareProfile,
    c: Communication,
) -> float:
    """What a plan's route saves of one of a node's own collectives; nothing where no profile
    says what routes reach."""
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
    """The problem with its routes, and what they share."""
    if ROUTE not in profile.kernels:
        return problem
    mesh_shape, numbers = price.mesh.shape, dict[SharedRows, int]()
    routes: dict[tuple[int, int], Route] = {}
    for n, source in enumerate(sources):
        for s, calls in _dispatch_strategies(source, mesh_shape):
            saved_s = sum(sum(savings(*each, price, profile)) for each in calls)
            if saved_s > profile.launch_overhead_s:
                shared = [rows for each in calls for rows in shared_rows(*each, mesh_shape)]
                regions = {
                    len(problem.regions) + numbers.setdefault(rows, len(numbers)) for rows in shared
                }
                routes[n, s] = Route(saved_s, tuple(sorted(regions)))
    return replace(
        problem, routes=routes, regions=(*problem.regions, *(rows.num_bytes for rows in numbers))
    )


def why_none(mesh: Mesh, axis: int) -> str:
    """Why no rows go between peers along an axis, whatever that would save; nothing where they
    may."""
    num_ranks, far = mesh.shape[axis], out_of_reach(mesh, axis)
    if far:
        return far
    return (
        f"the kernels know {MOST_RANKS} ranks of an axis, not {num_ranks}"
        if num_ranks > MOST_RANKS
        else ""
    )


def why_not(priced: Priced, n: int, s: int, axis: int) -> str:
    """Why what an op sends goes by all-to-alls; nothing where the profile has no figure for
    another way."""
    if ROUTE not in priced.profile.kernels:
        return ""
    offered = (n, s) in priced.problem.routes
    return why_none(priced.moves.price.mesh, axis) or (NO_ROOM if offered else TOO_LITTLE)


def _dispatch_strategies(
    source: Source, mesh_shape: Sequence[int]
) -> Iterator[tuple[int, list[tuple[Call, Strategy]]]]:
    """The strategies of an op that send rows, and what sends them."""
    for s, strategy in enumerate(source.cluster.strategies if source.cluster is not None else ()):
        members = zip(source.cluster.first.members, strategy.members, strict=True)  # type: ignore[union-attr]
        calls = [
            (member.call, how) for member, how in members if own_moves(member.call, how, mesh_shape)
        ]
        if calls:
            yield s, calls
