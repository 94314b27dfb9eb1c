"""Rules of less common ops: activations without torch's pointwise tag, image and signal ops,
sorting and searching, batched linear algebra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.rules import families as f
from autopar.rules import spatial
from autopar.rules.call import Call, argument
from autopar.rules.notation import EITHER, FIRST, WHOLE, Factors, Row, parse

aten = torch.ops.aten


def index_select(call: Call) -> Factors:
    """Return the factors of index_select: the selected dim is not split in the operand, and
    parallel in the index and the result."""
    rank = len(call.inputs[0].shape)
    dim = argument(call, "dim") % max(rank, 1)
    term = tuple(f"d{d}" for d in range(rank))
    source = tuple(WHOLE if d == dim else x for d, x in enumerate(term))
    result = tuple("i" if d == dim else x for d, x in enumerate(term))
    return Factors((source, ("i",)[: len(call.inputs[1].shape)]), (result,), linear=((0,),))


def index_add(linear: bool) -> f.Family:
    """Return the rule of index_add and index_copy: ``dim`` is not split.

    Args:
        linear: whether the op is linear in the tensor and the added rows together.
    """

    def rule(call: Call) -> Factors:
        """Return one letter per dim other than ``dim``; the index is not split."""
        rank = len(call.inputs[0].shape)
        dim = argument(call, "dim") % max(rank, 1)
        term = tuple(WHOLE if d == dim else f"d{d}" for d in range(rank))
        return Factors(
            (term, (WHOLE,) * len(call.inputs[1].shape), term),
            (term,),
            linear=((0, 2),) if linear else (),
        )

    return rule


def search_factors(call: Call) -> Factors:
    """Return the factors of searchsorted: each row of values is searched in its own sorted row, or
    all values in one row; the third operand is the order of an unsorted row."""
    one = len(call.inputs[0].shape) == 1
    reads = ("_", "...", "_") if one else ("... _", "... v", "... _")
    return parse(f"{', '.join(reads[: len(call.inputs)])} -> {reads[1]}", call)


def renorm(call: Call) -> Factors:
    """Return the factors of renorm, which limits the norm of each slice along ``dim``. Discovery
    would not notice the limit if all test values are below it."""
    rank = len(call.inputs[0].shape)
    dim = argument(call, "dim") % max(rank, 1)
    term = " ".join("v" if d == dim else "_" for d in range(rank))
    return parse(f"{term} -> {term}", call)


def columns(call: Call) -> Factors:
    """Return the factors of im2col and col2im: the windows of a channel are not split. The dim of a
    single channel has no letter."""
    (image, _), to_columns = (
        sorted((*call.inputs, *call.outputs), key=lambda i: -len(i.shape)),
        call.target is aten.im2col.default,
    )
    c = "c" if image.shape[-3] > 1 else WHOLE
    terms = f"n {c} _ _", f"n {c} _"
    return parse(
        f"{terms[0]} -> {terms[1]}" if to_columns else f"{terms[1]} -> {terms[0]}",
        call,
        linear=((0,),),
    )


def unfold(call: Call) -> Factors:
    """Return the factors of unfold: ``dimension`` and the new last dim of windows are not split."""
    rank = len(call.inputs[0].shape)
    dim = argument(call, "dimension") % max(rank, 1)
    term = tuple(WHOLE if d == dim else f"d{d}" for d in range(rank))
    return Factors((term,), ((*term, WHOLE),), linear=((0,),))


def unfold_backward(call: Call) -> Factors:
    """Return the factors of unfold_backward, as `unfold`."""
    rank = len(call.outputs[0].shape)
    dim = argument(call, "dim") % max(rank, 1)
    term = tuple(WHOLE if d == dim else f"d{d}" for d in range(rank))
    return Factors(((*term, WHOLE),), (term,), linear=((0,),))


def diagonal(call: Call) -> Factors:
    """Return the factors of diagonal: its two dims and the resulting dim are not split."""
    rank = len(call.inputs[0].shape)
    diagonal_dims = {argument(call, "dim1", 0) % rank, argument(call, "dim2", 1) % rank}
    term = tuple(WHOLE if d in diagonal_dims else f"d{d}" for d in range(rank))
    return Factors((term,), ((*(x for x in term if x != WHOLE), WHOLE),), linear=((0,),))


def diagonal_backward(call: Call) -> Factors:
    """Return the factors of diagonal_backward, as `diagonal`."""
    rank = len(call.outputs[0].shape)
    diagonal_dims = {argument(call, "dim1", 0) % rank, argument(call, "dim2", 1) % rank}
    term = tuple(WHOLE if d in diagonal_dims else f"d{d}" for d in range(rank))
    return Factors(((*(x for x in term if x != WHOLE), WHOLE),), (term,), linear=((0,),))


def grouped_mm(call: Call) -> Factors:
    """Return the factors of a product per group of rows, or of the contracted dim; the ends of the
    groups are the third operand. Grouped dims are not split.

    torch requires that rows start at multiples of 16 bytes, also in a part. Therefore other dims
    are only split if their size is a multiple of 64.
    """
    first, second = call.inputs[0].shape, call.inputs[1].shape
    m, k, n = (
        x if size % 64 == 0 else WHOLE
        for x, size in (("m", first[-2]), ("k", first[-1]), ("n", second[-1]))
    )
    text = {
        (2, 3): f"_ {k}, _ {k} {n}, _ -> _ {n}",
        (2, 2): f"{m} _, _ {n}, _ -> _ {m} {n}",
        (3, 2): f"_ {m} {k}, {k} _, _ -> {m} _",
        (3, 3): f"e {m} {k}, e {k} {n} -> e {m} {n}",
    }[len(first), len(second)]
    return parse(text, call, EITHER)


ACTIVATIONS: Mapping[Any, f.Family] = {
    **{
        op: f.pointwise(FIRST)
        for op in (
            aten.elu_backward.default,
            aten.leaky_relu_backward.default,
            aten.hardtanh_backward.default,
            aten.hardswish_backward.default,
            aten.hardsigmoid_backward.default,
            aten.hardshrink_backward.default,
            aten.softshrink_backward.default,
            aten.mish_backward.default,
            aten.log_sigmoid_backward.default,
            aten._prelu_kernel_backward.default,
        )
    },
    **{
        op: f.pointwise()
        for op in (
            aten.hardswish.default,
            aten.log_sigmoid_forward.default,
            aten._prelu_kernel.default,
        )
    },
    aten.glu.default: f.along(),
    aten.glu_backward.default: f.along(FIRST),
}

_ONE, _TWO, _THREE = "... _", "... _ _", "... _ _ _"


RESIZE_GRADIENTS = (
    aten._upsample_bilinear2d_aa_backward.default,
    aten._upsample_bicubic2d_aa_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d_backward.default,
    aten.upsample_trilinear3d_backward.default,
)


def _resize_family(dims: str, *ops: Any) -> dict[Any, f.Family]:
    return {op: Row(f"{dims} -> {dims}", FIRST) for op in ops}


IMAGES: Mapping[Any, f.Family] = {
    **_resize_family(_ONE, aten.reflection_pad1d.default, aten.replication_pad1d.default),
    **_resize_family(_TWO, aten.reflection_pad2d.default, aten.replication_pad2d.default),
    **_resize_family(_TWO, aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default),
    **_resize_family(
        _TWO, aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default
    ),
    **_resize_family(_TWO, *(op for op in RESIZE_GRADIENTS if "2d" in str(op))),
    **_resize_family(_THREE, aten.replication_pad3d.default, aten.upsample_trilinear3d.default),
    **_resize_family(_THREE, *(op for op in RESIZE_GRADIENTS if "3d" in str(op))),
    **_resize_family(_THREE, aten.pixel_shuffle.default, aten.pixel_unshuffle.default),
    aten.native_channel_shuffle.default: Row("n _ ... -> n _ ...", FIRST),
    aten.reflection_pad1d_backward.default: Row(f"{_ONE}, {_ONE} -> {_ONE}", FIRST),
    aten.reflection_pad2d_backward.default: Row(f"{_TWO}, {_TWO} -> {_TWO}", FIRST),
    aten.replication_pad2d_backward.default: Row(f"{_TWO}, {_TWO} -> {_TWO}", FIRST),
    aten.upsample_nearest1d.default: spatial.nearest(1),
    aten.upsample_nearest2d.default: spatial.nearest(2),
    aten.upsample_nearest3d.default: spatial.nearest(3),
    aten.upsample_nearest2d_backward.default: spatial.nearest(2, gradient=True),
    aten.upsample_nearest3d_backward.default: spatial.nearest(3, gradient=True),
    aten.adaptive_max_pool2d.default: Row(f"{_TWO} -> {_TWO}, {_TWO}"),
    aten.adaptive_max_pool2d_backward.default: Row(f"{_TWO}, {_TWO}, {_TWO} -> {_TWO}", FIRST),
    aten.im2col.default: columns,
    aten.col2im.default: columns,
    aten.grid_sampler_2d.default: Row("n c _ _, n h w _ -> n c h w", FIRST),
    aten.grid_sampler_2d_backward.default: Row(
        "n c h w, n c _ _, n h w _ -> n c _ _, n h w _", FIRST
    ),
}

SIGNALS: Mapping[Any, f.Family] = {
    **{
        op: f.along(FIRST)
        for op in (aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
    },
    aten.view_as_real.default: Row("... -> ... _", FIRST),
    aten.view_as_complex.default: Row("... _ -> ...", FIRST),
    **{
        op: f.pointwise()
        for op in (aten.polar.default, aten.complex.default, aten.conj_physical.default)
    },
    aten.unfold.default: unfold,
    aten.unfold_backward.default: unfold_backward,
    aten.diagonal.default: diagonal,
    aten.diagonal_backward.default: diagonal_backward,
    aten.unsafe_split.Tensor: f.along(FIRST, dim=0),
}

WINDOWS = (
    *(
        getattr(aten, f"{name}_window").default
        for name in ("bartlett", "blackman", "hamming", "hann", "kaiser")
    ),
    *(
        getattr(aten, f"{name}_window").periodic
        for name in ("bartlett", "blackman", "hamming", "hann", "kaiser")
    ),
)

ORDERS: Mapping[Any, f.Family] = {
    **{
        op: f.along()
        for op in (
            aten.argsort.default,
            aten.cumprod.default,
            aten.cummax.default,
            aten.logcumsumexp.default,
        )
    },
    **{
        op: f.reduction(whole=True)
        for op in (
            aten.median.dim,
            aten.std.dim,
            aten.std_mean.correction,
            aten.var_mean.dim,
            aten.norm.ScalarOpt_dim,
            aten.norm.Scalar,
            aten.prod.default,
            aten.median.default,
        )
    },
    **{op: f.reduction() for op in (aten.nansum.default, aten.count_nonzero.dim_IntList)},
    aten.searchsorted.Tensor: search_factors,
    aten.bucketize.Tensor: Row("..., _ -> ..."),
    aten.renorm.default: renorm,
    aten.index_select.default: index_select,
    aten.index_add.default: index_add(linear=True),
    aten.index_copy.default: index_add(linear=True),
    aten.scatter_reduce.two: f.scatter(linear=False),
    **{
        op: f.factory
        for op in (
            aten.linspace.default,
            aten.tril_indices.default,
            aten.triu_indices.default,
            *WINDOWS,
        )
    },
}

ALGEBRA: Mapping[Any, f.Family] = {
    aten.mv.default: Row("m k, k -> m", EITHER),
    aten.dot.default: Row("k, k -> ", EITHER),
    aten.addmv.default: Row("m, m _, _ -> m", ((0, 1), (0, 2))),
    aten._euclidean_dist.default: Row("... p _, ... r _ -> ... p r"),
    aten._cdist_forward.default: Row("... p _, ... r _ -> ... p r"),
    aten._cdist_backward.default: Row("... p r, ... p _, ... r _, ... p r -> ... p _", FIRST),
    aten.linalg_inv_ex.default: Row("... _ _ -> ... _ _, ..."),
    aten.linalg_cholesky_ex.default: Row("... _ _ -> ... _ _, ..."),
    aten._linalg_det.default: Row("... _ _ -> ..., ... _ _, ... _"),
    aten.linalg_cross.default: f.along(EITHER),
    aten._grouped_mm.default: grouped_mm,
}

FURTHER: Mapping[Any, f.Family] = {**ACTIVATIONS, **IMAGES, **SIGNALS, **ORDERS, **ALGEBRA}
