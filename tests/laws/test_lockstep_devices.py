"""Graphs are captured on the CPU. In lockstep and as traced, they run on the device of their
operands, which is meta in these tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autopar.capture.execute import execute
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.ops import random
from autopar.program.interpreter import Ranks
from autopar.program.splitting import split
from benchmarks import zoo
from benchmarks.random_plans import prepare, random_plan

MODELS = ("llama", "swin")
META = torch.device("meta")


def on_meta(node: Any, found: Any) -> None:
    assert all(x.is_meta for x in tree_leaves(found) if isinstance(x, Tensor)), node


@pytest.mark.parametrize("name", MODELS)
def test_results_of_a_graph_are_on_the_device_of_its_operands(name: str) -> None:
    model, batch = zoo.build(name)
    ready = prepare(model, batch, Mesh({"a": 2, "b": 2}), HardwareProfile.load("h100-sxm"))
    _, program = random_plan(ready, 0, recompute_share=0.5)
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors[random.STATE] = random.initial_state(0)
    with torch.no_grad():
        there = {key: torch.empty_like(x, device=META) for key, x in tensors.items()}
        inputs = {i.path: torch.empty_like(batch[i.path], device=META) for i in ready.trace.inputs}
        execute(ready.trace, there, there, [*inputs.values()], observe=on_meta)
        run = Ranks(program.mesh, None, lambda _, node, found: on_meta(node, found), META)
        borders = (*program.stages[0].parameters, *program.stages[0].buffers, *program.inputs)
        given = {**there, **inputs}
        results = run(
            program.stages[0].forward,
            "forward",
            [split(given[t.name], t.layout, program.mesh, t.view) for t in borders],
        )
        saved = results[len(results) - program.stages[0].num_saved :]
        tangents = [
            [torch.ones((), device=META)] * program.mesh.num_devices
            for t in program.outputs
            if t.has_gradient
        ]
        run(program.stages[0].backward, "backward", [*saved, *tangents])
