"""Unsupported modules are refused only if forward calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError


class Net(nn.Module):
    """A model that calls `inner` if `calls` is set."""

    def __init__(self, inner: nn.Module, calls: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList([inner])
        self.layer, self.calls = nn.Linear(4, 4), calls

    def forward(self, x: Tensor) -> Tensor:
        if self.calls:
            x = self.parts[0](x)
        return self.layer(x.float()).square().mean()


PARTS: list[tuple[nn.Module, Tensor, str]] = [
    (nn.Embedding(10, 4, max_norm=1.0), torch.tensor([1, 1, 2, 3]), "max_norm=1.0 of Embedding"),
    (nn.BatchNorm1d(4, momentum=None), torch.randn(4, 4), "momentum=None of BatchNorm1d"),
    (nn.Embedding(10, 4, sparse=True), torch.tensor([1, 1, 2, 3]), "sparse=True"),
    (
        nn.EmbeddingBag(10, 4, sparse=True, mode="sum"),
        torch.ones(4, 2, dtype=torch.int64),
        "sparse=True",
    ),
]


@pytest.mark.parametrize(
    ("inner", "batch", "complaint"), PARTS, ids=["max_norm", "momentum", "sparse", "sparse bag"]
)
@pytest.mark.parametrize("calls", [True, False])
def test_an_unsupported_module_is_refused_only_if_forward_calls_it(
    inner: nn.Module, batch: Tensor, complaint: str, calls: bool
) -> None:
    model = Net(inner, calls)
    if not calls:
        batch = torch.zeros(4, 4)
        assert capture(model, (batch,)).graph.nodes
        return
    with pytest.raises(CaptureError, match=complaint) as refused:
        capture(model, (batch,))
    where: Any = refused.value.where
    assert where.module == "parts.0" and refused.value.remedy


def test_an_embedding_with_sparse_gradients_is_captured_in_inference() -> None:
    assert capture(
        Net(nn.Embedding(10, 4, sparse=True), True), (torch.arange(4),), inference=True
    ).graph.nodes
