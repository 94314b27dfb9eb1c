"""Attention with score and mask functions (`torch.nn.attention.flex_attention`) as one op, which
supports a part of the batch, heads or queries.

    s = q kᵀ · scale,   s' = score(s, b, h, q, k) if mask(b, h, q, k), else −∞
    out = softmax(s') v,   lse = log Σ exp s'

The functions are text (`autopar.ops.score_functions`); the tensors that they capture are operands.
A block mask only lists blocks that kernels may skip, and does not change results. Here, the mask
function defines the mask, and the block mask of a kernel is computed from it at run time.

On a GPU, the op calls torch's compiled ``flex_attention``, in forward and backward. Backward runs
forward again, since torch stores the values for backward in its own graph. On other devices, the
scores of blocks of queries are computed, from the first to the last key that any of them sees.
This memory, and that of torch's kernels, is temporary memory of the op and not included in memory
predictions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

from autopar.ops.score_functions import SEEN, module_of, over_all, reads
from autopar.ops.softmax_attention import Saved, read_heads, to_heads

# --------------------------------------------------------------------------------------------------
# Attention with score functions, by torch's compiled kernels or in blocks of scores.

_BLOCK = 1 << 20  # scores in a block, in each of a few tensors
_ROWS = 128  # least number of queries in a block, unless there are fewer


@dataclass(frozen=True)
class Scoring:
    """How scores are computed from products.

    Attributes:
        captured: tensors that the functions read.
        score: text of the score function.
        mask: text of the mask function.
        scale: factor of the products.
        starts: the first batch entry, query head and query of the part.
        own: as for `autopar.ops.score_functions.module_of`.
    """

    captured: Sequence[Tensor]
    score: str
    mask: str
    scale: float
    starts: Sequence[int]
    own: Sequence[int]


def attend(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Tensor, Tensor]:
    """Compute attention with score and mask functions.

    Args:
        q: queries, ``[b, h, s, d]``.
        k: keys, ``[b, g, t, d]``, where g divides h.
        v: values, ``[b, g, t, d]``.
        how: the functions, and the position of the part.

    Returns:
        The result ``[b, h, s, d]``, and the log of the sum of exponentials ``[b, h, s]``.
    """
    if q.device.type == "cuda":
        with torch.no_grad():
            out, lse = _by_torch(q, k, v, how.captured, how)
        return out.contiguous(), lse.contiguous()
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=_wide(q))
    for block in _blocks(q, k, how):
        block_queries, (keys, values) = (
            q[block.queries],
            (_repeat_heads(x[block.keys], q) for x in (k, v)),
        )
        scores = _products(block_queries, keys).mul_(how.scale)
        scores = torch.where(
            block.seen, _score_block(block, how)(scores, *how.captured), float("-inf")
        )
        row_sums = scores.logsumexp(-1)
        lse[block.queries] = row_sums
        out[block.queries] = torch.matmul(_weights(scores, row_sums).to(v.dtype), values)
    return out, lse


def attend_backward(
    saved: Saved,
    grad: Tensor,
    grad_lse: Tensor | None,
    wanted: Sequence[int],
    how: Scoring,
) -> list[Tensor]:
    """Return the gradients of q, k, v, and of the captured tensors in `wanted`.

    Args:
        saved: the operands and results of `attend`.
        grad: gradient of `saved.out`, ``[b, h, s, d]``.
        grad_lse: gradient of `saved.lse`, ``[b, h, s]``, or None.
        wanted: positions in `how.captured`.
        how: as for `attend`.
    """
    q, k, v, out, lse = saved
    if q.device.type == "cuda":
        return _backward_by_torch(q, k, v, grad, grad_lse, wanted, how)
    dq, dk, dv, *others = (
        torch.zeros_like(x, dtype=_wide(x)) for x in (q, k, v, *(how.captured[n] for n in wanted))
    )
    rest = (grad.to(lse.dtype) * out).sum(-1)
    rest = rest if grad_lse is None else rest - grad_lse
    for block in _blocks(q, k, how):
        block_queries, own_grad = q[block.queries], grad[block.queries]
        keys, values = (_repeat_heads(x[block.keys], q) for x in (k, v))
        products = _products(block_queries, keys).mul_(how.scale)
        scores, pull = torch.func.vjp(
            _score_function_of(block, how, wanted), products, *(how.captured[n] for n in wanted)
        )
        scores = torch.where(block.seen, scores, float("-inf"))
        weights = _weights(scores, lse[block.queries])
        slopes = _products(own_grad, values).sub_(rest[block.queries].unsqueeze(-1)).mul_(weights)
        d_products, *captured_gradients = pull(slopes.to(scores.dtype))
        d_products = torch.where(block.seen, d_products, 0).mul_(how.scale)
        for total, part in zip(others, captured_gradients, strict=True):
            total.add_(part)
        dq[block.queries] = torch.matmul(d_products, keys.to(dq.dtype))
        dk[block.keys] += _sum_heads(
            torch.matmul(d_products.transpose(-2, -1), block_queries.to(dk.dtype)), k
        )
        dv[block.keys] += _sum_heads(
            torch.matmul(weights.transpose(-2, -1).to(dv.dtype), own_grad.to(dv.dtype)), v
        )
    likes = (q, k, v, *(how.captured[n] for n in wanted))
    return [x.to(like.dtype) for x, like in zip((dq, dk, dv, *others), likes, strict=True)]


@dataclass(frozen=True)
class _Block:
    """A block of queries, and the keys from the first to the last that any of them sees.

    Attributes:
        queries: index of the queries in q.
        keys: index of the keys in k.
        scalars: name → vector of coordinates.
        seen: whether a query sees a key, broadcast to ``[b, h, q, k]``.
    """

    queries: tuple[slice, ...]
    keys: tuple[slice, ...]
    scalars: dict[str, Tensor]
    seen: Tensor


def _blocks(q: Tensor, k: Tensor, how: Scoring) -> Iterator[_Block]:
    """Yield the blocks in which at least one query sees a key."""
    (batch, heads, length, _), num_keys = q.shape, k.shape[2]
    samples = max(1, min(batch, _BLOCK // max(1, heads * length * num_keys)))
    rows = (
        length
        if samples > 1
        else max(
            1, min(length, max(_BLOCK // max(1, heads * num_keys), min(_ROWS, _BLOCK // num_keys)))
        )
    )
    for first in range(0, batch, samples):
        for start in range(0, length, rows):
            block = (
                slice(first, min(first + samples, batch)),
                slice(start, min(start + rows, length)),
            )
            scalars = _coordinates(
                block[0], slice(0, heads), block[1], slice(0, num_keys), how.starts, q.device
            )
            visible = _evaluate_mask(scalars, how)
            columns = (
                visible.flatten(0, 2).any(0).nonzero().flatten()
                if visible.numel()
                else visible.nonzero()
            )
            if len(columns):
                keys = slice(int(columns[0]), int(columns[-1]) + 1)
                scalars["k"] = scalars["k"][keys]
                shared = slice(0, 1) if k.shape[0] == 1 else block[0]
                yield _Block(
                    (block[0], slice(None), block[1]),
                    (shared, slice(None), keys),
                    scalars,
                    visible[..., keys],
                )


def _coordinates(
    b: slice, h: slice, q: slice, k: slice, starts: Sequence[int], device: torch.device
) -> dict[str, Tensor]:
    local_positions = {
        name: torch.arange(at.start, at.stop, device=device, dtype=torch.int32)
        for name, at in zip("bhqk", (b, h, q, k), strict=True)
    }
    positions = {
        name: local_positions[name] + start for name, start in zip("bhq", starts, strict=True)
    }
    return {
        **positions,
        "k": local_positions["k"],
        **{f"own {name}": local_positions[name] for name in "bhq"},
    }


_DIMS = {
    name: dim
    for dim, names in enumerate((("b", "own b"), ("h", "own h"), ("q", "own q"), ("k",)))
    for name in names
}


def _evaluate_mask(scalars: dict[str, Tensor], how: Scoring) -> Tensor:
    function = module_of(how.mask, tuple(scalars), len(how.captured), how.own)
    every = over_all(function, [_DIMS[name] for name in scalars], len(how.captured))
    return every(*scalars.values(), *how.captured)


def _score_block(block: _Block, how: Scoring) -> Callable[..., Tensor]:
    """Return the score function as a function of scores ``[b, h, q, k]`` and captured tensors."""
    function = module_of(how.score, ("score", *block.scalars), len(how.captured), how.own)
    every = over_all(function, [-1, *(_DIMS[name] for name in block.scalars)], len(how.captured))
    return lambda scores, *captured: every(scores, *block.scalars.values(), *captured)


def _score_function_of(block: _Block, how: Scoring, wanted: Sequence[int]) -> Callable[..., Tensor]:
    def function(products: Tensor, *given: Tensor) -> Tensor:
        """Return the scores, as a function of the products and the captured tensors in `wanted`."""
        captured = list(how.captured)
        for number, tensor in zip(wanted, given, strict=True):
            captured[number] = tensor
        return _score_block(block, how)(products, *captured)

    return function


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(score − lse), which is 0 for rows without seen keys."""
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp_()


