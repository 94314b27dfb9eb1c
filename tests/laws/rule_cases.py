"""Calls for each row of the rule table. CASES[target] returns (args, kwargs) for the sizes a, b, c,
d."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from flex import FLEX_KINDS, flex_functions

from autopar import ops
from autopar.ops import extremes, norms, random

aten = torch.ops.aten
FLOAT = torch.float64
Built = tuple[tuple[Any, ...], dict[str, Any]]


def real(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape).double() / 4


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def on(*args: Any, **kwargs: Any) -> Built:
    return args, kwargs


def grouped(s: Any, per_group: int, affine: bool = True) -> Built:
    """Return a native_group_norm with `s.b` groups."""
    channels, weights = (
        s.b * per_group,
        (real(s.b * per_group), real(s.b * per_group)) if affine else (None, None),
    )
    return on(real(s.a, channels, s.c, s.d), *weights, s.a, channels, s.c * s.d, s.b, 1e-5)


def grouped_backward(s: Any, per_group: int) -> Built:
    (x, weight, _, *sizes, eps), _ = grouped(s, per_group)
    _, mean, rstd = aten.native_group_norm.default(x, weight, None, *sizes, eps)
    return on(real(*x.shape), x, mean, rstd, weight, *sizes, [True, True, True])


def pooled2d_backward(s: Any) -> Built:
    x = real(s.a, s.b, 4, 4)
    y, indices = aten.max_pool2d_with_indices.default(x, [2, 2])
    return on(real(*y.shape), x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)


def experts(s: Any, parts: int = 2, act: str = "silu", gradient: bool = False) -> Built:
    """Return an expert layer: s.a tokens with 3 features pick 2 of s.b experts with s.c inner
    features and s.d outputs. Some picks have no expert."""
    x, picked, gates = real(s.a, 3), ids(s.b + 1, s.a, 2), real(s.a, 2)
    weights = real(s.b, parts, s.c, 3), real(s.b, s.d, s.c)
    return on(*((real(s.a, s.d),) if gradient else ()), x, picked, gates, *weights, act, s.b)


def gammas(s: Any) -> Built:
    tries = (s.a, s.b, random.GAMMA_TRIES)
    return on(
        ids(8, s.a, s.b).double() / 4 + 0.25,
        real(*tries),
        ids(8, *tries).double() / 8,
        ids(8, s.a, s.b).double() / 8,
    )


def shares(s: Any) -> Built:
    """Return numbers of s.a rows with 3 elements, with their parameters and sums."""
    numbers, alpha = (ids(8, s.a, s.b, 3).double() + 1 for _ in range(2))
    return on(
        numbers / numbers.sum(-1, keepdim=True), alpha, alpha.sum(-1, keepdim=True).expand_as(alpha)
    )


def softmaxed(s: Any) -> Built:
    x = real(s.a, s.b, s.c)
    m, total = x.amax(-1), (x - x.amax(-1, keepdim=True)).exp().sum(-1)
    return on(x, m, total, ids(s.c + 1, s.a, s.b), real(s.a, s.b))


def normed(s: Any, masked: bool = False) -> Built:
    x, w, b = real(s.a, s.b, s.c), real(s.c), real(s.c)
    _, mean, rstd = aten.native_layer_norm.default(x, [s.c], w, b, 1e-5)
    return on(real(s.a, s.b, s.c), x, [s.c], mean, rstd, w, b, [True, not masked, True])


def attended(
    s: Any, causal: bool = False, mask: tuple[int, ...] | None = None, groups: int = 1
) -> Built:
    q, k, v = (real(s.a, heads, s.c, 2) for heads in (s.b * groups, s.b, s.b))
    return on(q, k, v, real(*mask) if mask else None, causal, 0.5)


def attended_backward(
    s: Any, causal: bool = False, mask: tuple[int, ...] | None = None, groups: int = 1
) -> Built:
    (q, k, v, given_mask, _, scale), _ = attended(s, causal, mask, groups)
    out, lse = ops.attention(q, k, v, given_mask, causal, scale)
    return on(real(*q.shape), q, k, v, out, lse, given_mask, causal, scale)


def flex(s: Any, kind: str, groups: int = 1, shared: bool = False) -> Built:
    """Return flex attention with s.a samples, s.b heads of keys, s.c queries and s.d keys."""
    heads, keys = s.b * groups, 1 if shared else s.a
    q, k, v = real(s.a, heads, s.c, 2), real(keys, s.b, s.d, 2), real(keys, s.b, s.d, 3)
    score, mask, captured = flex_functions(kind, s.a, heads, s.c, s.d)
    return on(q, k, v, captured, score, mask, 0.5, [0, 0, 0], [], [])


def flex_backward(
    s: Any, kind: str, groups: int = 1, shared: bool = False, sums: bool = False
) -> Built:
    (q, k, v, captured, *settings), _ = flex(s, kind, groups, shared)
    out, lse = ops.flex_attention(q, k, v, captured, *settings)
    wanted = [number for number, x in enumerate(captured) if x.is_floating_point()]
    return on(
        q,
        k,
        v,
        out,
        lse,
        real(*out.shape),
        real(*lse.shape) if sums else None,
        captured,
        wanted,
        *settings,
    )


def convolved(
    s: Any, groups: int = 1, transposed: bool = False, bias: bool = False, depthwise: bool = False
) -> Built:
    groups, channels = (s.b, s.b) if depthwise else (groups, s.b * groups)
    out = s.c * groups
    weight = (channels, out // groups, 2, 2) if transposed else (out, channels // groups, 2, 2)
    b = real(out) if bias else None
    return on(
        real(s.a, channels, 5, 5),
        real(*weight),
        b,
        [1, 1],
        [1, 1],
        [1, 1],
        transposed,
        [0, 0],
        groups,
    )


def convolved_backward(
    s: Any, *, mask: tuple[bool, bool, bool] = (True, True, True), **how: Any
) -> Built:
    (x, w, _, *rest), _ = convolved(s, **how)
    out = aten.convolution.default(x, w, None, *rest)
    return on(real(*out.shape), x, w, [out.shape[1]], *rest, list(mask))


def reshaped(s: Any) -> Built:
    """Return a view that groups factors in two ways, so that dims are merged, split and kept."""
    return on(real(*s.before), s.after)


Case = Callable[[Any], Built]


def cube(s: Any) -> Built:
    return on(real(s.a, s.b, s.c))


def pair(s: Any) -> Built:
    return on(real(s.a, s.b, s.c), real(s.b, s.c))


def last(s: Any) -> Built:
    return on(real(s.a, s.b, s.c), -1)


def graded(s: Any) -> Built:
    return on(real(s.a, s.b), real(s.a, s.b))


def softmax(s: Any) -> Built:
    return on(real(s.a, s.b, s.c), 1, False)


def softmax_backward(s: Any) -> Built:
    return on(real(s.a, s.b), real(s.a, s.b).softmax(1), 1, torch.float64)


def nll(s: Any, reduction: int = 1) -> Built:
    return on(real(s.a, s.c), ids(s.c, s.a), None, reduction, -100)


def nll_backward(s: Any, reduction: int = 1) -> Built:
    grad = real() if reduction else real(s.a)
    return on(
        grad,
        *nll(s, reduction)[0],
        torch.tensor(float(s.a if reduction else 0), dtype=torch.float64),
    )


def aligned(s: Any) -> Built:
    """Return s.a samples of frames with targets of different lengths."""
    log_probs = real(2 * s.b + 1, s.a, s.c + 1).log_softmax(-1)
    return on(log_probs, 1 + ids(s.c, s.a, s.b), ids(2, s.a) + 2 * s.b, ids(s.b, s.a) + 1, 0, True)


def compared(s: Any, *rest: Any, reduction: int = 1) -> Built:
    return on(real(s.a, s.b, s.c), torch.rand(s.a, s.b, s.c).double(), *rest, reduction)


def compared_backward(s: Any, *rest: Any, reduction: int = 1) -> Built:
    x, target = torch.rand(s.a, s.b).double(), torch.rand(s.a, s.b).double()
    return on(real() if reduction else real(s.a, s.b), x, target, *rest, reduction)


def pooled(s: Any) -> Built:
    return on(real(s.a, s.b, 4, 4, 4), [2, 2, 2])


def pooled_backward(s: Any) -> Built:
    (x, size), _ = pooled(s)
    out, indices = aten.max_pool3d_with_indices.default(x, size)
    return on(real(*out.shape), x, size, size, [0, 0, 0], [1, 1, 1], False, indices)


def normed_weight(s: Any, dim: int) -> Built:
    shape = [1, 1, 1]
    shape[dim] = (s.a, s.b, s.c)[dim]
    return on(real(s.a, s.b, s.c) + 0.125, real(*shape), dim)


def normed_weight_backward(s: Any, dim: int) -> Built:
    (v, g, _), _ = normed_weight(s, dim)
    return on(real(s.a, s.b, s.c), v, g, aten._weight_norm_interface.default(v, g, dim)[1], dim)


DIMS = [lambda s: on(real(s.a, s.b, s.c), [0, 2]), lambda s: on(real(s.a, s.b, s.c), [1], True)]
DIM = [lambda s: on(real(s.a, s.b, s.c), 1), lambda s: on(real(s.a, s.b, s.c), 1, True)]
VARIANCE = [
    lambda s: on(real(s.a, s.b, s.c), [1], correction=0),
    lambda s: on(real(s.a, s.b, s.c), [0, 1], correction=0, keepdim=True),
]
SUM = [pair, lambda s: on(real(s.a, 1), real(1, s.b), alpha=2), lambda s: on(real(s.a), 2.0)]
NEW = [lambda s: on(real(s.a, s.b), [s.a, s.c]), lambda s: on(real(s.a, s.b), [])]

CASES: Mapping[Any, Case | list[Case]] = {
    ops.dot: [
        lambda s: on("bsk,nk->bsn", real(s.a, s.b, s.c), real(s.d, s.c)),
        lambda s: on("bsn,bsk->nk", real(s.a, s.b, s.d), real(s.a, s.b, s.c)),
        lambda s: on("bsk,kih->bsih", real(s.a, s.b, s.c), real(s.c, 3, s.d)),
        lambda s: on("bsk,nk->bsn", real(s.a, s.b, s.c), real(s.d, s.c), real(s.d)),
        lambda s: on("bske,nke->bsn", real(s.a, 2, s.b, s.c), real(s.d, s.b, s.c), real(s.d)),
        lambda s: on("bsk,kih->bsih", real(s.a, s.b, s.c), real(s.c, 3, s.d), real(3, s.d)),
        lambda s: on("bmk,bkn->bmn", real(s.d, s.a, s.b), real(s.d, s.b, s.c), real(s.c)),
    ],
    aten.mm.default: lambda s: on(real(s.a, s.b), real(s.b, s.c)),
    aten.bmm.default: lambda s: on(real(s.d, s.a, s.b), real(s.d, s.b, s.c)),
    aten.addmm.default: [
        lambda s: on(real(s.c), real(s.a, s.b), real(s.b, s.c)),
        lambda s: on(real(s.a, s.c), real(s.a, s.b), real(s.b, s.c)),
    ],
    aten.baddbmm.default: lambda s: on(
        real(s.d, s.a, s.c), real(s.d, s.a, s.b), real(s.d, s.b, s.c)
    ),
    aten.convolution.default: [
        lambda s: convolved(s),
        lambda s: convolved(s, bias=True),
        lambda s: convolved(s, transposed=True),
        lambda s: convolved(s, groups=2, bias=True),
        lambda s: convolved(s, depthwise=True, bias=True),
        lambda s: convolved(s, depthwise=True, transposed=True),
    ],
    aten.convolution_backward.default: [
        lambda s: convolved_backward(s),
        lambda s: convolved_backward(s, transposed=True),
        lambda s: convolved_backward(s, groups=2),
        lambda s: convolved_backward(s, depthwise=True),
        lambda s: convolved_backward(s, mask=(False, True, True)),
        lambda s: convolved_backward(s, mask=(False, True, False)),
    ],
    ops.attention: [
        lambda s: attended(s),
        lambda s: attended(s, causal=True),
        lambda s: attended(s, mask=(s.a, 1, s.c, s.c)),
        lambda s: attended(s, mask=(1, s.b, s.c, s.c)),
        lambda s: attended(s, mask=(s.a, 1, 1, s.c)),
        lambda s: attended(s, causal=True, groups=2),
        lambda s: attended(s, causal=True, groups=6),
        lambda s: attended(s, mask=(s.a, s.b * 3, s.c, s.c), groups=3),
    ],
    ops.attention_backward: [
        lambda s: attended_backward(s),
        lambda s: attended_backward(s, causal=True),
        lambda s: attended_backward(s, mask=(s.a, 1, s.c, s.c)),
        lambda s: attended_backward(s, groups=2),
        lambda s: attended_backward(s, causal=True, groups=6),
        lambda s: attended_backward(s, mask=(s.a, s.b * 3, s.c, s.c), groups=3),
    ],
    ops.flex_attention: [
        *(lambda s, kind=kind: flex(s, kind) for kind in FLEX_KINDS),
        lambda s: flex(s, "documents", groups=2),
        lambda s: flex(s, "bias of heads and places", groups=6),
        lambda s: flex(s, "samples that differ", groups=2, shared=True),
    ],
    ops.flex_attention_backward: [
        *(lambda s, kind=kind: flex_backward(s, kind) for kind in FLEX_KINDS),
        lambda s: flex_backward(s, "documents", groups=2, sums=True),
        lambda s: flex_backward(s, "bias of heads and places", groups=6),
        lambda s: flex_backward(s, "samples that differ", groups=2, shared=True),
    ],
    ops.embedding: lambda s: on(real(s.a, s.b), ids(s.a, s.c, s.d)),
    ops.embedding_backward: [
        lambda s: on(real(s.c, s.d, s.b), ids(s.a, s.c, s.d), s.a),
        lambda s: on(real(s.c, s.d, s.b), ids(s.a, s.c, s.d), s.a, padding_idx=s.a - 1),
    ],
    aten.embedding.default: lambda s: on(real(s.a, s.b), ids(s.a, s.c, s.d)),
    aten.embedding_dense_backward.default: [
        lambda s: on(real(s.c, s.d, s.b), ids(s.a, s.c, s.d), s.a, 0, False),
        lambda s: on(real(s.c, s.d, s.b), ids(s.a, s.c, s.d), s.a, -1, True),
    ],
    ops.experts: [experts, lambda s: experts(s, 1, "relu2")],
    ops.experts_backward: [
        lambda s: experts(s, gradient=True),
        lambda s: experts(s, 1, "relu2", gradient=True),
    ],
    ops.sum_exp: lambda s: on(x := real(s.a, s.b, s.c), x.amax(-1)),
    ops.pick: lambda s: on(real(s.a, s.b, s.c), ids(s.c, s.a, s.b), -100),
    ops.cross_entropy_backward: softmaxed,
    ops.linear_cross_entropy: [
        lambda s: on(real(s.a, s.b, s.c), real(s.d + 1, s.c), ids(s.d, s.a, s.b), -100, 2),
        lambda s: on(real(s.a, s.c), real(s.d + 1, s.c), ids(s.d + 1, s.a), 0, 7),
    ],
    ops.ctc: aligned,
    aten.nll_loss_forward.default: [nll, lambda s: nll(s, 2), lambda s: nll(s, 0)],
    aten.nll_loss_backward.default: [nll_backward, lambda s: nll_backward(s, 0)],
    aten.native_layer_norm.default: [
        lambda s: on(real(s.a, s.b, s.c), [s.c], real(s.c), real(s.c), 1e-5),
        lambda s: on(real(s.a, s.b, s.c), [s.b, s.c], None, None, 1e-5),
    ],
    aten.native_layer_norm_backward.default: [normed, lambda s: normed(s, masked=True)],
    aten.mse_loss.default: [
        compared,
        lambda s: compared(s, reduction=0),
        lambda s: compared(s, reduction=2),
    ],
    aten.smooth_l1_loss.default: compared,
    aten.huber_loss.default: compared,
    aten.soft_margin_loss.default: compared,
    aten.binary_cross_entropy.default: lambda s: on(
        torch.rand(s.a, s.b).double(), torch.rand(s.a, s.b).double(), real(s.b), 1
    ),
    aten.binary_cross_entropy_with_logits.default: [
        lambda s: compared(s, None, None),
        lambda s: compared(s, real(s.b, 1), real(s.c).abs()),
        lambda s: compared(s, None, real(s.c).abs(), reduction=0),
    ],
    aten.mse_loss_backward.default: [
        compared_backward,
        lambda s: compared_backward(s, reduction=0),
    ],
    aten.smooth_l1_loss_backward.default: lambda s: on(*compared_backward(s)[0], 0.5),
    aten.huber_loss_backward.default: lambda s: on(*compared_backward(s)[0], 0.5),
    aten.soft_margin_loss_backward.default: compared_backward,
    aten.binary_cross_entropy_backward.default: lambda s: compared_backward(s, real(s.b)),
    aten._weight_norm_interface.default: [
        lambda s: normed_weight(s, 0),
        lambda s: normed_weight(s, 2),
    ],
    aten._weight_norm_interface_backward.default: [
        lambda s: normed_weight_backward(s, 0),
        lambda s: normed_weight_backward(s, 2),
    ],
    aten.max_pool3d_with_indices.default: pooled,
    aten.max_pool3d_with_indices_backward.default: pooled_backward,
    aten.avg_pool2d.default: [
        lambda s: on(real(s.a, s.b, 4, 4), [2, 2]),
        lambda s: on(real(s.a, s.b, 4, 4), [3, 3], [1, 1], [1, 1]),
    ],
    aten.avg_pool3d.default: [
        pooled,
        lambda s: on(real(s.a, s.b, 4, 2, 2), [3, 1, 1], [1, 1, 1], [1, 0, 0]),
    ],
    aten._adaptive_avg_pool2d.default: lambda s: on(real(s.a, s.b, 4, 4), [3, 2]),
    aten._adaptive_avg_pool3d.default: lambda s: on(real(s.a, s.b, 4, 4, 4), [3, 2, 1]),
    aten.avg_pool2d_backward.default: [
        lambda s: on(
            real(s.a, s.b, 2, 2), real(s.a, s.b, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None
        ),
        lambda s: on(
            real(s.a, s.b, 4, 4), real(s.a, s.b, 4, 4), [3, 3], [1, 1], [1, 1], False, True, None
        ),
    ],
    aten.avg_pool3d_backward.default: [
        lambda s: on(
            real(s.a, s.b, 2, 2, 2),
            real(s.a, s.b, 4, 4, 4),
            [2] * 3,
            [2] * 3,
            [0] * 3,
            False,
            True,
            None,
        ),
        lambda s: on(
            real(s.a, s.b, 4, 2, 2),
            real(s.a, s.b, 4, 2, 2),
            [3, 1, 1],
            [1] * 3,
            [1, 0, 0],
            False,
            True,
            None,
        ),
    ],
    aten._adaptive_avg_pool2d_backward.default: lambda s: on(
        real(s.a, s.b, 3, 2), real(s.a, s.b, 4, 4)
    ),
    aten._adaptive_avg_pool3d_backward.default: lambda s: on(
        real(s.a, s.b, 3, 2, 1), real(s.a, s.b, 4, 4, 4)
    ),
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), softmax),
    aten._safe_softmax.default: last,
    **dict.fromkeys(
        (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default),
        softmax_backward,
    ),
    **dict.fromkeys(
        (aten.sum.default, aten.mean.default, aten.any.default, aten.all.default), cube
    ),
    **dict.fromkeys(
        (aten.argmax.default, aten.argmin.default, aten.max.default, aten.min.default), cube
    ),
    **dict.fromkeys(
        (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default), DIMS
    ),
    **dict.fromkeys((aten.var.dim, aten.logsumexp.default), DIMS),
    **dict.fromkeys(
        (aten.max.dim, aten.min.dim, aten.any.dim, aten.all.dim, aten.prod.dim_int), DIM
    ),
    **dict.fromkeys((aten.var.correction, aten.var_mean.correction, aten.std.correction), VARIANCE),
    aten.linalg_vector_norm.default: lambda s: on(real(s.a, s.b, s.c), 2, [1]),
    aten.sort.default: last,
    aten.topk.default: lambda s: on(real(s.a, s.b, s.c), 1, 1),
    aten.flip.default: lambda s: on(real(s.a, s.b, s.c), [0, 2]),
    aten.cumsum.default: last,
    aten.roll.default: [
        lambda s: on(real(s.a, s.b, s.c), [1, -1], [0, 2]),
        lambda s: on(real(s.a, s.b), [1]),
    ],
    aten.histc.default: [lambda s: on(real(s.a, s.b), 4, -1, 1), lambda s: on(real(s.a, s.b), 4)],
    **dict.fromkeys((aten.tril.default, aten.triu.default), cube),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), reshaped),
    aten.squeeze.default: lambda s: on(real(s.a, 1, s.b)),
    aten.squeeze.dim: [lambda s: on(real(s.a, 1, s.b), 1), lambda s: on(real(s.a, 1, s.b), 0)],
    aten.squeeze.dims: lambda s: on(real(s.a, 1, s.b, 1), [0, 1, -1]),
    aten.unsqueeze.default: lambda s: on(real(s.a, s.b), -1),
    aten.permute.default: lambda s: on(real(s.a, s.b, s.c), [2, 0, -2]),
    aten.transpose.int: lambda s: on(real(s.a, s.b, s.c), 0, -1),
    aten.t.default: [lambda s: on(real(s.a, s.b)), lambda s: on(real(s.a))],
    aten.expand.default: lambda s: on(real(s.b, 1, s.c), [s.a, -1, s.d, s.c]),
    aten.select.int: lambda s: on(real(s.a, s.b, s.c), -1, s.c - 1),
    aten.unbind.int: lambda s: on(real(s.a, s.b, s.c), 1),
    aten.select_backward.default: lambda s: on(real(s.a, s.b), [s.a, s.c, s.b], 1, 0),
    aten.select_scatter.default: lambda s: on(real(s.a, s.b, s.c), real(s.a, s.c), 1, 0),
    aten.slice.Tensor: [
        lambda s: on(real(s.a, s.b), 1, 0, 1),
        lambda s: on(real(s.a, s.b), 1, 0, s.b),
        lambda s: on(real(s.a, s.b), 0, 0, 2**63 - 1),
    ],
    aten.slice_backward.default: lambda s: on(real(s.a, 1, s.c), [s.a, s.b, s.c], 1, 0, 1, 1),
    aten.slice_scatter.default: lambda s: on(real(s.a, s.b, s.c), real(s.a, 1, s.c), 1, 0, 1),
    aten.split.Tensor: [
        lambda s: on(real(s.a, s.b), max(s.b // 2, 1), 1),
        lambda s: on(real(s.a, s.b), 1),
    ],
    aten.split_with_sizes.default: lambda s: on(real(s.a, s.b + 1), [1, s.b], -1),
    aten.cat.default: [
        lambda s: on([real(s.a, s.b), real(s.a, s.c)], -1),
        lambda s: on([real(s.a, s.b), real(s.a, s.b)]),
    ],
    aten.stack.default: lambda s: on([real(s.a, s.b), real(s.a, s.b)], -1),
    aten.constant_pad_nd.default: [
        lambda s: on(real(s.a, s.b), [0, 1], -100.0),
        lambda s: on(real(s.a, s.b), [0, 0, 1, 1]),
    ],
    aten.repeat.default: lambda s: on(real(s.a, s.b), [2, 1, 3]),
    extremes.is_extreme: [
        lambda s: on(real(s.a, s.b, s.c), [1], "max"),
        lambda s: on(real(s.a, s.b, s.c), [], "min"),
        lambda s: on(real(s.a, s.b, s.c), [0, 2], "min"),
        lambda s: on(real(s.a, s.b), [], "median"),
    ],
    extremes.is_scattered_extreme: [
        lambda s: on(real(s.a, s.b), ids(s.b, s.a, s.c), real(s.a, s.c), 1, "amax", True, True),
        lambda s: on(real(s.a, s.b), ids(s.b, s.a, s.c), real(s.a, s.c), 1, "amin", True, False),
    ],
    extremes.cdist_backward: lambda s: on(
        real(s.a, s.b, s.c), real(s.a, s.b, s.d), real(s.a, s.c, s.d), math.inf
    ),
    norms.channel_sum: [lambda s: on(real(s.a, s.b)), lambda s: on(real(s.a, s.b, s.c, s.d))],
    norms.squared_deviation: lambda s: on(real(s.a, s.b, s.c), real(s.b)),
    norms.scaled_product: lambda s: on(
        real(s.a, s.b, s.c), real(s.a, s.b, s.c), real(s.b), real(s.b)
    ),
    norms.normalize: [
        lambda s: on(real(s.a, s.b, s.c), real(s.b), real(s.b), real(s.b), real(s.b)),
        lambda s: on(real(s.a, s.b), real(s.b), real(s.b), None, None),
    ],
    norms.normalize_backward: lambda s: on(
        real(s.a, s.b, s.c), real(s.a, s.b, s.c), *(real(s.b) for _ in range(5)), 24
    ),
    ops.square_sum: [lambda s: on(real(s.a, s.b, s.c), FLOAT), lambda s: on(real(s.c), FLOAT)],
    ops.rms_norm: [
        lambda s: on(
            real(s.a, s.b, s.c), real(s.a, s.b) ** 2, real(s.c), 7, 1e-5, FLOAT, FLOAT, FLOAT
        ),
        lambda s: on(real(s.a, s.c), real(s.a) ** 2, None, 7, 1e-5, FLOAT, FLOAT, FLOAT),
    ],
    ops.rms_product: [
        lambda s: on(real(s.a, s.b, s.c), real(s.a, s.b, s.c), real(s.c), FLOAT),
        lambda s: on(real(s.a, s.c), real(s.a, s.c), None, FLOAT),
    ],
    ops.rms_norm_backward: [
        lambda s: on(
            *(real(s.a, s.b, s.c) for _ in range(2)),
            real(s.a, s.b) ** 2,
            real(s.a, s.b),
            real(s.c),
            7,
            1e-5,
            FLOAT,
        ),
        lambda s: on(
            *(real(s.a, s.c) for _ in range(2)), real(s.a) ** 2, real(s.a), None, 7, 1e-5, FLOAT
        ),
    ],
    ops.rms_weight_gradient: lambda s: on(
        *(real(s.a, s.b, s.c) for _ in range(2)), real(s.a, s.b) ** 2, 7, 1e-5, FLOAT
    ),
    aten.native_group_norm.default: [
        lambda s: grouped(s, 1),
        lambda s: grouped(s, 2, affine=False),
    ],
    aten.native_group_norm_backward.default: [
        lambda s: grouped_backward(s, 1),
        lambda s: grouped_backward(s, 3),
    ],
    aten.max_pool2d_with_indices.default: lambda s: on(real(s.a, s.b, 4, 4), [2, 2]),
    aten.max_pool2d_with_indices_backward.default: lambda s: pooled2d_backward(s),
    aten._unsafe_index.Tensor: lambda s: on(real(s.a, s.b, s.c), [None, ids(s.b, s.d), None]),
    aten._unsafe_index_put.default: lambda s: on(
        real(s.a, s.b), [None, torch.randperm(s.b)], real(s.a, s.b), True
    ),
    random.keep_mask: lambda s: on(torch.tensor(7), [s.a, s.b, s.c], 0.5, draw=1),
    random.uniform: lambda s: on(torch.tensor(7), [s.a, s.b], -1.0, 3.0, torch.float64, draw=1),
    random.normal: lambda s: on(torch.tensor(7), [s.a, s.b], 0.0, 1.0, torch.float64, draw=0),
    random.randint: lambda s: on(torch.tensor(7), [s.a, s.b], 0, 9, torch.int64, draw=2),
    random.masked_scale: lambda s: on(real(s.a, s.b), ids(2, s.a, s.b).bool(), 2.0),
    random.gamma: gammas,
    aten._standard_gamma_grad.default: lambda s: on(
        ids(4, s.a, s.b).double() + 0.5, ids(8, s.a, s.b).double() + 0.5
    ),
    aten._dirichlet_grad.default: shares,
    aten.argsort.stable: lambda s: on(real(s.a, s.b, s.c), stable=True, dim=1),
    operator.getitem: None,  # see below: its operand is a result of another op
    aten.index.Tensor: [
        lambda s: on(real(s.a, s.b), [ids(s.a, s.c, 1), ids(s.b, s.d)]),
        lambda s: on(real(s.a, s.b, s.c), [None, ids(s.b, s.d)]),
        lambda s: on(real(s.a, s.b, s.c), [ids(s.a, s.d), None, ids(s.c, s.d)]),
        lambda s: on(real(s.a, s.b), [real(s.a, s.b) > 0]),
    ],
    aten.index_put.default: [
        lambda s: on(real(s.a, s.b, s.c), [ids(s.a, s.d)], real(s.d, s.b, s.c), True),
        lambda s: on(real(s.a, s.b, s.c), [None, ids(s.b, s.d)], real(s.a, s.d, s.c), True),
        lambda s: on(real(s.a, s.b), [ids(s.a, s.d, 2)], real(s.d, 2, s.b), True),
        lambda s: on(
            real(s.a, s.b, 3, 4),
            [None, None, ids(3, s.c, 1), ids(4, s.d)],
            real(s.a, s.b, s.c, s.d),
            True,
        ),
        lambda s: on(real(s.a, 3, 4, s.b), [None, ids(3, s.c), ids(4, s.c)], real(s.c, s.b), True),
        lambda s: on(
            real(s.a, s.b, 3, s.d), [ids(s.a, s.c), None, ids(3, s.c)], real(s.c, s.b, s.d), True
        ),
        lambda s: on(real(s.a, s.b, s.c), [real(s.a, s.b) > 0], real(1)),
        lambda s: on(real(s.a, s.b, s.c), [None, real(s.b) > 0], real(1, 1, s.c)),
    ],
    aten.gather.default: [
        lambda s: on(real(s.a, s.b, s.c), 1, ids(s.b, s.a, s.d, s.c)),
        lambda s: on(real(s.a, s.b), 1, ids(s.b, 1, s.d)),
    ],
    aten.scatter.value: lambda s: on(real(s.a, s.b), 1, ids(s.b, s.a, 1), 2.0),
    aten.scatter.src: lambda s: on(real(s.a, s.b), 1, ids(s.b, s.a, 1), real(s.a, 1)),
    aten.scatter_add.default: [
        lambda s: on(real(s.a, s.b), 1, ids(s.b, s.a, s.c), real(s.a, s.c)),
        lambda s: on(real(s.a, s.b), 1, ids(s.b, 1, s.c), real(1, s.c)),
    ],
    aten.arange.default: lambda s: on(s.a),
    aten.arange.start: lambda s: on(1, s.a + 1),
    aten.arange.start_step: lambda s: on(0, s.a, 2),
    **dict.fromkeys((aten.zeros.default, aten.ones.default), lambda s: on([s.a, s.b])),
    aten.full.default: lambda s: on([s.a], 2.0),
    ops.constant: lambda s: on([1.0, 2.0], [2], torch.float64, torch.device("cpu")),
    aten.empty.memory_format: None,  # its values are undefined
    aten.new_empty.default: None,
    aten.empty_like.default: None,
    aten.scalar_tensor.default: lambda s: on(1.0),
    aten.eye.default: lambda s: on(s.a),
    **dict.fromkeys((aten.new_zeros.default, aten.new_ones.default), NEW),
    aten.new_full.default: lambda s: on(real(s.a, s.b), [s.a, s.c], 3.0),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), SUM),
    aten.mul.Tensor: [pair, lambda s: on(real(s.a, 1), real(1, s.b)), lambda s: on(real(s.a), 2.0)],
    aten.div.Tensor: lambda s: on(real(s.a, s.b), real(s.b) + 9),
    **dict.fromkeys((aten.mul.Scalar, aten.div.Scalar), lambda s: on(real(s.a, s.b), 3.0)),
    aten.where.self: lambda s: on(real(s.a, 1) > 0, real(s.b), real(s.a, s.b)),
    aten.addcmul.default: lambda s: on(real(s.a, s.b), real(s.b), real(s.a, 1)),
    aten._to_copy.default: [
        lambda s: on(real(s.a, s.b), dtype=torch.bfloat16),
        lambda s: on(real(s.a, s.b).to(torch.bfloat16), dtype=torch.float64),
        lambda s: on(real(s.a, s.b), dtype=torch.int64),
        lambda s: on(ids(9, s.a, s.b), dtype=torch.int64),
    ],
    **dict.fromkeys(
        (aten.neg.default, aten.clone.default, aten.detach.default, aten.alias.default), cube
    ),
    **dict.fromkeys((aten.lift_fresh_copy.default, aten.zero.default), cube),
    **dict.fromkeys((aten.gelu_backward.default, aten.silu_backward.default), graded),
    **dict.fromkeys((aten.tanh_backward.default, aten.sigmoid_backward.default), graded),
    aten.softplus_backward.default: lambda s: on(real(s.a, s.b), real(s.a, s.b), 1.0, 0.5),
    aten.threshold_backward.default: lambda s: on(real(s.a, s.b), real(s.a, s.b), 0.5),
    aten.masked_fill.Scalar: [
        lambda s: on(real(s.a, s.b), real(s.b) > 0, 0),
        lambda s: on(real(s.a, s.b), real(s.b) > 0, -math.inf),
    ],
    aten.masked_fill.Tensor: lambda s: on(real(s.a, s.b), real(s.b) > 0, real()),
    aten.copy.default: lambda s: on(real(s.a, s.b), real(s.b)),
    aten.fill.Scalar: lambda s: on(real(s.a, s.b), 2.0),
    aten.fill.Tensor: lambda s: on(real(s.a, s.b), real()),
    aten.floor_divide.default: lambda s: on(real(s.a, s.b), real(s.b) + 9),
    **dict.fromkeys((aten.zeros_like.default, aten.ones_like.default), cube),
    aten.full_like.default: lambda s: on(real(s.a, s.b), 2.0),
    # ops with the pointwise tag of torch
    aten.pow.Tensor_Scalar: lambda s: on(real(s.a, s.b), 2),
    aten.bitwise_and.Tensor: lambda s: on(real(s.a, s.b) > 0, real(s.b) > 0),
    aten.add.Scalar: lambda s: on(real(s.a, s.b), 2.0),
    aten.rsub.Scalar: lambda s: on(real(s.a, s.b), 2.0),
    aten.exp.default: cube,
}
