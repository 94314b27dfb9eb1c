"""Rules of custom ops: `register` adds a rule in factor notation after it passes a numerical check.

    autopar.rules.register(torch.ops.mine.scaled_mm.default, "m k, k n -> m n", linear=((0,), (1,)))

The check uses the user's examples, or, if all parameters that are not tensors have defaults,
tensors that are created from the letters of the rule.
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
)  # sizes of letters: even, equal, odd
_WHOLE_SIZE = 6
_EXAMPLES_REMEDY = (
    "pass examples=[(tensor, ...), ...] with arguments of the op, so that the dim of every letter"
    " is larger than 1 in some example"
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
    """Register the sharding rule of a custom op, and its work, after a numerical check of the rule.

    The registration applies to the current process. Register the rule in every process that plans,
    checks or verifies a model with the op.

    Args:
        op: an OpOverload, ``torch.ops.mine.name`` with one overload, or the result of
            ``torch.library.custom_op``.
        rule: the rule in factor notation (`autopar.rules.notation`): one term per tensor parameter
            and per result, as in ``"m k, k n -> m n"``.
        linear: sets of tensor parameters, each given by its position among them, counted from 0.
            The op must be linear in the parameters of a set together, with all other parameters
            fixed: f(a + b) = f(a) + f(b). Partial sums of all of them then give partial sums of the
            results. A matrix product has ``[(0,), (1,)]``, an addition ``[(0, 1)]``.
        reduce_op: reduction of the partial results of a letter that a result does not have:
            ``sum``, ``max`` or ``min``.
        examples: arguments to test the rule with, each a tuple of positional or a dict of named
            arguments. Without examples, float tensors are created from the letters; all other
            parameters then need defaults.
        flops: function that returns the number of floating-point operations of a call, with a
            multiply-add counted as two. Its arguments are the local shapes of the tensor operands,
            as tuples of ints: ``lambda x, w: 2 * x[0] * x[1] * w[1]`` for a matrix product. If it
            is None, the time of the op is that of reading its operands and writing its results
            once.
        kind: kind of the op's work, which selects the efficiency in the hardware profile. With
            `flops`: ``matmul`` (the default), ``attention`` or ``attention_backward``. Without:
            ``elementwise`` (the default), ``transcendental``, ``reduction`` or ``indexing``.

    Raises:
        RuleError: the rule is wrong (the message has a counterexample), does not match the op or
            cannot be tested, or `flops` and `kind` do not match. The op then keeps its previous
            rule.
    """
    target = _overload(op)
    _check_target(target, reduce_op)
    row = Row(rule, _linear_sets(target, rule, linear), reduce_op)
    registered = RegisteredRule(row, flops, _kind_of(target, flops, kind))
    checked_examples = [_example(target, e) for e in examples]
    calls = (
        [c for call, tensors in checked_examples for c in _with_other_values(call, tensors)]
        if checked_examples
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
            "the op has a built-in rule",
            where=op_name(target),
            remedy="register only ops without a built-in rule",
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
    """Check the number of terms of a rule and its linear sets, and return the sets.

    Raises:
        RuleError: the number of terms differs from the number of tensor parameters, or a set
            contains something else than positions of them.
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
            f"rule {rule!r} has {num_terms} terms before the arrow, but the op takes {count}",
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
            f"linear={linear!r} is not a list of sets of the {num_terms} tensors of the rule",
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
            f"kind={kind!r} is not allowed {'with' if flops is not None else 'without'} flops",
            where=op_name(target),
            remedy=f"use one of {', '.join(kinds)}"
            + (", or pass flops" if kind in FLOP_KINDS else ""),
        )
    return chosen


def _overload(op: Any) -> torch._ops.OpOverload:
    op = getattr(op, "_opoverload", op)  # of a result of torch.library.custom_op
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
    except Exception as error:  # a custom op may raise any error
        raise RuleError(
            f"the op does not accept the example: {error}",
            where=op_name(target),
            remedy=_EXAMPLES_REMEDY,
        ) from error
    return call_on(target, args, kwargs, result)


def _with_other_values(call: Call, tensors: list[torch.Tensor]) -> Iterator[Trial]:
    """Yield the example, and the example with floats of other signs and magnitudes if the op
    accepts them."""
    yield call, tensors
    for recipe in RECIPES:
        new_tensors = tensors_for(call.inputs, recipe)
        other = [
            m.to(t.device) if t.dtype.is_floating_point else t
            for m, t in zip(new_tensors, tensors, strict=True)
        ]
        if _is_accepted(call, other):
            yield call, other


