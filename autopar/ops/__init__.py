"""The functions that normal-form graphs contain in addition to ATen ops. Each consists of plain
calls of ATen, which define its results.

They replace ATen ops that cannot be sharded. `dot` does not flatten batch and sequence. `embedding`
and the ops of the cross entropy support a part of the vocabulary, whose first index is `start`.
`attention` is one op on all devices. The ops of a root-mean-square norm support a part of the
normalized dim. `constant` is a tensor in the code of the graph. These functions are not
differentiable, since the graph contains backward explicitly.

`experts` and `ctc`, whose shapes depend on values, `flex_attention`, which calls the user's
functions, and `normed`, which is split into several ops, are opaque custom ops of torch, and so are
their gradients. These ops are differentiable.
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
