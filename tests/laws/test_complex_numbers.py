"""Complex parameters and activations, also conjugated or read by parts, are computed, counted and
clipped as in torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from measured import measured_peak
from torch import Tensor, nn

import autopar
from autopar.analysis.work import Work
from autopar.api.planning import plan_model
from autopar.constraints import Constraint, fsdp
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.cost.op_times import compute_time
from autopar.errors import VerificationError
from autopar.program.peak_memory import node_peaks, trace_peak
from autopar.program.splitting import join
from autopar.program.strided_views import as_view, view_of
from autopar.runtime.backward import clip_grad_norm_


class Waves(nn.Module):
    """A linear layer with complex weights, or with real weights viewed as complex numbers."""

    def __init__(self, turned: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.turned = turned
        self.layer, self.weight = nn.Linear(16, 16), nn.Parameter(torch.randn(16, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.turned(self.layer(x).to(torch.complex64), self.weight).abs().pow(2).mean()


TURNED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, weight: x * weight,
    "conjugated": lambda x, weight: (x * weight).conj() * (x + weight),
    "spectrum": lambda x, weight: torch.fft.fft(x * weight) * weight,
    "negated parts": lambda x, weight: (
        torch.complex((x * weight).conj().imag, (x * weight).real) * x.sin()
    ),
}
DTYPES = {"complex": torch.complex64, "real": torch.float32}


def waves(how: str, dtype: str) -> tuple[Waves, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Waves(TURNED[how], DTYPES[dtype]), {"x": torch.randn(8, 6, 16)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", TURNED)
def test_plans_of_complex_models_match_the_model_and_the_predicted_memory(
    how: str, dtype: str
) -> None:
    model, batch = waves(how, dtype)
    ways: tuple[tuple[Mesh, tuple[Constraint, ...]], ...] = (
        (Mesh(1), ()),
        (Mesh({"a": 2, "b": 2}), (fsdp(),)),
    )
    for mesh, constraints in ways:
        made = plan_model(
            model, mesh, example_inputs=batch, hardware="cpu-gloo", constraints=constraints
        )[1]
        assert autopar.check(made.plan, model, batch).ok
        found = autopar.verify(made.plan, model, batch)
        assert found.dtype == "float64" and found.traced is not None and found.traced < 1e-9
        assert "complex64" in str(found.lower_parts)
        assert autopar.verify(made.plan, model, batch, dtype=None).dtype == "float32"
        program = made.stage_program()
        peak_bytes, gradients = measured_peak(program, batch)
        assert (
            trace_peak(program).peak_bytes
            == max(n.peak_bytes for n in node_peaks(program))
            == peak_bytes
        )
        assert {g.dtype for g in gradients} == {torch.float32, DTYPES[dtype]}


def test_conjugated_and_negated_views_are_read_correctly() -> None:
    numbers = torch.randn(4, dtype=torch.complex64)
    base = torch.view_as_real(numbers).flatten()
    for x in (numbers, numbers[1:].conj(), numbers.conj().imag, numbers.imag):
        made = as_view(base, view_of(x))
        assert torch.equal(made, x) and (made.is_conj(), made.is_neg()) == (x.is_conj(), x.is_neg())
    assert numbers.conj().is_conj() and numbers.conj().imag.is_neg()


def test_complex_replicas_may_differ_only_by_rounding() -> None:
    x, replicated = torch.randn(4, dtype=torch.complex128), Layout.parse("R")
    near, apart = ([x, x * (1 + share)] for share in (1e-13, 1e-9))
    assert torch.equal(join(near, replicated, Mesh({"gpu": 2}), (4,), 1e-11), x)
    with pytest.raises(VerificationError, match="replicas on mesh axis 'gpu' differ"):
        join(apart, replicated, Mesh({"gpu": 2}), (4,), 1e-11)


def test_a_precision_does_not_cast_complex_parameters() -> None:
    model, batch = waves("product", "complex")
    plan = autopar.plan(model, 2, example_inputs=batch, hardware="cpu-gloo", precision="bf16")
    assert (
        autopar.verify(plan, model, batch).ok and autopar.verify(plan, model, batch, dtype=None).ok
    )


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_the_norm_of_complex_and_real_gradients_equals_that_of_torch(norm_type: float) -> None:
    model, batch = waves("conjugated", "complex")
    plain = copy.deepcopy(model)
    pm = autopar.compile(model, 1, example_inputs=batch, hardware="cpu-gloo")
    pm(**batch).backward()
    plain(**batch).backward()
    ours, theirs = (
        pm.clip_grad_norm_(0.1, norm_type),
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type),
    )
    torch.testing.assert_close(ours, theirs)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(pm.get_parameter(name).grad.full_tensor(), p.grad)


def test_the_norm_of_complex128_gradients_is_in_float64() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.complex128))
    parameter.grad = torch.tensor([3.0 + 4.0j, 0.0, 1e-9j], dtype=torch.complex128)
    norm = clip_grad_norm_([parameter], 10.0)
    assert norm.dtype == torch.float64 and norm.item() == pytest.approx(
        math.hypot(5.0, 1e-9), rel=1e-15
    )


def test_a_complex_product_takes_the_time_of_four_real_products() -> None:
    profile = HardwareProfile.load("h100-sxm")
    work = Work(10**12, 0, "matmul")
    assert compute_time(work, torch.complex64, profile) == compute_time(
        Work(4 * 10**12, 0, "matmul"), torch.float32, profile
    )

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("mix", torch.randn(8, 8, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x).to(torch.complex64) @ self.mix).abs().square().mean()

    batch = {"x": torch.randn(4, 8)}
    model = Mixing()
    plan = autopar.plan(model, 2, example_inputs=batch, hardware=profile)
    assert autopar.check(plan, model, batch).ok and autopar.verify(plan, model, batch).ok
