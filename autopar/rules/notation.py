"""Factor notation: how one mesh axis may shard one op.

``"b s k, n k -> b s n"`` names the dims of operands and results. Sharding a *letter* shards every
tensor with this letter and replicates the other operands. A result without the letter is partial
and must be reduced (``Partial``).

A result without a letter that does not depend on the operands with the letter is equal on all
ranks. Its term contains the letter with ``=``. For example, the backward of a linear layer has the
gradient ``n o``, the input ``n c`` and the weight ``o c`` as operands, and returns the gradients of
the input, the weight and the bias. The gradient of the bias is the sum of the gradient over ``n``
and does not depend on ``c``: ``"n o, n c, o c -> n c, o c, o =c"``. The options are

    n    S(0) S(0) R -> S(0) P    P
    o    S(1) R S(0) -> P    S(0) S(0)
    c    R S(1) S(1) -> S(1) S(1) R      (without ``=c`` the last would be P)

``_`` is a dim that is never sharded. ``...`` represents all dims that are not named, aligned at the
right as in broadcasting. A dim of size 1 has no letter, since it is broadcast. There is one term
per slot; the terms of empty slots are ignored.

A rule also lists its *linear* sets. The results are linear in all tensors of a set together, with
all other tensors fixed, so that partial sums of all of them give partial sums of the results. `Row`
and `parse` use slot numbers. `Factors` uses operand numbers; an empty slot has none.
`autopar.rules.register` uses the positions of tensor parameters, which are the slots of the op.
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
    """One option for one mesh axis: a placement per operand and per result."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Factors:
    """A parsed rule.

    Attributes:
        inputs: one term per operand (not per slot), with one letter per dim.
        outputs: one term per result, with one letter per dim.
        equal: per result, the letters on which it does not depend.
        linear: sets of operand numbers in which the op is linear together.
        reduce_op: reduction of partial results of contracted letters.
        further: options that the terms do not describe.
    """

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    equal: tuple[frozenset[str], ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    reduce_op: str = "sum"
    further: tuple[AxisOption, ...] = ()


@lru_cache(maxsize=1024)
def terms_of(text: str) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """Return the terms of the operands and of the results of a rule."""
    inputs_text, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(
            f"rule {text!r} has no arrow",
            remedy='write operands -> results, as in "m k, k n -> m n"',
        )
    inputs = (
        tuple(tuple(term.split()) for term in inputs_text.split(",")) if inputs_text.strip() else ()
    )
    return inputs, tuple(tuple(term.split()) for term in right.split(","))


def _fit(term: Term, rank: int, text: str) -> Term:
    """Return a term with one letter per dim: expand ``...``, and drop surplus letters on the left,
    as in broadcasting."""
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
    """Parse a rule for a call.

    Args:
        text: the rule in factor notation.
        call: the call.
        linear: sets of slots in which the op is linear; a set with an empty slot is dropped.
        reduce_op: reduction of partial results.

    Raises:
        RuleError: the text does not match the operands and results of the call.
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
            f"rule {text!r} does not match {len(call.inputs)} operands and {len(call.outputs)}"
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
    """Return all options of a rule on one axis, replicate-everything first."""
    all_options = [replicated_option(call)]
    letters = dict.fromkeys(
        x for term in factors.inputs + factors.outputs for x in term if x != WHOLE
    )
    all_options += [
        option for letter in letters if (option := _shard(letter, factors, call)) is not None
    ]
    all_options += [
        option for group in factors.linear if (option := _linear(group, call)) is not None
    ]
    return tuple(dict.fromkeys((*all_options, *factors.further)))


def replicated_option(call: Call) -> AxisOption:
    """Return the option with which every rank runs the full op."""
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
    """Return the option with partial sums of the operands in `group`; None if a cast to a result's
    dtype would round them."""
    results = [info for info in call.outputs if info != NO_TENSOR]
    if not all(exact_cast(call.inputs[i].dtype, info.dtype) for i in group for info in results):
        return None
    inputs = tuple(PARTIAL if i in group else REPLICATE for i in range(len(call.inputs)))
    return AxisOption(
        inputs, tuple(REPLICATE if info == NO_TENSOR else PARTIAL for info in call.outputs)
    )


def exact_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a cast commutes with addition: the dtypes are equal and not bool, or `target`
    is a wider floating dtype; complex dtypes are compared by their real dtypes."""
    source, target = (d.to_real() if d.is_complex else d for d in (source, target))
    if source == target:
        return source != torch.bool
    return (
        source.is_floating_point
        and target.is_floating_point
        and torch.promote_types(source, target) == target
    )


# --------------------------------------------------------------------------------------------------
# Rows of the table of rules that consist of a notation text.

FIRST, EITHER, BOTH = ((0,),), ((0,), (1,)), ((0, 1),)
"""Linear sets of slots of an op with two operands, and the placements that they allow in addition
to shards: FIRST allows ``P R -> P``; EITHER, as for a product, ``P R -> P`` and ``R P -> P``; BOTH,
as for an addition, ``P P -> P``."""


@dataclass(frozen=True, slots=True)
class Row:
    """A notation text, its linear sets of slots, and the reduction of its partial results."""

    text: str
    linear: tuple[tuple[int, ...], ...] = ()
    reduce_op: str = "sum"

    def __call__(self, call: Call) -> Factors:
        return parse(self.text, call, self.linear, self.reduce_op)
