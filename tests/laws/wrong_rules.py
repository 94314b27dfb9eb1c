"""Deliberately wrong rules by their error. WRONG[name] is an op and the row that replaces its own
row; MISPLACED[name] an op and its local arguments; UNEVEN[name] likewise, but correct if all shards
are equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from rule_cases import Built, Case, on, real
from torch.distributed.tensor import Partial, Shard

from autopar import ops
from autopar.core.layout import local_shape
from autopar.core.placements import REPLICATE, Halo, Mirrored
from autopar.ops import norms, random
from autopar.rules import dispatch, localization, networks, spatial
from autopar.rules import families as f
from autopar.rules.call import Call, argument
from autopar.rules.networks import mean_loss_part
from autopar.rules.notation import BOTH, EITHER, FIRST, WHOLE, AxisOption, Factors, Row, parse
from autopar.rules.site import Local, Start, groups_of

aten = torch.ops.aten


def always(text: str, *linear: tuple[int, ...], reduce_op: str = "sum") -> Row:
    return Row(text, linear, reduce_op)


def inner_factor(call: Call) -> Factors:
    """A view that shards the last dim of each group, as if the leading dims were replicated."""
    right = f.view(call)
    return Factors((right.inputs[0][1:] + right.inputs[0][:1],), right.outputs, linear=((0,),))


def flattened(call: Call) -> Factors:
    """Any dim of a view that has the size of the previous one."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    letters = [
        f"d{d}" if d < len(after) and after[d] == size else WHOLE for d, size in enumerate(before)
    ]
    return Factors((tuple(letters),), (tuple(f"d{d}" for d in range(len(after))),))


def kept_in_place(call: Call) -> Factors:
    """A permutation treated as the identity."""
    term = tuple(f"d{d}" for d in range(len(call.inputs[0].shape)))
    return Factors((term,), (term,))


def selected(call: Call) -> Factors:
    """The selected dim treated as the last dim."""
    term = tuple(f"d{d}" for d in range(len(call.inputs[0].shape)))
    return Factors((term,), (term[:-1],) * len(call.outputs))


def sliced(call: Call) -> Factors:
    """A slice that keeps its dim sharded."""
    term = tuple(f"d{d}" for d in range(len(call.inputs[0].shape)))
    return Factors((term,), (term,))


def stacked(call: Call) -> Factors:
    """The new dim treated as the first dim."""
    term = tuple(f"d{d}" for d in range(len(call.inputs[0].shape)))
    return Factors((term,) * len(call.inputs), ((WHOLE, *term),))


def appended(call: Call) -> Factors:
    """The dim of the concatenation sharded in all operands."""
    term = tuple(f"d{d}" for d in range(len(call.inputs[0].shape)))
    return Factors((term,) * len(call.inputs), (term,))


def indexed(call: Call) -> Factors:
    """The indexed dim sharded with the index."""
    right = f.index(call)
    return Factors((("i0", *right.inputs[0][1:]), *right.inputs[1:]), right.outputs)


def gathered(call: Call) -> Factors:
    """All dims sharded, including the dim of the gather."""
    term = tuple(f"d{d}" for d in range(len(call.inputs[0].shape)))
    return Factors((term, term), (term,))


def searched(call: Call) -> Factors:
    """All dims sharded in order, even if all share one row."""
    result = ("d0", WHOLE, WHOLE)[: len(call.outputs[0].shape)]
    return Factors(
        tuple(tuple(f"d{d}" for d in range(len(i.shape))) for i in call.inputs), (result,)
    )


def spatial_convolution(call: Call) -> Factors:
    """Rows of pixels sharded without the halo that the kernel needs."""
    return parse("n _ h _, _ _ _ _, _ -> n _ h _", call)


def around(change: Callable[[AxisOption], AxisOption], rule: f.Family) -> f.Family:
    """A row with changed options over spatial dims."""
    return lambda call: replace(factors := rule(call), further=tuple(map(change, factors.further)))


