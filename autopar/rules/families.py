"""Rules of families of tensor ops whose notation depends on ranks, dims and flags: each is a
function from a call to its factors."""

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
    """Return the rule with additional options that its notation does not describe."""
    return lambda call: replace(rule(call), further=further(call))


def _letters(rank: int) -> Term:
    return tuple(f"d{i}" for i in range(rank))


def dims_of(value: int | Iterable[int] | None, rank: int) -> frozenset[int]:
    """Return dims as nonnegative numbers; None or an empty value means all dims."""
    dims = (value,) if isinstance(value, int) else tuple(value or ())
    return frozenset(d % rank for d in dims) if dims and rank else frozenset(range(rank))


def _keep_whole(term: Term, dims: Iterable[int]) -> Term:
    return tuple(WHOLE if d in set(dims) else letter for d, letter in enumerate(term))


def _all_linear(call: Call) -> tuple[tuple[int, ...], ...]:
    return (tuple(range(len(call.inputs))),)


def pointwise(linear: tuple[tuple[int, ...], ...] = ()) -> Family:
    """Return the rule of pointwise ops: every dim is parallel, and operands are broadcast.

    Args:
        linear: linear sets of slots.
    """

    def rule(call: Call) -> Factors:
        """Return one letter per dim of the result, shared by all operands."""
        terms = ", ".join("..." for _ in slots(call))
        return parse(f"{terms} -> " + ", ".join("..." for _ in call.outputs), call, linear)

    return rule


def dot(call: Call) -> Factors:
    """Return the factors of `autopar.ops.dot`, which are its equation. If a contracted dim is
    split, a bias is replicated, and only one part adds it (`localization`)."""
    input_terms, _, right = call.args[0].replace(" ", "").partition("->")
    factors = tuple(map(tuple, input_terms.split(",")))
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
        reduce_op: reduction of partial results if a reduced dim is split.
        linear: whether a partial operand gives a partial result.
        whole: whether reduced dims must not be split, because partial results would be wrong.
    """

    def rule(call: Call) -> Factors:
        """Return one letter per dim; reduced dims have none in the result."""
        rank = len(call.inputs[0].shape)
        reduced = dims_of(argument(call, "dim"), rank)
        term = _letters(rank)
        same_rank = len(call.outputs[0].shape) == rank
        result = (
            _keep_whole(term, reduced)
            if same_rank
            else tuple(x for d, x in enumerate(term) if d not in reduced)
        )
        source = _keep_whole(term, reduced) if whole else term
        return Factors(
            (source,),
            (result,) * len(call.outputs),
            linear=((0,),) if linear else (),
            reduce_op=reduce_op,
        )

    return rule


def along(linear: tuple[tuple[int, ...], ...] = (), dim: int | tuple[int, ...] = -1) -> Family:
    """Return the rule of ops that work along ``dim`` (softmax, cumsum, flip, cat): this dim is not
    split, all other dims are parallel.

    Args:
        linear: linear sets of operands; ``((),)`` means all operands together.
        dim: default of the argument ``dim``.
    """

    def rule(call: Call) -> Factors:
        """Return one letter per dim, except the one that the op works along."""
        rank = max(len(i.shape) for i in (*call.inputs, *call.outputs))
        given_dims = argument(call, "dim", argument(call, "dims", dim))
        term = _keep_whole(_letters(rank), dims_of(given_dims, rank))
        inputs = tuple(
            term if len(i.shape) == rank else (WHOLE,) * len(i.shape) for i in call.inputs
        )
        sets = _all_linear(call) if linear == ((),) else linear
        return Factors(inputs, (term,) * len(call.outputs), linear=sets)

    return rule


def view(call: Call) -> Factors:
    """Return the factors of a reshape: dims are grouped so that each group has the same number of
    elements before and after. The leading dim of a group is parallel."""
    source, target = call.inputs[0].shape, call.outputs[0].shape
    before, after = [WHOLE] * len(source), [WHOLE] * len(target)
    for number, (a, b) in enumerate(_groups(source, target)):
        before[a], after[b] = f"g{number}", f"g{number}"
    return Factors((tuple(before),), (tuple(after),), linear=((0,),))


def _groups(source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the leading dims, before and after, of each smallest group of dims with the same
    number of elements."""
    if math.prod(source) == 0:
        return []
    ins = [d for d, size in enumerate(source) if size > 1]
    outs = [d for d, size in enumerate(target) if size > 1]
    groups, i, j = [], 0, 0
    while i < len(ins) and j < len(outs):
        groups.append((ins[i], outs[j]))
        in_size, right = source[ins[i]], target[outs[j]]
        i, j = i + 1, j + 1
        while in_size != right:
            if in_size < right:
                in_size, i = in_size * source[ins[i]], i + 1
            else:
                right, j = right * target[outs[j]], j + 1
    return groups


