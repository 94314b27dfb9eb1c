"""The operand that a gradient is written into: a tensor of the same form that backward computed and
that nothing else reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autopar
from autopar.analysis.gradients import has_own_memory, operand_written
from autopar.api.planning import plan_model
from autopar.capture import Trace, capture
from autopar.emit import emit_stage
from autopar.emit import phase as emit_in_place
from autopar.program.peak_memory import node_peaks, trace_peak
from autopar.program.program import StageProgram

aten = torch.ops.aten
ROWS, WIDTH = 6, 32


class Layers(nn.Module):
    """Two linear layers with a function between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8), between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x))).square().sum()


def trace_layers(between: Callable[[Tensor], Tensor]) -> Trace:
    return capture(Layers(between), (torch.randn(ROWS, 8),))


def overwritten_operands(trace: Trace, target: Any) -> list[fx.Node | None]:
    """Return the operand that each call of `target` in backward overwrites."""
    calls = [
        n for n in trace.graph.nodes if n.target is target and n.meta.get("phase") == "backward"
    ]
    places = [operand_written(call) for call in calls]
    return [
        None if place is None else call.args[place]
        for call, place in zip(calls, places, strict=True)
    ]


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Any, bool]] = {
    "an activation": (F.gelu, aten.gelu_backward.default, True),
    "a factor that forward made": (lambda x: x * torch.sin(x).detach(), aten.mul.Tensor, True),
    "wider than its factor": (
        lambda x: x * x.sum(-1, keepdim=True).detach(),
        aten.mul.Tensor,
        True,
    ),
    "in another dtype": (lambda x: F.silu(x.double()).float(), aten.silu_backward.default, True),
    "through a view": (
        lambda x: F.silu(x.view(ROWS * WIDTH)).view(ROWS, WIDTH),
        aten.silu_backward.default,
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_written_into_the_gradient_that_it_is_computed_from(name: str) -> None:
    between, target, expected = CASES[name]
    operands = overwritten_operands(trace_layers(between), target)
    assert operands and any(node is not None for node in operands) == expected
    assert all(
        node.meta["phase"] == "backward" and has_own_memory(node)
        for node in operands
        if node is not None
    )


def test_gradient_with_two_readers_is_not_overwritten() -> None:
    trace = trace_layers(lambda x: torch.sin(x) + torch.cos(x))
    sums = overwritten_operands(trace, aten.add.Tensor)
    assert len(sums) == 1 and sums[0] is not None
    products = [
        n
        for n in trace.graph.nodes
        if n.target is aten.mul.Tensor and n.meta["phase"] == "backward" and n.users
    ]
    shared = [
        n
        for n in products
        if any(len(a.users) > 1 and a.meta["phase"] == "backward" for a in n.all_input_nodes)
    ]
    assert len(shared) == 2, "both products read the gradient of the sum"
    assert all(
        len(node.users) == 1
        for node in overwritten_operands(trace, aten.mul.Tensor)
        if node is not None
    )


def test_sum_is_written_into_its_first_computed_operand() -> None:
    [into] = overwritten_operands(
        trace_layers(lambda x: torch.sin(x) + torch.cos(x)), aten.add.Tensor
    )
    [add] = into.users  # type: ignore[union-attr]
    order = list(add.graph.nodes)
    assert order.index(into) == min(order.index(node) for node in add.all_input_nodes)


@pytest.mark.parametrize(
    ("first_strides", "expected"), [((5, 1), 0), ((1, 4), None)], ids=["as the result", "otherwise"]
)
def test_overwritten_operand_has_the_strides_of_the_result(
    first_strides: tuple[int, int], expected: int | None
) -> None:
    graph = fx.Graph()
    products = [
        graph.call_function(
            aten.mm.default, (graph.placeholder(f"a{n}"), graph.placeholder(f"b{n}"))
        )
        for n in range(2)
    ]
    for node, strides in zip(products, (first_strides, (5, 1)), strict=True):
        node.meta.update(phase="backward", val=torch.empty_strided((4, 5), strides, device="meta"))
    graph.call_function(aten.neg.default, (products[1],)).meta.update(
        phase="backward"
    )  # another reader of the second product
    total = graph.call_function(aten.add.Tensor, tuple(products))
    total.meta.update(phase="backward", val=torch.empty((4, 5), device="meta"))
    assert operand_written(total) == expected


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model(x).backward()
    return {
        name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("name", CASES)
def test_gradients_match_the_plain_model(name: str) -> None:
    model, x = Layers(CASES[name][0]), torch.randn(ROWS, 8)
    plain = copy.deepcopy(model)
    module = autopar.compile(model, 1, example_inputs=(x,), hardware="cpu-gloo")
    gradients, expected = step(module, x), step(plain, x)
    for key, each in expected.items():
        torch.testing.assert_close(gradients[key], each)


def test_in_place_gradient_lowers_the_peak_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, result = plan_model(
        Layers(F.gelu), 1, example_inputs=(torch.randn(ROWS, 8),), hardware="cpu-gloo"
    )
    program = result.stage_program()
    assert [n for n in program.backward.graph.nodes if n.target is aten.gelu_backward.grad_input]
    monkeypatch.setattr(emit_in_place, "operand_written", lambda _: None)
    other = emit_stage(trace, result.plan)

    def peak(of: StageProgram) -> int:
        (peak_bytes,) = (
            p.peak_bytes for p in node_peaks(of) if "gelu_backward" in str(p.node.target)
        )
        return peak_bytes

    assert peak(other) - peak(program) == ROWS * WIDTH * 4
    assert trace_peak(program).peak_bytes <= trace_peak(other).peak_bytes
