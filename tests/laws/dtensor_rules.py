"""The behavior of DTensor for an op on two ranks, determined without processes, and a numerical
check of it.

For each choice of a placement per operand, torch either accepts the operands and returns the
placements of the results, or redistributes the operands first. In the second case, it has no rule
for the choice.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from further_cases import FURTHER_CASES, grouped
from rule_cases import CASES as COMMON_CASES
from rule_cases import aten, on, real
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import Placement

from autopar.core.layout import Layout, Strategy
from autopar.rules import axis_options, call_on, localize
from autopar.rules.call import NO_TENSOR, Call, Operand
from autopar.rules.trial import close, join, run, split

R, P = Replicate(), Partial("sum")
SIZES = SimpleNamespace(a=4, b=6, c=8, d=10, before=[4, 6], after=[24])
MOST_CHOICES = 250
Placements = tuple[Placement, ...]

# Values that reveal errors that the cases of the rows do not.
TELLING = {
    aten.cumsum.default: lambda s: on(real(s.a, s.b, s.c), 2),
    aten.nll_loss_forward.default: lambda s: on(
        real(4, s.c), torch.tensor([1, 3, -100, 2]), None, 1, -100
    ),
    aten.nansum.default: lambda s: on(real(s.a, s.b).index_fill(1, torch.tensor([1]), torch.nan)),
    aten._to_copy.default: lambda s: on(real(s.a, s.b) / 3, dtype=torch.bfloat16),
    aten.any.dim: lambda s: on(real(s.a, s.b) * 0, 1),
    aten.any.default: lambda s: on(real(s.a, s.b) * 0),
}

# Operands with the dtype that torch requires for tensors without values.
OTHERWISE = {
    aten._grouped_mm.default: [
        grouped((16, 192), (3, 192, 192), dtype=torch.bfloat16),
        grouped((192, 16), (16, 192), dtype=torch.bfloat16),
    ],
}


def cases() -> Iterator[tuple[Call, list[torch.Tensor]]]:
    """Iterate over calls of all ops of the table that torch has a rule for, with operands."""
    for op, own in {**COMMON_CASES, **FURTHER_CASES, **OTHERWISE}.items():
        if own and isinstance(op, torch._ops.OpOverload) and has_rule(op):
            for case in [
                *(own if isinstance(own, list) else [own]),
                *([TELLING[op]] if op in TELLING else []),
            ]:
                torch.manual_seed(0)
                args, kwargs = case(SIZES)
                yield call_on(op, args, kwargs, op(*args, **kwargs))


def _propagator() -> Any:
    return DTensor._op_dispatcher.sharding_propagator


def has_rule(op: Any) -> bool:
    known = _propagator()
    return any(
        op in table
        for table in (
            known.op_strategy_funcs,
            known.op_to_rules,
            known.op_single_dim_strategy_funcs,
        )
    )


def choices(call: Call, tensors: Sequence[torch.Tensor]) -> list[Placements]:
    """Iterate over all choices of a placement per operand. For many operands, only choices that
    shard or sum almost all of them, and the options of autopar, are included."""
    each = [
        [
            R,
            *(Shard(d) for d, n in enumerate(t.shape) if n > 1),
            *([P] if t.is_floating_point() else []),
        ]
        for t in tensors
    ]
    every = list(itertools.product(*each))
    if len(every) <= MOST_CHOICES:
        return every
    ours = {option.inputs for option in axis_options(call)}
    return [c for c in every if c in ours or sum(p != R for p in c) >= len(c) - 1][:MOST_CHOICES]


def asked(
    call: Call, tensors: Sequence[torch.Tensor], inputs: Placements, mesh: DeviceMesh
) -> Placements | None:
    """Return the placements that torch gives to the results, or None if it does not accept the
    operands."""
    given = [
        DTensorSpec(mesh, (p,), TensorMeta(t.shape, t.stride(), t.dtype))
        for p, t in zip(inputs, tensors, strict=True)
    ]

    def fill(value: Any) -> Any:
        if isinstance(value, Operand):
            return given[value.index]
        return [fill(v) for v in value] if isinstance(value, tuple) else value

    schema = OpSchema(
        call.target, tuple(map(fill, call.args)), {k: fill(v) for k, v in call.kwargs.items()}
    )
    infos = (
        _propagator().op_to_schema_info,
        _propagator().op_to_schema_info_for_single_dim_strategy,
    )
    schema.schema_info = next((info[call.target] for info in infos if call.target in info), None)
    try:
        answer = _propagator().propagate_op_sharding_non_cached(schema)
    except (RuntimeError, ValueError, AssertionError):  # torch refuses the operands or fails
        return None
    wanted = answer.redistribute_schema if answer.needs_redistribute else None
    if wanted is not None and [s.placements for s in wanted.args_spec] != [
        s.placements for s in schema.args_spec
    ]:
        return None
    specs = (
        answer.output_spec if isinstance(answer.output_spec, list | tuple) else [answer.output_spec]
    )
    return tuple(
        s.placements[0] if s is not None and i != NO_TENSOR else R
        for s, i in zip(specs, call.outputs, strict=True)
    )


def holds(
    call: Call, tensors: Sequence[torch.Tensor], inputs: Placements, outputs: Placements
) -> bool:
    """Return whether the results of two ranks are the parts of the full results that `outputs`
    describes."""
    random = torch.Generator().manual_seed(0)
    parts = [split(x, Layout((p,)), (2,), random) for x, p in zip(tensors, inputs, strict=True)]
    plain = tuple(_plain(p) for p in outputs)
    strategy = Strategy(tuple(Layout((p,)) for p in inputs), tuple(Layout((p,)) for p in plain))
    averaged = any(
        _reduce_op(p) == "avg" for p in outputs
    )  # average of the results of the op on the parts
    local = call if averaged else localize(call, strategy, (2,))
    try:
        ranks = [
            run(local.target, local.args, local.kwargs, [p[(rank,)] for p in parts], (2,), (rank,))
            for rank in range(2)
        ]
    except (RuntimeError, IndexError, ValueError):
        return False
    whole = run(call.target, call.args, call.kwargs, tensors, (), ())
    return all(
        _joins([r[i] for r in ranks], whole[i], p)
        for i, p in enumerate(outputs)
        if call.outputs[i] != NO_TENSOR
    )


def _reduce_op(placement: Placement) -> Any:
    return "norm" if hasattr(placement, "norm_type") else getattr(placement, "reduce_op", None)


def _plain(placement: Placement) -> Placement:
    """Return the corresponding placement of autopar."""
    if isinstance(placement, Replicate | Shard):
        return placement
    return (
        placement
        if _reduce_op(placement) in ("sum", "max", "min")
        else P
        if placement.is_partial()
        else Shard(placement.dim)
    )


def _joins(parts: list[torch.Tensor], whole: torch.Tensor, placement: Placement) -> bool:
    tolerance = 1e-6 if whole.dtype in (torch.float32, torch.bool) else 1e-9
    if hasattr(placement, "split_factor"):
        rows = [part.unflatten(placement.dim, (placement.split_factor, -1)) for part in parts]
        return close(
            torch.cat(rows, placement.dim + 1).flatten(placement.dim, placement.dim + 1),
            whole,
            tolerance,
        )
    if not isinstance(placement, Replicate | Shard) and _reduce_op(placement) not in (
        "sum",
        "max",
        "min",
    ):
        return close(_reduced(torch.stack(parts).to(whole.dtype), placement), whole, tolerance)
    joined = join(
        {(rank,): part for rank, part in enumerate(parts)},
        whole,
        Layout((placement,)),
        (2,),
        tolerance,
    )
    return not isinstance(joined, str) and close(joined, whole, tolerance)


def _reduced(stacked: torch.Tensor, placement: Any) -> torch.Tensor:
    match _reduce_op(placement):
        case "avg":
            return stacked.mean(0)
        case "product":
            return stacked.prod(0).to(stacked.dtype)
        case _:
            return torch.linalg.vector_norm(stacked, placement.norm_type, 0)


def disagreements(mesh: DeviceMesh) -> Iterator[dict[str, Any]]:
    """Return all choices on which torch and autopar differ, with the verdict of the numerical
    check."""
    for call, tensors in cases():
        with _known_results():
            yield from _of_call(call, tensors, mesh)


@contextlib.contextmanager
def _known_results() -> Iterator[None]:
    """Let torch compute the shapes of the results of a call once instead of at each choice."""
    propagator, known = _propagator(), []
    look = propagator._propagate_tensor_meta_non_cached

    def looked(schema: OpSchema) -> Any:
        if not known:
            known.append(look(schema))
        return known[0]

    propagator._propagate_tensor_meta_non_cached = looked
    try:
        yield
    finally:
        del propagator._propagate_tensor_meta_non_cached


def _of_call(
    call: Call, tensors: Sequence[torch.Tensor], mesh: DeviceMesh
) -> Iterator[dict[str, Any]]:
    ours = {option.inputs: option.outputs for option in axis_options(call)}
    for inputs in choices(call, tensors):
        mine, theirs = ours.get(inputs), asked(call, tensors, inputs, mesh)
        if mine == theirs:
            continue
        right = {
            who: None if said is None else holds(call, tensors, inputs, said)
            for who, said in (("autopar", mine), ("torch", theirs))
        }
        yield {
            "op": str(call.target),
            "shapes": [list(info.shape) for info in call.inputs],
            "settings": _settings(call),
            "inputs": _text(inputs),
            "autopar": _text(mine),
            "torch": _text(theirs),
            "verdict": verdict(right["autopar"], right["torch"]),
        }


def verdict(autopar: bool | None, torch_: bool | None) -> str:
    """Return which side is wrong or has no rule. Each argument is whether the numbers agree with a
    side, or None if it has no rule for the choice."""
    match autopar, torch_:
        case False, _:
            return "autopar is wrong"
        case _, False:
            return "torch is wrong"
        case None, True:
            return "autopar lacks it"
        case True, None:
            return "torch lacks it"
        case _:
            return "both are right"


def _settings(call: Call) -> str:
    """Return all arguments that are not tensors."""
    given = [str(a) for a in call.args if not isinstance(a, Operand)] + [
        f"{k}={v}" for k, v in call.kwargs.items()
    ]
    return ", ".join(text for text in given if "Operand" not in text)


def _text(placements: Placements | None) -> str | None:
    return None if placements is None else " ".join(map(str, placements))
