"""Rules of the ops of neural networks whose notation depends on flags: norms, convolution, losses, attention."""

from __future__ import annotations

from autopar.rules.call import Call, argument, slots
from autopar.rules.notation import WHOLE, Factors, parse


def layer_norm(call: Call) -> Factors:
    """native_layer_norm: the normalized dims stay whole."""
    last = " ".join(WHOLE * len(argument(call, "normalized_shape")))
    return parse(f"... {last}, {last}, {last} -> ... {last}, ... {last}, ... {last}", call)


def layer_norm_backward(call: Call) -> Factors:
    """native_layer_norm_backward: the gradients of weight and bias are partial sums over the other dims."""
    last = " ".join(WHOLE * len(argument(call, "normalized_shape")))
    operands = f"... {last}, ... {last}, ... {last}, ... {last}, {last}, {last}"
    return parse(f"{operands} -> ... {last}, {last}, {last}", call, linear=((0,),))


def group_norm(call: Call) -> Factors:
    """native_group_norm: batch, and channels by whole groups, whose statistics are [n, groups]."""
    space, c = " ".join(WHOLE * (len(call.inputs[0].shape) - 2)), WHOLE if argument(call, "group") == 1 else "c"
    return parse(f"n {c} {space}, {c}, {c} -> n {c} {space}, n {c}, n {c}", call)


def group_norm_backward(call: Call) -> Factors:
    """As `group_norm`; the gradients of weight and bias are partial sums over the batch."""
    space, c = " ".join(WHOLE * (len(call.inputs[0].shape) - 2)), WHOLE if argument(call, "group") == 1 else "c"
    return parse(f"n {c} {space}, n {c} {space}, n {c}, n {c}, {c} -> n {c} {space}, {c}, {c}", call, linear=((0,),))


def _channels(call: Call) -> tuple[str, str, str, str]:
    """Letters of: input channels, the weight's two channel dims, output channels."""
    groups, transposed = argument(call, "groups"), argument(call, "transposed")
    if groups == 1:
        return ("c", "c", "o", "o") if transposed else ("c", "o", "c", "o")
    depthwise = groups == call.inputs[slots(call).index(argument(call, "input").index)].shape[1]
    return ("g", "g", WHOLE, "g") if depthwise else (WHOLE,) * 4


def convolution(call: Call) -> Factors:
    """Batch, output channels, groups where each has one channel, and, without a bias, input channels. Spatial dims stay
    whole. With a bias a partial sum over input channels would count it once per rank."""
    space = " ".join(WHOLE * (len(call.inputs[0].shape) - 2))
    has_bias = argument(call, "bias") is not None
    x, w0, w1, out = (WHOLE if letter == "c" and has_bias else letter for letter in _channels(call))
    text = f"n {x} {space}, {w0} {w1} {space}, {out} -> n {out} {space}"
    return parse(text, call, linear=() if has_bias else ((0,), (1,)))


def convolution_backward(call: Call) -> Factors:
    """As `convolution`; the bias' gradient depends on no input channel."""
    space = " ".join(WHOLE * (len(call.inputs[0].shape) - 2))
    x, w0, w1, out = _channels(call)
    operands = f"n {out} {space}, n {x} {space}, {w0} {w1} {space}"
    return parse(f"{operands} -> n {x} {space}, {w0} {w1} {space}, {out} =c", call, linear=())


def nll_loss_forward(call: Call) -> Factors:
    """The class dim stays whole; the batch too where the loss is a mean, whose divisor is global."""
    n = WHOLE if argument(call, "reduction", 1) == 1 else "n"
    batched = len(call.inputs[0].shape) == 2
    term = f"{n} _" if batched else "_"
    return parse(f"{term}, {n if batched else ''}, _ -> {n if call.outputs[0].shape else ''}, ", call)


def nll_loss_backward(call: Call) -> Factors:
    """Parallel over the batch: the divisor is an operand."""
    grad = "n" if call.inputs[0].shape else ""
    if len(call.inputs[1].shape) == 2:
        return parse(f"{grad}, n _, n, _,  -> n _", call)
    return parse(", _, , _,  -> _", call)


def weight_norm(call: Call) -> Factors:
    """_weight_norm_interface and its backward: norms are taken over all dims but one, which is parallel."""
    dim, rank = argument(call, "dim", 0), len(call.inputs[0].shape)
    term = " ".join("n" if d == dim % rank else WHOLE for d in range(rank))
    return parse(f"{', '.join([term] * len(call.inputs))} -> {term}, {term}", call, linear=((0,),) if len(call.inputs) > 2 else ())


def attention(call: Call) -> Factors:
    """Batch and heads; the query's sequence dim where no mask is made from positions."""
    q = WHOLE if argument(call, "is_causal", False) else "q"
    return parse(f"b h {q} _, b h _ _, b h _ _, b h {q} _ -> b h {q} _, b h {q}", call)


def attention_backward(call: Call) -> Factors:
    """As `attention`; over the query's sequence the gradients of key and value are partial sums."""
    q = WHOLE if argument(call, "is_causal", False) else "q"
    row = f"b h {q} _"
    return parse(f"{row}, {row}, b h _ _, b h _ _, {row}, b h {q}, {row} -> {row}, b h _ _, b h _ _", call)
