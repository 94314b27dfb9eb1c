"""Run by any number of processes: the state of a compiled module as plain tensors, and errors of
pickling its shards."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch
from hosts import quick_hosts

import autopar
from autopar.errors import RuntimeStateError
from benchmarks.zoo import build

PLANS: dict[str, tuple[Any, dict[str, int]]] = {
    "replicated": ((autopar.constraints.ddp(),), {"gpu": 2}),
    "tensor parallel": ((autopar.constraints.tensor_parallel("1d", axes="gpu"),), {"gpu": 2}),
    "stages": ((autopar.constraints.pipeline("gpu", microbatches=2),), {"gpu": 2}),
    "uneven": ((autopar.constraints.fsdp(axes="gpu"),), {"gpu": 3}),
    "on hosts": ((autopar.constraints.layout("*", storage="S(0) host"),), {"gpu": 2}),
}


def train(module: Any, batch: Any) -> torch.optim.Optimizer:
    """Run two steps."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(2):
        module(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def whole(rank: int, plan: str) -> dict[str, Any]:
    """What comes out of a trained module, against the plain model; and what saving its parts
    ends in."""
    constraints, mesh = PLANS[plan]
    plain, batch = build(
        "gpt2"
    )  # its projections are fused, so that parts of one are several boxes, and its head is tied
    fresh, _ = build("gpt2")
    options: dict[str, Any] = {
        "hardware": quick_hosts(),
        "outputs": "loss",
        "constraints": constraints,
    }
    module: Any = autopar.compile(plain, autopar.Mesh(mesh), example_inputs=batch, **options)
    optimizer = train(module, batch)
    state = module.full_state_dict()
    first = module.full_state_dict(rank0_only=True)
    same = first.keys() == (state.keys() if rank == 0 else set()) and all(
        torch.equal(x, state[name]) for name, x in first.items()
    )
    with torch.no_grad():
        next(iter(module.parameters())).add_(1)  # the state is a copy
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    train(plain, batch)
    pairs = zip(fresh.named_parameters(), plain.parameters(), strict=True)
    return {
        "plain": {type(x) for x in state.values()} == {torch.Tensor}
        and {x.device.type for x in state.values()} == {"cpu"},
        "names": list(state) and set(state) == set(plain.state_dict()),
        "apart": max((mine - its).abs().max().item() for (_, mine), its in pairs),
        "first": same,
        "saved": saved(lambda: torch.save(module.state_dict(), io.BytesIO())),
        "pickled": saved(lambda: pickle.dumps(dict(module.state_dict()))),
        "safetensors": saved(lambda: safetensors.torch.save(module.state_dict())),
        "optimizer": saved(lambda: torch.save({"optimizer": optimizer.state_dict()}, io.BytesIO())),
    }


def replicated(rank: int) -> float:
    """Where every rank has the whole of each tensor, `torch.save` writes plain ones: how far
    what is loaded is from the module."""
    model, batch = build("gpt2")
    constraints, mesh = PLANS["replicated"]
    options: dict[str, Any] = {
        "hardware": quick_hosts(),
        "outputs": "loss",
        "constraints": constraints,
    }
    module: Any = autopar.compile(model, autopar.Mesh(mesh), example_inputs=batch, **options)
    optimizer = train(module, batch)
    file = io.BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    fresh, _ = build("gpt2")
    fresh.load_state_dict(found["model"])
    torch.optim.AdamW(fresh.parameters()).load_state_dict(found["optimizer"])
    return (fresh(**batch).loss - module(**batch).loss).abs().item()


def saved(action: Callable[[], object]) -> str:
    """Return the error, or an empty string."""
    try:
        action()
    except RuntimeStateError as error:
        return str(error)
    return ""
