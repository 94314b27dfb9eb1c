"""Small calls of ops whose operands must be consistent with each other, so that arbitrary numbers
do not form a valid call."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar import ops
from autopar.ops.score_functions import COORDINATES, find_reading
from autopar.ops.windows import per_dim
from autopar.rules.call import Call, Operand, TensorInfo, argument, replace_arguments
from autopar.rules.small_calls import Trial
from autopar.rules.trial import run

aten = torch.ops.aten

# --------------------------------------------------------------------------------------------------
# Small calls of convolutions and poolings: few samples and channels, and spatial dims into which
# windows fit as they do in the large call.


_WINDOW_BATCH, _CHANNELS, _STEPS, _FEW_STEPS, _WIDE = 4, 4, 12, 6, 4


def numbers(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return multiples of 1/8 of both signs, equal for equal seeds. Two values in a window are
    rarely equal."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-2048, 2049, tuple(shape), generator=random).double() / 8


def _space(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return small spatial sizes with as many strides as two and three ranks can share. A size that
    is already smaller is kept."""
    steps = [_STEPS if stride < _WIDE else _FEW_STEPS for stride in strides]
    return tuple(
        min(size, stride * n) if size % stride == 0 else size
        for size, stride, n in zip(sizes, strides, steps, strict=True)
    )


