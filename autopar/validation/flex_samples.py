"""Small calls of attention whose scores go through functions.

Heads, samples and queries are few. A dim of a captured tensor that is indexed by one of their
coordinates has as many elements; every other dim stays as it is, since numbers in the function may
say how long it is. A function is tried as it is, and with its large whole numbers made small, so
that a window or a block of thousands of places ends within a few.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar import ops
from autopar.ops.score_functions import COORDINATES, find_reading
from autopar.rules.call import Call, Operand, TensorInfo, argument, replace_arguments
from autopar.rules.small_calls import Trial

_BATCH, _HEADS, _QUERIES, _KEYS, _WIDTH = 4, 4, 12, 10, 4
_LARGE = re.compile(r"(?<=[\[,])\d{2,}(?=[\],])")
_MANY = 3  # captured whole numbers are below it, or below the smallest dim that they may index


def _numbers(info: TensorInfo, seed: int, bound: int = _MANY) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    if info.dtype == torch.bool:
        return torch.randint(0, 4, info.shape, generator=random) > 0
    if info.dtype.is_floating_point:
        return torch.randint(-16, 17, info.shape, generator=random).double() / 8
    return torch.randint(0, bound, info.shape, generator=random).to(info.dtype)


def _sizes(call: Call) -> tuple[dict[str, int], int]:
    """Return the small call's numbers of samples, query heads, queries and keys; and of key
    heads."""
    (batch, heads, queries, _), (_, shared, keys, _) = (info.shape for info in call.inputs[:2])
    few = 1 if shared == 1 else 2
    num = min(heads, _HEADS) if heads == shared else few * (heads // shared)
    b, s = 1 if batch == 1 else _BATCH, 1 if queries == 1 else _QUERIES
    t = s if keys == queries else _KEYS
    return dict(zip(COORDINATES, (b, num, s, t), strict=True)), num if heads == shared else few


def _captured_tensors(call: Call, sizes: Mapping[str, int]) -> list[torch.Tensor]:
    infos = [call.inputs[each.index] for each in argument(call, "captured")]
    texts = argument(call, "score"), argument(call, "mask")
    names = find_reading(texts, tuple(len(info.shape) for info in infos)).indexed
    small = list[TensorInfo]()
    for number, info in enumerate(infos):
        counted = dict(zip(COORDINATES, (*call.inputs[0].shape[:3], 0), strict=True))
        indexed = names.get(number, (None,) * len(info.shape))
        shape = tuple(
            sizes[name] if name and counted[name] == size else size
            for name, size in zip(indexed, info.shape, strict=True)
        )
        small.append(TensorInfo(shape, info.dtype))
    bound = min([_MANY, *(size for info in small for size in info.shape if size > 1)])
    return [_numbers(info, 10 + number, bound) for number, info in enumerate(small)]


def _tensors(call: Call) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Queries, keys and values; and what the functions capture."""
    sizes, shared = _sizes(call)
    own_keys = 1 if call.inputs[1].shape[0] == 1 else sizes["b"]
    wide = _WIDTH if call.inputs[2].shape[3] == call.inputs[0].shape[3] else 2 * _WIDTH
    shapes = (
        (sizes["b"], sizes["h"], sizes["q"], _WIDTH),
        (own_keys, shared, sizes["k"], _WIDTH),
        (own_keys, shared, sizes["k"], wide),
    )
    made = [_numbers(TensorInfo(shape, torch.float64), seed) for seed, shape in enumerate(shapes)]
    return made, _captured_tensors(call, sizes)


def _functions(call: Call) -> Iterator[Call]:
    """The call; and with the large whole numbers of its functions made small."""
    yield call
    texts = {name: argument(call, name) for name in ("score", "mask")}
    short = {
        name: _LARGE.sub(lambda n: str(2 + int(n[0]) % 4), text) for name, text in texts.items()
    }
    if short != texts:
        args, kwargs = replace_arguments(call, short)
        yield replace(call, args=args, kwargs=kwargs)


def _forward(call: Call) -> list[Trial]:
    return [trial for each in _functions(call) for trial in _forward_of(each)]


def _forward_of(call: Call) -> list[Trial]:
    q_k_v, captured = _tensors(call)
    settings = _settings(call, 4)
    try:
        results = ops.flex_attention(*q_k_v, captured, *settings)
    except (IndexError, RuntimeError):  # numbers of a function may say how long a tensor is
        return []
    return [_trial(call, [*q_k_v, *captured], results)]


def _backward(call: Call) -> list[Trial]:
    return [trial for each in _functions(call) for trial in _backward_of(each)]


def _backward_of(call: Call) -> list[Trial]:
    q_k_v, captured = _tensors(call)
    settings, wanted = _settings(call, 9), list(argument(call, "wanted"))
    try:
        out, lse = ops.flex_attention(*q_k_v, captured, *settings)
    except (IndexError, RuntimeError):
        return []
    grad = _numbers(TensorInfo(tuple(out.shape), torch.float64), 3)
    given = isinstance(argument(call, "grad_lse"), Operand)
    of_sums = [_numbers(TensorInfo(tuple(lse.shape), torch.float64), 4)] if given else []
    tensors = [*q_k_v, out, lse, grad, *of_sums, *captured]
    rest = of_sums or [None]
    results = ops.flex_attention_backward(
        *q_k_v, out, lse, grad, *rest, captured, wanted, *settings
    )
    return [_trial(call, tensors, results)]


def _settings(call: Call, first: int) -> Sequence[Any]:
    """Return the arguments after the captured tensors, in torch's types."""
    return [list(x) if isinstance(x, tuple) else x for x in call.args[first:]]


def _trial(call: Call, tensors: list[torch.Tensor], results: Sequence[torch.Tensor]) -> Trial:
    infos = [
        tuple(TensorInfo(tuple(x.shape), x.dtype) for x in each) for each in (tensors, results)
    ]
    return replace(call, inputs=infos[0], outputs=infos[1]), tensors


FLEX_SAMPLES: Mapping[Any, Callable[[Call], list[Trial]]] = {
    ops.flex_attention: _forward,
    ops.flex_attention_backward: _backward,
}
