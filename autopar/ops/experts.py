"""A layer of experts as one op, on a part of the tokens or of the experts.

Terms. A token *picks* p of the e experts, each with a *gate*, a number with which what the expert makes of it counts. An expert is a linear
up, an activation, a linear down; a *gated* one has two linears up, and multiplies the activation of the first's result with the second's.

The rows of an expert's picks are brought together and go through its linears; picks of experts that are not here cost nothing, nor
does a copy of weights for each pick. What lies between the linears is not kept: backward computes it again from the tokens. So a part of
the experts adds its part to every token's result, and parts add up, though what lies between is not linear. How many rows an expert has
depends on the numbers, so these are opaque ops of torch's, not calls of ATen; torch differentiates `experts` by `experts_backward`. The
rows of one expert at a time, which they hold meanwhile, are a kernel's scratch, which no prediction of memory counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Act = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]

ACTS: Mapping[str, Act] = {
    "silu": (aten.silu.default, aten.silu_backward.default),
    "gelu": (aten.gelu.default, aten.gelu_backward.default),
    "gelu_tanh": (lambda x: aten.gelu.default(x, approximate="tanh"), lambda g, x: aten.gelu_backward.default(g, x, approximate="tanh")),
    "relu": (aten.relu.default, lambda g, x: aten.threshold_backward.default(g, x, 0)),
    "relu2": (lambda x: aten.relu.default(x).square(), lambda g, x: 2 * g * aten.relu.default(x)),
}
"""Activations by name, each with its gradient given that of its result and its operand."""


@torch.library.custom_op("autopar::experts", mutates_args=())
def _experts(x: Tensor, ids: Tensor, gates: Tensor, up: Tensor, down: Tensor, act: str, size: int, start: int = 0) -> Tensor:
    """``Σ gate · down(act(up x))`` over each token's picks, summed in at least float32.

    Args:
        x: tokens [t, h]. ids: the experts that each picks [t, p]; a number that is none adds nothing. gates: [t, p].
        up: [e, g, f, h], where g is 2 for gated experts, else 1. down: [e, d, f].
        act: a name of `ACTS`. size: the number of all experts.
        start: where `up` and `down` are a part of the experts, the first one.

    Returns:
        [t, d], in the dtype of `x`; a part's results add up to the whole's.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.new_zeros(x.shape[0], down.shape[1], dtype=wide)
    weights = gates.reshape(-1)
    for expert, picks in _by_expert(ids, start, up.shape[0]):
        tokens = picks // ids.shape[1]
        made = forward_of(x[tokens], up[expert], down[expert], act)
        out.index_add_(0, tokens, made.to(wide) * weights[picks].to(wide).unsqueeze(-1))
    return out.to(x.dtype)


@torch.library.custom_op("autopar::experts_backward", mutates_args=())
def _experts_backward(
    grad: Tensor, x: Tensor, ids: Tensor, gates: Tensor, up: Tensor, down: Tensor, act: str, size: int, start: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gates, up and down, given that of `experts`' result, `grad` [t, d]; the rest as there."""
    wide = torch.promote_types(x.dtype, torch.float32)
    d_x, d_gates = torch.zeros_like(x, dtype=wide), torch.zeros_like(gates).reshape(-1)
    d_up, d_down = up.new_zeros(up.shape), down.new_zeros(down.shape)
    weights = gates.reshape(-1)
    for expert, picks in _by_expert(ids, start, up.shape[0]):
        tokens, gate = picks // ids.shape[1], weights[picks].unsqueeze(-1)
        d_rows, d_gates[picks], d_up[expert], d_down[expert] = backward_of(grad[tokens], x[tokens], gate, up[expert], down[expert], act)
        d_x.index_add_(0, tokens, d_rows.to(wide))
    return d_x.to(x.dtype), d_gates.view(gates.shape), d_up, d_down


def forward_of(rows: Tensor, up: Tensor, down: Tensor, act: str, out: Tensor | None = None) -> Tensor:
    """What one expert, up [g, f, h] and down [d, f], makes of rows [r, h]: [r, d], in `out` where this is given."""
    return torch.mm(_between(_up(rows, up), act), down.t(), out=out)


def backward_of(
    grad: Tensor, rows: Tensor, gate: Tensor, up: Tensor, down: Tensor, act: str, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One expert's gradients of rows [r, h], gates [r], up and down, given those of what tokens get, `grad` [r, d], and `gate` [r, 1].

    Those of rows are in `out` where this is given.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    hidden = _up(rows, up)
    between = _between(hidden, act)
    d_between = grad @ down
    d_gate = (d_between * between).sum(-1, dtype=wide).to(gate.dtype)
    d_down = (grad * gate).to(rows.dtype).t() @ between
    d_hidden = _between_backward((d_between * gate).to(rows.dtype), hidden, act).flatten(1)
    return torch.mm(d_hidden, up.flatten(0, 1), out=out), d_gate, (d_hidden.t() @ rows).view(up.shape), d_down


def _by_expert(ids: Tensor, start: int, num: int) -> Iterator[tuple[int, Tensor]]:
    """Each of `num` experts from `start` that is picked, counted from 0, with its picks, numbered in the flat order of `ids`."""
    local, order = (ids.reshape(-1) - start).sort(stable=True)
    ends = torch.searchsorted(local, torch.arange(num + 1, device=ids.device, dtype=local.dtype)).tolist()
    for expert in range(num):
        if ends[expert] < ends[expert + 1]:
            yield expert, order[ends[expert] : ends[expert + 1]]


def _up(rows: Tensor, weight: Tensor) -> Tensor:
    """[r, h] and [g, f, h] → [r, g, f]."""
    return (rows @ weight.flatten(0, 1).t()).view(-1, *weight.shape[:2])


def _between(hidden: Tensor, act: str) -> Tensor:
    """[r, g, f] → [r, f]."""
    made = ACTS[act][0](hidden[:, 0])
    return made * hidden[:, 1] if hidden.shape[1] == 2 else made


def _between_backward(grad: Tensor, hidden: Tensor, act: str) -> Tensor:
    """The gradient of `hidden` [r, g, f], given that of what `_between` makes of it, [r, f]."""
    forward, backward = ACTS[act]
    if hidden.shape[1] == 1:
        return backward(grad, hidden[:, 0]).unsqueeze(1)
    return torch.stack((backward(grad * hidden[:, 1], hidden[:, 0]), grad * forward(hidden[:, 0])), 1)


@_experts.register_fake
def _(x: Tensor, ids: Tensor, gates: Tensor, up: Tensor, down: Tensor, act: str, size: int, start: int = 0) -> Tensor:
    return x.new_empty(x.shape[0], down.shape[1])


@_experts_backward.register_fake
def _(
    grad: Tensor, x: Tensor, ids: Tensor, gates: Tensor, up: Tensor, down: Tensor, act: str, size: int, start: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(t.new_empty(t.shape) for t in (x, gates, up, down))  # type: ignore[return-value]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    d_x, d_gates, d_up, d_down = experts_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return d_x, None, d_gates, d_up, d_down, None, None, None


_experts.register_autograd(_differentiate, setup_context=_remember)
experts = torch.ops.autopar.experts.default
experts_backward = torch.ops.autopar.experts_backward.default
