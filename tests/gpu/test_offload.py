"""Offloading to the host on a GPU: copies are correct and overlapped, and training matches the
plain model."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo_small
from hosts import quick_hosts
from native import needs_gpu
from torch.distributed.tensor import DTensor

import autopar
from autopar.constraints import offload
from autopar.core.mesh import Mesh
from autopar.kernels import host

pytestmark = [pytest.mark.gpu, needs_gpu]
ONE = Mesh.parse("d=1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_stored_and_fetched_tensors_are_correct_if_their_memory_is_reused(
    dtype: torch.dtype,
) -> None:
    for num in (1, 1000, 1 << 24):
        x = torch.arange(num, device="cuda").to(dtype)
        expected = x.clone()
        started = host.start_store(x, "cuda")
        stored = host.finish_store(started, "cuda")
        x.zero_()  # the current stream has waited for the copy
        fetched = host.fetch(stored, "cuda")
        del stored
        torch.empty(num, dtype=dtype, pin_memory=True).fill_(1)
        assert torch.equal(fetched, expected) and host.is_on_host(host.store(expected, "cuda"))


def test_training_with_offload_matches_the_plain_model_with_less_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, batch = zoo_small.gpt2(num_layers=4)
    plain, batch = copy.deepcopy(model).cuda(), {name: x.cuda() for name, x in batch.items()}
    free = autopar.plan(model, ONE, example_inputs=batch, hardware=quick_hosts())
    within = int(0.5 * free.prediction.peak_bytes)
    plan = autopar.plan(
        model,
        ONE,
        example_inputs=batch,
        hardware=quick_hosts(),
        constraints=(offload(),),
        memory_bytes=within,
    )
    assert {"parameters", "activations"} <= plan.prediction.host_bytes.keys()
    ours = autopar.compile(model.cuda(), ONE, example_inputs=batch, plan=plan)
    there = [p for p in ours.parameters() if isinstance(p, DTensor) and not p.to_local().is_cuda]
    assert there and all(p.to_local().is_pinned() for p in there)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (ours, plain)]
    left = []  # device memory after each step, in bytes
    for _ in range(5):
        losses = [m(**batch).loss for m in (ours, plain)]
        for loss in losses:
            loss.backward()
        norms = [ours.clip_grad_norm_(0.5), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)]
        torch.testing.assert_close(losses[0].detach(), losses[1].detach(), rtol=1e-5, atol=0)
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=0)
        assert all(p.grad is not None and not p.grad.to_local().is_cuda for p in there)
        del losses, norms
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        left.append(torch.cuda.memory_allocated())
    assert len(set(left[1:])) == 1, "gradients are freed"
    assert not [r for r in caplog.records if "gathers the full tensors" in r.getMessage()], (
        "parameters on the host are updated on the host"
    )
