"""Factor notation: parsing a rule into the options of one mesh axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar import ops
from autopar.errors import RuleError
from autopar.rules import axis_options, call_on, is_fallback
from autopar.rules.notation import exact_cast, options, parse

aten = torch.ops.aten


def call(target: Any, *args: Any, **kwargs: Any) -> Any:
    return call_on(target, args, kwargs, target(*args, **kwargs))[0]


def options_of(target: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Options as text: ``"S(0) R -> S(0)"``."""
    op_call = call(target, *args, **kwargs)
    return [
        " ".join(map(short, o.inputs)) + " -> " + " ".join(map(short, o.outputs))
        for o in axis_options(op_call)
    ]


def short(placement: Any) -> str:
    return (
        f"S{placement.dim}"
        if placement.is_shard()
        else "R"
        if placement.is_replicate()
        else f"P{placement.reduce_op}"
    )


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def test_options_of_a_linear_layer() -> None:
    assert options_of(ops.dot, "bsk,nk->bsn", t(2, 4, 6), t(8, 6)) == [
        "R R -> R",
        "S0 R -> S0",
        "S1 R -> S1",
        "S2 S1 -> Psum",
        "R S0 -> S2",
        "Psum R -> Psum",
        "R Psum -> Psum",
    ]


def test_broadcast_dim_of_size_one_is_not_sharded() -> None:
    assert options_of(aten.maximum.default, t(4, 1), t(1, 6)) == [
        "R R -> R",
        "S0 R -> S0",
        "R S1 -> S1",
    ]


def test_sum_is_partial_only_if_both_operands_are_partial() -> None:
    assert [o for o in options_of(aten.add.Tensor, t(4), t(4)) if "P" in o] == ["Psum Psum -> Psum"]
    assert [o for o in options_of(aten.add.Tensor, t(4), 2.0) if "P" in o] == []
    assert [o for o in options_of(aten.mul.Tensor, t(4), t(4)) if "P" in o] == [
        "Psum R -> Psum",
        "R Psum -> Psum",
    ]


def test_maximum_over_a_sharded_dim_is_a_partial_maximum() -> None:
    assert options_of(aten.amax.default, t(4, 6), [1]) == ["R -> R", "S0 -> S0", "S1 -> Pmax"]


def test_partial_sum_is_cast_only_to_a_dtype_that_represents_it_exactly() -> None:
    kinds = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]
    wider = {(a, b) for a in kinds for b in kinds if exact_cast(a, b)}
    assert wider == {(k, k) for k in kinds[:5]} | {
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.float16, torch.float32),
        (torch.float16, torch.float64),
        (torch.float32, torch.float64),
    }


def test_booleans_are_never_partial_sums() -> None:
    assert not any(
        "P" in o
        for o in options_of(aten.bitwise_and.Tensor, t(4, dtype=torch.bool), t(4, dtype=torch.bool))
    )
    assert not any("P" in o for o in options_of(aten.clone.default, t(4, dtype=torch.bool)))


def test_results_may_be_replicated_over_a_letter_that_they_do_not_contain() -> None:
    op_call = call(aten.native_layer_norm.default, t(4, 6), [6], None, None, 1e-5)
    parsed = options(parse("n c -> n c, n _ =c, n _", op_call), op_call)
    assert [[short(p) for p in o.outputs] for o in parsed] == [
        ["R", "R", "R"],
        ["S0", "S0", "S0"],
        ["S1", "R", "Psum"],
    ]


@pytest.mark.parametrize("text", ["m k, k n", "m -> m", "m k, k n, x -> m n", "m k, k n -> m n, m"])
def test_notation_that_does_not_match_the_op_is_refused(text: str) -> None:
    mm = call(aten.mm.default, t(2, 3), t(3, 4))
    with pytest.raises(RuleError):
        parse(text, mm)


def test_op_without_a_rule_is_a_replicated_fallback() -> None:
    svd = call(aten._linalg_svd.default, t(4, 4))
    assert is_fallback(svd) and len(axis_options(svd)) == 1
    random = call(
        aten.rand_like.default, t(4, 4)
    )  # pointwise, but each rank would draw different numbers
    assert is_fallback(random)
    assert not is_fallback(call(aten.erf.default, t(4, 4)))


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((4, 6), (24,), ["S0 -> S0"]),
        ((24,), (4, 6), ["S0 -> S0"]),
        ((2, 3, 8), (2, 3, 4, 2), ["S0 -> S0", "S1 -> S1", "S2 -> S2"]),
        ((2, 12, 5), (2, 1, 3, 4, 5), ["S0 -> S0", "S1 -> S2", "S2 -> S4"]),
        ((2, 3, 4), (6, 4), ["S0 -> S0", "S2 -> S1"]),
        ((4, 6), (3, 8), ["S0 -> S0"]),
        ((1, 6), (6,), ["S1 -> S0"]),
        ((0, 6), (6, 0), []),
    ],
)
def test_view_shards_the_leading_dim_of_each_group(
    source: tuple[int, ...], target: tuple[int, ...], expected: list[str]
) -> None:
    assert options_of(aten.view.default, t(*source), target) == [
        "R -> R",
        *expected,
        "Psum -> Psum",
    ]


def test_options_of_embedding_and_its_gradient() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    assert options_of(ops.embedding, t(8, 6), ids) == [
        "R R -> R",
        "S0 R -> Psum",
        "S1 R -> S2",
        "R S0 -> S0",
        "R S1 -> S1",
        "Psum R -> Psum",
    ]
    assert options_of(ops.embedding_backward, t(2, 4, 6), ids, 8) == [
        "R R -> R",
        "S0 S0 -> Psum",
        "S1 S1 -> Psum",
        "S2 R -> S1",
        "R R -> S0",
        "Psum R -> Psum",
    ]


@pytest.mark.parametrize("causal", [True, False])
def test_options_of_attention(
    causal: bool,
) -> None:
    q, k = t(2, 4, 8, 16), t(2, 2, 8, 16)
    options = ["R R R -> R R", "S0 S0 S0 -> S0 S0", "S1 S1 S1 -> S1 S1", "S2 R R -> S2 S2"]
    mirrored = ["S2 R R -> S2 S2"] if causal else []
    assert options_of(ops.attention, q, q, q, None, causal, 0.25) == [*options, *mirrored]
    assert options_of(ops.attention, q, k, k, None, causal, 0.25) == [
        *options,
        "S1 R R -> S1 S1",
        *mirrored,
    ]
