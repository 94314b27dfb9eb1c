"""The batch of a ``--module`` may be a dict, a tuple, a list or a tensor. Arguments that cannot be
passed by name are refused with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from benchmarks.models import ModelSpec, by_name
from benchmarks.parity import row

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, y):
        return (self.linear(x) - y).square().mean()

def build():
    return Net(), {batch}
"""
TWO = "torch.randn(8, 8), torch.randn(8, 8)"


class One(nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[0]


class Named(nn.Module):
    def forward(self, *, inputs: tuple[Tensor, ...]) -> Tensor:
        return One()(*inputs)  # type: ignore[no-any-return]


class Taking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("batch", [f"({TWO})", f"[{TWO}]", f"dict(zip('xy', ({TWO})))"])
def test_parity_of_a_module_with_a_tuple_list_or_dict_as_batch(tmp_path: Path, batch: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MODULE.replace("{batch}", batch))
    spec = ModelSpec("mine", module=f"{file}:build")
    model, data = spec.build(dtype=torch.float64)
    assert list(data) == ["x", "y"] and data["x"].dtype == torch.float64
    assert model(**data).dtype == torch.float64
    (result,) = row(spec.to_json(), "2", ["planner"], "lockstep", ["float64"], 8, 8, "h100-sxm")
    assert result["max_rel_err"] < 1e-9


def test_tensor_batch_is_the_only_argument() -> None:
    assert list(by_name(Taking(), torch.zeros(2))) == ["x"]


def test_batch_that_does_not_match_forward_is_refused_and_the_remedy_works() -> None:
    with pytest.raises(AutoparError, match="does not take the module's batch") as refusal:
        by_name(Taking(), (torch.zeros(2), torch.zeros(2)))
    assert "a dict of forward's arguments" in refusal.value.remedy
    assert by_name(Taking(), {"x": torch.zeros(2)})["x"].shape == (2,)


def test_positional_arguments_are_refused_and_the_remedy_works() -> None:
    with pytest.raises(AutoparError, match="does not take 'inputs' by name") as refusal:
        by_name(One(), (torch.zeros(2),))
    assert "names its arguments" in refusal.value.remedy
    assert Named()(**by_name(Named(), {"inputs": (torch.zeros(2),)})).shape == (2,)
