"""Tensor digests that ranks compare: they depend on shape, dtype and values in logical order."""

from __future__ import annotations

import torch

from autopar.runtime.rank_consistency import _digest


def test_digests_of_equal_bytes_differ_if_shape_or_dtype_differs() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert _digest(x) == _digest(x.clone()) == _digest(x.T.contiguous().T)
    others = [x.reshape(3, 2), x.flip(0), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int32)]
    found = [_digest(other) for other in (x, *others)]
    assert len(set(found)) == len(found)
    assert _digest(torch.empty(2, 3, device="meta")) is None


def test_digests_do_not_depend_on_strides() -> None:
    table = torch.arange(12.0).reshape(4, 3)
    column, number = table[:, 1], torch.tensor(2.5).expand(4)
    assert _digest(column) == _digest(column.contiguous()) != _digest(table[:, 2])
    assert _digest(number) == _digest(torch.full((4,), 2.5))
    assert _digest(table.t()) == _digest(table.t().contiguous())
