"""Rules of families of tensor ops whose notation depends on ranks, dims and flags: each takes a
call and gives its factors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from autopar.core.placements import Mirrored
from autopar.ops.products import bias_term
from autopar.rules.call import Call, Operand, argument, slots
from autopar.rules.notation import WHOLE, AxisOption, Factors, Term, parse

Family = Callable[[Call], Factors]


def also(rule: Family, further: Callable[[Call], tuple[AxisOption, ...]]) -> Family:
    """Return the rule with further options, which no letter of its notation describes."""
    return lambda call: replace(rule(call), further=further(call))


def _letters(rank: int) -> Term:
    return tuple(f"d{i}" for i in range(rank))


def dims_of(value: int | Iterable[int] | None, rank: int) -> frozenset[int]:
    """Dims as non-negative numbers; None or empty means all of them."""
    dims = (value,) if isinstance(value, int) else tuple(value or ())
    return frozenset(d % rank for d in dims) if dims and rank else frozenset(range(rank))


def _whole(term: Term, dims: Iterable[int]) -> Term:
    return tuple(WHOLE if d in set(dims) else letter for d, letter in enumerate(term))


def _all_linear(call: Call) -> tuple[tuple[int, ...], ...]:
    return (tuple(range(len(call.inputs))),)


def pointwise(linear: tuple[tuple[int, ...], ...] = ()) -> Family:
    """Every dim is parallel; operands broadcast. `linear`: sets of slots."""

    def rule(call: Call) -> Factors:
        """Return one letter per dim of the result, shared by all operands."""
        terms = ", ".join("..." for _ in slots(call))
        return parse(f"{terms} -> " + ", ".join("..." for _ in call.outputs), call, linear)

    return rule


def dot(call: Call) -> Factors:
    """`autopar.ops.dot`: its equation is the rule. A bias is whole where what is summed over is
    split (`localization` says who adds it)."""
    left, _, right = call.args[0].replace(" ", "").partition("->")
    factors = tuple(map(tuple, left.split(",")))
    if len(call.inputs) == 2:
        return Factors(factors, (tuple(right),), linear=((0,), (1,)))
    return Factors(
        (*factors, tuple(bias_term(call.args[0], len(call.inputs[2].shape)))),
        (tuple(right),),
        linear=((0, 2), (1, 2)),
    )


def reduction(reduce_op: str = "sum", linear: bool = False, whole: bool = False) -> Family:
    """Return the rule of reductions over ``dim``.

    Args:
        reduce_op: reduction of the partial results that split dims give.
        linear: whether a partial operand gives a partial result.
        whole: whether reduced dims stay whole, because partial results would be wrong.
    """

    def rule(call: Call) -> Factors:
        """Return one letter per dim; reduced dims have none in the result."""
        rank = len(call.inputs[0].shape)
        reduced = dims_of(argument(call, "dim"), rank)
        term = _letters(rank)
        kept = len(call.outputs[0].shape) == rank
        result = (
            _whole(term, reduced)
            if kept
            else tuple(x for d, x in enumerate(term) if d not in reduced)
        )
        source = _whole(term, reduced) if whole else term
        return Factors(
            (source,),
            (result,) * len(call.outputs),
            linear=((0,),) if linear else (),
            reduce_op=reduce_op,
        )

    return rule


def along(linear: tuple[tuple[int, ...], ...] = (), dim: int | tuple[int, ...] = -1) -> Family:
    """Ops that work along ``dim`` (softmax, cumsum, flip, cat): it stays whole, all other dims are
    parallel.

    `linear`: sets of operands; ``((),)`` means all operands together. `dim` is the default.
    """

    def rule(call: Call) -> Factors:
        """Return one letter per dim but the one that the op works along."""
        rank = max(len(i.shape) for i in (*call.inputs, *call.outputs))
        asked = argument(call, "dim", argument(call, "dims", dim))
        term = _whole(_letters(rank), dims_of(asked, rank))
        inputs = tuple(
            term if len(i.shape) == rank else (WHOLE,) * len(i.shape) for i in call.inputs
        )
        sets = _all_linear(call) if linear == ((),) else linear
        return Factors(inputs, (term,) * len(call.outputs), linear=sets)

    return rule


def view(call: Call) -> Factors:
    """Any reshape: dims are grouped so that each group has as many elements before as after. A
    shard of the leading dim of a group is kept."""
    source, target = call.inputs[0].shape, call.outputs[0].shape
    before, after = [WHOLE] * len(source), [WHOLE] * len(target)
    for number, (a, b) in enumerate(_groups(source, target)):
        before[a], after[b] = f"g{number}", f"g{number}"
    return Factors((tuple(before),), (tuple(after),), linear=((0,),))


def _groups(source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[int, int]]:
    """The leading dims, before and after, of each smallest group of dims with an equal number of
    elements."""
    if math.prod(source) == 0:
        return []
    ins = [d for d, size in enumerate(source) if size > 1]
    outs = [d for d, size in enumerate(target) if size > 1]
    found, i, j = [], 0, 0
    while i < len(ins) and j < len(outs):
        found.append((ins[i], outs[j]))
        left, right = source[ins[i]], target[outs[j]]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * source[ins[i]], i + 1
            else:
                right, j = right * target[outs[j]], j + 1
    return found


def permutation(call: Call) -> Factors:
    """permute, transpose and t."""
    rank = len(call.inputs[0].shape)
    order = list(range(rank))
    if argument(call, "dims") is not None:
        order = [d % rank for d in argument(call, "dims")]
    elif rank > 1:
        a, b = argument(call, "dim0", 0) % rank, argument(call, "dim1", 1) % rank
        order[a], order[b] = order[b], order[a]
    term = _letters(rank)
    return Factors((term,), (tuple(term[d] for d in order),), linear=((0,),))


def select(call: Call) -> Factors:
    """select.int and unbind: the dim stays whole and is removed."""
    rank = len(call.inputs[0].shape)
    term = _whole(_letters(rank), [argument(call, "dim", 0) % rank])
    return Factors(
        (term,), (tuple(x for x in term if x != WHOLE),) * len(call.outputs), linear=((0,),)
    )


def select_backward(call: Call) -> Factors:
    """select_backward: the selected dim is restored whole."""
    rank = len(call.outputs[0].shape)
    term = _whole(_letters(rank), [argument(call, "dim") % rank])
    return Factors((tuple(x for x in term if x != WHOLE),), (term,), linear=((0,),))


def select_scatter(call: Call) -> Factors:
    """select_scatter: a tensor is written into another one that has one more dim."""
    rank = len(call.outputs[0].shape)
    term = _whole(_letters(rank), [argument(call, "dim") % rank])
    return Factors((term, tuple(x for x in term if x != WHOLE)), (term,), linear=((0, 1),))


def stack(call: Call) -> Factors:
    """stack: all operands have the same placement, and the new dim is whole."""
    rank = len(call.outputs[0].shape)
    term = _whole(_letters(rank), [argument(call, "dim", 0) % rank])
    return Factors(
        (tuple(x for x in term if x != WHOLE),) * len(call.inputs),
        (term,),
        linear=_all_linear(call),
    )


def slice_(call: Call) -> Factors:
    """The sliced dim stays whole, unless all of it is taken."""
    term = _letters(len(call.inputs[0].shape))
    dim = argument(call, "dim", 0) % max(len(term), 1)
    if call.inputs[0].shape != call.outputs[0].shape:
        term = _whole(term, [dim])
    return Factors((term,), (term,), linear=((0,),))


def pad(call: Call) -> Factors:
    """constant_pad_nd: padded dims stay whole; linear where it pads with zero."""
    pairs = argument(call, "pad")
    rank = len(call.inputs[0].shape)
    padded = [rank - 1 - i for i in range(len(pairs) // 2) if pairs[2 * i] or pairs[2 * i + 1]]
    term = _whole(_letters(rank), padded)
    return Factors((term,), (term,), linear=((0,),) if argument(call, "value", 0) == 0 else ())


def repeat(call: Call) -> Factors:
    """Repeated dims stay whole."""
    repeats, rank = argument(call, "repeats"), len(call.outputs[0].shape)
    term = _whole(_letters(rank), [d for d, times in enumerate(repeats) if times != 1])
    return Factors((term[rank - len(call.inputs[0].shape) :],), (term,), linear=((0,),))


def triangle(call: Call) -> Factors:
    """tril and triu: the last two dims stay whole."""
    rank = len(call.inputs[0].shape)
    term = _whole(_letters(rank), [rank - 2, rank - 1])
    return Factors((term,), (term,), linear=((0,),))


def index(call: Call) -> Factors:
    """x[indices]: indexed dims stay whole, the others and those of the indices are parallel."""
    indices = argument(call, "indices")
    source = _letters(len(call.inputs[0].shape))
    indexed = [d for d, value in enumerate(indices) if isinstance(value, Operand)]
    if any(
        not call.inputs[indices[d].index].dtype.is_signed for d in indexed
    ):  # a mask: how many it picks is unknown
        return Factors(
            tuple((WHOLE,) * len(i.shape) for i in call.inputs),
            ((WHOLE,) * len(call.outputs[0].shape),),
        )
    rank = max(len(call.inputs[indices[d].index].shape) for d in indexed)
    broadcast = tuple(f"i{k}" for k in range(rank))
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    at = indexed[0] if adjacent else 0
    rest = [x for d, x in enumerate(source) if d not in indexed]
    terms: dict[int, Term] = {0: _whole(source, indexed)}
    terms |= {
        indices[d].index: broadcast[rank - len(call.inputs[indices[d].index].shape) :]
        for d in indexed
    }
    return Factors(
        tuple(terms[i] for i in range(len(call.inputs))),
        ((*rest[:at], *broadcast, *rest[at:]),),
        linear=((0,),),
    )


def index_put(call: Call) -> Factors:
    """Dims that are not indexed are parallel where values and tensor agree on them: behind the last
    indexed one, and before the first where the indexed ones are adjacent. A mask indexes as many
    dims as it has."""
    shape, values = call.inputs[0].shape, argument(call, "values").index
    dim, rank, spans = 0, 0, []
    for value in argument(call, "indices"):
        info = call.inputs[value.index] if isinstance(value, Operand) else None
        taken = 1 if info is None or info.dtype.is_signed else len(info.shape)
        if info is not None:
            spans.append((dim, dim + taken))
            rank = max(rank, len(info.shape) if info.dtype.is_signed else 1)
        dim += taken
    adjacent = all(end == start for (_, end), (start, _) in itertools.pairwise(spans))
    first, last = spans[0][0] if adjacent else 0, spans[-1][1]
    source = tuple(
        x if d >= last or d < first else WHOLE for d, x in enumerate(_letters(len(shape)))
    )
    between = rank if adjacent else rank + last - sum(end - start for start, end in spans)
    full = source[:first] + (WHOLE,) * between + source[last:]
    num_dims = len(call.inputs[values].shape)
    value_term = ((WHOLE,) * num_dims + full)[-num_dims:] if num_dims else ()
    terms = {i: (WHOLE,) * len(info.shape) for i, info in enumerate(call.inputs)} | {
        0: source,
        values: value_term,
    }
    return Factors(
        tuple(terms[i] for i in range(len(call.inputs))), (source,), linear=((0, values),)
    )


def _same_dims(call: Call, dim: int) -> list[int]:
    """Dims other than `dim` that all operands and results with a rank share in size."""
    rank = len(call.inputs[0].shape)
    shapes = [info.shape for info in (*call.inputs, *call.outputs) if len(info.shape) == rank]
    return [d for d in range(rank) if d != dim and len({shape[d] for shape in shapes}) == 1]


def gather(call: Call) -> Factors:
    """gather: along ``dim`` the index is parallel and the tensor whole."""
    rank = len(call.inputs[0].shape)
    dim = argument(call, "dim") % max(rank, 1)
    same = _same_dims(call, dim)
    source = tuple(f"d{d}" if d in same else WHOLE for d in range(rank))
    picked = tuple("at" if d == dim else x for d, x in enumerate(source))
    return Factors((source, picked), (picked,), linear=((0,),))


def scatter(linear: bool) -> Family:
    """scatter and scatter_add: ``dim`` stays whole; dims of equal size are parallel."""

    def rule(call: Call) -> Factors:
        """Return one letter per dim, other than `dim`, of equal size in all operands."""
        rank = len(call.inputs[0].shape)
        same = _same_dims(call, argument(call, "dim") % max(rank, 1))
        term = tuple(f"d{d}" if d in same else WHOLE for d in range(rank))
        has_source = linear and len(call.inputs) == 3
        return Factors((term,) * len(call.inputs), (term,), linear=((0, 2),) if has_source else ())

    return rule


def factory(call: Call) -> Factors:
    """Factory functions have no operands: every rank makes the whole tensor."""
    return Factors((), tuple((WHOLE,) * len(info.shape) for info in call.outputs))


def new_tensor(call: Call) -> Factors:
    """new_zeros and its like: only the shape counts; a dim of the operand that has the same
    place and size follows it."""
    source, target = call.inputs[0].shape, call.outputs[0].shape
    letters = tuple(f"d{d}" for d in range(len(target)))
    term = tuple(
        f"d{d}" if target[d : d + 1] == source[d : d + 1] else f"x{d}" for d in range(len(source))
    )
    loose = frozenset(x for x in term if x not in letters)
    return Factors((term,), (letters,), equal=(loose,))


def drawn(call: Call) -> Factors:
    """Random numbers by position: every dim of the result is free, the state is whole."""
    letters = tuple(f"d{d}" for d in range(len(call.outputs[0].shape)))
    return Factors(((),), (letters,))


def histogram(call: Call) -> Factors:
    """histc: counts are partial sums, where the bins' border is not taken from the values."""
    term = _letters(len(call.inputs[0].shape))
    has_border = argument(call, "min", 0) < argument(call, "max", 0)
    return Factors((term if has_border else _whole(term, range(len(term))),), ((WHOLE,),))


def getitem(call: Call) -> Factors:
    """One result of an op that has several; of attention it may be mirrored."""
    term = _letters(rank := len(call.inputs[0].shape))
    mirrored = (Mirrored(2),)
    return Factors(
        (term,),
        (term,),
        linear=((0,),),
        further=(AxisOption(mirrored, mirrored),) if rank > 2 else (),
    )
