"""Small calls of ops whose operands must fit each other, so that arbitrary numbers make no valid
call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar import ops
from autopar.rules.call import Call, TensorInfo
from autopar.rules.small_calls import Trial
from autopar.validation.flex_samples import FLEX_SAMPLES
from autopar.validation.scatter_samples import SCATTER_SAMPLES
from autopar.validation.window_samples import WINDOW_SAMPLES

_BATCH, _SHARED, _QUERIES, _KEYS, _WIDTH = 4, 2, 8, 12, 4


def _numbers(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return (torch.randint(-16, 17, tuple(shape), generator=random) / 8).to(dtype)


def _attention(call: Call, first: int) -> list[Trial]:
    """Return a small attention call, with the large call's ratio of query heads to key and value
    heads.

    Args:
        call: the large call. first: the number of the operand that is the query.
    """
    b, h, g, s, t = _sizes(call.inputs[first].shape, call.inputs[first + 1].shape)
    width, value_width = (call.inputs[first + n].shape[3] for n in (0, 2))
    v = _WIDTH if value_width == width else 2 * _WIDTH
    shapes = (b, h, s, _WIDTH), (b, g, t, _WIDTH), (b, g, t, v)
    q_k_v = [_numbers(shape, seed) for seed, shape in enumerate(shapes)]
    mask_info = call.inputs[-1] if len(call.inputs) in (4, 7) else None
    mask = None if mask_info is None else _mask(mask_info, (b, h, s, t))
    causal, scale = call.args[4 + 3 * (first > 0)], call.args[5 + 3 * (first > 0)]
    if not isinstance(causal, bool) or not isinstance(scale, float):
        return []
    out, lse = ops.attention(*q_k_v, mask, causal, scale)  # type: ignore[call-arg]
    if first:
        tensors = [_numbers(out.shape, 3), *q_k_v, out, lse, *([] if mask is None else [mask])]
        results: tuple[torch.Tensor, ...] = ops.attention_backward(  # type: ignore[call-arg]
            *tensors[:6], mask, causal, scale
        )
    else:
        tensors, results = [*q_k_v, *([] if mask is None else [mask])], (out, lse)
    return [(replace(call, inputs=_infos(tensors), outputs=_infos(results)), tensors)]


def _sizes(query: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int, int]:
    """Return small numbers of samples, of heads of queries and of keys, of queries and of keys.

    Args:
        query, key: shapes [b, h, s, d] and [b, g, t, d] of the large call.
    """
    (batch, heads, queries, _), (_, shared, keys, _) = query, key
    ratio = heads // shared
    s = _QUERIES if queries > 1 else 1
    few = 4 if ratio == 1 else _SHARED
    g = few if shared > 1 else 1
    return _BATCH if batch > 1 else 1, g * ratio, g, s, s if keys == queries else _KEYS


def _mask(info: TensorInfo, full: Sequence[int]) -> torch.Tensor:
    """Return a mask with at least one visible key per row."""
    shape = [1 if size == 1 else full[dim - len(info.shape)] for dim, size in enumerate(info.shape)]
    numbers = _numbers(shape, 7)
    if info.dtype == torch.bool:
        seen = numbers > 0
        seen[..., :1] = True
        return seen
    return numbers


def _infos(tensors: Sequence[Any]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(tuple(x.shape), x.dtype) for x in tensors)


SAMPLES: Mapping[Any, Callable[[Call], list[Trial]]] = {
    ops.attention: lambda call: _attention(call, 0),
    ops.attention_backward: lambda call: _attention(call, 1),
    **FLEX_SAMPLES,
    **SCATTER_SAMPLES,
    **WINDOW_SAMPLES,
}