def permutation(call: Call) -> Factors:
    """Return the factors of permute, transpose and t."""
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
    """Return the factors of select.int and unbind: the dim is not split, and is removed."""
    rank = len(call.inputs[0].shape)
    term = _keep_whole(_letters(rank), [argument(call, "dim", 0) % rank])
    return Factors(
        (term,), (tuple(x for x in term if x != WHOLE),) * len(call.outputs), linear=((0,),)
    )


def select_backward(call: Call) -> Factors:
    """Return the factors of select_backward: the selected dim is restored and not split."""
    rank = len(call.outputs[0].shape)
    term = _keep_whole(_letters(rank), [argument(call, "dim") % rank])
    return Factors((tuple(x for x in term if x != WHOLE),), (term,), linear=((0,),))


def select_scatter(call: Call) -> Factors:
    """Return the factors of select_scatter: a tensor is written into a tensor with one more dim."""
    rank = len(call.outputs[0].shape)
    term = _keep_whole(_letters(rank), [argument(call, "dim") % rank])
    return Factors((term, tuple(x for x in term if x != WHOLE)), (term,), linear=((0, 1),))


def stack(call: Call) -> Factors:
    """Return the factors of stack: all operands have the same placement, and the new dim is not
    split."""
    rank = len(call.outputs[0].shape)
    term = _keep_whole(_letters(rank), [argument(call, "dim", 0) % rank])
    return Factors(
        (tuple(x for x in term if x != WHOLE),) * len(call.inputs),
        (term,),
        linear=_all_linear(call),
    )


def slice_(call: Call) -> Factors:
    """Return the factors of slice: the sliced dim is not split, unless the slice is the full
    dim."""
    term = _letters(len(call.inputs[0].shape))
    dim = argument(call, "dim", 0) % max(len(term), 1)
    if call.inputs[0].shape != call.outputs[0].shape:
        term = _keep_whole(term, [dim])
    return Factors((term,), (term,), linear=((0,),))


