"""Optimizers are checked at their first step with a distributed parameter."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from autopar.errors import RuntimeStateError
from autopar.runtime import dtensor as taken
from autopar.runtime.device_mesh import wrap_local
from autopar.runtime.dtensor import hold_value
from autopar.runtime.optimizers import Steps, watch_optimizers

SHAPE = (3, 4)


@contextmanager
def without_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def on_the_host(value: float) -> Tensor:
    """Return a tensor in host memory that is distributed over a GPU mesh."""
    gpus = DeviceMesh("cuda", torch.arange(1), mesh_dim_names=("d",), _init_backend=False, _rank=0)
    made: Tensor = hold_value(
        wrap_local(torch.full(SHAPE, value), gpus, [Shard(0)], SHAPE, (SHAPE[1], 1))
    )
    return made


def test_an_optimizer_is_checked_when_it_gets_distributed_parameters_later() -> None:
    early, late = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([early], lr=0.1, fused=True)
    early.grad = torch.ones(2)
    optimizer.step()
    watch_optimizers([late], Steps())
    late.grad = torch.ones(2)
    optimizer.add_param_group({"params": [late]})
    with pytest.raises(
        RuntimeStateError,
        match=r"torch\.optim\.SGD\(fused=True\) does not work on distributed parameters",
    ):
        optimizer.step()


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_fused_steps_without_a_dtensor_rule_are_refused(name: str) -> None:
    held = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    watch_optimizers(held, Steps())
    for p in held:
        p.grad = torch.ones(2)
    with pytest.raises(
        RuntimeStateError,
        match=rf"torch\.optim\.{name}\(fused=True\) does not work on distributed parameters",
    ):
        getattr(torch.optim, name)(held[:1], lr=0.1, fused=True).step()
    getattr(torch.optim, name)(held[:1], lr=0.1).step()
    torch.optim.AdamW(held[1:], lr=0.1, fused=True).step()
    assert all((p < 1.0).all() for p in held)


def test_parameters_in_host_memory_are_stepped_on_the_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, plain = nn.Parameter(on_the_host(1.0)), nn.Parameter(torch.ones(SHAPE))
    optimizers = [torch.optim.AdamW([p], lr=0.1, fused=True) for p in (ours, plain)]
    for _ in range(3):
        ours.grad, plain.grad = on_the_host(0.5), torch.full(SHAPE, 0.5)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours.detach().to_local(), plain.detach())  # type: ignore[attr-defined]
    assert not caplog.records, "nothing was gathered whole"


def test_a_step_on_full_tensors_keeps_no_reference_to_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    through = taken._call_disabled

    def refusing(func: object, types: object, args: tuple[object, ...], kwargs: object) -> object:
        if func is torch._fused_adamw_:
            through(
                func, types, (*args[:5], [], *args[6:]), kwargs
            )  # the step count of each parameter is missing
        return through(func, types, args, kwargs)

    monkeypatch.setattr(taken, "_call_disabled", refusing)
    parameter = nn.Parameter(on_the_host(1.0))
    parameter.grad = on_the_host(0.5)
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    gradient = weakref.ref(parameter.grad.to_local())  # type: ignore[attr-defined]
    with without_collection():
        optimizer.step()
        optimizer.zero_grad()
        assert gradient() is None
    assert (parameter.detach().to_local() < 1.0).all()  # type: ignore[attr-defined]
