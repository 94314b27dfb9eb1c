"""The lockstep interpreter computes what the plain model computes, and says where it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from handwritten import BATCH, WIDTH, Toy, batch, program, reference
from torch import fx

from autopar.errors import VerificationError
from autopar.program.lockstep import run_lockstep
from autopar.program.program import Program


def stored(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {n: p.detach() for n, p in model.named_parameters()}, {
        n: b.clone() for n, b in model.named_buffers()
    }


def run(target: Program, **options: Any) -> Any:
    parameters, buffers = stored(Toy())
    return run_lockstep(target, parameters, buffers, list(batch().values()), **options)


@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
def test_outputs_gradients_and_buffers_equal_the_plain_model_on_every_mesh(
    mesh: tuple[int, int],
) -> None:
    model = Toy()
    outputs, gradients = reference(model)
    result = run(program(*mesh), dtype=torch.float64)
    torch.testing.assert_close(result.outputs["loss"], outputs["loss"].detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        result.outputs["logits"], outputs["logits"].detach(), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(result.buffers["mean"], model.mean, rtol=1e-12, atol=1e-12)
    assert set(result.gradients) == set(gradients)
    for name, gradient in gradients.items():
        assert result.gradients[name].shape == gradient.shape
        torch.testing.assert_close(result.gradients[name], gradient, rtol=1e-12, atol=1e-12)


def test_the_tangent_scales_every_gradient() -> None:
    once, thrice = (
        run(program(), dtype=torch.float64),
        run(program(), dtype=torch.float64, tangent=3.0),
    )
    for name, gradient in once.gradients.items():
        torch.testing.assert_close(thrice.gradients[name], 3 * gradient, rtol=1e-12, atol=1e-12)


def test_without_a_dtype_the_program_keeps_its_own() -> None:
    result = run(program())
    assert all(
        value.dtype == torch.float32
        for value in (*result.outputs.values(), *result.gradients.values())
    )


def test_every_communication_step_is_recorded_with_its_local_bytes() -> None:
    records = run(program()).records
    gather = [c for phase, _, c in records if phase == "forward" and c.kind == "all_gather"]
    assert [(c.axis, c.dim, c.bytes) for c in gather] == [
        (0, 1, 8 * 4 * 4),
        (0, 1, 8 * 4 * 4),
        (0, 0, 4 * 4),
        (0, 0, 4 * 3 * 2 * 4),
    ]
    assert sum(c.kind == "reduce_scatter" for phase, _, c in records if phase == "backward") == 4


def test_a_missing_reduction_is_found_and_named() -> None:
    with pytest.raises(
        VerificationError,
        match=r"'loss'.*head/div.*replicas on mesh axis 'tensor' differ: rank 0 and rank 1",
    ) as caught:
        run(program(drop="logits"))
    assert "in module head" in str(caught.value)
    with pytest.raises(VerificationError, match=r"'loss'.*'data'"):
        run(program(drop="loss"))


def test_a_failing_node_is_named() -> None:
    target = program()
    node = next(n for n in target.stages[0].forward.graph.nodes if n.meta.get("key") == "second/mm")
    node.args = (node.args[1], node.args[0])
    with pytest.raises(VerificationError, match="second/mm fails in the forward graph"):
        run(target)


def test_an_operator_that_writes_into_its_operand_is_refused() -> None:
    target = program()
    next(
        n for n in target.stages[0].forward.graph.nodes if n.target is torch.ops.aten.relu.default
    ).target = torch.ops.aten.relu_.default
    with pytest.raises(VerificationError, match="modifies its operand"):
        run(target)


def test_the_observer_sees_every_node_of_both_phases_with_one_result_per_rank() -> None:
    seen: dict[str, list[fx.Node]] = {"forward": [], "backward": []}

    def observe(phase: str, node: fx.Node, locals: list[Any]) -> None:
        assert len(locals) == 4
        seen[phase].append(node)

    target = program()
    run(target, observe=observe)
    assert seen["forward"] == [n for n in target.stages[0].forward.graph.nodes if n.op != "output"]
    assert seen["backward"] == [
        n for n in target.stages[0].backward.graph.nodes if n.op != "output"
    ]


def test_a_dtype_named_by_a_node_is_promoted_too() -> None:
    target = program()
    relu = next(
        n for n in target.stages[0].forward.graph.nodes if n.target is torch.ops.aten.relu.default
    )
    with target.stages[0].forward.graph.inserting_after(relu):
        cast = target.stages[0].forward.graph.call_function(
            torch.ops.aten._to_copy.default, (relu,), {"dtype": torch.bfloat16}
        )
    relu.replace_all_uses_with(cast)
    cast.args = (relu,)
    outputs, _ = reference(Toy())
    result = run(target, dtype=torch.float64)
    assert result.outputs["logits"].shape == (BATCH, WIDTH)
    torch.testing.assert_close(result.outputs["loss"], outputs["loss"].detach(), rtol=1e-12, atol=0)
