"""Rules of users' ops: `register` takes one in notation, and only after it has passed the law.

    autopar.rules.register(torch.ops.mine.scaled_mm.default, "m k, k n -> m n", linear=((0,), (1,)))

The law is tried on the user's examples, or, where the op's schema says enough, on tensors made from
the rule's letters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autopar.core.autocast_state import as_written
from autopar.errors import RuleError
from autopar.rules.call import Call, Operand, TensorInfo, call_on, op_name
from autopar.rules.discovery import unfit
from autopar.rules.expansion import expand
from autopar.rules.knowledge import forget
from autopar.rules.notation import WHOLE, Factors, Row, options, terms_of
from autopar.rules.small_calls import RECIPES, tensors_for
from autopar.rules.table import REGISTERED, TABLE
from autopar.rules.trial import check_strategy, run

Example = Sequence[Any] | Mapping[str, Any]
_MESHES = ((2,), (3,), (2, 2))
_SIZES = (
    (8, 10, 14, 16, 20, 22, 26),
    (6,) * 7,
    (5, 7, 9, 11, 13, 15, 17),
)  # of letters: even, equal, odd
_WHOLE_SIZE = 6
_ASK = (
    "pass examples=[(tensor, ...), ...] with arguments of the op, so that every letter's dim is"
    " larger than 1 in some example"
)


def register(
    op: Any,
    rule: str,
    *,
    linear: Iterable[Iterable[int]] = (),
    reduce_op: str = "sum",
    examples: Iterable[Example] = (),
) -> None:
    """Tell autopar how an op may be split: its rule in factor notation (see
    `autopar.rules.notation`).

    Args:
        op: an OpOverload, ``torch.ops.mine.name`` with one overload, or what
            ``torch.library.custom_op`` gives.
        rule: one term per tensor parameter and per result, as in ``"m k, k n -> m n"``.
        linear: sets of tensor parameters, by position, in which the op is linear together.
        reduce_op: how partial results of letters that a result lacks are reduced: ``sum``, ``max``
            or ``min``.
        examples: arguments to try the rule on, each a tuple of positional or a dict of named ones.
            Without any, float tensors are made from the letters; all other arguments then need
            defaults.

    Raises:
        RuleError: where the rule is wrong (with the counterexample), does not fit the op, or cannot
            be tried; the op then keeps what it had.
    """
    target = _overload(op)
    row = Row(rule, tuple(map(tuple, linear)), reduce_op)
    if reduce_op not in ("sum", "max", "min"):
        raise RuleError(
            f"unknown reduce op {reduce_op!r}",
            where=op_name(target),
            remedy="use sum, max or min",
        )
    if target in TABLE:
        raise RuleError(
            "the op has a rule in autopar's own table",
            where=op_name(target),
            remedy="only ops without one can be registered",
        )
    if reason := unfit(target):
        raise RuleError(
            f"the op cannot have a rule: {reason}",
            where=op_name(target),
            remedy="make it a pure function of its arguments",
        )
    given = [_example(target, e) for e in examples]
    calls = (
        [c for call, tensors in given for c in _with_other_values(call, tensors)]
        if given
        else list(_generate_trials(target, row))
    )
    _check(target, row, calls)
    REGISTERED[target] = row
    forget()


def _overload(op: Any) -> torch._ops.OpOverload:
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op gives holds its overload
    if isinstance(op, torch._ops.OpOverloadPacket) and len(op.overloads()) == 1:
        op = getattr(op, op.overloads()[0])
    if not isinstance(op, torch._ops.OpOverload):
        remedy = "pass torch.ops.NAMESPACE.NAME.OVERLOAD, or the result of torch.library.custom_op"
        raise RuleError(f"{op!r} is not a torch operator with one overload", remedy=remedy)
    return op


Trial = tuple[Call, list[torch.Tensor]]


def _example(target: Any, example: Example) -> Trial:
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
    try:
        with as_written():
            result = target(*args, **kwargs)
    except Exception as error:  # a user's op may raise anything
        raise RuleError(
            f"the op does not accept the example: {error}", where=op_name(target), remedy=_ASK
        ) from error
    return call_on(target, args, kwargs, result)


def _with_other_values(call: Call, tensors: list[torch.Tensor]) -> Iterator[Trial]:
    """The example, and the same with floats of other signs and sizes where the op takes them."""
    yield call, tensors
    for recipe in RECIPES:
        made = tensors_for(call.inputs, recipe)
        other = [
            m.to(t.device) if t.dtype.is_floating_point else t
            for m, t in zip(made, tensors, strict=True)
        ]
        if _is_taken(call, other):
            yield call, other


def _is_taken(call: Call, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the op gives numbers for these operands."""
    try:
        results = run(call.target, call.args, call.kwargs, tensors, (), ())
    except Exception:  # a user's op may raise anything; then these values are none of its
        return False
    return all(bool(torch.isfinite(r).all()) for r in results if isinstance(r, torch.Tensor))


