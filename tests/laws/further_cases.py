"""Cases like those of `rule_cases`, for the rows of `autopar.rules.further`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from rule_cases import DIM, DIMS, VARIANCE, Built, Case, aten, cube, graded, ids, last, on, real

from autopar.rules.further import WINDOWS


def ordered(rows: torch.Tensor, values: torch.Tensor) -> Built:
    """Return the operands of searchsorted in unsorted rows with a sorter."""
    return on(rows, values, sorter=rows.argsort())


def image(s: Any) -> torch.Tensor:
    return real(s.a, s.b, 4, 5)


def padded_backward(s: Any) -> Built:
    return on(real(s.a, s.b, 6, 6), image(s), [1, 0, 1, 1])


def sampled(s: Any) -> Built:
    return on(image(s), torch.rand(s.a, s.c, s.d, 2).double() * 2 - 1, 0, 0, False)


def sampled_backward(s: Any) -> Built:
    return on(real(s.a, s.b, s.c, s.d), *sampled(s)[0], [True, True])


def pooled_backward(s: Any) -> Built:
    out, indices = aten.adaptive_max_pool2d.default(x := image(s), [2, 2])
    return on(real(*out.shape), x, indices)


def distances(s: Any) -> Built:
    return on(real(s.a, s.b, 3), real(s.a, s.c, 3) + 9, 2.0, None)


def distances_backward(s: Any) -> Built:
    (x, y, p, _), _ = distances(s)
    return on(real(s.a, s.b, s.c), x, y, p, aten._cdist_forward.default(x, y, p, None))


def window(is_named: bool) -> Case:
    """Return the length of a window and, if `is_named`, a keyword that makes it periodic."""
    return lambda s: on(s.a, *[True] * is_named)


def matrices(s: Any) -> Built:
    x = real(s.a, s.b, 3, 3)
    return on(x @ x.mT + torch.eye(3).double())


def waves(*shape: int) -> torch.Tensor:
    return torch.complex(real(*shape), real(*shape))


def grouped(
    first: tuple[int, ...],
    second: tuple[int, ...],
    ends: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Case:
    def case(s: Any) -> Built:
        return on(
            real(*first).to(dtype),
            real(*second).to(dtype),
            torch.tensor([4, 4, 16], dtype=torch.int32) if ends else None,
        )

    return case


FURTHER_CASES: Mapping[Any, Case | list[Case]] = {
    aten.elu_backward.default: lambda s: on(real(s.a, s.b), 1.0, 1.0, 1.0, False, real(s.a, s.b)),
    aten.leaky_relu_backward.default: lambda s: on(*graded(s)[0], 0.1, False),
    aten.hardtanh_backward.default: lambda s: on(*graded(s)[0], -1.0, 1.0),
    aten.hardshrink_backward.default: lambda s: on(*graded(s)[0], 0.5),
    aten.softshrink_backward.default: lambda s: on(*graded(s)[0], 0.5),
    **dict.fromkeys(
        (
            aten.hardswish_backward.default,
            aten.hardsigmoid_backward.default,
            aten.mish_backward.default,
        ),
        graded,
    ),
    aten.log_sigmoid_backward.default: lambda s: on(
        real(s.a, s.b), x := real(s.a, s.b), aten.log_sigmoid_forward.default(x)[1]
    ),
    aten._prelu_kernel_backward.default: lambda s: on(real(s.a, s.b), real(s.a, s.b), real(1, s.b)),
    aten._prelu_kernel.default: lambda s: on(real(s.a, s.b), real(1, s.b)),
    **dict.fromkeys((aten.hardswish.default, aten.log_sigmoid_forward.default), cube),
    aten.glu.default: lambda s: on(real(s.a, 2 * s.b), 1),
    aten.glu_backward.default: lambda s: on(real(s.a, s.b), real(s.a, 2 * s.b), -1),
    **dict.fromkeys(
        (aten.reflection_pad1d.default, aten.replication_pad1d.default),
        lambda s: on(real(s.a, s.b, 4), [1, 2]),
    ),
    **dict.fromkeys(
        (aten.reflection_pad2d.default, aten.replication_pad2d.default),
        lambda s: on(image(s), [1, 0, 1, 1]),
    ),
    aten.replication_pad3d.default: lambda s: on(real(s.a, s.b, 2, 2, 2), [1, 0, 1, 1, 0, 0]),
    aten.reflection_pad1d_backward.default: lambda s: on(
        real(s.a, s.b, 7), real(s.a, s.b, 4), [1, 2]
    ),
    **dict.fromkeys(
        (aten.reflection_pad2d_backward.default, aten.replication_pad2d_backward.default),
        padded_backward,
    ),
    aten.upsample_nearest1d.default: [
        lambda s: on(real(s.a, s.b, 4), [6]),
        lambda s: on(real(s.a, s.b, 4), [8]),
    ],
    aten.upsample_nearest2d.default: [
        lambda s: on(image(s), [6, 8]),
        lambda s: on(real(s.a, s.b, 4, 6), [8, 12]),
        lambda s: on(real(s.a, s.b, 4, 6), [8, 12], 2.3, 2.9),
    ],
    **dict.fromkeys(
        (aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default),
        lambda s: on(image(s), [6, 8], False),
    ),
    **dict.fromkeys(
        (aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default),
        lambda s: on(image(s), [2, 3], False),
    ),
    **dict.fromkeys(
        (
            aten._upsample_bilinear2d_aa_backward.default,
            aten._upsample_bicubic2d_aa_backward.default,
        ),
        lambda s: on(real(s.a, s.b, 2, 3), [2, 3], [s.a, s.b, 4, 5], False),
    ),
    aten.upsample_nearest2d_backward.default: lambda s: on(
        real(s.a, s.b, 6, 8), [6, 8], [s.a, s.b, 4, 5]
    ),
    **dict.fromkeys(
        (aten.upsample_bilinear2d_backward.default, aten.upsample_bicubic2d_backward.default),
        lambda s: on(real(s.a, s.b, 6, 8), [6, 8], [s.a, s.b, 4, 5], False),
    ),
    aten.upsample_nearest3d.default: lambda s: on(real(s.a, s.b, 2, 2, 2), [4, 2, 3]),
    aten.upsample_trilinear3d.default: lambda s: on(real(s.a, s.b, 2, 2, 2), [4, 2, 3], False),
    aten.upsample_nearest3d_backward.default: lambda s: on(
        real(s.a, s.b, 4, 2, 3), [4, 2, 3], [s.a, s.b, 2, 2, 2]
    ),
    aten.upsample_trilinear3d_backward.default: lambda s: on(
        real(s.a, s.b, 4, 2, 3), [4, 2, 3], [s.a, s.b, 2, 2, 2], False
    ),
    aten.pixel_shuffle.default: lambda s: on(real(s.a, 4 * s.b, 2, 3), 2),
    aten.pixel_unshuffle.default: lambda s: on(real(s.a, s.b, 4, 2), 2),
    aten.native_channel_shuffle.default: [
        lambda s: on(real(s.a, 4, 2, 3), 2),
        lambda s: on(real(s.a, 4, 3, 2, 3), 2),
    ],
    aten.adaptive_max_pool2d.default: lambda s: on(image(s), [2, 2]),
    aten.adaptive_max_pool2d_backward.default: pooled_backward,
    aten.im2col.default: lambda s: on(image(s), [2, 2], [1, 1], [0, 0], [1, 1]),
    aten.col2im.default: lambda s: on(
        real(s.a, 4 * s.b, 12), [4, 5], [2, 2], [1, 1], [0, 0], [1, 1]
    ),
    aten.grid_sampler_2d.default: sampled,
    aten.grid_sampler_2d_backward.default: sampled_backward,
    aten._fft_c2c.default: lambda s: on(waves(s.a, s.b, s.c), [0, 2], 0, True),
    aten._fft_r2c.default: lambda s: on(real(s.a, s.b, s.c), [1], 0, True),
    aten._fft_c2r.default: lambda s: on(waves(s.a, s.b, 3), [2], 0, 4),
    aten.conj_physical.default: lambda s: on(waves(s.a, s.b)),
    aten.view_as_real.default: lambda s: on(waves(s.a, s.b)),
    aten.view_as_complex.default: lambda s: on(real(s.a, s.b, 2)),
    **dict.fromkeys((aten.polar.default, aten.complex.default), graded),
    aten.unfold.default: lambda s: on(real(s.a, 4, s.b), 1, 2, 1),
    aten.unfold_backward.default: lambda s: on(real(s.a, 3, s.b, 2), [s.a, 4, s.b], 1, 2, 1),
    aten.diagonal.default: lambda s: on(real(s.a, s.b, s.c), 0, 0, -1),
    aten.diagonal_backward.default: lambda s: on(real(s.b, 3), [3, s.b, 3], 0, 0, 2),
    aten.unsafe_split.Tensor: lambda s: on(real(s.a, s.b), max(s.b // 2, 1), 1),
    **dict.fromkeys(
        (
            aten.argsort.default,
            aten.cumprod.default,
            aten.cummax.default,
            aten.logcumsumexp.default,
        ),
        last,
    ),
    **dict.fromkeys((aten.median.dim,), DIM),
    **dict.fromkeys((aten.std.dim, aten.var_mean.dim), DIMS),
    aten.std_mean.correction: VARIANCE,
    aten.norm.ScalarOpt_dim: lambda s: on(real(s.a, s.b, s.c), 2, [1], True),
    **dict.fromkeys((aten.norm.Scalar, aten.prod.default, aten.median.default), cube),
    **dict.fromkeys(
        (aten.nansum.default, aten.count_nonzero.dim_IntList),
        lambda s: on(real(s.a, s.b, s.c), [0, 2]),
    ),
    aten.searchsorted.Tensor: [
        lambda s: on(real(s.c).sort()[0], real(s.a, s.b)),
        lambda s: on(real(s.a, s.b, s.c).sort()[0], real(s.a, s.b, s.d)),
        lambda s: ordered(real(s.c), real(s.a, s.b)),
        lambda s: ordered(real(s.a, s.b, s.c), real(s.a, s.b, s.d)),
    ],
    aten.renorm.default: lambda s: on(
        real(s.a, s.b, s.c), 2, 1, 0.1
    ),  # less than the norm of almost all slices
    aten.bucketize.Tensor: lambda s: on(real(s.a, s.b), real(s.c).sort()[0]),
    aten.index_select.default: lambda s: on(real(s.a, s.b, s.c), 1, ids(s.b, s.d)),
    aten.index_add.default: lambda s: on(
        real(s.a, s.b, s.c), 1, ids(s.b, s.d), real(s.a, s.d, s.c)
    ),
    aten.index_copy.default: lambda s: on(
        real(s.a, s.b, s.c), 1, torch.randperm(s.b), real(s.a, s.b, s.c)
    ),
    aten.scatter_reduce.two: lambda s: on(
        real(s.a, s.b), 1, ids(s.b, s.a, s.c), real(s.a, s.c), "amax"
    ),
    aten.linspace.default: lambda s: on(0.0, 1.0, s.a),
    **dict.fromkeys((aten.tril_indices.default, aten.triu_indices.default), lambda s: on(s.a, s.b)),
    **{op: window(op._overloadname == "periodic") for op in WINDOWS},
    aten.mv.default: lambda s: on(real(s.a, s.b), real(s.b)),
    aten.dot.default: lambda s: on(real(s.a), real(s.a)),
    aten.addmv.default: lambda s: on(real(s.a), real(s.a, s.b), real(s.b)),
    aten._euclidean_dist.default: lambda s: on(real(s.a, s.b, 3), real(s.a, s.c, 3) + 9),
    aten._cdist_forward.default: distances,
    aten._cdist_backward.default: distances_backward,
    **dict.fromkeys(
        (aten.linalg_inv_ex.default, aten.linalg_cholesky_ex.default, aten._linalg_det.default),
        matrices,
    ),
    aten._grouped_mm.default: [
        grouped((16, 192), (3, 192, 192)),
        grouped((192, 16), (16, 192)),
        grouped((3, 192, 192), (192, 16)),
        grouped((3, 192, 192), (3, 192, 192), ends=False),
        grouped((16, 32), (3, 32, 16)),
    ],
    aten.linalg_cross.default: lambda s: on(real(s.a, 3, s.b), real(s.a, 3, s.b), dim=1),
}
