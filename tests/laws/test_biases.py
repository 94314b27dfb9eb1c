"""Biases of linear layers that are part of their product: results under every layout, and the
number of roundings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from mlp import Block
from overlapping import overlapping
from torch import Tensor, nn

import autopar
from autopar import ops
from autopar.capture import Trace, capture
from autopar.certificate import certify
from autopar.constraints import LayoutConstraint, layout, tensor_parallel
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.emit import emit, emit_stage
from autopar.errors import ValidationError, VerificationError
from autopar.kernels import fused
from autopar.planner import PlanOptions, make_plan
from autopar.plans import Plan
from autopar.program.lockstep import run_lockstep
from autopar.rules import localization
from autopar.validation import op_law
from autopar.verification import verify_program

SQUARE = Mesh({"a": 2, "b": 2})
CPU = HardwareProfile.load("cpu-gloo")


class Net(nn.Module):
    """Two MLP blocks with biases. The results are the output and its mean square."""

    def __init__(self, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(width, hidden, bias=True) for _ in range(2)))
        self.head = nn.Linear(width, 7)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.head(self.layers(x))
        return {"loss": y.float().pow(2).mean(), "y": y}


@cache
def built() -> tuple[Net, dict[str, Tensor], Trace]:
    torch.manual_seed(0)
    model, batch = Net(), {"x": torch.randn(8, 4, 16)}
    return model, batch, capture(model, (), batch)


# layouts of the weights [out, in] of the first and the second layer: the dim that each axis shards
LAYOUTS = {
    "columns, then rows": ("S(0) R", "S(1) R"),
    "rows, then columns": ("S(1) R", "S(0) R"),
    "rows over both axes": ("S(0) S(0)", "S(1) S(1)"),
    "rows over both, the other way round": ("S(0)#1 S(0)#0", "S(1)#1 S(1)#0"),
    "rows and columns at once": ("S(0) S(1)", "S(1) S(0)"),
    "rows over one, columns over the other": ("S(1) S(0)", "S(0) S(1)"),
    "whole": ("R R", "R R"),
}


def forced(name: str) -> Plan:
    up, down = LAYOUTS[name]
    constraints: tuple[LayoutConstraint, ...] = (
        layout("layers.*.up", weight=up),
        layout("layers.*.down", weight=down),
    )
    return make_plan(built()[2], SQUARE, CPU, PlanOptions(constraints=constraints)).plan


def sums(plan: Plan) -> int:
    """Return how many products with a bias give partial sums."""
    products = {
        n.meta["key"] for n in built()[2].graph.nodes if n.target is ops.dot and len(n.args) == 4
    }
    return sum(
        key in products and strategy.outputs[0].has_partial
        for key, strategy in plan.node_choices().items()
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_bias_is_added_once_under_every_layout(name: str) -> None:
    plan, (model, batch, _) = forced(name), built()
    assert (sums(plan) > 0) == ("S(1)" in "".join(LAYOUTS[name]))
    assert autopar.verify(plan, model, batch).ok


@pytest.fixture
def fresh_verdicts() -> Iterator[None]:
    """A cache of strategy verdicts that is not shared with other tests."""
    for remembered in (op_law._judge, op_law._on_one_axis):
        remembered.cache_clear()
    yield
    for remembered in (op_law._judge, op_law._on_one_axis):
        remembered.cache_clear()


@pytest.mark.parametrize(
    "name", ["columns, then rows", "rows over both axes", "rows and columns at once"]
)
def test_a_bias_added_to_each_partial_sum_is_detected(
    name: str, monkeypatch: pytest.MonkeyPatch, fresh_verdicts: None
) -> None:
    """Validation refuses the program. Without validation, the numbers differ."""
    plan, (model, batch, trace) = forced(name), built()
    monkeypatch.setitem(localization.LOCALIZERS, ops.dot, localization.same)  # type: ignore[arg-type]
    place = r"layers\.0\.(up|down)/dot/forward/0"
    with pytest.raises(ValidationError, match=rf"{place} .*is wrong on shapes"):
        autopar.verify(plan, model, batch)
    with pytest.raises(VerificationError, match=place):
        verify_program(trace, emit(trace, plan), model, (), batch)


def test_only_the_residual_is_added_to_a_product_by_a_separate_op() -> None:
    model, _, trace = built()
    additions = [
        n
        for n in emit_stage(trace, forced("columns, then rows")).forward.graph.nodes
        if n.target is torch.ops.aten.add.Tensor
    ]
    assert len(additions) == len(model.layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_on_one_device_are_bitwise_equal_to_the_model(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, batch = Net().to(dtype), {"x": torch.randn(8, 4, 16).to(dtype)}
    trace = capture(model, (), batch)
    program = make_plan(trace, Mesh(1), CPU, PlanOptions()).program
    made = run_lockstep(program, dict(model.named_parameters()), {}, [batch["x"]])
    expected = model(**batch)
    assert torch.equal(made.outputs["y"], expected["y"]) and torch.equal(
        made.outputs["loss"], expected["loss"]
    )


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).pow(2).mean()


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh({"gpu": 4})], ids=str)
def test_small_relu_models_in_bfloat16_are_within_the_tolerance(mesh: Mesh) -> None:
    """A rounding error decides whether a unit with an input near zero is active, and thereby
    changes a row of a gradient."""
    plan = autopar.plan(
        Small().bfloat16(), mesh, example_inputs=(torch.randn(16, 32).bfloat16(),), hardware=CPU
    )
    for seed in range(12):
        torch.manual_seed(seed)
        model, x = Small().bfloat16(), torch.randn(16, 32).bfloat16()
        assert autopar.verify(plan, model, (x,), dtype=None).ok


@pytest.mark.parametrize("sequence", [False, True])
def test_overlap_kernels_include_the_bias_of_their_product(sequence: bool) -> None:
    model, batch, trace = built()
    profile, line = overlapping(), Mesh({"gpu": 4})
    constraints = (tensor_parallel("1d", axes=("gpu",), sequence=sequence),)
    plan = make_plan(trace, line, profile, PlanOptions(constraints=constraints)).plan
    nodes = [n for n in emit_stage(trace, plan).forward.graph.nodes if n.target in fused.KERNELS]
    wanted = {(fused.all_gather_matmul, 0), (fused.matmul_reduce_scatter, 1)} if sequence else set()
    assert {(n.target, len(n.kwargs.get("starts", ()))) for n in nodes} == wanted, (
        "one dim that is split is summed over"
    )
    assert all("bias" in n.kwargs for n in nodes)
    assert autopar.verify(plan, model, batch).ok
    found = certify(trace, plan, profile)
    assert found.ok, str(found)
