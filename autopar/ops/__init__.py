"""The functions that stand in normal-form graphs beside ATen ops. Each is its own reference: plain
calls of ATen.

They exist because their ATen spelling cannot be sharded: `dot` keeps batch and sequence apart where
ATen flattens them; `embedding` and the pieces of the cross entropy work on a part of the
vocabulary, told by `start`, its first index; `attention` is one op on every device; the pieces of a
root-mean-square norm work on a part of what is normed; `constant` is a tensor in the graph's own
code. None is differentiable: backward is written out in the graph. `experts` and `ctc`, whose
shapes depend on values, `flex_attention`, which runs the user's functions, and `normed`, which the
pieces replace, are operators of torch's instead, opaque and differentiable, as are their gradients.
"""

from __future__ import annotations

from autopar.ops.blocks import constant
from autopar.ops.expert_layers import experts, experts_backward
from autopar.ops.flex import flex_attention, flex_attention_backward
from autopar.ops.norms import (
    normed,
    normed_backward,
    rms_norm,
    rms_norm_backward,
    rms_product,
    rms_weight_gradient,
    square_sum,
)
from autopar.ops.products import dot
from autopar.ops.softmax_attention import attention, attention_backward
from autopar.ops.vocabulary import (
    cross_entropy_backward,
    cross_entropy_backward_,
    cross_entropy_backward_scratch,
    ctc,
    ctc_joined,
    ctc_loss,
    embedding,
    embedding_backward,
    linear_cross_entropy,
    pick,
    sum_exp,
)

__all__ = [
    "attention",
    "attention_backward",
    "constant",
    "cross_entropy_backward",
    "cross_entropy_backward_",
    "cross_entropy_backward_scratch",
    "ctc",
    "ctc_joined",
    "ctc_loss",
    "dot",
    "embedding",
    "embedding_backward",
    "experts",
    "experts_backward",
    "flex_attention",
    "flex_attention_backward",
    "linear_cross_entropy",
    "normed",
    "normed_backward",
    "pick",
    "rms_norm",
    "rms_norm_backward",
    "rms_product",
    "rms_weight_gradient",
    "square_sum",
    "sum_exp",
]
