"""Flops and bytes of an op, from its local shapes.

`flops` counts a multiply-add as two, and is exact for matmul, attention and convolution. For a
registered op it is the result of its `flops` function (`autopar.rules.register`). For all other ops
it is 0, since they are bound by memory. `bytes` counts every tensor that the op must read or write,
once. Kinds: ``matmul`` (including convolution), ``attention``, ``attention_backward``, ``view`` (no
work), and the memory-bound kinds ``transcendental`` (exp, tanh, softmax …), ``reduction`` (sums,
norms), ``indexing`` (gather, scatter, embedding), and ``elementwise`` (all others, including
copies).
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

from autopar.analysis.fusable import PIECES, passes
from autopar.core.hardware import WorkKind
from autopar.ops import experts, experts_backward, linear_cross_entropy
from autopar.ops.formats import aten_op_of
from autopar.ops.random import NUM_PASSES
from autopar.ops.score_functions import captures, find_reading, module_of, over_all
from autopar.rules.table import registered_rule

# --------------------------------------------------------------------------------------------------
# Pairs of query and key that an attention with a mask function computes.
#
# A mask that reads neither a captured tensor nor the index of the sample or head is *known*. It is
# evaluated on all pairs. Since kernels skip whole blocks, a pair counts if any pair of its block of
# 128 by 128 is visible. With any other mask every pair counts.

_BLOCK = 128
_MOST = 1 << 26  # largest number of evaluated pairs; above it, blocks of rows are sampled evenly


def is_known(mask: str) -> bool:
    """Return whether a mask function depends on the positions of query and key only."""
    return not captures(mask) and not find_reading((mask,), ()).free & {"b", "h"}


@lru_cache(maxsize=1024)
def share_seen(mask: str, num_queries: int, num_keys: int) -> float:
    """Return the share of pairs of query and key that an attention computes.

    Args:
        mask: the mask function, as graphs store it.
        num_queries: local number of queries. If it divides `num_keys`, the queries are one of
            several parts. The share is then that of the part with the most pairs, since the others
            wait for it.
        num_keys: number of keys.

    Returns:
        A share between 0 and 1; 1 for a mask that is not known.
    """
    if not is_known(mask) or not num_queries or not num_keys:
        return 1.0
    parts = num_keys // num_queries if num_keys % num_queries == 0 else 1
    return max(_share(mask, part * num_queries, num_queries, num_keys) for part in range(parts))


def _share(mask: str, start: int, num_queries: int, num_keys: int) -> float:
    """Return the share of pairs of `num_queries` queries, beginning with the query `start`."""
    starts = range(start, start + num_queries, _BLOCK)
    step = -(-num_queries * num_keys // _MOST)
    visible = looked_at = 0
    step = min(step, len(starts))
    for first in starts[step // 2 :: step]:
        rows = min(_BLOCK, start + num_queries - first)
        visible += _pairs(mask, first, rows, num_keys)
        looked_at += rows * num_keys
    return visible / looked_at


def _pairs(mask: str, first: int, rows: int, num_keys: int) -> int:
    names = ("q", "k", "b", "h")
    function = over_all(module_of(mask, names, 0), (2, 3, None, None), 0, dims=(2, 3))
    zero = torch.zeros((), dtype=torch.int32)
    queries, keys = (
        torch.arange(at, at + size, dtype=torch.int32)
        for at, size in ((first, rows), (0, num_keys))
    )
    columns = function(queries, keys, zero, zero).any(0)
    widths = torch.tensor(
        [_BLOCK] * (num_keys // _BLOCK) + [num_keys % _BLOCK] * (num_keys % _BLOCK > 0)
    )
    blocks = torch.stack([part.any() for part in columns.split(_BLOCK)])
    return rows * int((widths * blocks).sum())


class Info(Protocol):
    """The local shape and dtype of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Local shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """Flops, bytes moved, and kind (see the module docstring)."""

    flops: int
    bytes: int
    kind: WorkKind


NO_WORK = Work(0, 0, "view")
Infos = Sequence[Info]
Flops = Callable[[Sequence[Any], Infos, Infos], int]


