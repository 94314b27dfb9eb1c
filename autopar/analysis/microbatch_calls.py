"""Labels of the results of one call, from the labels of its operands: the rules of ops on the axis
of microbatches.

A call has a label if its rule (`autopar.rules`) has an option with the placements of the operands,
and if the local call of that option is the call in the graph of a microbatch. Powers of the number
of microbatches M pass through *linear sets* of operands: sets that may be partial together while
the other operands are whole. If all operands of a set have power c, the result has power c. A mean
over the samples of a microbatch, or a division by their number, adds 1 to the power.

If powers do not match, an operand may be *raised*: multiplied by a power of M before it is read. A
`Way` lists the operands that must be raised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.core.layout import Layout, Strategy
from autopar.core.placements import PARTIAL, REPLICATE
from autopar.ops import random
from autopar.rules import AxisOption, Call, TensorInfo, axis_options, localize
from autopar.rules.call import NO_TENSOR, KeyedCall
from autopar.rules.localization import mean_part
from autopar.rules.networks import mean_loss_part, reduced_loss

# --------------------------------------------------------------------------------------------------
# Labels: the relation between a microbatch's tensor and the batch's tensor.
#
# Microbatches are an axis in time. The M microbatches run one after another, as the ranks of a
# data-parallel axis run at once, and a tensor has a placement on this axis as on a mesh axis. With
# ``w`` the batch's value and a power e, microbatch m has M^e times
#
#     split(d)   the m-th of M parts of w along dim d
#     whole      w itself
#     term       a term: the M terms add up to w
#     place(d)   positions of samples along dim d, counted from the first sample of the microbatch;
#                they can only be used to look up along the batch
#     zero       zeros, which are a part, a term and a copy of zeros
#
# A mean over the samples of a microbatch is a term with e = 1. Since the sum of M equal values is
# M times one of them, a whole value with power e is a term with power e + 1.

Kind = Literal["split", "whole", "term", "place", "zero", "open"]
Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class Label:
    """The relation between a microbatch's tensor and the batch's tensor (see above).

    Kind ``open`` states nothing. It occurs only if the user promises that samples do not depend on
    each other.

    Attributes:
        kind: one of the kinds above, or ``open``.
        dim: dim along which the tensor is cut, else -1.
        power: e.
    """

    kind: Kind
    dim: int = -1
    power: int = 0

    @property
    def as_term(self) -> int | None:
        """The power with which the tensor is a term; None if it is not a term."""
        return {"term": self.power, "whole": self.power + 1}.get(self.kind)

    @property
    def is_count(self) -> bool:
        """Whether the batch's value is the sum or the average of the microbatches' values."""
        return self.as_term in (0, 1) and self != WHOLE

    @property
    def combination(self) -> str:
        """The way in which outputs with this label are combined into the batch's output: ``split``,
        ``whole``, ``sum`` or ``mean``."""
        return {"term": "mean" if self.power else "sum"}.get(self.kind, self.kind)

    def raise_by(self, power: int) -> Label:
        """Return the label of M^`power` times the tensor."""
        return replace(self, power=self.power + power) if power else self

    def __str__(self) -> str:
        if self.kind == "split":
            return f"a slice of the samples, along dim {self.dim}"
        if self.kind == "term":
            return "a sum over samples" if self.power == 0 else f"{_of(self.power)} over samples"
        if self.kind == "whole" and self.power:
            return "a value independent of samples, with a different share in each microbatch"
        return _WORDS[self.kind]


def _of(power: int) -> str:
    return "an average" if power > 0 else "a share of a sum"


_WORDS = {
    "whole": "a value independent of samples",
    "place": "positions of samples in the batch",
    "zero": "zeros",
    "open": "a value without a rule",
}
WHOLE, TERM, MEAN, ZERO, OPEN = (
    Label("whole"),
    Label("term"),
    Label("term", power=1),
    Label("zero"),
    Label("open"),
)


def cut_dim(whole: Shape, part: Shape, num: int) -> int | None:
    """Find the dim along which a batch's tensor is cut.

    Args:
        whole: shape in the batch.
        part: shape in one microbatch.
        num: number of microbatches.

    Returns:
        The dim along which `whole` is `num` times as long as `part`; -1 if the shapes are equal;
        None if they differ in another way.
    """
    if tuple(whole) == tuple(part):
        return -1
    differs = [dim for dim, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b]
    cut = (
        len(whole) == len(part)
        and len(differs) == 1
        and whole[differs[0]] == num * part[differs[0]]
    )
    return differs[0] if cut else None


def label_by_shape(whole: Shape, part: Shape, num: int) -> Label | None:
    """Label a tensor by its shapes only.

    Args:
        whole: shape in the batch.
        part: shape in one microbatch.
        num: number of microbatches.

    Returns:
        A label of kind ``split`` or ``whole``; None if the shapes fit neither.
    """
    dim = cut_dim(whole, part, num)
    return None if dim is None else WHOLE if dim < 0 else Label("split", dim)


aten = torch.ops.aten
DRAWS = frozenset((random.keep_mask, random.uniform, random.normal, random.randint))
ADDITIONS = frozenset(
    (
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.add.Scalar,
        aten.sub.Scalar,
        aten.rsub.Scalar,
        aten.rsub.Tensor,
    )
)
_SCALED = {
    aten.div.Tensor: -1,
    aten.div.Scalar: -1,
    aten.mul.Tensor: 1,
    aten.mul.Scalar: 1,
}  # power of the second argument in the result
_ROUNDED = {
    aten._to_copy.default: (0,),
    aten.div.Tensor: (0,),
    aten.div.Scalar: (0,),
    aten.mul.Tensor: (0, 1),
    aten.mul.Scalar: (0,),
}  # operands in which they are linear, for all dtypes
_MOVES = frozenset(
    (
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.view.default,
        aten.expand.default,
        aten._to_copy.default,
        aten.clone.default,
        aten.permute.default,
        aten.transpose.int,
    )
)
_VIEWS = frozenset(
    (
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.unsqueeze.default,
    )
)
_LOOKUPS = frozenset((aten.index.Tensor, aten._unsafe_index.Tensor))
_FILLED = {
    aten.full.default: 1,
    aten.new_full.default: 2,
    aten.full_like.default: 1,
    aten.scalar_tensor.default: 0,
}  # index of the fill value among the arguments
_ZEROS = frozenset(
    (
        aten.zeros.default,
        aten.new_zeros.default,
        aten.zeros_like.default,
        aten.empty.memory_format,
        aten.new_empty.default,
        aten.empty_like.default,
    )
)  # no values: uninitialised memory is not read
_ONES = frozenset((aten.ones.default, aten.new_ones.default, aten.ones_like.default))
Labels = tuple[Label, ...]
LinearSets = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to label a call.

    Attributes:
        results: labels of its results.
        raises: for each operand, the power of M by which it must be raised.
        linear: sets of indices of operands. If all operands of a set are raised further, all
            results are raised too.
    """

    results: Labels
    raises: tuple[int, ...] = ()
    linear: LinearSets = ()

    @property
    def is_free(self) -> bool:
        """Whether no operand must be raised."""
        return not any(self.raises)


