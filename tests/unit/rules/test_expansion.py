"""Expansion of one-axis options over several mesh axes."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar import ops
from autopar.core.layout import Layout
from autopar.rules import axis_options, call_on, strategies

aten = torch.ops.aten


def call(target: Any, *args: Any) -> Any:
    return call_on(target, args, {}, target(*args))[0]


def strategies_of(op_call: Any, mesh_shape: tuple[int, ...]) -> list[str]:
    return [str(s) for s in strategies(op_call, mesh_shape)]


def test_two_axes_combine_all_options_and_shard_one_dim_in_both_orders() -> None:
    assert strategies_of(call(aten.erf.default, torch.ones(8)), (2, 4)) == [
        "R R -> R R",
        "R S(0) -> R S(0)",
        "S(0) R -> S(0) R",
        "S(0) S(0) -> S(0) S(0)",
        "S(0)#1 S(0)#0 -> S(0)#1 S(0)#0",
    ]


def test_operands_with_a_shared_factor_are_sharded_in_the_same_order() -> None:
    texts = strategies_of(call(aten.mm.default, torch.ones(4, 4), torch.ones(4, 4)), (2, 2))
    assert "S(1)#1 S(1)#0, S(0)#1 S(0)#0 -> P P" in texts
    assert not any("S(1)#1 S(1)#0, S(0) S(0)" in s for s in texts)


def test_axis_of_size_one_only_replicates() -> None:
    assert strategies_of(call(aten.erf.default, torch.ones(8)), (1, 2)) == [
        "R R -> R R",
        "R S(0) -> R S(0)",
    ]


def test_view_is_sharded_only_if_the_axis_divides_both_shapes() -> None:
    op_call = call(aten.view.default, torch.ones(12), (2, 6))
    assert strategies_of(op_call, (2,)) == ["R -> R", "S(0) -> S(0)", "P -> P"]
    assert strategies_of(op_call, (3,)) == ["R -> R", "P -> P"]


def test_three_axes_shard_one_dim_in_six_orders() -> None:
    op_call = call(aten.erf.default, torch.ones(8))
    full = [s for s in strategies(op_call, (2, 2, 2)) if s.inputs[0].num_shards(0, (2, 2, 2)) == 8]
    assert sorted(s.inputs[0].order for s in full) == sorted(itertools.permutations(range(3)))


MESHES = [(2,), (4,), (2, 2), (2, 3), (1, 2), (2, 2, 2)]


@given(
    sizes=st.tuples(*[st.sampled_from([1, 2, 3, 4, 5, 6])] * 3), mesh_shape=st.sampled_from(MESHES)
)
def test_strategies_are_the_distinct_combinations_that_fit_the_shapes(
    sizes: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> None:
    a, b, c = sizes
    op_call = call(ops.dot, "ak,bk->ab", torch.ones(a, c), torch.ones(b, c))
    expanded = strategies(op_call, mesh_shape)
    assert len(set(expanded)) == len(expanded) and expanded[0].outputs[0].is_replicated
    expected = set()
    choices = [axis_options(op_call) if n > 1 else axis_options(op_call)[:1] for n in mesh_shape]
    for combination in itertools.product(*choices):
        for order in itertools.permutations(range(len(mesh_shape))):
            layouts = [
                Layout([(*o.inputs, *o.outputs)[i] for o in combination], order) for i in range(3)
            ]
            if all(
                x.fits(i.shape, mesh_shape)
                for x, i in zip(layouts, (*op_call.inputs, *op_call.outputs), strict=True)
            ):
                expected.add(tuple(layouts))
    assert {(*s.inputs, *s.outputs) for s in expanded} == expected