def _is_accepted(call: Call, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the op accepts these operands and returns finite numbers."""
    try:
        results = run(call.target, call.args, call.kwargs, tensors, (), ())
    except Exception:  # a custom op may raise any error for values that it does not accept
        return False
    return all(bool(torch.isfinite(r).all()) for r in results if isinstance(r, torch.Tensor))


def _generate_trials(target: Any, row: Row) -> Iterator[Trial]:
    """Yield calls with float tensors whose sizes are defined by the letters of the rule.

    Raises:
        RuleError: the op accepts none of them.
    """
    terms, _ = terms_of(row.text)
    others = [
        a.name
        for a in target._schema.arguments
        if not takes_tensor(str(a.type)) and not a.has_default_value()
    ]
    problem = f"parameters without defaults that are not tensors: {', '.join(others)}"
    has_trial = False
    arguments = _operands(target, len(terms))
    for dtype in (torch.float64, torch.float32) if arguments is not None else ():
        for sizes in _SIZES:
            infos = [TensorInfo(shape, dtype) for shape in _shapes(terms, sizes)]
            for recipe in RECIPES:
                tensors = tensors_for(infos, recipe)
                try:
                    results = run(target, arguments or (), {}, tensors, (), ())
                except Exception as error:  # a custom op may raise any error
                    problem = str(error)
                    continue
                call, _ = call_on(
                    target, tuple(tensors), {}, results if len(results) > 1 else results[0]
                )
                if _is_accepted(call, tensors):
                    has_trial = True
                    yield call, tensors
        if has_trial:
            return
    raise RuleError(
        f"the op does not accept tensors with the shapes of the rule: {problem}",
        where=op_name(target),
        remedy=_EXAMPLES_REMEDY,
    )


def _operands(target: Any, num_terms: int) -> tuple[Operand, ...] | None:
    """Return one operand per term; None if other parameters have no default."""
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
        )  # only the generator of the CPU, on which this runs; those of GPUs are not changed
        for call, tensors in trials:
            factors = row(call)
            every = options(factors, call)
            tried |= _letters_tried(factors, call)
            for mesh_shape in _MESHES:
                for strategy in expand(call, every, mesh_shape):
                    try:
                        check_strategy(call, tensors, strategy, mesh_shape)
                    except RuleError as error:
                        message = (
                            f"rule {row.text!r} is wrong on a mesh of {mesh_shape}: {error.what}"
                        )
                        raise RuleError(
                            message,
                            where=op_name(target),
                            remedy="correct the rule; use _ for a dim that must not be sharded",
                        ) from error
    untried = [
        x
        for term in terms_of(row.text)[0]
        for x in term
        if x not in (WHOLE, "...") and x not in tried
    ]
    if untried:
        raise RuleError(
            f"no example covers letter {untried[0]!r}: its dim has size 1 in all examples",
            where=op_name(target),
            remedy=_EXAMPLES_REMEDY,
        )


def _check_flops(rule: RegisteredRule, calls: Sequence[Call]) -> None:
    """Check that all parts of an op together need at least the flops of the full op, as the bounds
    of the planner assume.

    Raises:
        RuleError: the parts need fewer flops, or the user's function does not return a count.
    """
    distinct = {tuple(info.shape for info in call.inputs): call for call in calls}
    for shapes, call in distinct.items():
        full_flops = rule.count_flops(call.target, shapes)
        for mesh_shape in _MESHES:
            for strategy in expand(call, options(rule(call), call), mesh_shape):
                local = [
                    local_shape(shape, layout, mesh_shape)
                    for shape, layout in zip(shapes, strategy.inputs, strict=True)
                ]
                parts = math.prod(mesh_shape) * rule.count_flops(call.target, local)
                if parts < full_flops:
                    raise RuleError(
                        f"the flops function returns {full_flops} for operands of shapes"
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
    """Remove the registered rule of an op.

    Args:
        op: the op, as for `register`.

    Raises:
        RuleError: the op has no registered rule.
    """
    target = _overload(op)
    if REGISTERED.pop(target, None) is None:
        raise RuleError(
            "the op was not registered", where=op_name(target), remedy="register it first"
        )
    forget()