def find_way(whole: Call, part: Call, reads: Sequence[Label], num: int) -> Way | None:
    """Return the way to label a call that raises the fewest elements; None if there is no way.

    Args:
        whole: the call in the graph of the batch.
        part: the call in the graph of one microbatch.
        reads: labels of the operands.
        num: number of microbatches.
    """
    return _find(whole.keyed, part.keyed, tuple(reads), num)


@lru_cache(maxsize=16384)  # equal layers have equal calls
def _find(keyed: KeyedCall, of_part: KeyedCall, reads: Labels, num: int) -> Way | None:
    of_batch, part = keyed.call, of_part.call
    zeros = _zeros(of_batch, part, reads, num)
    if zeros is not None:
        return zeros
    same_call = is_alike(of_batch, part)
    if same_call and all(read == WHOLE for read in reads) and of_batch.outputs == part.outputs:
        return Way(tuple(WHOLE for _ in of_batch.outputs))
    if any(read.kind == "place" for read in reads):
        return _label_positions(of_batch, part, reads, num)
    created_way = _label_created(of_batch, part, reads, num)
    if created_way is not None:
        return created_way
    ways = itertools.chain(
        _with_numbers(of_batch, part, reads, num), _by_rule(of_batch, part, reads, num)
    )
    sizes = [math.prod(info.shape) for info in part.inputs]

    def cost(way: Way) -> int:
        """Return the number of elements that are multiplied."""
        return sum(size for size, power in zip(sizes, way.raises, strict=True) if power)

    return min(ways, key=cost, default=None)


