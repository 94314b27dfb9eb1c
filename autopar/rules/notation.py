"""Factor notation: what one mesh axis may do to one op.

``"b s k, n k -> b s n"`` names the dims of operands and results. Sharding a *letter* shards every
tensor that has it and replicates the operands that lack it. A result that lacks it is a partial
result, to be reduced (``Partial``).

A result that lacks a letter and does not depend on the operands that have it is the same on every
rank. Its term lists the letter with ``=``. For example, the backward of a linear layer takes the
gradient ``n o``, the input ``n c`` and the weight ``o c``, and returns the gradients of the input,
the weight and the bias. The bias gradient is the sum of the gradient over ``n``; the letter ``c``
does not affect it: ``"n o, n c, o c -> n c, o c, o =c"``. The options are

    n    S(0) S(0) R -> S(0) P    P
    o    S(1) R S(0) -> P    S(0) S(0)
    c    R S(1) S(1) -> S(1) S(1) R      (without ``=c`` the last would be P)

``_`` is a dim that stays whole. ``...`` stands for all dims that are not named, aligned at the
right, as in broadcasting. A dim of size 1 never has a letter: it is broadcast. There is one term
per slot; the terms of empty slots are skipped.

A rule also lists its *linear* sets. The results are linear in the tensors of a set together, with
all other tensors fixed, so that partial sums in all of them pass through as partial sums. `Row` and
`parse` count slots. `Factors` counts operands: a slot without an operand has no number.
`autopar.rules.register` counts tensor parameters, which are the slots of the op.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.core.placements import PARTIAL, REPLICATE
from autopar.errors import RuleError
from autopar.rules.call import NO_TENSOR, Call, TensorInfo, slots

Term = tuple[str, ...]
WHOLE = "_"


@dataclass(frozen=True, slots=True)
class AxisOption:
    """One choice on one mesh axis: a placement per operand and per result."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Factors:
    """A rule, parsed. One term per operand (not per slot) and per result, each with one letter per
    dim.

    Attributes:
        equal: per result the letters over which it is computed in full on every rank.
        linear: sets of operand numbers in which the op is linear together.
        reduce_op: how partial results of contracted letters are reduced.
        further: options that no letter says.
    """

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    equal: tuple[frozenset[str], ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    reduce_op: str = "sum"
    further: tuple[AxisOption, ...] = ()


@lru_cache(maxsize=1024)
def terms_of(text: str) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """The terms of a rule's operands and of its results."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(
            f"rule {text!r} has no arrow",
            remedy='write operands -> results, as in "m k, k n -> m n"',
        )
    inputs = tuple(tuple(term.split()) for term in left.split(",")) if left.strip() else ()
    return inputs, tuple(tuple(term.split()) for term in right.split(","))


def _fit(term: Term, rank: int, text: str) -> Term:
    """One letter per dim: ``...`` filled in, and a term with too many letters cut from the left
    (broadcasting)."""
    if "..." in term:
        at = term.index("...")
        count = rank - (len(term) - 1)
        term = term[:at] + tuple(f".{count - i}" for i in range(count)) + term[at + 1 :]
    if len(term) < rank:
        raise RuleError(
            f"term {' '.join(term)!r} of rule {text!r} names {len(term)} dims, but the tensor has"
            f" {rank} dims"
        )
    return term[len(term) - rank :]


def parse(
    text: str, call: Call, linear: tuple[tuple[int, ...], ...] = (), reduce_op: str = "sum"
) -> Factors:
    """Read a rule for `call`.

    Args:
        linear: sets of slots; a set with an empty slot is dropped.

    Raises:
        RuleError: if the text does not fit the op's operands and results.
    """
    terms, results = terms_of(text)
    every = slots(call)
    numbers = every[: len(terms)]
    present = {
        number: term for number, term in zip(numbers, terms, strict=False) if number is not None
    }
    if (
        len(terms) > len(every)
        or sorted(present) != list(range(len(call.inputs)))
        or len(results) != len(call.outputs)
    ):
        raise RuleError(
            f"rule {text!r} does not fit {len(call.inputs)} operands and {len(call.outputs)}"
            " results",
            where=call.where,
        )
    inputs = tuple(_fit(present[i], len(info.shape), text) for i, info in enumerate(call.inputs))
    equal = tuple(
        frozenset(letter[1:] for letter in term if letter.startswith("=")) for term in results
    )
    bare = [tuple(letter for letter in term if not letter.startswith("=")) for term in results]
    outputs = tuple(
        _fit(t, len(i.shape), text) if i != NO_TENSOR else (WHOLE,)
        for t, i in zip(bare, call.outputs, strict=True)
    )
    sets = tuple(
        tuple(numbers[s] for s in group)
        for group in linear
        if all(numbers[s] is not None for s in group)
    )
    return Factors(inputs, outputs, equal, sets, reduce_op)  # type: ignore[arg-type]


def options(factors: Factors, call: Call) -> tuple[AxisOption, ...]:
    """All options of the rule on one axis, replicate-everything first."""
    found = [replicated_option(call)]
    letters = dict.fromkeys(
        x for term in factors.inputs + factors.outputs for x in term if x != WHOLE
    )
    found += [option for letter in letters if (option := _shard(letter, factors, call)) is not None]
    found += [option for group in factors.linear if (option := _linear(group, call)) is not None]
    return tuple(dict.fromkeys((*found, *factors.further)))


def replicated_option(call: Call) -> AxisOption:
    """Every rank does the whole op."""
    return AxisOption((REPLICATE,) * len(call.inputs), (REPLICATE,) * len(call.outputs))


def _dims(letter: str, term: Term, info: TensorInfo) -> list[int]:
    return [
        d
        for d, (x, size) in enumerate(zip(term, info.shape, strict=True))
        if x == letter and size > 1
    ]


def _shard(letter: str, factors: Factors, call: Call) -> AxisOption | None:
    ins = [
        _dims(letter, term, info) for term, info in zip(factors.inputs, call.inputs, strict=True)
    ]
    outs = [
        _dims(letter, term, info) for term, info in zip(factors.outputs, call.outputs, strict=True)
    ]
    if not any(ins + outs) or any(len(dims) > 1 for dims in ins + outs):
        return None
    outputs: list[Placement] = []
    for number, (dims, info) in enumerate(zip(outs, call.outputs, strict=True)):
        equal = bool(factors.equal) and letter in factors.equal[number]
        if dims:
            outputs.append(Shard(dims[0]))
        elif info == NO_TENSOR or not any(ins) or equal:
            outputs.append(REPLICATE)
        elif info.dtype == torch.bool:
            return None
        else:
            outputs.append(Partial(factors.reduce_op))
    return AxisOption(tuple(Shard(d[0]) if d else REPLICATE for d in ins), tuple(outputs))


def _linear(group: tuple[int, ...], call: Call) -> AxisOption | None:
    """Partial sums of the operands in `group` pass through, unless a cast on the way would round
    them."""
    results = [info for info in call.outputs if info != NO_TENSOR]
    if not all(exact_cast(call.inputs[i].dtype, info.dtype) for i in group for info in results):
        return None
    inputs = tuple(PARTIAL if i in group else REPLICATE for i in range(len(call.inputs)))
    return AxisOption(
        inputs, tuple(REPLICATE if info == NO_TENSOR else PARTIAL for info in call.outputs)
    )


def exact_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether adding before or after a cast is the same: the same dtype (not bool), or a wider
    float; of complex numbers the parts'."""
    source, target = (d.to_real() if d.is_complex else d for d in (source, target))
    if source == target:
        return source != torch.bool
    return (
        source.is_floating_point
        and target.is_floating_point
        and torch.promote_types(source, target) == target
    )


# --------------------------------------------------------------------------------------------------
# A row of the rules' table that is a notation text.

FIRST, EITHER, BOTH = ((0,),), ((0,), (1,)), ((0, 1),)
"""Sets of slots in which an op of two operands is linear together, with the placements that they
allow besides shards: FIRST allows ``P R -> P``; EITHER, as in a product, ``P R -> P`` and
``R P -> P``; BOTH, as in an addition, ``P P -> P``."""


@dataclass(frozen=True, slots=True)
class Row:
    """A notation text with its linear slot sets and the reduce op of its partial results."""

    text: str
    linear: tuple[tuple[int, ...], ...] = ()
    reduce_op: str = "sum"

    def __call__(self, call: Call) -> Factors:
        return parse(self.text, call, self.linear, self.reduce_op)