def _halos(option: AxisOption, change: Callable[[Halo], Shard], operand: int = 0) -> AxisOption:
    inputs = (
        change(p) if i == operand and isinstance(p, Halo) else p
        for i, p in enumerate(option.inputs)
    )
    return AxisOption(tuple(inputs), option.outputs)


def _mirrored(outputs: Callable[[Mirrored], Shard], rule: f.Family, first: Any = None) -> f.Family:
    """A row whose options of mirrored shards have other outputs and, if given, another first
    operand, or sharded keys."""

    def change(option: AxisOption) -> AxisOption:
        if not isinstance(option.outputs[0], Mirrored):
            return option
        inputs = option.inputs
        if first == REPLICATE:  # keys and values with the layout of queries
            inputs = (inputs[0],) * len(inputs)
        elif first is not None:
            inputs = (first, *inputs[1:])
        return AxisOption(
            inputs, tuple(outputs(p) if isinstance(p, Mirrored) else p for p in option.outputs)
        )

    return around(change, rule)


def _one_short(option: AxisOption) -> AxisOption:
    return _halos(option, lambda h: Halo(h.dim, h.before, h.after - 1))


def _zeros_beyond(option: AxisOption) -> AxisOption:
    return _halos(option, lambda h: Halo(h.dim, h.before, h.after))


def _own_gradients(option: AxisOption) -> AxisOption:
    return _halos(option, lambda h: Shard(h.dim))


def _not_added(option: AxisOption) -> AxisOption:
    return AxisOption(
        option.inputs, tuple(REPLICATE if isinstance(p, Partial) else p for p in option.outputs)
    )


def swapped_channels(call: Call) -> Factors:
    return parse("n o _ _, o c _ _, _ -> n c _ _", call)


def biased_convolution(call: Call) -> Factors:
    """A bias that each rank adds to its partial sum."""
    return parse("n c _ _, o c _ _, o -> n o _ _", call)


def causal_backward(call: Call) -> Factors:
    """Gradients of key and value that are not summed over the shards of the query."""
    q = "b h q _"
    return parse(
        f"{q}, {q}, b h _ _, b h _ _, {q}, b h q, {q} -> {q}, b h _ =q _, b h _ =q _", call
    )


