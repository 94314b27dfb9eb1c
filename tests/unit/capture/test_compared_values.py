"""Branches on `torch.equal`, `allclose` and `is_nonzero` of buffers and constants are resolved by
their values; those on data are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
Test = Callable[[Any, Tensor], bool]


class Net(nn.Module):
    """A model that computes differently depending on the result of a test."""

    def __init__(self, test: Test) -> None:
        super().__init__()
        self.layer, self.test = nn.Linear(4, 4), test
        self.flag, self.table = nn.Buffer(torch.tensor(1.0)), nn.Buffer(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return hidden.mean() if self.test(self, hidden) else hidden.square().sum()


TESTS: dict[str, Test] = {
    "is_nonzero": lambda net, _: torch.is_nonzero(net.flag),
    "method is_nonzero": lambda net, _: net.flag.is_nonzero(),
    "equal": lambda net, _: torch.equal(net.table, torch.eye(4)),
    "method equal": lambda net, _: net.table.equal(torch.eye(4)),
    "not equal": lambda net, _: not torch.equal(net.table, net.table * 2),
    "other shape": lambda net, _: torch.equal(net.table, torch.eye(3)),
    "allclose": lambda net, _: torch.allclose(net.table, torch.eye(4)),
    "rtol": lambda net, _: torch.allclose(net.table, torch.eye(4) * 1.001, rtol=1e-2),
    "beyond rtol": lambda net, _: net.table.allclose(torch.eye(4) * 1.001, 1e-5, atol=0.0),
    "constants": lambda _net, _: torch.equal(torch.ones(3), torch.zeros(3)),
}


@pytest.mark.parametrize("name", TESTS)
@pytest.mark.parametrize("other", [False, True])  # one case per branch
def test_branches_on_comparisons_of_buffers_are_resolved(name: str, other: bool) -> None:
    plain = Net(TESTS[name])
    if other:
        plain.flag.zero_()
        plain.table.zero_()
    module: Any = autopar.compile(copy.deepcopy(plain), example_inputs=(X,), hardware="cpu-gloo")
    torch.testing.assert_close(module(X), plain(X))


@pytest.mark.parametrize(
    "test",
    [
        lambda _, hidden: torch.is_nonzero(hidden.sum()),
        lambda net, hidden: torch.equal(hidden[:4], net.table),
        lambda net, hidden: hidden[:4].allclose(net.table),
    ],
)
def test_branches_on_comparisons_of_data_are_refused(test: Test) -> None:
    with pytest.raises(CaptureError, match=r"a branch depends on the values[\s\S]*torch\.where"):
        capture(Net(test), (X,))
