"""Rules of users' ops: `register` takes one in notation, and only after it has passed the law.

    autopar.rules.register(torch.ops.mine.scaled_mm.default, "m k, k n -> m n", linear=((0,), (1,)))

The law is tried on the user's examples, or, where the op's schema says enough, on tensors made from
the rule's letters.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autopar.core.autocast_state import as_written
from autopar.core.hardware import FLOP_KINDS, MEMORY_KINDS, WorkKind
from autopar.core.layout import local_shape
from autopar.errors import RuleError
from autopar.rules.call import Call, Operand, TensorInfo, call_on, op_name, takes_tensor
from autopar.rules.discovery import unfit
from autopar.rules.expansion import expand
from autopar.rules.knowledge import forget
from autopar.rules.notation import WHOLE, Factors, Row, options, terms_of
from autopar.rules.small_calls import RECIPES, tensors_for
from autopar.rules.table import REGISTERED, TABLE, RegisteredRule
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
    flops: Callable[..., int] | None = None,
    kind: WorkKind | None = None,
) -> None:
    """Register the sharding rule of an op, and its work. The rule is tested first. It belongs to
    the process: register it in every process that plans, checks or verifies a model with the op.

    Args:
        op: an OpOverload, ``torch.ops.mine.name`` with one overload, or the result of
            ``torch.library.custom_op``.
        rule: the rule in factor notation (`autopar.rules.notation`): one term per tensor parameter
            and per result, as in ``"m k, k n -> m n"``.
        linear: sets of tensor parameters, each parameter by its position among them, counted from
            0. The op must be linear in the parameters of a set together, with all other parameters
            fixed: f(a + b) = f(a) + f(b). Partial sums of all of them then pass through the op. A
            matrix product has ``[(0,), (1,)]``, an addition ``[(0, 1)]``.
        reduce_op: how the partial results of a letter that a result lacks are reduced: ``sum``,
            ``max`` or ``min``.
        examples: arguments to test the rule on, each a tuple of positional or a dict of named
            arguments. Without examples, float tensors are made from the letters; all other
            parameters then need defaults.
        flops: computes the floating-point operations of a call, a multiply-add counted as two. It
            takes the local shape of each tensor operand, as a tuple of ints, and returns an int:
            ``lambda x, w: 2 * x[0] * x[1] * w[1]`` for a matrix product. Without it, the time of
            the op is that of reading its operands and writing its results once.
        kind: kind of the op's work, which selects the efficiency in the hardware profile. With
            `flops`: ``matmul`` (the default), ``attention`` or ``attention_backward``. Without:
            ``elementwise`` (the default), ``transcendental``, ``reduction`` or ``indexing``.

    Raises:
        RuleError: if the rule is wrong (with the counterexample), does not fit the op or cannot be
            tested, or if `flops` and `kind` do not fit. The op then keeps the rule that it had.
    """
    target = _overload(op)
    _check_target(target, reduce_op)
    row = Row(rule, _linear_sets(target, rule, linear), reduce_op)
    registered = RegisteredRule(row, flops, _kind_of(target, flops, kind))
    given = [_example(target, e) for e in examples]
    calls = (
        [c for call, tensors in given for c in _with_other_values(call, tensors)]
        if given
        else list(_generate_trials(target, row))
    )
    _check(target, row, calls)
    _check_flops(registered, [call for call, _ in calls])
    REGISTERED[target] = registered
    forget()


def _check_target(target: torch._ops.OpOverload, reduce_op: str) -> None:
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


def _linear_sets(
    target: torch._ops.OpOverload, rule: str, linear: Iterable[Iterable[int]]
) -> tuple[tuple[int, ...], ...]:
    """Check the number of the rule's terms, and the sets of tensor parameters.

    Raises:
        RuleError: if the op takes another number of tensors, or a set is not one of their
            positions.
    """
    num_terms = len(terms_of(rule)[0])
    tensors = [a for a in target._schema.arguments if takes_tensor(str(a.type))]
    needed = [
        n for n, a in enumerate(tensors, 1) if str(a.type) == "Tensor" and not a.has_default_value()
    ]
    least, most = max(needed, default=0), len(tensors)
    if not least <= num_terms <= most:
        count = f"{most} tensors" if least == most else f"{least} to {most} tensors"
        raise RuleError(
            f"rule {rule!r} has {num_terms} terms before the arrow, the op takes {count}",
            where=op_name(target),
            remedy='write one term per tensor parameter, as in "m k, k n -> m n"',
        )
    try:
        sets = tuple(tuple(map(operator.index, group)) for group in linear)
        fits = all(group and set(group) <= set(range(num_terms)) for group in sets)
    except TypeError:
        sets, fits = (), False
    if not fits:
        raise RuleError(
            f"linear={linear!r} is not a list of sets of the rule's {num_terms} tensors",
            where=op_name(target),
            remedy=(
                "write each set as a tuple of positions, counted from 0, as in linear=[(0,), (1,)]"
            ),
        )
    return sets


def _kind_of(
    target: torch._ops.OpOverload, flops: Callable[..., int] | None, kind: WorkKind | None
) -> WorkKind:
    default: WorkKind = "matmul" if flops is not None else "elementwise"
    chosen = default if kind is None else kind
    kinds = FLOP_KINDS if flops is not None else MEMORY_KINDS
    if chosen not in kinds:
        raise RuleError(
            f"kind={kind!r} {'with' if flops is not None else 'without'} flops is not possible",
            where=op_name(target),
            remedy=f"write one of {', '.join(kinds)}"
            + (", or pass flops" if kind in FLOP_KINDS else ""),
        )
    return chosen


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
    try:
        args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
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
        RuleError: if the op takes none of them.
    """
    terms, _ = terms_of(row.text)
    others = [
        a.name
        for a in target._schema.arguments
        if not takes_tensor(str(a.type)) and not a.has_default_value()
    ]
    problem = f"parameters without defaults that are not tensors: {', '.join(others)}"
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
    """One operand for each term; None if other parameters have to be filled in."""
    parameters = target._schema.arguments
    needed = [a for a in parameters if not a.has_default_value()]
    leading = parameters[:num_terms]
    if (
        len(needed) > num_terms
        or len(leading) < num_terms
        or any(not takes_tensor(str(a.type)) for a in leading)
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


def _check_flops(rule: RegisteredRule, calls: Sequence[Call]) -> None:
    """Check that the parts of an op do not need fewer flops than the whole op: the bounds of the
    planner rely on it.

    Raises:
        RuleError: if they do, or the user's function does not give a count.
    """
    distinct = {tuple(info.shape for info in call.inputs): call for call in calls}
    for shapes, call in distinct.items():
        whole = rule.count_flops(call.target, shapes)
        for mesh_shape in _MESHES:
            for strategy in expand(call, options(rule(call), call), mesh_shape):
                local = [
                    local_shape(shape, layout, mesh_shape)
                    for shape, layout in zip(shapes, strategy.inputs, strict=True)
                ]
                parts = math.prod(mesh_shape) * rule.count_flops(call.target, local)
                if parts < whole:
                    raise RuleError(
                        f"the flops function returns {whole} for operands of shapes"
                        f" {list(shapes)}, but only {parts} for all parts of strategy {strategy}"
                        f" on a mesh of {mesh_shape}",
                        where=op_name(call.target),
                        remedy="return the flops of the call with the given local shapes",
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
        RuleError: if the op has none.
    """
    target = _overload(op)
    if REGISTERED.pop(target, None) is None:
        raise RuleError(
            "the op was not registered", where=op_name(target), remedy="register it first"
        )
    forget()