def _channels(groups: int, channels: int, made: int) -> tuple[int, int, int]:
    """Return small numbers of groups, of input channels and of output channels. Groups of several
    channels keep their numbers."""
    if groups == 1:
        return 1, min(channels, _CHANNELS), min(made, _CHANNELS + 2)
    if groups == channels:
        return _CHANNELS, _CHANNELS, _CHANNELS * (made // channels)
    return groups, channels, made


def _convolution(call: Call, *, backward: bool) -> list[Trial]:
    x, weight = (call.inputs[argument(call, name).index].shape for name in ("input", "weight"))
    transposed, groups = argument(call, "transposed"), argument(call, "groups")
    stride = per_dim(argument(call, "stride"), len(x) - 2)
    channels = weight[1] * groups if transposed else weight[0]
    few, c, o = _channels(groups, x[1], channels)
    space = _space(x[2:], (1,) * len(stride) if transposed else stride)
    small = numbers((min(x[0], _WINDOW_BATCH), c, *space), 1)
    w = numbers((c, o // few, *weight[2:]) if transposed else (o, c // few, *weight[2:]), 2)
    names = ("stride", "padding", "dilation", "transposed", "output_padding")
    settings = [argument(call, name) for name in names]
    has_bias = not backward and isinstance(argument(call, "bias"), Operand)
    bias = numbers((o,), 3) if has_bias else None
    made_of = aten.convolution.default(small, w, bias, *settings, few)
    if not backward:
        operands = [small, w] if bias is None else [small, w, bias]
        return _window_trial(call, operands, [made_of], {"groups": few})
    grad, mask = numbers(made_of.shape, 4), argument(call, "output_mask")
    sizes = None if argument(call, "bias_sizes") is None else (o,)
    results = aten.convolution_backward.default(grad, small, w, sizes, *settings, few, mask)
    return _window_trial(call, [grad, small, w], results, {"groups": few, "bias_sizes": sizes})


def _pool(call: Call, num: int) -> list[Trial]:
    """Return small calls of a pooling over the last `num` dims, or of its backward."""
    shape = call.inputs[argument(call, "self").index].shape
    kernel = argument(call, "kernel_size")
    stride = per_dim(argument(call, "stride", ()) or kernel, num)
    lead = tuple(min(size, _CHANNELS) for size in shape[:-num])
    x = numbers((*lead, *_space(shape[-num:], stride)), 5)
    name = call.target.__name__.split(".")[0]
    if not name.endswith("_backward"):
        results = call.target(x, *_window_settings(call, 1))
        return _window_trial(
            call, [x], list(results) if isinstance(results, tuple) else [results], {}
        )
    forward = getattr(aten, name.removesuffix("_backward")).default
    settings = [argument(call, each_name) for each_name in _FORWARD[name]]
    result = forward(x, *settings)
    first, *indices = result if isinstance(result, tuple) else (result,)
    operands = [numbers(first.shape, 6), x, *indices]
    results = call.target(*(_fill_operands(a, operands) for a in call.args))
    return _window_trial(call, operands, [results], {})


_FORWARD: Mapping[str, tuple[str, ...]] = {
    **{
        f"max_pool{n}d_with_indices_backward": (
            "kernel_size",
            "stride",
            "padding",
            "dilation",
            "ceil_mode",
        )
        for n in (2, 3)
    },
    **{
        f"avg_pool{n}d_backward": (
            "kernel_size",
            "stride",
            "padding",
            "ceil_mode",
            "count_include_pad",
            "divisor_override",
        )
        for n in (2, 3)
    },
}


def _window_settings(call: Call, first: int) -> list[Any]:
    return [list(a) if isinstance(a, tuple) else a for a in call.args[first:]]


def _fill_operands(value: Any, operands: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, Operand):
        return operands[value.index]
    return list(value) if isinstance(value, tuple) else value


def _window_trial(
    call: Call,
    operands: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor | None],
    changed: Mapping[str, Any],
) -> list[Trial]:
    """Return the call on these operands, with some settings changed. Return nothing if the numbers
    of operands or results differ from the call's."""
    infos = [
        TensorInfo((0,), torch.uint8) if x is None else TensorInfo(tuple(x.shape), x.dtype)
        for x in results
    ]
    if len(operands) != len(call.inputs) or len(infos) != len(call.outputs):
        return []
    names = [a.name for a in call.target._schema.arguments]  # type: ignore[attr-defined]
    args = tuple(changed.get(name, value) for name, value in zip(names, call.args, strict=False))
    small = replace(
        call,
        args=args,
        inputs=tuple(TensorInfo(tuple(x.shape), x.dtype) for x in operands),
        outputs=tuple(infos),
    )
    return [(small, list(operands))]


def _dims(target: Any) -> int:
    return 3 if "3d" in target.__name__ else 2


_POOLS = (
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    aten.avg_pool2d.default,
    aten.avg_pool3d.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d_backward.default,
)
WINDOW_SAMPLES: Mapping[Any, Callable[[Call], list[Trial]]] = {
    aten.convolution.default: lambda call: _convolution(call, backward=False),
    aten.convolution_backward.default: lambda call: _convolution(call, backward=True),
    **dict.fromkeys(_POOLS, lambda call: _pool(call, _dims(call.target))),
}


# --------------------------------------------------------------------------------------------------


# --------------------------------------------------------------------------------------------------
# Small calls of attention with score and mask functions.
#
# Heads, samples and queries are few. A dim of a captured tensor that is indexed by one of these
# coordinates gets the coordinate's number of elements. Every other dim keeps its size, since
# numbers in the function may depend on it. A function is tried unchanged, and also with its large
# integers made small, so that a window or a block of thousands of positions ends within a few.


_FLEX_BATCH, _HEADS, _FLEX_QUERIES, _FLEX_KEYS, _FLEX_WIDTH = 4, 4, 12, 10, 4
_LARGE = re.compile(r"(?<=[\[,])\d{2,}(?=[\],])")
_MANY = 3  # bound of captured integers; smaller if a dim that they may index is smaller


def _flex_numbers(info: TensorInfo, seed: int, bound: int = _MANY) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    if info.dtype == torch.bool:
        return torch.randint(0, 4, info.shape, generator=random) > 0
    if info.dtype.is_floating_point:
        return torch.randint(-16, 17, info.shape, generator=random).double() / 8
    return torch.randint(0, bound, info.shape, generator=random).to(info.dtype)


def _flex_sizes(call: Call) -> tuple[dict[str, int], int]:
    """Return the small call's numbers of samples, query heads, queries and keys by coordinate, and
    its number of key heads."""
    (batch, heads, queries, _), (_, shared, keys, _) = (info.shape for info in call.inputs[:2])
    few = 1 if shared == 1 else 2
    num = min(heads, _HEADS) if heads == shared else few * (heads // shared)
    b, s = 1 if batch == 1 else _FLEX_BATCH, 1 if queries == 1 else _FLEX_QUERIES
    t = s if keys == queries else _FLEX_KEYS
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
    return [_flex_numbers(info, 10 + number, bound) for number, info in enumerate(small)]


def _tensors(call: Call) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return queries, keys and values, and the tensors that the functions capture."""
    sizes, shared = _flex_sizes(call)
    own_keys = 1 if call.inputs[1].shape[0] == 1 else sizes["b"]
    wide = _FLEX_WIDTH if call.inputs[2].shape[3] == call.inputs[0].shape[3] else 2 * _FLEX_WIDTH
    shapes = (
        (sizes["b"], sizes["h"], sizes["q"], _FLEX_WIDTH),
        (own_keys, shared, sizes["k"], _FLEX_WIDTH),
        (own_keys, shared, sizes["k"], wide),
    )
    numbers = [
        _flex_numbers(TensorInfo(shape, torch.float64), seed) for seed, shape in enumerate(shapes)
    ]
    return numbers, _captured_tensors(call, sizes)


def _functions(call: Call) -> Iterator[Call]:
    """Iterate over the call itself, and the call with the large integers of its functions made
    small."""
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
    except (IndexError, RuntimeError):  # numbers in a function may depend on the size of a tensor
        return []
    return [_flex_trial(call, [*q_k_v, *captured], results)]


def _backward(call: Call) -> list[Trial]:
    return [trial for each in _functions(call) for trial in _backward_of(each)]


def _backward_of(call: Call) -> list[Trial]:
    q_k_v, captured = _tensors(call)
    settings, wanted_gradients = _settings(call, 9), list(argument(call, "wanted"))
    try:
        out, lse = ops.flex_attention(*q_k_v, captured, *settings)
    except (IndexError, RuntimeError):
        return []
    grad = _flex_numbers(TensorInfo(tuple(out.shape), torch.float64), 3)
    has_sum_gradient = isinstance(argument(call, "grad_lse"), Operand)
    of_sums = (
        [_flex_numbers(TensorInfo(tuple(lse.shape), torch.float64), 4)] if has_sum_gradient else []
    )
    tensors = [*q_k_v, out, lse, grad, *of_sums, *captured]
    rest = of_sums or [None]
    results = ops.flex_attention_backward(
        *q_k_v, out, lse, grad, *rest, captured, wanted_gradients, *settings
    )
    return [_flex_trial(call, tensors, results)]


def _settings(call: Call, first: int) -> Sequence[Any]:
    """Return the arguments after the captured tensors, in torch's types."""
    return [list(x) if isinstance(x, tuple) else x for x in call.args[first:]]


def _flex_trial(call: Call, tensors: list[torch.Tensor], results: Sequence[torch.Tensor]) -> Trial:
    infos = [
        tuple(TensorInfo(tuple(x.shape), x.dtype) for x in each) for each in (tensors, results)
    ]
    return replace(call, inputs=infos[0], outputs=infos[1]), tensors


FLEX_SAMPLES: Mapping[Any, Callable[[Call], list[Trial]]] = {
    ops.flex_attention: _forward,
    ops.flex_attention_backward: _backward,
}


# --------------------------------------------------------------------------------------------------


# --------------------------------------------------------------------------------------------------
# Small calls of ops whose results are larger than their operands: their settings contain sizes of
# results.


_LADDER = (6, 12, 8, 10, 4)  # sizes of successive dims; all are even
_MARGIN, _LENGTH, _ROWS = 4, 8, 16


def _scatter_sizes(shape: Sequence[int]) -> list[int]:
    """Return a small size for each dim. Dims of size 1 keep it."""
    return [
        1 if size == 1 else _LADDER[min(dim, len(_LADDER) - 1)] for dim, size in enumerate(shape)
    ]


def _scatter_numbers(shape: Sequence[int]) -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    return torch.randint(-64, 65, tuple(shape), generator=random).double() / 8


def _expand(call: Call) -> list[Trial]:
    source, target = call.inputs[0], call.outputs[0]
    if source.dtype == torch.bool or call.kwargs:
        return []
    small = _scatter_sizes(target.shape)
    behind = target.shape[len(target.shape) - len(source.shape) :]
    sizes = small[len(small) - len(source.shape) :]
    read = [
        1 if own != whole else size
        for own, whole, size in zip(source.shape, behind, sizes, strict=True)
    ]
    return _trial(call, [_scatter_numbers(read)], (call.args[0], tuple(small)))


def _slice_backward(call: Call) -> list[Trial]:
    grad, shape, dim, start, end, step = call.args
    if step != 1:
        return []
    size = shape[dim]
    first, last = (max(0, min(size, at + size if at < 0 else at)) for at in (start, end))
    lead, length, rest = min(first, _MARGIN), min(last - first, _LENGTH), min(size - last, _MARGIN)
    small = _scatter_sizes(shape)
    small[dim] = lead + length + rest
    sliced = [*small[:dim], length, *small[dim + 1 :]] if dim >= 0 else [*small[:-1], length]
    args = (grad, tuple(small), dim, lead, end if end > size else lead + length, step)
    return _trial(call, [_scatter_numbers(sliced)], args)


def _select_backward(call: Call) -> list[Trial]:
    grad, shape, dim, index = call.args
    small = _scatter_sizes(shape)
    at = dim % len(shape)
    others = [*small[:at], *small[at + 1 :]]
    return _trial(
        call,
        [_scatter_numbers(others)],
        (grad, tuple(small), dim, max(-small[at], min(index, small[at] - 1))),
    )


def _embedding_backward(call: Call) -> list[Trial]:
    grad, ids, num_rows, *settings = call.args
    if any(type(value) is int and value >= _ROWS for value in settings):
        return []
    shape = _scatter_sizes(call.inputs[0].shape)
    random = torch.Generator().manual_seed(4)
    looked_up = torch.randint(0, _ROWS, shape[:-1], generator=random)
    args = (grad, ids, min(num_rows, _ROWS), *settings)
    return _trial(call, [_scatter_numbers(shape), looked_up % args[2]], args)


def _index_put(call: Call) -> list[Trial]:
    """Return a small call that writes rows at one index tensor, in the call's position."""
    indices = call.args[1]
    places = [at for at, index in enumerate(indices) if index is not None]
    index = call.inputs[1]
    if len(places) != 1 or len(call.inputs) != 3 or index.dtype != torch.int64:
        return []
    (at,) = places
    shape = _scatter_sizes(call.inputs[0].shape)
    looked_up = [1 if size == 1 else 4 for size in index.shape]
    rows = max(shape[at], math.prod(looked_up))  # enough to write each row at most once
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
    return _trial(call, [_scatter_numbers(shape), ids, _scatter_numbers(written)], call.args)


def _trial(call: Call, tensors: list[torch.Tensor], args: tuple[Any, ...]) -> list[Trial]:
    result = run(call.target, args, call.kwargs, tensors, (), ())[0]
    infos = tuple(TensorInfo(tuple(x.shape), x.dtype) for x in tensors)
    small_call = replace(
        call, args=args, inputs=infos, outputs=(TensorInfo(tuple(result.shape), result.dtype),)
    )
    return [(small_call, tensors)]


SCATTER_SAMPLES: Mapping[Any, Callable[[Call], list[Trial]]] = {
    aten.expand.default: _expand,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    ops.embedding_backward: _embedding_backward,
    aten.index_put.default: _index_put,
}


# --------------------------------------------------------------------------------------------------


_BATCH, _SHARED, _QUERIES, _KEYS, _WIDTH = 4, 2, 8, 12, 4


def _numbers(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return (torch.randint(-16, 17, tuple(shape), generator=random) / 8).to(dtype)


def _attention(call: Call, first: int) -> list[Trial]:
    """Return a small attention call, with the large call's ratio of query heads to key and value
    heads.

    Args:
        call: the large call.
        first: number of the operand that is the query.
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
    """Return small numbers of samples, query heads, key heads, queries and keys.

    Args:
        query: shape [b, h, s, d] of the large call's query.
        key: shape [b, g, t, d] of the large call's key.
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
        visible = numbers > 0
        visible[..., :1] = True
        return visible
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
