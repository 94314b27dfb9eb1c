"""Graphs that are bound to a GPU call row kernels exactly where plans have norms and softmaxes, and
prices include them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import zoo_small

from autopar import ops
from autopar.analysis.work import works
from autopar.api.planning import plan_model
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.kernels import row_kernels
from autopar.kernels.bind import bind
from autopar.kernels.collectives import fake_groups
from autopar.rules import TensorInfo

PRICED = (ops.rms_norm, ops.rms_product, ops.rms_norm_backward, ops.rms_weight_gradient)


@pytest.mark.parametrize(
    "options", [{}, {"loss_rows": 8, "outputs": "loss"}], ids=["logits", "by rows"]
)
def test_ops_with_a_row_kernel_call_it_only_on_a_gpu(options: dict[str, object]) -> None:
    model, batch = zoo_small.llama(num_layers=2, dtype=torch.float32)
    _, planned = plan_model(model, Mesh(2), example_inputs=batch, hardware="h100-sxm", **options)  # type: ignore[arg-type]
    program, groups = planned.program, fake_groups(Mesh(2))
    for graph_module in (program.stages[0].forward, program.stages[0].backward):  # type: ignore[union-attr]
        had = Counter(
            row_kernels.ON_GPU[node.target]
            for node in graph_module.graph.nodes
            if node.target in row_kernels.ON_GPU
        )
        on_gpu, on_cpu = (
            Counter(node.target for node in bind(graph_module, groups, kind).graph.nodes)
            for kind in ("cuda", "cpu")
        )
        assert had and {target: on_gpu[target] for target in had} == had
        assert not any(on_gpu[op] for op in row_kernels.ON_GPU) and not any(
            on_cpu[kernel] for kernel in row_kernels.ON_GPU.values()
        )


@pytest.mark.parametrize("target", PRICED)
def test_a_row_kernel_is_priced_with_one_read_and_one_write_for_its_dtypes(target: object) -> None:
    half, wide = torch.bfloat16, torch.float32
    x, row, weight = TensorInfo((64, 32), half), TensorInfo((64,), wide), TensorInfo((32,), half)
    args, inputs, output, passes = {
        ops.rms_norm: ((0, 0, 0, 32, 1e-5, wide, half, half), (x, row, weight), x, 2),
        ops.rms_product: ((0, 0, 0, wide), (x, x, weight), row, 2),
        ops.rms_norm_backward: ((0, 0, 0, 0, 0, 32, 1e-5, wide), (x, x, row, row, weight), x, 3),
        ops.rms_weight_gradient: (
            (0, 0, 0, 32, 1e-5, wide),
            (x, x, row),
            TensorInfo((32,), wide),
            2,
        ),
    }[target]  # type: ignore[index]

    def moved(
        inputs: tuple[TensorInfo, ...], *, by_kernels: bool, squared_in: torch.dtype = wide
    ) -> list[int]:
        given = tuple(squared_in if each is wide else each for each in args)
        return [
            work.bytes
            for work, _ in works(target, given, {}, inputs, (output,), by_kernels=by_kernels)
        ]  # type: ignore[arg-type]

    assert moved(inputs, by_kernels=True) == [passes * 64 * 32 * 2]
    assert sum(moved(inputs, by_kernels=False)) > passes * 64 * 32 * 2
    assert moved(inputs, by_kernels=True, squared_in=torch.float64) == moved(
        inputs, by_kernels=False, squared_in=torch.float64
    )
    mixed = (inputs[0], replace(inputs[1], dtype=wide), *inputs[2:])
    if target is ops.rms_norm:
        mixed = (*inputs[:2], replace(weight, dtype=wide))
    assert moved(mixed, by_kernels=True) == moved(mixed, by_kernels=False)


def test_gpu_profiles_price_row_kernels() -> None:
    found = {name: HardwareProfile.load(name).has_row_kernels for name in HardwareProfile.names()}
    assert {name for name, has in found.items() if not has} == {"cpu-gloo"}
