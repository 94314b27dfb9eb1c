"""What the pieces of a root-mean-square norm (`autopar.ops.rms`; `autopar.kernels.rows`) read and write, pass by pass, as they stand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
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
    pieces, kernel = PIECES[target], _KERNELS.get(target) if by_kernels else None
    if kernel is not None:
        parameters = _parameters(target)
        given = dict(zip(parameters, args, strict=False))
        operands = [name for name, arg in given.items() if parameters[name] and arg is not None]
        long = {info.dtype for name, info in zip(operands, inputs, strict=True) if name in kernel.alike}
        long |= {out} if target is ops.rms_norm else set()
        taken = len(long) == 1 and wide_dtype(given["dtype"]) == wide_dtype(*long)
        pieces = kernel.pieces if taken else pieces  # others are left to the ops
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


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What a kernel does in one pass, where the operands named `alike` are in one dtype, as wide as that which is squared in."""

    pieces: Callable[[Sequence[Any], Sequence[torch.dtype], torch.dtype], Iterator[Pass]]
    alike: frozenset[str]


_KERNELS: Mapping[Callable[..., Any], _Kernel] = {
    ops.rms_norm: _Kernel(_normed, frozenset({"x", "weight"})),
    ops.rms_product: _Kernel(_summed, frozenset({"grad", "x", "weight"})),
    ops.rms_norm_backward: _Kernel(_differentiated, frozenset({"grad", "x", "weight"})),
    ops.rms_weight_gradient: _Kernel(_summed, frozenset({"grad", "x"})),
}


@cache
def _parameters(target: Callable[..., Any]) -> Mapping[str, bool]:
    """An op's parameters by name, and whether each is an operand."""
    return {name: "Tensor" in parameter.annotation for name, parameter in signature(target).parameters.items()}
