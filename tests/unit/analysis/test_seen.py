"""Pairs hidden by a known mask are not counted. All pairs of other masks are counted."""

from __future__ import annotations

import pytest
import torch
from flex import flex_functions

from autopar import ops
from autopar.analysis.work import is_known, share_seen, work
from autopar.rules import TensorInfo


def mask_of(kind: str) -> str:
    return flex_functions(kind, 2, 2, 4, 4)[1]


@pytest.mark.parametrize(
    ("kind", "queries", "keys", "share"),
    [
        ("causal", 128, 128, 1.0),  # one block with a visible pair
        ("causal", 512, 512, 10 / 16),
        ("causal", 256, 512, 7 / 8),  # the last 256 queries of 512 keys
        (
            "causal",
            300,
            300,
            (128 * 128 + 128 * 256 + 44 * 300) / 300**2,
        ),  # the last row and column of blocks are partial
        ("sliding window", 512, 512, 10 / 16),  # the diagonal and one block on each side
        ("nothing", 512, 512, 1.0),
    ],
)
def test_known_mask_counts_blocks_with_a_visible_pair(
    kind: str, queries: int, keys: int, share: float
) -> None:
    assert is_known(mask_of(kind))
    assert share_seen(mask_of(kind), queries, keys) == pytest.approx(share)


@pytest.mark.parametrize("kind", ["documents", "samples that differ"])
def test_mask_that_reads_tensors_or_samples_counts_all_pairs(kind: str) -> None:
    assert not is_known(mask_of(kind)) and share_seen(mask_of(kind), 512, 512) == 1.0


def test_share_of_a_large_mask_is_estimated_from_sampled_rows() -> None:
    assert share_seen(mask_of("causal"), 1 << 14, 1 << 14) == pytest.approx(0.5, abs=0.02)


def test_attention_backward_counts_seven_halves_of_the_flops_of_forward() -> None:
    q, lse = TensorInfo((2, 4, 512, 8), torch.float32), TensorInfo((2, 4, 512), torch.float32)
    k = TensorInfo((2, 2, 512, 8), torch.float32)
    texts = ('{"does":[],"gives":{"c":"score"}}', mask_of("causal"))
    settings = (*texts, 0.5, (0, 0, 0), (), ())
    forward = work(ops.flex_attention, (0, 1, 2, (), *settings), {}, [q, k, k], [q, lse])
    backward = work(
        ops.flex_attention_backward,
        (0, 1, 2, 3, 4, 5, None, (), (), *settings),
        {},
        [q, k, k, q, lse, q],
        [q, k, k],
    )
    assert forward.flops == 2 * 2 * 4 * 512 * 512 * (8 + 8) * 10 // 16
    assert (backward.flops, backward.kind, forward.kind) == (
        7 * forward.flops // 2,
        "attention_backward",
        "attention",
    )
