"""Execution of a normal-form graph: views of values with other strides, and implicit dtypes."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from autopar.capture import capture, execute
from autopar.capture.execute import propagate

aten = torch.ops.aten


def viewed(stride: tuple[int, ...]) -> list[object]:
    """Return the ops of a graph that views a [2, 3] placeholder with these strides as [6], after
    propagation."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty_strided((2, 3), stride, device="meta")
    graph.output((graph.call_function(aten.view.default, (x, [6])),))
    for node in graph.nodes:
        node.meta |= {"phase": "forward", "module": "here", "source": ""}
    propagate(graph)
    graph.lint()
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert calls[-1].meta["val"].shape == (6,) and all(
        node.meta["module"] == "here" for node in calls
    )
    return [node.target for node in calls]


def test_a_view_that_is_impossible_for_the_strides_reads_a_copy() -> None:
    assert viewed((1, 2)) == [aten.clone.default, aten.view.default]


def test_a_view_that_is_possible_for_the_strides_reads_the_value() -> None:
    assert viewed((3, 1)) == [aten.view.default]


def test_created_tensors_have_the_default_dtype_at_capture() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (
                self.linear(x) * (1 - torch.ones(4) / 3) + torch.full((4,), 0.1) + torch.zeros(4)
            ).sum()

    model, x = Masked(), torch.randn(3, 4)
    trace = capture(model, (x,))
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        outputs, _, _ = execute(trace, dict(model.named_parameters()), {}, [x])
    finally:
        torch.set_default_dtype(default)
    torch.testing.assert_close(outputs[0], model(x).detach())


def test_execution_in_float64_uses_complex128() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(self.linear(x)).abs().sum()

    model, x = Waves(), torch.randn(3, 8)
    trace = capture(model, (x,))
    outputs, _, _ = execute(trace, dict(model.named_parameters()), {}, [x], dtype=torch.float64)
    torch.testing.assert_close(outputs[0], model.double()(x.double()).detach(), rtol=1e-13, atol=0)
