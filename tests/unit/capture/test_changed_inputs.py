"""Inputs that forward changes in place are refused with their name, the line of the write and a
remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError


class Net(nn.Module):
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(4, 4), forward
        self.block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, x: Tensor, labels: Any) -> Tensor:
        return self.does(self, x, labels)


def _masked(net: Any, x: Tensor, labels: Any) -> Tensor:
    labels.masked_fill_(labels == 3, -100)
    return F.cross_entropy(net.layer(x), labels)


def _part(net: Any, x: Tensor, labels: Any) -> Tensor:
    first = x[:, 0]
    first.mul_(2)
    return F.cross_entropy(net.layer(x), labels)


def _within(net: Any, x: Tensor, labels: Any) -> Tensor:
    return F.cross_entropy(net.block(x), labels)


def _nested(net: Any, x: Tensor, labels: Any) -> Tensor:
    labels["held"][labels["held"] == 3] = -100
    return F.cross_entropy(net.layer(x), labels["held"])


def _of_a_copy(net: Any, x: Tensor, labels: Any) -> Tensor:
    x, labels = x.clone(), labels.clone()
    labels.masked_fill_(labels == 3, -100)
    return F.cross_entropy(net.block(x), labels)


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4), torch.tensor([0, 3, 1, 2])


@pytest.mark.parametrize(
    ("forward", "name", "line", "module", "copy"),
    [
        (
            _masked,
            "labels",
            "labels.masked_fill_(labels == 3, -100)",
            "",
            "`labels = labels.clone()`",
        ),
        (_part, "x", "first.mul_(2)", "", "`x = x.clone()`"),
        (_within, "x", "net.block(x)", "block.0", "`x = x.clone()`"),
        (
            _nested,
            "labels.held",
            'labels["held"][labels["held"] == 3] = -100',
            "",
            "`x = x.clone()`",
        ),
    ],
)
def test_an_input_that_forward_changes_is_refused_by_name(
    forward: Callable[..., Tensor], name: str, line: str, module: str, copy: str
) -> None:
    x, labels = _batch()
    with pytest.raises(CaptureError, match=f"changes its input '{name}' in place") as refused:
        capture(Net(forward), (x, {"held": labels} if "." in name else labels))
    where: Any = refused.value.where
    assert line in where.source and where.module == module
    assert copy in refused.value.remedy
    assert labels.tolist() == [0, 3, 1, 2]


def test_a_copy_of_the_input_is_captured() -> None:
    x, labels = _batch()
    model = Net(_of_a_copy).double()
    report = autopar.verify(
        autopar.plan(model, autopar.Mesh({"a": 2}), example_inputs=(x.double(), labels)),
        model,
        (x.double(), labels),
    )
    assert report.ok, report


@pytest.mark.parametrize(("method", "args"), [("t_", ()), ("unsqueeze_", (0,))])
def test_an_input_that_forward_reshapes_in_place_is_refused_by_name(
    method: str, args: tuple[int, ...]
) -> None:
    def reshaped(net: Any, x: Tensor, labels: Any) -> Tensor:
        getattr(x, method)(*args)
        return net.layer(x).sum()  # type: ignore[no-any-return]

    with pytest.raises(
        CaptureError, match=f"changes the shape of its input 'x' in place \\(x.{method}\\(\\)\\)"
    ) as refused:
        capture(Net(reshaped), _batch())
    assert f"x = x.{method[:-1]}(...)" in refused.value.remedy and "test_changed_inputs.py" in str(
        refused.value
    )
