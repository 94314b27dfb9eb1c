"""The table of sharding rules, with one row per op.

A row is a notation text (see `notation`), or a family: a function from a call to its factors.
`linear` lists sets of slots in which the op is linear together. `localization` defines the local
arguments of ops.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar import ops
from autopar.core.hardware import WorkKind
from autopar.errors import RuleError
from autopar.ops import extremes, norms, random
from autopar.ops.formats import aten_op_of
from autopar.rules import families as f
from autopar.rules import flex_attention, networks, spatial
from autopar.rules.call import Call, argument, op_name
from autopar.rules.dispatch import dispatch_options
from autopar.rules.further import FURTHER
from autopar.rules.notation import BOTH, EITHER, FIRST, Factors, Row, parse

aten = torch.ops.aten


POINTWISE = f.pointwise()

MATMUL: Mapping[Any, f.Family] = {
    ops.dot: f.dot,
    aten.mm.default: Row("m k, k n -> m n", EITHER),
    aten.bmm.default: Row("b m k, b k n -> b m n", EITHER),
    aten.addmm.default: Row("m n, m _, _ n -> m n", ((0, 1), (0, 2))),
    aten.baddbmm.default: Row("b m n, b m _, b _ n -> b m n", ((0, 1), (0, 2))),
    aten.convolution.default: spatial.convolution,
    aten.convolution_backward.default: spatial.convolution_backward,
    ops.attention: networks.attention,
    ops.attention_backward: networks.attention_backward,
    **flex_attention.ROWS,
}

EMBEDDING: Mapping[Any, f.Family] = {
    ops.embedding: Row("v d, ... -> ... d", FIRST),
    ops.embedding_backward: Row("... d, ... -> v d", FIRST),
    aten.embedding.default: Row("_ d, ... -> ... d", FIRST),
    aten.embedding_dense_backward.default: lambda call: parse(
        # scaling by frequency needs the counts over all ids
        "_ _ d, _ _ -> _ d" if argument(call, "scale_grad_by_freq", False) else "... d, ... -> _ d",
        call,
        FIRST,
    ),
}

EXPERTS: Mapping[
    Any, f.Family
    # f is the hidden dim between two linear layers; partial results over f or experts are summed
] = {
    ops.experts: f.also(
        Row("t _, t p, t p, e _ f _, e d f -> t d", ((2,), (4,))), dispatch_options
    ),
    ops.experts_backward: f.also(
        Row("t d, t _, t p, t p, e _ f _, e d f -> t _, t p, e _ f _, e d f", FIRST),
        dispatch_options,
    ),
}

LOSS: Mapping[Any, f.Family] = {
    ops.sum_exp: Row("... v, ... -> ..."),
    ops.pick: Row("... v, ... -> ...", FIRST),
    ops.cross_entropy_backward: Row("... v, ..., ..., ..., ... -> ... v"),
    ops.linear_cross_entropy: Row("... _, _ _, ... -> ..., ... _, _ _"),
    ops.ctc: Row("_ n _, n _, n, n -> n, _ n _"),
    aten.nll_loss_forward.default: networks.nll_loss_forward,
    aten.nll_loss_backward.default: networks.nll_loss_backward,
    **{op: networks.loss for op in networks.LOSSES},
    **{op: networks.loss_gradient for op in networks.LOSS_GRADIENTS},
}

NORMS: Mapping[Any, f.Family] = {
    aten.native_layer_norm.default: networks.layer_norm,
    aten.native_layer_norm_backward.default: networks.layer_norm_backward,
    aten.native_group_norm.default: networks.group_norm,
    aten.native_group_norm_backward.default: networks.group_norm_backward,
    norms.channel_sum: Row("n c ... -> c", FIRST),
    norms.squared_deviation: Row("n c ..., c -> c"),
    norms.scaled_product: Row("n c ..., n c ..., c, c -> c", FIRST),
    norms.normalize: Row("n c ..., c, c, c, c -> n c ..."),
    norms.normalize_backward: Row("n c ..., n c ..., c, c, c, c, c -> n c ..."),
    ops.square_sum: Row("... h -> ..."),
    ops.rms_norm: Row("... h, ..., h -> ... h"),
    ops.rms_product: Row("... h, ... h, h -> ...", FIRST),
    ops.rms_norm_backward: Row("... h, ... h, ..., ..., h -> ... h", ((0, 3),)),
    ops.rms_weight_gradient: Row("... h, ... h, ... -> h", FIRST),
    aten._softmax.default: f.along(),
    aten._log_softmax.default: f.along(),
    aten._safe_softmax.default: f.along(),
    aten._weight_norm_interface.default: networks.weight_norm,
    aten._weight_norm_interface_backward.default: networks.weight_norm,
    aten._softmax_backward_data.default: f.along(FIRST),
    aten._log_softmax_backward_data.default: f.along(FIRST),
}

POOLING: Mapping[Any, f.Family] = {
    aten.max_pool2d_with_indices.default: spatial.max_pool(2),
    aten.max_pool3d_with_indices.default: spatial.max_pool(3),
    aten.max_pool2d_with_indices_backward.default: spatial.max_pool_backward(2),
    aten.max_pool3d_with_indices_backward.default: spatial.max_pool_backward(3),
    aten.avg_pool2d.default: spatial.avg_pool(2),
    aten.avg_pool3d.default: spatial.avg_pool(3),
    aten.avg_pool2d_backward.default: spatial.avg_pool_backward(2),
    aten.avg_pool3d_backward.default: spatial.avg_pool_backward(3),
    aten._adaptive_avg_pool2d.default: Row("... _ _ -> ... _ _", FIRST),
    aten._adaptive_avg_pool3d.default: Row("... _ _ _ -> ... _ _ _", FIRST),
    aten._adaptive_avg_pool2d_backward.default: Row("... _ _, ... _ _ -> ... _ _", FIRST),
    aten._adaptive_avg_pool3d_backward.default: Row("... _ _ _, ... _ _ _ -> ... _ _ _", FIRST),
}

REDUCTIONS: Mapping[Any, f.Family] = {
    **{
        op: f.reduction(linear=True)
        for op in (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
    },
    **{op: f.reduction("max") for op in (aten.amax.default, aten.max.default)},
    **{op: f.reduction("min") for op in (aten.amin.default, aten.min.default)},
    **{
        op: f.reduction(whole=True)
        for op in (
            aten.var.dim,
            aten.var.correction,
            aten.var_mean.correction,
            aten.std.correction,
            aten.logsumexp.default,
            aten.linalg_vector_norm.default,
            aten.max.dim,
            aten.min.dim,
            aten.argmax.default,
            aten.argmin.default,
            aten.any.dim,
            aten.any.default,
            aten.all.default,
            aten.all.dim,
            aten.prod.dim_int,
        )
    },
    extremes.is_extreme: f.along(),
    extremes.is_scattered_extreme: f.scatter(linear=False),
    extremes.cdist_backward: Row("... p r, ... p _, ... r _ -> ... p _", FIRST),
    **{op: f.along() for op in (aten.sort.default, aten.argsort.stable, aten.topk.default)},
    aten.flip.default: f.along(FIRST),
    aten.cumsum.default: f.along(FIRST),
    aten.roll.default: f.along(FIRST, dim=()),  # without dims, it rolls the flattened tensor
    aten.histc.default: f.histogram,
    aten.tril.default: f.triangle,
    aten.triu.default: f.triangle,
}

VIEWS: Mapping[Any, f.Family] = {
    **{
        op: f.view
        for op in (
            aten.view.default,
            aten._unsafe_view.default,
            aten.reshape.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.unsqueeze.default,
        )
    },
    **{op: f.permutation for op in (aten.permute.default, aten.transpose.int, aten.t.default)},
    aten.expand.default: Row("... -> ...", FIRST),
    aten.select.int: f.select,
    aten.unbind.int: f.select,
    aten.select_backward.default: f.select_backward,
    aten.select_scatter.default: f.select_scatter,
    aten.slice.Tensor: f.slice_,
    aten.slice_backward.default: f.along(FIRST),
    aten.slice_scatter.default: f.along(((),), dim=0),
    aten.split.Tensor: f.along(FIRST, dim=0),
    aten.split_with_sizes.default: f.along(FIRST, dim=0),
    aten.cat.default: f.along(((),), dim=0),
    aten.stack.default: f.stack,
    aten.constant_pad_nd.default: f.pad,
    aten.repeat.default: f.repeat,
    operator.getitem: f.getitem,
}

INDEXING: Mapping[Any, f.Family] = {
    **{op: f.index for op in (aten.index.Tensor, aten._unsafe_index.Tensor)},
    **{op: f.index_put for op in (aten.index_put.default, aten._unsafe_index_put.default)},
    aten.gather.default: f.gather,
    aten.scatter.value: f.scatter(linear=False),
    aten.scatter.src: f.scatter(linear=True),
    aten.scatter_add.default: f.scatter(linear=True),
}

FACTORIES: Mapping[Any, f.Family] = {
    ops.constant: f.factory,
    **{
        op: f.factory
        for op in (
            aten.arange.default,
            aten.arange.start,
            aten.arange.start_step,
            aten.full.default,
            aten.zeros.default,
            aten.ones.default,
            aten.empty.memory_format,
            aten.scalar_tensor.default,
            aten.eye.default,
        )
    },
    **{
        op: f.new_tensor
        for op in (
            aten.new_zeros.default,
            aten.new_ones.default,
            aten.new_full.default,
            aten.new_empty.default,
        )
    },
}

POINTWISE_LINEAR: Mapping[Any, f.Family] = {
    **{op: f.pointwise(BOTH) for op in (aten.add.Tensor, aten.sub.Tensor)},
    **{op: f.pointwise(EITHER) for op in (aten.mul.Tensor,)},
    **{op: f.pointwise(((1, 2),)) for op in (aten.where.self,)},
    aten.addcmul.default: f.pointwise(((0, 1), (0, 2))),
    **{
        op: f.pointwise(FIRST)
        for op in (
            aten.div.Tensor,
            aten.div.Scalar,
            aten.mul.Scalar,
            aten.neg.default,
            aten.clone.default,
            aten.detach.default,
            aten.zero.default,
            aten.alias.default,
            aten.lift_fresh_copy.default,
            aten._to_copy.default,
            aten.gelu_backward.default,
            aten.silu_backward.default,
            aten.tanh_backward.default,
            aten.sigmoid_backward.default,
            aten.threshold_backward.default,
            aten.softplus_backward.default,
        )
    },
    aten.masked_fill.Scalar: lambda call: f.pointwise(
        FIRST if argument(call, "value") == 0 else ()
    )(call),
    aten.copy.default: f.pointwise(((1,),)),
}

RANDOM: Mapping[Any, f.Family] = {
    **{op: f.drawn for op in (random.keep_mask, random.uniform, random.normal, random.randint)},
    random.masked_scale: f.pointwise(FIRST),
    random.gamma: Row("..., ... _, ... _, ... -> ..."),
    aten._standard_gamma_grad.default: f.pointwise(),
    aten._dirichlet_grad.default: Row("... _, ... _, ... _ -> ... _"),
}

POINTWISE_UNTAGGED = (
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.floor_divide.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.masked_fill.Tensor,
)

TABLE: Mapping[Callable[..., Any], f.Family] = {
    **MATMUL,
    **EMBEDDING,
    **EXPERTS,
    **LOSS,
    **NORMS,
    **POOLING,
    **REDUCTIONS,
    **VIEWS,
    **INDEXING,
    **FACTORIES,
    **POINTWISE_LINEAR,
    **RANDOM,
    **{op: POINTWISE for op in POINTWISE_UNTAGGED},
    **FURTHER,
}


# --------------------------------------------------------------------------------------------------
# Rules registered by users (see `registration`).


@dataclass(frozen=True, slots=True)
class RegisteredRule:
    """The rule of a custom op, and the work of the op.

    Attributes:
        row: the rule.
        flops: function from the local shapes of the tensor operands, one argument per operand, to
            the flops of a call; None for an op whose time only depends on its bytes.
        kind: kind of work (`autopar.analysis.work`); one of `FLOP_KINDS` if `flops` is set.
    """

    row: Row
    flops: Callable[..., int] | None = None
    kind: WorkKind = "elementwise"

    def __call__(self, call: Call) -> Factors:
        return self.row(call)

    def count_flops(self, target: Callable[..., Any], shapes: Sequence[tuple[int, ...]]) -> int:
        """Compute the flops of a call.

        Args:
            target: the op, for errors.
            shapes: local shapes of its tensor operands.

        Raises:
            RuleError: the user's function raises an error or does not return a nonnegative integer.
        """
        if self.flops is None:
            return 0
        try:
            count: Any = self.flops(*shapes)
        except Exception as error:  # a user's function may raise any error
            problem = f"raises {type(error).__name__}: {error}"
        else:
            if isinstance(count, int) and count >= 0:
                return count
            problem = f"returns {count!r}"
        raise RuleError(
            f"the flops function of the op {problem} for operands of shapes {list(shapes)}",
            where=op_name(target),
            remedy=(
                "pass a function that takes one shape per tensor operand and returns a"
                " non-negative integer, as in flops=lambda x, w: 2 * x[0] * x[1] * w[1]"
            ),
        )


REGISTERED: dict[Callable[..., Any], RegisteredRule] = {}
"""Op → the rule that a user registered."""


def registered_rule(target: Callable[..., Any]) -> RegisteredRule | None:
    """Return the registered rule of an op, or None."""
    return REGISTERED.get(aten_op_of(target))


def rule_of(target: Callable[..., Any]) -> f.Family | None:
    """Return the rule of an op: its row in the table, else the registered rule, else that of
    pointwise ops if torch tags the op as pointwise, else None. A function that replaces an ATen op
    has the rule of that op."""
    target = aten_op_of(target)
    if target in TABLE:
        return TABLE[target]
    if target in REGISTERED:
        return REGISTERED[target]
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    if torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags:
        return POINTWISE
    return None
