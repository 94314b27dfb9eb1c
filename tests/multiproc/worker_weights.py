"""Run by any number of processes: load weights from files and save them again under any
sharding."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from hosts import quick_hosts

import autopar
from autopar.checkpoint import weights
from autopar.errors import RuntimeStateError
from benchmarks.zoo import build

PLANS = {
    "tensor parallel": ((autopar.constraints.tensor_parallel("1d", axes="gpu"),), {"gpu": 2}),
    "fully sharded": ((autopar.constraints.fsdp(axes=("a", "b")),), {"a": 2, "b": 2}),
    "both": ((autopar.constraints.megatron(tp=2, dp=2, zero=3),), {"dp": 2, "tp": 2}),
    "stages": ((autopar.constraints.pipeline("gpu", microbatches=2),), {"gpu": 2}),
    "uneven": ((autopar.constraints.fsdp(axes="gpu"),), {"gpu": 3}),
    "on hosts": ((autopar.constraints.layout("*", storage="S(0) host"),), {"gpu": 2}),
}


def there_and_back(rank: int, plan: str, theirs: str, ours: str) -> dict[str, Any]:
    """Weights of a file into a module without any; what was read, what came out, and the loss."""
    constraints, mesh = PLANS[plan]
    with autopar.weights_on_meta():
        model, _ = build(
            "gpt2"
        )  # its projections are fused, so that parts of one are several boxes, and its head is tied
    _, batch = build("gpt2")
    options: dict[str, Any] = {
        "hardware": quick_hosts(),
        "outputs": "loss",
        "constraints": constraints,
    }
    module: Any = autopar.compile(model, autopar.Mesh(mesh), example_inputs=batch, **options)
    numbers: list[int] = []
    plain = weights.WeightFiles.read

    def counted(self: weights.WeightFiles, pieces: Any) -> None:
        pieces = list(pieces)
        numbers.append(sum(piece.target.numel() for piece in pieces))
        plain(self, pieces)

    weights.WeightFiles.read = counted  # type: ignore[method-assign]
    autopar.load_weights(module, theirs)
    held = {id(p): p.to_local().numel() for p in module.parameters()} | {
        id(b): b.numel() for b in module.buffers()
    }
    autopar.save_weights(module, ours, max_file_bytes=20_000)
    whole = sum(p.numel() for p in model.parameters())
    on_hosts = any(
        t.layout.host
        for s in getattr(module.program, "stages", (module.program,))
        for t in s.parameters
    )
    return {
        "read": numbers[0],
        "held": sum(held.values()),
        "all": whole,
        "loss": module(**batch).loss.item(),
        "hosts": on_hosts,
    }


def refused(rank: int, folder: str) -> list[str]:
    """Return the error of each rank for weights that do not fit one stage, and for a folder that
    is a file."""
    model, batch = build("gpt2")
    stages = (autopar.constraints.pipeline("gpu", microbatches=2),)
    module: Any = autopar.compile(
        model,
        autopar.Mesh({"gpu": 2}),
        example_inputs=batch,
        hardware="cpu-gloo",
        constraints=stages,
    )
    said = []
    for action in (
        lambda: autopar.load_weights(module, folder),
        lambda: autopar.save_weights(module, f"{folder}/model.safetensors"),
    ):
        try:
            action()
        except RuntimeStateError as error:
            said.append(str(error))
        dist.barrier()
    return said
