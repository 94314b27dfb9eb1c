"""Factor notation: from a text to the options of one mesh axis."""

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


def shown(target: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Options as text: ``"S(0) R -> S(0)"``."""
    made = call(target, *args, **kwargs)
    return [
        " ".join(map(short, o.inputs)) + " -> " + " ".join(map(short, o.outputs))
        for o in axis_options(made)
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


def test_a_linear_layer_splits_batch_sequence_and_outputs_and_leaves_a_partial_sum_over_inputs() -> (  # noqa: E501
    None
):
    assert shown(ops.dot, "bsk,nk->bsn", t(2, 4, 6), t(8, 6)) == [
        "R R -> R",
        "S0 R -> S0",
        "S1 R -> S1",
        "S2 S1 -> Psum",
        "R S0 -> S2",
        "Psum R -> Psum",
        "R Psum -> Psum",
    ]


def test_a_dim_of_size_one_is_broadcast_not_split() -> None:
    assert shown(aten.maximum.default, t(4, 1), t(1, 6)) == ["R R -> R", "S0 R -> S0", "R S1 -> S1"]


def test_a_sum_of_partial_sums_is_one_but_only_of_both() -> None:
    assert [o for o in shown(aten.add.Tensor, t(4), t(4)) if "P" in o] == ["Psum Psum -> Psum"]
    assert [o for o in shown(aten.add.Tensor, t(4), 2.0) if "P" in o] == []
    assert [o for o in shown(aten.mul.Tensor, t(4), t(4)) if "P" in o] == [
        "Psum R -> Psum",
        "R Psum -> Psum",
    ]


def test_a_maximum_is_partial_as_a_maximum() -> None:
    assert shown(aten.amax.default, t(4, 6), [1]) == ["R -> R", "S0 -> S0", "S1 -> Pmax"]


def test_a_partial_sum_is_cast_only_to_an_equal_or_wider_float() -> None:
    kinds = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]
    wider = {(a, b) for a in kinds for b in kinds if exact_cast(a, b)}
    assert wider == {(k, k) for k in kinds[:5]} | {
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.float16, torch.float32),
        (torch.float16, torch.float64),
        (torch.float32, torch.float64),
    }


def test_a_boolean_is_never_a_partial_sum() -> None:
    assert not any(
        "P" in o
        for o in shown(aten.bitwise_and.Tensor, t(4, dtype=torch.bool), t(4, dtype=torch.bool))
    )
    assert not any("P" in o for o in shown(aten.clone.default, t(4, dtype=torch.bool)))


def test_a_result_may_be_whole_on_every_rank_of_a_letter_it_lacks() -> None:
    three = call(aten.native_layer_norm.default, t(4, 6), [6], None, None, 1e-5)
    found = options(parse("n c -> n c, n _ =c, n _", three), three)
    assert [[short(p) for p in o.outputs] for o in found] == [
        ["R", "R", "R"],
        ["S0", "S0", "S0"],
        ["S1", "R", "Psum"],
    ]


@pytest.mark.parametrize("text", ["m k, k n", "m -> m", "m k, k n, x -> m n", "m k, k n -> m n, m"])
def test_a_text_that_does_not_fit_the_op_is_an_error(text: str) -> None:
    mm = call(aten.mm.default, t(2, 3), t(3, 4))
    with pytest.raises(RuleError):
        parse(text, mm)


def test_an_op_without_a_rule_is_only_replicated_and_says_so() -> None:
    svd = call(aten._linalg_svd.default, t(4, 4))
    assert is_fallback(svd) and len(axis_options(svd)) == 1
    random = call(
        aten.rand_like.default, t(4, 4)
    )  # pointwise, but every rank would draw its own numbers
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
def test_a_view_keeps_the_leading_dim_of_each_group_split(
    source: tuple[int, ...], target: tuple[int, ...], expected: list[str]
) -> None:
    assert shown(aten.view.default, t(*source), target) == ["R -> R", *expected, "Psum -> Psum"]


def test_vocabulary_sharded_embedding_is_a_partial_sum_and_so_is_its_gradient_over_the_batch() -> (
    None
):
    ids = torch.zeros(2, 4, dtype=torch.int64)
    assert shown(ops.embedding, t(8, 6), ids) == [
        "R R -> R",
        "S0 R -> Psum",
        "S1 R -> S2",
        "R S0 -> S0",
        "R S1 -> S1",
        "Psum R -> Psum",
    ]
    assert shown(ops.embedding_backward, t(2, 4, 6), ids, 8) == [
        "R R -> R",
        "S0 S0 -> Psum",
        "S1 S1 -> Psum",
        "S2 R -> S1",
        "R R -> S0",
        "Psum R -> Psum",
    ]


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_split_by_batch_heads_and_queries_and_by_query_heads_alone_where_they_share_keys(  # noqa: E501
    causal: bool,
) -> None:
    q, k = t(2, 4, 8, 16), t(2, 2, 8, 16)
    options = ["R R R -> R R", "S0 S0 S0 -> S0 S0", "S1 S1 S1 -> S1 S1", "S2 R R -> S2 S2"]
    mirrored = ["S2 R R -> S2 S2"] if causal else []
    assert shown(ops.attention, q, q, q, None, causal, 0.25) == [*options, *mirrored]
    assert shown(ops.attention, q, k, k, None, causal, 0.25) == [
        *options,
        "S1 R R -> S1 S1",
        *mirrored,
    ]
