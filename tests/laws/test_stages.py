"""The stages of all cuts give the results of the full trace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from staged import run_stages
from torch import Tensor, nn

from autopar.capture import Trace, capture
from autopar.capture.execute import execute
from autopar.capture.trees import flatten_call
from autopar.ops import random
from autopar.stages import cut_points, cut_trace, placing
from autopar.stages.placing import CutError, place
from benchmarks import zoo

# Tied weights; a decoder over an encoder; long skip connections; skips into a table of products;
# buffers with new values; dropout.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"dropout": 0.1, "num_hidden_layers": 3},
    "llama": {"num_hidden_layers": 4},
    "t5": {},
    "unet2d": {},
    "dlrm": {},
    "cnn": {},
}


@dataclass(frozen=True)
class Subject:
    """A trace, its tensors in float64, and the results of the full trace."""

    trace: Trace
    tensors: dict[str, Tensor]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


@cache
def subject(name: str) -> Subject:
    model, batch = zoo.build(name, batch=4, **MODELS[name])
    trace = capture(model, (), batch)
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    tensors = {name: _wide(x.detach()) for name, x in named} | {
        random.STATE: random.initial_state(0)
    }
    leaves = dict(flatten_call((), dict(batch))[0])
    inputs = {i.path: _wide(leaves[i.path]) for i in trace.inputs}
    outputs, gradients, buffers = execute(
        trace, tensors, tensors, list(inputs.values()), dtype=torch.float64
    )
    return Subject(
        trace,
        tensors,
        inputs,
        {o.path: x for o, x in zip(trace.outputs, outputs, strict=True)},
        gradients,
        buffers,
    )


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def worst(s: Subject, positions: list[int]) -> float:
    """Return the largest error of the outputs, gradients and buffers of the stages."""
    one = torch.ones((), dtype=torch.float64)
    outputs, gradients, buffers = run_stages(
        cut_trace(s.trace, positions), s.tensors, s.tensors, s.inputs, one
    )
    assert (
        gradients.keys() == s.gradients.keys()
        and buffers.keys() == s.buffers.keys()
        and outputs.keys() == s.outputs.keys()
    )
    scale = max(float(x.abs().max()) for x in s.gradients.values())
    pairs = [(outputs[k], x, float(x.abs().max())) for k, x in s.outputs.items()]
    pairs += [
        (gradients[k], x, max(float(x.abs().max()), 1e-9 * scale)) for k, x in s.gradients.items()
    ]
    pairs += [(buffers[k], x, 1.0) for k, x in s.buffers.items()]
    return max(float((a - b).abs().max()) / max(size, 1e-30) for a, b, size in pairs if a.numel())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("llama", "dlrm"))) for n in MODELS]
)
def test_stages_compute_the_results_of_the_whole_trace(name: str) -> None:
    s = subject(name)
    points = [p.position for p in cut_points(s.trace)]
    assert len(points) >= 3

    @settings(max_examples=8)
    @given(st.sets(st.sampled_from(points), min_size=1, max_size=4))
    def law(positions: set[int]) -> None:
        assert worst(s, sorted(positions)) < 1e-12

    law()


def test_only_the_residual_stream_and_its_gradient_cross_a_cut() -> None:
    s = subject("llama")
    layers = [p.position for p in cut_points(s.trace) if "layers" in p.module]
    made = cut_trace(s.trace, layers[1:3])
    assert [(len(b.values), len([g for g in b.gradients if g])) for b in made.boundaries] == [
        (1, 1),
        (1, 1),
    ]
    first, middle, last = made.stages
    assert [i.path for i in first.inputs] == ["input_ids"] and [
        i.path for i in last.inputs if not i.crosses
    ] == ["labels"]
    assert all(i.crosses for i in middle.inputs) and not any(o.is_loss for o in middle.outputs)
    assert {p.name for t in made.stages for p in t.parameters} == {
        p.name for p in s.trace.parameters
    }
    assert sum(len(t.parameters) for t in made.stages) == len(
        s.trace.parameters
    )  # no tensor is held twice


@pytest.mark.slow
def test_tied_weights_are_in_each_stage_that_reads_them_with_a_part_of_the_gradient() -> None:
    s = subject("gpt2")
    points = cut_points(s.trace)
    made = cut_trace(s.trace, [next(p.position for p in points if p.module == "transformer.h.1")])
    assert made.shared == {"transformer.wte.weight": (0, 1)}
    for stage in made.stages:
        assert (
            next(p for p in stage.parameters if p.name == "transformer.wte.weight").gradient
            is not None
        )


@pytest.mark.slow
def test_a_skip_connection_is_transferred_through_the_stages_between() -> None:
    s = subject("unet2d")
    points = cut_points(s.trace)
    middle = [p.position for p in points if p.module.startswith("middle")]
    made = cut_trace(s.trace, middle[:2])
    passed = {i.path for i in made.stages[1].inputs if i.crosses} & {
        o.path for o in made.stages[1].outputs if o.crosses
    }
    assert passed, "what the down path hands to the up path goes through the middle stage"


@pytest.mark.slow
def test_backward_ops_are_placed_so_that_the_fewest_bytes_cross(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the minimum cut, a gradient cannot be transferred, or more bytes cross than
    necessary."""
    s = subject("t5")
    points = [p.position for p in cut_points(s.trace)]
    assert len(cut_trace(s.trace, points[3:4]).boundaries) == 1
    monkeypatch.setattr(placing, "_cheapest", lambda free, late, names, carriers: set())
    with pytest.raises(CutError, match="would cross a cut"):
        cut_trace(s.trace, points[3:4])


class Reversed(nn.Module):
    """A model in which backward of the first half needs weights of the second half: the loss
    multiplies the results of both halves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.layers[0](x)
        return {"loss": (first * self.layers[2](self.layers[1](first))).sum()}


def test_a_value_with_a_late_reader_crosses_every_cut() -> None:
    trace = capture(Reversed(), (), {"x": torch.randn(2, 4)})
    made = cut_trace(trace, [p.position for p in cut_points(trace)])
    assert [len(b.values) for b in made.boundaries] == [1, 2]


@pytest.mark.slow
def test_every_forward_node_runs_in_one_stage_or_is_copied() -> None:
    for name in ("t5", "unet2d"):
        trace = subject(name).trace
        where = place(trace, [p.position for p in cut_points(trace)][::2])
        for node in trace.graph.nodes:
            if node.op == "call_function" and node.name not in where.dropped:
                assert (node.name in where.stage) != (node.name in where.copied), node.name