def work(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    input_infos: Infos,
    output_infos: Infos,
    *,
    mirrored: bool = False,
) -> Work:
    """Return the work of one call on one device.

    Args:
        target: an aten OpOverload, a function of `autopar.ops`, or `operator.getitem`.
        args: arguments as in the graph; only literals are used.
        kwargs: keyword arguments as in the graph; only literals are used.
        input_infos: local operands, in the order in which they appear in args and kwargs.
        output_infos: local results; a result that is None has shape ``(0,)``.
        mirrored: whether the queries of causal attention are mirrored (`autopar.core.placements`).
    """
    name, is_view = _describe(target)
    if is_view:
        return NO_WORK
    moved = sum(map(_bytes, input_infos)) + sum(map(_bytes, output_infos))
    if name in _ATTENTION:
        attention_kind, count = _ATTENTION[name]
        flops = count(args, input_infos, output_infos)
        query, key = (input_infos if attention_kind == "attention" else input_infos[1:])[:2]
        unseen = (
            _flops_masked(flops, query, key, mirrored) if _is_causal(target, args, kwargs) else 0
        )
        return Work(flops - unseen, moved, attention_kind)
    if name in _FLEX:
        flex_kind, mask, factor = _FLEX[name]
        query, key, value = input_infos[:3]
        share = share_seen(args[mask], query.shape[2], key.shape[2])
        return Work(int(factor * _attention_flops(query, key, value) * share), moved, flex_kind)
    if name in _FLOPS:
        return Work(_FLOPS[name](args, input_infos, output_infos), moved, "matmul")
    if (rule := registered_rule(target)) is not None:
        flops = rule.count_flops(target, [info.shape for info in input_infos])
        return Work(flops, moved, rule.kind)
    kind = _KINDS.get(name, "elementwise")
    if name in _DRAWS:
        moved += 8 * NUM_PASSES * _numel(output_infos[0])
    if name in _READS_FEW:  # only the selected rows of the table are read
        moved = 2 * sum(map(_bytes, output_infos)) + sum(map(_bytes, input_infos[1:]))
    return Work(0, moved, kind)


def works(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    input_infos: Infos,
    output_infos: Infos,
    num_senders: int = 1,
    *,
    mirrored: bool = False,
    by_kernels: bool = False,
) -> tuple[tuple[Work, int], ...]:
    """Return the kinds of work of one call, each with its number of repetitions.

    Args:
        target: as in `work`.
        args: as in `work`.
        kwargs: as in `work`.
        input_infos: as in `work`.
        output_infos: as in `work`.
        num_senders: for experts with dispatched rows, the number of ranks that send rows.
        mirrored: as in `work`.
        by_kernels: whether norms run as the kernels of `autopar.kernels.row_kernels`.
    """
    if target is linear_cross_entropy:
        x, weight, index = input_infos
        return _by_rows(_numel(index), args[4], weight.shape, x.dtype)
    if target in PIECES:
        return tuple(
            (Work(0, moved, kind), 1)
            for moved, kind in passes(
                target, args, input_infos, output_infos, by_kernels=by_kernels
            )
        )
    if target is experts:
        return _experts(input_infos, args[6], num_senders)
    if target is experts_backward:
        return _experts_backward(input_infos[1:], args[7], num_senders)
    return ((work(target, args, kwargs, input_infos, output_infos, mirrored=mirrored), 1),)


def computes_in(inputs: Infos) -> torch.dtype:
    """Return the dtype in which a matmul or an attention computes; float32 without operands.

    It is the wider dtype of the first two operands, the factors. Other operands and results, such
    as a log of sums in float32 next to queries in bfloat16, do not count.
    """
    return max(
        (i.dtype for i in inputs[:2]),
        key=lambda d: (d.is_floating_point, d.itemsize),
        default=torch.float32,
    )


def is_view(target: Callable[..., Any]) -> bool:
    """Return whether the op only returns a view of its first operand."""
    return _describe(target)[1]


