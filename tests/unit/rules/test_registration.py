"""Rules registered by users. A rule that violates the law is refused with a counterexample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar.rules
from autopar.core.layout import Layout, Strategy
from autopar.errors import RuleError
from autopar.rules import axis_options, call_on, is_strategy, register, unregister
from autopar.rules.table import REGISTERED

aten = torch.ops.aten


@torch.library.custom_op("tests_registration::scaled_mm", mutates_args=())
def scaled_mm(x: Tensor, w: Tensor, scale: float = 2.0) -> Tensor:
    return (x @ w) * scale


@torch.library.custom_op("tests_registration::center", mutates_args=())
def center(x: Tensor) -> Tensor:
    """Subtract the mean over the last dim, then average over the first dim."""
    return (x - x.mean(-1, keepdim=True)).mean(0)


@torch.library.custom_op("tests_registration::pick", mutates_args=())
def pick(x: Tensor, index: Tensor) -> Tensor:
    return x[index].clone()


@torch.library.custom_op("tests_registration::peak", mutates_args=())
def peak(x: Tensor) -> Tensor:
    return x.amax(-1)


@torch.library.custom_op("tests_registration::rolled", mutates_args=())
def rolled(x: Tensor, shift: int, dim: int) -> Tensor:
    return x.roll(shift, dim)


@torch.library.custom_op("tests_registration::fill", mutates_args=("x",))
def fill(x: Tensor) -> None:
    x.fill_(1.0)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    for op in list(REGISTERED):
        unregister(op)


def options_of(target: object, *args: object) -> list[str]:
    result = target(*args)  # type: ignore[operator]
    options = axis_options(call_on(target, args, {}, result)[0])  # type: ignore[arg-type]
    return [f"{' '.join(map(str, o.inputs))} -> {' '.join(map(str, o.outputs))}" for o in options]


def test_registered_rule_gives_the_options_of_the_op() -> None:
    register(scaled_mm, "m k, k n -> m n", linear=[(0,), (1,)])
    target = torch.ops.tests_registration.scaled_mm.default
    assert options_of(target, torch.ones(4, 6), torch.ones(6, 8)) == [
        "R R -> R",
        "S(0) R -> S(0)",
        "S(1) S(0) -> P(sum)",
        "R S(1) -> S(1)",
        "P(sum) R -> P(sum)",
        "R P(sum) -> P(sum)",
    ]


def test_registration_and_removal_of_a_rule_change_the_valid_strategies() -> None:
    args = torch.ones(4, 6), torch.ones(6, 8)
    call, _ = call_on(torch.ops.tests_registration.scaled_mm.default, args, {}, scaled_mm(*args))
    columns = Strategy((Layout.parse("R"), Layout.parse("S(1)")), (Layout.parse("S(1)"),))
    register(scaled_mm, "m k, k n -> m n")
    assert is_strategy(call, columns, (2,))
    unregister(scaled_mm)
    register(scaled_mm, "m k, k _ -> m _")
    assert not is_strategy(call, columns, (2,))


def test_op_may_be_a_custom_op_a_packet_or_an_overload() -> None:
    for op in (
        scaled_mm,
        torch.ops.tests_registration.scaled_mm,
        torch.ops.tests_registration.scaled_mm.default,
    ):
        register(op, "m k, k n -> m n")
        unregister(op)
    with pytest.raises(RuleError, match="not a torch operator"):
        register(torch.relu, "... -> ...")


@pytest.mark.parametrize(
    ("rule", "linear", "what"),
    [
        ("m k, k n -> n m", (), "where|due"),
        ("m k, k n -> m n", [(0, 1)], "P, P -> P"),
        ("m k, _ n -> m n", (), "a rank cannot run the op"),
        ("m _, _ n -> m m", (), "is wrong|expected"),
    ],
)
def test_wrong_rule_is_refused_with_a_counterexample(
    rule: str, linear: list[tuple[int, ...]], what: str
) -> None:
    with pytest.raises(RuleError, match=what) as raised:
        register(scaled_mm, rule, linear=linear)
    assert (
        "on shapes [(" in str(raised.value)
        and "strategy" in str(raised.value)
        and "scaled_mm" in str(raised.value)
    )
    assert not REGISTERED


def test_mean_declared_as_a_sum_is_refused_with_the_values() -> None:
    with pytest.raises(RuleError, match=r"S\(0\) -> P is wrong on shapes .* at .* expected"):
        register(center, "n _ -> _")
    register(center, "_ _ -> _", linear=[(0,)])


def test_maximum_needs_reduce_op_max() -> None:
    with pytest.raises(RuleError, match="is wrong"):
        register(peak, "n d -> n")
    register(peak, "n d -> n", reduce_op="max")
    assert options_of(torch.ops.tests_registration.peak.default, torch.ones(4, 6)) == [
        "R -> R",
        "S(0) -> S(0)",
        "S(1) -> P(max)",
    ]


def test_examples_are_needed_if_operands_cannot_be_generated() -> None:
    with pytest.raises(RuleError, match="pass examples="):
        register(pick, "_ d, n -> n d")
    x, index = torch.zeros(6, 4), torch.tensor([0, 5, 3, 3])
    register(pick, "_ d, n -> n d", linear=[(0,)], examples=[(x, index)])
    with pytest.raises(
        RuleError, match="is wrong"
    ):  # even though an example of all zeros satisfies the rule
        register(pick, "v d, n -> n d", examples=[(x, index)])
    register(pick, "_ d, n -> n d", examples=[{"x": x, "index": index}])


def test_letter_not_covered_by_the_examples_is_refused() -> None:
    with pytest.raises(RuleError, match="letter 'd'"):
        register(pick, "_ d, n -> n d", examples=[(torch.ones(6, 1), torch.tensor([0, 1]))])


def test_refused_rule_does_not_replace_the_previous_rule() -> None:
    register(peak, "n _ -> n")
    with pytest.raises(RuleError):
        register(peak, "_ n -> n")
    assert options_of(torch.ops.tests_registration.peak.default, torch.ones(4, 6)) == [
        "R -> R",
        "S(0) -> S(0)",
    ]


def test_built_in_ops_and_in_place_ops_cannot_be_registered() -> None:
    with pytest.raises(RuleError, match="built-in rule"):
        register(aten.mm.default, "m k, k n -> m n")
    with pytest.raises(RuleError, match="modifies its operands"):
        register(fill, "... -> ")


def test_rule_that_does_not_match_the_op_is_refused() -> None:
    for rule in ("m k -> m", "m k, k n", "m k, k n -> m n, m", "b m k, k n -> m n"):
        with pytest.raises(RuleError):
            register(scaled_mm, rule)


@pytest.mark.parametrize("linear", [[0], 3, [()], [(0,), (5,)], [(-1,)], [("x",)], [(0.0,)]])
def test_invalid_linear_argument_is_refused(linear: Any) -> None:
    with pytest.raises(
        RuleError, match=r"not a list of sets of the 2 tensors of the rule"
    ) as raised:
        register(scaled_mm, "m k, k n -> m n", linear=linear)
    assert "linear=[(0,), (1,)]" in str(raised.value) and not REGISTERED


@pytest.mark.parametrize(("rule", "num"), [("m k -> m k", 1), ("m k, k n, n -> m n", 3)])
def test_error_for_a_wrong_number_of_terms_states_both_numbers(rule: str, num: int) -> None:
    with pytest.raises(
        RuleError, match=f"has {num} terms before the arrow, but the op takes 2 tensors"
    ):
        register(scaled_mm, rule)


def test_error_names_parameters_that_need_examples() -> None:
    with pytest.raises(RuleError, match="that are not tensors: shift, dim"):
        register(rolled, "m n -> m n")


def test_kind_must_agree_with_the_presence_of_flops() -> None:
    rule = "m k, k n -> m n"
    with pytest.raises(RuleError, match="kind='matmul' is not allowed without flops"):
        register(scaled_mm, rule, kind="matmul")
    with pytest.raises(RuleError, match="kind='reduction' is not allowed with flops"):
        register(scaled_mm, rule, flops=lambda x, w: 1, kind="reduction")
    assert not REGISTERED
    register(scaled_mm, rule, kind="reduction")


@pytest.mark.parametrize(
    ("flops", "what"),
    [
        (lambda x: 2 * x[0], "raises TypeError"),
        (lambda x, w: x[0] * w[2], "raises IndexError"),
        (lambda x, w: x[0] / 2, "returns "),
        (lambda x, w: -x[0], "returns -"),
        (lambda x, w: x[0] ** 2 * x[1] * w[1], "but only"),
    ],
)
def test_flops_function_without_a_valid_result_is_refused(
    flops: Callable[..., int], what: str
) -> None:
    with pytest.raises(RuleError, match=what):
        register(scaled_mm, "m k, k n -> m n", flops=flops)
    assert not REGISTERED


def test_register_is_public() -> None:
    assert autopar.rules.register is register
