"""Lookups and losses on a part of the vocabulary, and the CTC loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.ops.blocks import block_length, row_blocks, wide_dtype

aten = torch.ops.aten
RowLosses = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def embedding(
    weight: Tensor, ids: Tensor, start: int | None = None, size: int | None = None
) -> Tensor:
    """Return the rows of a table for ids.

    Args:
        weight: the table [v, d], or a part of its rows.
        ids: [...].
        start: if `weight` is a part, its first row. Results of ids outside of it are zeros, so that
            the parts add up to the whole result.
        size: if `weight` is a part, the number of rows of the whole table.

    Returns:
        [..., d].

    Raises:
        IndexError, RuntimeError: if an id is no row of the table (on a GPU a device-side
            assertion).
    """
    if start is None:
        return aten.embedding.default(weight, ids)
    _assert_inside(
        ids,
        size,
        "token ids",
        "give the embedding as many rows as there are ids, or find the source of the invalid ids",
    )
    local, inside = _local_index(ids, start, weight.shape[0])
    return aten.embedding.default(weight, local).mul_(inside.unsqueeze(-1))


def embedding_backward(
    grad: Tensor, ids: Tensor, num_rows: int, start: int | None = None, padding_idx: int = -1
) -> Tensor:
    """Return the gradient [num_rows, d] of the weight of `embedding`.

    Args:
        grad: gradient of the result [..., d].
        ids: [...].
        num_rows: number of rows of the table, or of the part.
        start: for a part of the table its first row.
        padding_idx: the row of the table that gets no gradient.
    """
    if start is None:
        return aten.embedding_dense_backward.default(grad, ids, num_rows, padding_idx, False)
    local, inside = _local_index(ids, start, num_rows)
    local = torch.where(
        inside & (ids != padding_idx), local, -1
    )  # -1 is the index that the ATen op skips here
    return aten.embedding_dense_backward.default(grad, local, num_rows, -1, False)


def sum_exp(x: Tensor, m: Tensor) -> Tensor:
    """Σ exp(x − m) over the last dim of `x` [..., v], with `m` [...] → [...], in at least float32.

    With the vocabulary split and `m` the global maximum, the parts add up. Few rows at a time:
    exponentials take up to twice what `x` does.
    """
    blocks = row_blocks(x)
    if len(blocks) == 1:
        return _exp_minus(x, m).sum(-1)
    flat, shift = x.reshape(-1, x.shape[-1]), m.reshape(-1)
    sums = torch.empty_like(shift, dtype=wide_dtype(x.dtype))
    for here in blocks:
        torch.sum(_exp_minus(flat[here], shift[here]), -1, out=sums[here])
    return sums.view(m.shape)


def pick(x: Tensor, index: Tensor, ignored: int, start: int = 0, size: int | None = None) -> Tensor:
    """``x[..., index − start]`` of `x` [..., v], for `index` [...] → [...]; 0 if that is outside
    of 0…v−1.

    Args:
        ignored: the index that stands for no class.
        start, size: where `x` is a part of the classes, its first one and the number of all.

    Raises:
        RuntimeError: if an index is neither a class nor `ignored`.
    """
    remedy = (
        "give the loss as many classes as the labels use, and set labels to skip to its"
        f" ignore_index, {ignored} here"
    )
    _assert_inside(
        torch.where(index == ignored, 0, index),
        x.shape[-1] if size is None else size,
        "labels",
        remedy,
    )
    local, inside = _local_index(index, start, x.shape[-1])
    return x.gather(-1, local.unsqueeze(-1)).squeeze(-1).mul_(inside)


def cross_entropy_backward(
    x: Tensor, m: Tensor, s: Tensor, index: Tensor, scale: Tensor, start: int = 0
) -> Tensor:
    """Gradient ``(exp(x − m) / s − onehot(index − start)) · scale`` of the cross entropy, with the
    shape and dtype of `x`.

    Args:
        x: logits [..., v], or the part of them whose first class is `start`.
        m, s: row maximum and `sum_exp` of all logits [...].
        index: class of each row [...]; an index outside of the vocabulary has no one.
        scale: gradient of each row's loss [...].
    """
    if wide_dtype(x.dtype) == x.dtype or len(row_blocks(x)) == 1:
        return _rows_backward(x, m, s, index, scale, start)
    grad, (rows, num_classes) = (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.reshape(-1, x.shape[-1]).shape,
    )
    flat, made = x.reshape(rows, num_classes), grad.view(rows, num_classes)
    for here in row_blocks(flat):
        m_here, s_here, index_here, scale_here = (
            each.reshape(-1)[here] for each in (m, s, index, scale)
        )
        made[here] = _rows_backward(flat[here], m_here, s_here, index_here, scale_here, start)
    return grad


def cross_entropy_backward_scratch(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes that `cross_entropy_backward` of logits of this shape, or its form in place, holds
    beside its result for a while, at least."""
    if wide_dtype(dtype) == dtype:
        return 0
    rows, width = math.prod(shape[:-1]), shape[-1]
    few = block_length(rows, width)
    return (
        few * width * (wide_dtype(dtype).itemsize + (dtype.itemsize if few < rows else 0))
    )  # of one block alone the result is its own


