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
def test_flops_match_the_counter_of_torch(target: Any, args: tuple[Any, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        result = target(*args)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    result_work = work(target, args, {}, tensors, [result])
    assert result_work.flops == counter.get_total_flops()
    assert result_work.bytes == 4 * sum(t.numel() for t in (*tensors, result))
    assert result_work.kind == "matmul"


@pytest.mark.parametrize("mask", [(True, True, False), (True, False, False), (False, True, False)])
def test_convolution_backward_counts_only_requested_gradients(
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


def test_flops_of_a_dot_are_the_product_of_all_letters() -> None:
    result_work = work(
        ops.dot, ("bsd,ehd->bseh",), {}, infos((2, 3, 5), (7, 11, 5)), infos((2, 3, 7, 11))
    )
    assert result_work.flops == 2 * 2 * 3 * 5 * 7 * 11


def test_bias_of_a_dot_adds_only_the_bytes_of_reading_it() -> None:
    factors, outputs = (
        infos((2, 3, 5), (7, 5), dtype=torch.bfloat16),
        infos((2, 3, 7), dtype=torch.bfloat16),
    )
    without_bias = work(ops.dot, ("bsd,nd->bsn",), {}, factors, outputs)
    result_work = work(
        ops.dot, ("bsd,nd->bsn",), {}, [*factors, Info((7,), torch.bfloat16)], outputs
    )
    assert result_work == Work(without_bias.flops, without_bias.bytes + 2 * 7, "matmul")


def test_attention_counts_both_products_and_half_of_a_causal_square() -> None:
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
    )  # the last 16 of 32 queries: all keys except half of their own square
    square = infos((2, 8, 32, 4), (2, 2, 32, 4), (2, 2, 32, 6), (2, 8, 32, 6), (2, 8, 32))
    halves = [
        work(ops.attention, (0, 1, 2, None, is_causal, 0.5), {}, square[:3], square[3:]).flops
        for is_causal in (False, True)
    ]
    assert halves[1] == halves[0] // 2


def test_attention_backward_counts_five_halves_of_the_flops_of_forward() -> None:
    q, k, v, out, lse = infos(
        (2, 8, 16, 4), (2, 8, 16, 4), (2, 8, 16, 4), (2, 8, 16, 4), (2, 8, 16)
    )
    forward = work(ops.attention, (0, 1, 2, None, True, 0.5), {}, [q, k, v], [out, lse])
    args = (0, 1, 2, 3, 4, 5, None, True, 0.5)
    backward = work(ops.attention_backward, args, {}, [out, q, k, v, out, lse], [q, k, v])
    assert (backward.flops, backward.kind) == (5 * forward.flops // 2, "attention_backward")


def test_float32_statistics_do_not_change_the_compute_dtype_of_attention() -> None:
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
def test_views_have_no_work(target: Any) -> None:
    assert work(target, (), {}, infos((4, 4)), infos((4, 4))) == NO_WORK


def test_getitem_has_no_work() -> None:
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
def test_other_ops_read_operands_and_write_results_once(target: Any, kind: str) -> None:
    assert work(target, (), {}, infos((8,), (8,), dtype=torch.bfloat16), infos((8,))) == Work(
        0, 2 * 16 + 32, kind
    )


def test_embedding_reads_only_the_selected_rows() -> None:
    table, ids, rows = Info((50000, 64)), Info((10,), torch.int64), Info((10, 64))
    assert work(ops.embedding, (), {}, [table, ids], [rows]) == Work(
        0, 2 * 10 * 64 * 4 + 10 * 8, "indexing"
    )
