"""What the pieces of a root-mean-square norm (`autopar.ops.rms`) read and write, pass by pass, as their code stands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from autopar import ops

Kind = Literal["elementwise", "reduction"]
Pass = tuple[int, Kind]  # bytes, and what is done


def passes(target: Callable[..., Any], args: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Iterator[Pass]:
    """The passes of one call; arguments as of `autopar.analysis.work.work`."""
    num = math.prod(inputs[0].shape)
    for each_bytes, kind in PIECES[target](args, [info.dtype for info in inputs], outputs[0].dtype):
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