_AS_POINTWISE = f.pointwise()
WRONG: Mapping[str, tuple[Any, f.Family]] = {
    "letters of the result swapped": (aten.mm.default, always("m k, k n -> n m")),
    "letters of an operand swapped": (aten.mm.default, always("m k, n k -> m n")),
    "a contraction that every rank has in full": (aten.mm.default, always("m k, k n -> m =k n")),
    "a contraction that takes the maximum": (
        aten.mm.default,
        always("m k, k n -> m n", reduce_op="max"),
    ),
    "a product linear in both together": (aten.mm.default, always("m k, k n -> m n", (0, 1))),
    "a batch split in one operand only": (aten.bmm.default, always("b m k, _ k n -> b m n")),
    "a bias that every rank adds": (aten.addmm.default, always("m n, m k, k n -> m n")),
    "a bias left out of the linear set": (aten.addmm.default, always("m n, m _, _ n -> m n", (1,))),
    "three operands linear together": (
        aten.baddbmm.default,
        always("b m n, b m _, b _ n -> b m n", (0, 1, 2)),
    ),
    "an inner product by its largest part": (aten.dot.default, always("k, k -> ", reduce_op="max")),
    "an outer dim contracted": (aten.mv.default, always("m k, m -> k")),
    "pixels split without a halo": (aten.convolution.default, spatial_convolution),
    "a halo one row short": (aten.convolution.default, around(_one_short, spatial.convolution)),
    "zeros beyond the ends of a maximum": (
        aten.max_pool2d_with_indices.default,
        around(_zeros_beyond, spatial.max_pool(2)),
    ),
    "a gradient of results without its halo": (
        aten.convolution_backward.default,
        around(_own_gradients, spatial.convolution_backward),
    ),
    "a weight's gradient not added over space": (
        aten.convolution_backward.default,
        around(_not_added, spatial.convolution_backward),
    ),
    "a maximum's gradient without its halo": (
        aten.max_pool2d_with_indices_backward.default,
        around(_own_gradients, spatial.max_pool_backward(2)),
    ),
    "input and output channels swapped": (aten.convolution.default, swapped_channels),
    "a convolution's bias added to partial sums": (aten.convolution.default, biased_convolution),
    "a weight's gradient not added over the batch": (
        aten.convolution_backward.default,
        always("n o _ _, n _ _ _, o _ _ _ -> n _ _ _, o =n _ _ _, o"),
    ),
    "a bias' gradient added over input channels": (
        aten.convolution_backward.default,
        always("_ _ _ _, _ c _ _, _ c _ _ -> _ c _ _, _ c _ _, _"),
    ),
    "keys split, their softmax taken for a sum": (
        ops.attention,
        always("b h _ _, b h k _, b h k _, b h _ k -> b h _ _, b h _"),
    ),
    "heads of the queries without those of the keys": (
        ops.attention,
        always("b h _ _, b _ _ _, b _ _ _, b _ _ _ -> b h _ _, b h _"),
    ),
    "a key's gradient not added over queries": (ops.attention_backward, causal_backward),
    "mirrored queries whose results are taken for plain": (
        ops.attention,
        _mirrored(lambda p: Shard(p.dim), networks.attention),
    ),
    "plain queries whose results are taken for mirrored": (
        ops.attention,
        _mirrored(lambda p: p, networks.attention, Shard(2)),
    ),
    "mirrored keys": (ops.attention, _mirrored(lambda p: p, networks.attention, REPLICATE)),
    "a gradient read plain by mirrored queries": (
        ops.attention_backward,
        _mirrored(lambda p: p, networks.attention_backward, Shard(2)),
    ),
    "a look-up's parts reduced by maximum": (ops.embedding, Row("v d, ... -> ... d", FIRST, "max")),
    "experts' parts reduced by maximum": (
        ops.experts,
        Row("t _, t p, t p, e _ f _, e d f -> t d", (), "max"),
    ),
    "tokens' features split before an activation": (
        ops.experts,
        Row("t h, t p, t p, e _ f h, e d f -> t d"),
    ),
    "experts split, what they make taken for whole": (
        ops.experts,
        Row("t _, t p, t p, e _ f _, e d f -> t d =e"),
    ),
    "an expert's gradient not added over tokens": (
        ops.experts_backward,
        Row("t d, t _, t p, t p, e _ f _, e d f -> t _, t p, e _ f _ =t, e d f =t"),
    ),
    "gates' gradient not added over experts": (
        ops.experts_backward,
        Row("t d, t _, t p, t p, e _ f _, e d f -> t _, t p =e, e _ f _, e d f"),
    ),
    "a vocabulary split without its start": (
        aten.embedding.default,
        Row("v d, ... -> ... d", FIRST),
    ),
    "a sum of exponentials by its maximum": (ops.sum_exp, Row("... v, ... -> ...", (), "max")),
    "a sum of exponentials linear": (ops.sum_exp, Row("... v, ... -> ...", FIRST)),
    "classes of a likelihood split": (
        aten.nll_loss_forward.default,
        lambda call: parse("_ c, _, c -> , ", call),
    ),
    "a mean over a split batch added up": (
        aten.nll_loss_forward.default,
        lambda call: parse("n _, n, _ -> , ", call),
    ),
    "layer norm over a split dim": (
        aten.native_layer_norm.default,
        always("a b c, c, c -> a b c, a b _, a b _"),
    ),
    "a norm's weight gradient not added": (
        aten.native_layer_norm_backward.default,
        always("... _, ... _, ... _, ... _, _, _ -> ... _, _ =.1 =.2, _ =.1 =.2"),
    ),
    "a norm's backward linear in its operand": (
        aten.native_layer_norm_backward.default,
        always("... _, ... _, ... _, ... _, _, _ -> ... _, _, _", (0, 1)),
    ),
    "pixels of group norm split": (
        aten.native_group_norm.default,
        always("n _ h _, _, _ -> n _ h _, n _, n _"),
    ),
    "statistics of group norm whole": (
        aten.native_group_norm.default,
        always("_ c _ _, c, c -> _ c _ _, _ _ =c, _ _ =c"),
    ),
    "softmax over a split dim": (aten._softmax.default, _AS_POINTWISE),
    "logarithms of softmax over a split dim": (aten._log_softmax.default, _AS_POINTWISE),
    "softmax linear": (aten._softmax.default, f.along(FIRST)),
    "softmax' backward linear in both": (aten._softmax_backward_data.default, f.along(BOTH)),
    "batch statistics by maximum": (norms.channel_sum, Row("n c ... -> c", FIRST, "max")),
    "squares of a row by maximum": (ops.square_sum, always("... h -> ...", reduce_op="max")),
    "a norm of partial squares": (ops.rms_norm, always("... h, ..., h -> ... h", (1,))),
    "a norm's gradient linear in the result's alone": (
        ops.rms_norm_backward,
        always("... h, ... h, ..., ..., h -> ... h", (0,)),
    ),
    "a norm's gradient with its product whole": (
        ops.rms_norm_backward,
        always("... h, ... h, ..., ..., h -> ... h", (3,)),
    ),
    "a weight's gradient linear in squares": (
        ops.rms_weight_gradient,
        always("... h, ... h, ... -> h", (2,)),
    ),
    "squares linear": (norms.squared_deviation, Row("n c ..., c -> c", FIRST)),
    "a channel's mean left whole": (norms.squared_deviation, Row("n c ..., _ -> c")),
    "a norm of weights over a split dim": (
        aten._weight_norm_interface.default,
        always("a b c, a b c -> a b c, a b c"),
    ),
    "pooling over split pixels": (
        aten.max_pool2d_with_indices.default,
        always("n c h _ -> n c h _, n c h _"),
    ),
    "a maximum linear": (aten.amax.default, f.reduction("max", linear=True)),
    "a maximum added up": (aten.amax.default, f.reduction()),
    "a minimum by maximum": (aten.amin.default, f.reduction("max")),
    "a sum by maximum": (aten.sum.dim_IntList, f.reduction("max")),
    "a reduced dim shifted by one": (
        aten.sum.dim_IntList,
        lambda call: (
            parse("a b c -> a", call)
            if len(call.outputs[0].shape) == 1
            else parse("... -> ...", call)
        ),
    ),
    "variances added up": (aten.var.correction, f.reduction()),
    "products added up": (aten.prod.dim_int, f.reduction()),
    "norms added up": (aten.linalg_vector_norm.default, f.reduction()),
    "logarithms of sums added up": (aten.logsumexp.default, f.reduction()),
    "places of maxima by maximum": (aten.argmax.default, f.reduction("max")),
    "a running sum along a split dim": (aten.cumsum.default, _AS_POINTWISE),
    "an order along a split dim": (aten.sort.default, _AS_POINTWISE),
    "a flip of parts": (aten.flip.default, _AS_POINTWISE),
    "a roll of parts": (aten.roll.default, _AS_POINTWISE),
    "a triangle of parts": (aten.tril.default, _AS_POINTWISE),
    "counts by maximum": (aten.histc.default, always("a b -> _", reduce_op="max")),
    "a view that splits the inner factor": (aten.view.default, inner_factor),
    "a view that splits what stays in place": (aten.view.default, flattened),
    "a permutation forgotten": (aten.permute.default, kept_in_place),
    "a transposition forgotten": (aten.transpose.int, kept_in_place),
    "another dim selected": (aten.select.int, selected),
    "a slice of parts": (aten.slice.Tensor, sliced),
    "parts put one after the other, the operands too": (aten.cat.default, appended),
    "the new dim in another place": (aten.stack.default, stacked),
    "padding with a number passes partial sums": (
        aten.constant_pad_nd.default,
        f.along(FIRST, dim=(0, 1)),
    ),
    "padding of parts": (aten.constant_pad_nd.default, sliced),
    "a repeated dim split": (aten.repeat.default, lambda call: parse("a b -> _ a b", call)),
    "an indexed dim split": (aten.index.Tensor, indexed),
    "a dim gathered from split": (aten.gather.default, gathered),
    "a dim scattered into split": (aten.scatter_add.default, always("a b, a b, a b -> a b")),
    "values put without what they are put into": (
        aten.scatter_add.default,
        always("_ _, _ _, _ _ -> _ _", (2,)),
    ),
    "a partial sum plus a whole": (aten.add.Tensor, f.pointwise(EITHER)),
    "a product of partial sums": (aten.mul.Tensor, f.pointwise(BOTH)),
    "a quotient by a partial sum": (aten.div.Tensor, f.pointwise(EITHER)),
    "an exponential linear": (aten.exp.default, f.pointwise(FIRST)),
    "a square linear": (aten.pow.Tensor_Scalar, f.pointwise(FIRST)),
    "a number added to partial sums": (aten.add.Scalar, f.pointwise(FIRST)),
    "one branch of a choice linear": (aten.where.self, f.pointwise(((1,), (2,)))),
    "a mask of numbers that are not zero": (aten.masked_fill.Scalar, f.pointwise(FIRST)),
    "an activation's gradient linear in both": (aten.gelu_backward.default, f.pointwise(BOTH)),
    "a product of three linear in all": (aten.addcmul.default, f.pointwise(((0, 1, 2),))),
    "a loss' gradient over partial sums": (
        aten.mse_loss_backward.default,
        lambda call: Factors(
            tuple((WHOLE,) * len(i.shape) for i in call.inputs),
            ((WHOLE,) * len(call.outputs[0].shape),),
            linear=((1,),),
        ),
    ),
    "a loss by its largest part": (
        aten.mse_loss.default,
        lambda call: Factors(
            (("a", "b", "c"),) * 2,
            (("a", "b", "c")[: len(call.outputs[0].shape)],),
            reduce_op="max",
        ),
    ),
    "a sorted row split": (aten.searchsorted.Tensor, searched),
    "norms of parts of slices": (aten.renorm.default, _AS_POINTWISE),
    "spectra of parts": (aten._fft_c2c.default, _AS_POINTWISE),
    "an inverse of parts": (aten.linalg_inv_ex.default, always("... a _ -> ... a _, ...")),
    "distances without some coordinates": (
        aten._cdist_forward.default,
        always("... p k, ... r k -> ... p r"),
    ),
}


