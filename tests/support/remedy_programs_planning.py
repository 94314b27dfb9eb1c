"""Programs for the remedies of planning (memory, microbatches, stages and outputs) and of rules for
custom ops."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar import rules
from autopar.api.tracing import refuse_parts
from autopar.capture import capture
from tests.support.mlp import Mlp
from tests.support.remedy_programs import Called, Program, planned

X = torch.ones(8, 4)


@torch.library.custom_op("remedies::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An op without a rule."""
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _registered(op: Any = twice, rule: str = "m n -> m n", **options: Any) -> Callable[[], object]:
    """Register a rule and remove it again."""

    def program() -> None:
        rules.register(op, rule, **options)
        rules.unregister(op)

    return program


def _unregistered(first: bool) -> Callable[[], object]:
    def program() -> None:
        if first:
            rules.register(twice, "m n -> m n")
        rules.unregister(twice)

    return program


def _normed(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    return ((y - y.mean(0)) / (y.std(0) + 1)).square().mean()


def _fixed(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).view(8, 4).square().mean()


def _any(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).view(-1, 4).square().mean()


def _of(function: Callable[..., Any], batch: Any = (X,), **options: Any) -> Callable[[], object]:
    return planned(Called(function), batch, **options)


def _parts(model: nn.Module, x: Tensor) -> Callable[[], object]:
    """Check a model to which each rank passes its part of the batch."""
    return lambda: refuse_parts(capture(model, (x,)), "local")


_OUTPUTS = Called(lambda layer, x: layer(x))


def _written_to(name: str, **options: Any) -> Callable[[], object]:
    """Plan and write the integer program to a file with this name in a new folder."""

    def program() -> object:
        with tempfile.TemporaryDirectory() as folder:
            return planned(write_lp=Path(folder) / name, **options)()

    return program


_TWO_STAGES = autopar.constraints.pipeline(microbatches=2)
PROGRAMS: dict[str, Program] = {
    "option_checks.py check_name 0": Program(
        planned(solver=3), "pass a name", planned(solver="highs")
    ),
    "solve/pulp_models.py _refusal 0": Program(
        planned(solver="simplex"), "pass one of the available solvers", planned(solver="cbc")
    ),
    "solve/pulp_models.py _refusal 1": Program(
        planned(solver="mosek"), "or pass one of the available solvers", planned(solver="cbc")
    ),
    "planner/search.py Planned.write_lp 0": Program(
        _written_to("plan.lp", constraints=[_TWO_STAGES]),
        "pass num_microbatches=1 and no pipeline",
        _written_to("plan.lp", num_microbatches=1),
    ),
    "capture/chunked_loss.py with_loss_only 0": Program(
        planned(_OUTPUTS, (X,), outputs="loss"),
        'outputs="full"',
        planned(_OUTPUTS, (X,), outputs="full"),
    ),
    "capture/chunked_loss.py loss_by_rows 0": Program(
        planned(loss_rows=4), "loss_rows=0", planned(loss_rows=0)
    ),
    "api/tracing.py refuse_parts 1": Program(
        _parts(_OUTPUTS, X),
        "compute and return the loss in forward",
        _parts(Mlp(4, 8, 1), X),
    ),
    "api/tracing.py microbatch_of 0 | plan": Program(
        planned(num_microbatches=3), "a divisor of 8", planned(num_microbatches=2)
    ),
    "api/tracing.py trace_part 0": Program(
        planned(batch={"x": X.clone().requires_grad_()}, num_microbatches=2),
        "pass it without requires_grad",
        planned(num_microbatches=2),
    ),
    "api/tracing.py _of_parts 0": Program(
        _of(_fixed, num_microbatches=2),
        "make forward accept any number of samples",
        _of(_any, num_microbatches=2),
    ),
    "analysis/microbatch_sites.py refusal 0": Program(
        _of(_normed, num_microbatches=2), "num_microbatches=1", _of(_normed, num_microbatches=1)
    ),
    "rules/registration.py _check_target 0": Program(
        _registered(reduce_op="product"), "sum, max or min", _registered(reduce_op="max")
    ),
    "rules/registration.py _check_target 1": Program(
        _registered(torch.ops.aten.mm.default, "m k, k n -> m n"),
        "ops without a built-in rule",
        _registered(),
    ),
    "rules/registration.py _overload 0": Program(
        _registered(torch.relu), "the result of torch.library.custom_op", _registered(twice)
    ),
    "rules/registration.py _example 0": Program(
        _registered(examples=[(torch.ones(2, 2), 3)]),
        "with arguments of the op",
        _registered(examples=[(torch.ones(8, 8),)]),
    ),
    "rules/registration.py _check 0": Program(
        _registered(rule="m n -> n m"), "correct the rule", _registered(rule="m n -> m n")
    ),
    "rules/registration.py _check 1": Program(
        _registered(examples=[(torch.ones(8, 1),)]),
        "every letter is larger than 1",
        _registered(examples=[(torch.ones(8, 8),)]),
    ),
    "rules/registration.py _linear_sets 0": Program(
        _registered(rule="m n, _ -> m n"),
        "one term per tensor parameter",
        _registered(rule="m n -> m n"),
    ),
    "rules/registration.py _linear_sets 1": Program(
        _registered(linear=[0]), "linear=[(0,), (1,)]", _registered(linear=[(0,)])
    ),
    "rules/registration.py _kind_of 0": Program(
        _registered(kind="matmul"),
        "or pass flops",
        _registered(kind="matmul", flops=lambda x: 2 * x[0] * x[1]),
    ),
    "rules/registration.py _check_flops 0": Program(
        _registered(flops=lambda x: x[0] ** 2),
        "with the given local shapes",
        _registered(flops=lambda x: x[0] * x[1]),
    ),
    "rules/table.py RegisteredRule.count_flops 0": Program(
        _registered(flops=lambda x, w: 2 * x[0]),
        "one shape per tensor operand",
        _registered(flops=lambda x: 2 * x[0]),
    ),
    "rules/registration.py unregister 0": Program(
        _unregistered(False), "register it first", _unregistered(True)
    ),
    "rules/notation.py terms_of 0": Program(
        _registered(rule="m n"), "m k, k n -> m n", _registered(rule="m n -> m n")
    ),
}
