"""How many pairs of query and key an attention with a mask function computes.

A mask that reads neither a captured tensor nor the sample or head is *known*: it is evaluated on
all pairs, and a pair counts where its block of 128 by 128 has one that is seen, as kernels skip
whole blocks. Of any other mask every pair counts.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from autopar.ops.elementwise import module_of, over_all
from autopar.ops.reading import captures, reading

_BLOCK = 128
_MOST = 1 << 26  # pairs that are looked at: of more, the rows of evenly spaced blocks


def is_known(mask: str) -> bool:
    """Whether what a mask function hides follows from places alone."""
    return not captures(mask) and not reading((mask,), ()).free & {"b", "h"}


@lru_cache(maxsize=1024)
def share_seen(mask: str, num_queries: int, num_keys: int) -> float:
    """The part of all pairs that counts.

    Where queries are a part, of as many as there are keys, it is that of the part which sees most,
    for which the others wait.
    """
    if not is_known(mask) or not num_queries or not num_keys:
        return 1.0
    parts = num_keys // num_queries if num_keys % num_queries == 0 else 1
    return max(_share(mask, part * num_queries, num_queries, num_keys) for part in range(parts))


def _share(mask: str, start: int, num_queries: int, num_keys: int) -> float:
    """Of the queries from `start`."""
    starts = range(start, start + num_queries, _BLOCK)
    step = -(-num_queries * num_keys // _MOST)
    seen = looked_at = 0
    step = min(step, len(starts))
    for first in starts[step // 2 :: step]:
        rows = min(_BLOCK, start + num_queries - first)
        seen += _pairs(mask, first, rows, num_keys)
        looked_at += rows * num_keys
    return seen / looked_at


def _pairs(mask: str, first: int, rows: int, num_keys: int) -> int:
    names = ("q", "k", "b", "h")
    function = over_all(module_of(mask, names, 0), (2, 3, None, None), 0, dims=(2, 3))
    zero = torch.zeros((), dtype=torch.int32)
    queries, keys = (
        torch.arange(at, at + size, dtype=torch.int32)
        for at, size in ((first, rows), (0, num_keys))
    )
    columns = function(queries, keys, zero, zero).any(0)
    widths = torch.tensor(
        [_BLOCK] * (num_keys // _BLOCK) + [num_keys % _BLOCK] * (num_keys % _BLOCK > 0)
    )
    blocks = torch.stack([part.any() for part in columns.split(_BLOCK)])
    return rows * int((widths * blocks).sum())
