"""Numerics of the kernels that exchange data between ranks, for `benchmarks.kernels`. Virtual ranks
run in one process on the CPU.

For small integers, which every dtype represents exactly, products must equal the reference bit for
bit. For other numbers the order of sums within a product depends on the vendor's library, so these
are compared with float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from autopar.kernels.fused import (
    combine_all,
    dispatch_all,
    gather_all,
    scatter_all,
    scatter_norm_all,
    shards_of,
)
from autopar.kernels.normed import AddNorm, matmul_reduce_add_rmsnorm_reference
from autopar.kernels.overlapped import all_gather_matmul_reference, matmul_reduce_scatter_reference
from autopar.kernels.peers import VirtualRanks
from autopar.kernels.routed import moe_combine_reference, moe_dispatch_reference

EQUATION = "mk,kn->mn"
ROWS, INNER, COLUMNS = 131, 40, 24  # rows are uneven for all numbers of ranks except 1
NUM_CHUNKS = 2
EPS = 1e-5
TOKENS, WIDTH, CHOICES, PER_RANK = 29, 33, 2, 3
Draw = Callable[[Sequence[int], torch.dtype, int], Tensor]


@dataclass(frozen=True, slots=True)
class Numerics:
    """The results of a call, the same formula in float64, and pairs of results of compiled code and
    the reference that must be equal bit for bit."""

    made: Sequence[Tensor]
    exact: Sequence[Tensor]
    alike: Sequence[tuple[Tensor, Tensor]]

    @staticmethod
    def of(
        made: Sequence[Tensor], reference: Sequence[Tensor], exact: Sequence[Tensor]
    ) -> Numerics:
        """Return the numerics of a call whose reference has the same bits for any operands."""
        return Numerics(made, exact, list(zip(made, reference, strict=True)))


def drawn(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def _signs(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Return a tensor of the values -1, 0 and 1."""
    return torch.randint(-1, 2, tuple(shape), generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )


def gathered(world: int, dtype: torch.dtype) -> Numerics:
    """Return the numerics of all_gather_matmul."""

    def run(draw: Draw) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        x, others = (
            draw((ROWS, INNER), dtype, 0),
            [draw((INNER, COLUMNS), dtype, 1 + rank) for rank in range(world)],
        )
        shards = shards_of(x, 0, world)
        made = gather_all(VirtualRanks(world), EQUATION, shards, others, 0, 0, NUM_CHUNKS)
        exact = all_gather_matmul_reference(
            EQUATION, [s.double() for s in shards], [o.double() for o in others], 0, 0
        )
        return (
            _flat(made),
            _flat(all_gather_matmul_reference(EQUATION, shards, others, 0, 0)),
            _flat(exact),
        )

    return _compare_with_references(run)


def scattered(world: int, dtype: torch.dtype) -> Numerics:
    """Return the numerics of matmul_reduce_scatter."""

    def run(draw: Draw) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        pairs = [
            (draw((ROWS, INNER), dtype, 2 * rank), draw((INNER, COLUMNS), dtype, 2 * rank + 1))
            for rank in range(world)
        ]
        made = scatter_all(VirtualRanks(world), EQUATION, pairs, 0, NUM_CHUNKS)
        exact = matmul_reduce_scatter_reference(
            EQUATION, [(a.double(), b.double()) for a, b in pairs], 0
        )
        return made, matmul_reduce_scatter_reference(EQUATION, pairs, 0), exact

    return _compare_with_references(run)


def scattered_and_normed(world: int, dtype: torch.dtype) -> Numerics:
    """Return the numerics of matmul_reduce_add_rmsnorm, rounded before the weight."""

    def run(draw: Draw) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        pairs = [
            (draw((ROWS, INNER), dtype, 2 * rank), draw((INNER, COLUMNS), dtype, 2 * rank + 1))
            for rank in range(world)
        ]
        residuals, weights = (
            shards_of(draw((ROWS, COLUMNS), dtype, 98), 0, world),
            [draw((COLUMNS,), dtype, 99)] * world,
        )
        norms = [
            AddNorm(residual, weight, EPS, rounded=True)
            for residual, weight in zip(residuals, weights, strict=True)
        ]
        made = scatter_norm_all(VirtualRanks(world), EQUATION, pairs, norms, 0, NUM_CHUNKS)
        wide = (
            [(a.double(), b.double()) for a, b in pairs],
            [x.double() for x in residuals],
            [x.double() for x in weights],
        )
        exact = matmul_reduce_add_rmsnorm_reference(EQUATION, *wide, 0, EPS, True)
        return (
            _flat(made),
            _flat(
                matmul_reduce_add_rmsnorm_reference(
                    EQUATION, pairs, residuals, weights, 0, EPS, True
                )
            ),
            _flat(exact),
        )

    return _compare_with_references(run)


def dispatched(world: int, dtype: torch.dtype) -> Numerics:
    """Return the numerics of moe_dispatch. Tokens are only moved."""
    xs, experts, _ = _routes(world, dtype)
    most, num_experts = TOKENS * CHOICES, world * PER_RANK
    found = dispatch_all(VirtualRanks(world), xs, experts, num_experts, most)
    made = _flat([(job.rows, job.table, job.position) for job in found])
    exact = moe_dispatch_reference([x.double() for x in xs], experts, num_experts, most)
    return Numerics.of(
        made, _flat(moe_dispatch_reference(xs, experts, num_experts, most)), _flat(exact)
    )


def combined(world: int, dtype: torch.dtype) -> Numerics:
    """Return the numerics of moe_combine for dispatched rows."""
    xs, experts, weights = _routes(world, dtype)
    parts = moe_dispatch_reference(xs, experts, world * PER_RANK, TOKENS * CHOICES)
    rows, table, positions = [part[0] for part in parts], parts[0][1], [part[2] for part in parts]
    made = [job.y for job in combine_all(VirtualRanks(world), parts, weights)]
    reference = [y for y, _ in moe_combine_reference(rows, table, positions, weights)]
    exact = [
        y
        for y, _ in moe_combine_reference(
            [r.double() for r in rows], table, positions, [w.double() for w in weights]
        )
    ]
    return Numerics.of(made, reference, exact)


def _routes(world: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the tokens of every rank, the experts that each token picks, and their weights in
    fp32."""
    generator = torch.Generator().manual_seed(world)
    xs = [drawn((TOKENS, WIDTH), dtype, rank) for rank in range(world)]
    experts = [
        torch.randint(0, world * PER_RANK, (TOKENS, CHOICES), generator=generator)
        for _ in range(world)
    ]
    return xs, experts, [torch.rand(TOKENS, CHOICES, generator=generator) for _ in range(world)]


def _flat(results: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return list(chain.from_iterable(results))


def _compare_with_references(
    run: Callable[[Draw], tuple[list[Tensor], list[Tensor], list[Tensor]]],
) -> Numerics:
    """Compare random operands with float64, and integers with the reference."""
    made, _, exact = run(drawn)
    whole, reference, _ = run(_signs)
    return Numerics(made, exact, list(zip(whole, reference, strict=True)))
