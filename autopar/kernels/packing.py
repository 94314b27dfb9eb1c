"""``pack`` and ``unpack``, which copy many tensors into one bucket and back in one pass, with a
cast and a scale.

A bucket is a tensor [count, row]. Row r contains the shard of rank r of every tensor, one *segment*
per tensor. A reduce-scatter of a bucket therefore returns the row of each rank, and an all-gather
of rows returns a bucket. `BucketLayout` defines the position of each segment. A picture and the
order of sums are at the top of ``autopar_csrc/pack.cu``. `reference_pack` and `reference_unpack`
define the ops in torch, and run if there is no compiled library. `into_bucket` and `from_bucket`
are the steps of emitted graphs.

The gradient of pack is unpack with the same scale and the dtypes of the tensors, and vice versa.
The sums of squares are not differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from autopar.core.layout import part_range
from autopar.errors import KernelError
from autopar.kernels import library

# --------------------------------------------------------------------------------------------------
# The layout of a bucket.

ALIGN = 8  # elements, so that a segment is aligned to 16 bytes in any dtype
LIMIT = 2**31 - 64  # largest number of elements of a segment
CHUNK = 16384  # number of elements of a segment whose squares are summed together
_REMEMBERED = 1024  # number of cached layouts


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The positions of the shards of tensors in a bucket.

    Attributes:
        sizes: the shapes of the full tensors, each with at least one dim.
        dims: the dim of each tensor that is sharded (`autopar.core.layout.part_range`).
        parts: the number of shards.
    """

    sizes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    parts: int

    def segments(self) -> tuple[int, ...]:
        """Return the number of elements of each tensor's segment, including padding. It is equal in
        all rows."""
        return _compute_or_recall(_segments, self)

    @property
    def row(self) -> int:
        """The number of elements of a row."""
        return sum(self.segments())

    def lengths(self) -> tuple[int, ...]:
        """Return the lengths of the sharded dims in the full tensors."""
        return tuple(size[dim] for size, dim in zip(self.sizes, self.dims, strict=True))

    def local_sizes(self, first: int, count: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of tensors that consist of the shards of `count` ranks from `first`
        on."""
        return _compute_or_recall(_local_sizes, self, first, count)


# Cached, so that the host does not delay the device: all steps use the same few layouts.
@lru_cache(maxsize=_REMEMBERED)
def _segments(layout: BucketLayout) -> tuple[int, ...]:
    cut = zip(layout.sizes, layout.dims, strict=True)
    largest = (
        math.prod(with_length(size, dim, -(-size[dim] // layout.parts))) for size, dim in cut
    )
    return tuple(-(-num // ALIGN) * ALIGN for num in largest)


@lru_cache(maxsize=_REMEMBERED)
def _local_sizes(layout: BucketLayout, first: int, count: int) -> tuple[tuple[int, ...], ...]:
    lengths = (
        sum(part_range(n, [layout.parts], [rank])[1] for rank in range(first, first + count))
        for n in layout.lengths()
    )
    return tuple(
        with_length(size, dim, n)
        for size, dim, n in zip(layout.sizes, layout.dims, lengths, strict=True)
    )


def _compute_or_recall(remembered: Any, layout: BucketLayout, *settings: int) -> Any:
    """Call a cached function. If lengths are symbolic, as under a compiler, bypass the cache."""
    is_known = all(type(length) is int for size in layout.sizes for length in size)
    return (remembered if is_known else remembered.__wrapped__)(layout, *settings)


def with_length(size: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    """Return a shape with another length of one dim.

    Args:
        size: the shape.
        dim, length: the dim, and its new length.
    """
    return (*size[:dim], length, *size[dim + 1 :])


@lru_cache(maxsize=_REMEMBERED)
def places(layout: BucketLayout) -> tuple[tuple[tuple[int, int, int, int, int], ...], int]:
    """Return the place of each tensor in a row, and the number of chunks of a row. A place consists
    of the outer, sharded and inner lengths, and the first element and chunk of the segment."""
    segments = layout.segments()
    if max(*segments, *layout.lengths()) >= LIMIT:
        raise KernelError(
            f"a tensor has {max(segments)} elements per rank, but kernels support at most"
            f" {LIMIT - 1}",
            remedy="pack it in several tensors",
        )
    chunks = [-(-segment // CHUNK) for segment in segments]
    begins = zip(accumulate(segments, initial=0), accumulate(chunks, initial=0), strict=True)
    shapes = zip(layout.sizes, layout.dims, begins, strict=False)  # the last begin is the end
    places_found = (
        (math.prod(size[:dim]), size[dim], math.prod(size[dim + 1 :]), *begin)
        for size, dim, begin in shapes
    )
    return tuple(places_found), sum(chunks)


# --------------------------------------------------------------------------------------------------
# Sums in a fixed order. This defines `autopar_csrc/include/sums.h` in torch; results are bitwise
# equal.
#
# Elements form groups of `GROUP` consecutive elements, and group g belongs to lane g mod `LANES`. A
# lane adds its elements one by one, then the lanes are added in halves. The order depends only on
# the number of elements, so threads and devices do not affect the result.

GROUP = 8
LANES = 256
STRIPE = LANES * GROUP


def ordered_sum(x: Tensor) -> Tensor:
    """Return the sum [...] of a tensor [..., n] over the last dim, in the dtype of `x`."""
    lead = x.shape[:-1]
    stripes = -(-x.shape[-1] // STRIPE)
    filled = torch.nn.functional.pad(x, (0, stripes * STRIPE - x.shape[-1])).view(
        *lead, stripes, LANES, GROUP
    )
    lanes = x.new_zeros(*lead, LANES)
    for stripe in range(stripes):
        for place in range(GROUP):
            lanes = lanes + filled[..., stripe, :, place]
    return add_lanes(lanes)


def add_all(values: Tensor) -> Tensor:
    """Return the sum [...] of values [..., n] over the last dim. Value i belongs to lane i mod
    `LANES`."""
    lead = values.shape[:-1]
    turns = -(-values.shape[-1] // LANES)
    filled = torch.nn.functional.pad(values, (0, turns * LANES - values.shape[-1])).view(
        *lead, turns, LANES
    )
    lanes = values.new_zeros(*lead, LANES)
    for turn in range(turns):
        lanes = lanes + filled[..., turn, :]
    return add_lanes(lanes)


def add_lanes(lanes: Tensor) -> Tensor:
    """Return the sum [...] of lanes [..., LANES], which are added in halves."""
    half = LANES // 2
    while half > 0:
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
        half //= 2
    return lanes[..., 0]


FLOATS = library.FLOATS


def pack(
    tensors: Sequence[Tensor],
    layout: BucketLayout,
    dtype: torch.dtype,
    *,
    first: int = 0,
    count: int | None = None,
    scale: float = 1.0,
    squares: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the bucket of tensors that consist of the shards of `count` ranks from `first` on.

    Args:
        tensors: floating-point tensors with the shapes of `layout.local_sizes`.
        layout, dtype: the layout and the dtype of the bucket.
        first, count: the first rank and the number of ranks; by default, all ranks.
        scale: the factor of every element, in fp32, or in fp64 if either dtype is fp64.
        squares: whether sums of squares are computed.

    Returns:
        The bucket [count, layout.row], and the sum of squares of each tensor's scaled elements in a
        fixed order, fp64 [len(tensors)]; without `squares`, an empty tensor.

    Raises:
        KernelError: if tensors do not match the layout.
    """
    count = layout.parts - first if count is None else count
    return pack_op(
        list(tensors),
        list(layout.lengths()),
        list(layout.dims),
        layout.parts,
        first,
        count,
        dtype,
        scale,
        squares,
    )


def unpack(
    bucket: Tensor,
    layout: BucketLayout,
    dtypes: Sequence[torch.dtype],
    *,
    first: int = 0,
    count: int | None = None,
    scale: float = 1.0,
) -> list[Tensor]:
    """Return the tensors of a bucket [count, layout.row] in new memory.

    Args:
        bucket: the bucket.
        layout, first, count, scale: see `pack`.
        dtypes: the dtypes of the tensors.
    """
    count = layout.parts - first if count is None else count
    sizes = [n for size in layout.sizes for n in size]
    num_dims = [len(size) for size in layout.sizes]
    codes = [library.code_of(dtype) for dtype in dtypes]
    return unpack_op(
        bucket, sizes, num_dims, list(layout.dims), layout.parts, first, count, codes, scale
    )


def reference_pack(
    tensors: Sequence[Tensor],
    layout: BucketLayout,
    dtype: torch.dtype,
    first: int,
    count: int,
    scale: float,
    squares: bool,
) -> tuple[Tensor, Tensor]:
    """Compute `pack` in torch.

    Args:
        tensors, layout, dtype, first, count, scale, squares: see `pack`.
    """
    rows: list[list[Tensor]] = [[] for _ in range(count)]
    sums = []
    device = tensors[0].device if tensors else None
    for tensor, dim, length, segment in zip(
        tensors, layout.dims, layout.lengths(), layout.segments(), strict=True
    ):
        wide = tensor.to(library.wide(tensor.dtype, dtype)) * scale
        parts = [
            _pad_flat(part, segment)
            for part in _parts(wide, dim, length, layout.parts, first, count)
        ]
        for row, part in zip(rows, parts, strict=True):
            row.append(part.to(dtype))
        if squares:
            chunks = [
                _pad_flat(part, -(-segment // CHUNK) * CHUNK).view(-1, CHUNK) for part in parts
            ]
            sums.append(add_all(ordered_sum(torch.cat(chunks).double().square())))
    empty = torch.empty(0, dtype=dtype, device=device)
    bucket = torch.stack([torch.cat([empty, *row]) for row in rows])
    return bucket, torch.stack(sums) if sums else torch.empty(0, dtype=torch.float64, device=device)


def reference_unpack(
    bucket: Tensor,
    layout: BucketLayout,
    dtypes: Sequence[torch.dtype],
    first: int,
    count: int,
    scale: float,
) -> list[Tensor]:
    """Compute `unpack` in torch.

    Args:
        bucket, layout, dtypes, first, count, scale: see `unpack`.
    """
    tensors = []
    columns = bucket.split(list(layout.segments()), dim=1)
    for column, size, dim, dtype in zip(columns, layout.sizes, layout.dims, dtypes, strict=True):
        wide = column.to(library.wide(dtype, bucket.dtype)) * scale
        shapes = [
            with_length(size, dim, part_range(size[dim], [layout.parts], [first + turn])[1])
            for turn in range(count)
        ]
        parts = [wide[turn, : math.prod(shape)].view(shape) for turn, shape in enumerate(shapes)]
        tensors.append(torch.cat(parts, dim).to(dtype))
    return tensors


def _parts(
    tensor: Tensor, dim: int, length: int, parts: int, first: int, count: int
) -> list[Tensor]:
    """Return the flat shards of `count` ranks from `first` on, of which a tensor consists."""
    ranges = [part_range(length, [parts], [rank]) for rank in range(first, first + count)]
    return [tensor.narrow(dim, start - ranges[0][0], n).reshape(-1) for start, n in ranges]


def _pad_flat(flat: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(flat, (0, length - flat.numel()))


@torch.library.custom_op("autopar::pack", mutates_args=())
def _pack(
    tensors: Sequence[Tensor],
    lengths: Sequence[int],
    dims: Sequence[int],
    parts: int,
    first: int,
    count: int,
    dtype: torch.dtype,
    scale: float,
    squares: bool,
) -> tuple[Tensor, Tensor]:
    """Compute `pack`, as a torch op. `lengths` are the full lengths of the sharded dims."""
    layout = BucketLayout(_whole_sizes(tensors, lengths, dims), tuple(dims), parts)
    _check(
        layout,
        [tuple(t.shape) for t in tensors],
        [*(t.dtype for t in tensors), dtype],
        first,
        count,
    )
    if not tensors or not library.has(tensors[0].device):
        return reference_pack(tensors, layout, dtype, first, count, scale, squares)
    device = tensors[0].device
    bucket = torch.empty(count, layout.row, dtype=dtype, device=device)
    contiguous = [t.contiguous() for t in tensors]
    pieces, num_chunks = _pieces(contiguous, layout, device)
    sums = torch.empty(len(tensors) if squares else 0, dtype=torch.float64, device=device)
    scratch = torch.empty(num_chunks * count if squares else 0, dtype=torch.float64, device=device)
    settings = (layout.row, parts, first, count, num_chunks, scale)
    # without chunks, scratch has no address and is not read
    chunk_sums = (
        (scratch.data_ptr() or pieces.data_ptr(), sums.data_ptr()) if squares else (None, None)
    )
    library.launch(
        "ap_pack_bucket",
        device,
        pieces.data_ptr(),
        len(contiguous),
        bucket.data_ptr(),
        library.code_of(dtype),
        *settings,
        *chunk_sums,
    )
    return bucket, sums


@torch.library.custom_op("autopar::unpack", mutates_args=())
def _unpack(
    bucket: Tensor,
    sizes: Sequence[int],
    num_dims: Sequence[int],
    dims: Sequence[int],
    parts: int,
    first: int,
    count: int,
    dtypes: Sequence[int],
    scale: float,
) -> list[Tensor]:
    """Compute `unpack`, as a torch op. `sizes` are the concatenated full shapes, and `dtypes` are
    numbers as in `library.DTYPES`."""
    layout = BucketLayout(_split(sizes, num_dims), tuple(dims), parts)
    tensor_dtypes = [library.DTYPES[code] for code in dtypes]
    shapes = layout.local_sizes(first, count)
    _check(layout, shapes, [*tensor_dtypes, bucket.dtype], first, count)
    if tuple(bucket.shape) != (count, layout.row):
        raise KernelError(
            f"the bucket is {tuple(bucket.shape)}, but its layout is {(count, layout.row)}",
            where="autopar::unpack",
        )
    if not tensor_dtypes or not library.has(bucket.device):
        return reference_unpack(bucket, layout, tensor_dtypes, first, count, scale)
    contiguous_bucket = bucket.contiguous()
    tensors = [
        torch.empty(shape, dtype=dtype, device=bucket.device)
        for shape, dtype in zip(shapes, tensor_dtypes, strict=True)
    ]
    pieces, num_chunks = _pieces(tensors, layout, bucket.device)
    settings = (layout.row, parts, first, count, num_chunks, scale)
    code = library.code_of(bucket.dtype)
    library.launch(
        "ap_unpack_bucket",
        bucket.device,
        pieces.data_ptr(),
        len(tensors),
        contiguous_bucket.data_ptr(),
        code,
        *settings,
    )
    return tensors


def _pieces(
    tensors: Sequence[Tensor], layout: BucketLayout, device: torch.device
) -> tuple[Tensor, int]:
    """Return the table of pieces that index.h declares, and the number of chunks of a row."""
    places_found, num_chunks = places(layout)
    rows: list[int] = []
    for tensor, dim, (outer, length, inner, offset, first_chunk) in zip(
        tensors, layout.dims, places_found, strict=True
    ):
        rows += (
            tensor.data_ptr(),
            library.code_of(tensor.dtype),
            outer,
            length,
            tensor.shape[dim],
            inner,
            offset,
            first_chunk,
        )
    return library.table(rows, device), num_chunks


def _check(
    layout: BucketLayout,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    first: int,
    count: int,
) -> None:
    """Raise KernelError if tensors of these shapes and dtypes do not match the layout."""
    if first < 0 or count < 1 or first + count > layout.parts:
        message = f"ranks {first} to {first + count - 1} do not exist among {layout.parts}"
        raise KernelError(message, remedy="pass first and count within the parts")
    for dtype in dtypes:
        if dtype not in FLOATS:
            raise KernelError(
                f"{dtype} tensors cannot be bucketed", remedy="pack only floating-point tensors"
            )
    for shape, local in zip(shapes, layout.local_sizes(first, count), strict=True):
        if shape != local:
            message = f"a tensor has shape {shape}, but the layout requires {local} for these ranks"
            raise KernelError(message, remedy="see BucketLayout.local_sizes")


def _whole_sizes(
    tensors: Sequence[Tensor], lengths: Sequence[int], dims: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    for tensor, dim in zip(tensors, dims, strict=True):
        if not 0 <= dim < tensor.dim():
            raise KernelError(
                f"a tensor of {tensor.dim()} dims has no dim {dim} to split",
                remedy="view a scalar as [1]; count dims from 0",
            )
    return tuple(
        with_length(tuple(t.shape), dim, length)
        for t, length, dim in zip(tensors, lengths, dims, strict=True)
    )


def _split(sizes: Sequence[int], num_dims: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    ends = list(accumulate(num_dims, initial=0))
    return tuple(tuple(sizes[begin:end]) for begin, end in pairwise(ends))


@_pack.register_fake
def _(
    tensors: Sequence[Tensor],
    lengths: Any,
    dims: Any,
    parts: int,
    first: int,
    count: int,
    dtype: Any,
    scale: float,
    squares: bool,
) -> tuple[Tensor, Tensor]:
    layout = BucketLayout(_whole_sizes(tensors, lengths, dims), tuple(dims), parts)
    device = tensors[0].device if tensors else None
    sums = torch.empty(len(tensors) if squares else 0, dtype=torch.float64, device=device)
    return torch.empty(count, layout.row, dtype=dtype, device=device), sums


@_unpack.register_fake
def _(
    bucket: Tensor,
    sizes: Any,
    num_dims: Any,
    dims: Any,
    parts: int,
    first: int,
    count: int,
    dtypes: Sequence[int],
    scale: float,
) -> list[Tensor]:
    shapes = BucketLayout(_split(sizes, num_dims), tuple(dims), parts).local_sizes(first, count)
    return [
        bucket.new_empty(shape, dtype=library.DTYPES[code])
        for shape, code in zip(shapes, dtypes, strict=True)
    ]


def _remember_pack(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, lengths, dims, *ctx.where, _, ctx.scale, _ = inputs
    ctx.sizes, ctx.dims = _whole_sizes(tensors, lengths, dims), list(dims)
    ctx.codes = [library.code_of(t.dtype) for t in tensors]
    ctx.mark_non_differentiable(output[1])


def _differentiate_pack(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    sizes, num_dims = [n for size in ctx.sizes for n in size], [len(size) for size in ctx.sizes]
    return (
        unpack_op(grad, sizes, num_dims, ctx.dims, *ctx.where, ctx.codes, ctx.scale),
        *(None,) * 8,
    )


def _remember_unpack(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    bucket, sizes, num_dims, dims, *ctx.where, _, ctx.scale = inputs
    ctx.dims, ctx.dtype = list(dims), bucket.dtype
    ctx.lengths = [size[dim] for size, dim in zip(_split(sizes, num_dims), dims, strict=True)]


def _differentiate_unpack(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    return (
        pack_op(grads, ctx.lengths, ctx.dims, *ctx.where, ctx.dtype, ctx.scale, False)[0],
        *(None,) * 8,
    )


_pack.register_autograd(_differentiate_pack, setup_context=_remember_pack)
_unpack.register_autograd(_differentiate_unpack, setup_context=_remember_unpack)
pack_op = torch.ops.autopar.pack.default
unpack_op = torch.ops.autopar.unpack.default


# --------------------------------------------------------------------------------------------------
# Steps of emitted graphs before and after one collective on a bucket.
#
# Before a reduce-scatter and after an all-gather, a bucket has one row per rank; otherwise it has
# one row. Dims are sharded evenly, so these steps do not depend on the rank. They include casts, so
# a reduction in a wider dtype than that of its tensors needs no separate casts.


def into_bucket(
    tensors: Sequence[Tensor], dims: Sequence[int], parts: int, count: int, dtype: torch.dtype
) -> Tensor:
    """Pack tensors that consist of `count` of `parts` equal shards along their dims.

    Args:
        tensors: the tensors; a scalar is treated as a tensor [1].
        dims: the dim of each tensor that is sharded.
        parts, count: the number of shards, and the number of those that the tensors contain.
        dtype: the dtype of the bucket.
    """
    with_dims = [x if x.dim() else x.reshape(1) for x in tensors]
    lengths = [x.shape[dim] * parts // count for x, dim in zip(with_dims, dims, strict=True)]
    bucket: Tensor = pack_op(with_dims, lengths, list(dims), parts, 0, count, dtype, 1.0, False)[0]
    return bucket


def from_bucket(
    bucket: Tensor,
    sizes: Sequence[Sequence[int]],
    dims: Sequence[int],
    parts: int,
    dtypes: Sequence[torch.dtype],
) -> list[Tensor]:
    """Unpack a bucket into new tensors, with as many shards as it has rows.

    Args:
        bucket: the bucket.
        sizes: the shapes of the full tensors, () for a scalar.
        dims, parts: see `into_bucket`.
        dtypes: the dtypes of the tensors.
    """
    shapes = [tuple(size) or (1,) for size in sizes]
    lengths, num_dims = [n for shape in shapes for n in shape], [len(shape) for shape in shapes]
    # kernels also support the dtypes to which a lockstep run promotes
    codes = [library.code_of(dtype) for dtype in dtypes]
    tensors: list[Tensor] = unpack_op(
        bucket, lengths, num_dims, list(dims), parts, 0, bucket.shape[0], codes, 1.0
    )
    return [x if len(size) else x.reshape(()) for x, size in zip(tensors, sizes, strict=True)]
