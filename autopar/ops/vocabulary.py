"""Lookups and losses that support a part of the vocabulary, and the CTC loss."""

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
        weight: the table, ``[v, d]``, or a part of its rows.
        ids: the ids, ``[...]``.
        start: index of the first row of `weight`, if it is a part. The results of ids outside the
            part are zeros, so that the results of all parts are partial sums.
        size: number of rows of the full table, if `weight` is a part.

    Returns:
        The rows, ``[..., d]``.

    Raises:
        IndexError, RuntimeError: an id is not a row of the table (on a GPU, a device-side
            assertion).
    """
    if start is None:
        return aten.embedding.default(weight, ids)
    _assert_inside(
        ids,
        size,
        "token ids",
        "increase the number of rows of the embedding, or find the source of the invalid ids",
    )
    local, inside = _local_index(ids, start, weight.shape[0])
    return aten.embedding.default(weight, local).mul_(inside.unsqueeze(-1))


def embedding_backward(
    grad: Tensor, ids: Tensor, num_rows: int, start: int | None = None, padding_idx: int = -1
) -> Tensor:
    """Return the gradient ``[num_rows, d]`` of the weight of `embedding`.

    Args:
        grad: gradient of the result, ``[..., d]``.
        ids: the ids, ``[...]``.
        num_rows: number of rows of the table, or of the part.
        start: index of the first row of a part of the table.
        padding_idx: the row of the table without gradient.
    """
    if start is None:
        return aten.embedding_dense_backward.default(grad, ids, num_rows, padding_idx, False)
    local, inside = _local_index(ids, start, num_rows)
    local = torch.where(
        inside & (ids != padding_idx), local, -1
    )  # the ATen op skips index -1, its padding_idx
    return aten.embedding_dense_backward.default(grad, local, num_rows, -1, False)


def sum_exp(x: Tensor, m: Tensor) -> Tensor:
    """Return Σ exp(x − m) over the last dim, ``[...]``, in at least float32.

    If the vocabulary is split and `m` is the global maximum, the results of the parts are partial
    sums. Blocks of rows are processed, since the exponentials need up to twice the memory of `x`.

    Args:
        x: logits, ``[..., v]``.
        m: maximum of each row, ``[...]``.
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
    """Return ``x[..., index − start]``, ``[...]``; 0 for an index outside the part.

    Args:
        x: logits, ``[..., v]``, or a part of the classes.
        index: class of each row, ``[...]``.
        ignored: the index of rows without a class.
        start: index of the first class of `x`.
        size: number of all classes, if `x` is a part.

    Raises:
        RuntimeError: an index is neither a class nor `ignored`.
    """
    remedy = (
        "increase the number of classes of the loss, and set labels that it must skip to its"
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
    """Return the gradient ``(exp(x − m) / s − onehot(index − start)) · scale`` of the cross
    entropy, with the shape and dtype of `x`.

    Args:
        x: logits, ``[..., v]``, or a part of the classes.
        m: maximum over all logits of each row, ``[...]``.
        s: `sum_exp` over all logits of each row, ``[...]``.
        index: class of each row, ``[...]``; for an index outside the classes, onehot is zero.
        scale: gradient of the loss of each row, ``[...]``.
        start: index of the first class of `x`.
    """
    if wide_dtype(x.dtype) == x.dtype or len(row_blocks(x)) == 1:
        return _rows_backward(x, m, s, index, scale, start)
    grad, (rows, num_classes) = (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.reshape(-1, x.shape[-1]).shape,
    )
    flat, result = x.reshape(rows, num_classes), grad.view(rows, num_classes)
    for here in row_blocks(flat):
        m_here, s_here, index_here, scale_here = (
            each.reshape(-1)[here] for each in (m, s, index, scale)
        )
        result[here] = _rows_backward(flat[here], m_here, s_here, index_here, scale_here, start)
    return grad


def cross_entropy_backward_scratch(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return a lower bound of the temporary memory, in bytes, of `cross_entropy_backward` or its
    in-place form for logits of this shape and dtype, in addition to the result."""
    if wide_dtype(dtype) == dtype:
        return 0
    rows, width = math.prod(shape[:-1]), shape[-1]
    few = block_length(rows, width)
    return (
        few * width * (wide_dtype(dtype).itemsize + (dtype.itemsize if few < rows else 0))
    )  # with one block, its result is the result of the op


def cross_entropy_backward_(
    x: Tensor, m: Tensor, s: Tensor, index: Tensor, scale: Tensor, start: int = 0
) -> Tensor:
    """Compute `cross_entropy_backward` into the memory of the logits.

    Args:
        x: as for `cross_entropy_backward`.
        m: as for `cross_entropy_backward`.
        s: as for `cross_entropy_backward`.
        index: as for `cross_entropy_backward`.
        scale: as for `cross_entropy_backward`.
        start: as for `cross_entropy_backward`.

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
    """Compute the gradient from exp(x − m), in place."""
    local, inside = _local_index(index, start, exponentials.shape[-1])
    grad = exponentials.div_(s.unsqueeze(-1))
    grad.scatter_add_(-1, local.unsqueeze(-1), inside.to(grad.dtype).neg_().unsqueeze(-1))
    return grad.mul_(scale.unsqueeze(-1))


def linear_cross_entropy(
    x: Tensor, weight: Tensor, index: Tensor, ignored: int, rows: int, gradients: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the cross entropy of the logits ``x @ weightᵀ`` and its gradients, with the logits of
    at most `rows` rows in memory at a time.

    Forward computes the gradients, so that logits are neither stored nor computed twice (as in
    fused kernels for this loss; Hsu et al. 2024, arXiv:2410.10989, section 3.2). The gradients are
    those of the sum of losses. They are multiplied afterwards by the incoming gradient, divided by
    the number of labels for a mean.

    Args:
        x: input of the linear layer, ``[..., d]``.
        weight: its weight, ``[v, d]``.
        index: class of each row, ``[...]``.
        ignored: the index of rows without a class.
        rows: largest number of rows to process at a time.
        gradients: whether to compute gradients; if not, they are empty.

    Returns:
        - the loss of each row, ``[...]``, in at least float32, including ignored rows,
        - the gradient of `x` of the sum of the losses that are not ignored,
        - the gradient of `weight`, summed in at least float32.

    Raises:
        RuntimeError: an index is neither a class nor `ignored`.
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
    """Compute `linear_cross_entropy` with the given function for the losses of a block of rows.

    Args:
        row_losses: function from logits ``[n, v]``, classes ``[n]`` and `ignored` to the losses
            ``[n]`` and the gradient of their sum ``[n, v]``. It may overwrite the logits.
        x: as for `linear_cross_entropy`.
        weight: as for `linear_cross_entropy`.
        index: as for `linear_cross_entropy`.
        ignored: as for `linear_cross_entropy`.
        rows: as for `linear_cross_entropy`.
        gradients: as for `linear_cross_entropy`.
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
    """Return the losses ``[n]`` of logits ``[n, v]``, and the gradient of the sum of those that are
    not ignored; the logits are overwritten."""
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
    """Assert that all indices are in 0…size−1, without waiting for the device. The message is one
    line, since Inductor writes the arguments of ops into comments."""
    if size is not None:
        torch._assert_async(
            ((index >= 0) & (index < size)).all(),
            f"{what} must be in 0…{size - 1}; what to do: {remedy}",
        )


def _local_index(index: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Return `index` − `start` clamped to 0…size−1, and whether it was in this range."""
    local = index - start
    inside = (local >= 0) & (local < size)
    return local.clamp_(0, max(size - 1, 0)), inside


def _exp_minus(x: Tensor, m: Tensor) -> Tensor:
    """Return exp(x − m) in at least float32, with one temporary tensor."""
    shift = m.unsqueeze(-1)
    difference = x.float().sub_(shift) if x.dtype in (torch.float16, torch.bfloat16) else x - shift
    return difference.exp_()


# --------------------------------------------------------------------------------------------------
# The CTC loss of each sample as one op, which also returns the gradient.
#
# The op of torch (`aten._ctc_loss`) has a result whose shape depends on the values of the lengths,
# so it is called within opaque custom ops. This result, with one number per frame and position of a
# target, is temporary memory of the op and not included in memory predictions.


@torch.library.custom_op("autopar::ctc", mutates_args=())
def _ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the CTC loss of each sample, and its gradient.

    Args:
        log_probs: log probabilities, ``[t, n, c]``, as returned by log_softmax.
        targets: labels, ``[n, s]``; only the first `target_lengths` of each row are used.
        input_lengths: number of frames of each sample, ``[n]``.
        target_lengths: number of labels of each sample, ``[n]``.
        blank: the blank label.
        zero_infinity: whether the gradients of infinite losses are zero.

    Returns:
        The losses ``[n]``, infinite if no alignment exists, and their gradients with respect to
        `log_probs` ``[t, n, c]``.
    """
    if targets.numel() and int(target_lengths.amax()) > targets.shape[1]:
        message = (
            f"target_lengths has a length of {int(target_lengths.amax())}, but targets has only"
            f" {targets.shape[1]} labels per sample"
        )
        raise AutoparError(message, remedy="pass target_lengths of at most targets.shape[1]")
    arguments = log_probs, targets, input_lengths, target_lengths
    losses, alignments = aten._ctc_loss.Tensor(*arguments, blank, zero_infinity)
    ones = torch.ones_like(losses)
    gradient = aten._ctc_loss_backward.Tensor(
        ones, *arguments, losses, alignments, blank, zero_infinity
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
    """Compute `ctc` of concatenated targets, ``[sum of target_lengths]``."""
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
    """Compute ``F.ctc_loss`` with `ctc` or `ctc_joined`.

    Args:
        log_probs: log probabilities, ``[t, n, c]``, or ``[t, c]`` of one sample.
        targets: padded labels, ``[n, s]``, or concatenated labels, ``[sum of target_lengths]``.
        input_lengths: number of frames of each sample, ``[n]``.
        target_lengths: number of labels of each sample, ``[n]``.
        blank: the blank label.
        reduction: ``mean`` of the losses per label, ``sum``, or ``none``.
        zero_infinity: whether infinite losses and their gradients are set to 0.
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


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _differentiate(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    return (None if grad is None else gradient * grad.unsqueeze(-1), *[None] * 5)


for _op in (_ctc, _ctc_joined):
    _op.register_fake(_fake)
    _op.register_autograd(_differentiate, setup_context=_save_for_backward)
ctc = torch.ops.autopar.ctc.default
ctc_joined = torch.ops.autopar.ctc_joined.default
