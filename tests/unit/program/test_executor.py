"""The executor runs where the tensors are: graphs are captured on the CPU, and nothing in them
stays there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.core.layout import local_shape
from autopar.core.mesh import Mesh
from autopar.kernels.collectives import fake_groups
from autopar.program.executor import Executor
from autopar.program.program import ProgramTensor, StageProgram
from benchmarks import zoo
from benchmarks.common import load_profile
from benchmarks.random_plans import prepare, random_plan


def step(program: StageProgram, device: str) -> list[Tensor]:
    """One step on meta tensors, of ops that make their tensors on `device`; all results."""

    def empty(t: ProgramTensor) -> Tensor:
        return torch.empty(
            local_shape(t.view, t.layout, program.mesh.shape), dtype=t.dtype, device="meta"
        )

    executor = Executor(
        program, fake_groups(program.mesh), batch="local", outputs="local", device=device
    )
    borders = program.parameters, program.buffers, program.inputs
    with torch.no_grad():
        results, saved = executor.forward(
            *(list(map(empty, border)) for border in borders), keep=True
        )
        loss = next(r for r, t in zip(results, program.outputs, strict=True) if t.is_loss)
        return [*results, *executor.backward(saved, [torch.ones_like(loss)])]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_everything_that_a_program_makes_is_on_the_device_of_its_operands(name: str) -> None:
    ready = prepare(*zoo.build(name, dropout=0.1), Mesh(2), load_profile("cpu-gloo-frictionless"))
    _, program = random_plan(ready, 1)
    assert {x.device.type for x in step(program.stages[0], "meta")} == {"meta"}
    with pytest.raises(RuntimeError, match=r"device"):
        step(program.stages[0], "cpu")
