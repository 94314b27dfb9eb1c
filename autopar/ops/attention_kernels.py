"""Softmax attention by the kernel that fits: of the cpu; of a GPU cuDNN's, FlashAttention's or the memory-efficient one; or products."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """As `autopar.ops.attention` of all queries and of their heads."""
    q, k, v = _contiguous_rows(q, k, v)
    bias = _bias(mask, q.dtype)
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
        return out, lse.to(torch.promote_types(out.dtype, torch.float32))  # as it is, but for fakes of float64 under torch 2.11
    if _cudnn_fits(q, k, v, bias, is_causal, scale):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, is_causal, False, scale=scale)
        return out, lse.view(q.shape[:-1])
    if _flash_fits(q, k, bias, is_causal):
        out, lse, *_ = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, is_causal, False, scale=scale)
        return out, lse
    if _efficient_fits(q):
        keys, values = _repeat_heads(k, q), _repeat_heads(v, q)
        wide = _aligned_bias(bias, q, k)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention.default(q, keys, values, wide, True, 0.0, is_causal, scale=scale)
        return out, lse[..., : q.shape[2]]
    scores = _scores(q, _repeat_heads(k, q), bias, is_causal, scale)
    return torch.matmul(scores.softmax(-1).to(v.dtype), _repeat_heads(v, q)), scores.logsumexp(-1)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. `out` and `lse` may be of more keys than these, of which q, k and v then have their share."""
    grad, q, k, v, out = _contiguous_rows(grad, q, k, v, out)
    bias = _bias(mask, q.dtype)
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return backward(grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale)
    if _cudnn_fits(q, k, v, bias, is_causal, scale):
        backward = aten._scaled_dot_product_cudnn_attention_backward.default
        state = torch.zeros((), dtype=torch.int64, device=q.device)  # of the random generator, which no dropout reads
        rows = lse.unsqueeze(-1)
        return backward(grad, q, k, v, out, rows, state, state, None, None, None, q.shape[2], k.shape[2], 0.0, is_causal, scale=scale)
    if _flash_fits(q, k, bias, is_causal):
        backward = aten._scaled_dot_product_flash_attention_backward.default
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the random generator, which no dropout reads
        return backward(grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, state, state[0], scale=scale)
    keys, values = _repeat_heads(k, q), _repeat_heads(v, q)
    if _efficient_fits(q):
        dq, dk, dv = _efficient_backward(grad, q, keys, values, out, lse, _aligned_bias(bias, q, k), is_causal, scale)
    else:
        dq, dk, dv = _plain_backward(grad, q, keys, values, out, lse, bias, is_causal, scale)
    return dq, _sum_heads(dk, k), _sum_heads(dv, v)


def _contiguous_rows(*operands: Tensor) -> tuple[Tensor, ...]:
    """Operands whose last dim has stride 1, copied if it has another: all kernels assume it and none checks it.

    `torch.nn.functional.scaled_dot_product_attention` calls no such kernel with other strides.
    """
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in operands)


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _cudnn_fits(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> bool:
    """Whether torch itself prefers cuDNN's kernel, of sizes for which it has a backward, too; a compiler does not ask."""
    if torch.compiler.is_compiling() or q.shape[-1] > 128 or v.shape[-1] > 128 or not _flash_fits(q, k, bias, is_causal):
        return False
    chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, is_causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1])
    return bool(chosen == torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value)


def _flash_fits(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool) -> bool:
    """FlashAttention lets the last query see the last key, here the first query sees the first: these differ where lengths do."""
    alike = not is_causal or q.shape[2] == k.shape[2]
    return alike and bias is None and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _efficient_fits(q: Tensor) -> bool:
    return q.dtype in (torch.float16, torch.bfloat16, torch.float32) and q.shape[-1] % 8 == 0


def _repeat_heads(k: Tensor, q: Tensor) -> Tensor:
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _sum_heads(grad: Tensor, k: Tensor) -> Tensor:
    return grad if grad.shape == k.shape else grad.unflatten(1, (k.shape[1], -1)).sum(2)


def _aligned_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """`bias` for all heads; the efficient kernel wants rows that begin at multiples of 8 elements."""
    if bias is None:
        return None
    length = k.shape[2]
    padded = torch.nn.functional.pad(bias.to(q.dtype), (0, -length % 8)) if bias.shape[-1] == length else bias.to(q.dtype)
    return padded[..., :length].expand(q.shape[0], q.shape[1], q.shape[2], length)


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32))  # the kernel's own padding, which `attention` cut off
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    wanted = [True, True, True, False]
    return backward(grad, q, k, v, bias, out, rows, state, state, 0.0, wanted, is_causal, scale=scale)[:3]


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """In at least fp32: fp16 overflows, and the log of a sum is to have more digits than 16-bit types."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-2, -1)).mul_(scale)
    if bias is not None:
        scores = scores.add_(bias)
    if is_causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), float("-inf"))
    return scores


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    weights = _scores(q, k, bias, is_causal, scale).sub_(lse.unsqueeze(-1)).exp_().to(q.dtype)
    inner = torch.matmul(grad, v.transpose(-2, -1)).sub_((grad * out).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
    return torch.matmul(inner, k), torch.matmul(inner.transpose(-2, -1), q), torch.matmul(weights.transpose(-2, -1), grad)
