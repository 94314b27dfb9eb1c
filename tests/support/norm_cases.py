"""Operands for products whose scattered sums are added to a residual and normalized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from overlap_cases import whole_numbers
from torch import Tensor

from autopar.kernels.chunked import result_shape
from autopar.kernels.fused import shards_of
from autopar.kernels.normed import AddNorm

EPS = 1e-5
# Equation, shapes of both operands, dim of the result. No dim is divisible by all world sizes, and
# one has fewer rows than the largest world has ranks.
NORMED = (
    ("mk,kn->mn", (11, 3), (3, 40), 0),
    ("mk,kn->mn", (16, 3), (3, 13), 0),
    ("bsk,nk->bsn", (2, 11, 3), (9, 3), 1),
    ("bmk,bkn->bmn", (7, 2, 3), (7, 3, 8), 0),
)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Factors, residual and weight by rank."""

    pairs: list[tuple[Tensor, Tensor]]
    residuals: list[Tensor]
    weights: list[Tensor]

    def moved(self, device: str) -> Ranks:
        pairs = [(a.to(device), b.to(device)) for a, b in self.pairs]
        return Ranks(
            pairs, [x.to(device) for x in self.residuals], [x.to(device) for x in self.weights]
        )

    def norms(self, *, rounded: bool) -> list[AddNorm]:
        return [
            AddNorm(residual, weight, EPS, rounded)
            for residual, weight in zip(self.residuals, self.weights, strict=True)
        ]

    def of(self, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return *self.pairs[rank], self.residuals[rank], self.weights[rank]


def ranks_of(
    equation: str,
    left: Sequence[int],
    right: Sequence[int],
    dim: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Ranks:
    """Return operands of all ranks. Factors are whole numbers, so that products are exact in all
    dtypes. Residuals and weights are not."""
    pairs = [
        (whole_numbers(left, seed + 2 * r, dtype), whole_numbers(right, seed + 2 * r + 1, dtype))
        for r in range(size)
    ]
    return _beside(equation, pairs, dim, dtype, seed)


def scaled_ranks(shape: tuple[int, int], size: int, dtype: torch.dtype) -> Ranks:
    """Return operands of all ranks. The second factor of each rank is the identity and the first
    has its own magnitude, so that results differ only if the order of the sum does."""
    generator = torch.Generator().manual_seed(3)
    values = [
        (torch.randn(shape, generator=generator) * (4096.0 if rank == 0 else 2.0**-10)).to(dtype)
        for rank in range(size)
    ]
    values[2:3] = [-values[0]] * len(
        values[2:3]
    )  # rank 1 is rounded away between the two, unless they are added first
    return _beside(
        "mk,kn->mn", [(value, torch.eye(shape[1], dtype=dtype)) for value in values], 0, dtype, 0
    )


def _beside(
    equation: str, pairs: list[tuple[Tensor, Tensor]], dim: int, dtype: torch.dtype, seed: int
) -> Ranks:
    generator, shape = torch.Generator().manual_seed(seed), result_shape(equation, *pairs[0])
    residual = torch.randn(shape, generator=generator).to(dtype)
    weights = [torch.randn(shape[-1], generator=generator).to(dtype) for _ in pairs]
    return Ranks(pairs, shards_of(residual, dim, len(pairs)), weights)


def same(actual: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether the results of all ranks are bitwise equal."""
    pairs = [
        (a, b)
        for results, references in zip(actual, expected, strict=True)
        for a, b in zip(results, references, strict=True)
    ]
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
