"""Rules of neural network ops whose notation depends on flags: norms, losses and attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar import ops
from autopar.core.layout import Strategy
from autopar.core.placements import PARTIAL, REPLICATE, Mirrored
from autopar.rules.call import Call, TensorInfo, argument, slots
from autopar.rules.notation import WHOLE, AxisOption, Factors, parse


def layer_norm(call: Call) -> Factors:
    """Return the factors of native_layer_norm: the normalized dims are not split."""
    last = " ".join(WHOLE * len(argument(call, "normalized_shape")))
    return parse(f"... {last}, {last}, {last} -> ... {last}, ... {last}, ... {last}", call)


def layer_norm_backward(call: Call) -> Factors:
    """Return the factors of native_layer_norm_backward: the gradients of weight and bias are
    partial sums over the other dims."""
    last = " ".join(WHOLE * len(argument(call, "normalized_shape")))
    operands = f"... {last}, ... {last}, ... {last}, ... {last}, {last}, {last}"
    return parse(f"{operands} -> ... {last}, {last}, {last}", call, linear=((0,),))


def group_norm(call: Call) -> Factors:
    """Return the factors of native_group_norm: the batch and, by groups, the channels are parallel;
    the statistics are ``[n, groups]``."""
    space, c = (
        " ".join(WHOLE * (len(call.inputs[0].shape) - 2)),
        WHOLE if argument(call, "group") == 1 else "c",
    )
    return parse(f"n {c} {space}, {c}, {c} -> n {c} {space}, n {c}, n {c}", call)


def group_norm_backward(call: Call) -> Factors:
    """Return factors as `group_norm`; the gradients of weight and bias are partial sums over the
    batch."""
    space, c = (
        " ".join(WHOLE * (len(call.inputs[0].shape) - 2)),
        WHOLE if argument(call, "group") == 1 else "c",
    )
    return parse(
        f"n {c} {space}, n {c} {space}, n {c}, n {c}, {c} -> n {c} {space}, {c}, {c}",
        call,
        linear=((0,),),
    )


def nll_loss_forward(call: Call) -> Factors:
    """Return the factors of nll_loss_forward: the class dim is not split, and neither is the batch
    if the loss is a mean, whose divisor is global."""
    n = WHOLE if argument(call, "reduction", 1) == 1 else "n"
    batched = len(call.inputs[0].shape) == 2
    term = f"{n} _" if batched else "_"
    return parse(
        f"{term}, {n if batched else ''}, _ -> {n if call.outputs[0].shape else ''}, ", call
    )


def nll_loss_backward(call: Call) -> Factors:
    """Return the factors of nll_loss_backward: the batch is parallel, since the divisor is an
    operand."""
    grad = "n" if call.inputs[0].shape else ""
    if len(call.inputs[1].shape) == 2:
        return parse(f"{grad}, n _, n, _,  -> n _", call)
    return parse(", _, , _,  -> _", call)


def weight_norm(call: Call) -> Factors:
    """Return the factors of _weight_norm_interface and its backward: the dim that is not reduced is
    parallel."""
    dim, rank = argument(call, "dim", 0), len(call.inputs[0].shape)
    term = " ".join("n" if d == dim % rank else WHOLE for d in range(rank))
    return parse(
        f"{', '.join([term] * len(call.inputs))} -> {term}, {term}",
        call,
        linear=((0,),) if len(call.inputs) > 2 else (),
    )


def attention(call: Call) -> Factors:
    """Return the factors of attention: batch, heads and the sequence of the queries are parallel.

    With causal attention, the sequence of the queries may also be mirrored. If query heads share
    key and value heads, query heads alone may also be split.
    """
    factors = parse("b h q _, b h _ _, b h _ _, b h q _ -> b h q _, b h q", call)
    return replace(factors, further=(*_query_heads(call, 0, 1), *_mirrored_options(call, 0, 1)))


def attention_backward(call: Call) -> Factors:
    """Return factors as `attention`; if the sequence of the queries or query heads alone are split,
    the gradients of key and value are partial sums."""
    row = "b h q _"
    factors = parse(
        f"{row}, {row}, b h _ _, b h _ _, {row}, b h q, {row} -> {row}, b h _ _, b h _ _", call
    )
    return replace(factors, further=(*_query_heads(call, 1, 2), *_mirrored_options(call, 1, 2)))


def _query_heads(call: Call, query: int, key: int) -> tuple[AxisOption, ...]:
    """Return the option that splits the tensors with query heads and replicates keys and values; a
    rank reads the heads that it needs."""
    heads, shared = (call.inputs[i].shape[1] for i in (query, key))
    if heads == shared:
        return ()

    def split(number: int, info: TensorInfo) -> Placement:
        """Return the placement that splits dim 1 of operand `number` if it has query heads."""
        has_query_heads = (
            number not in (key, key + 1) and len(info.shape) > 2 and info.shape[1] == heads
        )
        return Shard(1) if has_query_heads else REPLICATE

    inputs = tuple(split(i, info) for i, info in enumerate(call.inputs))
    outputs = (Shard(1), PARTIAL, PARTIAL) if key == 2 else (Shard(1), Shard(1))
    return (AxisOption(inputs, outputs),)


def _mirrored_options(call: Call, query: int, key: int) -> tuple[AxisOption, ...]:
    """Return the option of causal attention with mirrored parts of the queries, for which all ranks
    have the same work (`autopar.core.placements`)."""
    masked = len(call.inputs) > (3 if query == 0 else 6)
    length = call.inputs[query].shape[2]
    if (
        masked
        or not argument(call, "is_causal", False)
        or call.inputs[key].shape[2] != length
        or length == 1
    ):
        return ()
    inputs = tuple(
        REPLICATE if number in (key, key + 1) else Mirrored(2) for number in range(len(call.inputs))
    )
    return (
        AxisOption(
            inputs, (Mirrored(2), Mirrored(2)) if query == 0 else (Mirrored(2), PARTIAL, PARTIAL)
        ),
    )


def heads_nest(call: Call, strategy: Strategy) -> bool:
    """Return whether every rank has the key and value heads that its query heads read: the axes
    that split both must be the outer ones."""
    first = 1 if call.target is ops.attention_backward else 0
    query, key = (strategy.inputs[i].splitters(1) for i in (first, first + 1))
    return query[: len(key)] == key


# --------------------------------------------------------------------------------------------------
# Elementwise losses of two tensors with or without a reduction: the rules, and a rank's term of a
# mean.

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
_REDUCTION = 2  # position of the argument ``reduction`` in all of these losses
LOSSES = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
)
IN_ITS_OWN = frozenset({"mse_loss", "smooth_l1_loss", "soft_margin_loss"})
LOSS_GRADIENTS = (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)


def loss(call: Call) -> Factors:
    """Return the factors of a loss: every dim is parallel; a sum or a mean is partial."""
    terms = ", ".join("..." for _ in slots(call))
    return parse(f"{terms} -> {'' if argument(call, 'reduction', MEAN) else '...'}", call)


def loss_gradient(call: Call) -> Factors:
    """Return the factors of the backward of a loss: every dim is parallel; the gradient of a
    reduced loss is a scalar."""
    rest = ", ".join("..." for _ in slots(call)[1:])
    return parse(f"{'...' if call.inputs[0].shape else ''}, {rest} -> ...", call, linear=((0,),))


def reduced_loss(name: str, *args: Any, **kwargs: Any) -> Tensor:
    """Compute the mean or sum of a loss into new memory.

    The kernels of `IN_ITS_OWN` return a result in the memory of the unreduced loss, which is as
    large as the scores and is not freed as long as the result exists.

    Args:
        name: name of the ATen op.
        args: positional arguments of the op.
        kwargs: keyword arguments of the op.
    """
    reduction = args[_REDUCTION] if len(args) > _REDUCTION else kwargs.get("reduction", MEAN)
    further = {key: value for key, value in kwargs.items() if key != "reduction"}
    loss: Tensor = getattr(aten, name).default(
        *args[:_REDUCTION], NONE, *args[_REDUCTION + 1 :], **further
    )
    return loss.mean() if reduction == MEAN else loss.sum()


def mean_loss_part(name: str, count: int, *args: Any, **kwargs: Any) -> Tensor:
    """Return a rank's term of a mean loss, or its part of the gradient of a mean loss: the result
    for a sum, divided by `count`.

    Half-precision operands are computed in float32, since sums may exceed their range.

    Args:
        name: name of the ATen op.
        count: global number of elements of the loss.
        args: positional arguments of the op with a sum as its reduction.
        kwargs: keyword arguments of the op.
    """
    first = next(a for a in args if isinstance(a, Tensor))
    half = first.dtype in (torch.float16, torch.bfloat16)
    wide = tuple(a.float() if half and isinstance(a, Tensor) else a for a in args)
    result: Tensor = (
        reduced_loss(name, *wide, **kwargs)
        if name in IN_ITS_OWN
        else getattr(aten, name).default(*wide, **kwargs)
    )
    return result.div_(count).to(first.dtype)
