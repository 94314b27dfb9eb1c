"""What the pieces of a root-mean-square norm (`autopar.ops.rms`; `autopar.kernels.rows`) read and write, pass by pass, as they stand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from autopar import ops
from autopar.ops.blocks import wide_dtype

Kind = Literal["elementwise", "reduction"]
Pass = tuple[int, Kind]  # bytes, and what is done


def passes(
    target: Callable[..., Any], args: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], *, by_kernels: bool = False
) -> Iterator[Pass]:
    """The passes of one call; arguments as of `autopar.analysis.work.works`."""
    num, dtypes, out = math.prod(inputs[0].shape), [info.dtype for info in inputs], outputs[0].dtype
    pieces = PIECES[target]
    if by_kernels and target in _KERNELS:
        kernel, squared_in, *alike = _KERNELS[target]
        long = {dtypes[i] for i in alike if i < len(dtypes)} | ({out} if target is ops.rms_norm else set())
        taken = len(long) == 1 and wide_dtype(args[squared_in]) == wide_dtype(*long)
        pieces = kernel if taken else pieces  # others are left to the ops
    for each_bytes, kind in pieces(args, dtypes, out):
        yield num * each_bytes, kind


def _square_sum(args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype) -> Iterator[Pass]:
    yield inputs[0].itemsize, "reduction"


def _norm(args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype) -> Iterator[Pass]:
    x, squares, *weight = (dtype.itemsize for dtype in inputs)
    rounded = args[6].itemsize
    yield x + squares, "elementwise"
    if rounded != squares:
        yield squares + rounded, "elementwise"
    product = max(rounded, *weight) if weight else rounded
    if weight:
        yield rounded + product, "elementwise"
    if product != out.itemsize:
        yield product + out.itemsize, "elementwise"


def _product(args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype) -> Iterator[Pass]:
    a, b, wide = inputs[0].itemsize, inputs[1].itemsize, out.itemsize
    if a != wide:
        yield a + wide, "elementwise"
        a = wide
    yield a + b + wide, "elementwise"
    if len(inputs) > 2:  # by a weight, or by what rows are scaled with
        yield 2 * wide, "elementwise"
    yield wide, "reduction"


def _backward(args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype) -> Iterator[Pass]:
    grad, x, wide, _, *weight = (dtype.itemsize for dtype in inputs)
    yield grad + wide, "elementwise"
    if weight:
        yield 2 * wide, "elementwise"
    yield 2 * wide + x, "elementwise"
    if out.itemsize != wide:
        yield wide + out.itemsize, "elementwise"


PIECES: Mapping[Callable[..., Any], Callable[[Sequence[Any], Sequence[torch.dtype], torch.dtype], Iterator[Pass]]] = {
    ops.square_sum: _square_sum, ops.rms_norm: _norm, ops.rms_product: _product, ops.rms_norm_backward: _backward,
    ops.rms_weight_gradient: _product,
}  # fmt: skip
"""Bytes for each element of x."""


def _normed(args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype) -> Iterator[Pass]:
    yield inputs[0].itemsize + out.itemsize, "elementwise"


def _summed(args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype) -> Iterator[Pass]:
    yield 2 * inputs[0].itemsize, "reduction"


def _differentiated(args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype) -> Iterator[Pass]:
    yield 2 * inputs[0].itemsize + out.itemsize, "elementwise"


_KERNELS: Mapping[Callable[..., Any], tuple[Any, ...]] = {
    ops.rms_norm: (_normed, 5, 0, 2), ops.rms_product: (_summed, 3, 0, 1, 2), ops.rms_norm_backward: (_differentiated, 7, 0, 1, 4),
    ops.rms_weight_gradient: (_summed, 5, 0, 1),
}  # fmt: skip
"""The same of what kernels do in one pass; which argument says the dtype that is squared in, which has to be as wide as theirs; and which
operands have to be in one dtype, in which the norm is, too."""
