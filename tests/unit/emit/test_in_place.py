"""The gradient of logits is written into the logits where nothing else has them; the peak is the
less by so much."""

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
    """A classifier that returns its loss and what `more` makes of its logits."""

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
    """Outputs as they are after backward, and gradients."""
    made = autopar.compile(model, 1, example_inputs=batch(), **how) if how else model
    found = made(**batch())
    outputs = {name: x for name, x in found.items() if x is not None}
    outputs["loss"].backward()
    gradients = {name: p.grad for name, p in made.named_parameters()}
    made.zero_grad(set_to_none=True)
    return {
        name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in outputs.items()
    }, gradients


@pytest.mark.parametrize("returns", CASES)
def test_it_is_where_nothing_else_has_them_and_outputs_stay_what_they_were(returns: str) -> None:
    model, expected = CASES[returns]
    program = plan_model(model, 1, example_inputs=batch(), hardware="cpu-gloo")[1].stage_program()
    assert (ops.cross_entropy_backward_ in targets(program)) == expected
    assert (ops.cross_entropy_backward in targets(program)) != expected
    (outputs, gradients), (plain, reference) = step(model, hardware="cpu-gloo"), step(model)
    for name, each in plain.items():
        torch.testing.assert_close(outputs[name], each)
    for name, each in reference.items():
        found = gradients[name]
        torch.testing.assert_close(
            found.full_tensor() if hasattr(found, "full_tensor") else found, each
        )


def targets(program: StageProgram) -> set[object]:
    return {node.target for node in program.backward.graph.nodes}


def test_while_it_is_written_the_logits_are_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = CASES["the loss alone"]
    trace, made = plan_model(model, 1, example_inputs=batch(), hardware="cpu-gloo")

    def peak(program: StageProgram) -> int:
        (found,) = (
            p.peak_bytes
            for p in node_peaks(program)
            if p.node.target in (ops.cross_entropy_backward, ops.cross_entropy_backward_)
        )
        return found

    once = peak(made.stage_program())
    monkeypatch.setattr(emit_in_place, "operand_written", lambda _: None)
    twice = peak(emit_stage(trace, made.plan))
    assert (
        abs(twice - once - ROWS * CLASSES * 4) <= 8 * ROWS
    )  # labels' places, which are made sooner or later


@pytest.mark.parametrize(
    "force",
    [
        {"tp": 2, "dp": 2},
        {"dp": 2, "tp": 2, "microbatches": 2},
        {"pp": 2, "dp": 2, "microbatches": 2},
    ],
)
def test_with_tensor_parallelism_microbatches_and_stages_too(force: dict[str, int]) -> None:
    model, data = zoo_small.llama()
    axes = {name: size for name, size in force.items() if name != "microbatches"}
    _, made = plan_model(
        model,
        autopar.Mesh(axes),
        example_inputs=data,
        hardware="h100-sxm",
        outputs="loss",
        constraints=(megatron(**force),),
    )
    stages = list(made.program.stages)
    assert any(ops.cross_entropy_backward_ in targets(stage) for stage in stages)
    assert autopar.verify(made.plan, model, data).ok and autopar.check(made.plan, model, data).ok


def test_rows_that_hold_for_every_plan_do_not_count_both() -> None:
    trace = capture(CASES["the logits"][0], (), batch())
    alone = with_loss_only(trace)
    assert [in_place.operand_written(gradient(each)) for each in (trace, alone)] == [None, 0]


def gradient(trace: Trace) -> torch.fx.Node:
    (found,) = (node for node in trace.graph.nodes if node.target is ops.cross_entropy_backward)
    return found


@pytest.mark.parametrize(("size", "expected"), [(2, True), (1, False)])
def test_what_a_step_hands_on_along_an_axis_of_one_device_is_left(
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