def _products(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a.to(_wide(a)), b.to(_wide(b)).transpose(-2, -1))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeat the heads of keys or values, one per query head."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _sum_heads(grad: Tensor, k: Tensor) -> Tensor:
    """Sum gradients per query head and sample to those of the heads and samples of `k`."""
    grad = grad if grad.shape[1] == k.shape[1] else grad.unflatten(1, (k.shape[1], -1)).sum(2)
    return grad if grad.shape[0] == k.shape[0] or k.shape[0] > 1 else grad.sum(0, keepdim=True)


@functools.cache
def _compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _by_torch(
    q: Tensor, k: Tensor, v: Tensor, captured: Sequence[Tensor], how: Scoring
) -> tuple[Tensor, Tensor]:
    """Call torch's compiled `flex_attention` with the functions and a block mask."""
    batch, heads, length, _ = q.shape
    names = ("b", "h", "q", "k", "own b", "own h", "own q")
    score = module_of(how.score, ("score", *names), len(captured), how.own, for_kernels=True)
    mask = module_of(how.mask, names, len(captured), how.own, for_kernels=True)
    b_start, h_start, q_start = how.starts

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return the score, with global coordinates."""
        return score(s, b + b_start, h + h_start, i + q_start, j, b, h, i, *captured)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return the mask, with global coordinates."""
        return mask(b + b_start, h + h_start, i + q_start, j, b, h, i, *captured)

    block_mask = None
    if how.mask != SEEN:  # compiled, so that the mask of all pairs is not materialized
        samples, rows = (
            size if reads(how.mask, name) else None for name, size in (("b", batch), ("h", heads))
        )
        make = _compile_function(torchs.create_block_mask)
        block_mask = make(mask_mod, samples, rows, length, k.shape[2], device=q.device)
    settings = {
        "scale": how.scale,
        "enable_gqa": k.shape[1] != heads,
        "return_aux": torchs.AuxRequest(lse=True),
    }
    out, aux = _compile_function(torchs.flex_attention)(
        q, k, v, score_mod=score_mod, block_mask=block_mask, **settings
    )
    return out, aux.lse


