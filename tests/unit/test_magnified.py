"""Models that amplify the rounding of their float32 parts: the reference and the tolerance of their
verification."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.errors import VerificationError
from autopar.planner import PlanOptions, make_plan
from autopar.verification import verify_program

MESH, H100 = Mesh({"gpu": 2}), HardwareProfile.load("h100-sxm")


class Phases(nn.Module):
    """A model with sines of float32 numbers up to `largest`. Large numbers are inexact: 1e4 has an
    error of 5e-4."""

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.linear, self.largest, self.scale = nn.Linear(8, 8), largest, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = (torch.linspace(0.0, 1.0, 8, dtype=torch.float32) / 3 * self.largest).sin()
        return (self.linear(x) * waves).square().mean() * self.scale


def test_a_model_that_amplifies_float32_rounding_is_compared_in_its_own_dtype() -> None:
    torch.manual_seed(0)
    model, batch = Phases(4e4), (torch.randn(8, 8),)
    trace = capture(model, batch)
    found = verify_program(
        trace, make_plan(trace, MESH, H100, PlanOptions()).program, model, batch, {}
    )
    assert found.ok and found.dtype == "float32" and found.max_error < 1e-6
    assert "cannot be compared in float64: the ops in" in str(found)


def test_a_model_with_less_amplification_is_compared_with_its_parts_in_float64() -> None:
    torch.manual_seed(0)
    model, batch = Phases(400.0), (torch.randn(8, 8),)
    trace = capture(model, batch)
    program = make_plan(trace, MESH, H100, PlanOptions()).program
    found = verify_program(trace, program, model, batch, {})
    assert (
        found.ok and (found.dtype, found.tolerance) == ("float64", 1e-9) and found.max_error < 1e-12
    )
    assert found.lower_parts and found.apart is not None and 2e-6 < found.apart < 1e-4
    assert f"their rounding accounts for {found.apart:.2e}" in str(found)
    model.scale = 1 + 1e-5  # as large as the rounding, but different from the capture
    with pytest.raises(VerificationError, match="the plain model computes a different"):
        verify_program(trace, program, model, batch, {})


class ByCount(nn.Module):
    """A loss that is multiplied by a function of a number of positive values, which torch computes
    in its default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = torch.log((x > 0).sum() + 1.0)
        return self.linear(x).square().mean() * factor * self.scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_function_of_a_count_is_compared_in_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, batch = ByCount().to(dtype), (torch.randn(8, 8, dtype=dtype),)
    trace = capture(model, batch)
    program = make_plan(trace, MESH, H100, PlanOptions()).program
    found = verify_program(trace, program, model, batch, {})
    assert (
        found.ok and (found.dtype, found.tolerance) == ("float64", 1e-9) and found.max_error < 1e-13
    )
    assert found.apart is not None and 1e-9 < found.apart < 1e-6
    model.scale = 1 + 1e-5  # different from the capture
    with pytest.raises(VerificationError, match="the plain model computes a different"):
        verify_program(trace, program, model, batch, {})


def test_an_equally_large_difference_in_the_own_dtype_is_not_taken_for_rounding() -> None:
    torch.manual_seed(0)
    model, batch = Phases(1.0), (torch.randn(8, 8),)
    trace = capture(model, batch)
    program = make_plan(trace, MESH, H100, PlanOptions()).program
    model.scale = 1.00009  # within the tolerance of float32, but different from the capture
    with pytest.raises(VerificationError, match="the plain model computes a different"):
        verify_program(trace, program, model, batch, {})
