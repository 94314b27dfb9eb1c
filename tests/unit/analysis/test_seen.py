"""Pairs that a mask hides are not counted, where the mask is known; of any other all are."""

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
        ("causal", 128, 128, 1.0),  # one block, of which some pair is seen
        ("causal", 512, 512, 10 / 16),
        ("causal", 256, 512, 7 / 8),  # a part of the queries: the second sees most
        (
            "causal",
            300,
            300,
            (128 * 128 + 128 * 256 + 44 * 300) / 300**2,
        ),  # the last row and column of blocks are cut off
        ("sliding window", 512, 512, 10 / 16),  # the diagonal, and a block on each side
        ("nothing", 512, 512, 1.0),
    ],
)
def test_a_known_mask_counts_the_blocks_of_which_a_pair_is_seen(
    kind: str, queries: int, keys: int, share: float
) -> None:
    assert is_known(mask_of(kind))
    assert share_seen(mask_of(kind), queries, keys) == pytest.approx(share)


@pytest.mark.parametrize("kind", ["documents", "samples that differ"])
def test_a_mask_that_reads_tensors_or_samples_is_not_known_and_all_pairs_count(kind: str) -> None:
    assert not is_known(mask_of(kind)) and share_seen(mask_of(kind), 512, 512) == 1.0


def test_of_many_pairs_evenly_spaced_rows_are_looked_at() -> None:
    assert share_seen(mask_of("causal"), 1 << 14, 1 << 14) == pytest.approx(0.5, abs=0.02)


def test_backward_counts_forward_again_and_five_products_for_two() -> None:
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