def _generate_trials(target: Any, row: Row) -> Iterator[Trial]:
    """Calls on float tensors whose dims are as the letters say.

    Raises:
        RuleError: where the op takes none of them.
    """
    terms, _ = terms_of(row.text)
    problem = "it has parameters that are not tensors and have no defaults"
    found = False
    arguments = _operands(target, len(terms))
    for dtype in (torch.float64, torch.float32) if arguments is not None else ():
        for sizes in _SIZES:
            infos = [TensorInfo(shape, dtype) for shape in _shapes(terms, sizes)]
            for recipe in RECIPES:
                tensors = tensors_for(infos, recipe)
                try:
                    results = run(target, arguments or (), {}, tensors, (), ())
                except Exception as error:  # a user's op may raise anything
                    problem = str(error)
                    continue
                call, _ = call_on(
                    target, tuple(tensors), {}, results if len(results) > 1 else results[0]
                )
                if _is_taken(call, tensors):
                    found = True
                    yield call, tensors
        if found:
            return
    raise RuleError(
        f"the op does not accept the shapes of the rule's letters: {problem}",
        where=op_name(target),
        remedy=_ASK,
    )


def _operands(target: Any, num_terms: int) -> tuple[Operand, ...] | None:
    """One operand for each term; None where other parameters have to be filled in."""
    parameters = target._schema.arguments
    needed = [a for a in parameters if not a.has_default_value()]
    leading = parameters[:num_terms]
    if (
        len(needed) > num_terms
        or len(leading) < num_terms
        or any(str(a.type) not in ("Tensor", "Optional[Tensor]") for a in leading)
    ):
        return None
    return tuple(map(Operand, range(num_terms)))


def _shapes(terms: Sequence[Sequence[str]], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    letters = dict.fromkeys(x for term in terms for x in term if x not in (WHOLE, "..."))
    size_of = {letter: sizes[i % len(sizes)] for i, letter in enumerate(letters)} | {
        WHOLE: _WHOLE_SIZE
    }
    for term in terms:
        yield tuple(s for x in term for s in (sizes[-2:] if x == "..." else (size_of[x],)))


def _check(target: Any, row: Row, trials: Sequence[Trial]) -> None:
    tried: set[str] = set()
    with as_written(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            0
        )  # of the CPU alone, where it runs: those of GPUs are the script's
        for call, tensors in trials:
            factors = row(call)
            every = options(factors, call)
            tried |= _letters_tried(factors, call)
            for mesh_shape in _MESHES:
                for strategy in expand(call, every, mesh_shape):
                    try:
                        check_strategy(call, tensors, strategy, mesh_shape)
                    except RuleError as error:
                        what = f"rule {row.text!r} is wrong on a mesh of {mesh_shape}: {error.what}"
                        raise RuleError(
                            what,
                            where=op_name(target),
                            remedy="correct the rule; _ means that a dim is never sharded",
                        ) from error
    untried = [
        x
        for term in terms_of(row.text)[0]
        for x in term
        if x not in (WHOLE, "...") and x not in tried
    ]
    if untried:
        raise RuleError(
            f"no example covers letter {untried[0]!r}: its dim is 1 in all examples",
            where=op_name(target),
            remedy=_ASK,
        )


def _letters_tried(factors: Factors, call: Call) -> set[str]:
    return {
        x
        for term, info in zip(factors.inputs, call.inputs, strict=True)
        for x, n in zip(term, info.shape, strict=True)
        if n > 1
    }


def unregister(op: Any) -> None:
    """Forget the rule of an op that `register` took.

    Raises:
        RuleError: where the op has none.
    """
    target = _overload(op)
    if REGISTERED.pop(target, None) is None:
        raise RuleError(
            "the op was not registered", where=op_name(target), remedy="register it first"
        )
    forget()
