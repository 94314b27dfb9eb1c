"""The work of an op, from its local shapes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar import ops
from autopar.analysis.work import NO_WORK, Work, computes_in, work

aten = torch.ops.aten


@dataclass(frozen=True)
class Info:
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


def infos(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Info]:
    return [Info(shape, dtype) for shape in shapes]


CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 2)
TRANSPOSED = ([2, 2], [1, 1], [1, 1], True, [0, 0], 1)
COUNTED: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.mm.default, (torch.ones(3, 5), torch.ones(5, 7))),
    (aten.bmm.default, (torch.ones(2, 3, 5), torch.ones(2, 5, 7))),
    (aten.addmm.default, (torch.ones(7), torch.ones(3, 5), torch.ones(5, 7))),
    (aten.baddbmm.default, (torch.ones(2, 3, 7), torch.ones(2, 3, 5), torch.ones(2, 5, 7))),
    (
        aten.convolution.default,
        (torch.ones(2, 4, 8, 8), torch.ones(6, 2, 3, 3), None, *CONVOLUTION),
    ),
    (aten.convolution.default, (torch.ones(2, 4, 8, 8), torch.ones(4, 6, 3, 3), None, *TRANSPOSED)),
]


@pytest.mark.parametrize(("target", "args"), COUNTED, ids=[str(target) for target, _ in COUNTED])
def test_flops_are_those_of_torch_s_own_counter(target: Any, args: tuple[Any, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        result = target(*args)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    found = work(target, args, {}, tensors, [result])
    assert found.flops == counter.get_total_flops()
    assert found.bytes == 4 * sum(t.numel() for t in (*tensors, result))
    assert found.kind == "matmul"


@pytest.mark.parametrize("mask", [(True, True, False), (True, False, False), (False, True, False)])
def test_a_convolution_s_backward_counts_the_gradients_that_are_made(
    mask: tuple[bool, bool, bool],
) -> None:
    x, weight = torch.ones(2, 4, 8, 8), torch.ones(6, 4, 3, 3)
    args = (torch.ones(2, 6, 8, 8), x, weight, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
    outputs = [
        Info(tuple(g.shape)) if g is not None else Info((0,))
        for g in aten.convolution_backward.default(*args)
    ]
    once = 2 * 2 * 6 * 8 * 8 * 4 * 3 * 3
    assert work(
        aten.convolution_backward.default, args, {}, [args[0], x, weight], outputs
    ).flops == once * sum(mask)


def test_a_dot_counts_every_letter_once() -> None:
    found = work(
        ops.dot, ("bsd,ehd->bseh",), {}, infos((2, 3, 5), (7, 11, 5)), infos((2, 3, 7, 11))
    )
    assert found.flops == 2 * 2 * 3 * 5 * 7 * 11


def test_the_bias_of_a_dot_is_read_in_the_same_pass_and_begins_its_sums() -> None:
    factors, made = (
        infos((2, 3, 5), (7, 5), dtype=torch.bfloat16),
        infos((2, 3, 7), dtype=torch.bfloat16),
    )
    apart = work(ops.dot, ("bsd,nd->bsn",), {}, factors, made)
    found = work(ops.dot, ("bsd,nd->bsn",), {}, [*factors, Info((7,), torch.bfloat16)], made)
    assert found == Work(apart.flops, apart.bytes + 2 * 7, "matmul")


def test_attention_counts_both_products_and_causal_half_of_the_square() -> None:
    q, k, v, out, lse = infos(
        (2, 8, 16, 4), (2, 2, 32, 4), (2, 2, 32, 6), (2, 8, 16, 6), (2, 8, 16)
    )
    full = work(ops.attention, (0, 1, 2, None, False, 0.5), {}, [q, k, v], [out, lse])
    assert full == Work(
        2 * 2 * 8 * 16 * 32 * (4 + 6),
        sum(4 * torch.Size(i.shape).numel() for i in (q, k, v, out, lse)),
        "attention",
    )
    causal = work(
        ops.attention, (0, 1, 2, None), {"is_causal": True, "scale": 0.5}, [q, k, v], [out, lse]
    )
    assert (
        causal.flops == full.flops * 3 // 4
    )  # the last 16 of 32 queries see all keys but half of their own square
    square = infos((2, 8, 32, 4), (2, 2, 32, 4), (2, 2, 32, 6), (2, 8, 32, 6), (2, 8, 32))
    halves = [
        work(ops.attention, (0, 1, 2, None, seen, 0.5), {}, square[:3], square[3:]).flops
        for seen in (False, True)
    ]
    assert halves[1] == halves[0] // 2


def test_attention_s_backward_counts_five_products_for_two() -> None:
    q, k, v, out, lse = infos(
        (2, 8, 16, 4), (2, 8, 16, 4), (2, 8, 16, 4), (2, 8, 16, 4), (2, 8, 16)
    )
    forward = work(ops.attention, (0, 1, 2, None, True, 0.5), {}, [q, k, v], [out, lse])
    args = (0, 1, 2, 3, 4, 5, None, True, 0.5)
    backward = work(ops.attention_backward, args, {}, [out, q, k, v, out, lse], [q, k, v])
    assert (backward.flops, backward.kind) == (5 * forward.flops // 2, "attention_backward")


def test_statistics_in_float32_do_not_make_attention_compute_in_it() -> None:
    q, k, v = infos((2, 8, 16, 4), (2, 8, 16, 4), (2, 8, 16, 4), dtype=torch.bfloat16)
    lse = Info((2, 8, 16))
    assert computes_in([q, k, v, q, lse]) == torch.bfloat16
    assert computes_in([Info((4, 4)), q]) == torch.float32
    assert computes_in([Info((4,), torch.int64), q]) == torch.bfloat16
    assert computes_in([]) == torch.float32


@pytest.mark.parametrize(
    "target",
    [
        aten.view.default,
        aten.transpose.int,
        aten.expand.default,
        aten.slice.Tensor,
        aten.reshape.default,
    ],
)
def test_views_are_no_work(target: Any) -> None:
    assert work(target, (), {}, infos((4, 4)), infos((4, 4))) == NO_WORK


def test_taking_one_of_several_results_is_no_work() -> None:
    assert work(operator.getitem, (), {}, infos((4, 4)), infos((4, 4))) == NO_WORK


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (aten.add.Tensor, "elementwise"),
        (aten.clone.default, "elementwise"),
        (aten.gelu.default, "transcendental"),
        (aten._softmax.default, "transcendental"),
        (ops.sum_exp, "transcendental"),
        (aten.sum.dim_IntList, "reduction"),
        (aten.native_layer_norm.default, "reduction"),
        (ops.embedding_backward, "indexing"),
    ],
)
def test_other_ops_move_their_operands_and_results_once(target: Any, kind: str) -> None:
    assert work(target, (), {}, infos((8,), (8,), dtype=torch.bfloat16), infos((8,))) == Work(
        0, 2 * 16 + 32, kind
    )


def test_an_embedding_reads_only_the_rows_asked_for() -> None:
    table, ids, rows = Info((50000, 64)), Info((10,), torch.int64), Info((10, 64))
    assert work(ops.embedding, (), {}, [table, ids], [rows]) == Work(
        0, 2 * 10 * 64 * 4 + 10 * 8, "indexing"
    )
