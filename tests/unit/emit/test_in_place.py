"""The gradient of the logits overwrites the logits if nothing else reads them. The peak memory
decreases by their size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import zoo_small
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import ops
from autopar.analysis import gradients as in_place
from autopar.api.planning import plan_model
from autopar.capture import Trace, capture
from autopar.capture.chunked_loss import with_loss_only
from autopar.capture.graphs import IN_PLACE
from autopar.constraints import megatron
from autopar.core.collective import Collective
from autopar.emit import emit_stage
from autopar.emit import phase as emit_in_place
from autopar.kernels import collectives
from autopar.program.peak_memory import node_peaks
from autopar.program.program import StageProgram

ROWS, CLASSES = 12, 512


class Head(nn.Module):
    """A classifier that returns its loss and the outputs that `more` computes from its logits."""

    def __init__(
        self,
        more: Callable[[Tensor], dict[str, Tensor]],
        extra: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.up, self.head, self.more, self.extra = (
            nn.Linear(8, 8),
            nn.Linear(8, CLASSES, bias=False),
            more,
            extra,
        )

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.up(x)))
        loss = F.cross_entropy(logits, labels)
        return {
            "loss": loss if self.extra is None else loss + self.extra(logits),
            **self.more(logits),
        }


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(ROWS, 8, generator=generator),
        "labels": torch.randint(0, CLASSES, (ROWS,), generator=generator),
    }


CASES: dict[str, tuple[Head, bool]] = {
    "the loss alone": (Head(lambda _: {}), True),
    "what is counted of them": (Head(lambda x: {"best": x.argmax(-1)}), True),
    "the logits": (Head(lambda x: {"logits": x}), False),
    "a view of the logits": (Head(lambda x: {"logits": x.view(-1)}), False),
    "a slice of the logits": (Head(lambda x: {"logits": x[:2]}), False),
    "what backward reads again": (Head(lambda _: {}, lambda x: x.square().mean()), False),
}


def step(model: nn.Module, **how: object) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run a step. Return the outputs, read after backward, and the gradients."""
    module = autopar.compile(model, 1, example_inputs=batch(), **how) if how else model
    results = module(**batch())
    outputs = {name: x for name, x in results.items() if x is not None}
    outputs["loss"].backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    return {
        name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in outputs.items()
    }, gradients


@pytest.mark.parametrize("returns", CASES)
def test_loss_gradient_is_in_place_if_only_the_loss_reads_the_logits(returns: str) -> None:
    model, expected = CASES[returns]
    program = plan_model(model, 1, example_inputs=batch(), hardware="cpu-gloo")[1].stage_program()
    assert (ops.cross_entropy_backward_ in targets(program)) == expected
    assert (ops.cross_entropy_backward in targets(program)) != expected
    (outputs, gradients), (plain, reference) = step(model, hardware="cpu-gloo"), step(model)
    for name, each in plain.items():
        torch.testing.assert_close(outputs[name], each)
    for name, each in reference.items():
        gradient = gradients[name]
        torch.testing.assert_close(
            gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient, each
        )


def targets(program: StageProgram) -> set[object]:
    return {node.target for node in program.backward.graph.nodes}


def test_in_place_loss_gradient_lowers_the_peak_by_the_size_of_the_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = CASES["the loss alone"]
    trace, result = plan_model(model, 1, example_inputs=batch(), hardware="cpu-gloo")

    def peak(program: StageProgram) -> int:
        (peak_bytes,) = (
            p.peak_bytes
            for p in node_peaks(program)
            if p.node.target in (ops.cross_entropy_backward, ops.cross_entropy_backward_)
        )
        return peak_bytes

    once = peak(result.stage_program())
    monkeypatch.setattr(emit_in_place, "operand_written", lambda _: None)
    twice = peak(emit_stage(trace, result.plan))
    assert (
        abs(twice - once - ROWS * CLASSES * 4) <= 8 * ROWS
    )  # tensors of labels, whose time of allocation may differ


@pytest.mark.parametrize(
    "force",
    [
        {"tp": 2, "dp": 2},
        {"dp": 2, "tp": 2, "microbatches": 2},
        {"pp": 2, "dp": 2, "microbatches": 2},
    ],
)
def test_loss_gradient_is_in_place_in_distributed_programs(force: dict[str, int]) -> None:
    model, data = zoo_small.llama()
    axes = {name: size for name, size in force.items() if name != "microbatches"}
    _, result = plan_model(
        model,
        autopar.Mesh(axes),
        example_inputs=data,
        hardware="h100-sxm",
        outputs="loss",
        constraints=(megatron(**force),),
    )
    stages = list(result.program.stages)
    assert any(ops.cross_entropy_backward_ in targets(stage) for stage in stages)
    assert (
        autopar.verify(result.plan, model, data).ok and autopar.check(result.plan, model, data).ok
    )


def test_loss_gradient_is_in_place_if_the_logits_are_not_an_output() -> None:
    trace = capture(CASES["the logits"][0], (), batch())
    alone = with_loss_only(trace)
    assert [in_place.operand_written(gradient(each)) for each in (trace, alone)] == [None, 0]


def gradient(trace: Trace) -> torch.fx.Node:
    (loss_node,) = (node for node in trace.graph.nodes if node.target is ops.cross_entropy_backward)
    return loss_node


@pytest.mark.parametrize(("size", "expected"), [(2, True), (1, False)])
def test_result_of_a_collective_over_one_device_is_not_written_in_place(
    size: int, expected: bool
) -> None:
    graph = torch.fx.Graph()
    x = graph.call_function(torch.ops.aten.exp.default, (graph.placeholder("x"),))
    step = graph.call_function(collectives.all_reduce, (x, "sum", 0))
    step.meta["collective"] = Collective("all_reduce", 0, -1, -1, "sum", "float32", 4)
    negated = graph.call_function(torch.ops.aten.neg.default, (step,))
    negated.meta[IN_PLACE] = 0
    emit_in_place.write(negated, {}, (size,))
    assert (negated.target is torch.ops.aten.neg.out) == (IN_PLACE in negated.meta) == expected