def is_alike(whole: Call, part: Call) -> bool:
    """Return whether two calls have the same op and the same arguments, up to the shapes of their
    operands."""
    return whole.target is part.target and _arguments(whole) == _arguments(part)


def _arguments(call: Any) -> Any:
    return _plain(call.args), _plain({k: v for k, v in call.kwargs.items() if k != "draw"})


def _plain(value: Any) -> Any:
    """Convert lists to tuples, so that arguments can be compared."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


# Created tensors.


def _label_created(whole: Call, part: Call, reads: Labels, num: int) -> Way | None:
    """Label constants, random draws, positions and copies."""
    target = whole.target
    if target in DRAWS or target is aten.repeat.default:
        return _label_shaped(whole, part, num) if all(read == WHOLE for read in reads) else None
    if target is aten.arange.default:
        counts = whole.args == (part.args[0] * num,) and dict(whole.kwargs) == dict(part.kwargs)
        return Way((Label("place", 0),)) if counts else None
    value = (_value(whole),)  # in a tuple, since tuples with the same NaN are equal
    if value == (None,) or value != (_value(part),):  # it depends on the number of samples
        return None
    return _label_shaped(whole, part, num)


def _zeros(whole: Call, part: Call, reads: Labels, num: int) -> Way | None:
    """Label zeros, and results that are linear in zeros."""
    is_filled = _value(whole) == 0 and _value(part) == 0
    zero = {n for n, read in enumerate(reads) if read.kind == "zero"}
    if not is_filled and (not zero or whole.target is not part.target):
        return None
    linear = () if is_filled else _linear_sets(whole, axis_options(whole))
    if not is_filled and not any(zero.issuperset(group) for group in linear):
        return None
    pairs = zip(whole.outputs, part.outputs, strict=True)
    dims = [cut_dim(x.shape, y.shape, num) for x, y in pairs]
    if any(dim is None for dim in dims):
        return None
    results = tuple(Label("zero", dim) for dim in dims if dim is not None)
    return Way(results, (0,) * len(reads), linear)


def _value(call: Call) -> Any:
    """Return the number with which a tensor is filled; None if it is not filled with a single
    number."""
    if call.target in _FILLED:
        return call.args[_FILLED[call.target]]
    return 0 if call.target in _ZEROS else 1 if call.target in _ONES else None


def _label_shaped(whole: Call, part: Call, num: int) -> Way | None:
    label = label_by_shape(whole.outputs[0].shape, part.outputs[0].shape, num)
    return None if label is None else Way((label,), (0,) * len(whole.inputs))


# Positions.


def _label_positions(whole: Call, part: Call, reads: Labels, num: int) -> Way | None:
    """Label results that are computed from positions. Positions may be reshaped, and may index
    along the dim along which the batch is cut."""
    if whole.target in _MOVES:
        return _label_moved_positions(whole, part, reads, num)
    if whole.target not in _LOOKUPS or reads[0].kind != "split" or any(r.power for r in reads):
        return None
    at = {index.index: place for place, index in enumerate(whole.args[1]) if index is not None}
    place = next(n for n, r in enumerate(reads) if r.kind == "place")
    from_right = len(whole.inputs[place].shape) - reads[place].dim
    others = (n for n in at if n != place)
    if at.get(place) == reads[0].dim and all(
        _matches_positions(whole.inputs[n], reads[n], from_right) for n in others
    ):
        return _label_shaped(whole, part, num)
    return None


def _label_moved_positions(whole: Call, part: Call, reads: Labels, num: int) -> Way | None:
    """Label reshaped positions. They move like a tensor that is cut."""
    cut = [replace(r, kind="split") if r.kind == "place" else r for r in reads]
    way = next((w for w in _by_rule(whole, part, tuple(cut), num) if w.is_free), None)
    return way and Way(tuple(replace(r, kind="place") for r in way.results), way.raises)


def _matches_positions(info: TensorInfo, read: Label, from_right: int) -> bool:
    """Return whether an index is the same in all microbatches, or is cut where the positions are.

    Args:
        info: the index.
        read: its label.
        from_right: dim of the positions, counted from the end, since indices broadcast.
    """
    is_cut = read.kind in ("split", "place") and len(info.shape) - read.dim == from_right
    return read == WHOLE or is_cut


# Rules.


def _power_of_term(whole: Any, part: Any, num: int) -> int | None:
    """Return the power of a number as a term: 1 if batch and microbatch have the same number, 0 if
    that of the batch is `num` times as large, else None."""
    if not (_is_number(whole) and _is_number(part)):
        return None
    if whole == part:
        return 1
    return 0 if whole == part * num else None


def _with_numbers(whole: Call, part: Call, reads: Labels, num: int) -> Iterator[Way]:
    """Label sums with a plain number.

    A number that is the same in batch and microbatch is a term with power 1: the average over
    microbatches is the number. A number that is `num` times as large in the batch is a term with
    power 0.
    """
    if whole.target not in ADDITIONS or len(reads) != 1 or whole.outputs != part.outputs:
        return
    (a, *more), (b, *others) = whole.args[1:] or (None,), part.args[1:] or (None,)
    if more != others or dict(whole.kwargs) != dict(part.kwargs):
        return
    power, needed = reads[0].as_term, _power_of_term(a, b, num)
    if power is not None and needed is not None and power <= needed:
        yield Way((Label("term", power=needed),), (needed - power,))


def _by_rule(whole: Call, part: Call, reads: Labels, num: int) -> Iterator[Way]:
    """Yield the ways that follow from the op's rule for one axis."""
    if whole.target is not part.target or len(whole.outputs) != len(part.outputs):
        return
    by_number = _power_of_number(whole, part, num)
    if by_number:
        part = replace(part, args=whole.args)
    options = tuple(dict.fromkeys((*axis_options(whole), *_further_options(whole))))
    linear = _linear_sets(whole, options)
    for option in options:
        powers = _powers(reads, option)
        if powers is None:
            continue
        by_mean = _power_of_call(whole, part, option, num)
        if by_mean is None:
            continue
        for raises, power in _covers(powers, linear):
            results = tuple(_label(p, power + by_number + by_mean) for p in option.outputs)
            yield Way(results, raises, linear)