def pad(call: Call) -> Factors:
    """Return the factors of constant_pad_nd: padded dims are not split; it is linear if it pads
    with zeros."""
    pairs = argument(call, "pad")
    rank = len(call.inputs[0].shape)
    padded = [rank - 1 - i for i in range(len(pairs) // 2) if pairs[2 * i] or pairs[2 * i + 1]]
    term = _keep_whole(_letters(rank), padded)
    return Factors((term,), (term,), linear=((0,),) if argument(call, "value", 0) == 0 else ())


def repeat(call: Call) -> Factors:
    """Return the factors of repeat: repeated dims are not split."""
    repeats, rank = argument(call, "repeats"), len(call.outputs[0].shape)
    term = _keep_whole(_letters(rank), [d for d, times in enumerate(repeats) if times != 1])
    return Factors((term[rank - len(call.inputs[0].shape) :],), (term,), linear=((0,),))


def triangle(call: Call) -> Factors:
    """Return the factors of tril and triu: the last two dims are not split."""
    rank = len(call.inputs[0].shape)
    term = _keep_whole(_letters(rank), [rank - 2, rank - 1])
    return Factors((term,), (term,), linear=((0,),))


def index(call: Call) -> Factors:
    """Return the factors of x[indices]: indexed dims are not split; the other dims and those of the
    indices are parallel."""
    indices = argument(call, "indices")
    source = _letters(len(call.inputs[0].shape))
    indexed = [d for d, value in enumerate(indices) if isinstance(value, Operand)]
    if any(
        not call.inputs[indices[d].index].dtype.is_signed for d in indexed
    ):  # a mask: the number of selected elements is not known
        return Factors(
            tuple((WHOLE,) * len(i.shape) for i in call.inputs),
            ((WHOLE,) * len(call.outputs[0].shape),),
        )
    rank = max(len(call.inputs[indices[d].index].shape) for d in indexed)
    broadcast = tuple(f"i{k}" for k in range(rank))
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    at = indexed[0] if adjacent else 0
    rest = [x for d, x in enumerate(source) if d not in indexed]
    terms: dict[int, Term] = {0: _keep_whole(source, indexed)}
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
    """Return the factors of index_put: dims after the last indexed dim are parallel, and dims
    before the first one if the indexed dims are adjacent. A mask indexes as many dims as it has."""
    shape, values = call.inputs[0].shape, argument(call, "values").index
    dim, rank, spans = 0, 0, []
    for value in argument(call, "indices"):
        info = call.inputs[value.index] if isinstance(value, Operand) else None
        num_indexed = 1 if info is None or info.dtype.is_signed else len(info.shape)
        if info is not None:
            spans.append((dim, dim + num_indexed))
            rank = max(rank, len(info.shape) if info.dtype.is_signed else 1)
        dim += num_indexed
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
    """Return the dims other than `dim` that have the same size in all operands and results with the
    rank of the first operand."""
    rank = len(call.inputs[0].shape)
    shapes = [info.shape for info in (*call.inputs, *call.outputs) if len(info.shape) == rank]
    return [d for d in range(rank) if d != dim and len({shape[d] for shape in shapes}) == 1]


def gather(call: Call) -> Factors:
    """Return the factors of gather: along ``dim``, the index is parallel and the tensor is not
    split."""
    rank = len(call.inputs[0].shape)
    dim = argument(call, "dim") % max(rank, 1)
    same = _same_dims(call, dim)
    source = tuple(f"d{d}" if d in same else WHOLE for d in range(rank))
    picked = tuple("at" if d == dim else x for d, x in enumerate(source))
    return Factors((source, picked), (picked,), linear=((0,),))


def scatter(linear: bool) -> Family:
    """Return the rule of scatter and scatter_add: ``dim`` is not split; other dims of equal size
    are parallel."""

    def rule(call: Call) -> Factors:
        """Return one letter per dim other than ``dim`` that has equal size in all operands."""
        rank = len(call.inputs[0].shape)
        same = _same_dims(call, argument(call, "dim") % max(rank, 1))
        term = tuple(f"d{d}" if d in same else WHOLE for d in range(rank))
        has_source = linear and len(call.inputs) == 3
        return Factors((term,) * len(call.inputs), (term,), linear=((0, 2),) if has_source else ())

    return rule


def factory(call: Call) -> Factors:
    """Return the factors of factory functions without operands: every rank creates the full
    tensor."""
    return Factors((), tuple((WHOLE,) * len(info.shape) for info in call.outputs))


def new_tensor(call: Call) -> Factors:
    """Return the factors of new_zeros and similar ops, which only depend on the shape; a dim of the
    operand with the same position and size has the same letter."""
    source, target = call.inputs[0].shape, call.outputs[0].shape
    letters = tuple(f"d{d}" for d in range(len(target)))
    term = tuple(
        f"d{d}" if target[d : d + 1] == source[d : d + 1] else f"x{d}" for d in range(len(source))
    )
    loose = frozenset(x for x in term if x not in letters)
    return Factors((term,), (letters,), equal=(loose,))


def drawn(call: Call) -> Factors:
    """Return the factors of random draws by position: every dim of the result is parallel, and the
    state is replicated."""
    letters = tuple(f"d{d}" for d in range(len(call.outputs[0].shape)))
    return Factors(((),), (letters,))


def histogram(call: Call) -> Factors:
    """Return the factors of histc: counts are partial sums, unless the range of the bins depends on
    the values."""
    term = _letters(len(call.inputs[0].shape))
    has_border = argument(call, "min", 0) < argument(call, "max", 0)
    return Factors((term if has_border else _keep_whole(term, range(len(term))),), ((WHOLE,),))


def getitem(call: Call) -> Factors:
    """Return the factors of one result of an op with several results; results of attention may be
    mirrored."""
    term = _letters(rank := len(call.inputs[0].shape))
    mirrored = (Mirrored(2),)
    return Factors(
        (term,),
        (term,),
        linear=((0,),),
        further=(AxisOption(mirrored, mirrored),) if rank > 2 else (),
    )