def cross_entropy_backward_(
    x: Tensor, m: Tensor, s: Tensor, index: Tensor, scale: Tensor, start: int = 0
) -> Tensor:
    """Compute `cross_entropy_backward` in place of the logits.

    Args:
        x, m, s, index, scale, start: as for `cross_entropy_backward`.

    Returns:
        `x`.
    """
    if not x.is_contiguous():
        return x.copy_(cross_entropy_backward(x, m, s, index, scale, start))
    flat = x.view(-1, x.shape[-1])
    rows = [each.reshape(-1) for each in (m, s, index, scale)]
    for here in row_blocks(flat):
        m_here, s_here, index_here, scale_here = (each[here] for each in rows)
        if wide_dtype(x.dtype) == x.dtype:
            _gradient_(
                flat[here].sub_(m_here.unsqueeze(-1)).exp_(), s_here, index_here, scale_here, start
            )
        else:
            flat[here] = _rows_backward(flat[here], m_here, s_here, index_here, scale_here, start)
    return x


def _rows_backward(
    x: Tensor, m: Tensor, s: Tensor, index: Tensor, scale: Tensor, start: int
) -> Tensor:
    return _gradient_(_exp_minus(x, m), s, index, scale, start).to(x.dtype)


def _gradient_(exponentials: Tensor, s: Tensor, index: Tensor, scale: Tensor, start: int) -> Tensor:
    """From exp(x − m), in place."""
    local, inside = _local_index(index, start, exponentials.shape[-1])
    grad = exponentials.div_(s.unsqueeze(-1))
    grad.scatter_add_(-1, local.unsqueeze(-1), inside.to(grad.dtype).neg_().unsqueeze(-1))
    return grad.mul_(scale.unsqueeze(-1))