def _label(placement: Placement, power: int) -> Label:
    if isinstance(placement, Shard):
        return Label("split", placement.dim, power)
    return Label("term" if isinstance(placement, Partial) else "whole", power=power)


def _power_of_number(whole: Call, part: Call, num: int) -> int:
    """Return the power of a product or quotient with a number that depends on the number of
    samples."""
    if whole.target not in _SCALED or len(whole.inputs) != 1 or len(whole.args) != 2:
        return 0
    a, b = whole.args[1], part.args[1] if len(part.args) == 2 else None
    if not (_is_number(a) and _is_number(b) and a and b):
        return 0
    power = _SCALED[whole.target]
    return -power if a == b * num else power if b == a * num else 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _linear_sets(call: Call, options: Sequence[AxisOption]) -> LinearSets:
    """Return the sets of operands in which a call is linear."""
    results = [n for n, info in enumerate(call.outputs) if info != NO_TENSOR]
    groups = dict.fromkeys(
        tuple(n for n, p in enumerate(option.inputs) if p == PARTIAL)
        for option in options
        if all(p in (PARTIAL, REPLICATE) for p in option.inputs)
        and all(option.outputs[n] == PARTIAL for n in results)
    )
    return tuple(group for group in groups if group)


def _further_options(call: Call) -> Iterator[AxisOption]:
    """Yield further options of casts, quotients and products with a floating result.

    Rules leave out partial sums that are rounded, since ranks would add rounded values.
    Microbatches round theirs in any case.
    """
    if call.outputs[0].dtype.is_floating_point:
        for slot in _ROUNDED.get(call.target, ()):
            if slot < len(call.inputs) and call.inputs[slot].dtype.is_floating_point:
                reads = (PARTIAL if n == slot else REPLICATE for n in range(len(call.inputs)))
                yield AxisOption(tuple(reads), (PARTIAL,))


