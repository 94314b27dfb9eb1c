"""Operands with several floating-point dtypes in one call: the results match the kernels of torch,
or the call is refused before anything runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo_small
from measured import measured_peak
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import autopar
from autopar.api.planning import plan_model
from autopar.capture import capture
from autopar.capture.precision import try_kernel
from autopar.core.mesh import Mesh
from autopar.errors import CaptureError, VerificationError
from autopar.program.peak_memory import trace_peak
from autopar.verification import relative_error

BF16 = torch.bfloat16
LINE = Mesh({"gpu": 2})


class Chain(nn.Module):
    """A chain of layers, and a table that is added to their inputs."""

    def __init__(self, *layers: nn.Module, table: Tensor | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is not None:
            x = x + self.table
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def spectral() -> tuple[Chain, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Chain(spectral_norm(nn.Linear(16, 16)), nn.ReLU(), spectral_norm(nn.Linear(16, 8))), {
        "x": torch.randn(8, 16)
    }


@pytest.mark.parametrize("training", [True, False])
def test_with_a_precision_spectral_norms_are_computed_in_the_dtype_of_their_buffers(
    training: bool,
) -> None:
    model, batch = spectral()
    model.train(training)
    plain = copy.deepcopy(model)
    plan = autopar.plan(model, 1, example_inputs=batch, precision="bf16", hardware="cpu-gloo")
    assert autopar.check(plan, model, batch).ok and autopar.verify(plan, model, batch).ok
    pm = autopar.compile(model, 1, example_inputs=batch, plan=plan)
    loss = pm(**batch)
    loss.backward()
    read = {
        name: p.to(BF16).float() for name, p in plain.named_parameters()
    }  # the weights as read, with compute in fp32
    wanted = torch.func.functional_call(plain, read, (), batch)
    wanted.backward()
    assert loss.dtype == BF16 and loss.item() == pytest.approx(wanted.item(), rel=2e-2)
    for name, p in plain.named_parameters():
        gradient = pm.get_parameter(name).grad
        assert (
            gradient.dtype == torch.float32
            and relative_error(gradient.full_tensor(), p.grad) < 5e-2
        )
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(pm.named_buffers())[name], buffer, rtol=1e-5, atol=1e-6)


def test_verify_without_float64_is_refused_if_the_plain_model_cannot_run_in_the_precision() -> None:
    model, batch = spectral()
    plan = autopar.plan(model, LINE, example_inputs=batch, precision="bf16", hardware="cpu-gloo")
    assert autopar.verify(plan, model, batch).ok
    with pytest.raises(
        VerificationError,
        match=r"the plain model fails with parameters in .*same dtype(.|\n)*float64",
    ):
        autopar.verify(plan, model, batch, dtype=None)


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(16, 16), nn.LayerNorm(16), nn.GroupNorm(4, 16)],
    ids=lambda layer: type(layer).__name__,
)
def test_with_a_precision_operands_of_another_dtype_are_refused_with_the_line(
    layer: nn.Module,
) -> None:
    model, batch = Chain(layer, table=torch.randn(16)), {"x": torch.randn(8, 16)}
    with pytest.raises(
        CaptureError,
        match=(
            r"bfloat16 and float32(.|\n)*layers\.0(.|\n)*test_mixed_operands(.|\n)*to\(x\.dtype\)"
        ),
    ):
        capture(model, (), batch, precision=BF16)
    assert capture(model, (), batch).precision is None
    model.table = model.table.to(BF16)
    assert capture(model, (), batch, precision=BF16).precision == BF16


def test_without_a_precision_unsupported_pairs_of_dtypes_are_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (x.double() @ self.weight).float().mean()

    with pytest.raises(RuntimeError, match="same dtype"):
        Net()(torch.randn(2, 4))
    with pytest.raises(CaptureError, match=r"float32 and float64(.|\n)*one dtype"):
        capture(Net(), (torch.randn(2, 4),))


def test_pairs_of_dtypes_that_torch_supports_are_accepted() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            wide = torch.cat([x * self.weight, torch.where(x > 0, x, self.weight.double())], 1)
            return torch.nn.functional.mse_loss(wide, x.repeat(1, 2)).float()

    model, batch = Net(), {"x": torch.randn(2, 4)}
    plan = autopar.plan(model, 1, example_inputs=batch, hardware="cpu-gloo")
    assert autopar.verify(plan, model, batch, dtype=None).ok


def test_a_trial_of_a_call_does_not_change_the_random_state() -> None:
    state = torch.random.get_rng_state()
    mean, deviation = (
        torch.empty(3, device="meta"),
        torch.empty(3, dtype=torch.float64, device="meta"),
    )
    found = try_kernel(torch.ops.aten.normal.Tensor_Tensor, (mean, deviation), {}, mean)
    assert found is not None and not found.refusal and found.dtypes == (torch.float32,)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(4, 8), (3, 40, 50), (512, 4096, 4096)])
def test_a_trial_predicts_the_result_dtypes_of_a_call_of_any_size(shape: tuple[int, ...]) -> None:
    rows, weight = (
        torch.empty(shape, dtype=BF16, device="meta"),
        torch.empty(shape[-1], device="meta"),
    )
    statistics = torch.empty((*shape[:-1], 1), dtype=BF16, device="meta")
    args = (rows, [shape[-1]], weight, weight, 1e-5)
    found = try_kernel(
        torch.ops.aten.native_layer_norm.default, args, {}, (rows, statistics, statistics)
    )
    assert found is not None and found.dtypes == (BF16, torch.float32, torch.float32)


@pytest.mark.parametrize("size", [20, 200])
def test_a_trial_keeps_dependent_sizes_consistent(size: int) -> None:
    """The number of positions in an image is an argument of a group norm."""
    x, weight = (
        torch.empty(96, 32, size, size, dtype=BF16, device="meta"),
        torch.empty(32, device="meta"),
    )
    statistics = torch.empty(96, 4, dtype=BF16, device="meta")
    found = try_kernel(
        torch.ops.aten.native_group_norm.default,
        (x, weight, weight, 96, 32, size**2, 4, 1e-5),
        {},
        (x, statistics, statistics),
    )
    assert found is not None and found.dtypes == (BF16, torch.float32, torch.float32)


def test_a_trial_gives_no_prediction_if_result_shapes_differ() -> None:
    x, weight = torch.empty(4, 8, dtype=BF16, device="meta"), torch.empty(8, device="meta")
    assert (
        try_kernel(
            torch.ops.aten.native_layer_norm.default, (x, [8], weight, None, 1e-5), {}, (x, x, x)
        )
        is None
    )


def images(norm: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Any]]:
    return Chain(nn.Conv2d(3, 16, 3), norm(), nn.ReLU(), nn.Conv2d(16, 16, 3), norm()), {
        "x": torch.randn(4, 3, 20, 24)
    }


def rows(norm: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Any]]:
    return Chain(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), norm()))), {
        "x": torch.randn(64, 4, 16)
    }


NORMS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "layer": lambda: rows(lambda: nn.LayerNorm(16)),
    "layer, no weights": lambda: rows(lambda: nn.LayerNorm(16, elementwise_affine=False)),
    "group": lambda: images(lambda: nn.GroupNorm(8, 16)),
    "instance": lambda: images(lambda: nn.InstanceNorm2d(16, affine=True)),
    "batch": lambda: images(lambda: nn.BatchNorm2d(16)),
    "bert": zoo_small.bert,
}


@pytest.mark.parametrize("kind", NORMS)
def test_under_autocast_norm_statistics_have_the_dtype_of_the_kernels(
    kind: str,
) -> None:
    """For 16-bit values with fp32 weights, they are in fp32, although the fake kernels of torch
    give 16-bit statistics."""
    model, batch = NORMS[kind]()
    with torch.autocast("cpu", dtype=BF16):
        made = plan_model(model, 1, example_inputs=batch, hardware="h100-sxm", optimizer="none")[1]
    program = made.stage_program()
    peak_bytes, _ = measured_peak(program, batch)
    assert trace_peak(program).peak_bytes == peak_bytes
    assert made.plan.prediction.peak_bytes == peak_bytes
