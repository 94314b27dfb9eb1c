"""Prices of the program: the cost of each piece of work, such that the objective, which is a sum,
is a lower bound of the step.

With s the profile's `overlap_slowdown` and λ a share per phase (`autopar.core.streams`), a second

    of compute, or of a slice, which is local        costs λ
    of early communication                           costs λ·s + (1 − λ); if it may share a bucket,
                                                     its share of one counts
    of all else, with collectives inside ops         costs 1

The savings of a kernel, for a product and a critical collective (`autopar.cost.kernel_offers`), or
of a route (`autopar.cost.expert_routes`), are subtracted from compute.

With λ = 1 this is the step itself, as long as compute can hide early communication. Other λ serve
to choose trees of collectives if it cannot (`autopar.solve.evaluate`). Communication counts as
early here if it has slack (`autopar.solve.tensor_moves`) in every solution, as the problem shows
(`autopar.core.problem.is_early`). If its slack depends on the solution, it counts as critical.
Copies to and from the hosts always have slack.

The share of a bucket is the least time of a bucket per byte
(`autopar.core.collective.share_of_bucket`), whichever collectives share it. So the sum is below the
step of the emitted program, whose buckets are chosen later; the simulation of the program gives the
difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.core.collective import HOST_KINDS
from autopar.core.layout_graph import Arc
from autopar.core.problem import Phase, Problem, is_early
from autopar.core.streams import COMPUTE_BOUND, Load, OverlapWeights, work

# share of its time that is added to the price of an arc: the faster of equally cheap trees wins
_TIE = 1e-9


def op_load(problem: Problem, n: int, strategy: int, *, again: bool = False) -> Load:
    """Compute the load of all instances of an op.

    Nothing overlaps with the time of parameters and inputs, nor with an op's own collectives.

    Args:
        problem: that has the op.
        n: index of the op.
        strategy: index of its strategy.
        again: whether the op is recomputed in backward.
    """
    op, phase = problem.ops[n], "backward" if again else problem.ops[n].phase
    chosen = op.strategies[strategy]
    if op.kind != "compute" or not chosen.communication_s:
        return work(phase, op.count * chosen.time_s, compute=op.kind == "compute")
    computing = work(phase, op.count * (chosen.time_s - chosen.communication_s), compute=True)
    return computing + work(phase, op.count * chosen.communication_s, compute=False)


def saved_load(problem: Problem, v: int, *, late: bool, saved_s: float) -> Load:
    """Return the savings of kernels with a collective of all instances of a variant, as a negative
    load."""
    variant = problem.variants[v]
    phase: Phase = "backward" if late else problem.values[variant.value].phase
    return work(phase, variant.count * saved_s, compute=True).scale(-1.0)


def routed_load(problem: Problem, n: int, saved_s: float, *, again: bool) -> Load:
    """Return the savings of a route for all instances of an op, as a negative load.

    Args:
        problem: the problem.
        n: index of the op.
        saved_s: seconds saved per instance.
        again: whether the op is recomputed in backward.
    """
    return work(
        "backward" if again else problem.ops[n].phase, problem.ops[n].count * saved_s, compute=True
    ).scale(-1.0)


def arc_loads(problem: Problem, v: int, *, late: bool, count: float = 1.0) -> Callable[[Arc], Load]:
    """Return a function that computes the load of `count` instances of an arc of a variant."""
    phase: Phase = "backward" if late else problem.values[problem.variants[v].value].phase
    early = is_early(problem, v, late=late)
    known: dict[tuple[float, str], Load] = {}  # arcs of a graph take few different times

    def load(arc: Arc) -> Load:
        """Return the load of `count` instances of an arc."""
        key = time_s, kind = arc.seconds(shares=early), arc.collective.kind
        if key not in known:
            local = kind == "slice"
            known[key] = work(
                phase,
                count * time_s,
                compute=local,
                early=(early or kind in HOST_KINDS) and not local,
            )
        return known[key]

    return load


def away_load(time_s: float, count: float = 1.0) -> Load:
    """Return the load of storing `count` instances of a tensor on the hosts in forward and fetching
    them in backward, where each instance takes `time_s` seconds."""
    return work("forward", count * time_s, compute=False, early=True) + work(
        "backward", count * time_s, compute=False, early=True
    )


def tree_costs(
    problem: Problem,
    v: int,
    *,
    late: bool,
    saved_s: Mapping[tuple[int, int], float],
    balance: OverlapWeights = COMPUTE_BOUND,
) -> Callable[[Arc], float]:
    """Return a function that prices arcs at a balance. Equal prices are ordered by time.

    Args:
        problem: the problem.
        v: index of the variant.
        late: whether backward reads a forward value.
        saved_s: (source, target) of an arc → the savings of a kernel there.
        balance: overlap weights.
    """
    load, slowdown, early = (
        arc_loads(problem, v, late=late),
        problem.overlap_slowdown,
        is_early(problem, v, late=late),
    )
    saved_share = balance[
        1 if late or problem.values[problem.variants[v].value].phase == "backward" else 0
    ]
    if slowdown >= 1.0 and not saved_s:
        return lambda arc: arc.seconds(shares=early)
    known: dict[tuple[float, str], float] = {}  # as above

    def cost(arc: Arc) -> float:
        """Return the price of an arc in seconds, with a small share of its time to break ties."""
        key = time_s, _ = arc.seconds(shares=early), arc.collective.kind
        if key not in known:
            known[key] = load(arc).priced_s(slowdown, balance)
        left_s = (
            known[key] - saved_share * saved_s.get((arc.src, arc.dst), 0.0)
            if saved_s
            else known[key]
        )
        assert left_s >= 0.0, (
            "a kernel saves at most the time of its collective, and runs no early collective"
        )
        return left_s + _TIE * time_s

    return cost
