"""Small calls of ops whose results are larger than their operands: sizes of results are among their
settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar import ops
from autopar.rules.call import Call, TensorInfo
from autopar.rules.small_calls import Trial
from autopar.rules.trial import run

aten = torch.ops.aten
_LADDER = (6, 12, 8, 10, 4)  # sizes of dims in turn; two divides them
_MARGIN, _LENGTH, _ROWS = 4, 8, 16


def _sizes(shape: Sequence[int]) -> list[int]:
    """A small size for each dim; dims of size 1 keep it."""
    return [
        1 if size == 1 else _LADDER[min(dim, len(_LADDER) - 1)] for dim, size in enumerate(shape)
    ]


def _numbers(shape: Sequence[int]) -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    return torch.randint(-64, 65, tuple(shape), generator=random).double() / 8


def _expand(call: Call) -> list[Trial]:
    source, target = call.inputs[0], call.outputs[0]
    if source.dtype == torch.bool or call.kwargs:
        return []
    small = _sizes(target.shape)
    behind = target.shape[len(target.shape) - len(source.shape) :]
    sizes = small[len(small) - len(source.shape) :]
    read = [
        1 if own != whole else size
        for own, whole, size in zip(source.shape, behind, sizes, strict=True)
    ]
    return _trial(call, [_numbers(read)], (call.args[0], tuple(small)))


def _slice_backward(call: Call) -> list[Trial]:
    grad, shape, dim, start, end, step = call.args
    if step != 1:
        return []
    size = shape[dim]
    first, last = (max(0, min(size, at + size if at < 0 else at)) for at in (start, end))
    lead, length, rest = min(first, _MARGIN), min(last - first, _LENGTH), min(size - last, _MARGIN)
    small = _sizes(shape)
    small[dim] = lead + length + rest
    sliced = [*small[:dim], length, *small[dim + 1 :]] if dim >= 0 else [*small[:-1], length]
    args = (grad, tuple(small), dim, lead, end if end > size else lead + length, step)
    return _trial(call, [_numbers(sliced)], args)


def _select_backward(call: Call) -> list[Trial]:
    grad, shape, dim, index = call.args
    small = _sizes(shape)
    at = dim % len(shape)
    left = [*small[:at], *small[at + 1 :]]
    return _trial(
        call,
        [_numbers(left)],
        (grad, tuple(small), dim, max(-small[at], min(index, small[at] - 1))),
    )


def _embedding_backward(call: Call) -> list[Trial]:
    grad, ids, num_rows, *settings = call.args
    if any(type(value) is int and value >= _ROWS for value in settings):
        return []
    shape = _sizes(call.inputs[0].shape)
    random = torch.Generator().manual_seed(4)
    looked_up = torch.randint(0, _ROWS, shape[:-1], generator=random)
    args = (grad, ids, min(num_rows, _ROWS), *settings)
    return _trial(call, [_numbers(shape), looked_up % args[2]], args)


def _index_put(call: Call) -> list[Trial]:
    """Rows written at one index tensor, which lies where the call has it."""
    indices = call.args[1]
    places = [at for at, index in enumerate(indices) if index is not None]
    index = call.inputs[1]
    if len(places) != 1 or len(call.inputs) != 3 or index.dtype != torch.int64:
        return []
    (at,) = places
    shape = _sizes(call.inputs[0].shape)
    looked_up = [1 if size == 1 else 4 for size in index.shape]
    rows = max(shape[at], math.prod(looked_up))  # each may be written once
    shape[at] = rows
    written = [*shape[:at], *looked_up, *shape[at + 1 :]]
    values = call.inputs[2].shape
    written = [
        1 if values[dim - len(written)] == 1 else size
        for dim, size in enumerate(written)
        if dim >= len(written) - len(values)
    ]
    random = torch.Generator().manual_seed(4)
    ids = torch.randperm(rows, generator=random)[: math.prod(looked_up)].view(looked_up)
    return _trial(call, [_numbers(shape), ids, _numbers(written)], call.args)


def _trial(call: Call, tensors: list[torch.Tensor], args: tuple[Any, ...]) -> list[Trial]:
    result = run(call.target, args, call.kwargs, tensors, (), ())[0]
    infos = tuple(TensorInfo(tuple(x.shape), x.dtype) for x in tensors)
    made = replace(
        call, args=args, inputs=infos, outputs=(TensorInfo(tuple(result.shape), result.dtype),)
    )
    return [(made, tensors)]


SCATTER_SAMPLES: Mapping[Any, Callable[[Call], list[Trial]]] = {
    aten.expand.default: _expand,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    ops.embedding_backward: _embedding_backward,
    aten.index_put.default: _index_put,
}
