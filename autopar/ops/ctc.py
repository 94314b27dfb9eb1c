"""The CTC loss of each sample as one op, which gives its gradient with it.

torch's own (`aten._ctc_loss`) has a result whose shape depends on the values of the lengths, so these are opaque ops of torch's, which call
it. What it holds meanwhile, a number for each frame and place of a target, is a kernel's scratch, which no prediction of memory counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError

aten = torch.ops.aten


@torch.library.custom_op("autopar::ctc", mutates_args=())
def _ctc(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """Losses [n], infinite where no alignment fits, and the gradient of each in log_probs.

    Args:
        log_probs: [t, n, c], as log_softmax gives them. targets: [n, s], of which the first `target_lengths` [n] count.
        zero_infinity: whether the gradients of infinite losses are zeros.

    Returns:
        losses [n], gradient [t, n, c].
    """
    if targets.numel() and int(target_lengths.amax()) > targets.shape[1]:
        what = f"targets of {int(target_lengths.amax())} classes, and {targets.shape[1]} are there"
        raise AutoparError(what, remedy="pass target_lengths that fit the targets")
    given = log_probs, targets, input_lengths, target_lengths
    losses, alignments = aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    ones = torch.ones_like(losses)
    gradient = aten._ctc_loss_backward.Tensor(ones, *given, losses, alignments, blank, zero_infinity)
    return losses, gradient.contiguous()


@torch.library.custom_op("autopar::ctc_joined", mutates_args=())
def _ctc_joined(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
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
    """What ``F.ctc_loss`` computes, by these ops; of one sample without a batch dim, too."""
    alone = log_probs.dim() == 2
    if alone:
        log_probs, targets = log_probs.unsqueeze(1), targets.reshape(1, -1)
    frames, lengths = (torch.as_tensor(each, device=log_probs.device).reshape(-1) for each in (input_lengths, target_lengths))
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
