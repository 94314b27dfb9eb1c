"""``reduce_add_rmsnorm``: the sum over peers' partial results, the residual and the norm after it, in one pass; and its gradient.

The formulas, the dtypes that they are computed in and the order of all sums are at the top of ``autopar_csrc/reduce_add_rmsnorm.cu``;
`reference_forward` and `reference_backward` say the same in plain torch, equal to the last bit on the CPU. The peers' parts are a list of
tensors: those of virtual ranks in one process, or views of memory that peers share. Rows are all dims but the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import KernelError
from autopar.kernels import library
from autopar.kernels.ordered import ordered_sum

BAND = 64  # rows whose shares of the weight's gradient are summed together
FLOATS = library.FLOATS


def reduce_add_rmsnorm(
    parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float, rounded: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """``y = residual + Σ parts``, added in the order of `parts`, ``squares = Σ y²`` of each row, and ``normed = y · rstd · weight``.

    Args:
        parts: one tensor per peer, each like `residual`. residual: [..., hidden]. weight: [hidden]; all of one floating dtype.
        rounded: whether y · rstd is rounded to their dtype before the weight, as some models do.

    Returns:
        y, like `residual`; squares [...] in fp32, or fp64 where they are, through which no gradient flows; normed, like `residual`.

    Raises:
        KernelError: where shapes or dtypes differ.
    """
    return forward_op(list(parts), residual, weight, eps, rounded)


def reference_forward(
    parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float, rounded: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """What `reduce_add_rmsnorm` is, in plain torch."""
    wide = library.wide(residual.dtype)
    total = torch.zeros_like(residual, dtype=wide)
    for part in parts:
        total = total + part.to(wide)
    y = (residual.to(wide) + total).to(residual.dtype)
    values = y.to(wide)
    squares = ordered_sum(values * values)
    scaled = values * _rstd(squares, y.shape[-1], eps)
    if rounded:
        scaled = scaled.to(y.dtype).to(wide)
    return y, squares, (scaled * weight.to(wide)).to(y.dtype)


def reference_backward(
    grad_y: Tensor, grad_normed: Tensor, y: Tensor, squares: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the residual, which is that of every part, and of the weight, in plain torch; no rounding is differentiated."""
    wide = library.wide(y.dtype)
    hidden = y.shape[-1]
    n, values, scale = grad_normed.to(wide), y.to(wide), _rstd(squares, hidden, eps)
    u = n * weight.to(wide)
    mean = (ordered_sum(u * values) / hidden).unsqueeze(-1)
    grad = grad_y.to(wide) + (u * scale - values * (scale * scale * scale * mean))
    shares = (n * values * scale).reshape(-1, hidden)
    bands = -(-shares.shape[0] // BAND)
    filled = torch.nn.functional.pad(shares, (0, 0, 0, bands * BAND - shares.shape[0])).view(bands, BAND, hidden)
    in_bands = _one_by_one(filled.transpose(0, 1))
    return grad.to(y.dtype), _one_by_one(in_bands).to(y.dtype)


def _rstd(squares: Tensor, hidden: int, eps: float) -> Tensor:
    """[...] → [..., 1]."""
    return torch.rsqrt(squares / hidden + eps).unsqueeze(-1)  # on the CPU two exact steps; torch.sqrt alone is not


def _one_by_one(x: Tensor) -> Tensor:
    """The sum over the first dim, from zero, one after the other."""
    total = torch.zeros_like(x[0]) if x.shape[0] else x.new_zeros(x.shape[1:])
    for row in x:
        total = total + row
    return total


@torch.library.custom_op("autopar::reduce_add_rmsnorm", mutates_args=())
def _forward(parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float, rounded: bool) -> tuple[Tensor, Tensor, Tensor]:
    check_normed([*parts, residual], residual, weight)
    if not parts:
        raise KernelError("there is no peer whose part could be added", remedy="give at least one part")
    if not library.has(residual.device):
        return reference_forward(parts, residual, weight, eps, rounded)
    made = with_room(residual.new_empty(residual.shape))
    forward_into(made, [part.contiguous() for part in parts], residual.contiguous(), weight.contiguous(), eps, rounded)
    return made


def with_room(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, and squares and normed to be filled."""
    return y, y.new_empty(y.shape[:-1], dtype=library.wide(y.dtype)), y.new_empty(y.shape)


def forward_into(
    made: tuple[Tensor, Tensor, Tensor], parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float, rounded: bool
) -> None:
    """Fill y, squares and normed by the kernel; all tensors are contiguous.

    On a device the parts' addresses lie in memory that its current stream gives to others only after the kernel.
    """
    y, squares, normed = made
    table = library.table((part.data_ptr() for part in parts), y.device)
    held = (x.data_ptr() for x in (residual, weight, y, normed, squares))
    settings = library.code_of(y.dtype), squares.numel(), y.shape[-1], eps, int(rounded)
    library.launch("ap_reduce_add_rmsnorm_forward", y.device, table.data_ptr(), len(parts), *held, *settings)


@torch.library.custom_op("autopar::reduce_add_rmsnorm_backward", mutates_args=())
def _backward(grad_y: Tensor, grad_normed: Tensor, y: Tensor, squares: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    check_normed([grad_y, grad_normed], y, weight)
    if not library.has(y.device):
        return reference_backward(grad_y, grad_normed, y, squares, weight, eps)
    held = [x.contiguous() for x in (grad_y, grad_normed, y, squares, weight)]
    grad, grad_weight = torch.empty_like(held[2]), torch.empty_like(held[4])
    bands = squares.new_empty(-(-squares.numel() // BAND), y.shape[-1])
    addresses = (x.data_ptr() for x in (*held, grad, grad_weight, bands))
    settings = library.code_of(y.dtype), squares.numel(), y.shape[-1], eps
    library.launch("ap_reduce_add_rmsnorm_backward", y.device, *addresses, *settings)
    return grad, grad_weight


def check_normed(like: Sequence[Tensor], x: Tensor, weight: Tensor) -> None:
    """Raises KernelError where `like` are not of the shape and dtype of `x` [..., hidden], or the weight is not [hidden]."""
    if x.dtype not in FLOATS or x.dim() == 0 or x.shape[-1] == 0 or tuple(weight.shape) != tuple(x.shape[-1:]):
        what = f"a norm of {tuple(x.shape)} {x.dtype} with a weight of {tuple(weight.shape)}"
        raise KernelError(what, remedy="give floats [..., hidden] and a weight [hidden]")
    for other in (*like, weight):
        if other is not weight and other.shape != x.shape:
            raise KernelError(f"a part is {tuple(other.shape)}, the residual {tuple(x.shape)}", remedy="give parts like the residual")
        if other.dtype != x.dtype or other.device != x.device:
            what = f"{other.dtype} on {other.device} beside {x.dtype} on {x.device}"
            raise KernelError(what, remedy="give all in one dtype on one device")


@_forward.register_fake
def _(parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float, rounded: bool) -> tuple[Tensor, Tensor, Tensor]:
    return with_room(residual.new_empty(residual.shape))


@_backward.register_fake
def _(grad_y: Tensor, grad_normed: Tensor, y: Tensor, squares: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), weight.new_empty(weight.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    parts, _, weight, ctx.eps, _ = inputs
    y, squares, _ = output
    ctx.num_parts = len(parts)
    ctx.save_for_backward(y, squares, weight)
    ctx.mark_non_differentiable(squares)


def _differentiate(ctx: Any, grad_y: Tensor, _: Tensor, grad_normed: Tensor) -> tuple[Any, ...]:
    grad, grad_weight = backward_op(grad_y, grad_normed, *ctx.saved_tensors, ctx.eps)
    return [grad] * ctx.num_parts, grad, grad_weight, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)
forward_op = torch.ops.autopar.reduce_add_rmsnorm.default
backward_op = torch.ops.autopar.reduce_add_rmsnorm_backward.default