def _convolved(s: Any) -> Built:
    """A convolution whose result has as many pixels as its operand."""
    return on(
        real(s.a, s.b, 4, 4), real(s.c, s.b, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    )


def _convolved_backward(s: Any) -> Built:
    (x, weight, _, *how), _ = _convolved(s)
    return on(real(s.a, s.c, 4, 4), x, weight, [s.c], *how, [True, True, True])


def _pooled(s: Any) -> Built:
    """Maxima of negative numbers, with as many results as pixels."""
    return on(real(s.a, s.b, 4, 4) - 3, [3, 3], [1, 1], [1, 1])


def _pooled_backward(s: Any) -> Built:
    (x, *how), _ = _pooled(s)
    values, indices = aten.max_pool2d_with_indices.default(x, *how)
    return on(real(*values.shape), x, *how, [1, 1], False, indices)


CASES_OF: Mapping[str, Case] = {
    "pixels split without a halo": _convolved,
    "a halo one row short": _convolved,
    "padding beside a halo": _convolved,
    "zeros beyond the ends of a maximum": _pooled,
    "indices within a part": _pooled,
    "pooling over split pixels": lambda s: on(real(s.a, s.b, 4, 4), [3, 3], [1, 1], [1, 1]),
    "a gradient of results without its halo": _convolved_backward,
    "a weight's gradient not added over space": _convolved_backward,
    "a maximum's gradient without its halo": _pooled_backward,
    "a mask of numbers that are not zero": lambda s: on(real(s.a, s.b), real(s.b) > 0, 2.0),
}
"""Where the rows' own cases would not offer the wrong strategy, or not show it."""


@dataclass(frozen=True, slots=True)
class FloorStart(Start):
    """The start of a shard if all shards had the size of the smaller ones."""

    def at(self, mesh_shape: Any, coordinate: Any) -> int:
        [axis] = self.layout.splitters(self.dim)
        return self.dim_size // mesh_shape[axis] * coordinate[axis]


def _change(site: Any, **changes: Any) -> Local:
    return site.change(**changes)


def _largest(site: Any, number: int = 0) -> tuple[int, ...]:
    return local_shape(
        site.call.outputs[number].shape, site.strategy.outputs[number], site.mesh_shape
    )


def _split(site: Any, operand: int = 0) -> bool:
    return any(isinstance(p, Shard) for p in site.strategy.inputs[operand].placements)


def _unplaced_draw(site: Any) -> Local:
    """Each rank draws the first shard."""
    return _change(site, shape=site.output_shape())


def _shrunk_draw(site: Any) -> Local:
    """A draw placed in a full tensor that has the size of a shard."""
    shape = site.call.outputs[0].shape
    starts = tuple(
        site.start(site.strategy.outputs[0], size, dim) for dim, size in enumerate(shape)
    )
    return _change(site, shape=site.output_shape(), window=(starts, site.output_shape()))


def _numbered_from(
    operand: int, dim: int, start: Callable[[Any, int], Any], sized: bool
) -> Callable[[Any], Local]:
    def local(site: Any) -> Local:
        shape, layout = site.call.inputs[operand].shape, site.strategy.inputs[operand]
        at = dim % len(shape)
        if not layout.splitters(at):
            return _change(site)
        return _change(site, start=start(site, at), **({"size": shape[at]} if sized else {}))

    return local


def _per_rank_mean(site: Any) -> Local:
    """The average of a rank divided by the number of ranks."""
    call = site.call
    reduced = f.dims_of(argument(call, "dim"), len(call.inputs[0].shape))
    split = [
        axis
        for axis, p in enumerate(site.strategy.inputs[0].placements)
        if isinstance(p, Shard) and p.dim in reduced
    ]
    if not split:
        return _change(site)
    num_parts = math.prod(site.mesh_shape[axis] for axis in split)
    return Local(
        _averaged,
        (call.args[0], tuple(reduced), bool(argument(call, "keepdim", False)), num_parts),
        {},
    )


def _averaged(
    x: torch.Tensor, dims: tuple[int, ...], keepdim: bool, num_parts: int
) -> torch.Tensor:
    return x.mean(dim=dims, keepdim=keepdim) / num_parts


def _per_rank_loss(site: Any) -> Local:
    """A mean loss over the number of elements of the largest shard times the number of ranks."""
    call = site.call
    if argument(call, "reduction", 1) != 1 or not _split(site):
        return _change(site)
    layout = site.strategy.inputs[0]
    count = math.prod(local_shape(call.inputs[0].shape, layout, site.mesh_shape)) * math.prod(
        site.mesh_shape
    )
    replicas = math.prod(
        n
        for n, p in zip(site.mesh_shape, layout.placements, strict=True)
        if not isinstance(p, Shard)
    )
    return Local(mean_loss_part, ("mse_loss", count // replicas, *call.args[:2], 2), {})


def _floor(operand: int, dim: int, sized: bool) -> Callable[[Any], Local]:
    def start(site: Any, at: int) -> Any:
        layout = site.strategy.inputs[operand]
        many = len(layout.splitters(at)) > 1
        return (Start if many else FloorStart)(site.call.inputs[operand].shape[at], layout, at)

    return _numbered_from(operand, dim, start, sized)


def _gathering(wrong: Callable[[Any], Local]) -> Callable[[Any], Local]:
    """Wrong if a rank has all tokens, but correct if they are dispatched."""
    return lambda site: (
        dispatch.local(site)
        if dispatch.dispatch_axes(site.call, site.strategy.inputs)
        else wrong(site)
    )


def _unmirrored(query: int) -> Callable[[Any], Local]:
    def local(site: Any) -> Local:
        found = localization._attention(query)(site)
        return Local(
            found.target, found.args, {n: x for n, x in found.kwargs.items() if n != "mirrored_in"}
        )

    return local


def _mirrored_in_more(site: Any) -> Local:
    found = localization._attention(0)(site)
    twice = (
        {"mirrored_in": found.kwargs["mirrored_in"] * 2} if "mirrored_in" in found.kwargs else {}
    )
    return Local(found.target, found.args, {**found.kwargs, **twice})


MISPLACED: Mapping[str, tuple[Any, Callable[[Any], Local]]] = {
    "mirrored queries placed as plain ones": (ops.attention, _unmirrored(0)),
    "mirrored queries' gradients placed as plain ones": (ops.attention_backward, _unmirrored(1)),
    "mirrored queries in a whole of the wrong size": (ops.attention, _mirrored_in_more),
    "a bias that every rank adds": (ops.dot, lambda site: _change(site)),
    "a bias that no rank adds": (
        ops.dot,
        lambda site: _change(site, starts=(1,)) if _split(site) else _change(site),
    ),
    "a mask that every rank draws alike": (random.keep_mask, _unplaced_draw),
    "a draw placed in a whole of the wrong size": (random.uniform, _shrunk_draw),
    "a vocabulary whose parts all start at 0": (
        ops.embedding,
        _numbered_from(0, 0, lambda site, at: 0, True),
    ),
    "experts whose parts all start at 0": (
        ops.experts,
        _numbered_from(3, 0, lambda site, at: 0, False),
    ),
    "experts' gradients whose parts all start at 0": (
        ops.experts_backward,
        _numbered_from(4, 0, lambda site, at: 0, False),
    ),
    "classes that all start at 1": (ops.pick, _numbered_from(0, -1, lambda site, at: 1, True)),
    "classes that start where the batch does": (
        ops.cross_entropy_backward,
        _numbered_from(
            0,
            -1,
            lambda site, at: Start(site.call.inputs[0].shape[0], site.strategy.inputs[0], at),
            False,
        ),
    ),
    "an average of parts added up": (aten.mean.dim, lambda site: _change(site)),
    "padding beside a halo": (
        aten.convolution.default,
        lambda site: site.change(groups=groups_of(site, 0)),
    ),
    "indices within a part": (
        aten.max_pool2d_with_indices.default,
        lambda site: site.change(padding=[0, 1]),
    ),
    "groups that stay global": (aten.convolution.default, lambda site: _change(site)),
    "sizes of group norm that stay global": (
        aten.native_group_norm.default,
        lambda site: _change(site),
    ),
    "a result of the whole size": (aten.expand.default, lambda site: _change(site)),
    "a mean loss of a part": (aten.mse_loss.default, lambda site: _change(site)),
}
UNEVEN: Mapping[str, tuple[Any, Callable[[Any], Local]]] = {
    "an average of averages": (aten.mean.dim, _per_rank_mean),
    "a mean loss by the largest part": (aten.mse_loss.default, _per_rank_loss),
    "a size that is the largest part's": (
        aten.expand.default,
        lambda site: _change(site, size=_largest(site)),
    ),
    "a new tensor of the largest part": (
        aten.new_ones.default,
        lambda site: _change(site, size=_largest(site)),
    ),
    "a view of the largest part": (
        aten.view.default,
        lambda site: Local(aten.reshape.default, (site.call.args[0], _largest(site)), {}),
    ),
    "a vocabulary that starts as if parts were equal": (ops.embedding, _floor(0, 0, True)),
    "experts that start as if parts were equal": (ops.experts, _gathering(_floor(3, 0, False))),
    "classes that start as if parts were equal": (ops.pick, _floor(0, -1, True)),
}
