"""Batch, instance and group norms under all layouts: outputs, gradients and running statistics
match the plain model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.ops import norms
from autopar.verification import verify_program

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.random_plans import prepare, random_plan


class Norms(nn.Module):
    """All kinds of batch norms, with and without affine parameters and running statistics, instance
    norms computed as one batch norm, and group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8)
        self.batch, self.instance, self.group = (
            nn.BatchNorm2d(8),
            nn.InstanceNorm2d(8, affine=True),
            nn.GroupNorm(4, 8),
        )
        self.plain, self.last = (
            nn.BatchNorm2d(8, track_running_stats=False),
            nn.BatchNorm1d(8, affine=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.group(self.plain(self.instance(self.batch(self.conv(x))))))
        return self.last(self.linear(y[:, :, 0, 0])).pow(3).mean() + y.mean()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mesh", ["2", "a=2,b=2"])
def test_norms_of_a_sharded_batch_equal_those_of_the_whole_batch(mesh: str, training: bool) -> None:
    torch.manual_seed(0)
    model, batch = Norms().train(training), {"x": torch.randn(8, 3, 8, 8)}
    model.batch.running_mean.normal_()
    model.batch.running_var.uniform_(1, 2)
    ready = prepare(model, batch, Mesh.parse(mesh), HardwareProfile.load("cpu-gloo"))
    for seed in (0, 2):
        _, program = random_plan(ready, seed)
        found = verify_program(ready.trace, program, model, (), batch)
        assert found.num_collectives and found.max_error < 1e-9
        assert set(found.buffers) == (
            {f"{m}.{b}" for m in ("batch", "last") for b in STATISTICS} if training else set()
        )


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_ops_in_16_bits_are_as_precise_as_those_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        (torch.randn(16, 4, 32) + 3).to(dtype),
        torch.rand(4).to(dtype) + 0.5,
        torch.randn(4).to(dtype),
    )
    wide = x.double()
    mean = norms.channel_sum(x) / 512
    rstd = (norms.squared_deviation(x, mean) / 512 + 1e-5).rsqrt()
    exact = torch.nn.functional.batch_norm(
        wide, None, None, weight.double(), bias.double(), training=True
    )
    ours = (norms.normalize(x, mean, rstd, weight, bias).double() - exact).abs().max()
    theirs = (
        (
            torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True).double()
            - exact
        )
        .abs()
        .max()
    )
    assert ours <= 1.5 * theirs
