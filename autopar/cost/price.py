"""Trace, classes, mesh and profile → Problem: every strategy and every collective priced in seconds and bytes.

Gradients of 16-bit parameters are reduced over ranks in fp32, and priced so, and what is cast to a wider parameter's gradient is not
reduced before; other partial sums in their own dtype.
The map between the problem's ops and the trace stays in `Priced`, so that answers come back as node keys and layouts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from autopar.capture.trace import Trace
from autopar.cost.builder import Builder
from autopar.cost.held import StepMoves
from autopar.cost.hosts import host_budget
from autopar.cost.kernels import with_kernels
from autopar.cost.priced import Crossing, Priced
from autopar.cost.routes import with_routes
from autopar.cost.times import CollectivePrices
from autopar.cost.uncast import left_uncast
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.problem import Problem
from autopar.strategies import ClusterClass, Forced


def price(
    trace: Trace,
    classes: Sequence[ClusterClass],
    mesh: Mesh,
    profile: HardwareProfile,
    *,
    budget_bytes: int,
    optimizer: str = "adamw",
    forced: Forced | None = None,
    crossing: Crossing | None = None,
    num_microbatches: int = 1,
    num_in_flight: int = 1,
    exposed: Collection[str] = (),
    all_ways: bool = False,
) -> Priced:
    """Price everything: see the module docstring.

    Args:
        crossing: how tensors cross between stages, for the trace of a stage.
        num_microbatches: how many steps of the trace one optimizer step takes; the optimizer's time is shared among them.
        num_in_flight: how many microbatches a stage holds the kept values of.
        all_ways: of holding a parameter also those that take longer and more memory than others: a plan for other hardware may have
            them.
        exposed: nodes whose results may cross between stages, in any layout without partial sums: their layout graphs hold all.
    """
    forced = forced or Forced.nothing()
    host_budget_bytes = host_budget(forced, profile)
    accumulates = num_microbatches > 1 or forced.named.holds
    moves = StepMoves(mesh.shape, CollectivePrices(mesh, profile), num_microbatches)
    classes, uncast = left_uncast(classes, trace) if accumulates else (classes, {})
    builder = Builder(trace, mesh, profile, optimizer, forced, crossing or Crossing(), moves, accumulates, exposed, uncast, all_ways)
    builder.parameters()
    builder.placeholders()
    builder.clusters(classes)
    builder.outputs()
    builder.settle_sums()
    builder.settle_recomputation(classes)
    values, variants, refs = builder.values()
    results: dict[int, list[int]] = {}
    for index, value in enumerate(values):
        results.setdefault(value.op, []).append(index)
    ops = tuple(replace(op, results=tuple(results.get(i, ()))) for i, op in enumerate(builder.ops))
    problem = Problem(
        ops, tuple(values), tuple(variants), budget_bytes, (), num_in_flight, accumulates, profile.overlap_slowdown,
        host_budget_bytes=host_budget_bytes,
    )  # fmt: skip
    problem = with_kernels(trace, problem, builder.sources, mesh, profile)
    problem = with_routes(problem, builder.sources, moves.price, profile)
    return Priced(problem, tuple(builder.sources), tuple(refs), optimizer, moves, profile, forced.starts, forced.named.notes)