def _backward_by_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    wanted: Sequence[int],
    how: Scoring,
) -> list[Tensor]:
    with _record_gradients():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        captured = [
            x.detach().requires_grad_(number in wanted) for number, x in enumerate(how.captured)
        ]
        out, lse = _by_torch(q, k, v, captured, how)
        results, grads = ([out], [grad]) if grad_lse is None else ([out, lse], [grad, grad_lse])
        gradients = torch.autograd.grad(results, [q, k, v, *(captured[n] for n in wanted)], grads)
    return [x.contiguous() for x in gradients]


@contextlib.contextmanager
def _record_gradients() -> Iterator[None]:
    """Enable gradients, which torch disables within a custom op."""
    keys = torch._C.DispatchKey
    with contextlib.ExitStack() as stack:
        for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.ADInplaceOrView):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


@torch.library.custom_op("autopar::flex_attention", mutates_args=())
def _flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captured: Sequence[Tensor],
    score: str,
    mask: str,
    scale: float,
    starts: Sequence[int],
    own: Sequence[int],
    heads: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Compute attention with score and mask functions.

    Args:
        q: queries, ``[b, h, s, d]``.
        k: keys, ``[b or 1, g, t, d]``, where g divides h; query head i reads head i // (h / g).
        v: values, ``[b or 1, g, t, e]``.
        captured: tensors that the functions read.
        score: text of a function of ``score, b, h, q, k``.
        mask: text of a function of ``b, h, q, k``.
        scale: factor of the products.
        starts: first batch entry, head and query of a part; zeros for full queries.
        own: pairs of tensor and dim, flattened: the dims of captured tensors that are split like
            `q`.
        heads: as for `autopar.ops.attention`; empty if the heads of `q` and `k` are split equally.

    Returns:
        The result ``[b, h, s, e]`` and the logsumexp ``[b, h, s]`` in at least float32; zeros and
        −∞ for a query that sees no key.
    """
    how = Scoring(captured, score, mask, scale, starts, own)
    if heads:
        k, v = (read_heads(x, q, (heads[0], heads[1], heads[2])) for x in (k, v))
    return attend(q, k, v, how)


@torch.library.custom_op("autopar::flex_attention_backward", mutates_args=())
def _flex_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    captured: Sequence[Tensor],
    wanted: Sequence[int],
    score: str,
    mask: str,
    scale: float,
    starts: Sequence[int],
    own: Sequence[int],
    heads: Sequence[int],
) -> list[Tensor]:
    """Return the gradients of q, k and v, and of the captured tensors with the numbers `wanted`.

    Args:
        q: as for `flex_attention`, like all arguments not listed here.
        out: the result of `flex_attention`, ``[b, h, s, e]``.
        lse: its logsumexp, ``[b, h, s]``.
        grad: gradient of `out`.
        grad_lse: gradient of `lse`, or None.
        wanted: numbers of captured tensors.
    """
    how = Scoring(captured, score, mask, scale, starts, own)
    if not heads:
        saved = Saved(q, k, v, out, lse)
        return [x.contiguous() for x in attend_backward(saved, grad, grad_lse, wanted, how)]
    read = heads[0], heads[1], heads[2]
    saved = Saved(q, read_heads(k, q, read), read_heads(v, q, read), out, lse)
    dq, dk, dv, *others = attend_backward(saved, grad, grad_lse, wanted, how)
    return [
        x.contiguous() for x in (dq, to_heads(dk, k, q, read), to_heads(dv, v, q, read), *others)
    ]


@_flex_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)


@_flex_attention_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    *rest: Any,
) -> list[Tensor]:
    captured, wanted_numbers = rest[:2]
    return [
        x.new_empty(x.shape) for x in (q, k, v, *(captured[number] for number in wanted_numbers))
    ]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, captured, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.num_captured = len(captured)
    ctx.wanted = [number for number, x in enumerate(captured) if x.requires_grad]
    ctx.save_for_backward(q, k, v, *output, *captured)


def _differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *captured = ctx.saved_tensors
    out_gradient = torch.zeros_like(out) if grad is None else grad
    dq, dk, dv, *captured_gradients = flex_attention_backward(
        q, k, v, out, lse, out_gradient, grad_lse, captured, ctx.wanted, *ctx.settings
    )
    others: list[Tensor | None] = [None] * ctx.num_captured
    for number, gradient in zip(ctx.wanted, captured_gradients, strict=True):
        others[number] = gradient
    return (
        dq,
        dk,
        dv,
        others,
        *[None] * 4,
        [],
        [],
    )  # torch expects lists as gradients of empty lists


_flex_attention.register_autograd(_differentiate, setup_context=_save_for_backward)
flex_attention = torch.ops.autopar.flex_attention.default
flex_attention_backward = torch.ops.autopar.flex_attention_backward.default