def _powers(reads: Labels, option: AxisOption) -> tuple[int | None, ...] | None:
    """Return the power of each operand; None for zeros, which have every power.

    Return None if an operand does not have the placement of the option.
    """
    powers: list[int | None] = []
    for read, placement in zip(reads, option.inputs, strict=True):
        cut = placement.dim if isinstance(placement, Shard) else -1
        if read.kind == "zero":
            power, fits = None, read.dim == cut
        elif placement == PARTIAL:
            power, fits = read.as_term, read.as_term is not None
        else:
            kind = "split" if cut >= 0 else "whole"
            plain = cut >= 0 or isinstance(placement, Replicate)
            power, fits = read.power, plain and (read.kind, read.dim) == (kind, cut)
        if not fits:
            return None
        powers.append(power)
    return tuple(powers)


def _covers(
    powers: tuple[int | None, ...], linear: LinearSets
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the powers by which operands must be raised, and the power of the results.

    There is one pair for each choice of disjoint linear sets. The operands of a chosen set have one
    common power, and all other operands have power 0.
    """
    for count in range(len(linear) + 1):
        for chosen in itertools.combinations(linear, count):
            covered = [n for group in chosen for n in group]
            if len(set(covered)) < len(covered):
                continue
            due = [0] * len(powers)
            total = 0
            for group in chosen:
                known = [p for n in group if (p := powers[n]) is not None]
                top = max(known, default=0)
                total += top
                for n in group:
                    due[n] = top
            raises = tuple(0 if p is None else d - p for p, d in zip(powers, due, strict=True))
            if all(power >= 0 for power in raises):
                yield raises, total


# Op of a rank that replaces an op → the power that the op adds in a microbatch.
_POWERS = {mean_part: 1, mean_loss_part: 1, reduced_loss: 0}


def _power_of_call(whole: Call, part: Call, option: AxisOption, num: int) -> int | None:
    """Return the power that the call itself adds.

    This is 0 if a microbatch makes the call of a rank, and 1 if it takes a mean over its own
    samples where a rank divides by the number of samples in the batch. It is None for any other
    call.
    """
    if any(isinstance(p, Partial) and p.reduce_op != "sum" for p in option.outputs):
        return None
    infos = (*whole.inputs, *whole.outputs)
    layouts = [Layout((p,)) for p in (*option.inputs, *option.outputs)]
    fits = (x.fits(info.shape, (num,)) for x, info in zip(layouts, infos, strict=True))
    if not all(fits):
        return None
    count = len(whole.inputs)
    local = localize(whole, Strategy(tuple(layouts[:count]), tuple(layouts[count:])), (num,))
    if local.target is aten.reshape.default and part.target in _VIEWS:  # a view of the whole
        return 0 if tuple(local.args[1]) == part.outputs[0].shape else None
    if local.target in _POWERS:
        return _POWERS[local.target] if is_alike(whole, part) else None
    called = local.target is part.target and _arguments(local) == _arguments(part)
    return 0 if called else None