def _by_rows(
    num_rows: int, rows: int, weight: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[Work, int], ...]:
    """Return the work of `linear_cross_entropy`: for each part of the rows three products, and
    passes over the logits and the gradient of the weight."""
    num_classes, num_features = weight
    item, wide = dtype.itemsize, max(dtype.itemsize, 4)
    works: list[tuple[Work, int]] = []
    for part, times in ((rows, num_rows // rows), (num_rows % rows, 1)):
        logits, summed = part * num_classes, num_classes * num_features
        product = Work(2 * part * summed, (part * num_features + summed + logits) * item, "matmul")
        passes = 4 * logits * wide + (
            (logits + summed) * (item + wide) + summed * wide if item < wide else summed * item
        )
        once = (
            Work(0, logits * (item + wide), "reduction"),
            Work(0, logits * (item + wide), "transcendental"),
            Work(0, passes, "elementwise"),
        )
        works += [(product, 3 * times), *((w, times) for w in once)] if part and times else []
    return tuple(works)


def _experts(infos: Infos, size: int, num_senders: int) -> tuple[tuple[Work, int], ...]:
    """Return the work of `experts`, if all of `size` experts are picked equally often.

    Each local expert has its products, the ops between them, and the passes that gather and add its
    rows. The sort of picks and the result count once. Dispatched rows are packed once more before
    they are sent, and the results of experts are put in order.
    """
    x, ids, _, up, down = infos
    (num, parts, inner, features), width, item = up.shape, down.shape[1], x.dtype.itemsize
    rows, wide = -(-_numel(ids) * num_senders // size), max(item, 4)
    return (
        *_work_of_sending(ids, (features + width) * item, num_senders),
        (Work(0, 4 * _bytes(ids), "reduction"), 1),
        (Work(0, x.shape[0] * width * (2 * wide + item), "elementwise"), 1),
        (_product(rows, features, parts * inner, item), num),
        (_product(rows, inner, width, item), num),
        (Work(0, rows * (parts + 1) * inner * item, "transcendental"), num),
        (Work(0, rows * (2 * features * item + width * (item + 2 * wide)), "indexing"), num),
    )


def _work_of_sending(ids: Info, row_bytes: int, num_senders: int) -> tuple[tuple[Work, int], ...]:
    return ((Work(0, 2 * _numel(ids) * row_bytes, "indexing"), 1),) if num_senders > 1 else ()


def _experts_backward(infos: Infos, size: int, num_senders: int) -> tuple[tuple[Work, int], ...]:
    """Return the work of `experts_backward`, with assumptions as in `_experts`.

    Each local expert has its up product again, two products per gradient, passes over the tensors
    between them, the rows of two tensors that are gathered and those of one that are added.
    Gradients of weights are written once more into the result.
    """
    x, ids, gates, up, down = infos
    (num, parts, inner, features), width, item = up.shape, down.shape[1], x.dtype.itemsize
    rows, wide = -(-_numel(ids) * num_senders // size), max(item, 4)
    weights = parts * inner * features + inner * width
    return (
        *_work_of_sending(ids, (2 * features + width) * item, num_senders),
        (Work(0, 4 * _bytes(ids), "reduction"), 1),
        (Work(0, _numel(x) * (2 * wide + item) + _bytes(gates), "elementwise"), 1),
        (_product(rows, features, parts * inner, item), 3 * num),
        (_product(rows, inner, width, item), 2 * num),
        (Work(0, 3 * rows * (parts + 1) * inner * item, "transcendental"), num),
        (
            Work(
                0, rows * (2 * (features + width) * item + features * (item + 2 * wide)), "indexing"
            ),
            num,
        ),
        (Work(0, (rows * (5 * inner + 2 * width) + 3 * weights) * item, "elementwise"), num),
    )


def _product(m: int, k: int, n: int, item: int) -> Work:
    """Return the work of a product [m, k] × [k, n], or of the gradient of one of its factors."""
    return Work(2 * m * k * n, (m * k + m * n + k * n) * item, "matmul")


def _numel(info: Info) -> int:
    return math.prod(info.shape)


def _bytes(info: Info) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


@lru_cache(maxsize=4096)
def _describe(target: Callable[..., Any]) -> tuple[str, bool]:
    """Return the op's name without its overload, and whether it only returns a view."""
    if target is operator.getitem:
        return "getitem", True
    target = aten_op_of(target)
    if isinstance(target, torch._ops.OpOverload):
        name = str(target.overloadpacket)
        return name, target.is_view or name in ("aten._unsafe_view", "aten.reshape")
    unit = ".".join(
        target.__module__.split(".")[:2]
    )  # the name that users know: `autopar.ops`, not its file
    return f"{unit}.{target.__name__}", False


@lru_cache(maxsize=64)
def _position(target: Callable[..., Any], name: str) -> int:
    return list(inspect.signature(target).parameters).index(name)


def _is_causal(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    position = _position(target, "is_causal")
    return bool(args[position] if position < len(args) else kwargs.get("is_causal", False))


def _dot_flops(args: Sequence[Any], inputs: Infos, outputs: Infos) -> int:
    """Return the flops of ``dot(equation, a, b, bias)``: one multiply-add for each point of the
    space of all letters. A bias only initializes the sum."""
    terms = args[0].split("->")[0].replace(" ", "").split(",")
    sizes = {
        letter: size
        for term, info in zip(terms, inputs[:2], strict=True)
        for letter, size in zip(term, info.shape, strict=True)
    }
    return 2 * math.prod(sizes.values())


def _attention_flops(query: Info, key: Info, value: Info) -> int:
    """Return the flops of the scores and of their product with the values: [.., s, e] × [.., t, e],
    then [.., s, t] × [.., t, v]."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _flops_masked(flops: int, query: Info, key: Info, mirrored: bool) -> int:
    """Return the flops that a causal mask removes.

    For unsplit queries it is half of the square. Of split queries the last part counts, since the
    others wait for it: it sees all keys except half of its own square. With mirrored parts, each
    part sees half of the pairs of its queries with all keys.
    """
    return flops // 2 if mirrored else flops * query.shape[-2] // (2 * key.shape[-2])


def _convolution_flops(args: Sequence[Any], inputs: Infos, outputs: Infos) -> int:
    """Return the flops of ``convolution(input, weight, bias, stride, padding, dilation, transposed,
    …)``."""
    points = inputs[0] if len(args) > 6 and args[6] else outputs[0]
    return 2 * _numel(points) * math.prod(inputs[1].shape[1:])


def _convolution_backward_flops(args: Sequence[Any], inputs: Infos, outputs: Infos) -> int:
    """Return the flops of ``convolution_backward(grad_output, input, weight, bias_sizes, stride,
    padding, dilation, transposed, …)``: those of forward for the gradient of the input, and again
    for that of the weight."""
    points = inputs[1] if len(args) > 7 and args[7] else inputs[0]
    num_gradients = sum(1 for info in outputs[:2] if _numel(info) > 0)
    return 2 * num_gradients * _numel(points) * math.prod(inputs[2].shape[1:])


_FLOPS: Mapping[str, Flops] = {
    "autopar.ops.dot": _dot_flops,
    "aten.mm": lambda args, i, o: 2 * _numel(i[0]) * i[1].shape[-1],
    "aten.bmm": lambda args, i, o: 2 * _numel(i[0]) * i[1].shape[-1],
    "aten.addmm": lambda args, i, o: 2 * _numel(i[1]) * i[2].shape[-1],
    "aten.baddbmm": lambda args, i, o: 2 * _numel(i[1]) * i[2].shape[-1],
    "aten.linear": lambda args, i, o: 2 * _numel(i[0]) * i[1].shape[0],
    "aten.mv": lambda args, i, o: 2 * _numel(i[0]),
    "aten.dot": lambda args, i, o: 2 * _numel(i[0]),
    "aten.convolution": _convolution_flops,
    "aten.convolution_backward": _convolution_backward_flops,
}
# Forward has two matmuls and backward five: the scores again, and the gradients of both factors of
# both.
_ATTENTION: Mapping[str, tuple[WorkKind, Flops]] = {
    "autopar.ops.attention": ("attention", lambda args, i, o: _attention_flops(*i[:3])),
    "autopar.ops.attention_backward": (
        "attention_backward",
        lambda args, i, o: 5 * _attention_flops(*o[:3]) // 2,
    ),
}
# Index of the mask among the arguments, and the flops as a multiple of forward's. In backward,
# torch's kernels run forward again before these five matmuls.
_FLEX: Mapping[str, tuple[WorkKind, int, float]] = {
    "autopar.flex_attention": ("attention", 5, 1.0),
    "autopar.flex_attention_backward": ("attention_backward", 10, 3.5),
}
_NAMES: Mapping[WorkKind, str] = {
    "transcendental": (
        "exp exp2 expm1 log log2 log1p tanh tanh_backward sigmoid sigmoid_backward silu"
        " silu_backward gelu gelu_backward erf sin cos softplus softplus_backward mish elu _softmax"
        " _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data logsumexp"
    ),
    "reduction": (
        "sum mean amax amin max min argmax argmin var var_mean std linalg_vector_norm any all prod"
        " cumsum sort topk native_layer_norm native_layer_norm_backward native_group_norm"
        " native_group_norm_backward native_batch_norm native_batch_norm_backward"
        " _native_batch_norm_legit _native_batch_norm_legit_functional _fused_rms_norm"
        " _fused_rms_norm_backward nll_loss_forward nll_loss_backward"
    ),
    "indexing": (
        "embedding embedding_dense_backward index index_put _unsafe_index _unsafe_index_put "
        "index_select index_add gather scatter scatter_add scatter_reduce "
        "masked_scatter select_scatter slice_scatter"
    ),
}
_KINDS: dict[str, WorkKind] = {
    f"aten.{name}": kind for kind, names in _NAMES.items() for name in names.split()
}
_KINDS |= {
    "autopar.ops.sum_exp": "transcendental",
    "autopar.ops.cross_entropy_backward": "transcendental",
}
_KINDS |= {
    f"autopar.ops.{name}": "reduction"
    for name in ("channel_sum", "squared_deviation", "scaled_product")
}
_EXTREMES = (
    "is_extreme",
    "is_scattered_extreme",
    "cdist_backward",
    "pdist_backward",
    "segment_reduce_backward",
)
_KINDS |= {f"autopar.ops.{name}": "reduction" for name in _EXTREMES}
_KINDS |= {
    f"autopar.ops.{name}": "indexing" for name in ("embedding", "embedding_backward", "pick")
}
_KINDS["autopar.ctc"] = "transcendental"
_DRAWS = {f"autopar.ops.{name}" for name in ("keep_mask", "uniform", "normal", "randint")}
_READS_FEW = {
    "autopar.ops.embedding",
    "autopar.ops.pick",
    "aten.embedding",
    "aten.gather",
    "aten.index",
    "aten.index_select",
}
