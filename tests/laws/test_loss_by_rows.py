"""The planner computes a loss by rows if the saved memory is worth it, and the program matches
the plain model."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo_small
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.constraints import megatron, pipeline
from autopar.errors import AutoparError, CaptureError, InfeasibleError, PlanError
from autopar.program.abstract_executor import LiveBytes
from autopar.runtime.module import ParallelModule

WIDE = {"vocab_size": 4096}  # logits take more memory than everything else
HOW: dict[str, Any] = {"hardware": "cpu-gloo", "outputs": "loss", "optimizer": "none"}


def wide(kind: str = "llama", dtype: torch.dtype = torch.float32) -> zoo_small.Built:
    model, batch = getattr(zoo_small, kind)(dtype=dtype, **WIDE)
    longer = {name: torch.cat([x] * 10) for name, x in batch.items()}  # 480 rows
    return model, {name: x[:40] for name, x in longer.items()}


@pytest.fixture(scope="module")
def squeezed() -> tuple[nn.Module, dict[str, torch.Tensor], autopar.Plan]:
    """Return a plan under two thirds of the memory of the best plan."""
    model, batch = wide()
    ample = autopar.plan(model, 1, example_inputs=batch, **HOW)
    assert ample.loss_rows == 0
    budget = ample.prediction.peak_bytes * 2 // 3
    with pytest.raises(InfeasibleError):
        autopar.plan(
            model,
            1,
            example_inputs=batch,
            memory_bytes=budget,
            loss_rows=0,
            num_microbatches=1,
            **HOW,
        )
    return (
        model,
        batch,
        autopar.plan(
            model, 1, example_inputs=batch, memory_bytes=budget, num_microbatches=1, **HOW
        ),
    )


@pytest.mark.slow
def test_a_loss_by_rows_is_chosen_if_logits_do_not_fit(
    squeezed: tuple[nn.Module, dict[str, torch.Tensor], autopar.Plan],
) -> None:
    model, batch, plan = squeezed
    assert 0 < plan.loss_rows < 480
    assert any("rows of logits" in covered for covered in plan.proof.covers)
    assert f"the loss processes {plan.loss_rows} rows of logits at a time" in str(
        autopar.explain(plan)
    )
    assert autopar.Plan.loads(plan.dumps()) == plan
    assert autopar.verify(plan, model, batch).ok
    assert autopar.check(plan, model, batch).ok


@pytest.mark.slow
def test_a_loss_by_rows_has_the_predicted_peak_and_matches_the_gradients(
    squeezed: tuple[nn.Module, dict[str, torch.Tensor], autopar.Plan],
) -> None:
    model, batch, plan = squeezed
    plain = copy.deepcopy(model)
    module = autopar.compile(model, 1, example_inputs=batch, plan=plan, outputs="loss")
    assert isinstance(module, ParallelModule)
    assert any(
        node.target is torch.ops.aten.mul.out
        for node in module.program.stages[0].backward.graph.nodes
    )
    with LiveBytes() as live:
        gc.collect()
        live.register([*module.parameters(), *module.buffers(), *batch.values()])
        live.reset_peak()
        result = module(**batch)
        (result.loss * 3).backward()
        assert (
            abs(live.peak_bytes - plan.prediction.peak_bytes) <= 0.01 * plan.prediction.peak_bytes
        )
    assert result.logits is None
    expected = plain(**batch).loss
    (expected * 3).backward()
    torch.testing.assert_close(result.loss, expected)
    theirs = dict(plain.named_parameters())
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), theirs[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_loss_by_rows_without_gradients_computes_none(
    squeezed: tuple[nn.Module, dict[str, torch.Tensor], autopar.Plan],
) -> None:
    model, batch, plan = squeezed
    module = autopar.compile(model, 1, example_inputs=batch, plan=plan, outputs="loss")
    with FlopCounterMode(display=False) as trained:
        loss = module(**batch).loss.detach()
    with FlopCounterMode(display=False) as asked, torch.no_grad():
        torch.testing.assert_close(module(**batch).loss, loss)
    product = 2 * 480 * 4096 * 32
    assert trained.get_total_flops() - asked.get_total_flops() == 2 * product


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("mesh", [{"a": 3}, {"a": 2, "b": 2}], ids=str)
def test_each_rank_computes_its_rows_of_the_loss(kind: str, mesh: dict[str, int]) -> None:
    model, batch = getattr(zoo_small, kind)()
    plan = autopar.plan(model, mesh, example_inputs=batch, loss_rows=5, **HOW)
    assert plan.loss_rows == 5
    assert autopar.verify(plan, model, batch).ok
    assert autopar.check(plan, model, batch).ok


@pytest.mark.parametrize("axis", ["stage", ""])
def test_microbatches_and_stages_keep_the_loss_by_rows(axis: str) -> None:
    model, batch = (
        zoo_small.gpt2()
    )  # its head shares the weight of the embedding in the first stage
    force = (pipeline("stage", microbatches=2),) if axis else ()
    mesh = {"stage": 2, "data": 2} if axis else {"data": 2}
    num: Any = "auto" if axis else 2
    plan = autopar.plan(
        model,
        mesh,
        example_inputs=batch,
        loss_rows=4,
        constraints=force,
        num_microbatches=num,
        **HOW,
    )
    assert plan.loss_rows == 4 and plan.pipeline is not None and plan.pipeline.num_microbatches == 2
    assert autopar.verify(plan, model, batch).ok
    assert autopar.check(plan, model, batch).ok


def test_a_plan_with_another_number_of_rows_is_refused() -> None:
    model, batch = zoo_small.llama()
    plan = autopar.plan(model, 2, example_inputs=batch, loss_rows=5, **HOW)
    assert not autopar.check(replace(plan, loss_rows=2), model, batch).ok
    with pytest.raises(PlanError):
        autopar.verify(replace(plan, loss_rows=0), model, batch)


@pytest.mark.slow
def test_an_impossible_loss_by_rows_is_refused() -> None:
    model, batch = zoo_small.llama()
    with pytest.raises(CaptureError, match='outputs="loss"'):
        autopar.plan(model, 2, example_inputs=batch, loss_rows=5, hardware="cpu-gloo")
    with pytest.raises(AutoparError, match="not a number of rows"):
        autopar.plan(model, 2, example_inputs=batch, loss_rows=-1, **HOW)
    with pytest.raises(AutoparError, match="outputs='losses' is not known"):
        autopar.plan(model, 2, example_inputs=batch, outputs="losses", hardware="cpu-gloo")  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError, match='outputs="loss"'):
        autopar.plan(model, 1, example_inputs=batch, memory_bytes=1000, hardware="cpu-gloo")
    plan = autopar.plan(model, 1, example_inputs=batch, loss_rows=5, **HOW)
    with pytest.raises(PlanError, match="made for outputs='loss'"):
        autopar.compile(model, 1, example_inputs=batch, plan=plan, outputs="dtensor")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stages", [1, 2])
def test_with_tensor_parallelism_the_weight_of_a_loss_by_rows_is_replicated(
    tied: bool, stages: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = zoo_small.gpt2(tie_word_embeddings=tied)
    mesh = {"stage": 2, "tensor": 2} if stages == 2 else {"tensor": 2}
    asked = megatron(tp=2, pp=stages, microbatches=2 if stages == 2 else None)
    how: dict[str, Any] = {"hardware": "h100-sxm", "outputs": "loss", "constraints": (asked,)}
    plan = autopar.plan(model, autopar.Mesh(mesh), example_inputs=batch, loss_rows=2, **how)
    assert plan.loss_rows == 2
    assert (
        "replicates the weight of a loss by rows" in caplog.text
        and "lm_head/linear_cross_entropy" in caplog.text
    )
    parts = plan.stages
    rest = {
        n.node: str(n.strategy)
        for part in parts
        for e in part.entries
        if e.kind == "parameter"
        for n in e.nodes
    }
    assert rest["transformer.wte.weight/parameter"] == ("R -> R" if tied else "S(0) -> S(0)")
    assert tied or rest["lm_head.weight/parameter"] == "R -> R"
    assert rest["transformer.h.{0}.mlp.c_fc.weight/parameter"].endswith("S(1)")
    assert autopar.verify(plan, model, batch).ok and autopar.check(plan, model, batch).ok
