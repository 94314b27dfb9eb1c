"""as_strided reads the memory order at capture, whatever strides the operand has at run time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.errors import CaptureError
from autopar.verification import verify_program
from benchmarks.random_plans import prepare, random_plan


class Windows(nn.Module):
    """A model with overlapping windows, as in local attention, of a transposed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).tanh().transpose(0, 1)
        step, rows, _ = y.stride()
        windows = y.as_strided((y.shape[1], 3, 4, 4), (rows, 2 * step, step, 1))
        return (windows * windows.detach().cumsum(2)).square().mean()


@pytest.mark.parametrize("seed", range(3))
def test_a_program_with_as_strided_matches_the_model(seed: int) -> None:
    torch.manual_seed(0)
    model, x = Windows().double(), torch.randn(4, 8, 4, dtype=torch.float64)
    ready = prepare(model, {"x": x}, Mesh.parse("a=2,b=2"), HardwareProfile.load("cpu-gloo"))
    _, program = random_plan(ready, seed)
    assert verify_program(ready.trace, program, model, (), {"x": x}).ok


def test_as_strided_reads_a_copy_in_the_captured_order() -> None:
    trace = capture(Windows(), (torch.randn(4, 8, 4),))
    (read,) = (
        node
        for node in trace.graph.nodes
        if node.target is torch.ops.aten.as_strided.default and node.meta["phase"] == "forward"
    )
    assert read.args[0].target is torch.ops.aten.clone.default
    assert read.args[0].kwargs == {"memory_format": torch.contiguous_format} and tuple(
        read.args[0].meta["val"].shape
    ) == (4, 8, 4)


def test_as_strided_of_a_non_dense_tensor_is_refused() -> None:
    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2)[:, ::2].as_strided((2, 2), (4, 1)).sum()

    with pytest.raises(CaptureError, match="calls as_strided on"):
        capture(Part(), (torch.randn(4, 8, 4, requires_grad=True),))