def linear_cross_entropy(
    x: Tensor, weight: Tensor, index: Tensor, ignored: int, rows: int, gradients: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The cross entropy of the logits ``x @ weightᵀ`` with its gradients, of which only the logits
    of `rows` rows are there at a time.

    Forward makes the gradients, so that no logits are kept and none are computed twice (as fused
    kernels for this loss do; Hsu et al. 2024, arXiv:2410.10989, section 3.2). They are those of the
    plain sum, so that a mean over any number of labels, and the gradient that arrives, scale them
    afterwards.

    Args:
        x: [..., d].
        weight: [v, d].
        index: class of each row [...].
        ignored: the index that stands for no class.
        gradients: whether they are wanted; without, both are empty.

    Returns:
        The loss of each row [...] in at least float32, be its class ignored or not; and, of the sum
        of those that are not, the gradients of `x` and, added up in at least float32, of `weight`.

    Raises:
        RuntimeError: if an index is neither a class nor `ignored`.
    """
    return linear_cross_entropy_by(_row_losses, x, weight, index, ignored, rows, gradients)


def linear_cross_entropy_by(
    row_losses: RowLosses,
    x: Tensor,
    weight: Tensor,
    index: Tensor,
    ignored: int,
    rows: int,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `linear_cross_entropy` with another function for the loss of some rows.

    Args:
        row_losses: takes logits [n, v], classes [n] and `ignored`, and returns the losses [n] and
            the gradient of their sum [n, v]. It may overwrite the logits.
        x, weight, index, ignored, rows, gradients: as for `linear_cross_entropy`.
    """
    flat, classes = x.reshape(-1, x.shape[-1]), index.reshape(-1)
    wide = wide_dtype(x.dtype)
    losses = flat.new_empty(flat.shape[0], dtype=wide)
    d_x = torch.empty_like(flat) if gradients else flat.new_empty(0)
    d_weight = torch.zeros_like(weight, dtype=wide) if gradients else weight.new_empty(0)
    for start in range(0, flat.shape[0], rows):
        here = slice(start, start + rows)
        losses[here], logits = row_losses(flat[here] @ weight.t(), classes[here], ignored)
        if gradients:
            torch.mm(logits, weight, out=d_x[here])
            if wide == x.dtype:
                torch.addmm(d_weight, logits.t(), flat[here], out=d_weight)
            else:
                d_weight.add_(logits.t() @ flat[here])
        del logits
    return (
        losses.view(index.shape),
        d_x.view(x.shape if gradients else 0),
        d_weight.to(weight.dtype),
    )


def _row_losses(logits: Tensor, index: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Losses [n] of logits [n, v], and the gradient of the sum of those that are not ignored.
    `logits` are used up."""
    m, dtype = logits.amax(-1), logits.dtype
    picked = pick(logits, index, ignored)
    shift = m.unsqueeze(-1)
    exp = (
        logits.float().sub_(shift).exp_()
        if dtype in (torch.float16, torch.bfloat16)
        else logits.sub_(shift).exp_()
    )
    del logits
    s = exp.sum(-1)
    local, inside = _local_index(index, 0, exp.shape[-1])
    exp.div_(s.unsqueeze(-1)).scatter_add_(
        -1, local.unsqueeze(-1), inside.to(exp.dtype).neg_().unsqueeze(-1)
    )
    return s.log_().add_(m).sub_(picked), exp.mul_((index != ignored).unsqueeze(-1)).to(dtype)


def _assert_inside(index: Tensor, size: int | None, what: str, remedy: str) -> None:
    """Without waiting for the device. In one line: Inductor writes what a graph's ops are given
    into comments."""
    if size is not None:
        torch._assert_async(
            ((index >= 0) & (index < size)).all(),
            f"{what} must be in 0…{size - 1}; what to do: {remedy}",
        )


def _local_index(index: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """`index` − `start` brought into 0…size−1, and where it was inside."""
    local = index - start
    inside = (local >= 0) & (local < size)
    return local.clamp_(0, max(size - 1, 0)), inside


def _exp_minus(x: Tensor, m: Tensor) -> Tensor:
    """exp(x − m) in at least float32, in one temporary of x's size."""
    shift = m.unsqueeze(-1)
    difference = x.float().sub_(shift) if x.dtype in (torch.float16, torch.bfloat16) else x - shift
    return difference.exp_()


# --------------------------------------------------------------------------------------------------
# The CTC loss of each sample as one op, which also returns the gradient.
#
# torch's op (`aten._ctc_loss`) has a result whose shape depends on the values of the lengths, so
# these are opaque custom ops that call it. It holds one number per frame and place of a target,
# which is scratch memory of a kernel and not counted by predictions of memory.


@torch.library.custom_op("autopar::ctc", mutates_args=())
def _ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """Losses [n], infinite if no alignment fits, and the gradient of each in log_probs.

    Args:
        log_probs: [t, n, c], as log_softmax gives them.
        targets: [n, s], of which the first `target_lengths` [n] count.
        zero_infinity: whether the gradients of infinite losses are zeros.

    Returns:
        losses [n], gradient [t, n, c].
    """
    if targets.numel() and int(target_lengths.amax()) > targets.shape[1]:
        what = (
            f"target_lengths has {int(target_lengths.amax())} classes, but targets has"
            f" {targets.shape[1]}"
        )
        raise AutoparError(what, remedy="pass target_lengths that fit the targets")
    given = log_probs, targets, input_lengths, target_lengths
    losses, alignments = aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    ones = torch.ones_like(losses)
    gradient = aten._ctc_loss_backward.Tensor(
        ones, *given, losses, alignments, blank, zero_infinity
    )
    return losses, gradient.contiguous()


@torch.library.custom_op("autopar::ctc_joined", mutates_args=())
def _ctc_joined(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """As `ctc`, of targets [sum of target_lengths], those of one sample after those of another."""
    rows = targets.split(target_lengths.tolist())
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    losses, gradient = _ctc(log_probs, padded, input_lengths, target_lengths, blank, zero_infinity)
    return losses, gradient


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Compute ``F.ctc_loss`` by these ops.

    Args:
        log_probs: [t, n, c], or [t, c] of one sample.
        targets: [n, s], padded, or [sum of target_lengths], one sample after another.
        input_lengths: frames of each sample [n].
        target_lengths: labels of each sample [n].
        blank: the label that stands for none.
        reduction: ``mean`` of the losses per label, ``sum``, or ``none``.
        zero_infinity: whether infinite losses and their gradients count as 0.
    """
    alone = log_probs.dim() == 2
    if alone:
        log_probs, targets = log_probs.unsqueeze(1), targets.reshape(1, -1)
    frames, lengths = (
        torch.as_tensor(each, device=log_probs.device).reshape(-1)
        for each in (input_lengths, target_lengths)
    )
    op = ctc if targets.dim() == 2 else ctc_joined
    losses = op(log_probs, targets, frames, lengths, blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == float("inf"), 0.0, losses)
    if reduction == "mean":
        return (losses / lengths.clamp(min=1)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses.reshape(()) if alone else losses


def _fake(log_probs: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), log_probs.new_empty(log_probs.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _differentiate(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    return (None if grad is None else gradient * grad.unsqueeze(-1), *[None] * 5)


for _op in (_ctc, _ctc_joined):
    _op.register_fake(_fake)
    _op.register_autograd(_differentiate, setup_context=_remember)
ctc = torch.ops.autopar.ctc.default
ctc_joined = torch.ops.autopar.ctc_joined.default
